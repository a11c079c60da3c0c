"""Outliers of norm: the longest keys, which every search for inner products compares exactly."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from with_kernels import WITH_AND_WITHOUT
from worlds import holding, index_report, snapshot

import softdb
from softdb.check import Metric
from softdb.index import build, cache, finder, outliers
from softdb.index.contract import Index
from softdb.index.flat import nearest
from softdb.index.ivf import IVF
from softdb.index.outliers import Outliers, lengths_of, longest_of
from softdb.index.query import Query
from softdb.index.search import Searcher
from softdb.store.snapshot import Snapshot

Array = np.ndarray[Any, Any]
N, D, Q = 30_000, 48, 300
NORMS = ("log-normal .5", "log-normal 1", "Pareto 3")
NONE = np.empty(0, np.int64)


def lengths(kind: str, n: int, random: np.random.Generator) -> Array:
    """Norms (n, 1) as those of items that are recommended, or heavier still."""
    if kind == "Pareto 3":
        return 1 + random.pareto(3, (n, 1))
    deviation = 0.5 if kind == "log-normal .5" else 1.0
    found: Array = np.exp(deviation * random.standard_normal((n, 1)))
    return found


def directions(n: int, d: int, random: np.random.Generator) -> Array:
    found = random.standard_normal((n, d))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return found


def find(seen: Snapshot, index: Index, queries: torch.Tensor, k: int, metric: Metric, allowed: Array | None) -> Array:
    assert metric is index.metric
    return Searcher(index).nearest(seen, Query(queries, k, metric, allowed, pairwise=False)).positions


class World(NamedTuple):
    keys: Array  # (N, D)
    queries: torch.Tensor  # (Q, D)
    truth: Array  # (Q, 10)
    seen: Snapshot
    rank: Array  # (N,) 0: the longest key

    def outliers_found(self, index: Index, k: int = 1) -> float:
        """Recall of the true nearest that are among the longest 0.1 % of the keys."""
        truth = self.truth[:, :k]
        found = find(self.seen, index, self.queries, k, Metric.DOT, None)
        counts = self.rank[truth] < N // 1000
        assert counts.sum() > Q // 3
        return float((truth[:, :, None] == found[:, None]).any(2)[counts].mean())


@functools.cache
def world(kind: str) -> World:
    random = np.random.default_rng(0)
    keys = (directions(N, D, random) * lengths(kind, N, random)).astype(np.float32)
    queries = torch.from_numpy(random.standard_normal((Q, D)).astype(np.float32))
    rank = np.empty(N, np.int64)
    rank[np.argsort(-np.linalg.norm(keys, axis=1))] = np.arange(N)
    truth = torch.from_numpy(keys).double() @ queries.double().T
    return World(keys, queries, truth.topk(10, 0).indices.T.numpy(), snapshot(keys, cuts=(10_000,)), rank)


@functools.cache
def trained(kind: str) -> Any:
    index = IVF.train(Metric.DOT, world(kind).keys[:10_000], N, "PQ24x4fs")
    index.add(np.arange(N), world(kind).keys)
    return index.inner


def indexed(kind: str) -> Index:
    """Lists of 4-bit codes, which the longest keys are beyond; as many outliers as operations allow."""
    index = IVF(Metric.DOT, trained(kind))
    index.covered, index.effort, index.fetch_k = N, 80, 10
    return index


# -- hits --------------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("k", [1, 10])
def test_the_largest_inner_products_are_found_for_any_norms(kind: str, k: int) -> None:
    index, here = indexed(kind), world(kind)
    assert here.outliers_found(index, k) >= 0.99
    index.longest = NONE
    assert here.outliers_found(index, k) < 0.97  # by codes alone: the test tells the two apart


def union(queries: Array, keys: Array, found: Array, longest: Array, k: int) -> Array:  # (q, k)
    """The k best of those found and of the longest, ties by position, by loops."""
    best = np.full((len(queries), k), -1)
    for i, query in enumerate(queries):
        those = {int(j) for j in [*found[i], *longest] if j >= 0}
        order = sorted(those, key=lambda j: (-float(query.astype(np.float64) @ keys[j].astype(np.float64)), j))
        best[i, : len(order[:k])] = order[:k]
    return best


@pytest.mark.parametrize("compiled", WITH_AND_WITHOUT)
@pytest.mark.parametrize("d", [5, 16, 48])
@pytest.mark.parametrize("q", [1, 3, 11])
def test_outliers_take_their_places_among_the_best(
    compiled: bool, d: int, q: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers, whose products are exact: with ties, zeros, keys that were found already, and some left out."""
    monkeypatch.setattr(outliers, "available", lambda: compiled)
    monkeypatch.setattr("softdb.kernels.threads.WORTH_A_THREAD", 1)
    keys = rng.integers(-2, 3, (400, d)).astype(np.float32)
    keys[:60] *= rng.integers(1, 9, (60, 1))
    keys[60:70], keys[70] = keys[:10], 0
    queries = rng.integers(-2, 3, (q, d)).astype(np.float32)
    queries[q // 2] = 0
    here, allowed = snapshot(keys, live=np.arange(400) % 7 > 0, cuts=(33,)), np.arange(400) % 5 > 0
    some = Outliers(here, rng.permutation(75).astype(np.int64))
    assert (np.diff(some.lengths[: some.count]) <= 0).all()
    for mine in (None, allowed):
        counts = here.live & allowed if mine is not None else here.live
        places = some.positions(here, mine)
        assert set(places[places >= 0]) == set(np.flatnonzero(counts[:75]))
        for k in (1, 4, 20):
            among = nearest(here, Query(torch.from_numpy(queries), k, Metric.DOT, counts & (rng.random(400) < 0.3)))
            scores = np.einsum("qd,qkd->qk", queries, keys[among]).astype(np.float32)
            expected = union(queries, keys, among, places, k)
            some.take_part(queries, places, among, scores)
            assert among.tolist() == expected.tolist()
            assert (scores == np.einsum("qd,qkd->qk", queries, keys[among])).all()


@pytest.mark.parametrize("compiled", WITH_AND_WITHOUT)
def test_short_answers_stay_short(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever searches sees that the index gave out, and looks elsewhere."""
    monkeypatch.setattr(outliers, "available", lambda: compiled)
    keys = np.diag(np.arange(1, 21, dtype=np.float32))
    here, queries = snapshot(keys), np.ones((6, 20), np.float32)
    results, scores = np.tile([3, -1], (6, 1)), np.tile(np.array([4, -np.inf], np.float32), (6, 1))
    results[4], scores[4] = [3, 2], [4, 3]
    some = Outliers(here, np.array([19, 18, 17]))
    some.take_part(queries, some.positions(here, None), results, scores)
    assert results.tolist() == [[3, -1]] * 4 + [[19, 18]] + [[3, -1]]


def test_filters_and_deletions_are_respected(rng: np.random.Generator) -> None:
    kind = "log-normal 1"
    here, index = world(kind), indexed(kind)
    gone = np.isin(here.rank, np.arange(0, 90, 3))
    seen = snapshot(here.keys, live=~gone)
    for share in (1.0, 0.95, 0.5, 0.2):
        allowed = rng.random(N) < share
        counts = allowed & ~gone
        actual = find(seen, index, here.queries, 5, Metric.DOT, None if share == 1 else allowed)
        assert counts[actual].all()
        truth = nearest(seen, Query(here.queries, 1, Metric.DOT, counts))[:, 0]
        long = here.rank[truth] < N // 1000
        assert long.sum() > Q // 6
        assert (actual[long, 0] == truth[long]).mean() >= 0.99


@pytest.mark.parametrize("k", [1, 10, 100, 3000])
def test_k_stay_k_without_duplicates(k: int) -> None:
    here = world("Pareto 3")
    actual = find(here.seen, indexed("Pareto 3"), here.queries[:20], k, Metric.DOT, None)
    assert actual.shape == (20, k)
    assert actual.min() >= 0
    assert [len(set(line)) for line in actual.tolist()] == [k] * 20
    scores = np.take_along_axis(here.queries[:20].numpy() @ here.keys.T, actual, 1)
    assert (np.diff(scores) <= 1e-4).all()


def test_a_batch_finds_the_same_as_single_queries() -> None:
    here, index = world("Pareto 3"), indexed("Pareto 3")
    actual = find(here.seen, index, here.queries, 10, Metric.DOT, None)
    alone = [find(here.seen, index, here.queries[i : i + 1], 10, Metric.DOT, None)[0] for i in range(60)]
    assert np.array_equal(actual[:60], alone)


def test_threads_may_be_the_first_to_search() -> None:
    here, index = world("log-normal 1"), indexed("log-normal 1")
    expected = find(here.seen, indexed("log-normal 1"), here.queries, 3, Metric.DOT, None)
    results: list[bool] = []

    def ask() -> None:
        results.append(np.array_equal(find(here.seen, index, here.queries, 3, Metric.DOT, None), expected))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


# -- selection ---------------------------------------------------------------------------------------------------------


def test_the_longest_are_looked_for_among_the_older_live_records(rng: np.random.Generator) -> None:
    keys = directions(1000, 6, rng) * lengths("Pareto 3", 1000, rng)
    here = snapshot(keys, live=np.arange(1000) != np.linalg.norm(keys, axis=1).argmax(), cuts=(300,), dtype="float16")
    actual = lengths_of(here, 800)
    live = np.flatnonzero(here.live[:800])
    norms = np.linalg.norm(keys.astype(np.float16).astype(np.float64), axis=1)
    np.testing.assert_allclose(actual[live], norms[live], rtol=1e-6)
    assert np.isnan(np.delete(actual, live)).all()
    order = live[np.argsort(-norms[live])]
    assert longest_of(here, actual, 20).tolist() == order[:20].tolist()
    long = norms[order] > 1.5 * np.median(norms[live])
    assert longest_of(here, actual, 900).tolist() == order[long].tolist()


def test_rows_that_a_snapshot_lacks_take_no_part(rng: np.random.Generator) -> None:
    """A cached index may name rows that were compacted away since."""
    here = snapshot(-np.abs(rng.standard_normal((50, 4))))
    some = Outliers(here, np.array([7, 99, 3]))
    assert some.count == 2
    places = some.positions(here, None)
    results, scores = np.array([[0, 1]]), np.array([[-1e9, -1e9]], np.float32)
    some.take_part(np.ones((1, 4), np.float32), places, results, scores)
    assert set(results[0]) == {3, 7}
    assert scores.max() < 0  # missing candidates are not scored as zero keys


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_metrics_without_norms_have_no_outliers(metric: Any, rng: np.random.Generator) -> None:
    keys = directions(5000, 8, rng) * rng.uniform(0.8, 1.2, (5000, 1))
    if metric != "dot":
        keys *= lengths("Pareto 3", 5000, rng)
    with holding(keys, metric=metric) as db:
        report = db.build_index("ivf", recall=0.3)
        db.search(keys[:5], k=3)
        index = db.core.finder.index
        assert index is not None
        assert index.longest is None or not len(index.longest)
        assert report.outliers == 0
        assert bool(report.recall_by_norm) == (metric == "dot")


@pytest.mark.slow
def test_equal_lengths_make_no_classes(rng: np.random.Generator) -> None:
    with holding(directions(5000, 8, rng)) as db:
        classes = db.build_index("ivf", recall=0.3).recall_by_norm
    assert [classes[name]["of"] for name in ("longest 1%", "next 9%")] == [0, 0]
    assert classes["rest"]["of"] > 1000


# -- through the database ----------------------------------------------------------------------------------------------

M, W = 6000, 24


def items() -> tuple[Array, Array]:
    """Keys (M, W) of very different lengths, and queries."""
    random = np.random.default_rng(1)
    keys = directions(M, W, random) * lengths("log-normal 1", M, random)
    return keys.astype(np.float32), random.standard_normal((200, W)).astype(np.float32)


def long_keys(path: Path | None = None, **words: Any) -> softdb.SoftDB:
    """A database whose index finds little by itself."""
    db = holding(items()[0], payloads=[{"g": i % 2} for i in range(M)], path=path, **words)
    assert db.build_index("ivf", recall=0.2, queries=items()[1]).outliers >= outliers.LEAST
    return db


def check(db: softdb.SoftDB, **words: Any) -> None:
    """The largest inner product is found wherever it is that of one of the longest keys."""
    queries = items()[1]
    found, exact = (db.search(queries, k=1, exact=way, **words) for way in (False, True))
    index = db.core.finder.index
    assert index is not None
    assert index.longest is not None
    long = np.isin(exact.rows[:, 0].numpy(), index.longest[: outliers.LEAST])
    assert long.sum() > 40
    assert found.rows[long, 0].tolist() == exact.rows[long, 0].tolist()
    assert found.scores[long].tolist() == exact.scores[long].tolist()


def test_search_and_attention_find_them() -> None:
    db = long_keys()
    check(db)
    check(db, where={"g": 1})
    queries = items()[1]
    pooled, exact = db.attend(queries, k=1), db.search(queries, k=1, exact=True)
    assert pooled.hits is not None
    hit = pooled.hits.rows[:, 0] == exact.rows[:, 0]
    assert hit.float().mean() > 0.9
    index = db.core.finder.index
    assert index is not None
    index.longest = NONE
    with pytest.raises(AssertionError):
        check(db)


def test_deleted_outliers_never_return_and_others_replace_them() -> None:
    db = long_keys()
    order = np.argsort(-np.linalg.norm(items()[0], axis=1))
    db.delete(order[:10].tolist())
    check(db)
    assert not np.isin(db.search(items()[1], k=20).rows.numpy(), order[:10]).any()
    db.delete(order[10:200].tolist())
    assert not np.isin(db.search(items()[1], k=20).rows.numpy(), order[:200]).any()
    check(db)
    index = db.core.finder.index
    assert index is not None
    assert index.longest is not None
    assert index.longest[:10].tolist() == order[200:210].tolist()


def test_recall_holds_where_a_filter_leaves_the_longest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effort is tuned on what the index has to find by itself."""
    monkeypatch.setattr(build, "affordable", lambda lengths, *_: len(lengths))
    keys, queries = items()
    order = np.argsort(-np.linalg.norm(keys, axis=1))
    keys[order[:60]] *= 10  # nothing else is ever the nearest
    with holding(keys, payloads=[{"long": bool(one)} for one in np.isin(np.arange(M), order[:60])]) as db:
        report = db.build_index("ivf", recall=0.7, queries=queries)
        assert report.outliers == 60
        assert report.recall == report.recall_by_norm["longest 1%"]["recall"] == 1
        actual, exact = (
            db.search(queries, k=10, where={"long": False}, exact=way).rows.numpy() for way in (False, True)
        )
        assert (actual[:, :, None] == exact[:, None]).any(2).mean() >= 0.65


def test_young_outliers_are_found_before_and_after_absorption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 300)
    db, random = long_keys(), np.random.default_rng(3)
    young_keys = directions(1000, W, random)
    young_keys[:20] *= 60
    db.insert(range(M, M + 200), young_keys[:200])
    exact = db.search(items()[1], k=1, exact=True).rows[:, 0]
    young = exact >= M
    assert young.sum() > 100
    assert db.search(items()[1], k=1).rows[young, 0].tolist() == exact[young].tolist()
    assert index_report(db).unindexed == 200
    db.insert(range(M + 200, M + 1000), young_keys[200:])
    assert index_report(db).unindexed == 0
    check(db)
    assert db.search(items()[1], k=1).rows[young, 0].tolist() == exact[young].tolist()


def test_after_compaction_rows_keep_their_numbers(tmp_path: Path) -> None:
    with long_keys(tmp_path / "db") as db:
        order = np.argsort(-np.linalg.norm(items()[0], axis=1))
        db.delete([*range(0, M, 3), *order[:5].tolist()][::-1][: M // 4])
        db.compact()
        check(db)
    with softdb.open(tmp_path / "db", mode="r") as db:
        check(db)


def test_a_loaded_index_knows_its_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_keys(tmp_path / "db").close()
    passes: list[int] = []

    def counted(here: Snapshot, border: int) -> Array:
        passes.append(border)
        return lengths_of(here, border)

    monkeypatch.setattr(outliers, "lengths_of", counted)
    with softdb.open(tmp_path / "db") as db:
        check(db)
        assert not passes  # a search after opening reads no more than it needs
        entry = db._store.index_entry()
        assert entry is not None
        del entry["room"], entry["longest"]  # as an older softdb wrote it
        entry["hmac"] = cache._signature(entry)
        db._store.put_index_entry(entry)
    with softdb.open(tmp_path / "db", mode="r") as db:
        check(db)
        check(db)
    assert passes == [M]


def test_recall_is_reported_for_long_keys_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from softdb.terminal import fact

    monkeypatch.setattr(build, "QUERIES", 300)
    monkeypatch.setattr(build, "affordable", lambda lengths, *_: len(lengths))
    db = long_keys()
    report = db.tune(0.5, k=5)
    classes = report.recall_by_norm
    assert list(classes) == ["longest 1%", "next 9%", "rest"]
    half, whole = build.QUERIES // 2, sum(one["of"] for one in classes.values())
    assert 5 * half <= whole <= 6 * half  # the k nearest, or one more where the key itself is not among them
    mean = sum(one["recall"] * one["of"] for one in classes.values() if one["of"]) / whole
    assert mean == pytest.approx(report.recall, abs=0.01)
    assert report.outliers == M // 100
    assert classes["longest 1%"]["recall"] == 1
    assert classes["next 9%"]["of"] > 100
    assert classes["next 9%"]["recall"] < 1
    assert report.measured_on == "stored keys, each without itself"
    assert index_report(db).recall_by_norm == classes
    assert fact(report.summary()["recall_by_norm"]).startswith("longest 1% (recall 1, of ")
