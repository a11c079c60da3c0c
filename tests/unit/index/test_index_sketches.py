"""Sketches beside an index without drawable codes, and beside exact search, let estimates draw."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from contracts.index import scores
from doubles.fake_gpu import DEVICE, FakeGpu, fake
from numpy.typing import NDArray
from with_kernels import NEEDS_KERNELS
from worlds import holding, index_report

import softdb
from softdb.check import Metric
from softdb.device import Board
from softdb.index import cache, finder
from softdb.index.quantizer import BLOCK
from softdb.index.sketches import Sketches

pytest.importorskip("faiss")
pytestmark = NEEDS_KERNELS
__all__ = ["fake"]

N, D, V = 16_000, 32, 3
KINDS = ["hnsw", "flat"]
Array = NDArray[Any]


class World(NamedTuple):
    """Records in clusters, whose values go with the keys, and queries near them."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    queries: NDArray[np.float32]


@functools.cache
def world(seed: int = 0) -> World:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(9).standard_normal((40, D))
    keys = centres[random.integers(0, 40, N)] + 0.6 * random.standard_normal((N, D))
    values = keys[:, :V] + 0.5 * random.standard_normal((N, V))
    queries = centres[:8] + 0.5 * random.standard_normal((8, D))
    return World(*(array.astype(np.float32) for array in (keys, values, queries)))


def sketched(kind: str, metric: Any = "dot", path: Path | None = None) -> softdb.SoftDB:
    db = holding(world().keys, world().values, path=path, metric=metric)
    db.build_index(kind, recall=0.5)
    return db


@functools.cache
def built(kind: str, metric: str) -> softdb.SoftDB:
    return sketched(kind, metric)


def sketches_of(db: softdb.SoftDB) -> Sketches:
    drawable = db._finder.sampler(db._store.snapshot, None)
    assert drawable is not None
    return drawable[0].index


def rows_of(sketches: Sketches) -> list[int]:
    return sorted(sketches.layout.rows[sketches.layout.slots].tolist())


def drawn(db: softdb.SoftDB, seed: int = 0, temperature: float = 5.0) -> softdb.Pooled:
    generator = torch.Generator().manual_seed(seed)
    pooled = db.attend(world().queries, temperature=temperature, rtol=0.05, max_draws=300, generator=generator)
    assert not pooled.exact.any()
    return pooled


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("metric", "temperature"), [("dot", 5.0), ("cosine", 0.15), ("l2", 10.0)])
def test_estimates_draw_and_their_bars_hold(kind: str, metric: str, temperature: float) -> None:
    db = built(kind, metric)
    exact = db.attend(world().queries, temperature=temperature)
    pooled = [drawn(db, seed, temperature) for seed in range(40)]
    ratios = np.stack([(one.lse - exact.lse).exp().numpy() for one in pooled])
    doubt = ratios.std(0) / len(pooled) ** 0.5
    assert (np.abs(ratios.mean(0) - 1) <= 4 * doubt + 1e-4).all(), "sums are unbiased"
    off = torch.stack([(one.output - exact.output).norm(dim=1) for one in pooled])
    bars = torch.stack([one.bar for one in pooled])
    assert (off <= bars + 1e-6).double().mean() >= 0.9
    assert (bars < 0.5 * exact.output.norm(dim=1)).all(), "or that says nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_tolerance_is_met_by_draws(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)  # of so few records one costs less
    db = built(kind, "dot")
    exact = db.attend(world().queries, temperature=5.0)
    pooled = db.attend(world().queries, temperature=5.0, rtol=0.05)
    log_z = db.log_partition(world().queries, temperature=5.0, rtol=0.05)
    assert pooled.met.all()
    assert log_z.met.all()
    assert not pooled.exact.any()
    assert pooled.finder == "sketch"
    assert ((pooled.output - exact.output).norm(dim=1) <= 0.05 * exact.output.norm(dim=1)).double().mean() >= 0.75
    assert ((log_z.value - exact.lse).expm1().abs() <= 0.05).double().mean() >= 0.75


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_drawn(kind: str) -> None:
    db, truth = built(kind, "dot"), scores("dot", world().queries, world().keys)
    least = float(truth.mean() + truth.std())
    counted = db.count_within(world().queries, least, max_draws=400)
    assert not counted.exact.any()
    assert (np.abs(counted.value.numpy() - (truth >= least).sum(1)) <= counted.bar.numpy()).mean() >= 0.85


