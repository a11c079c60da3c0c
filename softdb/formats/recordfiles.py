"""Reading records: from files by their suffix, from folders, from frames, in batches of constant memory."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from softdb import check
from softdb.check import Array, Id
from softdb.errors import BadInput
from softdb.formats.arrays import COLUMNS, KeyColumns, columns_in
from softdb.formats.collections import COLLECTIONS, MARKS, VECTORS, read_collection
from softdb.formats.lines import Row, csv_header, csv_rows, raised, read_header, read_rows, text_lines
from softdb.formats.rows import Fields, Header, OnError, Rows, is_own, kind_of, text_in
from softdb.formats.tables import FOLDERS, TABLES, framed, read_table, table_in

__all__ = ["is_vector", "read_records"]

_LINES = (".jsonl", ".ndjson", ".csv", ".tsv")
_KINDS = ", ".join((*_LINES, *TABLES, *COLUMNS, *(kind for kind in VECTORS if kind not in COLUMNS)))
_BATCH = 1 << 28  # bytes of bare vectors in a batch, which a packed file may claim by a few bytes
Parsed = tuple[float, int, Id, Any, Any, Any, str | None]  # share of the file, line, id, key, value, payload, text


def read_records(
    source: Any,
    *,
    fields: Fields | None = None,
    keys: str | os.PathLike[str] | None = None,
    collection: str | None = None,
    batch_size: int = 10_000,
    on_error: OnError | None = None,
) -> Iterator[Rows]:
    """The records of a file, a folder or a frame, in batches, in O(batch) memory.

    Args:
        source: a path, whose suffix says the format (docs/formats.md lists them); or whatever gives an Arrow C stream:
            a frame of pandas or polars, a table or reader of pyarrow, a dataset of Hugging Face.
        fields: which field, or column, is what.
        keys: a file of bare vectors with the keys, row for row in the order of the lines of a `.jsonl` or `.csv` file.
        collection: which one, where a folder of another database holds several.
        batch_size: records a batch.
        on_error: called with what is wrong with a row, which is then passed over.

    Bare vectors have their row numbers for ids. In CSV an id is text; any other cell that reads as a JSON number,
    `true` or `false` becomes one, keys and values are JSON lists, and an empty cell is a field that is not there.

    Raises BadInput naming file and row; the records before it have been yielded by then.
    """
    fields, size = fields or Fields(), check.integer(batch_size, "batch_size")
    if not isinstance(source, str | os.PathLike):
        return read_table(framed(source, size), fields, size, on_error)
    path = Path(source)
    kind = _kind(path)
    if kind not in _LINES and keys is not None:
        raise BadInput(f"{path.name} holds keys itself; give keys= beside a .jsonl or .csv file")
    if fields.text is not None and (kind in COLUMNS or kind in VECTORS):
        raise BadInput(f"{path.name} holds no texts; leave out the text {fields.text!r}")
    collects = kind in COLLECTIONS or kind == "lancedb"
    if collection is not None and not collects:
        raise BadInput(f"{path.name} is no database of collections; leave out collection {collection!r}")
    if collects or kind in VECTORS:
        return read_collection(path, kind, collection, fields, size, on_error)
    if kind in TABLES or kind in FOLDERS:
        return read_table(table_in(path, kind, size), fields, size, on_error)
    if kind not in _LINES:
        return _bare(path, columns_in(path, kind), size)
    if keys is not None and on_error is not None:
        raise BadInput("lines are passed over, and then keys beside them are of others; mend the lines")
    return _of_lines(path, fields, keys, size, on_error)


def _of_lines(
    path: Path, fields: Fields, keys: str | os.PathLike[str] | None, size: int, on_error: OnError | None
) -> Iterator[Rows]:
    is_csv = _kind(path) in (".csv", ".tsv")
    vectors, header = None if keys is None else _matched(Path(keys), path, is_csv), read_header(path)
    names = csv_header(path) if is_csv else []
    exported = is_own(names, fields, header)
    has_values = "value" in names or (header is not None and bool(header.value_dim or header.num_classes))
    if fields.value is None and exported and has_values:
        fields = replace(fields, value="value")
    records = _records(path, fields, vectors, exported, on_error)
    return _batches(path, size, fields.value is not None, records, header)


def is_vector(value: object) -> bool:
    """Return True for a list of one or more finite numbers, none of them beyond the range of a float."""
    if not isinstance(value, list) or not value:
        return False
    try:
        return all(type(number) in (int, float) and math.isfinite(number) for number in value)
    except OverflowError:  # an int of more than 308 digits
        return False


def _batches(
    path: Path, size: int, has_values: bool, records: Iterator[Parsed], header: Header | None
) -> Iterator[Rows]:
    """Batches of records. Before an error is raised, the good lines before it go out."""
    failure: BadInput | None = None

    def good() -> Iterator[Parsed]:
        nonlocal failure
        try:
            yield from records
        except BadInput as error:
            failure = error

    rest = good()
    while batch := list(islice(rest, size)):
        shares, lines, ids, keys, values, payloads, texts = map(list, zip(*batch, strict=True))
        yield Rows(path, header, shares[-1], lines, ids, keys, values if has_values else None, payloads, texts)
    if failure is not None:
        raise failure


def _records(
    path: Path, fields: Fields, vectors: Array | None, exported: bool, on_error: OnError | None
) -> Iterator[Parsed]:
    """Records of the lines of a file; those of an export have texts, and may lack keys.

    Raises BadInput naming the line.
    """
    last: Any = None
    embeds = fields.key is None and vectors is None
    for i, (number, share, row, empty) in enumerate(read_rows(path, fields, on_error)):
        try:
            text = row.get("text") if exported else None
            if fields.text is not None:
                text = text_in(row, fields.text, embeds, empty)
            name = i if fields.id is None else check.identifiers([_taken(row, fields.id, "id")])[0]
            keyless = exported and vectors is None and not embeds and fields.key not in row
            key = None if keyless else text if embeds else _key(row, fields, last) if vectors is None else vectors[i]
            last = last if keyless else key
            for field in row.keys() & ({"key", "text"} if exported else {fields.text}):
                del row[field]
            value = None if fields.value is None or keyless else _taken(row, fields.value, "value")
            payload = (row["payload"] if list(row) == ["payload"] else row) if row else None
            check.json_text(payload, "the payload")
        except BadInput as error:
            (on_error or raised)(BadInput(f"{path.name} line {number}: {error}"))
            continue
        yield share, number, name, key, value, payload, text


def _key(row: Row, fields: Fields, before: Any) -> Any:
    """A line's key: a vector as wide as the one before it."""
    vector = _taken(row, str(fields.key), "key")
    if not is_vector(vector):
        raise BadInput(f"field {fields.key!r} is {check.shown(vector)}; expected a list of numbers")
    if before is not None and len(vector) != len(before):
        raise BadInput(f"field {fields.key!r} has {len(vector)} numbers, {len(before)} in the lines before; mend it")
    return vector


