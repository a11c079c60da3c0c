"""The judge of `benchmarks/filter_peers.py` refuses wrong answers and finds the least effort."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, imported as its command imports it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("filter_peers")


@pytest.fixture
def world(peers: Any) -> Any:
    """500 records of two kinds."""
    random = np.random.default_rng(0)
    keys = random.standard_normal((500, 8), dtype=np.float32)
    columns = {"rank": random.permutation(500), "pos": np.array(["noun", "verb"])[random.integers(0, 2, 500)]}
    columns["topic"] = random.integers(0, 9, 500)
    return peers.World(keys, columns, keys[:5], keys[:100])


class Laggard:
    """An engine whose first `effort` answers are right."""

    name, exact, ladders = "laggard", False, (tuple((i,) for i in range(1, 40)),)

    def __init__(self, world: Any, fewer: bool = False) -> None:
        self.world, self.fewer = world, fewer

    def prepare(self, wanted: Any) -> Any:
        return np.flatnonzero(wanted.mask(self.world.columns))

    def search(self, queries: Any, prepared: Any, effort: tuple[int, ...]) -> Any:
        order = prepared[np.argsort(-(queries @ self.world.keys[prepared].T), axis=1)]
        right = min(effort[0], 10)
        wrong = np.full((len(queries), 10 - right), -1) if self.fewer else order[:, -(10 - right) or len(order[0]) :]
        return np.concatenate([order[:, :right], wrong], axis=1)


def case_of(peers: Any, world: Any, kind: str = "uncorrelated") -> Any:
    queries, _ = world.queries(0.1, kind, 60)
    return peers.Case.of("case", world, world.filter(0.1, kind, 3), queries)


@pytest.mark.parametrize("kind", ["uncorrelated", "correlated"])
def test_a_filter_is_the_same_in_numpy_and_in_sql(peers: Any, world: Any, kind: str) -> None:
    wanted = world.filter(0.1, kind, 3)
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE records (number, rank, pos, topic)")
    columns = [world.columns[name].tolist() for name in ("rank", "pos", "topic")]
    db.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", zip(range(500), *columns, strict=True))
    results = [number for (number,) in db.execute(f"SELECT number FROM records WHERE {wanted.sql()} ORDER BY number")]
    assert results == np.flatnonzero(wanted.mask(world.columns)).tolist()
    assert 35 <= len(results) <= 65


def test_queries_are_chosen_by_how_many_neighbours_match(world: Any) -> None:
    near = {kind: world.queries(0.1, kind, 20)[1] for kind in ("correlated", "opposed")}
    assert near["correlated"] > near["opposed"]


def test_exact_answers_are_distinguished_from_near_ones(peers: Any, world: Any) -> None:
    case, engine = case_of(peers, world), Laggard(world)
    right = engine.search(case.queries, engine.prepare(case.wanted), (10,))
    assert case.recall(world.keys, engine, right) == (1.0, True)
    assert case.recall(world.keys, engine, right[20:], 20) == (1.0, True)
    most = engine.search(case.queries, engine.prepare(case.wanted), (8,))
    assert case.recall(world.keys, engine, most) == (pytest.approx(0.8), True)
    short = right.copy()
    short[4, 9] = -1
    assert case.recall(world.keys, engine, short) == (pytest.approx(1 - 1 / 600), False)


@pytest.mark.parametrize("lie", ["does not match", "twice"])
def test_an_engine_that_lies_is_refused(peers: Any, world: Any, lie: str) -> None:
    case, engine = case_of(peers, world), Laggard(world)
    rows = engine.search(case.queries, engine.prepare(case.wanted), (10,))
    rows[7, 3] = rows[7, 2] if lie == "twice" else np.flatnonzero(~case.mask)[0]
    with pytest.raises(SystemExit, match="laggard: case: a record does not match or comes twice"):
        case.recall(world.keys, engine, rows)


def test_the_least_sufficient_effort_is_chosen(peers: Any, world: Any) -> None:
    given = argparse.Namespace(recall=0.85, patience=60.0)
    tuned = peers.Tuned(Laggard(world), case_of(peers, world), world.keys, given)
    assert tuned.met
    assert tuned.reached.recall >= 0.9
    assert (9,) in [one.effort for one in tuned._climbed(Laggard.ladders[0])]


def test_short_answers_and_slow_ones_do_not_count(peers: Any, world: Any) -> None:
    short = Laggard(world, fewer=True)
    short.ladders = (tuple((i,) for i in range(1, 10)),)
    tuned = peers.Tuned(short, case_of(peers, world), world.keys, argparse.Namespace(recall=0.85, patience=60.0))
    assert not tuned.met
    assert not tuned.reached.full
    assert tuned.reached.recall == pytest.approx(0.9)
    slow = peers.Tuned(
        Laggard(world), case_of(peers, world), world.keys, argparse.Namespace(recall=0.85, patience=-1.0)
    )
    assert not slow.met
    assert not slow.reached.done


def test_the_fastest_peer_that_met_the_recall_is_compared_with(peers: Any) -> None:
    def row(ms: float, met: bool = True) -> dict[str, Any]:
        return {
            "met": met,
            "first_ms": {"median": ms},
            "again_ms": {"median": ms},
            "batch_queries_s": {"median": 1 / ms},
        }

    rows = {"softdb": row(2.0), "a": row(4.0), "b": row(1.0, met=False), "c": row(3.0)}
    ratios = peers._ratios(rows, ["a", "b", "c"])
    assert ratios["first_ms"] == ratios["batch_queries_s"] == [1.5, "c"]
    assert peers._ratios(rows, ["b"]) == {}