def test_search_without_an_index_stays_exact() -> None:
    db = built("flat", "dot")
    report = index_report(db)
    assert (report.kind, report.recall, report.reason, report.codes) == ("flat", 1.0, "asked for", "PQ16x4")
    sketches_of(db)  # whatever was drawn before
    truth = np.argsort(-scores("dot", world().queries, world().keys), axis=1)[:, :5]
    for asked in (world().queries, world().queries[:1]):
        hits = db.search(asked, k=5)
        assert hits.rows.tolist() == truth[: len(asked)].tolist()
    assert db.attend(world().queries, k=5).finder == "flat"
    with pytest.raises(softdb.BadInput, match="there is no index to tune"):
        db.tune()


# -- size --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.L2])
@pytest.mark.parametrize("dim", [64, 128, 384])
def test_a_record_takes_an_eighth_of_a_byte_a_number_and_two(dim: int, metric: Metric) -> None:
    keys = np.random.default_rng(0).standard_normal((2000, dim)).astype(np.float32)
    sketches = Sketches.train(metric, keys, len(keys), *Sketches.codes(dim))
    assert isinstance(sketches, Sketches)
    sketches.add(np.arange(len(keys)), keys)
    sketches.seal()
    of_lists = {"sizes", "starts", "squares", "radii"}
    columns = {name: column.nbytes for name, column in sketches.layout._asdict().items() if name not in of_lists}
    slots = len(sketches.layout.blocks) * BLOCK
    assert columns.pop("rows") == 4 * slots
    assert sum(columns.values()) / slots == dim / 8 + (4 if metric is Metric.L2 else 2)
    assert sketches.record_bytes(dim, "") >= (sum(columns.values()) + 4 * slots) / slots


def test_the_report_counts_them() -> None:
    index = built("hnsw", "dot")._finder.index
    assert index is not None
    assert index.companion is not None
    assert index_report(built("hnsw", "dot")).bytes == index.dump().nbytes + index.companion.dump().nbytes


def test_estimates_are_exact_where_sketches_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(world().keys) as db:
        for memory, faiss in ((1000, True), (None, False)):
            if not faiss:
                monkeypatch.setitem(sys.modules, "faiss", None)
            report = db.build_index("flat", memory=memory)
            assert (report.kind, report.codes) == ("flat", "")
            assert db.attend(world().queries, rtol=0.05).exact.all()


# -- inserted and deleted records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_dead_are_never_drawn_and_the_young_always_count(kind: str) -> None:
    with sketched(kind, "l2") as db:
        more = world(1)
        db.delete(range(0, N, 3))
        db.insert(range(N, N + 300), more.keys[:300], more.values[:300] + 5)
        exact = db.attend(world().queries, temperature=10.0)
        inside = []
        for seed in range(20):
            pooled = drawn(db, seed, 10.0)
            assert pooled.hits is not None
            rows = pooled.hits.rows[pooled.hits.rows >= 0]
            assert ((rows % 3 != 0) | (rows >= N)).all()
            inside.append(((pooled.output - exact.output).norm(dim=1) <= pooled.bar + 1e-6).double().mean())
        assert np.mean(inside) >= 0.9
        assert rows_of(sketches_of(db)) == list(range(N))
        db.compact()
        live = [row for row in range(N) if row % 3] if kind == "flat" else list(range(N))  # a graph keeps its codes
        assert rows_of(sketches_of(db)) == live
        drawn(db)


