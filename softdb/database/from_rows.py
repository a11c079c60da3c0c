"""Rows as arguments of the writing verbs: dicts, `Record`s, frames of pandas and polars, Arrow tables, datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from softdb.answers import Record, Records
from softdb.check import is_missing, is_tensor, shown
from softdb.database.incoming import Given, WriteKind
from softdb.errors import BadInput
from softdb.tables.arrow_tables import read_table, table_of
from softdb.tables.rows import Fields

DEFAULTS = {"id": ("id",), "key": ("key", "vector", "embedding"), "text": ("text",), "value": ("value",)}
_BATCH = 10_000  # number of rows that a dataset converts at once
_SIMPLE = (str, int)


def columns_of(change: WriteKind, given: Given, fields: Any, has_values: bool, encoder: Callable[[], Any]) -> Given:
    """Return the arguments of a verb with rows, which stand in the place of the ids, as columns; others unchanged.

    `fields`: the verb's argument; `has_values`: the database has values; `encoder` returns its encoder or None.
    """
    source: Any = given.ids
    if fields is None and type(source) is list and source and type(source[0]) in _SIMPLE:
        return given
    named = _named(fields)
    if _is_iterable(source):
        source = list(source)
        given = given._replace(ids=source)
    rows: Any = [source] if isinstance(source, Mapping | Record) else source
    is_list = isinstance(rows, list | tuple) and bool(rows) and isinstance(rows[0], Mapping | Record)
    if not is_list and not isinstance(rows, Records) and not _is_table(rows):
        if fields is None:
            return given
        expected = "rows: a list of dicts, a frame, an Arrow table or a dataset"
        raise BadInput(f"fields name the columns of rows, but ids are {shown(source)}; expected {expected}")
    apart = [name for name, batch in zip(given._fields, given, strict=True) if name != "ids" and batch is not None]
    if apart:
        raise BadInput(f"rows and {' and '.join(apart)} are given; put {apart[0]} into the rows, or pass only columns")
    if is_list or isinstance(rows, Records) or _is_pandas(rows):
        dicts = _pandas(rows) if _is_pandas(rows) else [_row(row, has_values) for row in rows]
        columns = _dicts(dicts, named, has_values)
        firsts = [cells[0] for cells in (columns.ids, columns.texts) if cells]
        if isinstance(source, Mapping) and any(isinstance(cell, list) for cell in firsts):
            raise BadInput("a dict is one row, but its id or text is a list; give a list with a dict for each row")
    else:
        columns = _table(rows, named, has_values)
    return _updated(columns) if change in (WriteKind.UPDATE, WriteKind.MERGE) else _inserted(columns, named, encoder)


def _is_iterable(value: Any) -> bool:
    """Return True for an iterable that may yield rows or ids, such as a generator."""
    if isinstance(value, str | bytes | list | tuple | Mapping | np.ndarray | Records) or is_tensor(value):
        return False
    return isinstance(value, Iterable) and not _is_table(value)


def _is_table(value: Any) -> bool:
    """Return True for a frame, an Arrow table, batch or reader, or a dataset; False for a single column of ids."""
    if hasattr(value, "__arrow_c_stream__"):
        return hasattr(value, "schema") or hasattr(value, "columns")
    return _is_pandas(value) or all(hasattr(value, name) for name in ("with_format", "iter", "__len__"))


def _is_pandas(value: Any) -> bool:
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].DataFrame)


def _named(fields: Any) -> dict[str, str | None]:
    """Return the columns that `fields` names, by role. Raises BadInput."""
    if isinstance(fields, Fields):
        parts = {role: getattr(fields, role) for role in DEFAULTS}
        return {role: name for role, name in parts.items() if name != role and (name is not None or role == "id")}
    if fields is not None and not isinstance(fields, Mapping):
        raise BadInput(f"fields are {shown(fields)}; expected a dict, such as {{'id': 'isbn', 'text': 'blurb'}}")
    for role, name in (fields or {}).items():
        if role not in DEFAULTS or not isinstance(name, str | None):
            raise BadInput(
                f"fields have {shown(role)}: {shown(name)}; expected {', '.join(DEFAULTS)}, each with the name of a "
                "column, or None for no column; all other columns are the payload"
            )
    return dict(fields or {})


def _parts(names: Iterable[str], named: Mapping[str, str | None], has_values: bool) -> dict[str, str | None]:
    """Return the column of each role, None where there is none. Raises BadInput, with the columns."""
    columns, parts = list(names), dict(named)
    for role, name in named.items():
        if name is not None and name not in columns:
            raise BadInput(f"rows have no column {name!r} for the {role}; their columns are {shown(columns)}")
        if name is not None and list(named.values()).count(name) > 1:
            raise BadInput(f"fields name the column {name!r} twice; name another one, or None, for the {role}")
    for role in [role for role in DEFAULTS if role not in named]:
        defaults = [name for name in DEFAULTS[role] if name in columns and name not in named.values()]
        if len(defaults) > 1:
            raise BadInput(
                f"columns {shown(defaults)} may each be the {role}; choose: fields={{{role!r}: {defaults[0]!r}}}"
            )
        parts[role] = defaults[0] if defaults and (role != "value" or has_values) else None
    return parts


def _row(record: Any, has_values: bool) -> Any:
    """Return a record of a database as a dict, anything else unchanged."""
    if not isinstance(record, Record):
        return record
    value = {"value": record.value} if has_values else {}
    return {"id": record.id, "key": record.key, "text": record.text, "payload": record.payload, **value}


def _dicts(rows: Sequence[Mapping[str, Any]], named: Mapping[str, str | None], has_values: bool) -> Given:
    """Return dicts as columns. A cell that is missing is None, or a field that the payload lacks."""
    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise BadInput(f"row {wrong} is {shown(rows[wrong])}; expected a dict, like row 0")
    names = list(dict.fromkeys(name for row in rows for name in row))
    parts = _parts(names, named, has_values)

    def cells(role: str) -> list[Any] | None:
        column_name = parts[role]
        if column_name is None:
            return None
        column = [row.get(column_name) for row in rows]
        return [None if is_missing(cell) else cell for cell in column]

    ids = cells("id")
    if ids is not None and None in ids:
        raise BadInput(f"row {ids.index(None)} has no {parts['id']!r}; give every row an id, or no row")
    used = set(parts.values())
    others = [name for name in names if name not in used]
    payloads: list[Any] | None = None
    if others == ["payload"]:
        payloads = [row.get("payload") for row in rows]
    elif others:
        payloads = [
            {name: cell for name, cell in row.items() if name not in used and not is_missing(cell)} for row in rows
        ]
    return Given(ids, cells("key"), cells("value"), payloads, cells("text"))


def _pandas(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a frame. Levels of the index that have a name are columns; an index without one is ignored."""
    if all(name is not None and name not in frame.columns for name in frame.index.names):
        frame = frame.reset_index()
    names = list(frame.columns)
    if not len(frame):
        raise BadInput(f"the frame has no rows; its columns are {shown(names)}")
    wrong = next((name for name in names if not isinstance(name, str) or names.count(name) > 1), None)
    if wrong is not None:
        raise BadInput(f"column {shown(wrong)} of the frame is no text, or comes twice; rename it")
    return [
        dict(zip(names, cells, strict=True)) for cells in zip(*(frame[name].tolist() for name in names), strict=True)
    ]


