"""Import of records from files, folders and frames, in batches; each batch is written in one commit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.check import Array, Id
from softdb.database import SoftDB, Verbs
from softdb.errors import BadInput, DuplicateId, SoftDBError
from softdb.formats.arrays import COLUMNS, KeyColumns, columns_in
from softdb.formats.collections import COLLECTIONS, MARKS, VECTORS, read_collection
from softdb.formats.lines import Row, batched, csv_header, csv_rows, raise_error, read_header, read_rows, text_lines
from softdb.tables.arrow_tables import FOLDERS, TABLES, read_table, table_in, table_of
from softdb.tables.rows import Fields, Header, OnError, Rows, is_own, kind_of, named_in, require_plain, text_in

_LINES = (".jsonl", ".ndjson", ".csv", ".tsv")
_KINDS = ", ".join((*_LINES, *TABLES, *COLUMNS, *(kind for kind in VECTORS if kind not in COLUMNS)))
_BATCH = 1 << 28  # largest number of bytes in a batch of vectors: a small compressed file may claim any size
Parsed = tuple[float, int, Id, Any, Any, Any, str | None]  # share of the file read, line, id, key, value, payload, text


def import_records(
    db: SoftDB,
    source: Any,
    *,
    upsert: bool = False,
    resume: bool = False,
    progress: Callable[[Rows], None] | None = None,
    on_error: OnError | None = None,
) -> int:
    """Insert (or upsert) records, in a commit for each batch, and return their number.

        import_records(db, "records.parquet")
        import_records(db, frame)                           # a table of pandas, polars or pyarrow
        import_records(db, read_records(path, fields=…))    # with options

    `resume` continues an interrupted import: it skips records whose ids are stored with the same payload, value and
    key, or the same text. A record that is stored with other contents raises BadInput, or is replaced with `upsert`.

    If a record cannot be inserted, the error names the record's line, and says how many records before it are in the
    database. With `on_error` the import calls `on_error` with the error, and continues without that record.

    The database's encoder encodes texts. Raises BadInput for an export from a database with another metric: under
    this database's metric the nearest records would differ.
    """
    if not isinstance(db, Verbs):
        raise BadInput(f"db is {check.shown(db)}; expected an open softdb database, and then the source")
    is_rows = isinstance(source, Iterator) and not hasattr(source, "__arrow_c_stream__")
    batches: Iterator[Rows] = source if is_rows else read_records(source, on_error=on_error)
    done, write = 0, db.upsert if upsert else db.insert

    def put(rows: Rows) -> None:
        new = _missing(db, rows, upsert) if resume else rows
        if len(new):
            by_default = check.are_texts(new.keys) and not db.dim and db.core.encoder() is None
            write(new.ids, None if by_default else new.keys, new.values, new.payloads, texts=new.texts)

    try:
        for rows in batches:
            if rows.header is not None and rows.header.metric != db.metric:
                raise BadInput(
                    f"{rows.place}: exported from a database with the metric {rows.header.metric}, but this one has "
                    f"{db.metric}; import into a database with metric={rows.header.metric!r}"
                )
            _require_same_encoder(db, rows)
            for count in _inserted(put, rows, on_error):
                done += count
            if progress is not None:
                progress(rows)
    except SoftDBError as error:
        remedy = ", and resume continues an interrupted import" if isinstance(error, DuplicateId) else ""
        before = f"the {done} record{' before is' if done == 1 else 's before are'} in the database"
        error.args = (f"{error.args[0]}{remedy}; {before}", *error.args[1:])
        raise
    return done


def _inserted(put: Callable[[Rows], None], rows: Rows, on_error: OnError | None) -> Iterator[int]:
    """Insert a batch and yield the number of records; if that fails, find the bad record by halving the batch."""
    try:
        put(rows)
        yield len(rows)
        return
    except BadInput as error:
        if len(rows) == 1:
            error.args = (f"{rows.place}: {error.args[0]}", *error.args[1:])
            if on_error is None:
                raise
            on_error(error)
            return
    half = len(rows) // 2
    yield from _inserted(put, rows.some(list(range(half))), on_error)
    yield from _inserted(put, rows.some(list(range(half, len(rows)))), on_error)


def _missing(db: SoftDB, rows: Rows, upsert: bool) -> Rows:
    """Return the records to write: those not stored, and the changed ones, which raise BadInput without `upsert`."""
    stored = np.flatnonzero(db.core.stored(rows.ids))
    if not len(stored):
        return rows
    changed = stored[_changed(db, rows.some(stored.tolist()))]
    if len(changed) and not upsert:
        raise BadInput(
            f"id {check.shown(rows.ids[changed[0]])} is stored already with other contents: this is not the "
            "interrupted import, or the record has changed since; give upsert to replace it"
        )
    return rows.some(np.delete(np.arange(len(rows)), np.setdiff1d(stored, changed)).tolist())


def _changed(db: SoftDB, rows: Rows) -> NDArray[np.bool_]:
    """Return a mask of the records that are stored with other contents; every record's id must be stored."""
    stored, schema = db.get(rows.ids), db.core.schema
    new = zip(check.payloads(rows.payloads, len(rows)), rows.texts, strict=True)
    old = zip(stored.payload_texts, stored.texts, strict=True)
    changed = np.array([pair != stored_pair for pair, stored_pair in zip(new, old, strict=True)], np.bool_)
    keyed = np.array([key is not None for key in rows.keys])
    changed |= keyed != stored.keyed.numpy()
    both = np.flatnonzero(keyed & stored.keyed.numpy())
    rows = rows.some(both.tolist())
    if len(both) and not isinstance(rows.keys[0], str):  # keys from texts are equal where the texts are
        keys = check.matrix(rows.keys, "keys", schema.dim, schema.dtype)
        changed[both] |= (keys != stored.keys.numpy()[both]).any(1)
    if len(both) and (values := check.values(rows.values, schema, len(both))) is not None:
        changed[both] |= (values != np.asarray(stored.values)[both]).reshape(len(both), -1).any(1)
    return changed


