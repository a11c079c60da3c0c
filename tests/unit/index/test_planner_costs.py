"""Costs and choices of the planner, and the steps of a plain search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from worlds import clusters, indexed

import softdb
from softdb.index.planner import Way, draw_cost, pass_cost, way

pytest.importorskip("faiss")

Array = np.ndarray[Any, Any]


def watched(metric: Any, kind: Any = "ivf") -> softdb.SoftDB:
    db = indexed(clusters(np.random.default_rng(0), 12_000, 24), metric=metric, kind=kind)
    db.watch(share=0)
    return db


@pytest.fixture(scope="module", params=["dot", "cosine", "l2"])
def db(request: pytest.FixtureRequest) -> Iterator[softdb.SoftDB]:
    with watched(request.param) as db:
        yield db


def way_of(db: softdb.SoftDB) -> Callable[..., Way]:
    assert db.core.finder.index is not None
    return functools.partial(way, db.core.finder.index)


def test_a_plain_search_answers_as_one_that_takes_every_step(db: softdb.SoftDB, rng: np.random.Generator) -> None:
    queries = rng.standard_normal((5, 24)).astype(np.float32)
    every = db.search(queries.tolist(), k=7)  # a list takes them all
    for asked in (queries, torch.from_numpy(queries)):
        actual = db.search(asked, k=7)
        assert actual.rows.tolist() == every.rows.tolist()
        assert actual.scores.tolist() == every.scores.tolist()
        assert actual.ids == every.ids
    for i in range(5):
        alone = db.search(queries[i], k=7)
        assert alone.rows.tolist() == every.rows[i : i + 1].tolist()
        torch.testing.assert_close(alone.scores, every.scores[i : i + 1])


def test_a_draw_of_a_wide_key_costs_more() -> None:
    narrow, wide = (draw_cost(1, 0, 0, 1000, d, 0) - draw_cost(1, 0, 0, 0, d, 0) for d in (64, 384))
    assert 1.2 * narrow < wide < 6 * narrow


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinite_queries_are_refused(db: softdb.SoftDB, bad: float) -> None:
    queries = np.ones((2, 24), np.float32)
    queries[1, 3] = bad
    with pytest.raises(softdb.BadInput, match="NaN or infinity, first in query 1"):
        db.search(queries)
    with pytest.raises(softdb.BadInput, match="k is 0"):
        db.search(queries[:1], k=0)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_later_inserts_and_deletes_are_seen(metric: str) -> None:
    """The plain way is skipped: the index lacks young records and has dead ones."""
    db = watched(metric)
    query = np.full((1, 24), 9, np.float32)
    before = db.search(query, k=3).ids[0]
    db.insert(["young"], 10 * query if db.metric == "dot" else query)
    assert db.search(query, k=3).ids[0][0] == "young"
    db.delete(["young", before[0]])
    after = db.search(query, k=3).ids[0]
    assert not {"young", before[0]} & set(after)
    assert after[:2] == before[1:]


def test_lists_are_scanned_unless_very_few_records_remain(db: softdb.SoftDB) -> None:
    chosen = way_of(db)
    assert chosen(12_000, 1, 10, False) == chosen(3000, 100, 10, True, True) == "index"
    assert chosen(100, 1, 10, True, True) == "pairs"
    assert chosen(100, 1, 10, True, False) == chosen(12_000, 1, 2000, False) == "blocks"


def test_a_graph_serves_filters_that_keep_many_records() -> None:
    with watched("dot", "hnsw") as db:
        chosen = way_of(db)
    assert chosen(12_000, 1, 10, False) == chosen(6000, 1, 10, True, True) == "index"
    assert chosen(3000, 1, 10, True, True) == "pairs"
    assert chosen(3000, 1000, 10, True, True) == chosen(12_000, 1, 2000, False) == "blocks"


def test_a_pass_shares_its_reads_among_queries() -> None:
    alone, together = (pass_cost(count, 12_000, 24, 3, 4) for count in (1, 16))
    assert alone < together < 16 * alone
    assert pass_cost(16, 24_000, 24, 3, 4) == pytest.approx(2 * together)
    assert pass_cost(16, 12_000, 24, 3, 2) < together  # halves are read sooner


def test_a_draw_costs_its_scan_and_its_gather() -> None:
    whole = draw_cost(16, 12_000, 8, 500, 24, 3)
    for more in ((32, 12_000, 8, 500, 24, 3), (16, 24_000, 8, 500, 24, 3), (16, 12_000, 16, 500, 24, 3)):
        assert whole < draw_cost(*more) < 2 * whole
    assert whole < draw_cost(16, 12_000, 8, 1000, 24, 3)
    assert draw_cost(16, 12_000, 8, 500, 24, 0) < whole  # log Z alone
    assert draw_cost(1, 10**6, 8, 500, 24, 3) > draw_cost(2, 10**6, 8, 500, 24, 3) / 2


def test_many_records_are_drawn_and_few_are_passed_over() -> None:
    """For a hundred queries of usual embeddings."""
    for records, draws in ((10_000, False), (10**7, True)):
        dear = draw_cost(100, records, 96, 2000, 384, 384) > pass_cost(100, records, 384, 384, 4)
        assert dear != draws
