"""A database on a GPU: with a stand-in for FAISS everywhere, and on a real GPU where there is one."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import faiss
import numpy as np
import pytest
import torch
from contracts.index import IndexContract, N, scores, world
from doubles.fake_gpu import DEVICE, FakeGpu, fake, recall
from worlds import awkward, holding, index_report, snapshot

import softdb
from softdb.check import Metric
from softdb.device import Board, compare, faiss_lists, probe, resident
from softdb.device.faiss_lists import OnGPU
from softdb.device.resident import DeviceColumn
from softdb.index import cache, flat
from softdb.index.contract import Index, Rows
from softdb.index.query import Query
from softdb.store.snapshot import Segment, Snapshot

__all__ = ["fake"]

Array = np.ndarray[Any, Any]
REAL = torch.cuda.is_available() and hasattr(faiss, "StandardGpuResources")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not REAL, reason="needs a CUDA device and the GPU build of FAISS")]


# -- the contract, on both ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
class TestPretendedIVF(IndexContract):
    kind: ClassVar[str] = "ivf"


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
class TestPretendedIVFSQ8(IndexContract):
    kind: ClassVar[str] = "ivf-sq8"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every database on the first GPU."""
    monkeypatch.setattr(probe, "FEW", 500)
    monkeypatch.setattr(
        Board, "of", classmethod(lambda cls, devices, dtype=None: cls(torch.device("cuda", 0), dtype=dtype))
    )


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs a CUDA device and the GPU build of FAISS")
@pytest.mark.usefixtures("cuda")
class TestIVFOnAGPU(IndexContract):
    kind: ClassVar[str] = "ivf"


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs a CUDA device and the GPU build of FAISS")
@pytest.mark.usefixtures("cuda")
class TestIVFSQ8OnAGPU(IndexContract):
    kind: ClassVar[str] = "ivf-sq8"


DEVICES = [pytest.param(DEVICE, id="cpu"), pytest.param(torch.device("cuda", 0), id="cuda", marks=needs_gpu)]


# -- the exact finder on the GPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("fits", [True, False])
def test_exact_search_is_that_of_the_flat_finder(
    device: torch.device, metric: Metric, dtype: str, fits: bool, rng: np.random.Generator, monkeypatch: Any
) -> None:
    if not fits:
        monkeypatch.setattr(resident, "room", lambda device: 0)
    keys = awkward(rng, 300, 6)
    keys[100:160] = keys[20]  # more ties than are kept
    some, few = rng.random(300) < 0.6, np.arange(300) % 50 == 3
    for live in (None, rng.random(300) < 0.7):
        records, board = snapshot(keys, live=live, dtype=dtype, cuts=(7, 90)), Board(device)
        for allowed in (None, some, few, np.zeros(300, np.bool_)):
            for k in (1, 10, 250, 400):
                queries = torch.from_numpy(rng.standard_normal((9, 6)).astype(np.float32))
                queries[0], queries[1] = 0, torch.from_numpy(keys[20])
                actual = board.nearest(records, Query(queries.to(device), k, metric, allowed))
                assert actual.tolist() == flat.nearest(records, Query(queries, k, metric, allowed)).tolist()
        assert (board.shards(records)[0].keys is None) is not fits


@pytest.mark.parametrize("device", DEVICES)
def test_exact_search_of_the_younger_part_and_in_float64(device: torch.device, rng: np.random.Generator) -> None:
    records, board = snapshot(awkward(rng, 90, 4), cuts=(33,)), Board(device)
    queries = torch.from_numpy(rng.standard_normal((5, 4)))
    for start in (1, 40, 88):
        actual = board.nearest(records, Query(queries.to(device), 5, Metric.DOT), start)
        assert actual.tolist() == flat.nearest(records, Query(queries, 5, Metric.DOT), start).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_coarse_products_do_not_mislead(device: torch.device, rng: np.random.Generator) -> None:
    records, board = snapshot(awkward(rng, 4000, 64)), Board(device)
    queries = torch.from_numpy(rng.standard_normal((20, 64)).astype(np.float32))
    expected = flat.nearest(records, Query(queries, 10, Metric.L2)).tolist()
    torch.set_float32_matmul_precision("medium")
    try:
        assert board.nearest(records, Query(queries.to(device), 10, Metric.L2)).tolist() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


