"""Find the rows that changed between two versions of a table, by comparing its files.

A fragment of Lance has files of rows, which never change, and a file with the positions of its deleted rows. So the
rows of new fragments were added, and the rows of missing fragments and those deleted since were removed. A compaction,
which writes the same rows into other files, is recognised by its transaction and passed over.

Lance's own deltas need stable row ids, which make every commit slow: docs/cluster.md has the measurement.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Id
from softdb.lance_table.storage import LANCE, require_storage
from softdb.tables.arrow_tables import needed

LARGEST = 1 << 28  # largest size in bytes of changes that are read into memory and applied in one transaction
_ID_BYTES = 100  # approximate memory of an id in Python
_AT_ONCE = 1000  # largest number of row addresses in one filter condition
_SAME_ROWS = {"Rewrite", "CreateIndex", "UpdateConfig"}  # transactions that change no row
_FRAGMENT_BITS = 32  # an address is a fragment's number, then the position of a row in that fragment


class Changes(NamedTuple):
    """Rows that have changed between two versions: read into memory, or to be read batch by batch if they are large."""

    removed: Iterable[list[Id]]  # ids (of records) whose rows were deleted or replaced
    added: Iterable[Any]  # pyarrow tables of new rows, and of the new content of replaced rows
    large: bool  # True if they exceed LARGEST bytes
    dataset: Any  # the version that they lead to

    def steps(self) -> Iterator[tuple[list[Id], Any, bool]]:
        """Yield removed ids, a table of added rows (or None), and True in the last of the transactions to make."""
        if not self.large:
            pa, tables = needed("pyarrow", "cluster", "a cluster"), [*self.added]
            yield [*itertools.chain(*self.removed)], pa.concat_tables(tables) if tables else None, True
            return
        yield from ((ids, None, False) for ids in self.removed)
        yield from (([], table, False) for table in self.added)
        yield [], None, True


def changes_between(url: str, since: Any, dataset: Any, id_column: str, columns: list[str] | None) -> Changes | None:
    """Return the changes from a version of a table to a later one, or to one between if files were rewritten there.

    Args:
        url: address of the table.
        since, dataset: the two versions.
        id_column: name of the column of ids.
        columns: names of the columns to read; None: all.

    Returns None if files of `since` were cleaned up, or if a column was replaced, added or removed.
    """
    versions = {since.version: since, dataset.version: dataset}
    try:
        before, after, until = (
            versions[version] if version in versions else dataset.checkout_version(version)
            for version in _without_rewrites(dataset, since.version)
        )
        names = columns or dataset.schema.names
        difference = _Difference.of(before, after, names)
        if difference is None:
            return None
        removed, added, size = list[list[Id]](), list[Any](), 0
        for rows in itertools.chain(difference.removed(id_column), difference.added(names)):
            is_removed = isinstance(rows, list)
            (removed if is_removed else added).append(rows)
            size += _ID_BYTES * len(rows) if is_removed else rows.nbytes
            if size > LARGEST:
                return Changes(difference.removed(id_column), difference.added(names), True, until)
        return Changes(removed, added, False, until)
    except LANCE as error:
        require_storage(url, error)
        return None


@functools.lru_cache(4)
def transaction(dataset: Any, version: int) -> Any:
    """Return the transaction that made a version; None for a Rewrite with indices, which pylance 14.0 cannot read."""
    try:
        return dataset.read_transaction(version)
    except TypeError:
        return None


def _without_rewrites(dataset: Any, since: int) -> tuple[int, int, int]:
    """Return versions (a, b, c): a has the same rows as `since`, c the same as b, and no files were rewritten in a…b.

    c is the version of `dataset`, or a version that other changes follow.
    """

    def end(version: int, passes: Callable[[str], bool]) -> int:
        """Return the last version after `version` whose transactions all pass."""
        while version < dataset.version:
            record = transaction(dataset, version + 1)
            if not passes("Rewrite" if record is None else type(getattr(record, "operation", None)).__name__):
                break
            version += 1
        return version

    try:
        first = end(since, _SAME_ROWS.__contains__)
        last = end(first, lambda kind: kind != "Rewrite")
        return first, last, end(last, _SAME_ROWS.__contains__)
    except LANCE:  # a version between was cleaned up: rewritten rows count as changed
        return since, int(dataset.version), int(dataset.version)


class _Difference(NamedTuple):
    """Fragments and rows that are in one version of a table and not in another."""

    before: Any
    after: Any
    gone: list[Any]  # fragments of `before`
    new: list[Any]  # fragments of `after`
    deleted: NDArray[np.int64]  # addresses in `before` of the rows that were deleted from other fragments

    @classmethod
    def of(cls, before: Any, after: Any, columns: list[str]) -> _Difference | None:
        """Compare two versions by the files of some columns; return None if these are not the same columns."""
        fields = [{field.name(): field for field in dataset.lance_schema.fields()} for dataset in (before, after)]
        leaves = [{name: [*_leaves(known[name])] for name in columns if name in known} for known in fields]
        if leaves[0] != leaves[1]:
            return None
        own = set(itertools.chain(*leaves[1].values()))
        gone = {fragment.fragment_id: fragment for fragment in before.get_fragments()}
        new, deleted = list[Any](), [np.empty(0, np.int64)]
        for fragment in after.get_fragments():
            old = gone.get(fragment.fragment_id)
            dead = None if old is None else _deleted(before, old, after, fragment, own)
            if dead is None:
                new.append(fragment)
            else:
                del gone[fragment.fragment_id]
                deleted.append(dead + (fragment.fragment_id << _FRAGMENT_BITS))
        return cls(before, after, [*gone.values()], new, np.concatenate(deleted))

    def removed(self, id_column: str) -> Iterator[list[Id]]:
        """Yield the ids of rows that are not in `after`."""
        if self.gone:
            for batch in self.before.scanner([id_column], fragments=self.gone).to_batches():
                yield batch[id_column].to_pylist()
        for low in range(0, len(self.deleted), _AT_ONCE):
            condition = f"_rowaddr IN ({', '.join(map(str, self.deleted[low : low + _AT_ONCE]))})"
            yield self.before.to_table(columns=[id_column], filter=condition)[id_column].to_pylist()

    def added(self, columns: list[str]) -> Iterator[Any]:
        """Yield tables of rows that are not in `before`."""
        pa = needed("pyarrow", "cluster", "a cluster")
        if self.new:
            for batch in self.after.scanner(columns, fragments=self.new).to_batches():
                if len(batch):
                    yield pa.table(batch)


def _leaves(field: Any) -> Iterator[int]:
    """Yield the numbers under which a column's numbers or texts are stored in files."""
    yield from itertools.chain(*map(_leaves, field.children())) if field.children() else [field.id()]


