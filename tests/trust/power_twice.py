"""A second power cut during the recovery from a first one or from a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from oracle import Truth, held
from power_disk import KEEP, Disk, Image, Step
from power_log import Held, History, Record, Timeline, fingerprint, put, recording

import softdb
from softdb.opening import existing

__all__ = ["after_a_cut", "after_a_kill", "commits_in_the_air", "with_a_named_wal"]

SECOND = "second"  # the record that the second process writes


def after_a_cut(root: Path, image: Image, timeline: Timeline) -> History | None:
    """Work of a second process on the disk that a cut has left; None if nothing is there."""
    return _goes_on(root, History(image, [], []), image, timeline)


def after_a_kill(root: Path, history: History, place: int) -> History | None:
    """Work of a second process after the first was killed; it sees the unsynced steps.

    Where there is no database yet, it makes one.
    """
    disk = Disk(history.image)
    for number, step in enumerate(history.steps[:place]):
        disk.do(number, step)
    image, _ = disk.after(lambda _: KEEP)
    mine = [
        step for step in history.steps[:place] if step.act in ("write", "truncate", "entry", "sync") or not step.node
    ]
    return _goes_on(root, History(history.image, mine, []), image, history.timelines[0])


def _goes_on(root: Path, before: History, image: Image, timeline: Timeline) -> History | None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    put(image, root)
    path = root / timeline.path
    with recording(root, before) as record:
        record.phase = "again"
        try:
            db = existing(path)
        except softdb.NotADatabase:
            if not timeline.create or not before.steps:
                return None
            db = softdb.open(path, **timeline.create)
        if db.dim is None and timeline.create:  # the cut fell into its creation
            db.close()
            db = softdb.open(path, **timeline.create)
        with db:
            _continued(record, timeline, Held(held(db), tuple(db.stats().fields)))
            _write(record, db)
    return record.history


def _continued(record: Record, timeline: Timeline, state: Held) -> None:
    """Records that the second process has seen must stay, acknowledged or not."""
    steps = record.history.steps
    if not any(step.act == "begin" for step in steps):  # a disk after a cut: there was nothing before
        record.history.timelines.append(timeline._replace(states=[state]))
        return
    acknowledged = max((step.offset for step in steps if step.act == "acknowledged"), default=0)
    prints = [fingerprint(state) for state in timeline.states]  # two states may be equal: one that may show now
    seen = prints.index(fingerprint(state), acknowledged)
    record.history.timelines.append(timeline._replace(states=timeline.states[: seen + 1]))
    if seen > acknowledged:
        steps += [Step("seen", "acknowledged", 0, offset=seen), Step("seen", "flushed", 0)]


def _write(record: Record, db: softdb.SoftDB) -> None:
    schema = db._store.schema
    key = np.ones(schema.dim, schema.dtype)
    value: Any = np.ones(schema.value_dim, schema.dtype) if schema.value_dim else 1 if schema.num_classes else None
    record.begin(0)
    db.insert([SECOND], key[None], None if value is None else [value])
    state = record.history.timelines[0].states[-1]
    assert state is not None
    record.acknowledge(0, Held({**state.records, SECOND: Truth(key, value, None)}, state.fields))


def commits_in_the_air(history: History) -> list[tuple[str, int]]:
    """Each commit, and how many steps are taken when its last page is written and nothing of it is durable."""
    disk, found, named = Disk(history.image), list[tuple[str, int]](), with_a_named_wal(history)
    for place, step in enumerate(history.steps):
        if step.label.endswith(": sync catalog.sqlite-wal") and disk.pending.get(step.node) and place in named:
            found.append((step.label.partition(":")[0], place))
        disk.do(place, step)
    return found


def with_a_named_wal(history: History) -> set[int]:
    """Numbers of steps after which no name of a WAL waits for a sync.

    SQLite's first sync of a WAL brings its name to disk, one that it finds, too (strace shows it); the tap sees that
    of a WAL which SQLite makes.
    """
    disk, found = Disk(history.image), set[int]()
    for place, step in enumerate(history.steps):
        if not any(one.label.endswith("create catalog.sqlite-wal") for _, one in disk.waiting()):
            found.add(place)
        disk.do(place, step)
    return found
