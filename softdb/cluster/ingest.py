"""Bulk ingest: write a data set of Ray Data into a table in one commit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from softdb.check import shown
from softdb.cluster.addresses import address
from softdb.cluster.placement import by_shard, shard_of
from softdb.errors import BadInput, DatabaseLocked, DuplicateId, WriteFailed, named
from softdb.lance_table.truth import Truth, stored
from softdb.tables.arrow_tables import needed

_WRONG = "wrong"  # name of the column in which workers return errors
_BYTES = 1 << 26  # approximate size in bytes of a file that a worker writes
_BUCKET = 1 << 22  # approximate number of ids that one task compares
_TRIES = 20  # number of attempts to commit while other processes write, too


@named("ingest")
def ingest(
    url: str | os.PathLike[str], dataset: Any, *, upsert: bool = False, storage_options: dict[str, str] | None = None
) -> int:
    """Write a `ray.data.Dataset` into a table that `create` has made, in one commit; return the new version.

        softdb.cluster.ingest(url, ray.data.read_parquet("s3://bucket/parts"))

    The data set has columns `id`, `key`, and `value` if the table has values. Further columns are either `text` and
    `payload`, as in an export, or any others, which become the payload. Ray's workers check the rows and write them,
    sorted by shard, and compare the ids; this process gets only the names of the files, and commits. With `upsert` one
    worker gets the rows and writes them. A failure leaves the table unchanged: run a killed job again.

    Raises:
        DuplicateId: an id is stored already, or is in two rows; `upsert=True` replaces stored records.
        BadInput: a row cannot be stored; the message names it.
        DatabaseLocked: other writers kept committing; nothing was written.
    """
    truth, ray = stored(address(url), storage_options), needed("ray", "cluster", "ingest")
    if upsert:  # the worker only waits for others, and takes no CPU from them
        return int(_results([ray.remote(num_cpus=0)(_merged).remote(truth, dataset)])[0])

    def written(batch: Any) -> Any:
        return _written(truth, batch)

    files = dataset.map_batches(written, batch_format="pyarrow", batch_size=_rows(truth)).materialize()
    fragments = list[Any]()
    for table in files.select_columns(["fragments", _WRONG]).iter_batches(batch_format="pyarrow", batch_size=None):
        errors = table[_WRONG].drop_null()
        if len(errors):
            error = pickle.loads(errors[0].as_py())
            raise type(error)(f"{error}; nothing was written")
        fragments += [fragment for text in table["fragments"].to_pylist() for fragment in pickle.loads(text)]
    buckets = 2 << (sum(fragment.physical_rows for fragment in fragments) // _BUCKET).bit_length()
    split = ray.remote(num_returns=buckets)(_in_buckets)
    ids = [split.remote(block, buckets) for block in files.to_arrow_refs()]
    check = ray.remote(_require_new)

    def require_new(version: int) -> None:
        _results([check.remote(truth, version, *bucket) for bucket in zip(*ids, strict=True)])

    return append(truth, fragments, require_new)


def _results(tasks: list[Any]) -> list[Any]:
    """Return the results of Ray's tasks. Raises the first error as the task raised it, without Ray's."""
    ray = needed("ray", "cluster", "ingest")
    try:
        return list(ray.get(tasks))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def _merged(truth: Truth, dataset: Any) -> int:
    """Add or replace records: Lance merges the rows, which go through this process, a worker of Ray."""
    pa, refused = needed("pyarrow", "cluster", "ingest"), list[BadInput]()

    def batches() -> Iterator[Any]:
        for table in dataset.iter_batches(batch_format="pyarrow", batch_size=_rows(truth)):
            try:
                yield from _checked(truth, table).to_batches()
            except BadInput as error:  # Lance raises an error of its own instead
                refused.append(BadInput(f"{error.args[0]}; nothing was written"))
                raise

    try:
        return truth.write(pa.RecordBatchReader.from_batches(truth.now().schema, batches()), upsert=True)
    except WriteFailed:
        if refused:
            raise refused[0] from None
        raise


def _rows(truth: Truth) -> int:
    """Return the number of rows in a batch, so that a batch has about _BYTES bytes."""
    return max(1000, _BYTES // truth.row_bytes)


def _checked(truth: Truth, batch: Any) -> Any:
    """Check rows, and convert them to the table's schema. Runs in a worker of Ray. Raises BadInput."""
    rows = truth.rows(batch)
    if rows is None:
        return truth.now().schema.empty_table()
    return truth.table(truth.batch(rows))


