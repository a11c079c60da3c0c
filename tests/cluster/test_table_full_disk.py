"""A disk that fills after an acknowledged write: shards never claim a version whose records they lack."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from lance_tables import DIM, held, told

from softdb import cluster, errors
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.table_cluster import TableCluster
from softdb.store import disk

N = 60
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[TableCluster]:
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as made:
        made.insert([f"r{i}" for i in range(N)], KEYS)
        for shard in directories(made).databases.values():
            shard.flush()
        yield made


def directories(db: TableCluster) -> Hydrated:
    transport = db.caller.transport
    found = getattr(transport, "hydrated", None)
    assert isinstance(found, Hydrated)
    return found


def full(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let every sync and write below the cache fail; the table has a disk of its own."""
    for name in ("sync", "write"):
        real = getattr(disk, name)

        def refused(descriptor: int, *words: object, real: object = real) -> object:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(cache)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *words)  # type: ignore[operator]

        patch.setattr(disk, name, refused)


def flush_late(db: TableCluster) -> None:
    """Flush as the thread of each relaxed shard does a second after the first change."""
    for shard in directories(db).databases.values():
        shard._store.flush_late()


@pytest.mark.parametrize("room", [True, False])
def test_a_late_flush_that_fails_takes_the_version_back_with_the_records(
    db: TableCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    shards, before = directories(db), db.version
    db.insert([f"new {i}" for i in range(N)], KEYS + 1)
    with monkeypatch.context() as patch:
        full(patch, tmp_path / "cache")
        flush_late(db)
        assert {shards.version(shard) for shard in shards.own_shards} == {before}
        assert sum(map(len, shards.databases.values())) == N
        if not room:
            for read in (lambda: len(db), lambda: db.search(KEYS[:1], k=2), db.refresh):
                with pytest.raises((errors.WriteFailed, errors.StaleRead), match=r"No space left|refresh\(\)"):
                    read()
            with pytest.raises(errors.WriteFailed, match=r"No space left.*; free or mend its disk, then refresh\(\)$"):
                db.refresh()
            with pytest.raises(errors.StaleRead, match="the write is committed, but this handle"):
                db.delete(["r0"])
    if room:
        assert len(db) == 2 * N, "a read brings shards on that are behind"
    db.refresh()
    assert held(db) == told(db.table)
    assert db.verify() == (2 * N if room else 2 * N - 1)
    np.testing.assert_allclose(db.attend(KEYS[:3]).output.shape, (3, DIM))


def test_two_shards_that_fail_at_once_are_both_mended(
    db: TableCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, before, failed, apply = directories(db), db.version, threading.Event(), Hydrated._apply

    def last(self: Hydrated, shard: int, *words: Any) -> None:
        if shard and not failed.is_set():
            failed.wait(60)
            time.sleep(0.3)
        try:
            apply(self, shard, *words)
        finally:
            failed.set()

    db.insert([f"new {i}" for i in range(N)], KEYS + 1)
    with monkeypatch.context() as patch:
        full(patch, tmp_path / "cache")
        flush_late(db)
    assert {shards.version(shard) for shard in shards.own_shards} == {before}, "both have lost what was not flushed"
    monkeypatch.setattr(Hydrated, "_apply", last)
    assert len(db) == 2 * N
    db.refresh()
    assert held(db) == told(db.table)
    assert {shards.version(shard) for shard in shards.own_shards} == {db.version}


def test_a_failed_growth_leaves_the_old_shards_at_their_version(
    db: TableCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.insert(["late"], KEYS[:1])
    with monkeypatch.context() as patch:
        full(patch, tmp_path / "cache")
        with pytest.raises(errors.WriteFailed, match="grow: "):
            db.grow()
    assert db.shards == 2
    db.refresh()
    assert held(db) == told(db.table)
    assert db.grow() == 4
    assert db.verify() == len(db) == N + 1
    assert held(db) == told(db.table)
