"""Bit rot: a damaged database gives its old answers or names the damage."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import differences, held
from rot_worlds import KINDS, Damage, World, answers, coarse, copied, files_of, flips, make, same
from worlds import holding

import softdb

SEED = 7


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[World, Path]]:
    """Each kind of database, and the directory of another one of its kind."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("worlds")
        patch.setenv("SOFTDB_KEY_FILE", str(tmp_path_factory.getbasetemp() / "index.key"))
        for name in KINDS:
            make(name, folder / f"{name}-other", seed=1)
            made[name] = make(name, folder / name), folder / f"{name}-other"
    return made


def named(damage: Damage, error: softdb.SoftDBError) -> bool:
    """Return whether an error names the file; a damaged catalogue may name a missing one."""
    told, kind = str(error), damage.file.partition("-")[0]
    if kind.startswith("catalog"):
        return "catalog.sqlite" in told or ".npy" in told
    if kind == "rows" and "impossible segment" in told:
        return True  # see test_a_damaged_column_of_rows_is_named_at_opening
    return (f"{kind}-" if damage.kind == "swap" else damage.file) in told


def examine(path: Path, world: World, damage: Damage, mode: str, verify: bool) -> str:
    """Open and ask: "refused", by opening with the file's name, "same", or how it differs."""
    try:
        db = softdb.open(path, mode=mode, verify=verify)  # type: ignore[arg-type]
    except softdb.SoftDBError as error:
        return "refused" if named(damage, error) else f"refused without the file's name: {error}"
    with db:
        try:
            return same(held(db), answers(db), world) or "same"
        except softdb.SoftDBError as error:
            return f"sound, but {error}" if verify else "refused"
        except AssertionError as error:
            return str(error)


def judge(world: World, other: Path, damage: Damage, to: Path, tally: Counter[str], whole: bool) -> str:
    """Open a damaged copy, in every way if `whole`. Raise AssertionError if it misleads."""
    if not copied(world, damage, other, to):
        return "no damage"
    tally["bit rot: damages tried"] += 1
    verified = examine(to, world, damage, "r", True)
    read = written = again = verified
    if whole or damage.at % 3 == 0:
        read = examine(to, world, damage, "r", False)
    if whole or damage.at % 3 == 1:
        written = examine(to, world, damage, "rw", False)
        again = examine(to, world, damage, "rw", True)  # a writer must not have hidden anything
    said = {"verified": verified, "read": read, "written": written, "verified again": again}
    wrong = {verified, again} - {"same", "refused"}
    tally["bit rot: misread"] += any(not one.startswith("refused") for one in wrong)
    assert not wrong, f"{said}"
    assert "same" not in (verified, again) or {read, written} == {"same"}, f"{said}"
    return verified


CASES = [(name, file) for name, files in {
    "plain": ["catalog.sqlite", "committed", "keys", "lock"],
    "indexed": ["index"],
    "compacted": ["catalog.sqlite", "keys", "rows", "values"],
    "logged": ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "committed", "values"],
}.items() for file in files]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "count", [pytest.param(None, id="full", marks=pytest.mark.exhaustive), pytest.param(6, id="quick")]
)
@pytest.mark.parametrize(("name", "prefix"), CASES)
def test_a_damaged_file_is_named_never_misread(
    worlds: dict[str, tuple[World, Path]],
    name: str,
    prefix: str,
    count: int | None,
    tmp_path: Path,
    tally: Counter[str],
) -> None:
    world, other = worlds[name]
    exact = [file for file in files_of(world) if file == prefix]
    files = exact or [file for file in files_of(world) if file.startswith(prefix)]
    assert files, f"{name} has no {prefix}"
    refused = 0
    for file in files:
        size = (world.path / file).stat().st_size
        rng = np.random.default_rng([SEED, zlib.crc32(f"{name} {prefix}".encode())])
        rough = list(coarse(file, size))
        if count is not None:
            rough = [rough[i] for i in sorted(rng.choice(len(rough), min(len(rough), count), replace=False))]
        for damage in [*rough, *flips(file, size, rng, count)]:
            whole = count is not None or damage.kind != "flip"
            try:
                refused += judge(world, other, damage, tmp_path / "db", tally, whole) == "refused"
            except Exception as error:
                pytest.fail(f"{name}, {damage}: {type(error).__name__}: {error}")
    cache = prefix in ("index", "committed", "lock", "catalog.sqlite-shm")
    assert bool(refused) is not cache, f"{refused} of {name}/{prefix}"


