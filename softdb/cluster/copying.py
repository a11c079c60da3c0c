"""Copy a cluster's records to one database on this machine. A failed copy leaves no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from softdb import opening
from softdb.answers import Records
from softdb.check import Schema
from softdb.cluster.hydrate import Hydrated
from softdb.database import SoftDB
from softdb.errors import WriteFailed
from softdb.lance_table.truth import Truth
from softdb.reports import SnapshotReport
from softdb.store import Batch, files
from softdb.store.backup import require_free


def copied(path: Path, make: Callable[[Path], SoftDB]) -> SnapshotReport:
    """Let `make` write a database in a temporary folder, then move that database to `path`.

    Raises BadInput if the path exists and is not an empty directory, and WriteFailed if the disk refuses to write.
    """
    require_free(path)
    parent = path.absolute().parent
    try:
        files.make_directory(parent)
        with files.aside(parent) as folder:
            with make(folder) as db:
                records, generation, place = len(db), db.generation, db.path
            assert place is not None
            files.publish(place, path)
    except OSError as error:
        raise WriteFailed(f"{path} cannot be written ({error}); choose another path, or free disk space") from error
    return SnapshotReport(str(path), records, generation, files.occupied(path))


def of_table(truth: Truth, version: int, folder: Path) -> SoftDB:
    """Copy all rows of one version of a table to a new database. Raises StaleRead if the version was cleaned up."""
    return Hydrated(truth.with_shards(1), folder, [0], version, beside={}).databases[0]


def of_records(batches: Iterator[Records], schema: Schema, encoder: str | None, folder: Path) -> SoftDB:
    """Insert batches of records into a new database in `folder`, and return the database."""
    db = opening.open(folder / "copy", durability="relaxed", **schema.described)
    try:
        if encoder is not None:
            db.core.store.note_encoder(encoder)
        for batch in batches:
            values = None if batch.values is None else batch.values.numpy().astype(schema.value_dtype, copy=False)
            keyed = None if batch.keyed.all() else batch.keyed.numpy()
            db.core.store.insert(Batch(batch.ids, batch.keys.numpy(), values, batch.payload_texts, batch.texts, keyed))
    except BaseException:
        db.close()
        raise
    return db