@pytest.mark.parametrize("kind", KINDS)
def test_many_young_records_are_taken_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    with sketched(kind) as db:
        before = sketches_of(db)
        db.insert(range(N, N + 2000), world(1).keys[:2000], world(1).values[:2000])
        after = sketches_of(db)
        assert rows_of(before) == list(range(N)), "what others draw by meanwhile is not changed"
        assert rows_of(after) == list(range(N + 2000))
        assert index_report(db).unindexed == 0
        once = Sketches(Metric.DOT, before.inner, before.sketch)
        once.add(np.arange(N + 2000), np.concatenate([world().keys, world(1).keys[:2000]]))
        once.seal()
        same = (once.layout.sketches == after.layout.sketches).mean()  # but for the rounding of products
        assert same > 0.999


# -- as a file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_handle_draws_as_the_one_that_built(kind: str, tmp_path: Path) -> None:
    with sketched(kind, path=tmp_path / "db") as db:
        before = drawn(db)
    mode: Any
    for mode in ("rw", "r"):
        with softdb.open(tmp_path / "db", mode=mode) as db:
            after = drawn(db)
            assert torch.equal(before.output, after.output)
            assert torch.equal(before.bar, after.bar)
            assert index_report(db).kind == kind
            assert db.verify() == N
    with softdb.open(tmp_path / "db") as db:
        db.delete([0])
        db.compact()
        db.tune(recall=0.5) if kind == "hnsw" else db.flush()
        sketches_of(db)
    for file in (tmp_path / "db" / "index").iterdir():
        file.unlink()
    with softdb.open(tmp_path / "db") as db:
        assert db.stats().index is None
        assert db.attend(world().queries, rtol=0.05, max_draws=300).exact.all()


@pytest.mark.parametrize("damage", ["rubbish", "none", "unsigned"])
def test_an_index_serves_without_them(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sketched("hnsw", path=tmp_path / "db") as db:
        entry = db._store.index_entry()
        assert entry is not None
        file = tmp_path / "db" / "index" / entry["file"]
        data = bytearray(file.read_bytes())
        data[entry["codes"] : entry["codes"] + 100] = bytes(100)
        if damage == "none":
            data, entry["sketches"] = data[: entry["codes"]], 0
        file.write_bytes(data)
        if damage != "unsigned":
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            entry["hmac"] = cache._signature(entry)
        db._store.put_index_entry(entry)
    with softdb.open(tmp_path / "db") as db:
        assert (db.search(world().queries, k=3).rows >= 0).all()
        assert (db.stats().index is None) == (damage == "unsigned")
        assert db.attend(world().queries, rtol=0.05, max_draws=300).exact.all()
    assert ("ignored" in caplog.text) == (damage != "none")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ivf", "ivf-sq8"])
def test_a_handle_on_a_gpu_draws_by_them(kind: str, fake: FakeGpu, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    with sketched(kind, path=tmp_path / "db") as db:
        assert index_report(db).device == "cpu:0"
        exact = db.attend(world().queries, temperature=5.0)
        pooled = drawn(db)
        assert ((pooled.output - exact.output).norm(dim=1) <= pooled.bar + 1e-6).double().mean() >= 0.75
        db.insert(range(N, N + 2000), world(1).keys[:2000], world(1).values[:2000])
        assert rows_of(sketches_of(db)) == list(range(N + 2000))
    for place in ("gpu", "cpu"):
        with softdb.open(tmp_path / "db") as db:
            if place == "cpu":
                db.to("cpu")
            before = rows_of(sketches_of(db))
            assert before[-1] == N + 1999
            drawn(db)
            db.delete([before[0]])
            db.compact()
            assert rows_of(sketches_of(db)) == before[1:]


def test_sketches_of_codes_alone_stay_on_the_host(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """A handle that moves to a GPU compares every record there, and draws by what the host has."""
    with sketched("flat") as db:
        before, index = rows_of(sketches_of(db)), db._finder.index
        request.getfixturevalue("fake")
        db._finder.move(Board(DEVICE))
        assert db._finder.index is index
        assert not caplog.text
        assert rows_of(sketches_of(db)) == before
        drawn(db)
        assert db.search(world().queries, k=3).rows.shape == (8, 3)
