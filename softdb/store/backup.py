"""Copy a database to another directory, consistently, while this process or others write to it.

SQLite's backup copies the catalogue within one read transaction. The used slots of the columns are copied from memory
maps of the same generation, whose slots no writer and no compaction changes. Hard links would not do: writers append to
the last segment, and one damaged block would damage both databases. The copied catalogue gets its final name last, so
that an interrupted copy does not look like a database.
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

SLOTS = 8192  # slots copied at once
_UNFINISHED = "unfinished.sqlite"  # the catalogue's name until the copy is complete


def backup(store: Store, path: Path) -> SnapshotReport:
    """Copy the newest generation to a directory that does not exist or is empty, and return a report.

    This also saves a database in memory. Cost: everything is read and written once; memory for `SLOTS` slots. Other
    threads of this handle wait while the catalogue is copied, but not while the columns are.

    Raises:
        BadInput: the path is a file, a directory that is not empty, or inside the database.
        CorruptionError: the catalogue's header claims far more bytes than the file occupies.
        WriteFailed: the disk refused a write; the copy was removed, and this handle can still write.
    """
    require_free(path, store.path)
    try:
        with files.building(path, "catalog.sqlite") as folder:
            snapshot = _copy(store, folder)
    except (OSError, apsw.Error) as error:
        raise WriteFailed(f"{path} cannot be written ({error}); choose another path or make room") from error
    return SnapshotReport(str(path), snapshot.records, snapshot.generation, files.occupied(path))


def require_free(path: Path, database: Path | None = None, name: str = "path") -> None:
    """Raise BadInput if `path` is a file, a directory that is not empty, or inside the directory `database`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "directory that is not empty" if path.is_dir() else "file"
        raise BadInput(f"{name} {str(path)!r} is taken: it is a {what}; choose a new or an empty directory")
    if database is not None and path.resolve().is_relative_to(database.resolve()):
        raise BadInput(f"{name} {str(path)!r} is inside the database; choose a path outside of {str(database)!r}")


def _copy(store: Store, path: Path) -> Snapshot:
    unfinished = path / _UNFINISHED
    with contextlib.ExitStack() as opened:
        snapshot, entries, missing, index = store.run(_copy_generation, store, unfinished, opened)
        columns = ColumnFiles(path, store.schema, relaxed=True)  # `building` syncs the names once they are final
        segments = {segment.number: segment for segment in snapshot.segments}
        for entry in entries:
            columns.create(entry.number, entry.capacity, entry.number in missing.checksums)
            if entry.number in segments:
                columns.fill(entry.number, entry.capacity, _segment_parts(segments[entry.number]))
        if index is not None:
            disk.make(path / "index")
            files.copy(index[1], path / "index" / index[0])
    files.sync(unfinished)
    disk.rename(unfinished, path / "catalog.sqlite")
    return snapshot


def _copy_generation(
    store: Store, path: Path, opened: contextlib.ExitStack
) -> tuple[Snapshot, list[SegmentEntry], gaps.Gaps, tuple[str, BinaryIO] | None]:
    """Copy the catalogue, and return the snapshot, the segments, the gaps, and the name and open file of the index."""
    if store.waiting:  # SQLite cannot back up within a write transaction
        store.flush()
    store.require_unchanged()
    with store.read_transaction() as snapshot:
        index = _open_index(store, opened)
        _copy_catalog(store.catalog, path, index is not None)
        return snapshot, store.catalog.segments(), gaps.read(store.catalog), index


def _copy_catalog(catalog: Catalog, path: Path, with_index: bool) -> None:
    """Copy the generation that `catalog` reads to a new file; without `with_index`, omit the entry of the index."""
    source = catalog.connection
    claimed = int(source.pragma("page_count")) * int(source.pragma("page_size"))
    on_disk = occupied(source.filename) + occupied(source.filename_wal)
    if source.filename and claimed > DENSEST * on_disk:
        raise damaged_catalog(f"claims {claimed} bytes, {on_disk} are on disk")
    with contextlib.closing(apsw.Connection(str(path))) as target:
        with target.backup("main", source, "main") as copying:
            copying.step(-1)
        if not with_index:
            target.execute("DELETE FROM indexes")


def _segment_parts(segment: Segment) -> Iterator[SegmentPart]:
    for low in range(0, len(segment), SLOTS):
        slots = slice(low, low + SLOTS)
        yield SegmentPart(
            segment.keys[slots],
            None if segment.values is None else segment.values[slots],
            None if segment.rows is None else segment.rows[slots],
        )


def _open_index(store: Store, opened: contextlib.ExitStack) -> tuple[str, BinaryIO] | None:
    """Open the index file that the catalogue names, and return (name, file); None if it is absent or unreadable."""
    entry = store.index_entry() or {}
    file, folder = entry.get("file"), None if store.path is None else store.path / "index"
    if folder is None or folder.is_symlink() or not isinstance(file, str) or Path(file).name != file:
        return None
    with contextlib.suppress(OSError, ValueError):  # the index is a cache: an unreadable one counts as absent
        source = opened.enter_context(files.open_regular(folder / file))
        status = os.fstat(source.fileno())
        if status.st_size == entry.get("bytes") and status.st_size <= DENSEST * status.st_blocks * 512:
            return file, source
    return None
