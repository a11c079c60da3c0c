"""A disk that loses unsynced writes: the states that a log of file operations may leave after a power cut.

The model, which is wider than any one file system:

* `sync` of a file makes its bytes and its size durable, not its name; `sync` of a directory makes its entries durable.
* Each write, truncation and change of an entry (create, link, rename, unlink, mkdir, rmdir) that no sync has covered
  is kept, dropped or torn by itself, in any combination, whatever was done before or after it. A rename is one change.
* A torn write leaves some of its bytes: a beginning, an end, some sectors, zeros, noise in one sector or in all. Bytes
  that it did not touch are left as they were, even in the same sector (SQLite calls that a powersafe overwrite, and
  counts on it, too).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

__all__ = ["DROP", "KEEP", "SECTOR", "TEARS", "Digests", "Disk", "Fate", "Image", "Names", "Step", "label_of"]

SECTOR = 512
ROOT = 0

Image = dict[str, bytes | None]  # what a disk holds: bytes of files, None for directories, by path
Digests = dict[str, bytes]  # of the bytes


class Step(NamedTuple):
    """One operation, bound to its object rather than to a name, so that steps can be left out or swapped."""

    label: str  # its name for the protocol
    act: str  # write truncate entry sync begin acknowledged flushed
    node: int  # the file or directory; of a mark, the timeline
    offset: int = 0  # of a write; the size of a truncation; of a mark, the number of a state
    data: bytes = b""
    entries: tuple[tuple[str, int | None], ...] = ()  # of a directory: name -> node, None: gone
    makes: str = ""  # "file" or "folder": what the entry's node is that begins with it


class Fate(NamedTuple):
    """Fate of a step that no sync has covered."""

    kind: str
    seed: int = 0


KEEP, DROP = Fate("keep"), Fate("drop")
TEARS = ("beginning", "end", "some", "zeros", "noise", "garbage")


class Names:
    """The tree as a running program sees it: which node a path is."""

    def __init__(self, image: Image) -> None:
        self.folders: dict[int, dict[str, int]] = {ROOT: {}}
        self.count = 1
        for path, data in sorted(image.items()):
            folder, name = self.place(path)
            self.folders[folder][name] = self.new(data is None)

    def new(self, folder: bool) -> int:
        self.count += 1
        if folder:
            self.folders[self.count - 1] = {}
        return self.count - 1

    def node(self, path: str) -> int:
        found = ROOT
        for part in PurePosixPath(path).parts:
            found = self.folders[found][part]
        return found

    def place(self, path: str) -> tuple[int, str]:
        """The directory that a path lies in, and its name there."""
        return self.node(str(PurePosixPath(path).parent)), PurePosixPath(path).name

    def do(self, step: Step) -> None:
        _change(self.folders.get(step.node, {}), step)
        if step.makes:
            self.count = max(self.count, _made(step) + 1)
        if step.makes == "folder":
            self.folders[_made(step)] = {}


class Disk:
    """Durable and volatile contents of the disk after each step."""

    def __init__(self, image: Image) -> None:
        names = Names(image)
        self.files: dict[int, bytes] = {names.node(path): data for path, data in image.items() if data is not None}
        self.folders: dict[int, dict[str, int]] = names.folders
        self.pending: dict[int, list[tuple[int, Step]]] = {}  # of a node: what no sync has covered, with its place
        self._replayed: dict[tuple[int, tuple[Fate, ...]], tuple[bytes, bytes]] = {}

    def do(self, place: int, step: Step) -> None:
        """Take one step; `place` is its number in the log."""
        if step.act == "sync":
            self._settle(step.node)
        elif step.act in ("write", "truncate", "entry"):
            self.pending.setdefault(step.node, []).append((place, step))
            self._forget(step.node)
        if step.makes == "file":
            self.files[_made(step)] = b""
        elif step.makes == "folder":
            self.folders[_made(step)] = {}

    def waiting(self) -> list[tuple[int, Step]]:
        """Steps that no sync has covered, in order."""
        return sorted((step for steps in self.pending.values() for step in steps), key=lambda one: one[0])

    def after(self, fate: Callable[[int], Fate]) -> tuple[Image, Digests]:
        """Image after a power cut, and its digests; `fate` decides about each step of the log."""
        image: Image = {}
        digests: Digests = {}

        def walk(folder: int, above: str) -> None:
            for name, node in sorted(self._entries(folder, fate).items()):
                path = above + name
                if node in self.folders:
                    image[path], digests[path] = None, b""
                    walk(node, path + "/")
                else:
                    image[path], digests[path] = self._content(node, fate)

        walk(ROOT, "")
        return image, digests

    def _entries(self, folder: int, fate: Callable[[int], Fate]) -> dict[str, int]:
        entries = dict(self.folders[folder])
        for place, step in self.pending.get(folder, ()):
            if fate(place) != DROP:
                _change(entries, step)
        return entries

    def _content(self, node: int, fate: Callable[[int], Fate]) -> tuple[bytes, bytes]:
        steps = self.pending.get(node, [])
        key = node, tuple(fate(place) for place, _ in steps)
        if key not in self._replayed:
            data = _replayed(self.files[node], [step for _, step in steps], key[1])
            self._replayed[key] = data, hashlib.blake2b(data, digest_size=16).digest()
        return self._replayed[key]

    def _settle(self, node: int) -> None:
        steps = [step for _, step in self.pending.pop(node, [])]
        if node in self.folders:
            for step in steps:
                _change(self.folders[node], step)
        elif steps:
            self.files[node] = _replayed(self.files[node], steps, (KEEP,) * len(steps))
        self._forget(node)

    def _forget(self, node: int) -> None:
        self._replayed = {key: value for key, value in self._replayed.items() if key[0] != node}


def label_of(step: Step, disk: Disk) -> str:
    """Name of a step; that of a sync includes the latest change that it covers."""
    if step.act != "sync":
        return step.label
    waiting = disk.pending.get(step.node, [])
    if not waiting:
        return f"{step.label} (nothing)"
    latest = waiting[-1][1]
    head = " at 0" if latest.act == "write" and not latest.offset else ""
    what = latest.label.split(": ")[-1] if latest.act == "entry" else latest.act
    return f"{step.label} ({what}{head})"


def _made(step: Step) -> int:
    return next(node for _, node in step.entries if node is not None)


def _change(entries: dict[str, int], step: Step) -> None:
    for name, node in step.entries:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _replayed(data: bytes, steps: Iterable[Step], fates: tuple[Fate, ...]) -> bytes:
    """A file's bytes after some steps."""
    content = bytearray(data)
    for step, fate in zip(steps, fates, strict=True):
        if fate == DROP:
            continue
        if step.act == "truncate":
            del content[step.offset :]
            content.extend(bytes(step.offset - len(content)))
            continue
        for offset, piece in _torn(step, fate):
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(piece)] = piece
    return bytes(content)


