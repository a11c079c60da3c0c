"""Columns of a cluster's table: from numbers, and back within bounds; what has changed in them, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from softdb.check import Id, Schema
from softdb.errors import BadInput
from softdb.formats.lines import Fields
from softdb.formats.tables import needed

__all__ = ["bounded", "column", "literal", "occupied", "require_columns", "tracked", "transaction", "written_since"]

LARGEST = 1 << 28  # bytes of changes that are held in memory; more, and shards are made anew
_TRACKED = {"Append", "Delete", "Rewrite", "CreateIndex", "UpdateConfig"}  # transactions that Lance's delta follows
_COMPARED = {"Update", "Merge", "BaseOperation"}  # those that it may follow; the last reserves numbers of fragments


def column(values: Any, kind: Any, there: Any = None) -> Any:
    """Numbers (n, …) as a column, null where there are none."""
    pa, array = needed("pyarrow", "cluster", "a cluster"), np.ascontiguousarray(values)
    mask = None if there is None or there.all() else ~there
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(array.tolist() if array.dtype == object else array, kind, mask=mask)
    flat = pa.array(array.reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=None if mask is None else pa.array(mask))


def bounded(reader: Any) -> Any:
    """What a reader gives, as a table; None where that is more than is held."""
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
    updated, inserted = (dataset.scanner([*columns, "_rowid"], filter=one) for one in conditions)
    return updated.to_reader(), inserted.to_reader()


def transaction(dataset: Any, version: int) -> Any:
    """Return the transaction of a version; None of a Rewrite with indices, which pylance 14.0 does not build."""
    try:
        return dataset.read_transaction(version)
    except TypeError:
        return None


def tracked(dataset: Any, version: int) -> bool:
    """Return True where Lance's delta tells all that the transaction of a version has changed.

    It does not for restored versions, nor for columns that were rewritten, replaced, dropped or renamed. What only adds
    files, as `softdb.cluster.appending` and added columns do, is a merge of fragments.
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


def require_columns(dataset: Any, fields: Fields, others: Sequence[str], schema: Schema) -> None:
    """Raise BadInput naming the first column that records need and that is gone, or of another width."""
    widths = {fields.key: schema.dim, fields.value: schema.value_dim}
    for name in filter(None, (fields.id, fields.key, fields.value, *others)):
        if name not in dataset.schema.names:
            raise BadInput(f"{dataset.uri} has no column {name!r} any more; add it, or restore() a version that has it")
        width, size = widths.get(name), getattr(dataset.schema.field(name).type, "list_size", None)
        if width is not None and size not in (None, width):
            wider = f"column {name!r} is {size} wide, but the records' are {width}"
            raise BadInput(f"{dataset.uri}: {wider}; mend it, or restore() a version before")


def literal(one: Id) -> str:
    """An id as a condition of Lance says it."""
    return str(one) if type(one) is int else "'" + str(one).replace("'", "''") + "'"


class Occupied(NamedTuple):
    """What a version of a table consists of."""

    records: int
    dead: int  # rows of deleted and replaced records
    files: int
    bytes: int


def occupied(dataset: Any) -> Occupied:
    """The files of a version, and the rows in them."""
    parts = dataset.get_fragments()
    sizes = [one.file_size_bytes or 0 for part in parts for one in part.data_files()]
    dead = sum(one.num_deletions for one in parts)
    return Occupied(dataset.count_rows(), dead, len(sizes), sum(sizes))
