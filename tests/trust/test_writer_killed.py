"""Writers killed at every step: acknowledged records are there, and no batch is there in part."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import WHEN, Kill, Nursery, Order, Seeded
from kill_rounds import Life, examine, stocked
from kill_verbs import (
    RICH,
    SCHEMAS,
    Act,
    Maker,
    compact,
    delete,
    delete_where,
    field,
    index,
    insert,
    reembed,
    reopen,
    search,
    snapshot,
    update,
    upsert,
)
from oracle import State

import softdb

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if possible: a kill leaves the same there as on a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="softdb-kill-") as made:
        yield Path(made)


@dataclass(frozen=True)
class Tour:
    """Acts in a fixed order, by the names of their makers, that together pass every step that softdb has."""

    name: str
    records: int  # that are there before

    def __call__(self, n: int, state: State) -> Act:
        return TOURS[self.name][n](np.random.default_rng((3, n)), SCHEMAS[0], n, state)


TOURS: dict[str, list[Maker]] = {
    "life": [
        insert, insert, upsert, update, field, update, delete, compact, snapshot, upsert, insert, delete_where, compact,
        reopen, upsert, field, delete, compact, insert,
    ],
    "index": [index, upsert, index, delete, snapshot, compact, search, reopen],
    "reembed": [
        insert, insert, delete, reembed, insert, update, upsert, reembed, delete, compact, update, reembed, reopen,
        insert,
    ],
}  # fmt: skip


def steps(nursery: Nursery, room: Path, tour: Tour) -> list[str]:
    """The steps of a tour, in order."""
    order = ready(room / "whole", tour)
    order.watch = True
    told = nursery.run(order)
    assert not told.killed
    assert told.done == len(TOURS[tour.name])
    return told.steps


def ready(folder: Path, tour: Tour) -> Order:
    """A tour at its beginning."""
    path = folder / "db"
    folder.mkdir()
    state = stocked(path, SCHEMAS[0], tour.records) if tour.records else {}
    return Order(path, SCHEMAS[0], state, tour, 0, len(TOURS[tour.name]), pages=40)


def chosen(points: list[str], which: str, tour: Tour) -> list[tuple[str, int]]:
    """Every step, for each name one of them, or a few of these: the name and how many of that name come before."""
    numbered = [(name, points[:i].count(name)) for i, name in enumerate(points)]
    if which == "every" and tour.name != "index":
        return numbered
    if which == "every":  # other names are struck as in the other tour: at their first and last step
        last = {name: (name, points.count(name) - 1) for name in points}
        return [one for one in numbered if one[0].endswith(" index") or one[1] == 0 or one == last[one[0]]]
    random = np.random.default_rng(5)
    part = {"life": "", "index": " index", "reembed": " gathered"}[tour.name]
    names = sorted({point for point in points if part in point})
    some = [(name, int(random.integers(points.count(name)))) for name in names]
    return some if which == "each name" else some[::6]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "which", ["a few", pytest.param("each name", marks=pytest.mark.slow), pytest.param("every", marks=EXHAUSTIVE)]
)
@pytest.mark.parametrize(
    "tour", [Tour("life", 0), Tour("index", RICH + 100), Tour("reembed", 0)], ids=lambda tour: tour.name
)
def test_killed_at_each_step_before_it_in_its_middle_and_after_it(
    nursery: Nursery, room: Path, tally: Counter[str], tour: Tour, which: str
) -> None:
    some = chosen(steps(nursery, room, tour), which, tour)
    begin, hit = ready(room / "begin", tour), set()
    for name, nth in some:
        for when in WHEN if name.startswith("write") else ("before", "after"):
            shutil.copytree(begin.path.parent, room / "now")
            order = Order(**{**vars(begin), "path": room / "now" / "db", "kill": Kill(when, nth, name)})
            actual = nursery.run(order)
            if actual.killed:  # the log of the catalogue may be a page shorter in another run: an index tells its times
                assert actual.steps == [name]
                hit.add((name, when))
            tally["kills: fail points"] += actual.killed
            examine(order, actual, tally)
            shutil.rmtree(room / "now")
    writes = {(name, "half") for name, _ in some if name.startswith("write")}
    assert hit == writes | {(name, when) for name, _ in some for when in ("before", "after")}


@pytest.mark.slow
def test_the_tours_pass_every_kind_of_step(nursery: Nursery, room: Path) -> None:
    points: set[str] = set()
    for name in TOURS:
        (room / name).mkdir()
        points |= set(steps(nursery, room / name, Tour(name, RICH + 100 if name == "index" else 0)))
    columns = {f"{verb} {file}" for verb in ("create", "write", "sync") for file in ("keys", "values", "rows", "index")}
    catalogue = {
        f"{verb} catalog.sqlite{part}" for part in ("", "-wal") for verb in ("create", "write", "sync", "truncate")
    }
    gathered = {f"{verb} gathered keys" for verb in ("create", "write", "sync", "unlink")}
    gathered |= {"write gathered catalog.sqlite-wal", "make gathered directory", "remove_directory gathered directory"}
    names = {"rename index", "rename catalog.sqlite", "unlink keys", "unlink index", "sync_directory directory"}
    assert columns | catalogue | gathered | names <= points


@dataclass
class Lives:
    """Databases one after another, each of which sees many writers."""

    room: Path
    random: np.random.Generator
    stock: dict[int, State]  # what databases begin with, by their schema
    number: int = 0

    def next(self) -> Life:
        """A new one, empty or with as many records as an index takes."""
        self.number += 1
        which = int(self.random.integers(len(SCHEMAS)))
        folder = self.room / f"life-{self.number}"
        state: State = {}
        if self.number % 4 == 3:
            shutil.copytree(self.room / f"stock-{which}", folder)
            state = self.stock[which]
        else:
            folder.mkdir()
        seed = int(self.random.integers(1 << 30))
        return Life(folder / "db", Seeded(seed, SCHEMAS[which]), SCHEMAS[which], state)


def doom(random: np.random.Generator, points: list[str]) -> tuple[dict[str, Any], float | None]:
    """Death of the next child: more of its order, and seconds, None if it kills itself."""
    more = {
        "count": int(random.integers(1, 25)),
        "pages": [None, 1, 20][int(random.integers(3))],
        "aside": bool(random.random() < 0.2),
        "relaxed": bool(random.random() < 0.2),
    }
    if random.random() < 0.6:
        return more, float(random.uniform(0, 0.004 if random.random() < 0.3 else 0.06))
    kill = Kill(str(random.choice(WHEN)), int(random.integers(4)), str(random.choice(points)))
    return {**more, "kill": kill}, None


@pytest.mark.slow
@pytest.mark.parametrize("kills", [25, pytest.param(1200, marks=EXHAUSTIVE)])
def test_killed_at_any_moment_a_database_lives_on(
    nursery: Nursery, room: Path, tally: Counter[str], kills: int
) -> None:
    random = np.random.default_rng(kills)
    points = sorted(set(steps(nursery, room, Tour("life", 0))))
    stock = {}
    for which, schema in enumerate(SCHEMAS):
        (room / f"stock-{which}").mkdir()
        stock[which] = stocked(room / f"stock-{which}" / "db", schema, RICH + 50)
    lives = Lives(room, random, stock)
    life, before = lives.next(), tally["kills"]
    while tally["kills"] < before + kills:
        more, seconds = doom(random, points)
        order = life.order(**more)
        actual = nursery.run(order, seconds)
        tally["kills: fail points"] += actual.killed and seconds is None
        life.survived(order, actual, tally, ("r", "rw") if random.random() < 0.4 else ("r",))
        if random.random() < 0.03:
            shutil.rmtree(life.path.parent)
            life = lives.next()


def test_a_reader_reports_an_unfinished_creation(nursery: Nursery, room: Path) -> None:
    (room / "half").mkdir()
    path = room / "half" / "db"
    order = Order(path, SCHEMAS[0], {}, Tour("life", 0), 0, 1, kill=Kill("before", 0, "unlink catalog.sqlite-journal"))
    assert nursery.run(order).killed
    with pytest.raises(softdb.NotADatabase, match='mode="rw"'):
        softdb.open(path, mode="r")
