"""Files that workers have written become one commit of a table, if no id of theirs is stored or comes twice."""

from __future__ import annotations

from typing import Any

from softdb.check import shown
from softdb.cluster.truth import Truth
from softdb.errors import DatabaseLocked, DuplicateId
from softdb.formats.tables import needed

__all__ = ["append"]

_TRIES = 20  # of a commit that others overtake


def append(truth: Truth, fragments: list[Any], ids: list[Any]) -> int:
    """Commit fragments of Lance whose rows have these ids (pyarrow arrays); the version then. All or nothing.

    Raises DuplicateId; DatabaseLocked where others wrote all the while.

    An append of Lance is not checked against ids that others insert at the same time. A merge of fragments is refused
    if anything was written since the version that it names: so the ids are looked for in that version, and, if it was
    overtaken, in the next.
    """
    pa, lance = needed("pyarrow", "cluster", "ingest"), needed("lance", "cluster", "ingest")
    if not fragments:
        return truth.newest()
    column = pa.chunked_array(ids)
    _require_once(column)
    names = pa.table([column], schema=pa.schema([truth.now().schema.field("id")]))
    for _ in range(_TRIES):
        newest, made = truth.now(), list[Any]()

        def commit() -> None:
            newest.merge_insert("id").when_matched_fail().execute_uncommitted(names)  # noqa: B023
            whole = [*(one.metadata for one in newest.get_fragments()), *fragments]  # noqa: B023
            operation = lance.LanceOperation.Merge(whole, newest.lance_schema)  # noqa: B023
            made.append(lance.LanceDataset.commit(newest, operation, newest.version, max_retries=0))  # noqa: B023

        try:
            truth._written(newest, commit)
        except DatabaseLocked as error:
            overtaken = error
            continue
        return int(made[0].version)
    raise overtaken


def _require_once(ids: Any) -> None:
    compute = needed("pyarrow.compute", "cluster", "ingest")
    counts = ids.value_counts()
    twice = counts.filter(compute.greater(counts.field("counts"), 1))
    if len(twice):
        raise DuplicateId(f"id {shown(twice[0]['values'].as_py())} comes twice; keep one of the two")