def _written(truth: Truth, batch: Any) -> Any:
    """Write rows to a file that `append` commits later; return its fragment and ids. Runs in a worker of Ray."""
    pa, write = needed("pyarrow", "cluster", "ingest"), needed("lance.fragment", "cluster", "ingest").write_fragments
    try:
        rows, wrong = _checked(truth, batch), None
    except BadInput as error:
        rows, wrong = truth.now().schema.empty_table(), pickle.dumps(type(error)(error.args[0]))
    rows = rows.take(by_shard(rows["id"]))
    fragments = write(rows, truth.url, schema=rows.schema, storage_options=truth.options) if len(rows) else []
    ids = pa.LargeListArray.from_arrays([0, len(rows)], rows["id"].combine_chunks())
    return pa.table({"fragments": [pickle.dumps(fragments)], "ids": ids, _WRONG: pa.array([wrong], pa.binary())})


def append(truth: Truth, fragments: list[Any], require_new: Callable[[int], None]) -> int:
    """Commit fragments of Lance (files of rows) in one transaction; return the new version.

    `require_new(version)` raises DuplicateId if an id comes twice or is stored in that version. Raises DatabaseLocked
    if other writers kept committing.

    Lance does not check an append against concurrent inserts of the same ids. But it refuses a merge of fragments if
    anything was written since the version that the merge names. So this function checks the ids in that version, and if
    Lance refuses the merge, checks them again in the next version.
    """
    lance = needed("lance", "cluster", "ingest")
    if not fragments:
        return truth.newest()
    for _ in range(_TRIES):
        newest, commits = truth.now(), list[Any]()

        def commit() -> None:
            require_new(newest.version)  # noqa: B023
            all_fragments = [*(fragment.metadata for fragment in newest.get_fragments()), *fragments]  # noqa: B023
            operation = lance.LanceOperation.Merge(all_fragments, newest.lance_schema)  # noqa: B023
            commits.append(lance.LanceDataset.commit(newest, operation, newest.version, max_retries=0))  # noqa: B023

        try:
            truth._written(newest, commit)
        except DatabaseLocked as error:
            overtaken = error
            continue
        return int(commits[0].version)
    raise overtaken


def _in_buckets(block: Any, buckets: int) -> list[Any]:
    """Split the ids that `_written` returned by their hashes. Runs in a worker of Ray."""
    ids = block["ids"].combine_chunks().flatten()
    parts = shard_of(ids, buckets)
    return [ids.take(np.flatnonzero(parts == bucket)) for bucket in range(buckets)]


def _require_new(truth: Truth, version: int, *ids: Any) -> None:
    """Raise DuplicateId if an id comes twice, or is stored in a version of the table. Runs in a worker of Ray."""
    pa, compute = needed("pyarrow", "cluster", "ingest"), needed("pyarrow.compute", "cluster", "ingest")
    column = pa.chunked_array(ids)
    counts = column.value_counts()
    twice = counts.filter(compute.greater(counts.field("counts"), 1))
    if len(twice):
        raise DuplicateId(f"id {shown(twice[0]['values'].as_py())} comes twice; keep one of its rows")
    dataset = truth.at(version)
    names = pa.table([column], schema=pa.schema([dataset.schema.field("id")]))
    truth.attempt(lambda: dataset.merge_insert("id").when_matched_fail().execute_uncommitted(names))