def test_only_queries_within_the_bound_are_repeated(rng: np.random.Generator, monkeypatch: Any) -> None:
    again: list[int] = []

    def counted(scan: Any, queries: torch.Tensor, *rest: Any) -> Any:
        again.append(len(queries))
        return exact(scan, queries, *rest)

    exact = flat.Scan.second_round
    monkeypatch.setattr(flat.Scan, "second_round", counted)
    keys = rng.standard_normal((2000, 32)).astype(np.float32)
    keys[100:160] = keys[7]
    queries = torch.from_numpy(np.concatenate([rng.standard_normal((30, 32)).astype(np.float32), keys[7:8]]))
    live = np.ones(2000, np.bool_)
    live[flat.nearest(snapshot(keys), Query(queries[:30], 5, Metric.L2))] = False  # no reason to ask again
    again.clear()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            Board(DEVICE).nearest(snapshot(keys, live=live), Query(queries, 5, Metric.L2))
        finally:
            torch.set_float32_matmul_precision("highest")
    assert again == [1, 1]  # the query with sixty nearest


def test_many_queries_and_small_blocks(rng: np.random.Generator, monkeypatch: Any) -> None:
    for name, size in {"QUERIES": 4, "GATHERED": 500, "SCORED": 16384, "CONVERTED": 1}.items():
        monkeypatch.setattr(f"softdb.device.compare.{name}", size)
    records, board = snapshot(awkward(rng, 9000, 5), live=np.arange(9000) % 3 > 0, cuts=(5000,)), Board(DEVICE)
    queries = torch.from_numpy(rng.standard_normal((11, 5)).astype(np.float32))
    for metric in Metric:
        actual = board.nearest(records, Query(queries, 12, metric))
        assert actual.tolist() == flat.nearest(records, Query(queries, 12, metric)).tolist()


@pytest.mark.parametrize("metric", list(Metric))
@pytest.mark.parametrize("fits", [True, False])
def test_candidates_are_ordered_as_exact_search_orders_them(
    metric: Metric, fits: bool, rng: np.random.Generator, monkeypatch: Any
) -> None:
    if not fits:
        monkeypatch.setattr(resident, "room", lambda device: 0)
    keys = rng.standard_normal((60, 5)).astype(np.float32)
    keys[40:50] = keys[10:20]
    records, board = snapshot(keys, cuts=(17,)), Board(DEVICE)
    queries = torch.from_numpy(rng.standard_normal((6, 5)).astype(np.float32))
    for c, k in [(1, 1), (30, 30), (60, 10), (4, 9)]:
        candidates = np.stack([rng.permutation(60)[:c] for _ in range(6)])
        candidates[rng.random((6, c)) < 0.2] = -1
        actual = compare.ordered(board.shards(records)[0], queries, torch.from_numpy(candidates), k, metric)
        for i in range(6):
            allowed = np.isin(np.arange(60), candidates[i])
            query = Query(queries[i : i + 1], k, metric, allowed)
            assert actual[i].tolist() == flat.nearest(records, query)[0].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_products_that_overflow_bring_no_dead_record_back(device: torch.device) -> None:
    keys, queries = np.full((3000, 4), -3e38, np.float32), torch.full((2, 4), 1e10)
    keys[2990] = -1e38
    for live in (np.ones(3000, np.bool_), np.arange(3000) % 3 == 1, np.arange(3000) % 1000 == 990):
        keys[~live] = 1e10
        for k in (3, 5, 400):
            records = snapshot(keys, live=live)
            actual = Board(device).nearest(records, Query(queries.to(device), k, Metric.DOT))
            assert live[actual[actual >= 0]].all()
            assert actual.tolist() == flat.nearest(records, Query(queries, k, Metric.DOT)).tolist()
    records = snapshot(np.full((20, 4), -3e38), live=np.arange(20) % 3 == 1)  # as few as are kept
    nine = Board(device).nearest(records, Query(queries.to(device), 9, Metric.DOT))
    assert nine[0, :7].tolist() == list(range(1, 20, 3))


