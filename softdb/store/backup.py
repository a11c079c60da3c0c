"""A consistent copy of a database in another directory, while writing goes on in this process or others.

The catalogue is copied by SQLite's backup within one reading transaction; the columns, slot by slot up to the
watermark, from the maps of the same generation, which no writer and no compaction touches. No hard links: the last
segment is still written to, and one damaged block should not damage both. `catalog.sqlite` gets its name last: a copy
that was cut short is no database.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import apsw

from softdb.errors import BadInput, WriteFailed
from softdb.reports import SnapshotReport
from softdb.store import disk, files, gaps
from softdb.store.budget import DENSEST, occupied
from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_catalog
from softdb.store.segments import ColumnFiles, SegmentEntry, SegmentPart
from softdb.store.snapshot import Segment, Snapshot
from softdb.store.store import Store

SLOTS = 8192  # copied at once
_UNFINISHED = "unfinished.sqlite"  # the catalogue's name until the copy is whole


def backup(store: Store, path: Path) -> SnapshotReport:
    """Copy the newest generation to a directory that does not exist or is empty, and say what was copied.

    A database in memory is saved so. Cost: everything is read and written once; memory: a part of a segment. Other
    threads of this handle wait while the catalogue is copied, not the columns.

    Raises:
        BadInput: there is something at the path already, or it lies in the database itself.
        CorruptionError: the catalogue claims more than can lie in what it occupies.
        WriteFailed: the disk refused; nothing of the copy is left, and this handle writes on.
    """
    require_free(path, store.path)
    try:
        with files.building(path, "catalog.sqlite") as folder:
            snapshot = _copied(store, folder)
    except (OSError, apsw.Error) as error:
        raise WriteFailed(f"{path} cannot be written ({error}); choose another place, or make room") from error
    return SnapshotReport(str(path), snapshot.records, snapshot.generation, files.occupied(path))


def require_free(path: Path, database: Path | None = None) -> None:
    """Raise BadInput for a path where something is, or in a database that is copied."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"path {str(path)!r} is a file; expected a directory that does not exist or is empty")
    if path.is_dir() and any(path.iterdir()):
        raise BadInput(f"path {str(path)!r} is a directory with something in it; choose a new or an empty one")
    if database is not None and path.resolve().is_relative_to(database.resolve()):
        raise BadInput(f"path {str(path)!r} lies in the database itself; choose one outside of {str(database)!r}")


def _copied(store: Store, path: Path) -> Snapshot:
    unfinished = path / _UNFINISHED
    with contextlib.ExitStack() as opened:
        snapshot, entries, missing, index = store.run(_copied_catalog, store, unfinished, opened)
        columns = ColumnFiles(path, store.schema, relaxed=True)  # names come to disk in the place that they get
        segments = {segment.number: segment for segment in snapshot.segments}
        for entry in entries:
            columns.create(entry.number, entry.capacity, entry.number in missing.checksums)
            if entry.number in segments:
                columns.fill(entry.number, entry.capacity, _parts(segments[entry.number]))
        if index is not None:
            disk.make(path / "index")
            files.copy(index[1], path / "index" / index[0])
    files.sync(unfinished)
    disk.rename(unfinished, path / "catalog.sqlite")
    return snapshot


def _copied_catalog(
    store: Store, path: Path, opened: contextlib.ExitStack
) -> tuple[Snapshot, list[SegmentEntry], gaps.Gaps, tuple[str, BinaryIO] | None]:
    """Copy the catalogue; the generation that it is of, its segments, and its index file, open."""
    if store.waiting:  # SQLite copies no catalogue within a transaction that writes
        store.flush()
    store.require_unchanged()
    with store.read_transaction() as snapshot:
        index = _open_index(store, opened)
        _copy_catalog(store.catalog, path, index is not None)
        return snapshot, store.catalog.segments(), gaps.read(store.catalog), index


def _copy_catalog(catalog: Catalog, path: Path, with_index: bool) -> None:
    """The generation that a connection reads as a new file, on disk when this returns; its name may not be."""
    source = catalog.connection
    claimed = int(source.pragma("page_count")) * int(source.pragma("page_size"))
    there = occupied(source.filename) + occupied(source.filename_wal)
    if source.filename and claimed > DENSEST * there:
        raise damaged_catalog(f"claims {claimed} bytes, {there} are on disk")
    target = apsw.Connection(str(path))
    try:
        with target.backup("main", source, "main") as copying:
            copying.step(-1)
        if not with_index:
            target.execute("DELETE FROM indexes")
    finally:
        target.close()


def _parts(segment: Segment) -> Iterator[SegmentPart]:
    for low in range(0, len(segment), SLOTS):
        part = slice(low, low + SLOTS)
        yield SegmentPart(
            segment.keys[part],
            None if segment.values is None else segment.values[part],
            None if segment.rows is None else segment.rows[part],
        )


def _open_index(store: Store, opened: contextlib.ExitStack) -> tuple[str, BinaryIO] | None:
    """The index file that the catalogue names, open, so that a writer may replace it; None where it is gone."""
    entry = store.index_entry() or {}
    file, folder = entry.get("file"), None if store.path is None else store.path / "index"
    if folder is None or folder.is_symlink() or not isinstance(file, str) or Path(file).name != file:
        return None
    with contextlib.suppress(OSError, ValueError):  # a cache: what cannot be read is not there
        source = opened.enter_context(files.open_regular(folder / file))
        there = os.fstat(source.fileno())
        if there.st_size == entry.get("bytes") and there.st_size <= DENSEST * there.st_blocks * 512:
            return file, source
    return None