def _deleted(before: Any, old: Any, after: Any, new: Any, own: set[int]) -> NDArray[np.int64] | None:
    """Return positions of rows that were deleted from a fragment; None if its files differ, or deleted rows are back.

    `own`: numbers of the columns whose files count.
    """

    def contents(part: Any) -> Any:
        return [(file.path, own & {*file.fields}) for file in part.files if own & {*file.fields}]

    parts = old.metadata, new.metadata
    same = parts[0].files == parts[1].files or contents(parts[0]) == contents(parts[1])
    if not same or parts[0].overlays != parts[1].overlays:
        return None
    files = [part.deletion_file for part in parts]
    if files[0] == files[1]:
        return np.empty(0, np.int64)
    if any(file is not None and file.base_id is not None for file in files):  # in the table of a shallow clone
        return None
    known, dead = _dead(before, parts[0]), _dead(after, parts[1])
    return np.array(dead - known, np.int64) if known <= dead else None


def _dead(dataset: Any, part: Any) -> Any:
    """Return the positions of a fragment's deleted rows, as a bitmap."""
    bitmap, file = needed("pyroaring", "cluster", "a cluster").BitMap, part.deletion_file
    if file is None:
        return bitmap()
    name = file.path(part.id)
    if "://" not in dataset.uri:
        data = Path(dataset.uri, name).read_bytes()
    else:
        with tempfile.NamedTemporaryFile() as copy:
            dataset.new_file_session().download_file(name, copy.name)
            data = Path(copy.name).read_bytes()
    if file.file_type == "bitmap":
        return bitmap.deserialize(data)
    pa = needed("pyarrow", "cluster", "a cluster")
    return bitmap(pa.ipc.open_file(pa.py_buffer(data)).read_all()["row_id"].to_numpy())