def _require_same_encoder(db: SoftDB, rows: Rows) -> None:
    """Raise BadInput if another encoder than the database's computed the rows' keys."""
    encoder, own = None if rows.header is None else rows.header.encoder, db.encoder_name
    if None not in (encoder, own) and encoder != own and not isinstance(rows.keys[0], str):
        raise BadInput(
            f"{rows.path.name}: its keys were made by the encoder {encoder!r}, this database's by {own!r}; import it "
            "into a database with its encoder, or embed its texts anew: Fields(text='text'), or on a shell --text text"
        )


def read_records(
    source: Any,
    *,
    fields: Fields | Mapping[str, str | None] | None = None,
    keys: str | os.PathLike[str] | None = None,
    collection: str | None = None,
    batch_size: int = 10_000,
    on_error: OnError | None = None,
) -> Iterator[Rows]:
    """Yield the records of a file, a folder or a frame in batches; memory holds one batch at a time.

    Args:
        source: a path, whose suffix gives the format (docs/formats.md lists them); or an object with an Arrow C stream:
            a frame of pandas or polars, a table or reader of pyarrow, a dataset of Hugging Face.
        fields: names of the fields or columns: a dict of some of id, key, text and value, or `Fields` for all. With a
            dict or None, frames, tables and lines have the defaults of `insert` for the others, except for the value.
        keys: a file of vectors: the keys of the records in a `.jsonl` or `.csv` file, in the order of its lines.
        collection: name of the collection, if a folder of another database holds several.
        batch_size: number of records in a batch.
        on_error: called with the error of a bad row, which is then skipped.

    Records of a file of vectors get their row numbers as ids. In CSV an id stays text; any other cell that is a JSON
    number, true, True, false or False becomes that value; keys and values are JSON lists; an empty cell is missing.

    Raises BadInput with the names of the file and the row, after it has yielded the records before that row.
    """
    columns, size = fields if isinstance(fields, Fields) else named_in(fields), check.integer(batch_size, "batch_size")
    fields = columns if isinstance(columns, Fields) else Fields(**columns)
    if not isinstance(source, str | os.PathLike):
        return read_table(table_of(source, size), columns, size, on_error)
    path = Path(source)
    kind = _kind(path)
    if kind not in _LINES and keys is not None:
        raise BadInput(f"{path.name} holds keys itself; give keys= beside a .jsonl or .csv file")
    if fields.text is not None and (kind in COLUMNS or kind in VECTORS):
        raise BadInput(f"{path.name} holds no texts; do not name a text ({fields.text!r})")
    has_collections = kind in COLLECTIONS or kind == "lancedb"
    if collection is not None and not has_collections:
        raise BadInput(f"{path.name} is no database of collections; leave out collection {collection!r}")
    if not isinstance(columns, Fields) and keys is None and (kind in _LINES or kind == "lancedb"):
        fields = fields_of(path, columns, collection)
    if has_collections or kind in VECTORS:
        return read_collection(path, kind, collection, fields, size, on_error)
    if kind in TABLES or kind in FOLDERS:
        return read_table(table_in(path, kind, size), columns, size, on_error)
    if kind not in _LINES:
        return _read_columns(path, columns_in(path, kind), size)
    if keys is not None and on_error is not None:
        raise BadInput("bad lines cannot be skipped with a file of keys, which has a row for each line; mend the lines")
    return _read_lines(path, fields, keys, size, on_error)


