"""Search by an index: order of candidates, deletions, filters, compaction, older and newer snapshots."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from with_kernels import WITH_AND_WITHOUT
from worlds import awkward, snapshot

from softdb.check import Metric
from softdb.index import search
from softdb.index.build import Target, build
from softdb.index.contract import Index
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.index.search import Searcher, indexed_until
from softdb.scores import score_of
from softdb.store.snapshot import Segment, Snapshot

Array = np.ndarray[Any, Any]
METRICS = list(Metric)
N, D = 8000, 8


def clusters(rng: np.random.Generator) -> tuple[Array, Array]:
    """Keys (N, D) around 50 centres, and queries near some of them."""
    centres = 3 * rng.standard_normal((50, D))
    keys = centres[rng.integers(0, 50, N)] + rng.standard_normal((N, D))
    return keys.astype(np.float32), (keys[rng.integers(0, N, 40)] + 0.2 * rng.standard_normal((40, D))).astype(
        np.float32
    )


def indexed(world: Snapshot, metric: Metric, kind: str = "ivf") -> Index:
    index, report = build(world, metric, Target(0.95, 10, kind=kind))
    assert index is not None
    assert report["met"]
    return index


searcher_of = functools.lru_cache(maxsize=1)(Searcher)


def find(seen: Snapshot, index: Index, queries: torch.Tensor, k: int, metric: Metric, allowed: Array | None) -> Array:
    assert metric is index.metric
    return searcher_of(index).nearest(seen, Query(queries, k, metric, allowed, pairwise=False)).positions


def recall(found: Array, exact: Array) -> float:
    there = exact >= 0
    return float(((found[:, None] == exact[:, :, None]).any(2) & there).sum() / there.sum())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("q", [1, 6])
@pytest.mark.parametrize("cuts", [(), (1, 17, 17, 30)])
def test_candidates_are_ordered_as_exact_search_orders_them(
    metric: Metric, dtype: str, q: int, cuts: tuple[int, ...], rng: np.random.Generator
) -> None:
    keys = rng.integers(-2, 3, (60, 5))
    keys[5] = 0
    keys[40:50] = keys[10:20]
    world = snapshot(keys, dtype=dtype, cuts=cuts)
    queries = rng.integers(-2, 3, (q, 5)).astype(np.float32)
    for c, k in [(1, 1), (7, 3), (30, 30), (60, 10), (4, 9)]:
        candidates = np.stack([rng.permutation(60)[:c] for _ in range(q)])
        candidates[rng.random((q, c)) < 0.2] = -1
        actual = ordered(world, queries, candidates, k, metric)[0]
        for i in range(q):
            allowed = np.isin(np.arange(60), candidates[i])
            exact = nearest(world, Query(torch.from_numpy(queries[i : i + 1]), k, metric, allowed))[0]
            if metric is Metric.COSINE:  # lengths are rounded: parallel keys may change places
                assert set(actual[i] < 0) == set(exact < 0)
                scores = (keys @ queries[i]) / np.maximum(np.linalg.norm(keys, axis=1), 1e-9)
                np.testing.assert_allclose(scores[actual[i][actual[i] >= 0]], scores[exact[exact >= 0]], atol=1e-5)
            else:
                assert actual[i].tolist() == exact.tolist()


def test_positive_and_negative_zeros_are_ties() -> None:
    world = snapshot([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0], [1.0, 0.0]])
    actual = ordered(world, np.array([[1.0, 0.0]], np.float32), np.array([[2, 1, 0, 3]]), 4, Metric.DOT)[0]
    assert actual.tolist() == [[3, 0, 1, 2]]
    actual = ordered(world, np.array([[-1.0, 0.0]], np.float32), np.array([[2, 3, 1, 0]]), 4, Metric.DOT)[0]
    assert actual.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("compiled", WITH_AND_WITHOUT)
def test_candidates_are_scored_in_parts_with_and_without_compiled_loops(
    metric: Metric, compiled: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.kernels.threads.WORTH_A_THREAD", 1)
    monkeypatch.setattr("softdb.index.rerank.GATHERED", 50)
    monkeypatch.setattr("softdb.index.rerank.available", lambda: compiled)
    keys = awkward(rng, 90, 37)
    world, queries = snapshot(keys, cuts=(33,)), rng.standard_normal((11, 37)).astype(np.float32)
    candidates = np.tile(np.arange(90), (11, 1))
    actual, scores = ordered(world, queries, candidates, 100, metric)
    exact = nearest(world, Query(torch.from_numpy(queries), 100, metric))
    assert recall(actual[:, :7], exact[:, :7]) == 1
    assert (actual >= 0).sum() == 11 * 90
    true = score_of(metric)(torch.from_numpy(queries).double(), torch.from_numpy(keys).double()).numpy()
    np.testing.assert_allclose(scores[:, :90], np.take_along_axis(true, actual[:, :90], 1), rtol=1e-5, atol=1e-5)
    assert np.isneginf(scores[:, 90:]).all()


def test_cosines_of_very_long_and_very_short_keys(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((40, 6)).astype(np.float32)
    keys *= np.float32(10.0) ** rng.integers(-28, 28, (40, 1))
    actual, scores = ordered(snapshot(keys), 1e25 * keys[:1], np.arange(40)[None], 40, Metric.COSINE)
    wide = keys.astype(np.float64)
    true = wide @ wide[0] / np.linalg.norm(wide, axis=1) / np.linalg.norm(wide[0])
    np.testing.assert_allclose(scores[0], true[actual[0]], atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("metric", METRICS)
def test_after_compaction_rows_have_gaps(kind: str, metric: Metric, rng: np.random.Generator) -> None:
    keys, queries = clusters(rng)
    before = snapshot(keys, cuts=(1000,))
    index = indexed(before, metric, kind)
    rows = np.flatnonzero(rng.random(N) < 0.7).astype(np.int64)
    young = (keys[:30] * 1.01).astype(np.float32)
    after = Snapshot.of(
        2, (Segment(7, 0, rows, keys[rows], None), Segment(8, N + 5, None, young, None)), np.ones(len(rows) + 30, bool)
    )
    assert indexed_until(after, index) == len(rows)
    exact = nearest(after, Query(torch.from_numpy(queries), 10, metric))
    assert recall(find(after, index, torch.from_numpy(queries), 10, metric, None), exact) >= 0.9
    again = nearest(before, Query(torch.from_numpy(queries), 10, metric))
    assert recall(find(before, index, torch.from_numpy(queries), 10, metric, None), again) >= 0.9


def test_a_snapshot_older_than_the_index_sees_its_own_records_only(rng: np.random.Generator) -> None:
    keys, queries = clusters(rng)
    index = indexed(snapshot(keys), Metric.DOT)
    old = snapshot(keys[:6000])
    actual = find(old, index, torch.from_numpy(queries), 10, Metric.DOT, None)
    assert actual.max() < 6000
    assert actual.min() >= 0
    assert recall(actual, nearest(old, Query(torch.from_numpy(queries), 10, Metric.DOT))) >= 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
@pytest.mark.parametrize("side", ["near", "far"])
def test_filters_that_correlate_with_the_keys_keep_their_recall(kind: str, side: str, rng: np.random.Generator) -> None:
    """Matches far from the query: the nearest lists hold none of them."""
    keys, _ = clusters(rng)
    index = indexed(snapshot(keys), Metric.L2, kind)
    order = np.argsort(keys[:, 0])
    allowed = np.zeros(N, np.bool_)
    allowed[order[:5000]] = True
    queries = torch.from_numpy(keys[order[:40] if side == "near" else order[-40:]])
    actual = find(snapshot(keys), index, queries[:20], 10, Metric.L2, allowed)
    assert allowed[actual].all()
    assert recall(actual, nearest(snapshot(keys), Query(queries[:20], 10, Metric.L2, allowed))) >= 0.8


def test_when_every_match_is_younger_than_the_index(rng: np.random.Generator) -> None:
    keys, queries = clusters(rng)
    index = indexed(snapshot(keys), Metric.COSINE)
    world = snapshot(np.concatenate([keys, keys * 2]), cuts=(N,))
    allowed = np.arange(2 * N) >= N
    actual = find(world, index, torch.from_numpy(queries), 10, Metric.COSINE, allowed)
    exact = nearest(world, Query(torch.from_numpy(queries), 10, Metric.COSINE, allowed))
    assert recall(actual, exact) == 1


def test_allowed_records_are_computed_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion or a filter must not cost n for every search."""
    keys, queries = clusters(rng)
    asked = torch.from_numpy(queries[:1])
    index = indexed(snapshot(keys), Metric.DOT)
    live, allowed = np.arange(N) != 5, rng.random(N) < 0.9
    world, made = snapshot(keys, live=live), search._Eligible
    worked: list[Any] = []

    def choose(*arguments: Any) -> Any:
        worked.append(arguments)
        return made(*arguments)

    monkeypatch.setattr(search, "_Eligible", choose)
    for _ in range(5):
        find(world, index, asked, 10, Metric.DOT, None)
        find(world, index, asked, 10, Metric.DOT, allowed)
    assert len(worked) == 2
    for _ in range(12):
        find(world, index, asked, 10, Metric.DOT, allowed.copy())
    coverage = searcher_of(index)._coverage_of(world)
    assert len(coverage._filtered._known) <= 4
    find(snapshot(keys), index, asked, 10, Metric.DOT, None)
    assert searcher_of(index)._coverage_of(world) is not coverage


