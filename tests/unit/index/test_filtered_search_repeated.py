"""A repeated filter takes fewer steps and gives the same answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding, index_report

import softdb

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

N, D = 6000, 24
KEYS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
QUERIES = torch.from_numpy(np.random.default_rng(1).standard_normal((5, D)).astype(np.float32))
FILTERS: dict[str, Any] = {"many": {"n": {"$lt": 4000}}, "few": {"n": {"$lt": 50}}, "none": {"n": {"$lt": 0}}}


def payloads() -> list[Any]:
    return [{"n": i, "flag": i % 2 == 0, "one": i % 2} for i in range(N)]


@pytest.fixture
def indexed() -> Iterator[softdb.SoftDB]:
    with holding(KEYS, payloads=payloads(), metric="dot") as db:
        db.build_index("ivf", recall=0.99)
        yield db


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("k", [1, 10, 100, 2 * N])
def test_a_repeated_filter_gives_the_first_answer(indexed: softdb.SoftDB, name: str, k: int) -> None:
    first, again = (indexed.search(QUERIES, k, where=FILTERS[name]) for _ in range(2))
    assert torch.equal(first.rows, again.rows)
    torch.testing.assert_close(first.scores, again.scores, rtol=1e-5, atol=1e-5)
    exact = indexed.search(QUERIES, k, where=FILTERS[name], exact=True)
    assert again.rows.shape == exact.rows.shape
    assert torch.equal(again.live, exact.live)
    assert float((again.rows == exact.rows).float().mean()) > 0.95


def test_a_repeated_filter_sees_writes(indexed: softdb.SoftDB) -> None:
    query, where = QUERIES[:1], {"n": {"$lt": 4000}}
    best = [indexed.search(query, 1, where=where).ids[0][0] for _ in range(2)][1]
    indexed.update([best], payloads=[{"n": 5000}])
    indexed.search(query, 1)  # the index is of this generation now, and the filter not yet
    second = indexed.search(query, 1, where=where).ids[0][0]
    assert second != best
    indexed.delete([second])
    indexed.search(query, 1)
    third = indexed.search(query, 1, where=where).ids[0][0]
    assert third not in (best, second)
    indexed.insert(["new"], 10 * query, payloads=[{"n": 0}])
    assert indexed.search(query, 1, where=where).ids[0][0] == "new"


def test_a_reader_follows_another_s_writing(tmp_path: Path) -> None:
    where = {"n": {"$lt": 4000}}
    with holding(KEYS, payloads=payloads(), path=tmp_path / "db", metric="dot") as writer:
        writer.build_index("ivf")
        with softdb.open(tmp_path / "db", mode="r") as reader:
            best = [reader.search(QUERIES[:1], 1, where=where).ids[0][0] for _ in range(2)][1]
            writer.update([best], payloads=[{"n": 5000}])
            assert reader.search(QUERIES[:1], 1, where=where).ids[0][0] != best


def test_numbers_and_booleans_are_distinguished(indexed: softdb.SoftDB) -> None:
    for where, parity in ({"flag": True}, 0), ({"flag": 1}, None), ({"one": 1}, 1), ({"one": True}, None):
        for _ in range(2):
            hits = indexed.search(QUERIES, 5, where=where)
            assert {int(row) % 2 for row in hits.rows[hits.live]} == (set() if parity is None else {parity}), where


@pytest.mark.parametrize("name", FILTERS)
def test_non_finite_filters_are_refused(indexed: softdb.SoftDB, name: str) -> None:
    for _ in range(2):
        indexed.search(QUERIES, where=FILTERS[name])
        for wrong in (float("nan"), float("inf")):
            with pytest.raises(softdb.BadInput, match="NaN or infinit"):
                indexed.search(torch.full((1, D), wrong), where=FILTERS[name])


def test_matches_compared_one_by_one_are_no_check_of_the_index(indexed: softdb.SoftDB) -> None:
    indexed.watch(share=1.0)
    for _ in range(30):
        indexed.search(QUERIES, where=FILTERS["few"])
    assert index_report(indexed).live_checked == 0