def _taken(row: Row, name: str, what: str) -> Any:
    if name not in row:
        raise BadInput(f"no field {name!r} for the {what}; its fields are {check.shown(list(row))}, name the right one")
    return row.pop(name)


def _matched(keys: Path, path: Path, is_csv: bool) -> Array:
    """Keys that have a row for each line of a file."""
    kind = _kind(keys)
    if kind in (".hdf5", ".h5"):
        vectors: Array = np.concatenate(
            [rows.keys for rows in read_collection(keys, kind, None, Fields(), _BATCH, None)]
        )
    else:
        vectors = columns_in(keys, kind).keys
    texts = (text for _, _, text in text_lines(path))
    count = sum(1 for _ in csv_rows(path, texts)) if is_csv else sum(bool(text.strip()) for text in texts)
    count -= is_csv or read_header(path) is not None
    if len(vectors) != count:
        raise BadInput(f"{keys.name} has {len(vectors)} keys but {path.name} has {count} records; they go row by row")
    return vectors


def _bare(path: Path, columns: KeyColumns, size: int) -> Iterator[Rows]:
    """Vectors, whose ids are row numbers unless the file has some."""
    count = len(columns.keys)
    size = min(size, max(1, _BATCH // (columns.keys.shape[1] * columns.keys.dtype.itemsize)))
    for start in range(0, count, size):
        places = range(start, min(start + size, count))
        ids = list(places) if columns.ids is None else columns.ids[start : start + size].tolist()
        values = None if columns.values is None else np.asarray(columns.values[start : start + size])
        none: list[Any] = [None] * len(places)
        keys = np.asarray(columns.keys[start : start + size])
        yield Rows(path, columns.header, places.stop / count, places, ids, keys, values, none, list(none), what="row")


def _kind(path: Path) -> str:
    """Kind of a file by its name, of a folder by what lies in it."""
    if path.is_dir():
        kinds = [path.suffix] if path.suffix in FOLDERS else []
        kinds += [kind for mark, kind in MARKS.items() if any(path.glob(mark))]
        if not kinds:
            raise BadInput(f"{path} is not a file, nor a folder of a known kind; give one of {_KINDS}")
        return kinds[0]
    if path.suffix in (".npy", ".npz"):  # says itself what is wrong
        return path.suffix
    kind = kind_of(path, _KINDS, *_LINES, *TABLES, *COLUMNS, *VECTORS)
    if path.suffix == ".gz" and kind not in _LINES:
        raise BadInput(f"{path.name} is a packed {kind} file; unpack it first")
    return kind
