"""Snapshots of a cluster are one ordinary database, complete or absent."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import softdb
from softdb import cluster, errors
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import Local
from softdb.database import SoftDB
from softdb.filters import FilteredStore

N, DIM = 300, 6
IDS = [f"r{i}" for i in range(N)]
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
VALUES = np.random.default_rng(1).normal(size=(N, 2)).astype(np.float32)


def filled(db: Any) -> Any:
    db.insert(IDS, KEYS, VALUES, [{"n": i} for i in range(N)], texts=[f"text {i}" for i in range(N)])
    db.insert(["bare"], [None], [None], texts=["no key"])
    return db


def same(copy: SoftDB) -> None:
    """Assert that it holds all records and answers as one database does."""
    assert (len(copy), copy.verify(), copy.metric) == (N + 1, N + 1, "l2")
    got = copy.get([*IDS, "bare"])
    np.testing.assert_array_equal(got.keys[:N], KEYS)
    assert got.values is not None
    np.testing.assert_array_equal(got.values[:N], VALUES)
    assert got.payloads == [*({"n": i} for i in range(N)), None]
    assert got.texts == [*(f"text {i}" for i in range(N)), "no key"]
    assert got.keyed.tolist() == [True] * N + [False]
    with softdb.open(None, dim=DIM, value_dim=2, metric="l2") as one:
        torch.testing.assert_close(copy.attend(KEYS[:3]).output, filled(one).attend(KEYS[:3]).output)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_copy_of_a_table_is_one_database_at_the_version_of_the_handle(tmp_path: Path, shards: int) -> None:
    url = tmp_path / "t.lance"
    words: dict[str, Any] = {"value_dim": 2, "metric": "l2", "shards": shards, "cache": tmp_path / "cache"}
    with filled(cluster.create(url, dim=DIM, **words)) as db, cluster.open(url, cache=tmp_path / "cache") as other:
        other.upsert(["r0", "late"], KEYS[:2], VALUES[:2])
        os.mkdir(tmp_path / "empty")
        for place in ("copy", "empty"):
            report = db.snapshot(tmp_path / place)
            assert (report.path, report.records) == (str(tmp_path / place), N + 1)
            with softdb.open(tmp_path / place) as copy:
                same(copy)
                copy.insert(["more"], KEYS[:1], VALUES[:1])
        db.refresh()
        assert db.snapshot(str(tmp_path / "sub" / "newest")).records == N + 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "copy", "empty", "sub", "t.lance"]


def test_a_copy_of_shards_without_a_table(tmp_path: Path) -> None:
    parts = [softdb.open(None, dim=DIM, value_dim=2, metric="l2") for _ in range(2)]
    for i, part in enumerate(parts):
        part.insert(IDS[i::2], KEYS[i::2], VALUES[i::2], [{"n": n} for n in range(i, N, 2)],
                    texts=[f"text {n}" for n in range(i, N, 2)])  # fmt: skip
        part.core.store.note_encoder("words")
    parts[0].insert(["bare"], [None], [None], texts=["no key"])
    with Cluster(Local([DatabaseShard(part, i, 2) for i, part in enumerate(parts)])) as db:
        assert db.snapshot(tmp_path / "copy").records == N + 1
    with softdb.open(tmp_path / "copy") as copy:
        same(copy)
        assert copy.encoder_name == "words"


def test_a_copy_of_shards_keeps_labels_and_records_without_a_key(tmp_path: Path) -> None:
    part, labels = softdb.open(None, dim=DIM, num_classes=5), [i % 5 for i in range(N)]
    part.insert(IDS, KEYS, labels)
    part.insert(["bare"], [None], [None], texts=["no key"])
    with Cluster(Local([DatabaseShard(part, 0, 1)])) as db:
        assert db.snapshot(tmp_path / "copy").records == N + 1
    with softdb.open(tmp_path / "copy") as copy:
        assert (copy.verify(), copy.num_classes) == (N + 1, 5)
        got = copy.get([*IDS, "bare"])
        assert got.values is not None
        assert got.values[:N].tolist() == labels
        assert got.keyed.tolist() == [True] * N + [False]


def test_a_copy_of_shards_whose_width_is_undecided(tmp_path: Path) -> None:
    part = softdb.open(None)
    part.insert(["bare"], [None], texts=["no key"])
    with Cluster(Local([DatabaseShard(part, 0, 1)])) as db:
        assert db.snapshot(tmp_path / "copy").records == 1
    with softdb.open(tmp_path / "copy") as copy:
        assert copy.get(["bare"]).texts == ["no key"]
        copy.insert(["keyed"], KEYS[:1])
        assert (copy.dim, copy.verify()) == (DIM, 2)


def test_a_copy_that_fails_midway_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, begun = softdb.open(None, dim=DIM), list[FilteredStore]()
    part.insert(IDS, KEYS)

    def fails(store: FilteredStore, *_: Any, **__: Any) -> None:
        begun.append(store)
        raise errors.BadInput("a record that is none")

    with Cluster(Local([DatabaseShard(part, 0, 1)])) as cluster:
        monkeypatch.setattr(FilteredStore, "insert", fails)
        with pytest.raises(errors.BadInput, match="a record that is none"):
            cluster.snapshot(tmp_path / "copy")
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(errors.Closed):
        begun[0].require_open()


def test_a_snapshot_that_cannot_be_placed_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with cluster.create(tmp_path / "t.lance", dim=DIM, value_dim=2, metric="l2", cache=tmp_path / "cache") as db:
        filled(db)
        wrong: list[tuple[Any, type[Exception], str]] = [
            (tmp_path / "full", errors.BadInput, "is a directory that is not empty"),
            (tmp_path / "full" / "file", errors.BadInput, "is a file"),
            (7, errors.BadInput, "path is 7"),
            (tmp_path / "full" / "file" / "below", errors.WriteFailed, "cannot be written"),
        ]
        for place, error, match in wrong:
            with pytest.raises(error, match=f"snapshot: .*{match}"):
                db.snapshot(place)

        def refused(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Hydrated, "_apply", refused)
            with pytest.raises(errors.WriteFailed, match="No space left"):
                db.snapshot(tmp_path / "copy")
        with cluster.open(db.url, cache=tmp_path / "cache") as other:
            other.delete(["r0"])
            other.table.now().cleanup_old_versions(older_than=timedelta(0))
        with pytest.raises(errors.StaleRead, match="was cleaned up"):
            db.snapshot(tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "full", "t.lance"]
