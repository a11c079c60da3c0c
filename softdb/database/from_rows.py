"""Rows as arguments of the writing verbs: dicts, `Record`s, frames of pandas and polars, Arrow tables, datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, ValuesView
from dataclasses import replace
from typing import Any

from softdb.answers import Record, Records
from softdb.check import are_texts, is_missing, shown
from softdb.database.incoming import UPDATES, Given, WriteKind
from softdb.errors import BadInput
from softdb.tables.arrow_tables import read_table, table_of
from softdb.tables.rows import DEFAULTS, Fields, named_in

NO_ROWS = Given([], None, None, None, None)
_BATCH = 10_000  # number of rows that a dataset converts at once


def columns_of(change: WriteKind, given: Given, fields: Any, has_values: bool, encoder: Callable[[], Any]) -> Given:
    """Return the arguments of a verb with rows, which stand in the place of the ids, as columns; others unchanged.

    Without any rows return `NO_ROWS` itself. `fields`: the verb's argument; `has_values`: the database has values;
    `encoder` returns its encoder or None.
    """
    source: Any = given.ids
    if fields is None and isinstance(source[0] if type(source) is list and source else source, str | int | None):
        return given
    is_table = _is_table(source)
    if isinstance(source, Iterator | ValuesView) and not is_table:
        source = list(source)
    if type(source) is list and not source and all(batch is None for batch in given[1:]):
        return NO_ROWS
    if isinstance(source, Mapping) and isinstance(source.get("id", source.get("text")), list | dict):
        raise BadInput("a dict is one row, but its id or text is a list or dict; give a list with a dict for each row")
    rows: Any = [source] if isinstance(source, Mapping | Record) else source
    is_rows = isinstance(rows, list | tuple | Records) and len(rows) and isinstance(rows[0], Mapping | Record)
    if not (is_table or is_rows):
        if fields is None:
            return given._replace(ids=source)
        raise BadInput(f"fields name the columns of rows, but ids are {shown(source)}; give dicts, a frame or a table")
    apart = [name for name, batch in zip(given._fields, given, strict=True) if name != "ids" and batch is not None]
    if apart:
        raise BadInput(f"rows and {' and '.join(apart)} are given; put {apart[0]} into the rows, or pass only columns")
    named = named_in(fields)
    if is_table and not _is_pandas(rows):
        columns = _table(rows, named, has_values)
    else:
        columns = _dicts(_pandas(rows) if is_table else [_row(row, has_values) for row in rows], named, has_values)
    return _updated(columns) if change in UPDATES or columns is NO_ROWS else _inserted(columns, named, encoder)


def _is_table(value: Any) -> bool:
    """Return True for a frame, an Arrow table, batch or reader, or a dataset; False for a single column of ids."""
    if hasattr(value, "__arrow_c_stream__"):
        return hasattr(value, "schema") or hasattr(value, "columns")
    return _is_pandas(value) or (hasattr(value, "with_format") and hasattr(value, "iter"))


def _is_pandas(value: Any) -> bool:
    return "pandas" in sys.modules and isinstance(value, sys.modules["pandas"].DataFrame)


def _row(record: Any, has_values: bool) -> Any:
    """Return a record of a database as a dict, anything else unchanged."""
    if not isinstance(record, Record):
        return record
    return {name: cell for name, cell in vars(record).items() if name != "value" or has_values}


def _dicts(rows: list[Any], named: Mapping[str, str | None], has_values: bool) -> Given:
    """Return dicts as columns. A cell that is missing is None, or a field that the payload lacks."""
    if not rows:
        return NO_ROWS
    wrong = next((i for i, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise BadInput(f"row {wrong} is {shown(rows[wrong])}; expected a dict, like row 0")
    names = list(dict.fromkeys(name for row in rows for name in row))
    parts = Fields.roles(names, named, has_values)
    columns: dict[str, Any] = dict.fromkeys(DEFAULTS)
    for role, name in parts.items():
        if name is not None:
            columns[role] = [None if is_missing(cell := row.get(name)) else cell for row in rows]
    if are_texts(columns["key"]):
        advice = f"expected lists of numbers: parse by json.loads, or embed it by fields={{'text': {parts['key']!r}}}"
        raise BadInput(f"column {parts['key']!r} holds texts, {shown(columns['key'])}; {advice}")
    ids, used, payloads = columns["id"], set(parts.values()), None
    if ids is not None and None in ids:
        raise BadInput(f"row {ids.index(None)} has no {parts['id']!r}; give every row an id, or no row")
    if set(names) - used == {"payload"}:
        payloads = [row.get("payload") for row in rows]
    elif set(names) - used:
        payloads = [
            {name: cell for name, cell in row.items() if name not in used and not is_missing(cell)} for row in rows
        ]
    return Given(ids, columns["key"], columns["value"], payloads, columns["text"])


def _pandas(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a frame. Levels of the index that have a name are columns; an index without one is ignored."""
    if all(name is not None and name not in frame.columns for name in frame.index.names):
        frame = frame.reset_index()
    names = list(frame.columns)
    if not frame.columns.is_unique:
        raise BadInput(f"the frame has several columns of the same name; its columns are {shown(names)}")
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return rows


def _table(source: Any, named: Mapping[str, str | None], has_values: bool) -> Given:
    """Return the rows of an Arrow table or a dataset as columns. Raises MissingDependency without pyarrow."""
    table = replace(table_of(source, _BATCH), optional=True)
    names = table.schema.names
    parts = Fields.roles(names, named, has_values)
    fields = Fields(parts["id"], parts["key"] or "", parts["text"], parts["value"])  # "": no column of keys
    batches = list(read_table(table, fields, sys.maxsize, None))  # at most one of this size
    if not batches:
        return NO_ROWS
    rows = batches[0]
    payloads = None if set(names) <= set(parts.values()) else rows.payloads
    ids, keys, texts = (
        column if parts[role] else None for role, column in (("id", rows.ids), ("key", rows.keys), ("text", rows.texts))
    )
    return Given(ids, keys, rows.values, payloads, texts)


def _inserted(columns: Given, named: Mapping[str, str | None], encoder: Callable[[], Any]) -> Given:
    """Return columns of new records. Rows without a key, or with an encoder without a text, make keyless records."""
    ids, keys, _, payloads, texts = columns
    if keys is None and texts is None:
        if "key" not in named:
            names = shown(list(payloads[0]) if payloads and isinstance(payloads[0], dict) else [])
            raise BadInput(
                "rows have no column of keys or texts; expected key, vector, embedding or text: name yours by "
                f"fields={{'key': …}}, or fields={{'key': None}} for records without a key; other columns are {names}"
            )
        keys = [None] * len(payloads if payloads is not None else ids)
    elif keys is None and None in texts and encoder() is not None:
        keys = texts
    return columns._replace(keys=keys)


def _updated(columns: Given) -> Given:
    """Return columns of stored records. Raises BadInput for a column in which some cells are missing."""
    for role in ("keys", "values", "texts"):
        column = getattr(columns, role)
        missing = [i for i, cell in enumerate(column) if cell is None] if isinstance(column, list) else []
        if missing and len(missing) < len(column):
            raise BadInput(
                f"row {missing[0]} lacks one of the {role}, which others have; update such rows by themselves"
            )
        columns = columns._replace(**{role: None}) if missing else columns
    return columns
