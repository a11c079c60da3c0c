"""The last acknowledged generation, in a file beside the catalogue: what tells a lost write-ahead log from none.

SQLite takes a `-wal` that was deleted, damaged or left behind by a copy for one that ends early, and answers from an
older generation without a word. Here every acknowledged commit leaves its number, and a catalogue below it is refused.

The format, as MUSTs: the file `committed` is a line of the generation in twenty digits, a space, and the CRC-32 of
those digits in eight hexadecimal ones. It MUST be written after the commit has come to disk, never before. It need not
come to disk itself: a file that is absent, or is no such line, says nothing, and a writer makes it anew.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from zlib import crc32

from softdb.errors import CorruptionError
from softdb.store import disk, files

NAME = "committed"

_LINE = len("00000000000000000000 01234567\n")


class Committed:
    """The file, open in a writer."""

    _descriptor = -1

    def __init__(self, directory: Path, folder: int) -> None:
        """`folder`: see `softdb.store.files`."""
        self._descriptor = disk.open(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, folder=folder)
        disk.truncate(self._descriptor, _LINE)

    def put(self, generation: int) -> None:
        """Write a generation that is on disk. Raises OSError."""
        digits = f"{generation:020d}"
        disk.write(self._descriptor, f"{digits} {crc32(digits.encode()):08x}\n".encode(), 0)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            disk.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def last(directory: Path) -> int:
    """The generation that a directory's file names; -1 where it says nothing. Raises OSError where it is no file."""
    try:
        with files.open_regular(directory / NAME) as file:
            line = file.read(_LINE + 1)
    except FileNotFoundError:
        return -1
    digits, _, crc = line[:-1].partition(b" ")
    if len(line) != _LINE or not digits.isdigit() or crc != f"{crc32(digits):08x}".encode():
        return -1
    return int(digits)


def require(generation: int, acknowledged: int, directory: Path | None) -> None:
    """Raise CorruptionError where a catalogue has fallen behind what was acknowledged."""
    if generation >= acknowledged:
        return
    behind = f"catalog.sqlite is at generation {generation}, but {acknowledged} was acknowledged: its last commits are"
    aside = [] if directory is None else sorted(directory.glob("catalog.sqlite-wal-*"))
    if aside:
        raise CorruptionError(
            f"{behind} in {aside[-1].name}, which was put aside when another program wrote to catalog.sqlite; give it "
            "the name catalog.sqlite-wal if catalog.sqlite is as it was then, else restore the directory from a copy"
        )
    raise CorruptionError(
        f"{behind} gone with catalog.sqlite-wal, which was removed or damaged; put that file back, or remove the file "
        f"{NAME!r} to go on without them"
    )
