"""Bulk ingest: a data set of Ray Data becomes one commit of a table."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from typing import Any

from softdb import opening
from softdb.cluster.addresses import address, named
from softdb.cluster.appending import append
from softdb.cluster.placement import by_shard
from softdb.cluster.truth import Truth, stored
from softdb.errors import BadInput, WriteFailed
from softdb.formats.tables import needed

__all__ = ["ingest"]

_BYTES = 1 << 26  # of the rows that a worker writes as one file, about


@named
def ingest(
    url: str | os.PathLike[str],
    dataset: Any,
    *,
    upsert: bool = False,
    storage_options: dict[str, str] | None = None,
) -> int:
    """Bring a `ray.data.Dataset` into a table that `create` has made, in one commit; the version then.

        softdb.cluster.ingest(url, ray.data.read_parquet("s3://bucket/parts"))

    Its columns are `id`, `key`, and `value` where the table has values; either `text` and `payload` beside them, as in
    an export, or any others, which are the payload. Ray's workers check the rows and write them, those of a shard side
    by side; only the ids come to this process, which commits. With `upsert` the rows come, too: this process writes
    them. Whatever fails on the way leaves the table as it was: a job that was killed is run again.

    Raises:
        DuplicateId: an id is stored already, or comes twice; with `upsert` the first are replaced.
        BadInput: a row is no record of this table; the message names it.
        DatabaseLocked: others wrote all the while; nothing was written.
    """
    truth = stored(address(url), storage_options)
    needed("ray", "cluster", "ingest")
    if upsert:
        return _merged(truth, dataset)
    fragments, ids = list[Any](), list[Any]()

    def written(batch: Any) -> Any:
        return _written(truth, batch)

    made = dataset.map_batches(written, batch_format="pyarrow", batch_size=_rows(truth))
    try:
        for table in made.iter_batches(batch_format="pyarrow", batch_size=None):
            fragments += [one for text in table["fragments"].to_pylist() for one in pickle.loads(text)]
            ids += [part.flatten() for part in table["ids"].chunks]
    except Exception as error:  # of a worker, in Ray's words
        raise _told(error) or error from None
    return append(truth, fragments, ids)


def _merged(truth: Truth, dataset: Any) -> int:
    """Replace what is stored: rows come through this process, and Lance merges them."""
    pa, schema = needed("pyarrow", "cluster", "ingest"), truth.now().schema

    def checked(batch: Any) -> Any:
        return _checked(truth, batch)

    rows = dataset.map_batches(checked, batch_format="pyarrow", batch_size=_rows(truth))
    raised: list[Exception] = []

    def batches() -> Iterator[Any]:
        try:
            for table in rows.iter_batches(batch_format="pyarrow", batch_size=_rows(truth)):
                yield from table.cast(schema).to_batches()
        except Exception as error:  # of a worker: Lance would make one of its own of it
            raised.append(error)
            raise

    try:
        return truth.write(pa.RecordBatchReader.from_batches(schema, batches()), upsert=True)
    except WriteFailed as error:
        raise (raised and _told(raised[0])) or error from None


def _told(error: Exception) -> BadInput | None:
    """What a worker said of a row."""
    wrong = re.search(r"BadInput: (.+)", str(error))
    return None if wrong is None else BadInput(f"{wrong[1]}; nothing was written")


def _rows(truth: Truth) -> int:
    """So many are a batch."""
    schema = truth.schema
    return max(1000, _BYTES // ((schema.dim + (schema.value_dim or 0)) * schema.dtype.itemsize + 256))


def _checked(truth: Truth, batch: Any) -> Any:
    """Rows as the table takes them. In a worker of Ray."""
    rows = truth.rows(batch)
    if rows is None:
        return truth.now().schema.empty_table()
    door = opening.open(None, **truth.described)
    try:
        return truth.table(door.batch(rows.ids, rows.keys, rows.values, rows.payloads, rows.texts, lambda *_: None))
    finally:
        door.close()


def _written(truth: Truth, batch: Any) -> Any:
    """Write rows to a file of the table that no version has yet. In a worker of Ray."""
    pa, write = needed("pyarrow", "cluster", "ingest"), needed("lance.fragment", "cluster", "ingest").write_fragments
    rows = _checked(truth, batch)
    rows = rows.take(by_shard(rows["id"].to_pylist()))
    fragments = write(rows, truth.url, schema=rows.schema, storage_options=truth.options) if len(rows) else []
    ids = pa.array([rows["id"].to_pylist()], pa.list_(rows.schema.field("id").type))
    return pa.table({"fragments": pa.array([pickle.dumps(fragments)]), "ids": ids})
