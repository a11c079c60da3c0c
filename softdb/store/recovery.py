"""Recovery: what opening does, after whatever end the last writer came to.

Guarantee: a database whose acknowledged commits are gone is refused; what all may read is on disk before anything is
written after it; files that no commit names are removed, but those of a writer who is about to commit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import apsw

from softdb.store import files
from softdb.store.catalog import Catalog
from softdb.store.connect import typed_errors
from softdb.store.segments import ColumnFiles

__all__ = ["clean", "settle"]


def settle(catalog: Catalog, path: Path) -> bool:
    """Bring to disk what another writer committed and no sync has covered: everybody has read it.

    Whether the log is checkpointed, too: on a full disk it is not, and the first write tries again.
    """
    files.sync(path / "catalog.sqlite-wal")
    with contextlib.suppress(apsw.FullError, apsw.IOError):
        catalog.checkpoint()
        return True
    return False


def clean(catalog: Catalog, columns: ColumnFiles) -> None:
    """Remove the column files of appends and compactions that did not commit.

    In a transaction: a writer that has lost its lock may be about to commit.
    """
    with typed_errors():
        catalog.begin(write=True)
        try:
            columns.clean({entry.number for entry in catalog.segments()})
        finally:
            catalog.rollback()
