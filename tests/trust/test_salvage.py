"""Salvage copies every intact record of a damaged database into a new one, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from oracle import differences, held
from rot_intact import Slots, intact, pages_of, salvaged, slots_of, wrong
from rot_worlds import Damage, World, coarse, copied, files_of, flips, make
from typer.testing import CliRunner

import softdb
from softdb.tools.cli.commands import app

SEED = 11
GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ["plain", "compacted", "logged"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the worlds."""
    folder = tmp_path_factory.mktemp("worlds")
    for name in NAMES:
        make(name, folder / f"{name}-other", seed=1)
    return folder


@pytest.fixture(scope="module")
def worlds(made: Path) -> dict[str, World]:
    return {name: make(name, made / name) for name in NAMES}


@pytest.fixture(scope="module")
def places(worlds: dict[str, World], made: Path) -> dict[str, tuple[dict[Any, set[int]], Slots]]:
    """Location of the records of each world."""
    found = {}
    for name, world in worlds.items():
        shutil.copytree(world.path, made / "looked-at")
        found[name] = pages_of(world), slots_of(world, made / "looked-at")
        shutil.rmtree(made / "looked-at")
    return found


def words_of(world: World) -> dict[str, Any]:
    return {"dtype": "float32", "metric": "dot", **world.schema}


@pytest.mark.parametrize("name", NAMES)
def test_an_undamaged_database_is_copied_completely(worlds: dict[str, World], name: str, tmp_path: Path) -> None:
    world = worlds[name]
    report, actual = salvaged(world.path, tmp_path / "saved", world)
    assert list(actual) == list(world.state)
    assert differences(actual, world.state) == ""
    assert (report["lost"], report["unconfirmed"], report["notes"]) == ([], [], [])
    with softdb.open(tmp_path / "saved") as db:
        assert db.stats().fields == (["kind", "n"] if name == "plain" else [])
        db.upsert(["after"], np.ones((1, 3)), [[1] * 3] if name == "logged" else [0] if name == "compacted" else None)
    assert not [file for file in os.listdir(tmp_path / "saved") if file.startswith(".softdb-")]


@pytest.mark.parametrize("name", sorted(path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*/db")))
def test_each_format_is_copied_completely(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name / "db", tmp_path / "opened")
    shutil.copytree(GOLDEN / name / "db", tmp_path / "damaged")
    with softdb.open(tmp_path / "opened") as db:
        expected = held(db)
    softdb.salvage(tmp_path / "damaged", tmp_path / "saved")
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert list(actual := held(db)) == list(expected)
        assert differences(actual, expected) == ""


CASES = [(name, file) for name, files in {
    "plain": ["catalog.sqlite", "committed", "keys", "lock"],
    "compacted": ["catalog.sqlite", "keys", "rows", "values"],
    "logged": ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "keys", "values"],
}.items() for file in files]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "count", [pytest.param(None, id="full", marks=pytest.mark.exhaustive), pytest.param(8, id="quick")]
)
@pytest.mark.parametrize(("name", "prefix"), CASES)
def test_salvage_gives_the_intact_records_and_no_other(
    worlds: dict[str, World],
    places: dict[str, tuple[dict[Any, set[int]], Slots]],
    made: Path,
    name: str,
    prefix: str,
    count: int | None,
    tmp_path: Path,
    tally: Counter[str],
) -> None:
    world = worlds[name]
    exact = [file for file in files_of(world) if file == prefix]
    for file in exact or [file for file in files_of(world) if file.startswith(prefix)]:
        size = (world.path / file).stat().st_size
        rng = np.random.default_rng([SEED, zlib.crc32(file.encode())])
        whole = list(coarse(file, size))
        if count is not None:
            whole = [whole[i] for i in sorted(rng.choice(len(whole), min(len(whole), count), replace=False))]
        for damage in [*whole, *flips(file, size, rng, count)]:
            if copied(world, damage, made / f"{name}-other", tmp_path / "db"):
                tally["salvage: damages tried"] += 1
                try:
                    salvage_one(world, places[name], damage, tmp_path, tally)
                except Exception as error:
                    pytest.fail(f"{name}, {damage}: {type(error).__name__}: {error}")


def salvage_one(
    world: World, places: tuple[dict[Any, set[int]], Slots], damage: Damage, tmp_path: Path, tally: Counter[str]
) -> None:
    """Hold a salvage against what must come of it."""
    path, to = tmp_path / "db", tmp_path / "saved"
    shutil.rmtree(to, ignore_errors=True)
    if damage.file == "catalog.sqlite" and (damage.kind in ("delete", "stranger") or damage.size > 4096):
        with contextlib.suppress(softdb.NotADatabase, softdb.CorruptionError):
            report, actual = salvaged(path, to, world, **words_of(world))
            assert wrong(actual, world, report["unconfirmed"]) == ""
        return
    words = words_of(world) if damage.file == "catalog.sqlite" else {}
    try:
        report, actual = salvaged(path, to, world, **words)
    except softdb.CorruptionError:
        assert damage.file == "catalog.sqlite"
        assert not intact(world, path, *places)
        return
    told = wrong(actual, world, [])
    if damage.file == "catalog.sqlite-wal":
        states = [differences(actual, state) == "" for state in world.states]
        assert any(states), f"{report}"
        assert states[-1] or any("generations are missing" in note for note in report["notes"])
        return
    if damage.kind == "swap" or damage.file.startswith("rows"):
        expected = set(world.state)
    else:
        expected = intact(world, path, *places)
    tally["salvage: records that were never so"] += bool(told)
    assert told == ""
    assert not expected - set(actual), f"intact, but not saved: {expected - set(actual)}; {report}"
    lost, told = {one["id"] for one in report["lost"]}, " ".join(one["why"] for one in report["lost"])
    unnamed = {one for one in set(world.state) - set(actual) - lost if apsw.format_sql_value(one) not in told}
    assert not unnamed or report["notes"], f"lost, and not named: {unnamed}"


def test_the_command_lists_the_losses(worlds: dict[str, World], tmp_path: Path) -> None:
    world = worlds["plain"]
    shutil.copytree(world.path, tmp_path / "db")
    Damage("keys-00000000.npy", "flip", 128 + 12 * 12, 1).do(tmp_path / "db", world.path)
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "db")])
    assert (run.exit_code, "keys-00000000.npy: row 12 differs" in run.output) == (1, True)
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "db"), "--repair", str(tmp_path / "saved")])
    assert run.exit_code == 0, run.output
    assert f"{len(world.state) - 1} records saved" in run.stdout
    assert "12   12  keys-00000000.npy: its key is not there as it was written" in run.stdout
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "saved")]).stdout.startswith("ok: 37 records")
    with softdb.open(tmp_path / "saved", mode="r") as db:
        assert db.encoder_name == "ngrams"
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "db"), "--repair", str(tmp_path / "again"), "--json"])
    assert json.loads(run.stdout)["lost"][0]["id"] == 12
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "db"), "--dim", "3"])
    assert (run.exit_code, "other settings go with --repair" in run.output) == (1, True)
