"""Recovery when a database is opened for writing, however the last writer ended.

Guarantee: committed changes, which others may have read, are on disk before anything is written after them; files that
no commit names are removed, except those of a writer that is about to commit.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import apsw

from softdb.errors import BadInput
from softdb.store import files
from softdb.store.catalog import Catalog
from softdb.store.connect import typed_errors
from softdb.store.ours import remove_database, require_ours
from softdb.store.segments import ColumnFiles

_GATHERED = re.compile(r"reembed-(\d{1,20})")


def bring_to_disk(catalog: Catalog, path: Path) -> bool:
    """Sync the log, because other processes may have read commits in it that are not on disk, and checkpoint it.

    Return False if the log cannot be checkpointed, as on a full disk; then the first write tries again.
    """
    files.sync(path / "catalog.sqlite-wal")
    with contextlib.suppress(apsw.FullError, apsw.IOError):
        catalog.checkpoint()
        return True
    return False


def clean(catalog: Catalog, columns: ColumnFiles) -> None:
    """Remove the column files of appends and compactions that did not commit.

    This runs in a write transaction, to wait for a writer that has lost its lock and is about to commit.
    """
    with typed_errors():
        catalog.begin(write=True)
        try:
            columns.clean({entry.number for entry in catalog.segments()})
        finally:
            catalog.rollback()


def clean_folders(path: Path, since: int) -> None:
    """Remove the folders of `reembed` runs that began before generation `since`, which last re-embedded all keys.

    The folder of a later, interrupted run stays, to be resumed. Folders that cannot be removed, or that hold other
    programs' files, stay, too, and do no harm.
    """
    for folder in path.iterdir():
        match = _GATHERED.fullmatch(folder.name)
        if match and int(match[1]) != since:
            with contextlib.suppress(OSError, BadInput):
                require_ours(folder)
                remove_database(folder)