def fields_of(path: Path, columns: Mapping[str, str | None], collection: str | None = None) -> Fields:
    """Return the fields of a table or a file of lines: its columns, or the fields of its first line, by `DEFAULTS`."""
    if _kind(path) == "lancedb":
        require_plain(path)
        path = next(path.glob(f"{collection or '*'}.lance"), path)
    row, kind = first_row(path), _kind(path)
    header = (read_header(path) if kind in _LINES else table_in(path, kind, 1).header) if row else None
    return Fields.among(row, columns, not row or is_own(row, Fields(**columns), header))


def first_row(path: Path) -> Row:
    """Return the first record of a file of lines or of a table as a dict; {} for another file or a bad first line."""
    try:
        if (kind := _kind(path)) in TABLES or kind in FOLDERS:
            rows = next(table_in(path, kind, 1).batches).slice(0, 1).to_pylist()
        else:
            line = next(read_rows(path, Fields()))
            rows = [line.row | dict.fromkeys(line.empty)]
    except (BadInput, StopIteration):
        return {}
    return rows[0] if rows else {}


def _read_lines(
    path: Path, fields: Fields, keys: str | os.PathLike[str] | None, size: int, on_error: OnError | None
) -> Iterator[Rows]:
    is_csv = _kind(path) in (".csv", ".tsv")
    vectors, header = None if keys is None else _keys_of_lines(Path(keys), path, is_csv), read_header(path)
    names = csv_header(path) if is_csv else []
    exported = is_own(names, fields, header)
    has_values = "value" in names or (header is not None and bool(header.value_dim or header.num_classes))
    if fields.value is None and exported and has_values:
        fields = replace(fields, value="value")
    records = _records(path, fields, vectors, exported, on_error)
    return _batches(path, size, fields.value is not None, records, header)


def is_vector(value: object) -> bool:
    """Return True if a value is a list of one or more numbers that are finite as floats."""
    if not isinstance(value, list) or not value:
        return False
    try:
        return all(type(number) in (int, float) and math.isfinite(number) for number in value)
    except OverflowError:  # an int of more than 308 digits
        return False


def _batches(
    path: Path, size: int, has_values: bool, records: Iterator[Parsed], header: Header | None
) -> Iterator[Rows]:
    """Yield records in batches; raise the error of a bad line only after the records before that line."""
    for batch in batched(records, size):
        shares, lines, ids, keys, values, payloads, texts = map(list, zip(*batch, strict=True))
        yield Rows(path, header, shares[-1], lines, ids, keys, values if has_values else None, payloads, texts)