def _torn(step: Step, fate: Fate) -> list[tuple[int, bytes]]:
    """Pieces of a write that reach the medium, with their offsets."""
    start, data = step.offset, step.data
    if fate == KEEP or not data:
        return [(start, data)]
    if fate.kind == "zeros":
        return [(start, bytes(len(data)))]
    rng = random.Random(fate.seed)
    if fate.kind == "garbage":
        return [(start, rng.randbytes(len(data)))]
    sectors = _sectors(start, data)
    within = len(sectors) == 1  # a write of one sector may be cut anywhere, others between two of them
    cut = rng.randrange(len(data)) if within else rng.choice(sectors[1:])[0] - start
    if fate.kind == "beginning":
        return [(start, data[:cut])]
    if fate.kind == "end":
        return [(start + cut, data[cut:])]
    if fate.kind == "some":
        return [sector for sector in sectors if rng.random() < 0.5]
    bad = rng.randrange(len(sectors))
    return [*sectors[:bad], (sectors[bad][0], rng.randbytes(len(sectors[bad][1])))]


def _sectors(start: int, data: bytes) -> list[tuple[int, bytes]]:
    """A write cut at the sectors' borders."""
    borders = [start, *range((start // SECTOR + 1) * SECTOR, start + len(data), SECTOR), start + len(data)]
    return [(low, data[low - start : high - start]) for low, high in itertools.pairwise(borders)]
