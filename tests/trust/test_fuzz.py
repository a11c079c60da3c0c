"""Fuzzed bytes for every parser of outside input: a right answer or a refusal by name."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import hostile_catalog
import hostile_formats
import pytest
from hostile_child import Nursery
from hostile_fuzz import spoilt

import softdb

pytest_plugins = ["hostile_world"]

RIGHT = json.loads(json.dumps([list(record) for record in hostile_catalog.RECORDS if record[0] != "gone"]))


def judge(told: Any) -> str:
    """Fault of an answer: records are lost or changed, and `verify` has not noticed."""
    if not told["sound"] or told["held"] == RIGHT:
        return ""
    return f"verify finds nothing, but it holds {told['held']}"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), *(pytest.param(seed, 500, marks=pytest.mark.exhaustive) for seed in range(1, 11))]
)
@pytest.mark.parametrize("source", ["good", "compacted", "logged"])
def test_a_spoilt_catalogue_is_refused_or_right(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, source: str, seed: int, count: int, tally: Counter[str]
) -> None:
    name = "catalog.sqlite-wal" if source == "logged" else "catalog.sqlite"
    data = (goods[source] / name).read_bytes()
    for i in range(count // 3):
        path, draw = tmp_path / "db", random.Random(f"{source} {seed} {i}")
        shutil.copytree(goods[source], path)
        (path / name).write_bytes(spoilt(draw, data))
        mode = draw.choice([("r", False), ("rw", False), ("rw", True)])
        ended = asked.run("hostile_child:explore", path, *mode)
        tally["fuzz: inputs"] += 1
        tally["fuzz: crashes"] += not ended.decent
        assert ended.decent, f"{source}, seed {seed}, input {i}, {mode}: {ended}"
        if ended.how == "fine":
            assert not judge(ended.told), f"{source}, seed {seed}, input {i}, {mode}: {judge(ended.told)}"
        shutil.rmtree(path)
        shutil.rmtree(tmp_path / "db copy", ignore_errors=True)


def test_surplus_entries_of_an_index_are_found(goods: dict[str, Path], tmp_path: Path) -> None:
    """SQLite counts no entries of an index that has a condition."""
    path = shutil.copytree(goods["good"], tmp_path / "db")
    catalogue = path / "catalog.sqlite"
    connection = apsw.Connection(str(catalogue))
    pages = dict(connection.execute("SELECT name, rootpage FROM sqlite_schema"))
    connection.close()
    data = bytearray(catalogue.read_bytes())
    source, target = (4096 * (int(pages[name]) - 1) for name in ("field_78", "keyless"))
    data[target : target + 4096] = data[source : source + 4096]
    catalogue.write_bytes(data)
    with softdb.open(path) as db, pytest.raises(softdb.CorruptionError, match="index of records without a key"):
        db.verify()


QUICK = {"arrays": 400, "entries": 200, "lines": 200, "wheres": 200, "commands": 30}
FULL = {"arrays": 1500, "entries": 1000, "lines": 600, "wheres": 1000, "commands": 150}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 5))])
@pytest.mark.parametrize("parser", QUICK)
def test_fuzzed_input_is_accepted_or_refused_by_name(
    asked: Nursery, tmp_path: Path, parser: str, seed: int, tally: Counter[str]
) -> None:
    count = FULL[parser] if seed else QUICK[parser]
    ended = asked.run(f"hostile_fuzz:{parser}", seed, count, tmp_path, seconds=600)
    tally["fuzz: inputs"] += count
    tally["fuzz: crashes"] += not ended.decent or len(ended.told)
    assert ended.how == "fine", ended
    assert ended.told == [], "\n".join(ended.told[:10])


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 500), *(pytest.param(seed, 500, marks=pytest.mark.exhaustive) for seed in range(1, 41))]
)
def test_a_changed_file_is_imported_or_refused(
    asked: Nursery, tmp_path: Path, seed: int, count: int, tally: Counter[str]
) -> None:
    """Those kinds may crash whose own process ends with them; all others may not."""
    good, first, crashes = hostile_formats.samples(tmp_path / "good"), 0, []
    while first < count:
        ended = asked.run("hostile_formats:sample", seed, first, count, tmp_path, seconds=600)
        if ended.how == "fine":
            assert ended.told == [], "\n".join(ended.told[:10])
            break
        at = int((tmp_path / "at").read_text())
        crashes.append(f"seed {seed}, input {at}, {good[at % len(good)].name}: {ended}")
        assert good[at % len(good)].suffix[1:] in hostile_formats.GUARDED, crashes[-1]
        assert ended.how.startswith(("signal", "hang")), crashes[-1]
        first = at + 1
    tally["fuzz: changed files of imports"] += count
    tally["fuzz: ends of a process of a reader"] += len(crashes)
