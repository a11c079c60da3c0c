"""A file system that is really full: nothing is simulated here but its size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from kill_rounds import answers
from kill_verbs import DIM, Random, columns, truth
from oracle import State, check

import softdb

SCHEMA: dict[str, Any] = {"value_dim": 3, "metric": "l2"}
BATCH = 100


def batch(random: Random, n: int) -> State:
    """New records with payloads of some size."""
    return {f"{n}-{i}": truth(random, SCHEMA, {"n": n, "text": "x" * 1500}) for i in range(BATCH)}


def fill(db: softdb.SoftDB, state: State, random: Random, n: int, most: int = 10**6) -> tuple[State, int]:
    """Insert until the disk is full; return the records and the number of the next batch."""
    while n < most:
        new = batch(random, n)
        n += 1
        try:
            db.insert(list(new), **columns(list(new.values())))
        except softdb.WriteFailed as error:
            reason = str(error)
            assert "space" in reason or "full" in reason or "large" in reason or "I/O" in reason, reason
            refused(db, state, new)
            return {**state, **new}, n
        state = {**state, **new}
    raise AssertionError("the disk was never full")


def refused(db: softdb.SoftDB, state: State, new: State) -> None:
    """After a write that failed: everything acknowledged is read, and nothing more is written."""
    seen = check(db, state, {**state, **new})
    answers(db, seen)
    try:
        db.delete(list(state)[:1])
    except softdb.WriteFailed as error:
        assert "an earlier write failed" in str(error), error  # noqa: PT017 - this runs without pytest, too
    else:
        raise AssertionError("a handle wrote on after a write had failed")
    check(db, seen)


def acknowledged(path: Path, state: State, attempted: State) -> State:
    """Return the stored records after reopening: all acknowledged ones, perhaps also the refused batch."""
    with softdb.open(path, mode="r", verify=True) as db:
        seen = check(db, state, attempted)
    with softdb.open(path, verify=True) as db:
        check(db, seen)
    return seen


def delete_all_but(path: Path, state: State, keep: int) -> State:
    """Delete down to some records, a tenth at a time; return the rest if the disk lacks room for that."""
    while len(state) > keep:
        gone = list(state)[: max(1, len(state) // 10)]
        left = {one: held for one, held in state.items() if one not in gone}
        db = softdb.open(path)
        try:
            db.delete(gone)
            state = left
        except softdb.WriteFailed:
            return check(db, state, left)
        finally:
            db.close()
    return state


def fill_again(path: Path, times: int) -> tuple[State, int]:
    """Fill the disk, open, fill again, and so forth; acknowledged records are stored each time."""
    random, state, n = np.random.default_rng(4), State(), 0
    softdb.open(path, dim=DIM, **SCHEMA).close()
    for _ in range(times):
        db = softdb.open(path)
        try:
            attempted, n = fill(db, state, random, n)
        finally:
            db.close()
        sure = {one: held for one, held in attempted.items() if not str(one).startswith(f"{n - 1}-")}
        state = acknowledged(path, sure, attempted)
    return state, n


def live_on(path: Path, state: State, n: int) -> None:
    """There is room again: delete, compact, write."""
    random = np.random.default_rng(5)
    state = delete_all_but(path, state, keep := len(state) // 5)
    assert len(state) <= keep, "there is room, but nothing can be deleted"
    with softdb.open(path) as db:
        report = db.compact()
        assert report.bytes < report.bytes_before or report.bytes < 1 << 19
        for more in range(n, n + 3):
            new = batch(random, more)
            db.insert(list(new), **columns(list(new.values())))
            state = {**state, **new}
        check(db, state)
    acknowledged(path, state, state)


def live_on_a_full_disk(folder: Path) -> None:
    """Fill the disk of a folder; deletes may fail there until there is room again."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    state, n = fill_again(folder / "db", 3)
    state = delete_all_but(folder / "db", state, len(state) // 5)
    state = acknowledged(folder / "db", state, state) if len(state) else state
    ballast.unlink()
    live_on(folder / "db", state, n)


if __name__ == "__main__":
    live_on_a_full_disk(Path(sys.argv[1]))
