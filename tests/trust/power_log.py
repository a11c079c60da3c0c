"""Recording of a workload's file operations with the requests and acknowledgements between them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from oracle import State
from power_disk import Image, Names, Step
from tap import Op, Tap, tapped

__all__ = ["Held", "History", "Record", "Timeline", "fingerprint", "put", "recording", "taken"]

ENTRIES = {"create": "file", "make": "folder", "link": "", "rename": "", "unlink": "", "remove_directory": ""}


class Held(NamedTuple):
    """Records of a database."""

    records: State
    fields: tuple[str, ...] = ()  # of the payload, that are indexed


class Timeline(NamedTuple):
    """One database and the states that it goes through; None: there is no database."""

    path: str  # in the image
    states: list[Held | None]
    create: dict[str, Any] | None  # how it is made, if it can be made again after a cut; None: it need not


class History(NamedTuple):
    """The initial image, the steps, and the acknowledgements between them."""

    image: Image
    steps: list[Step]
    timelines: list[Timeline]


class Record(Tap):
    """Takes down what happens below a directory."""

    def __init__(self, root: Path, before: History) -> None:
        self.root = root
        self.history = before
        self.phase = ""
        self.names = Names(before.image)
        for step in before.steps:
            self.names.do(step)

    def after(self, op: Op) -> None:
        self.history.steps.append(self._step(op))

    def _step(self, op: Op) -> Step:
        label, path = f"{self.phase}: {op.point}", self._relative(op.path)
        if op.name in ("sync", "sync_directory"):
            return Step(label, "sync", self.names.node(path))
        if op.name in ("write", "truncate"):
            return Step(label, op.name, self.names.node(path), op.offset, op.data)
        folder, name = self.names.place(path)
        entries = self._entries(op, folder, name)
        if op.name == "link" and op.target is not None:
            folder, _ = self.names.place(self._relative(op.target))
        step = Step(label, "entry", folder, entries=entries, makes=ENTRIES[op.name])
        self.names.do(step)
        return step

    def _entries(self, op: Op, folder: int, name: str) -> tuple[tuple[str, int | None], ...]:
        if op.name in ("unlink", "remove_directory"):
            return ((name, None),)
        if op.target is None:
            return ((name, self.names.new(op.name == "make")),)
        node = self.names.folders[folder][name]
        if op.name == "link":
            return ((self._relative(op.target).rpartition("/")[2], node),)
        there, target = self.names.place(self._relative(op.target))
        assert there == folder, "a rename from one directory to another is not modelled"
        return ((name, None), (target, node))

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self.root))

    # -- what it means -----------------------------------------------------------------------------------------------

    def timeline(self, path: Path, create: dict[str, Any] | None = None) -> int:
        """Watch one more database, which does not exist yet."""
        self.history.timelines.append(Timeline(self._relative(path), [None], create))
        return len(self.history.timelines) - 1

    def begin(self, timeline: int, states: int = 1) -> None:
        """A verb that changes a database begins: from now on its outcome may show, in several states one by one."""
        newest = len(self.history.timelines[timeline].states) - 1
        self.history.steps.append(Step("begin", "begin", timeline, offset=newest + states))

    def acknowledge(self, timeline: int, *states: Held, durable: bool = True) -> None:
        """The verb that began has returned. What is not durable may be lost, together with all that came later."""
        known = self.history.timelines[timeline].states
        known += states
        self.history.steps.append(Step("acknowledged", "acknowledged", timeline, offset=len(known) - 1))
        if durable:
            self.flushed(timeline)

    def flushed(self, timeline: int) -> None:
        """All that was acknowledged is durable from here."""
        self.history.steps.append(Step("flushed", "flushed", timeline))


@contextlib.contextmanager
def recording(root: Path, before: History | None = None) -> Iterator[Record]:
    """Record all that happens below a directory, which lies as `before` says; None: it is empty."""
    record = Record(root, History({}, [], []) if before is None else before)
    with tapped(record, inside=root):
        yield record


def put(image: Image, root: Path) -> None:
    """Make a directory what an image says."""
    for path, data in sorted(image.items()):
        if data is None:
            (root / path).mkdir(parents=True)
        else:
            (root / path).write_bytes(data)


def taken(root: Path) -> Image:
    """The image of a directory."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if not path.name.endswith("-shm")
    }


def fingerprint(state: Held | None) -> bytes:
    """Equal for states that are equal."""
    if state is None:
        return b"no database"
    parts = [
        repr((one, truth.payload, truth.text, truth.key is None)).encode()
        + (b"" if truth.key is None else np.asarray(truth.key).tobytes())
        + np.asarray(truth.value, "f4").tobytes()
        for one, truth in state.records.items()
    ]
    return hashlib.blake2b(repr(state.fields).encode() + b"".join(sorted(parts)), digest_size=16).digest()