def _records(
    path: Path, fields: Fields, vectors: Array | None, exported: bool, on_error: OnError | None
) -> Iterator[Parsed]:
    """Yield a record for each line of a file; a record of an export may have a text and lack a key. Raises BadInput."""
    previous: Any = None
    embeds = fields.key is None and vectors is None
    for i, (number, share, row, empty) in enumerate(read_rows(path, fields, on_error)):
        try:
            text = row.get("text") if exported else None
            if fields.text is not None:
                text = text_in(row, fields.text, embeds, (*empty, "text"))
            name = i if fields.id is None else check.identifiers([_taken(row, fields.id, "id")])[0]
            no_key = row.get(fields.key or "key", None if exported else ...) is None
            keyless = no_key and vectors is None and not embeds
            if keyless:
                key = None
            else:
                key = text if embeds else _key(row, fields, previous) if vectors is None else vectors[i]
                previous = key
            null = (fields.key or "key") if no_key else None
            for field in row.keys() & ({"key", "text"} if exported else {fields.text, null}):
                del row[field]
            value = None if fields.value is None or keyless else _taken(row, fields.value, "value")
            payload = (row["payload"] if list(row) == ["payload"] else row) if row else None
            check.json_text(payload, "the payload")
        except BadInput as error:
            (on_error or raise_error)(BadInput(f"{path.name} line {number}: {error}"))
            continue
        yield share, number, name, key, value, payload, text


def _key(row: Row, fields: Fields, previous: Any) -> Any:
    """Return a line's key. Raises BadInput unless it is a vector as wide as the previous key."""
    vector = _taken(row, str(fields.key), "key")
    if not is_vector(vector):
        raise BadInput(f"field {fields.key!r} is {check.shown(vector)}; expected a list of numbers")
    if previous is not None and len(vector) != len(previous):
        raise BadInput(f"field {fields.key!r} has {len(vector)} numbers, {len(previous)} in the lines before; mend it")
    return vector


def _taken(row: Row, name: str, what: str) -> Any:
    if name not in row:
        raise BadInput(f"no field {name!r} for the {what}; its fields are {check.shown(list(row))}, name the right one")
    return row.pop(name)


def _keys_of_lines(keys: Path, path: Path, is_csv: bool) -> Array:
    """Return the keys in the file `keys`. Raises BadInput unless it has a row for each record in the file `path`."""
    kind = _kind(keys)
    if kind in (".hdf5", ".h5"):
        batches = read_collection(keys, kind, None, Fields(), _BATCH, None)
        vectors: Array = np.concatenate([rows.keys for rows in batches])
    else:
        vectors = columns_in(keys, kind).keys
    texts = (text for _, _, text in text_lines(path))
    count = sum(1 for _ in csv_rows(path, texts)) if is_csv else sum(bool(text.strip()) for text in texts)
    count -= is_csv or read_header(path) is not None
    if len(vectors) != count:
        raise BadInput(f"{keys.name} has {len(vectors)} keys but {path.name} has {count} records; expected as many")
    return vectors


def _read_columns(path: Path, columns: KeyColumns, size: int) -> Iterator[Rows]:
    """Yield the records that a file's columns form; the ids are row numbers unless the file has ids."""
    count = len(columns.keys)
    size = min(size, max(1, _BATCH // (columns.keys.shape[1] * columns.keys.dtype.itemsize)))
    for start in range(0, count, size):
        places = range(start, min(start + size, count))
        ids = list(places) if columns.ids is None else columns.ids[start : start + size].tolist()
        values = None if columns.values is None else np.asarray(columns.values[start : start + size])
        nulls: list[Any] = [None] * len(places)
        keys = np.asarray(columns.keys[start : start + size])
        yield Rows(path, columns.header, places.stop / count, places, ids, keys, values, nulls, list(nulls), what="row")


def _kind(path: Path) -> str:
    """Return the format of a file from its name, or of a folder from its contents. Raises BadInput."""
    if path.is_dir():
        kinds = [path.suffix] if path.suffix in FOLDERS else []
        kinds += [kind for mark, kind in MARKS.items() if any(path.glob(mark))]
        if not kinds:
            raise BadInput(f"{path} is not a file, nor a folder of a known kind; give one of {_KINDS}")
        return kinds[0]
    if path.suffix in (".npy", ".npz"):  # their reader has its own error for a missing file
        return path.suffix
    kind = kind_of(path, _KINDS, *_LINES, *TABLES, *COLUMNS, *VECTORS)
    if path.suffix == ".gz" and kind not in _LINES:
        raise BadInput(f"{path.name} is a packed {kind} file; unpack it first")
    return kind
