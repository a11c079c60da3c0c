"""Recovery: what opening does, after whatever end the last writer came to.

Guarantee: a database whose acknowledged commits are gone is refused; what all may read is on disk before anything is
written after it; files that no commit names are removed, but those of a writer who is about to commit.
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


def clean_folders(path: Path, since: int) -> None:
    """Remove what runs of `reembed` have gathered before all keys were made anew, in the generation `since`.

    A run that was cut short later goes on from its folder. What cannot be removed does no harm, nor does what is there
    that softdb does not make: it stays.
    """
    for folder in path.iterdir():
        match = _GATHERED.fullmatch(folder.name)
        if match and int(match[1]) != since:
            with contextlib.suppress(OSError, BadInput):
                require_ours(folder)
                remove_database(folder)
