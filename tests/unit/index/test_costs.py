"""The planner's ways and measured costs; and a plain search in few steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from clock import Clock

import softdb
from softdb.index import timing
from softdb.index.planner import DEAR, Planner, estimate_costs

pytest.importorskip("faiss")

Array = np.ndarray[Any, Any]


def made(metric: Any, kind: Any = "ivf") -> softdb.SoftDB:
    rng = np.random.default_rng(0)
    keys = (2 * rng.standard_normal((100, 24)))[rng.integers(0, 100, 12_000)] + rng.standard_normal((12_000, 24))
    db = softdb.open(None, dim=24, metric=metric)
    db.insert(range(len(keys)), keys)
    db.build_index(kind)
    db.watch(share=0)
    return db


@pytest.fixture(scope="module", params=["dot", "cosine", "l2"])
def db(request: pytest.FixtureRequest) -> Iterator[softdb.SoftDB]:
    with made(request.param) as db:
        yield db


def planner_of(db: softdb.SoftDB) -> Planner:
    assert db.core.finder.index is not None
    return db.core.finder.searcher(db.core.finder.index).planner


def test_a_plain_search_answers_as_one_that_takes_every_step(db: softdb.SoftDB, rng: np.random.Generator) -> None:
    queries = rng.standard_normal((5, 24)).astype(np.float32)
    every = db.search(queries.tolist(), k=7)  # a list takes them all
    for asked in (queries, torch.from_numpy(queries)):
        found = db.search(asked, k=7)
        assert found.rows.tolist() == every.rows.tolist()
        assert found.scores.tolist() == every.scores.tolist()
        assert found.ids == every.ids
    for i in range(5):
        alone = db.search(queries[i], k=7)
        assert alone.rows.tolist() == every.rows[i : i + 1].tolist()
        torch.testing.assert_close(alone.scores, every.scores[i : i + 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_refused_as_ever(db: softdb.SoftDB, bad: float) -> None:
    queries = np.ones((2, 24), np.float32)
    queries[1, 3] = bad
    with pytest.raises(softdb.BadInput, match="NaN or infinity, first in query 1"):
        db.search(queries)
    with pytest.raises(softdb.BadInput, match="k is 0"):
        db.search(queries[:1], k=0)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_what_was_inserted_or_deleted_since_is_seen(metric: str) -> None:
    """The plain way is not taken then: the index does not hold what is young, and holds what is dead."""
    db = made(metric)
    query = np.full((1, 24), 9, np.float32)
    before = db.search(query, k=3).ids[0]
    db.insert(["young"], 10 * query if db.metric == "dot" else query)
    assert db.search(query, k=3).ids[0][0] == "young"
    db.delete(["young", before[0]])
    after = db.search(query, k=3).ids[0]
    assert not {"young", before[0]} & set(after)
    assert after[:2] == before[1:]


def test_lists_are_always_scanned_but_for_next_to_nothing(db: softdb.SoftDB) -> None:
    way = planner_of(db).way
    assert way(12_000, 1, 10, False) == way(3000, 100, 10, True, True) == "index"
    assert way(100, 1, 10, True, True) == "pairs"
    assert way(100, 1, 10, True, False) == way(12_000, 1, 2000, False) == "blocks"


def test_a_graph_is_asked_where_a_filter_leaves_much() -> None:
    with made("dot", "hnsw") as db:
        way = planner_of(db).way
    assert way(12_000, 1, 10, False) == way(6000, 1, 10, True, True) == "index"
    assert way(3000, 1, 10, True, True) == "pairs"
    assert way(3000, 1000, 10, True, True) == way(12_000, 1, 2000, False) == "blocks"


def test_estimates_cost_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock.module)

    def taking(called: float, each: float) -> Any:
        return lambda queries: clock.spend(called + each * queries)

    costs = estimate_costs(taking(100.0, 20.0), 10, taking(3.0, 0.5))
    assert costs.exact.seconds(1000, 4) == pytest.approx(100 * (100 + 4 * 20))
    assert costs.round(6) == pytest.approx(3 + 6 * 0.5)


def test_estimates_that_take_longer_than_a_pass_are_left_alone_for_a_while(db: softdb.SoftDB) -> None:
    assert db.core.finder.index is not None
    planner = Planner(db.core.finder.index)
    for _ in range(20):
        planner.learn("dear", 1.9)
        planner.learn("cheap", 0.3)
        planner.learn("alike", DEAR - 0.01)
    assert planner.hopeless("dear")
    assert not any(planner.hopeless(kind) for kind in ("cheap", "alike", "new"))
    left_alone = 1
    while planner.hopeless("dear"):
        left_alone += 1
    assert 50 < left_alone < 500
    planner.learn("dear", 1.9)
    assert planner.hopeless("dear")
