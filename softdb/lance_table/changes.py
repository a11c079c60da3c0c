"""Find the rows that changed between two versions of a table, from Lance's transactions and deltas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from softdb.check import Id
from softdb.lance_table.storage import LANCE, require_storage
from softdb.tables.arrow_tables import needed

LARGEST = 1 << 28  # largest size in bytes of changes that are read into memory and applied in one transaction
_TRACKED = {"Append", "Delete", "Rewrite", "CreateIndex", "UpdateConfig"}  # transactions that Lance's delta reports
_COMPARED = {"Update", "Merge", "BaseOperation"}  # transactions that the delta may report: `_tracked` compares files
_CREATED = "_row_created_at_version"  # name of a column that Lance adds
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
        files = _Files(dataset)
        if not all(files.tracked(version) for version in range(since + 1, dataset.version + 1)):
            return None
        written = _RowsSince(dataset, since, files.written_since(since))
        names = columns or dataset.schema.names
        before, delta = files.opened(since), dataset.delta(compared_against=since)

        def parts(columns: list[str]) -> Iterator[tuple[Any, Any]]:
            yield from ((batch["_rowid"], None) for batch in delta.get_deleted_row_ids())
            yield from written.rows(columns)

        removed, added, size = list[list[Id]](), list[Any](), 0
        for row_ids, table in parts(names):
            ids = [*_removed(before, [row_ids], id_column)]
            removed += ids
            added += [] if table is None else [table]
            size += _ID_BYTES * sum(map(len, ids)) + (0 if table is None else table.nbytes)
            if size > LARGEST:
                gone = _removed(before, (row_ids for row_ids, _ in parts([])), id_column)
                return Changes(gone, (table for _, table in written.rows(names)), True)
        return Changes(removed, added, False)
    except LANCE as error:  # the version `since` was cleaned up
        require_storage(url, error)
        return None


class _RowsSince(NamedTuple):
    """Rows that were inserted or updated after a version."""

    dataset: Any
    since: int
    fragments: list[Any]  # in which these rows are

    def rows(self, columns: list[str]) -> Iterator[tuple[Any, Any]]:
        """Yield row ids of updated rows, and a table of columns of these rows and of inserted rows."""
        pa = needed("pyarrow", "cluster", "a cluster")
        names, written = [*columns, "_rowid", _CREATED], f"_row_last_updated_at_version > {self.since}"
        if self.fragments:
            for batch in self.dataset.scanner(names, filter=written, fragments=self.fragments).to_batches():
                if len(batch):
                    updated = pa.compute.less_equal(batch[_CREATED], self.since)
                    yield batch["_rowid"].filter(updated), pa.table(batch.select(columns))


def _removed(before: Any, row_ids: Iterable[Any], id_column: str) -> Iterator[list[Id]]:
    """Yield the ids that rows had in version `before`: an update may change the id."""
    for part in row_ids:
        rows = part.to_pylist()
        for low in range(0, len(rows), _AT_ONCE):
            condition = f"_rowid IN ({', '.join(map(str, rows[low : low + _AT_ONCE]))})"
            yield before.to_table(columns=[id_column], filter=condition)[id_column].to_pylist()


@functools.lru_cache(4)
def transaction(dataset: Any, version: int) -> Any:
    """Return the transaction that made a version; None for a Rewrite with indices, which pylance 14.0 cannot read."""
    try:
        return dataset.read_transaction(version)
    except TypeError:
        return None


class _Files:
    """Files of the fragments of a table at several versions."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.opened, self.at = functools.lru_cache(3)(self._opened), functools.lru_cache(3)(self._at)

    def _opened(self, version: int) -> Any:
        return self.dataset if version == self.dataset.version else self.dataset.checkout_version(version)

    def _at(self, version: int) -> dict[int, list[Any]]:
        return {fragment.fragment_id: fragment.data_files() for fragment in self.opened(version).get_fragments()}

    def written_since(self, version: int) -> list[Any]:
        """Return the fragments that are new since a version, or have other files."""
        before, fragments = self.at(version), self.dataset.get_fragments()
        return [fragment for fragment in fragments if fragment.data_files() != before.get(fragment.fragment_id)]

    def tracked(self, version: int) -> bool:
        """Return True if Lance's delta reports all changes of the transaction that made a version.

        The delta does not report a restored version, or columns that were rewritten, replaced, dropped or renamed. For
        the kinds in _COMPARED, this method checks that the transaction kept all old files (as `ingest` does) and
        columns.
        """
        record = transaction(self.dataset, version)
        kind = "Rewrite" if record is None else type(getattr(record, "operation", None)).__name__
        if kind not in _COMPARED:
            return kind in _TRACKED
        after = self.at(version)
        for fragment, files in self.at(version - 1).items():
            droppable = files if kind == "Update" else []  # an update may drop dead fragments
            if any(file not in after.get(fragment, droppable) for file in files):
                return False
        old, new = (self.opened(at).lance_schema.fields() for at in (version - 1, version))
        return all(field in new for field in old)
