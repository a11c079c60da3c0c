"""Doubling the shards: new ones are built while reads continue, through kills at any step."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from softdb import cluster, errors
from softdb.cluster import table_core
from softdb.cluster.directories import Directories
from softdb.cluster.local import Local
from softdb.cluster.placement import shard_of
from softdb.cluster.shard import directory_of
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.table_core import TableCore
from softdb.lance_table.truth import Truth

N, DIM = 400, 8
IDS = [f"r{i}" for i in range(N)]
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


def small_table(folder: Path, shards: int = 2) -> cluster.TableCluster:
    """A table of records, one of them without a key; one was deleted."""
    db = cluster.create(folder / "t.lance", dim=DIM, shards=shards, cache=folder / "cache")
    db.insert([*IDS, "gone"], np.concatenate([KEYS, KEYS[:1]]), payloads=[*range(N), None])
    db.insert("bare", [None], texts="a text")
    db.delete("gone")
    return db


def check_complete(db: cluster.TableCluster) -> None:
    """Assert that every record is stored once, in the shard of its id, and that answers are right."""
    found = {one: payload for part in db.scan(100) for one, payload in zip(part.ids, part.payloads, strict=True)}
    assert found == {**{one: i for i, one in enumerate(IDS)}, "bare": None}
    assert len(db) == N + 1
    assert db["bare"].text == "a text"
    nearest = (-KEYS[:4] @ KEYS.T).argsort(axis=1, kind="stable")[:, :5]
    assert db.search(KEYS[:4], k=5).ids == [[IDS[i] for i in line] for line in nearest]
    transport: Any = db.caller.transport
    for shard, one in transport.hydrated.databases.items():
        ids = [name for part in one.scan() for name in part.ids]
        assert (shard_of(ids, db.shards) == shard).all()


def test_new_shards_are_built_from_the_table(tmp_path: Path) -> None:
    with small_table(tmp_path) as db:
        transports: list[Any] = [db.caller.transport]
        assert db.grow() == 4
        transports.append(db.caller.transport)
        numbers = [
            directory_of(transport.hydrated.tagged(s)) for transport in transports for s in range(transport.shards)
        ]
        assert len({*numbers}) == 6, "rows of one mean nothing in another"
        check_complete(db)
        assert db.stats().dead == 0
        db.upsert(["r0"], KEYS[:1], payloads=[0])
        check_complete(db)
    (folder,) = (tmp_path / "cache").glob("*/here-0")
    (folder / "0-of-4-unfinished").mkdir()  # a stranger's
    (folder / "0-of-1").mkdir()
    (folder / "0-of-1" / "notes.txt").write_text("a stranger's")
    with cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache") as db:
        check_complete(db)
        names = {path.name for path in folder.iterdir()}
        assert names == {*(f"{i}-of-4" for i in range(4)), "lock", "0-of-4-unfinished", "0-of-1"}
        assert [file.name for file in (folder / "0-of-1").iterdir()] == ["notes.txt"]


def test_a_folder_of_a_shard_s_name_that_is_another_s_is_refused_and_stays(tmp_path: Path) -> None:
    with small_table(tmp_path) as db:
        transport: Any = db.caller.transport
        taken = transport.hydrated.path(0)
    shutil.rmtree(taken)
    taken.mkdir()
    (taken / "notes.txt").write_text("a stranger's")
    with pytest.raises(errors.BadInput, match=r"notes\.txt was not created by softdb"):
        cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache")
    assert [file.name for file in taken.iterdir()] == ["notes.txt"]
    (taken / "notes.txt").unlink()
    with cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache") as db:
        check_complete(db)


def test_new_shards_have_an_index(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).normal(size=(4800, DIM)).astype(np.float32)
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as db:
        db.insert([f"n{i}" for i in range(len(keys))], keys)
        db.build_index("ivf", recall=0.9)
        db.grow()
        index = db.stats().index
        assert index is not None
        assert index.kind == "ivf"
        actual, true = (db.search(keys[:50], k=5, exact=exact).ids for exact in (False, True))
        assert sum(len({*a} & {*b}) for a, b in zip(actual, true, strict=True)) > 0.8 * 250


def test_reads_go_on_and_none_is_wrong(tmp_path: Path) -> None:
    """Whatever a thread asks while shards double twice is answered, and right."""
    queries, stop, wrong, asked = torch.tensor(KEYS[:3]), threading.Event(), list[str](), list[int]()
    with small_table(tmp_path, shards=1) as db:
        right = db.attend(queries, temperature=0.5).output
        nearest = db.search(queries, k=4).ids

        def read() -> None:
            while not stop.is_set():
                try:
                    leaf = queries.clone().requires_grad_()
                    pooled = db.attend(leaf, temperature=0.5)
                    torch.testing.assert_close(pooled.output.detach(), right, rtol=1e-4, atol=1e-5)
                    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
                    assert db.search(queries, k=4).ids == nearest
                    assert db.get(IDS[:50]).payloads == list(range(50))
                    assert sorted(name for part in db.scan(64) for name in part.ids) == sorted([*IDS, "bare"])
                    asked.append(db.shards)
                except Exception as error:
                    wrong.append(f"{type(error).__name__}: {error}")

        readers = [threading.Thread(target=read) for _ in range(2)]
        for one in readers:
            one.start()
        while len(asked) < 4:
            stop.wait(0.01)
            assert not wrong, wrong
        for shards in (2, 4):
            assert db.grow() == shards
            before = len(asked)
            while len(asked) < before + 4 and not wrong:
                stop.wait(0.01)
        stop.set()
        for one in readers:
            one.join(60)
        assert not wrong, wrong
        assert {1, 4} <= set(asked)


def test_earlier_answers_stay_valid(tmp_path: Path) -> None:
    with small_table(tmp_path) as db:
        leaf = torch.tensor(KEYS[:2], requires_grad=True)
        hits, pooled = db.search(KEYS[:2], k=3), db.attend(leaf, temperature=0.5)
        records = db.scan(50)
        first = next(records)
        before: Any = db.caller.transport
        db.grow()
        db.upsert(["r0"], KEYS[:1], payloads=["new"])
        assert hits.payloads == [[int(str(one)[1:]) for one in line] for line in hits.ids]
        (grad,) = torch.autograd.grad(pooled.output.sum(), leaf)
        assert grad.isfinite().all()
        assert sum(map(len, records)) + len(first) == N + 1
        databases = list(before.hydrated.databases.values())
        del hits, pooled, grad, records, before
        gc.collect()
        assert all(database.closed for database in databases)  # nothing refers to them


def test_other_handles_switch_at_their_refresh(tmp_path: Path) -> None:
    with small_table(tmp_path) as db, cluster.open(db.url, cache=tmp_path / "cache") as other:
        assert db.grow() == 4
        assert (other.shards, len(other)) == (2, N + 1)
        db.upsert(["r0"], KEYS[:1], payloads=[0])
        other.refresh()
        assert other.shards == 4
        check_complete(other)
        assert other.grow() == 8
        check_complete(other)
        with cluster.open(db.url, "r", cache=tmp_path / "elsewhere") as third:
            check_complete(third)


def refused(*_: Any, **__: Any) -> Any:
    raise errors.DatabaseLocked("refused")


def noted(db: cluster.TableCluster) -> list[Any]:
    """The transports that a handle makes from now on."""
    connect, found = db.core._connect, list[Any]()

    def connected(table: Truth) -> Any:
        found.append(connect(table))
        return found[-1]

    db.core._connect = connected
    return found


def closed(transport: Any) -> bool:
    return all(database.closed for database in transport.hydrated.databases.values())


def test_closing_releases_the_old_shards(tmp_path: Path) -> None:
    with small_table(tmp_path) as db:
        hits, before = db.search(KEYS[:2], k=3), db.caller.transport
        db.grow()
        after = db.caller.transport
        assert not closed(before)
        assert len(hits.payloads) == 2
    assert closed(before)
    assert closed(after)


@pytest.mark.parametrize("where", [(table_core, "Caller"), (Truth, "put_shards"), (TableCore, "_go_on")], ids=str)
def test_a_failed_growth_releases_the_new_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    with small_table(tmp_path) as db:
        transports = noted(db)
        with monkeypatch.context() as patch:
            patch.setattr(*where, refused)
            with pytest.raises(errors.DatabaseLocked, match="refused"):
                db.grow()
        (new,) = transports
        assert closed(new)
        assert db.shards == 2
        check_complete(db)


def test_a_failed_opening_releases_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_table(tmp_path) as db:
        transports = noted(db)
        monkeypatch.setattr(TableCluster, "refresh", refused)
        with pytest.raises(errors.DatabaseLocked, match="refused"):
            TableCluster(TableCore(db.core._connect, db.table, 30.0, False, "r", None))
        (new,) = transports
        assert closed(new)


def test_new_shards_may_take_longer_than_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_table(tmp_path) as db:
        allowed, ask = list[float](), Local.ask

        def timed(self: Local, asks: Any, timeout: float) -> Any:
            allowed.append(timeout)
            return ask(self, asks, timeout)

        monkeypatch.setattr(Local, "ask", timed)
        db.grow()
        db.count()
        assert allowed == [3600.0, 30.0, 30.0]  # until the shards exist; then the handle's own timeout


STEPS = {  # where the kill comes: before the call of a function, or after it
    "nothing made": ("softdb.cluster.directories:Directories._open", False),
    "made, empty": ("softdb.cluster.hydrate:Hydrated._fill", False),
    "some rows stored": ("softdb.cluster.hydrate:Hydrated._apply", True),
    "all placed, not noted": ("softdb.lance_table.truth:Truth.put_shards", False),
    "noted, not used": ("softdb.lance_table.truth:Truth.put_shards", True),
    "used, the old ones there": ("softdb.cluster.table_core:TableCore._take", True),
}


def work(folder: Path, step: str) -> None:
    """In a process of its own: grow, and die at a step."""
    place, late = STEPS[step]
    module, _, name = place.partition(":")
    owner, attribute = getattr(importlib.import_module(module), name.partition(".")[0]), name.partition(".")[2]
    real = getattr(owner, attribute)

    def call(*args: Any, **words: Any) -> Any:
        found = real(*args, **words) if late else None
        os.kill(os.getpid(), signal.SIGKILL)
        return found

    with cluster.open(folder / "t.lance", cache=folder / "cache") as db:
        setattr(owner, attribute, call)
        db.grow()


@pytest.mark.parametrize("step", STEPS)
def test_a_growth_killed_at_a_named_step_is_resumed(tmp_path: Path, step: str) -> None:
    small_table(tmp_path).close()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numpy", "apsw"])
    process = context.Process(target=work, args=(tmp_path, step))
    process.start()
    process.join(180)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
    noted = 4 if step.startswith(("noted", "used")) else 2
    with cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache") as db:
        assert db.shards == noted
        check_complete(db)
        assert db.grow() == 2 * noted
        check_complete(db)
    (folder,) = (tmp_path / "cache").glob("*/here-0")
    assert not list(folder.glob(".softdb-*"))


def test_two_handles_that_open_one_folder_at_once_take_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_table(tmp_path).close()
    inside, go = threading.Event(), threading.Event()
    real = Directories._open

    def slow(self: Directories, shard: int) -> None:
        inside.set()
        go.wait(60)
        real(self, shard)

    opened: list[cluster.TableCluster] = []
    with monkeypatch.context() as patch:
        patch.setattr(Directories, "_open", slow)
        first = threading.Thread(
            target=lambda: opened.append(cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache"))
        )
        first.start()
        inside.wait(60)
        patch.setattr(Directories, "_open", real)
        second = cluster.open(tmp_path / "t.lance", cache=tmp_path / "cache")
        go.set()
        first.join(60)
    for db in (second, *opened):
        check_complete(db)
        db.close()
    assert len(opened) == 1