def test_a_filter_that_was_freed_is_not_taken_for_a_new_one(rng: np.random.Generator) -> None:
    keys, queries = clusters(rng)
    world, asked = snapshot(keys), torch.from_numpy(queries[:3])
    index = indexed(world, Metric.DOT)
    for _ in range(30):  # new arrays come to lie where old ones lay
        allowed = rng.random(N) < 0.8
        actual = find(world, index, asked, 10, Metric.DOT, allowed)
        assert allowed[actual].all()


@pytest.mark.slow
def test_threads_with_filters_of_their_own(rng: np.random.Generator) -> None:
    keys, queries = clusters(rng)
    world, asked = snapshot(keys, live=np.arange(N) % 9 > 0), torch.from_numpy(queries)
    wrong: list[str] = []
    for kind in ("ivf", "hnsw"):
        index = indexed(world, Metric.DOT, kind)

        def ask(share: float, index: Index = index) -> None:
            mine = np.random.default_rng(int(100 * share)).random(N) < share
            for _ in range(15):
                actual = find(world, index, asked, 10, Metric.DOT, mine)
                if actual.min() < 0 or not (mine & world.live)[actual].all():
                    wrong.append(f"{share}")

        threads = [threading.Thread(target=ask, args=(share,)) for share in (0.7, 0.8, 0.9, 0.95)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