def _table(source: Any, named: Mapping[str, str | None], has_values: bool) -> Given:
    """Return the rows of an Arrow table or a dataset as columns. Raises MissingDependency without pyarrow."""
    table = table_of(source, _BATCH)
    names = table.schema.names
    parts = _parts(names, named, has_values)
    fields = Fields(parts["id"], parts["key"] or "", parts["text"], parts["value"])  # "": no column of keys
    batches = list(read_table(table, fields, sys.maxsize, None, optional=True))
    if not batches:
        raise BadInput(f"the table has no rows; its columns are {shown(names)}")
    rows, has = batches[0], {role for role, name in parts.items() if name is not None}
    ids, keys, texts = (rows.ids if "id" in has else None), (rows.keys if "key" in has else None), rows.texts
    payloads = None if set(names) <= set(parts.values()) else rows.payloads
    return Given(ids, keys, rows.values, payloads, texts if "text" in has else None)


def _inserted(columns: Given, named: Mapping[str, str | None], encoder: Callable[[], Any]) -> Given:
    """Return columns of new records. Rows without a key, or with an encoder without a text, make keyless records."""
    ids, keys, values, payloads, texts = columns
    if keys is None and texts is None:
        if "key" not in named:
            raise BadInput(
                "rows have no column of keys or texts; expected key, vector, embedding or text: name yours by "
                "fields={'key': …}, or fields={'key': None} for records without a key"
            )
        keys = [None] * len(payloads if payloads is not None else ids)
    if keys is None and texts is not None and None in texts and encoder() is not None:
        keys = texts
    return Given(ids, keys, values, payloads, texts)


def _updated(columns: Given) -> Given:
    """Return columns of stored records. Raises BadInput for a column in which some cells are missing."""
    parts: dict[str, Any] = {"keys": columns.keys, "values": columns.values, "texts": columns.texts}
    for role, column in parts.items():
        missing = [i for i, cell in enumerate(column) if cell is None] if isinstance(column, list) else []
        if missing and len(missing) == len(column):
            parts[role] = None
        elif missing:
            raise BadInput(
                f"row {missing[0]} lacks one of the {role}, which others have; update such rows by themselves"
            )
    return columns._replace(**parts)
