"""The last acknowledged generation, in a file beside the catalogue, to notice that the write-ahead log was lost.

If a `-wal` was deleted, damaged or not copied with the catalogue, SQLite silently reads an older generation. So every
acknowledged commit writes its generation here, and a catalogue of an older generation is refused.

The format, as MUSTs: the file `committed` is one line: the generation in twenty digits, a space, and the CRC-32 of
those digits in eight hexadecimal digits. It MUST be written after the commit is on disk, never before. It need not be
synced: a file that is absent or malformed is ignored, and a writer creates it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from zlib import crc32

from softdb.errors import CorruptionError
from softdb.store import disk, files

NAME = "committed"

_LINE = len("00000000000000000000 01234567\n")  # bytes of the file


class Committed(files.Descriptor):
    """The file `committed`, which a writer keeps open."""

    def __init__(self, directory: Path, folder: int) -> None:
        """`folder`: descriptor of the directory, see `softdb.store.files`."""
        self.descriptor = disk.open(directory / NAME, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, folder=folder)
        disk.truncate(self.descriptor, _LINE)

    def put(self, generation: int) -> None:
        """Write the number of a generation that is on disk. Raises OSError."""
        digits = f"{generation:020d}"
        disk.write(self.descriptor, f"{digits} {crc32(digits.encode()):08x}\n".encode(), 0)


def last(directory: Path) -> int:
    """Return the generation in the file `committed`; -1 if absent or malformed. Raises OSError for a link or folder."""
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
    """Raise CorruptionError if a catalogue's generation is older than the acknowledged one."""
    if generation >= acknowledged:
        return
    behind = f"catalog.sqlite is at generation {generation}, but {acknowledged} was acknowledged: its last commits are"
    aside = [] if directory is None else sorted(directory.glob("catalog.sqlite-wal-*"))
    if aside:
        raise CorruptionError(
            f"{behind} in {aside[-1].name}, which was put aside when another program wrote to catalog.sqlite; rename "
            "it to catalog.sqlite-wal if catalog.sqlite is unchanged since, else restore the directory from a copy"
        )
    raise CorruptionError(
        f"{behind} lost with catalog.sqlite-wal, which was removed or damaged; put that file back, or remove the file "
        f"{NAME!r} to go on without them"
    )
