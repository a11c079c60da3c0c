"""What every engine must keep, written once: an engine's tests inherit these and name the kind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from worlds import clusters, holding, index_report

import softdb

Floats = NDArray[np.float32]
N, D, Q = 6000, 16, 40


def world(seed: int = 0, d: int = D) -> tuple[Floats, Floats]:
    """Clustered keys with duplicates and a zero vector, and queries near them."""
    random = np.random.default_rng(seed)
    keys = clusters(random, N, d, 60, 1, apart=2)
    keys[100:110] = keys[0]
    keys[50] = 0
    queries = keys[random.integers(0, N, Q)] + 0.3 * random.standard_normal((Q, d))
    return keys.astype(np.float32), queries.astype(np.float32)


def scores(metric: str, queries: Floats, keys: Floats) -> NDArray[np.float64]:
    """Scores (q, n) in float64."""
    wide, far = queries.astype(np.float64), keys.astype(np.float64)
    if metric == "l2":
        return np.asarray(-((wide[:, None] - far[None]) ** 2).sum(-1))
    found = wide @ far.T
    if metric == "cosine":
        lengths = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(far, axis=1)
        found = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
    return np.asarray(found)


def recall(hits: softdb.Hits, truth: NDArray[np.float64], k: int) -> float:
    """Share of hits that score at least as well as the true k-th: ties count."""
    rows = hits.rows.numpy()
    kth = np.sort(truth, axis=1)[:, ::-1][:, k - 1 : k]
    reached = np.take_along_axis(truth, np.maximum(rows, 0), 1) >= kth - 1e-4 * np.abs(kth) - 1e-6
    return float((reached & (rows >= 0)).mean())


class IndexContract:
    """Inherit, and name the kind."""

    kind: ClassVar[str]
    built: ClassVar[dict[type, Path]] = {}  # by the engine's tests: a database as `made` leaves it

    @pytest.fixture(autouse=True)
    def room(self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        self.folder, self.factory, self.open = tmp_path, tmp_path_factory, list[softdb.SoftDB]()
        yield
        for db in self.open:
            db.close()

    @pytest.mark.few(1)
    @pytest.mark.parametrize("metric", ["dot", "l2"])
    def test_more_effort_never_loses_recall(self, metric: Any) -> None:
        keys, queries = world(4)
        queries = np.concatenate([queries + np.float32(0.01 * i) for i in range(10)])
        truth = scores(metric, queries, keys)
        with holding(keys, metric=metric) as db:
            db.build_index(self.kind, recall=0.8)
            index = db.core.finder.index
            assert index is not None
            reached = []
            for _ in range(12):
                reached.append(recall(db.search(queries, k=10), truth, 10))
                index.effort = min(2 * index.effort, index.effort_most)
            lost = np.maximum.accumulate(reached) - reached
            assert lost.max() <= 0.002, reached
            assert reached[-1] >= 0.97

    @pytest.mark.slow
    def test_tune_changes_effort_alone(self, tmp_path: Path) -> None:
        keys, queries = world(4)
        with holding(keys, path=tmp_path / "db") as db:
            low = db.build_index(self.kind, recall=0.5)
            before = db.core.finder.index
            high = db.tune(0.99, queries=queries)
            index = db.core.finder.index
            assert before is not None
            assert index is not None
            assert index.inner is before.inner
            assert high.recall >= 0.99
            assert high.measured_on == "queries given"
            assert (index.effort, index.fetch_k) > (before.effort, before.fetch_k)
            assert high.bytes == low.bytes
            assert high.target == db.tune().target == 0.99
            actual = db.search(queries, k=10).rows.tolist()
        with softdb.open(tmp_path / "db", mode="r") as db:
            assert index_report(db).target == 0.99
            assert db.search(queries, k=10).rows.tolist() == actual
            with pytest.raises(softdb.ReadOnly, match="tune the index with a handle that writes"):
                db.tune()

    def made(self, path: Path | None = None, **words: Any) -> tuple[softdb.SoftDB, Floats, Floats]:
        """An indexed database, its keys, and queries. The usual one is built once, and copied."""
        keys, queries = world(d=words.pop("dim", D))
        if words or keys.shape[1] != D:
            db = self.build(path, keys, **words)
        else:
            if type(self) not in self.built:
                self.built[type(self)] = self.factory.mktemp(self.kind) / "db"
                self.build(self.built[type(self)], keys).close()
            path = path or self.folder / "made"
            shutil.copytree(self.built[type(self)], path)
            db = softdb.open(path)
        self.open.append(db)
        return db, keys, queries

    def build(self, path: Path | None, keys: Floats, **words: Any) -> softdb.SoftDB:
        db = softdb.open(path, dim=keys.shape[1], **words)
        groups = np.random.default_rng(5).permutation(N)
        payloads = [{"g": int(g)} for g in groups]
        for low in range(0, N, 2500):
            part = slice(low, low + 2500)
            db.insert(list(range(N))[part], keys[part], payloads=payloads[part])
        report = db.build_index(self.kind, recall=0.95)
        assert report.kind == self.kind
        assert report.met
        return db

    @pytest.mark.few(1)
    @pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
    def test_recall_and_exact_scores(self, metric: Any) -> None:
        db, keys, queries = self.made(metric=metric)
        truth = scores(metric, queries, keys)
        hits = db.search(queries, k=10)
        assert recall(hits, truth, 10) >= 0.9
        expected = np.take_along_axis(truth, hits.rows.numpy(), 1)
        np.testing.assert_allclose(hits.scores.numpy(), expected, rtol=1e-4, atol=1e-4)
        assert bool((hits.scores[:, :-1] >= hits.scores[:, 1:]).all())
        alone = db.search(queries[0], k=10)
        assert alone.rows.tolist() == hits.rows[:1].tolist()

    @pytest.mark.few(1)
    @pytest.mark.parametrize("dim", [7, 30])
    def test_widths_that_4_does_not_divide(self, dim: int) -> None:
        db, keys, queries = self.made(dim=dim)
        assert recall(db.search(queries, k=5), scores("dot", queries, keys), 5) >= 0.9

    def test_half_precision(self) -> None:
        db, keys, queries = self.made(dtype="float16")
        truth = scores("dot", queries, keys.astype(np.float16).astype(np.float32))
        hits = db.search(queries, k=10)
        assert recall(hits, truth, 10) >= 0.9
        np.testing.assert_allclose(hits.scores.numpy(), np.take_along_axis(truth, hits.rows.numpy(), 1), rtol=1e-4)

    def test_new_records_are_seen_by_the_next_query(self) -> None:
        db, keys, queries = self.made()
        db.insert([f"new{i}" for i in range(Q)], queries * 3)
        nearest = scores("dot", queries, np.concatenate([keys, queries * 3])).argmax(1)
        assert (nearest >= N).all()
        assert db.search(queries, k=3).rows[:, 0].tolist() == nearest.tolist()

    def test_deleted_and_replaced_records_never_come_back(self) -> None:
        db, keys, queries = self.made()
        first = sorted(set(db.search(queries, k=10).rows.flatten().tolist()))
        db.delete(first[::2])
        db.upsert(first[1::2], -keys[first[1::2]])
        hits = db.search(queries, k=10)
        assert not set(hits.rows.flatten().tolist()) & set(first)
        alive = scores("dot", queries, keys)
        alive[:, first] = -np.inf
        assert bool(hits.live.all())
        assert recall(hits, np.concatenate([alive, np.full((Q, N), -np.inf)], axis=1), 10) >= 0.85

    @pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 0.01, 1 / N, 0.0])
    def test_a_filter_gives_every_match_up_to_k(self, share: float) -> None:
        db, keys, queries = self.made()
        m = round(share * N)
        hits = db.search(queries, k=10, where={"g": {"$lt": m}})
        groups = np.random.default_rng(5).permutation(N)
        assert hits.live.sum(1).tolist() == [min(10, m)] * Q
        actual = hits.rows[hits.live].numpy()
        assert (groups[actual] < m).all()
        truth = scores("dot", queries, keys)
        truth[:, groups >= m] = -np.inf
        if m >= 10:
            assert recall(hits, truth, 10) >= 0.9

    def test_k_beyond_the_records_returns_all_of_them(self) -> None:
        db, _, queries = self.made()
        hits = db.search(queries[:2], k=N + 5)
        assert hits.live.sum(1).tolist() == [N, N]
        assert [len(set(rows)) for rows in hits.rows.tolist()] == [N] * 2

    def test_many_deletions(self) -> None:
        db, keys, queries = self.made()
        db.delete(list(range(N - 7)))
        hits = db.search(queries, k=10)
        assert hits.live.sum(1).tolist() == [7] * Q
        truth = scores("dot", queries, keys)
        truth[:, : N - 7] = -np.inf
        assert recall(db.search(queries, k=5), truth, 5) == 1

    def test_an_index_is_loaded_and_serves_a_reader(self, tmp_path: Path) -> None:
        db, _, queries = self.made(tmp_path / "db")
        expected = db.search(queries, k=10).rows.tolist()
        db.close()
        for mode in ("r", "rw"):
            with softdb.open(tmp_path / "db", mode=mode) as again:
                assert again.search(queries, k=10).rows.tolist() == expected
                assert index_report(again).kind == self.kind
                assert index_report(again).unindexed == 0

    @pytest.mark.few(3)
    @pytest.mark.parametrize("damage", ["flipped", "truncated", "gone", "swapped key", "entry", "name"])
    def test_an_index_of_an_unknown_format_is_ignored(
        self, damage: str, tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        db, _, queries = self.made(tmp_path / "db")
        exact = db.search(queries, k=10, exact=True).rows.tolist()
        db.close()
        (file,) = (tmp_path / "db" / "index").iterdir()
        key = key_file.read_bytes()
        if damage == "flipped":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif damage == "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        elif damage == "gone":
            file.unlink()
        elif damage == "swapped key":
            key_file.write_bytes(bytes(32))
        with softdb.open(tmp_path / "db") as db:
            if damage in ("entry", "name"):
                entry = db._store.index_entry()
                assert entry is not None
                entry |= {"effort": 10**6} if damage == "entry" else {"file": "../catalog.sqlite"}
                db._store.put_index_entry(entry)
            assert db.search(queries, k=10).rows.tolist() == exact
            assert "index ignored" in caplog.text
            assert "build_index" in caplog.text
            assert db.stats().index is None
            db.build_index(self.kind)
            assert index_report(db).kind == self.kind
        key_file.write_bytes(key)

    def test_scores_carry_the_gradient_through_the_index(self) -> None:
        import torch

        db, keys, queries = self.made()
        asked = torch.from_numpy(queries).requires_grad_()
        hits = db.search(asked, k=3)
        hits.scores.sum().backward()  # type: ignore[no-untyped-call]
        assert asked.grad is not None
        np.testing.assert_allclose(asked.grad.numpy(), keys[hits.rows.numpy()].sum(1), rtol=1e-4, atol=1e-4)

    def test_truncated_attention_finds_by_the_index(self) -> None:
        db, keys, queries = self.made()
        pooled = db.attend(queries, k=50, temperature=2.0)
        assert pooled.hits is not None
        assert recall(pooled.hits, scores("dot", queries, keys), 50) >= 0.9
