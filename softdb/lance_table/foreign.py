"""Check a table that another program has made, before any shard is built from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softdb import check
from softdb.check import shown
from softdb.errors import BadInput
from softdb.lance_table.storage import dataset_at
from softdb.lance_table.truth import Truth
from softdb.tables.arrow_tables import needed
from softdb.tables.rows import Fields


def served(
    url: str,
    options: dict[str, str] | None,
    fields: Fields,
    metric: str,
    num_classes: int | None,
    shards: int,
    replicas: int,
    payload: Sequence[str] | None = None,
) -> Truth:
    """Open a table that another program has made, for a cluster. Raises BadInput if a column is missing or unfit."""
    dataset = dataset_at(url, options)
    names = dataset.schema.names
    for name, argument in ((fields.id, "ids"), (fields.key, "keys"), (fields.value, "values")):
        if name is not None and name not in names:
            raise BadInput(
                f"{url} has no column {shown(name)}; expected one of {shown(names)}; name the column by {argument}="
            )
    columns = None if payload is None else _payload(url, names, fields, payload)
    _require_ids(url, dataset, str(fields.id))
    dim, dtype = _vectors(url, dataset, str(fields.key))
    value_dim = None
    if fields.value is not None:
        pa = needed("pyarrow", "cluster", "a cluster")
        if pa.types.is_integer(dataset.schema.field(fields.value).type):
            _require_none(url, dataset, fields.value)
            num_classes = _classes(dataset, fields.value) if num_classes is None else num_classes
        else:
            value_dim, _ = _vectors(url, dataset, fields.value)
    schema = check.schema(dim, value_dim, num_classes, dtype, metric, None)
    return Truth(url, options, fields, False, schema, shards, replicas, None, dataset, payload=columns)


def _payload(url: str, names: list[str], fields: Fields, payload: Sequence[str]) -> tuple[str, ...]:
    untyped: Any = payload
    is_list = isinstance(untyped, Sequence) and not isinstance(untyped, str)
    if not is_list or not all(isinstance(name, str) for name in untyped):
        raise BadInput(f"payload is {shown(payload)}; expected a list of names of columns, or None for all columns")
    free = [name for name in names if name not in (fields.id, fields.key, fields.value)]
    wrong = next((name for name in payload if name not in free), None)
    if wrong is not None:
        raise BadInput(
            f"payload names {shown(wrong)}; expected columns of {url} other than id, key and value: {shown(free)}"
        )
    return tuple(sorted(set(payload)))


def _require_ids(url: str, dataset: Any, name: str) -> None:
    pa = needed("pyarrow", "cluster", "a cluster")
    kind = dataset.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise BadInput(f"{url}: column {name!r} is of type {shown(str(kind))}; expected integers or texts as ids")
    _require_none(url, dataset, name)


def _require_none(url: str, dataset: Any, name: str, test: str = "IS NULL", problem: str = "is null") -> None:
    condition = f"array_length(`{name}`) {test}" if test[0] in "<!" else f"`{name}` {test}"
    count = dataset.count_rows(condition)
    if count:
        raise BadInput(f"{url}: column {name!r} {problem} in {count} of {dataset.count_rows()} rows; correct them")


def _vectors(url: str, dataset: Any, name: str) -> tuple[int, str]:
    """Return width and dtype of the vectors in a column. Raises BadInput if it holds anything else."""
    pa = needed("pyarrow", "cluster", "a cluster")
    kind = dataset.schema.field(name).type
    inner = getattr(kind, "value_type", None)
    if inner is None or not pa.types.is_floating(inner):
        raise BadInput(
            f"{url}: column {name!r} is of type {shown(str(kind))}; expected lists of floats, all of one length"
        )
    _require_none(url, dataset, name)
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
    else:
        first = dataset.head(1, columns=[name])[name].to_pylist()
        width = len(first[0]) if first else 0
        _require_none(url, dataset, name, f"!= {width}", f"has other than {width} numbers")
    if not width:
        raise BadInput(f"{url}: column {name!r} holds no numbers; write vectors to it, then serve the table")
    return width, "float16" if pa.types.is_float16(inner) else "float32"


def _classes(dataset: Any, name: str) -> int:
    """Return the number of classes: the largest label in a column, plus 1."""
    compute = needed("pyarrow.compute", "cluster", "a cluster")
    maxima = (compute.max(batch.column(0)).as_py() for batch in dataset.to_batches(columns=[name]))
    return 1 + max((largest for largest in maxima if largest is not None), default=0)
