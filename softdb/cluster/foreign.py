"""Tables that others have made: looked at before anything is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softdb import check
from softdb.check import shown
from softdb.cluster.storage import dataset_at
from softdb.cluster.truth import Truth
from softdb.errors import BadInput
from softdb.formats.rows import Fields
from softdb.formats.tables import needed


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
    """A table as it is. Raises BadInput for one that is no records of one database."""
    dataset = dataset_at(url, options)
    names = dataset.schema.names
    for name, argument in ((fields.id, "ids"), (fields.key, "keys"), (fields.value, "values")):
        if name is not None and name not in names:
            raise BadInput(
                f"{url} has no column {shown(name)}; its columns are {shown(names)}, give {argument}= of them"
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
    given: Any = payload
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise BadInput(f"payload is {shown(payload)}; expected a list of columns' names, or None for all")
    free = [name for name in names if name not in (fields.id, fields.key, fields.value)]
    wrong = next((one for one in payload if one not in free), None)
    if wrong is not None:
        raise BadInput(
            f"payload names {shown(wrong)}, but the columns of {url} that are neither id, key nor value are "
            f"{shown(free)}; name some of them"
        )
    return tuple(sorted(set(payload)))


def _require_ids(url: str, dataset: Any, name: str) -> None:
    pa = needed("pyarrow", "cluster", "a cluster")
    kind = dataset.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise BadInput(f"{url}: column {name!r} is of type {shown(str(kind))}; ids are whole numbers or texts")
    _require_none(url, dataset, name)


def _require_none(url: str, dataset: Any, name: str, wrong: str = "IS NULL", what: str = "is null") -> None:
    condition = f"array_length(`{name}`) {wrong}" if wrong[0] in "<!" else f"`{name}` {wrong}"
    found = dataset.count_rows(condition)
    if found:
        raise BadInput(f"{url}: column {name!r} {what} in {found} of {dataset.count_rows()} rows; mend or delete those")


def _vectors(url: str, dataset: Any, name: str) -> tuple[int, str]:
    """The width of a column of vectors, and how they are stored."""
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
        raise BadInput(f"{url}: column {name!r} holds no numbers; it cannot be served before it does")
    return width, "float16" if pa.types.is_float16(inner) else "float32"


def _classes(dataset: Any, name: str) -> int:
    """One more than the largest label."""
    compute = needed("pyarrow.compute", "cluster", "a cluster")
    found = (compute.max(batch.column(0)).as_py() for batch in dataset.to_batches(columns=[name]))
    return 1 + max((one for one in found if one is not None), default=0)
