"""The exact finder against brute force in float64: order, ties, cancellation, extremes, memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import awkward, snapshot

from softdb.check import Metric
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.kernels import available
from softdb.store.snapshot import Segment, Snapshot

Array = np.ndarray[Any, Any]
METRICS = list(Metric)


def truth(metric: Metric, queries: Array, keys: Array) -> Array:
    """Scores (q, n) pair by pair in float64: equal keys score equally."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    if metric is Metric.L2:
        return np.stack([-((keys - query) ** 2).sum(1) for query in queries])
    scores = np.stack([(keys * query).sum(1) for query in queries])
    if metric is Metric.COSINE:
        lengths = np.sqrt((keys**2).sum(1))
        scores = np.divide(scores, lengths, out=np.zeros_like(scores), where=lengths > 0)
    return scores


def best(scores: Array, k: int, allowed: Array | None = None) -> Array:
    """The k best columns (q, k) of scores (q, n), the first of equals first, then -1."""
    n = scores.shape[1]
    columns = np.arange(n) if allowed is None else np.flatnonzero(allowed)
    order = columns[np.argsort(-scores[:, columns], axis=1, kind="stable")][:, :k]
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)


def flat(world: Snapshot, queries: torch.Tensor, k: int, metric: Metric, *where: Any) -> Array:
    """Rows instead of positions."""
    return world.rows(nearest(world, Query(queries, k, metric, *where[:1]), *where[1:]))


def same(found: Array, metric: Metric, queries: Array, keys: Array, k: int, allowed: Array | None = None) -> None:
    """Rows are the best k, equals in row order; records closer together than float64 can tell may change places."""
    scores = truth(metric, queries, keys)
    expected = best(scores, k, allowed)
    assert found.shape == expected.shape
    assert found.dtype == np.int64
    assert ((found < 0) == (expected < 0)).all()
    lengths = np.abs(scores).max(axis=1, keepdims=True, initial=0)
    there, wanted = (np.take_along_axis(scores, np.maximum(rows, 0), 1) for rows in (found, expected))
    np.testing.assert_allclose(np.where(found < 0, 0, there), np.where(found < 0, 0, wanted), rtol=1e-13, atol=0)
    swapped = found != expected
    assert (np.abs(there - wanted)[swapped] > 0).all(), "equal scores stand out of row order"
    assert (np.abs(there - wanted) <= 1e-13 * lengths)[swapped].all()


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Records are compared by the kernels, where there are any, and by torch elsewhere: both answer the same."""
    if request.param == "torch":
        monkeypatch.setattr("softdb.index.flat.available", lambda: False)
    elif not available():
        pytest.skip("there are no kernels here")
    return str(request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, chunks of queries and rounds in a small world."""
    for name, size in {"_BLOCK": 256, "_QUERIES": 5, "_SECOND": 2, "PIECE": 1024}.items():
        monkeypatch.setattr(f"softdb.index.flat.{name}", size)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("asked", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_flat_search_agrees_with_brute_force(
    metric: Metric, dtype: str, asked: torch.dtype, rng: np.random.Generator
) -> None:
    keys = awkward(rng, 300, 7).astype(dtype)
    queries = torch.from_numpy(rng.standard_normal((13, 7))).to(asked)
    queries[0], queries[1] = 0, torch.from_numpy(keys[5]).to(asked)
    for k in (1, 3, 40, 299, 300, 310):
        actual = flat(snapshot(keys, cuts=(1, 40, 200)), queries, k, metric)
        same(actual, metric, queries.double().numpy(), keys, k)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("q", [1, 9])
def test_ties_are_ordered_by_row(metric: Metric, q: int, rng: np.random.Generator) -> None:
    """Whole numbers: float64 has no rounding, so that ties are ties."""
    keys = rng.integers(-1, 2, (500, 4)).astype(np.float32)
    queries = rng.integers(-1, 2, (q, 4)).astype(np.float32)
    scores = truth(metric, queries, keys)
    for k in (1, 10, 100):
        np.testing.assert_array_equal(flat(snapshot(keys), torch.from_numpy(queries), k, metric), best(scores, k))


@pytest.mark.parametrize("metric", METRICS)
def test_a_thousand_copies_of_few_keys(metric: Metric, rng: np.random.Generator) -> None:
    keys = np.tile(rng.standard_normal((20, 33)).astype(np.float32), (1000, 1))
    queries = rng.standard_normal((4, 33)).astype(np.float32)
    actual = flat(snapshot(keys, cuts=(3001,)), torch.from_numpy(queries), 12, metric)
    np.testing.assert_array_equal(actual, best(truth(metric, queries, keys), 12))
    assert (np.diff(actual, axis=1) == 20).all()


@pytest.mark.parametrize("q", [1, 40])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_near_duplicates_far_from_the_origin_keep_their_order(q: int, offset: float, rng: np.random.Generator) -> None:
    keys = (offset + rng.standard_normal((3000, 24)) * 1e-2).astype(np.float32)
    keys[::3] -= np.float32(2 * offset)  # another group at the other end
    queries = (keys[:q] + rng.standard_normal((q, 24)) * 1e-2).astype(np.float32)
    same(flat(snapshot(keys), torch.from_numpy(queries), 15, Metric.L2), Metric.L2, queries, keys, 15)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("q", [1, 7, 30])
def test_many_blocks_in_any_order(metric: Metric, q: int, rng: np.random.Generator, monkeypatch: Any) -> None:
    """The best may lie in the first block, the last, or be spread: nothing is passed over too soon."""
    monkeypatch.setattr("softdb.index.flat._BLOCK", 1 << 13)
    keys = rng.standard_normal((30_000, 4)).astype(np.float32)
    queries = rng.standard_normal((q, 4)).astype(np.float32)
    order = np.argsort(truth(metric, queries[:1], keys)[0])
    for stored in (keys, keys[order], keys[order[::-1]]):
        actual = flat(snapshot(stored, cuts=(9001,)), torch.from_numpy(queries), 5, metric)
        same(actual, metric, queries, stored, 5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 3e37])
