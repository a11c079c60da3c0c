"""Records as pandas frames: a row for each record, and a column for each part of it or field of its payload."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from softdb.check import shown
from softdb.errors import BadInput, MissingDependency, UnknownField

COLUMNS = ("id", "key", "value", "text", "payload")
RESERVED = {*COLUMNS, "vector", "embedding"}  # names of columns that an insert does not read as fields of the payload


def frame(batches: Iterable[Any], columns: Sequence[str] | None) -> Any:
    """Return batches of `Records` as a pandas DataFrame; see `Verbs.to_pandas`. Raises BadInput, MissingDependency."""
    names = None if columns is None else column_names(columns)
    pd, cells = pandas(), {name: list[Any]() for name in COLUMNS}
    for records in batches:
        cells["id"] += records.ids
        cells["text"] += records.texts
        cells["payload"] += records.payloads
        for name, column in (("key", records.keys), ("value", records.values)):
            if column is not None and (names is None or name in names):
                rows, keyed = column.tolist() if column.ndim == 1 else column.numpy(), records.keyed.tolist()
                cells[name] += [row if has_key else None for row, has_key in zip(rows, keyed, strict=True)]
    if names is None:
        optional = {"value": cells["value"], "text": any(cells["text"])}
        names = ["id", "key", *(name for name in optional if optional[name]), *_fields(cells["payload"])]
    fields = {name: field_cells(cells["payload"], name) for name in names if name not in COLUMNS}
    warn_of_unknown(fields)
    return pd.DataFrame(
        {name: _series(pd, name, (cells | fields)[name]) for name in names if name != "value" or cells["value"]}
    )


def field_cells(payloads: Iterable[Any], name: str) -> list[Any]:
    """Return a field of each payload, None where a payload lacks it."""
    return [payload.get(name) if isinstance(payload, dict) else None for payload in payloads]


def warn_of_unknown(fields: Mapping[str, list[Any]]) -> None:
    """Warn of columns that the caller named, if they are fields that no record has."""
    for name in [name for name, cells in fields.items() if cells and all(cell is None for cell in cells)]:
        known = f"columns are {', '.join(COLUMNS)} and fields of the payload"
        warnings.warn(f"no record has the field {shown(name)}; {known}", UnknownField, stacklevel=5)


def _fields(payloads: list[Any]) -> list[str]:
    """Return the fields of all payloads in order of appearance; "payload" if they cannot be columns beside others."""
    fields = dict.fromkeys(field for payload in payloads if isinstance(payload, dict) for field in payload)
    are_columns = not RESERVED & fields.keys() and all(isinstance(payload, dict | None) for payload in payloads)
    return list(fields) if are_columns else ["payload"]


def _series(pd: Any, name: str, cells: list[Any]) -> Any:
    """Return a column; integers of 64 bits beside missing values stay integers, which floats would round."""
    if name in ("key", "payload") or not cells:
        return pd.Series(cells, dtype=object)
    integers = {*map(type, cells)} == {int, type(None)} and all(abs(cell or 0) < 2**63 for cell in cells)
    return pd.Series(cells, dtype="Int64" if integers else None)


def column_names(columns: Any) -> list[str]:
    """Return the names of columns, each once. Raises BadInput."""
    named = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not named or not all(type(column) is str for column in columns):
        raise BadInput(f'columns are {shown(columns)}; expected a list of names such as ["id", "year"]')
    return list(dict.fromkeys(columns))


def pandas() -> Any:
    """Return the module pandas. Raises MissingDependency."""
    try:
        import pandas
    except ImportError:
        raise MissingDependency("to_pandas needs pandas; pip install pandas") from None
    return pandas
