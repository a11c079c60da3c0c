"""A step of reading fails: what a reader, and a writer who looks, must do then."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import apsw
import numpy as np
import pytest
import tap
from fault_cases import Base, passed_over
from kill_verbs import DIM
from oracle import check

import softdb
from softdb.store import files

READS: dict[str, Callable[[softdb.SoftDB], object]] = {
    "open": lambda db: None,
    "get": lambda db: db.get(["1-7", "2-3"]),
    "in": lambda db: "1-7" in db,
    "count": lambda db: db.count({"g": 2}),
    "scan": lambda db: list(db.scan(20)),
    "search": lambda db: db.search(np.ones((1, DIM)), k=5).ids,
    "filter": lambda db: db.search(np.ones((1, DIM)), k=5, where={"g": 1}).payloads,
    "refresh": lambda db: db.refresh(),
    "verify": lambda db: db.verify(),
    "stats": lambda db: db.stats(),
}


class Reads:
    """A counter of reads that lets one of them fail."""

    def __init__(self) -> None:
        self.seen, self.at = 0, -1

    def pass_by(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.at


@contextlib.contextmanager
def watched(reads: Reads) -> Iterator[None]:
    """SQLite's reads and the openings of columns go past the counter."""
    reading, plain = files.open_regular, apsw.VFSFile.xRead

    def opened(path: Path, folder: int | None = None) -> BinaryIO:
        if reads.pass_by():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return reading(path, folder)

    def page(file: Any, amount: int, offset: int) -> bytes:
        if reads.pass_by():
            raise apsw.IOError("disk I/O error")
        return plain(file, amount, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open_regular", opened)
        patch.setattr(tap._File, "xRead", page, raising=False)
        yield


def read(base: Base, room: Path, verb: str, at: int | None) -> int:
    """Ask a reader while a reading fails, and ask again. Returns how many readings the verb takes."""
    shutil.copytree(base.folder, room)
    reads = Reads()
    with tap.tapped(tap.Tap(), room), watched(reads), passed_over():
        reads.at = -1 if at is None or verb != "open" else at
        db = opened(room / "db")
        seen = reads.seen
        if verb != "open":
            beside(room / "db")  # what another has written is in no cache
            seen, reads.at = reads.seen, -1 if at is None else reads.seen + at
            error_or_result(lambda: READS[verb](db), verb)
            seen = reads.seen - seen
        reads.at = -1
        db.refresh()
        check(db, base.state)
        db.close()
    shutil.rmtree(room)
    return seen


def opened(path: Path) -> softdb.SoftDB:
    """A reader, the second time where the first one is refused."""
    found = error_or_result(lambda: softdb.open(path, mode="r"), "open")
    return found if isinstance(found, softdb.SoftDB) else softdb.open(path, mode="r")


def error_or_result(ask: Callable[[], object], verb: str) -> object:
    """An answer, or None where an error of the family says why there is none."""
    try:
        return ask()
    except softdb.SoftDBError as error:
        assert "cannot" in str(error) or "could not" in str(error) or "damaged" in str(error), error  # noqa: PT017
        return None
    except Exception as error:
        raise AssertionError(f"{verb} raises {type(error).__name__}: {error}") from error


def beside(path: Path) -> None:
    """A write of another process that changes no record."""
    with softdb.open(path) as db:
        db.index_field("g")
        db.drop_field("g")
