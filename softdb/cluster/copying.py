"""A copy of a cluster's records as one database of this machine, placed whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from softdb import opening
from softdb.answers import Records
from softdb.check import Schema
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.truth import Truth
from softdb.database import SoftDB
from softdb.errors import WriteFailed
from softdb.reports import SnapshotReport
from softdb.store import files
from softdb.store.backup import require_free


def copied(path: Path, make: Callable[[Path], SoftDB]) -> SnapshotReport:
    """A database that `make` makes below a folder, at a path where nothing is, or an empty directory.

    Raises BadInput for another path, and WriteFailed where the disk refuses. Whatever fails, nothing of it is left.
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
        raise WriteFailed(f"{path} cannot be written ({error}); choose another place, or make room") from error
    return SnapshotReport(str(path), records, generation, files.occupied(path))


def of_table(truth: Truth, version: int, folder: Path) -> SoftDB:
    """All rows of a version, batch by batch. Raises StaleRead where it was cleaned up."""
    return Hydrated(truth.with_shards(1), folder, [0], version).databases[0]


def of_records(batches: Iterator[Records], schema: Schema, encoder: str | None, folder: Path) -> SoftDB:
    """All records that a scan brings."""
    db = opening.open(folder / "copy", durability="relaxed", **schema.described)
    try:
        if encoder is not None:
            db.core.store.note_encoder(encoder)
        for batch in batches:
            db.insert(batch.ids, *_columns(batch), batch.payloads, texts=batch.texts)
    except BaseException:
        db.close()
        raise
    return db


def _columns(batch: Records) -> tuple[Any, Any]:
    """Keys and values as `insert` takes them: None where a record has none."""
    if batch.keyed.all():
        return batch.keys, batch.values
    there = batch.keyed.tolist()

    def some(column: Any) -> Any:
        return [one if own else None for one, own in zip(column.numpy(), there, strict=True)]

    return some(batch.keys), None if batch.values is None else some(batch.values)
