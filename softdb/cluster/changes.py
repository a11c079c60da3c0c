"""Changes of a table between two versions, as Lance tells them."""

from __future__ import annotations

from typing import Any, NamedTuple

from softdb.check import Id
from softdb.cluster.storage import LANCE, require_storage
from softdb.formats.tables import needed

LARGEST = 1 << 28  # bytes of changes that are held in memory; more, and shards are made anew
_TRACKED = {"Append", "Delete", "Rewrite", "CreateIndex", "UpdateConfig"}  # transactions that Lance's delta follows
_COMPARED = {"Update", "Merge", "BaseOperation"}  # those that it may follow; the last reserves numbers of fragments
_AT_ONCE = 1000  # numbers in a condition


class Changes(NamedTuple):
    """Rows that have changed between two versions."""

    removed: list[Id]  # deleted, or replaced
    added: Any  # pyarrow.Table of the rows that are new, or replace others


def changes_between(url: str, since: int, dataset: Any, id_column: str, columns: list[str] | None) -> Changes | None:
    """Changes from a version to that of a dataset; None where they cannot be told, or are too large to be held."""
    if not dataset.has_stable_row_ids:
        return None
    try:
        if not all(_tracked(dataset, version) for version in range(since + 1, dataset.version + 1)):
            return None
        delta = dataset.delta(compared_against=since)
        gone = delta.get_deleted_row_ids().read_all()["_rowid"].to_pylist()
        updated, inserted = map(_bounded, written_since(dataset, since, columns))
        if updated is None or inserted is None:
            return None
        gone += updated["_rowid"].to_pylist()
        removed = _ids(dataset.checkout_version(since), gone, id_column)  # an update may change the id, too
        names = [name for name in dataset.schema.names if name in inserted.column_names]
        pa = needed("pyarrow", "cluster", "a cluster")
        return Changes(removed, pa.concat_tables([inserted.select(names), updated.select(names)]))
    except LANCE as error:  # the version was cleaned up
        require_storage(url, error)
        return None


def _ids(dataset: Any, rows: list[int], column: str) -> list[Id]:
    """Ids of rows by Lance's own numbers."""
    ids = list[Id]()
    for low in range(0, len(rows), _AT_ONCE):
        condition = f"_rowid IN ({', '.join(map(str, rows[low : low + _AT_ONCE]))})"
        ids += dataset.to_table(columns=[column], filter=condition)[column].to_pylist()
    return ids


def _bounded(reader: Any) -> Any:
    """Rows that a reader gives, as a table; None where that is more than is held."""
    pa = needed("pyarrow", "cluster", "a cluster")
    kept, size = [], 0
    for batch in reader:
        kept.append(batch)
        size += batch.nbytes
        if size > LARGEST:
            return None
    return pa.Table.from_batches(kept, reader.schema)


def written_since(dataset: Any, version: int, columns: list[str] | None) -> tuple[Any, Any]:
    """Readers of the rows that were updated since a version, and of those that are new, with Lance's own numbers.

    Lance's delta reads every column (`columns` None); it is asked here for some as it asks itself for all.
    """
    if columns is None:
        delta = dataset.delta(compared_against=version)
        return delta.get_updated_rows(), delta.get_inserted_rows()
    new, touched = (f"_row_{name}_at_version > {version}" for name in ("created", "last_updated"))
    conditions = f"{touched} AND NOT {new}", new
    updated, inserted = (dataset.scanner([*columns, "_rowid"], filter=condition) for condition in conditions)
    return updated.to_reader(), inserted.to_reader()


def transaction(dataset: Any, version: int) -> Any:
    """Return the transaction of a version; None of a Rewrite with indices, which pylance 14.0 does not build."""
    try:
        return dataset.read_transaction(version)
    except TypeError:
        return None


def _tracked(dataset: Any, version: int) -> bool:
    """Return True where Lance's delta tells all that the transaction of a version has changed.

    It does not for restored versions, nor for columns that were rewritten, replaced, dropped or renamed. What only adds
    files, as `softdb.cluster.ingest` and added columns do, is a merge of fragments.
    """
    read = transaction(dataset, version)
    kind = "Rewrite" if read is None else type(getattr(read, "operation", None)).__name__
    if kind not in _COMPARED:
        return kind in _TRACKED
    before, after = (dataset.checkout_version(at) for at in (version - 1, version))
    files = {part.fragment_id: part.metadata.files for part in after.get_fragments()}
    for part in before.get_fragments():
        gone = part.metadata.files if kind == "Update" else []  # an update drops a fragment of which no row stays
        if any(file not in files.get(part.fragment_id, gone) for file in part.metadata.files):
            return False
    return all(field in after.lance_schema.fields() for field in before.lance_schema.fields())