# -- the keys on the GPU -----------------------------------------------------------------------------------------------


def grown(keys: Array, generation: int, *segments: tuple[int, int, int]) -> Snapshot:
    """Segments (number, low, high) of some keys."""
    parts = tuple(Segment(number, low, None, keys[low:high], None) for number, low, high in segments)
    return Snapshot.of(generation, parts, np.ones(sum(len(part) for part in parts), np.bool_))


def test_new_keys_alone_are_uploaded(rng: np.random.Generator) -> None:
    keys, column = rng.standard_normal((100, 4)).astype(np.float32), DeviceColumn(DEVICE, False)
    first = column.of(grown(keys, 1, (1, 0, 10), (2, 10, 15)))
    assert first is not None
    np.testing.assert_array_equal(first.numpy(), keys[:15])
    first.fill_(7)  # keys already on the device are not sent again
    more = column.of(grown(keys, 2, (1, 0, 10), (2, 10, 30), (3, 30, 60)))
    assert more is not None
    assert bool((more[:15] == 7).all())
    np.testing.assert_array_equal(more[15:].numpy(), keys[15:60])
    room = column.of(grown(keys, 3, (1, 0, 10), (2, 10, 30), (3, 30, 62)))
    assert room is not None
    assert room.data_ptr() == more.data_ptr()  # some was kept free
    old = column.of(grown(keys, 1, (1, 0, 10), (2, 10, 15)))
    assert old is not None
    assert old.data_ptr() == more.data_ptr()
    assert len(old) == 15


def test_compaction_uploads_again_and_older_snapshots_fall_back(rng: np.random.Generator) -> None:
    keys, column = rng.standard_normal((50, 4)).astype(np.float32), DeviceColumn(DEVICE, False)
    before = grown(keys, 1, (1, 0, 30), (2, 30, 50))
    assert column.of(before) is not None
    actual = column.of(grown(keys, 2, (2, 30, 50), (3, 0, 10)))
    assert actual is not None
    np.testing.assert_array_equal(actual.numpy(), np.concatenate([keys[30:], keys[:10]]))
    assert column.of(before) is None
    actual = column.of(grown(keys, 3, (4, 20, 40), (3, 0, 12)))  # the last is the same, and grew
    assert actual is not None
    np.testing.assert_array_equal(actual.numpy(), np.concatenate([keys[20:40], keys[:12]]))
    queries = torch.from_numpy(keys[:3])
    board = Board(DEVICE)
    board.cards[0].keys = column
    assert (
        board.nearest(before, Query(queries, 2, Metric.L2)).tolist()
        == flat.nearest(before, Query(queries, 2, Metric.L2)).tolist()
    )


