"""Bulk ingest: a data set of Ray Data becomes one commit of a table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from softdb import opening
from softdb.cluster.opening import address, named
from softdb.cluster.truth import Truth, stored
from softdb.errors import BadInput, WriteFailed
from softdb.formats.tables import needed

__all__ = ["ingest"]

_ROWS = 10_000  # of a batch


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
    an export, or any others, which are the payload. Rows are checked by Ray's workers; this process writes.
    Whatever fails on the way leaves the table as it was: a job that was killed is run again.

    Raises:
        DuplicateId: an id is stored already, or comes twice; with `upsert` the first are replaced.
        BadInput: a row is no record of this table; the message names it.
    """
    truth = stored(address(url), storage_options)
    needed("ray", "cluster", "ingest")
    schema = truth.now().schema

    def checked(batch: Any) -> Any:
        return _checked(truth, batch)

    rows = dataset.map_batches(checked, batch_format="pyarrow", batch_size=_ROWS)

    raised: list[Exception] = []

    def batches() -> Iterator[Any]:
        try:
            for table in rows.iter_batches(batch_format="pyarrow", batch_size=_ROWS):
                yield from table.cast(schema).to_batches()
        except Exception as error:  # of a worker: Lance would make one of its own of it
            raised.append(error)
            raise

    pa = needed("pyarrow", "cluster", "ingest")
    try:
        return truth.write(pa.RecordBatchReader.from_batches(schema, batches()), upsert)
    except WriteFailed:
        wrong = re.search(r"BadInput: (.+)", str(raised[0])) if raised else None
        if wrong is None:
            raise
        raise BadInput(f"{wrong[1]}; nothing was written") from None


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