def test_rot_between_verifies_goes_unseen_and_is_found_on_reopening(
    worlds: dict[str, tuple[World, Path]], tmp_path: Path
) -> None:
    """Damage that docs/limits.md excludes from the promise."""
    world, other = worlds["logged"]
    copied(world, Damage("lock", "append"), other, tmp_path / "db")
    with softdb.open(tmp_path / "db", mode="r", verify=True) as db:
        Damage("keys-00000000.npy", "flip", 128 + 12 * 12 + 2, 64).do(tmp_path / "db", other)
        assert differences(held(db), world.state) == "1 changed: [12]"
        with pytest.raises(softdb.CorruptionError, match=r"keys-00000000\.npy: row 12 differs from its checksum"):
            db.verify()
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert len(db.search(world.state[12].key[None], k=3).ids[0]) == 3
    with pytest.raises(softdb.CorruptionError, match=r"keys-00000000\.npy: row 12 differs from its checksum"):
        softdb.open(tmp_path / "db", mode="r", verify=True)


def test_truncation_under_a_live_map_may_kill_and_is_named_on_reopening(
    worlds: dict[str, tuple[World, Path]], tmp_path: Path
) -> None:
    world, other = worlds["plain"]
    copied(world, Damage("lock", "append"), other, tmp_path / "db")
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            db = softdb.open(tmp_path / "db", mode="r")
            Damage("keys-00000000.npy", "cut", 0).do(tmp_path / "db", other)
            db._store.snapshot.segments[0].keys.sum()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGBUS
    for verify in (False, True):
        with pytest.raises(softdb.CorruptionError, match=r"keys-00000000\.npy has 0 bytes"):
            softdb.open(tmp_path / "db", mode="r", verify=verify)


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_a_schema_of_no_unicode_is_named(worlds: dict[str, tuple[World, Path]], tmp_path: Path, mode: Any) -> None:
    world, other = worlds["plain"]
    at = (world.path / "catalog.sqlite").read_bytes().index(b"json_type(payload")  # of an index of a field
    copied(world, Damage("catalog.sqlite", "flip", at, 128), other, tmp_path / "db")
    with pytest.raises(softdb.CorruptionError, match=r"catalog\.sqlite"):
        softdb.open(tmp_path / "db", mode=mode)


@pytest.mark.parametrize("at", [224, 393])  # of an entry between, of the last one
def test_a_damaged_column_of_rows_is_named_at_opening(
    worlds: dict[str, tuple[World, Path]], tmp_path: Path, at: int
) -> None:
    world, other = worlds["compacted"]
    copied(world, Damage("rows-00000001.npy", "flip", at, 1), other, tmp_path / "db")
    with pytest.raises(softdb.CorruptionError, match=r"rows-00000001\.npy"):
        softdb.open(tmp_path / "db", mode="r")


def attended(path: Path, count: int, how: dict[str, Any], labels: bytes, *, late: bool) -> int:
    """Exit of a child that attends over damaged labels, damaged before or after opening.

    0: with a typed error, 1: with an answer, 2: with another error; -11: by a signal.
    """
    child = os.fork()
    if child == 0:
        code = 2
        with contextlib.suppress(Exception):
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            torch.set_num_threads(1)
            with (path / "values-00000000.npy").open("r+b") as file, contextlib.ExitStack() as opened:
                file.seek(128)
                try:
                    db = opened.enter_context(softdb.open(path, mode="r")) if late else None
                    file.write(labels)
                    file.flush()
                    db = opened.enter_context(softdb.open(path, mode="r")) if db is None else db
                    db.attend(np.zeros((count, 3), np.float32), **how)
                    code = 1
                except softdb.SoftDBError:
                    code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.few(1)
@pytest.mark.parametrize(("count", "queries", "how"), [(40, 3, {}), (20_000, 64, {}), (20_000, 64, {"rtol": 0.1})])
def test_a_label_that_no_class_has_is_named(tmp_path: Path, count: int, queries: int, how: dict[str, Any]) -> None:
    """Neither a hostile database nor rot may cause writes to foreign memory."""
    keys, labels = np.random.default_rng(0).standard_normal((count, 3)), np.zeros(count, np.int64)
    holding(keys, labels, path=tmp_path / "db", num_classes=5).close()
    wild = np.full(count, 1 << 30, "<i4").tobytes()
    assert attended(tmp_path / "db", queries, how, bytes(4 * count), late=True) == 1
    assert attended(tmp_path / "db", queries, how, wild, late=True) >= 0  # whatever it says, no signal
    assert attended(tmp_path / "db", queries, how, wild, late=False) == 0
