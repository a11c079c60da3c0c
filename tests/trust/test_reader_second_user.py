"""Readers under another user id without write permission see later commits or report why they cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from second_user import SecondUser, contents, public_folder

import softdb

DIM = 4

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def put(db: softdb.SoftDB, first: int, count: int = 8) -> None:
    db.insert(range(first, first + count), np.eye(DIM)[np.arange(count) % DIM], payloads=[{"n": first}] * count)


WRITES: dict[str, Callable[[softdb.SoftDB], Any]] = {
    "insert": lambda db: put(db, 100, 200),
    "update a key": lambda db: db.update([1], keys=[[0.0, 0.0, 0.0, 3.0]]),
    "update a payload": lambda db: db.update([2], payloads=[{"n": "new"}]),
    "upsert": lambda db: db.upsert([3, 1000], [[2.0, 0.0, 0.0, 0.0]] * 2, payloads=[{}, {}]),
    "delete": lambda db: db.delete([0, 5]),
    "index_fields": lambda db: db.index_field("n"),
    "index_text": lambda db: db.index_text(),
    "compact": lambda db: db.compact(),
    "upsert_texts": lambda db: db.upsert([5000], [[1.0, 0.0, 0.0, 0.0]], texts=["a text"]),
}


@pytest.fixture(scope="module")
def user() -> Iterator[SecondUser]:
    user = SecondUser()
    yield user
    user.end()


@pytest.fixture
def path() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder / "db"


def created(path: Path) -> None:
    with softdb.open(path, dim=DIM) as db:
        put(db, 0)


def killed(path: Path) -> None:
    """A database whose writer was killed: its log and the log's index stay."""
    created(path)
    code = f"import os, signal, softdb; db = softdb.open({str(path)!r}); db.delete([7]); os.kill(os.getpid(), "
    code += "signal.SIGKILL)"
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (path / "catalog.sqlite-wal").stat().st_size


@pytest.mark.parametrize("before", ["closed", "killed", "open"])
def test_a_reader_that_may_not_write_sees_every_later_commit(path: Path, user: SecondUser, before: str) -> None:
    (killed if before == "killed" else created)(path)
    writer = softdb.open(path) if before == "open" else None
    user.do("open", path)
    known = user.do("contents")
    assert len(known) == (7 if before == "killed" else 8)
    writer = writer or softdb.open(path)
    for name, write in WRITES.items():
        write(writer)
        assert user.do("refresh") == writer.stats().generation, name
        assert user.do("contents") == contents(writer), name
        if name in ("upsert", "compact"):  # the writer goes, which checkpoints, and comes back
            writer.close()
            assert user.do("refresh") == user.do("refresh")
            writer = softdb.open(path)
            assert user.do("contents") == contents(writer)
    writer.close()
    user.do("close")


def test_a_reader_that_does_not_refresh_keeps_its_generation(path: Path, user: SecondUser) -> None:
    created(path)
    user.do("open", path)
    with softdb.open(path) as writer:
        put(writer, 100, 200)
        writer.delete([0])
        writer.compact()
        assert user.do("held") == (8, writer.get([1, 2]).keys.tolist())
    user.do("close")


def test_a_reader_makes_no_file_that_the_writer_could_not_use(user: SecondUser) -> None:
    with public_folder(0o777) as folder:
        path = folder / "db"
        created(path)
        path.chmod(0o777)
        user.do("open", path)
        assert len(user.do("contents")) == 8
        assert {file.stat().st_uid for file in path.iterdir()} == {0}
        with softdb.open(path) as writer:
            put(writer, 100)
            user.do("refresh")
            assert user.do("contents") == contents(writer)
        user.do("close")


def test_a_log_without_its_index_is_refused_with_the_way_out(path: Path, user: SecondUser) -> None:
    killed(path)
    (path / "catalog.sqlite-shm").unlink()
    kind, why = user.ask("open", path)
    assert kind == "NotADatabase"
    assert "open the database once for writing" in why