def test_very_short_and_very_long_vectors(metric: Metric, scale: float, rng: np.random.Generator) -> None:
    keys = (rng.standard_normal((200, 6)) * scale).astype(np.float32).clip(-3e38, 3e38)
    keys[::2] = rng.standard_normal((100, 6))
    queries = np.concatenate([rng.standard_normal((3, 6)), keys[1:4]]).astype(np.float32)
    same(flat(snapshot(keys), torch.from_numpy(queries), 9, metric), metric, queries, keys, 9)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.003, 0.0])
def test_only_allowed_live_records_from_a_position_on(metric: Metric, share: float, rng: np.random.Generator) -> None:
    keys = awkward(rng, 2000, 9)
    live, allowed = rng.random(2000) < 0.8, rng.random(2000) < share
    queries = rng.standard_normal((6, 9)).astype(np.float32)
    world = snapshot(keys, live=live, cuts=(100, 1500))
    for start in (0, 700, 2000):
        keep = live & allowed & (np.arange(2000) >= start)
        actual = flat(world, torch.from_numpy(queries), 8, metric, allowed, start)
        same(actual, metric, queries, keys, 8, keep)


def test_filtered_records_are_compared_in_place(
    way: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    gather = Snapshot.keys_at

    def counted(self: Snapshot, positions: Array) -> torch.Tensor:
        copied.append(positions.size)
        return gather(self, positions)

    monkeypatch.setattr(Snapshot, "keys_at", counted)
    keys, allowed = rng.standard_normal((2000, 9)).astype(np.float32), np.arange(2000) % 100 == 7
    queries = rng.standard_normal((1, 9)).astype(np.float32)
    actual = flat(snapshot(keys), torch.from_numpy(queries), 5, Metric.COSINE, allowed)
    same(actual, Metric.COSINE, queries, keys, 5, allowed)
    assert (sum(copied) == 0) == (way == "kernels")


def test_rows_are_permanent_and_positions_are_not(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((60, 3)).astype(np.float32)
    rows = np.sort(rng.choice(1000, 30, replace=False)).astype(np.int64)
    segments = (Segment(0, 0, rows, keys[:30], None), Segment(1, 1000, None, keys[30:], None))
    world = Snapshot.of(1, segments, np.ones(60, np.bool_))
    queries = torch.from_numpy(rng.standard_normal((4, 3)))
    places = nearest(world, Query(queries, 70, Metric.DOT))
    named = np.concatenate([rows, np.arange(1000, 1030)])
    expected = np.where(places < 0, -1, named[places])
    np.testing.assert_array_equal(flat(world, queries, 70, Metric.DOT), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_no_queries_or_no_records_give_empty_answers(metric: Metric) -> None:
    empty = Snapshot.of(0, (), np.zeros(0, np.bool_))
    assert flat(empty, torch.ones(2, 3), 4, metric).tolist() == [[-1] * 4] * 2
    assert flat(snapshot(np.ones((5, 3)), live=np.zeros(5)), torch.ones(1, 3), 2, metric).tolist() == [[-1, -1]]
    assert flat(snapshot(np.ones((5, 3))), torch.ones(0, 3), 2, metric).shape == (0, 2)
    assert flat(snapshot(np.ones((5, 3))), torch.ones(2, 3), 0, metric).shape == (2, 0)


def test_queries_are_neither_changed_nor_tracked(rng: np.random.Generator) -> None:
    queries = torch.from_numpy(rng.standard_normal((3, 4))).requires_grad_()
    before = queries.detach().clone()
    for metric in METRICS:
        flat(snapshot(rng.standard_normal((50, 4))), queries, 2, metric)
    assert torch.equal(queries, before)
    assert queries.grad is None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_small_world(data: st.DataObject) -> None:
    n, d, q = (data.draw(st.integers(1, most)) for most in (40, 6, 4))
    metric = data.draw(st.sampled_from(METRICS))
    numbers = st.one_of(
        st.integers(-3, 3).map(float),
        st.floats(-(2.0**60), 2.0**60, width=32),
        st.sampled_from([1.0, 1.0 + 2**-23, 4096.0, 4096.0 + 2**-11]),
    )

    def vectors(m: int) -> Array:
        return np.array(
            data.draw(st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=m, max_size=m)), np.float32
        )

    keys = vectors(n)
    keys = keys[np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))]  # duplicates
    queries = vectors(q)
    k = data.draw(st.integers(1, n + 2))
    actual = flat(snapshot(keys), torch.from_numpy(queries), k, metric)
    expected = truth(metric, queries, keys)
    for i in range(q):
        rows = actual[i][actual[i] >= 0]
        assert len(set(rows.tolist())) == len(rows) == min(k, n)
        # the order of sums of d terms that cancel is decided by rounding: float64 is trusted to d units of the largest
        size = (np.abs(queries[i].astype(np.float64)) @ np.abs(keys.T.astype(np.float64))).max(initial=0)
        slack = 1e-14 * (size if metric is not Metric.L2 else np.abs(expected[i]).max())
        if metric is Metric.COSINE:
            slack = 1e-14 * np.sqrt((queries[i].astype(np.float64) ** 2).sum())
        np.testing.assert_allclose(expected[i, rows], np.sort(expected[i])[::-1][: len(rows)], rtol=1e-13, atol=slack)


def test_the_checker_accepts_ties_and_refuses_real_swaps() -> None:
    keys, queries = np.array([[2.0], [1.0], [2.0], [3.0]]), np.ones((1, 1))
    same(np.array([[3, 0, 2]]), Metric.DOT, queries, keys, 3)
    for wrong in ([3, 2, 0], [0, 3, 2], [3, 0, 1], [3, 0, -1]):
        with pytest.raises(AssertionError, match=r"Mismatched|row order|assert"):
            same(np.array([wrong]), Metric.DOT, queries, keys, 3)


def test_memory_stays_within_blocks(rng: np.random.Generator) -> None:
    """Nothing of the size of n × q or n × d is made: numpy's part is watched here, torch's below the same blocks."""
    keys = rng.standard_normal((200_000, 16)).astype(np.float16)
    queries = torch.from_numpy(rng.standard_normal((300, 16)))
    world = snapshot(keys, dtype="float16")
    tracemalloc.start()
    flat(world, queries, 5, Metric.DOT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