def test_keys_too_large_for_the_gpu_stay_on_the_host(rng: np.random.Generator, monkeypatch: Any) -> None:
    keys, column = rng.standard_normal((100, 4)).astype(np.float32), DeviceColumn(DEVICE, False)
    space = {"bytes": 16 * 60 / (1 - resident.SPARE)}
    monkeypatch.setattr(resident, "room", lambda device: space["bytes"])
    assert column.of(grown(keys, 1, (1, 0, 61))) is None
    assert column.of(grown(keys, 1, (1, 0, 60))) is not None
    space["bytes"] = 16 * 20 / (1 - resident.SPARE)  # not both, but the larger one in the other's place
    actual = column.of(grown(keys, 2, (1, 0, 80)))
    assert actual is not None
    np.testing.assert_array_equal(actual.numpy(), keys[:80])
    assert column.of(grown(keys, 3, (1, 0, 100), (2, 0, 100))) is None

    def full(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    assert column.of(grown(keys, 4, (5, 0, 5))) is None


def test_an_old_snapshot_is_not_kept_alive(rng: np.random.Generator) -> None:
    import gc
    import weakref

    board, records = Board(DEVICE), snapshot(awkward(rng))
    board.nearest(records, Query(torch.zeros(1, 5), 3, Metric.DOT))
    gone = weakref.ref(records)
    del records
    gc.collect()
    assert gone() is None


def test_masks_of_the_latest_filters_stay(rng: np.random.Generator) -> None:
    board, records = Board(DEVICE), snapshot(awkward(rng))
    allowed = rng.random(40) < 0.5
    kept = board.shards(records)[0].live_mask(allowed)
    assert board.shards(records)[0].live_mask(allowed) is kept
    others = [allowed.copy() for _ in range(12)]
    for one in others:
        board.shards(records)[0].live_mask(one)
    assert len(board.cards[0].masks._known) <= 4


def nearest_by(records: Snapshot, index: Index, query: Query) -> Rows:
    """Positions by an index on a device, or by comparing all."""
    assert index.devices is not None
    found = index.devices.find(records, index, query)
    return index.devices.nearest(records, query) if found is None else found.positions


# -- the index on the GPU ----------------------------------------------------------------------------------------------


def opened(path: Path | None = None, kind: str = "ivf", **words: Any) -> tuple[softdb.SoftDB, Array, Array]:
    keys, queries = world()
    db = holding(keys, payloads=[{"x": float(one)} for one in keys[:, 0]], path=path, **words)
    assert db.build_index(kind, recall=0.95).met
    return db, keys, queries


@pytest.mark.slow
def test_searches_run_on_torchs_stream_and_leave_other_streams(fake: FakeGpu) -> None:
    db, _, queries = opened()
    fake.stream, fake.asked[:] = 12, []  # the pretended index refuses any other
    db.search(queries)
    assert len(fake.asked) == 1
    assert faiss_lists._resources().inner.stream == "FAISS' own"
    assert db.attend(queries, k=20).finder == "ivf on cpu:0"
    assert len(fake.asked) == 2


@pytest.mark.slow
def test_a_search_that_fails_gives_the_stream_back(fake: FakeGpu) -> None:
    db, _, queries = opened()
    index = db.core.finder.index
    assert isinstance(index, OnGPU)
    with pytest.raises(AssertionError):
        index.near(torch.from_numpy(queries), 3000)
    assert faiss_lists._resources().inner.stream == "FAISS' own"
    assert faiss_lists._resources().lock.acquire(blocking=False)


@pytest.mark.slow
def test_more_than_faiss_gives_is_compared_exactly(fake: FakeGpu) -> None:
    db, keys, queries = opened()
    index = db.core.finder.index
    assert isinstance(index, OnGPU)
    index.covered = 10**6  # k is small for it
    fake.asked.clear()
    index.fetch_k = 10
    assert not bool((db.search(queries, k=300).rows < 0).any())  # 3000 candidates
    hits = db.search(queries, k=2500)
    assert not fake.asked
    assert recall(hits.rows.numpy(), np.argsort(-scores("dot", queries, keys), axis=1)[:, :2500]) > 0.999
    assert hits.rows.shape == (len(queries), 2500)
    assert index.find(queries, 3000).shape == (len(queries), 3000)  # what a trial asks for: the rest is -1
    assert bool((index.find(queries, 3000)[:, 2048:] == -1).all())
    assert index.effort_most <= 2048
    with pytest.raises(ValueError, match="takes no filter"):
        index.find(queries, 10, np.arange(N))


@pytest.mark.few(1)
@pytest.mark.parametrize("side", [1, -1])
def test_filters_that_go_with_the_keys(fake: FakeGpu, side: int) -> None:
    db, keys, _ = opened(metric="l2")
    order = np.argsort(side * keys[:, 0])
    queries = keys[order[:40]]
    fake.asked.clear()
    hits = db.search(queries, where={"x": {"$gt": 0}}, k=10)
    assert fake.asked
    assert bool(hits.live.all())
    rows = hits.rows.numpy()
    assert (keys[rows][:, :, 0] > 0).all()
    truth = scores("l2", queries, keys)
    truth[:, keys[:, 0] <= 0] = -np.inf
    assert recall(rows, np.argsort(-truth, axis=1)[:, :10]) >= 0.95


def test_too_few_that_count_are_not_enough(fake: FakeGpu, rng: np.random.Generator) -> None:
    """Coarse codes need many candidates; a filter must not leave a few of them."""
    keys, _ = world()
    index = Board(DEVICE).engines["ivf"].train(Metric.L2, keys, N, "PQ2")
    index.add(np.arange(N), keys)
    index.effort, index.fetch_k = index.effort_most, 20
    order = np.argsort(keys[:, 0])
    allowed = np.zeros(N, np.bool_)
    allowed[order[: N // 2]] = True
    queries = torch.from_numpy(keys[order[N - 500 : N - 300]])
    actual = nearest_by(snapshot(keys), index, Query(queries, 10, Metric.L2, allowed, pairwise=False))
    assert fake.asked
    assert allowed[actual].all()
    assert recall(actual, flat.nearest(snapshot(keys), Query(queries, 10, Metric.L2, allowed))) >= 0.99


@pytest.mark.slow
def test_more_is_fetched_where_less_counts(fake: FakeGpu) -> None:
    db, keys, queries = opened()
    index = db.core.finder.index
    assert index is not None
    fake.asked.clear()
    db.search(queries)
    db.delete(range(0, N, 2))
    hits = db.search(queries)
    (_, plain, lists), (_, fetched, probed) = fake.asked
    assert plain == max(probe.FLOOR, index.fetch_k * 10)
    assert 2 * plain < fetched < 3.5 * plain
    assert probed >= min(2 * lists, index.effort_most)
    assert bool((hits.rows % 2 == 1).all())
    truth = scores("dot", queries, keys)
    truth[:, ::2] = -np.inf
    assert recall(hits.rows.numpy(), np.argsort(-truth, axis=1)[:, :10]) >= 0.9


def test_a_snapshot_with_gaps_and_one_older_than_the_index(fake: FakeGpu, rng: np.random.Generator) -> None:
    keys, queries = world()
    board = Board(DEVICE)
    index = board.engines["ivf-sq8"].train(Metric.DOT, keys, N, "SQ8")
    index.add(np.arange(N), keys)
    index.effort = index.effort_most
    asked = torch.from_numpy(queries)
    rows = np.flatnonzero(rng.random(N) < 0.8)
    gaps = Snapshot.of(2, (Segment(7, 0, rows, keys[rows], None),), np.ones(len(rows), np.bool_))
    for records in (gaps, snapshot(keys[: N // 2]), snapshot(np.concatenate([keys, 3 * queries]), cuts=(N,))):
        actual = nearest_by(records, index, Query(asked, 10, Metric.DOT, pairwise=False))
        assert recall(actual, flat.nearest(records, Query(asked, 10, Metric.DOT))) > 0.99
        assert all(len(set(line)) == 10 for line in actual.tolist())


@pytest.mark.slow
def test_threads_take_turns(fake: FakeGpu) -> None:
    db, _, queries = opened()
    expected, wrong = db.search(queries).rows.tolist(), []

    def ask() -> None:
        for _ in range(10):
            if db.search(queries).rows.tolist() != expected:
                wrong.append(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(fake.asked) > 40


@pytest.mark.slow
def test_gradients_and_one_query(fake: FakeGpu) -> None:
    db, keys, queries = opened()
    asked = torch.from_numpy(queries[0]).requires_grad_()
    hits = db.search(asked, k=3)
    hits.scores.sum().backward()  # type: ignore[no-untyped-call]
    assert asked.grad is not None
    np.testing.assert_allclose(asked.grad.numpy(), keys[hits.rows.numpy()[0]].sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_keys_that_do_not_fit_are_read_from_the_segments(fake: FakeGpu, monkeypatch: Any) -> None:
    db, _, queries = opened()
    expected, board = db.search(queries).rows.tolist(), db._finder.devices
    assert isinstance(board, Board)
    monkeypatch.setattr(resident, "room", lambda device: 0)
    board.forget()
    fake.asked.clear()
    assert db.search(queries).rows.tolist() == expected
    assert fake.asked
    assert board.shards(db._store.snapshot)[0].keys is None
    db.insert(["young"], 5 * queries[:1])
    assert db.search(queries[:1]).ids[0][0] == "young"


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ivf", "ivf-sq8"])
def test_the_cache_is_an_index_of_the_cpu(fake: FakeGpu, kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    db, keys, queries = opened(tmp_path / "db", kind)
    assert index_report(db).device == "cpu:0"
    expected = db.search(queries).rows.numpy()
    db.close()
    uploads = fake.uploads
    with softdb.open(tmp_path / "db") as db:  # it goes up again
        assert db.search(queries).rows.tolist() == expected.tolist()
        assert index_report(db).device == "cpu:0"
        assert fake.uploads == uploads + 1
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, devices, dtype=None: None))
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with softdb.open(tmp_path / "db") as db:  # a machine without a GPU
        truth = np.argsort(-scores("dot", queries, keys), axis=1)[:, :10]
        assert recall(db.search(queries).rows.numpy(), truth) >= 0.95
        assert (index_report(db).kind, index_report(db).device) == (kind, "cpu")
        assert fake.uploads == uploads + 1


def test_codes_without_a_gpu_form_stay_on_the_cpu(
    fake: FakeGpu, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Board, "of", classmethod(lambda cls, devices, dtype=None: None))
        opened(tmp_path / "db")[0].close()
    with softdb.open(tmp_path / "db") as db, caplog.at_level(logging.WARNING, "softdb"):
        _, queries = world()
        assert bool(db.search(queries).live.all())
        assert index_report(db).device == "cpu"
        assert "stays on the CPU: its codes have no form on a GPU" in caplog.text
    assert not fake.uploads


@pytest.mark.slow
def test_without_the_gpu_part_a_cached_index_serves_on_the_cpu(
    fake: FakeGpu, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path / "db")[0].close()
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with softdb.open(tmp_path / "db") as db:
        assert bool(db.search(world()[1]).live.all())
        assert "needs the GPU build of FAISS" in caplog.text


@pytest.mark.slow
def test_compaction_takes_codes_out(fake: FakeGpu, tmp_path: Path) -> None:
    db, keys, queries = opened(tmp_path / "db")
    db.delete(range(0, N, 2))
    db.compact()
    index = db.core.finder.index
    assert isinstance(index, OnGPU)
    assert index.inner.ntotal == len(db) == N // 2
    truth = scores("dot", queries, keys)
    truth[:, ::2] = -np.inf
    assert recall(db.search(queries).rows.numpy(), np.argsort(-truth, axis=1)[:, :10]) >= 0.9


@pytest.mark.slow
def test_young_records_are_taken_in(fake: FakeGpu, monkeypatch: Any) -> None:
    monkeypatch.setattr("softdb.index.finder.ABSORB_ROWS", 100)
    db, keys, queries = opened()
    db.insert([f"new{i}" for i in range(1000)], keys[:1000] * np.float32(1.2))
    db.search(queries)
    index = db.core.finder.index
    assert isinstance(index, OnGPU)
    assert index.inner.ntotal == N + 1000
    truth = scores("dot", queries, np.concatenate([keys, keys[:1000] * np.float32(1.2)]))
    assert recall(db.search(queries).rows.numpy(), np.argsort(-truth, axis=1)[:, :10]) >= 0.9


def test_indexes_are_built_on_the_gpu(fake: FakeGpu, monkeypatch: Any) -> None:
    keys, queries = world(d=20)
    with holding(keys) as db:
        few = db.build_index()
        assert (few.kind, few.device) == ("flat", "cpu:0")
        monkeypatch.setattr("softdb.device.board.SMALL", 1)
        reports: list[tuple[str, int, int]] = []
        asked: list[int] = []
        exact = flat.nearest

        def counted(records: Snapshot, query: Query, *rest: Any) -> Any:
            asked.append(len(query.queries))
            return exact(records, query, *rest)

        monkeypatch.setattr(flat, "nearest", counted)
        report = db.build_index(recall=0.9, queries=queries, progress=lambda *step: reports.append(step))
        assert ("choosing", 2, 3) in reports  # every width of the product codes
        assert max(asked, default=0) < len(queries)  # the truth is found there
        assert report.met
        assert report.device == "cpu:0"
        assert report.codes in ("PQ4", "PQ20", "SQ8")
        with pytest.raises(softdb.BadInput, match="but the smallest index of kind 'ivf', ivf PQ4"):
            db.build_index("ivf", memory=1000)


@pytest.mark.parametrize(
    ("dim", "codes"),
    [
        (16, ("PQ4", "PQ8", "PQ16")),
        (128, ("PQ16", "PQ32", "PQ64")),
        (384, ("PQ48", "PQ64", "PQ96")),
        (768, ("PQ48", "PQ64", "PQ96")),
        (7, ("PQ1",)),
        (30, ("SQ8",)),
        (101, ("SQ8",)),
        (1536, ("PQ96",)),
        (2048, ("SQ8",)),
    ],
)
def test_codes_that_faiss_knows(dim: int, codes: tuple[str, ...]) -> None:
    engine = Board(DEVICE).engines["ivf"]
    assert engine.codes(dim) == codes
    assert [engine.record_bytes(dim, code) for code in codes] == [
        (dim if code == "SQ8" else int(code[2:])) + 8 for code in codes
    ]


def test_an_index_with_wide_codes_has_tables_of_float16(fake: FakeGpu, rng: np.random.Generator) -> None:
    keys = rng.standard_normal((1000, 96)).astype(np.float32)
    index = Board(DEVICE).engines["ivf"].train(Metric.L2, keys, 1000, "PQ96")  # the pretended one asks for them
    index.add(np.arange(1000), keys)
    assert index.find(keys[:5], 3)[:, 0].tolist() == list(range(5))


@pytest.mark.slow
def test_the_methods_of_other_indexes_are_unchanged(fake: FakeGpu) -> None:
    """FAISS' own torch wrappers replace them, and lose the parameters of a search on the way."""
    opened()
    assert "faiss.contrib.torch_utils" not in sys.modules
    assert isinstance(faiss.IndexFlatL2(3).reconstruct_n(0, 0), np.ndarray)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def db() -> softdb.SoftDB:
    keys, _ = world()
    return holding(keys)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("moon", "device is 'moon'; expected 'cpu', 'cuda', 'cuda:1' or a list of GPUs"),
        (object(), "expected 'cpu', 'cuda', 'cuda:1' or a list"),
        ("mps", "device is 'mps', which softdb does not support; expected 'cpu' or 'cuda'"),
        ("meta", "device is 'meta', which softdb does not support"),
    ],
)
def test_devices_that_are_none(db: softdb.SoftDB, device: Any, message: str) -> None:
    with pytest.raises(softdb.BadInput, match=message):
        db.build_index("ivf", device=device)
    with pytest.raises(softdb.BadInput, match=message):
        softdb.open(None, dim=3, device=device)
    assert db.stats().index is None


def test_a_missing_gpu_is_refused(db: softdb.SoftDB, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(softdb.BadInput, match="build_index: device is cuda:1 but torch sees no CUDA device"):
        db.build_index("ivf", device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(softdb.BadInput, match="device is cuda:2 but the last that torch sees is 'cuda:1'"):
        db.build_index("ivf", device="cuda:2")


def test_the_cpu_build_of_faiss(db: softdb.SoftDB, monkeypatch: Any) -> None:
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, devices, dtype=None: cls(DEVICE, dtype=dtype)))
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(softdb.MissingDependency, match="pip uninstall faiss-cpu, then pip install 'softdb\\[gpu\\]'"):
        db.build_index("ivf", device="cpu")
    assert db.build_index("flat", device="cpu").device == "cpu:0"
    assert bool(db.search(world()[1]).live.all())


def test_a_faiss_that_does_not_see_the_gpu(fake: FakeGpu, db: softdb.SoftDB, monkeypatch: Any) -> None:
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(
        softdb.MissingDependency, match=r"torch sees cpu:0, but FAISS .* sees 0 GPUs: its CUDA .*device='cpu'"
    ):
        db.build_index("ivf", device="cpu")
    assert db.stats().index is None


def test_engines_without_a_gpu_form_are_refused(fake: FakeGpu, db: softdb.SoftDB) -> None:
    with pytest.raises(
        softdb.BadInput, match=r"kind is 'hnsw', which has no form on cpu:0; choose one of .*'ivf-sq8', or device="
    ):
        db.build_index("hnsw", device="cpu")
    with pytest.raises(softdb.BadInput, match=r"kind is 'tree'; choose one of 'auto', 'flat', 'ivf', 'ivf-sq8'$"):
        db.build_index("tree", device="cpu")


@pytest.mark.slow
def test_back_to_the_cpu(fake: FakeGpu, monkeypatch: Any) -> None:
    db, _, queries = opened()
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, devices, dtype=None: None))
    assert db.build_index("hnsw", device="cpu").device == "cpu"
    assert bool(db.search(queries).live.all())
    assert db._finder.devices is None


@pytest.mark.slow
def test_a_board_is_cached_with_its_keys(fake: FakeGpu, db: softdb.SoftDB) -> None:
    board = db._finder.devices
    db.build_index("ivf", device="cpu")
    assert db._finder.devices is board


def test_a_cached_file_holds_the_cpu_form(fake: FakeGpu, tmp_path: Path) -> None:
    opened(tmp_path / "db", "ivf-sq8")[0].close()
    (file,) = (tmp_path / "db" / "index").iterdir()
    assert cache._NAME.fullmatch(file.name)
    assert isinstance(faiss.read_index(str(file)), faiss.IndexIVFScalarQuantizer)


# -- a real GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="needs a CUDA device and the GPU build of FAISS")
class TestOnAGPU:
    @pytest.mark.parametrize("kind", ["ivf", "ivf-sq8", "flat"])
    @pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
    def test_queries_on_the_gpu_are_answered_there(self, kind: str, metric: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(probe, "FEW", 500)
        db, keys, queries = opened(None, kind, device="cuda", metric=metric)
        asked = torch.from_numpy(queries).cuda().requires_grad_()
        hits = db.search(asked, k=10)
        assert hits.rows.device == hits.scores.device == asked.device
        truth = np.argsort(-scores(metric, queries, keys), axis=1)[:, :10]
        assert recall(hits.rows.cpu().numpy(), truth) >= 0.9
        hits.scores.sum().backward()  # type: ignore[no-untyped-call]
        assert asked.grad is not None
        assert bool(asked.grad.isfinite().all())
        assert bool(asked.grad.any())

    def test_a_stream_of_the_caller_s_own(self, monkeypatch: Any) -> None:
        """Queries that are still being computed on another stream."""
        monkeypatch.setattr(probe, "FEW", 500)
        db, _, queries = opened(None, "ivf", device="cuda")
        expected, there = db.search(queries).rows.tolist(), torch.from_numpy(queries).cuda()
        torch.cuda.synchronize()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(5):
            with torch.cuda.stream(stream):
                late = torch.zeros_like(there)
                for _ in range(20):
                    big = (big @ big).clamp(-1, 1)
                late += there
                assert db.search(late).rows.tolist() == expected

    def test_only_positions_travel(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(probe, "FEW", 500)
        db, _, queries = opened(None, "ivf", device="cuda")
        index, records = db.core.finder.index, db._store.snapshot
        assert index is not None
        asked = torch.from_numpy(queries).cuda()
        nearest_by(records, index, Query(asked, 10, Metric.DOT, pairwise=False))
        sizes: list[int] = []
        copied = torch.Tensor.cpu

        def watched(self: torch.Tensor, *rest: Any) -> torch.Tensor:
            sizes.append(self.nbytes)
            return copied(self, *rest)

        monkeypatch.setattr(torch.Tensor, "cpu", watched)
        nearest_by(records, index, Query(asked, 10, Metric.DOT, pairwise=False))
        assert sum(sizes) <= len(queries) * (10 * 8 + 1)
