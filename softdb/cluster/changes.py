"""Find the rows that changed between two versions of a table, from Lance's transactions and deltas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from softdb.check import Id
from softdb.cluster.storage import LANCE, require_storage
from softdb.tables.arrow_tables import needed

LARGEST = 1 << 28  # largest size in bytes of changes that are read into memory and applied in one transaction
_TRACKED = {"Append", "Delete", "Rewrite", "CreateIndex", "UpdateConfig"}  # transactions that Lance's delta reports
_COMPARED = {"Update", "Merge", "BaseOperation"}  # transactions that the delta may report: `_tracked` compares files
_ID_BYTES = 100  # approximate memory of an id in Python
_AT_ONCE = 1000  # largest number of row ids in one filter condition


class Changes(NamedTuple):
    """Rows that have changed between two versions: read into memory, or to be read batch by batch if they are large."""

    removed: Iterable[list[Id]]  # ids (of records) whose rows were deleted or replaced
    added: Iterable[Any]  # pyarrow tables of new rows, and of the new content of replaced rows
    large: bool  # True if they exceed LARGEST bytes

    def steps(self) -> Iterator[tuple[list[Id], Any, bool]]:
        """Yield removed ids, a table of added rows (or None), and True in the last of the transactions to make."""
        if not self.large:
            pa, tables = needed("pyarrow", "cluster", "a cluster"), [*self.added]
            yield [*itertools.chain(*self.removed)], pa.concat_tables(tables) if tables else None, True
            return
        yield from ((ids, None, False) for ids in self.removed)
        yield from (([], table, False) for table in self.added)
        yield [], None, True


def changes_between(url: str, since: int, dataset: Any, id_column: str, columns: list[str] | None) -> Changes | None:
    """Return the changes from version `since` to `dataset`; None if Lance does not know all."""
    if not dataset.has_stable_row_ids:
        return None
    try:
        if not all(_tracked(dataset, version) for version in range(since + 1, dataset.version + 1)):
            return None
        before = dataset.checkout_version(since)

        def parts() -> tuple[Iterator[list[Id]], Iterator[Any]]:
            return _removed(before, dataset, since, id_column), _added(dataset, since, columns)

        removed, added, size = list[list[Id]](), list[Any](), 0
        for batch in itertools.chain(*parts()):
            is_ids = isinstance(batch, list)
            (removed if is_ids else added).append(batch)
            size += _ID_BYTES * len(batch) if is_ids else batch.nbytes
            if size > LARGEST:
                return Changes(*parts(), True)
        return Changes(removed, added, False)
    except LANCE as error:  # the version `since` was cleaned up
        require_storage(url, error)
        return None


def _removed(before: Any, dataset: Any, since: int, id_column: str) -> Iterator[list[Id]]:
    """Yield the ids, in version `since`, of rows that were deleted or updated later: an update may change the id."""
    deleted = dataset.delta(compared_against=since).get_deleted_row_ids()
    for batch in itertools.chain(deleted, written_since(dataset, since, [])[0]):
        rows = batch["_rowid"].to_pylist()
        for low in range(0, len(rows), _AT_ONCE):
            condition = f"_rowid IN ({', '.join(map(str, rows[low : low + _AT_ONCE]))})"
            yield before.to_table(columns=[id_column], filter=condition)[id_column].to_pylist()


def _added(dataset: Any, since: int, columns: list[str] | None) -> Iterator[Any]:
    """Yield tables of the rows that were inserted or updated since a version."""
    pa = needed("pyarrow", "cluster", "a cluster")
    for batch in itertools.chain(*reversed(written_since(dataset, since, columns))):
        names = [name for name in dataset.schema.names if name in batch.schema.names]
        if len(batch):
            yield pa.Table.from_batches([batch]).select(names)


def written_since(dataset: Any, version: int, columns: list[str] | None) -> tuple[Any, Any]:
    """Return two readers: of the rows updated since a version, and of the rows inserted since. Both give row ids.

    Lance's delta would read every column. To read only `columns`, this function makes the same scans itself.
    """
    if columns is None:
        delta = dataset.delta(compared_against=version)
        return delta.get_updated_rows(), delta.get_inserted_rows()
    new, touched = (f"_row_{name}_at_version > {version}" for name in ("created", "last_updated"))
    conditions = f"{touched} AND NOT {new}", new
    updated, inserted = (dataset.scanner([*columns, "_rowid"], filter=condition) for condition in conditions)
    return updated.to_reader(), inserted.to_reader()


def transaction(dataset: Any, version: int) -> Any:
    """Return the transaction that made a version; None for a Rewrite with indices, which pylance 14.0 cannot read."""
    try:
        return dataset.read_transaction(version)
    except TypeError:
        return None


def _tracked(dataset: Any, version: int) -> bool:
    """Return True if Lance's delta reports all changes of the transaction that made a version.

    The delta does not report a restored version, or columns that were rewritten, replaced, dropped or renamed. For the
    kinds in _COMPARED, this function checks that the transaction kept all old files (as `ingest` does) and columns.
    """
    record = transaction(dataset, version)
    kind = "Rewrite" if record is None else type(getattr(record, "operation", None)).__name__
    if kind not in _COMPARED:
        return kind in _TRACKED
    before, after = (dataset.checkout_version(at) for at in (version - 1, version))
    files = {fragment.fragment_id: fragment.metadata.files for fragment in after.get_fragments()}
    for fragment in before.get_fragments():
        droppable = fragment.metadata.files if kind == "Update" else []  # an update may drop dead fragments
        if any(file not in files.get(fragment.fragment_id, droppable) for file in fragment.metadata.files):
            return False
    return all(field in after.lance_schema.fields() for field in before.lance_schema.fields())
