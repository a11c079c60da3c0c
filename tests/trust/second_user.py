"""A process of another user with read permission only, commanded over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import softdb

NOBODY = 65534

Contents = dict[Any, tuple[list[float], Any]]


def contents(db: softdb.SoftDB) -> Contents:
    """Every record, and the answers that must agree with them."""
    records = {r.id: (r.key.tolist(), r.payload) for batch in db.scan(100) for r in (db[one] for one in batch.ids)}
    assert len(db) == db.count() == db.verify() == len(records)
    for one in list(records)[:3]:
        assert db.search([db[one].key.tolist()], k=len(records)).ids[0].count(one) == 1
    return records


VERBS: dict[str, Callable[[softdb.SoftDB], Any]] = {
    "contents": contents,
    "held": lambda db: (len(db), db.get([1, 2]).keys.tolist()),
    "refresh": lambda db: db.refresh(),
    "close": lambda db: db.close(),
}


def serve(line: Any) -> None:
    """Answer commands as another user, until the pipe ends. What is imported late is imported before."""
    with softdb.open(None, dim=4) as warm:
        warm.insert([1], [[1.0, 0.0, 0.0, 0.0]])
        warm.attend([[1.0, 0.0, 0.0, 0.0]])
        contents(warm)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    db: softdb.SoftDB | None = None
    line.send("ready")
    while True:
        try:
            verb, argument = line.recv()
        except EOFError:
            return
        try:
            if verb == "open":
                db = softdb.open(argument, mode="r")
                line.send(("done", None))
            else:
                assert db is not None
                line.send(("done", VERBS[verb](db)))
        except Exception as error:
            line.send((type(error).__name__, str(error)))


class SecondUser:
    """That process, as seen from here."""

    def __init__(self) -> None:
        self.line, its = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(its,), daemon=True)
        self.process.start()
        its.close()
        assert self.line.recv() == "ready"

    def ask(self, verb: str, argument: object = None) -> tuple[str, Any]:
        """Kind of an answer ("done" or an error's name), and its value."""
        self.line.send((verb, argument))
        kind, answer = self.line.recv()
        return kind, answer

    def do(self, verb: str, argument: object = None) -> Any:
        """The answer of a command that must succeed."""
        kind, answer = self.ask(verb, argument)
        assert kind == "done", f"{verb}: {kind}: {answer}"
        return answer

    def end(self) -> None:
        """End the process."""
        self.line.close()
        self.process.join(60)


@contextmanager
def public_folder(mode: int = 0o755) -> Iterator[Path]:
    """A folder that every user may enter: that of a test belongs to one alone."""
    folder = Path(tempfile.mkdtemp(prefix="softdb-users-", dir="/tmp"))
    try:
        folder.chmod(mode)
        yield folder
    finally:
        shutil.rmtree(folder)
