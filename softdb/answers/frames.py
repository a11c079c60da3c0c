"""Records as pandas frames: a row for each record, and a column for each part of it or field of its payload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from softdb.check import shown
from softdb.errors import BadInput, MissingDependency

__all__ = ["COLUMNS", "column_names", "field_names", "frame", "pandas"]

COLUMNS = ("id", "key", "value", "text", "payload")
RESERVED = {*COLUMNS, "vector", "embedding"}  # names of columns that an insert does not read as fields of the payload
INT64 = range(-(2**63), 2**63)


def frame(batches: Iterable[Any], names: Sequence[str] | None) -> Any:
    """Return batches of `Records` as a pandas DataFrame; see `Verbs.to_pandas`. Raises MissingDependency."""
    pd, wanted = pandas(), set(COLUMNS if names is None else names)
    cells: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for records in batches:
        cells["id"] += records.ids
        cells["text"] += records.texts
        if "key" in wanted:
            cells["key"] += _vectors(records.keys, records.keyed)
        if "value" in wanted and records.values is not None:
            cells["value"] += _vectors(records.values, records.keyed)
        if not wanted <= {*COLUMNS[:4]}:
            cells["payload"] += records.payloads
    if not cells["value"]:
        del cells["value"]
    if names is None:
        fields = _fields(cells["payload"])
        names = [name for name in cells if name != "payload" and (name != "text" or any(cells["text"]))]
        names += ["payload"] if fields is None else fields
    for name in names:
        if name not in COLUMNS:
            cells[name] = [payload.get(name) if isinstance(payload, dict) else None for payload in cells["payload"]]
    return pd.DataFrame({name: _series(pd, name, cells[name]) for name in names if name in cells})


def _vectors(column: Tensor, keyed: Tensor) -> list[Any]:
    rows = column.tolist() if column.ndim == 1 else column.numpy()
    return [row if has_key else None for row, has_key in zip(rows, keyed.tolist(), strict=True)]


def _fields(payloads: list[Any]) -> list[str] | None:
    """Return the fields of all payloads in order of appearance; None if they cannot be columns beside the others."""
    if not all(payload is None or isinstance(payload, dict) for payload in payloads):
        return None
    fields = list(dict.fromkeys(field for payload in payloads for field in payload or ()))
    return None if RESERVED & set(fields) else fields


def _series(pd: Any, name: str, cells: list[Any]) -> Any:
    """Return a column; integers beside missing values stay integers, which floats would round."""
    if name in ("key", "payload"):
        return pd.Series(cells, dtype=object)
    whole = {*map(type, cells)} == {int, type(None)} and all(cell is None or cell in INT64 for cell in cells)
    return pd.Series(cells, dtype="Int64" if whole else None if cells else object)


def column_names(columns: Any) -> list[str]:
    """Return the names of columns, each once. Raises BadInput."""
    named = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not named or not all(type(column) is str for column in columns):
        raise BadInput(f'columns are {shown(columns)}; expected a list of names such as ["id", "year"]')
    return list(dict.fromkeys(columns))


def field_names(fields: object, taken: Iterable[str]) -> list[str]:
    """Return the names of fields of the payload, other than the columns `taken`. Raises BadInput."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise BadInput(f'to_pandas: fields are {shown(fields)}; expected a list of names such as ["year", "lang"]')
    names, taken = list(fields), list(taken)
    for name in names:
        if not isinstance(name, str) or name in taken:
            raise BadInput(f"to_pandas: fields hold {shown(name)}; expected names other than {', '.join(taken)}")
    return names


def pandas() -> Any:
    """Return the module pandas. Raises MissingDependency."""
    try:
        import pandas
    except ImportError:
        raise MissingDependency("to_pandas needs pandas; pip install pandas") from None
    return pandas
