"""Import and export: JSON lines (`.jsonl`, `.jsonl.gz`), CSV, and `.npy` / `.npz` keys, read and written in batches."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from softdb import check
from softdb.check import Array, Id
from softdb.database import SoftDB
from softdb.errors import BadInput, DuplicateId, SoftDBError
from softdb.formats.arrays import matrix_in
from softdb.formats.lines import Fields, Header, Row, kind_of, read_header, read_rows, text_lines

__all__ = ["Rows", "export_records", "import_records", "is_vector", "read_records", "write_records"]

_KINDS = ".jsonl, .jsonl.gz, .csv, .csv.gz, .npy or .npz"
Parsed = tuple[float, int, Id, Any, Any, Any, str | None]  # share of the file, line, id, key, value, payload, text


@dataclass
class Rows:
    """A batch of consecutive records of a file."""

    path: Path
    header: Header | None  # of the file
    share: float  # of the file, read so far
    lines: list[int]  # n, where each stands
    ids: list[Id]  # n
    keys: Any  # (n, d) numbers, or n texts to encode; in a list None where a record has none
    values: list[Any] | None  # n, where the fields name one
    payloads: list[Any]  # n
    texts: list[str | None]  # n, which the records keep

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def place(self) -> str:
        """Where they stand, in words."""
        what = "rows" if self.path.suffix in (".npy", ".npz") else "lines"
        return f"{self.path.name} {what} {self.lines[0]} to {self.lines[-1]}"

    def some(self, kept: list[int]) -> Rows:
        """Those at some places in the batch."""
        return replace(
            self,
            lines=[self.lines[i] for i in kept],
            ids=[self.ids[i] for i in kept],
            keys=self.keys[kept] if isinstance(self.keys, np.ndarray) else [self.keys[i] for i in kept],
            values=None if self.values is None else [self.values[i] for i in kept],
            payloads=[self.payloads[i] for i in kept],
            texts=[self.texts[i] for i in kept],
        )


def read_records(
    path: str | os.PathLike[str],
    *,
    fields: Fields | None = None,
    keys: str | os.PathLike[str] | None = None,
    batch_size: int = 10_000,
) -> Iterator[Rows]:
    """The records of a file, in batches, in O(batch) memory.

    Args:
        path: `.jsonl` or `.csv`, also with `.gz`; or `.npy` / `.npz` keys alone, whose ids are then their row numbers.
        fields: which field is what.
        keys: a `.npy` (mapped, not loaded) or `.npz` file with the keys, row for row in the order of the lines.
        batch_size: records a batch.

    In CSV an id is text; any other cell that reads as a JSON number, `true` or `false` becomes one, keys and values are
    JSON lists, and an empty cell is a field that is not there.

    Raises BadInput naming file and line; the records before that line have been yielded by then.
    """
    path, fields, size = Path(path), fields or Fields(), check.integer(batch_size, "batch_size")
    if path.suffix in (".npy", ".npz") and path.is_file():
        if keys is not None:
            raise BadInput(f"{path.name} holds keys itself; give keys= beside a .jsonl or .csv file")
        return _bare(path, matrix_in(path), size)
    kind = kind_of(path, _KINDS, ".jsonl", ".ndjson", ".csv")
    vectors = None if keys is None else _matched(Path(keys), path, kind == ".csv")
    header = read_header(path)
    if header is not None and fields.value is None and (header.value_dim or header.num_classes):
        fields = replace(fields, value="value")
    records = _records(path, fields, vectors, header is not None)
    return _batches(path, size, fields.value is not None, records, header)


def import_records(
    db: SoftDB,
    batches: Iterator[Rows],
    *,
    upsert: bool = False,
    resume: bool = False,
    progress: Callable[[Rows], None] | None = None,
) -> int:
    """Insert (or upsert) what `read_records` yields, a commit a batch, and return how many records.

    `resume` passes over those that an import which was cut short has brought in: their ids are stored, with the same
    payload, value and key, or the same text. One that is stored but differs is refused, or with `upsert` replaced.

    Texts are encoded by the database's encoder. An error says how many records are in, durably. What was exported from
    a database of another metric is refused: the nearest would be others.
    """
    done, put = 0, db.upsert if upsert else db.insert
    rows: Rows | None = None
    try:
        for rows in batches:
            if rows.header is not None and rows.header.metric != db.metric:
                raise BadInput(
                    f"exported from a database that compares by {rows.header.metric}, this one does by {db.metric}; "
                    "import it into one like it, or remove the file's first line"
                )
            _require_same_encoder(db, rows)
            fresh = _missing(db, rows, upsert) if resume else rows
            if len(fresh):
                put(fresh.ids, fresh.keys, fresh.values, fresh.payloads, texts=fresh.texts)
            done += len(rows)
            if progress is not None:
                progress(rows)
            rows = None
    except SoftDBError as error:
        where = "" if rows is None else f"{rows.place}: "
        remedy = ", and resume goes on with an import that was cut short" if isinstance(error, DuplicateId) else ""
        told = f"{where}{error.args[0]}{remedy}; the {done} records before are in the database"
        error.args = (told, *error.args[1:])
        raise
    return done


def _missing(db: SoftDB, rows: Rows, upsert: bool) -> Rows:
    """The records that the database lacks, or with `upsert` has otherwise. Raises BadInput where it has one so."""
    stored = np.flatnonzero(db.stored(rows.ids))
    if not len(stored):
        return rows
    there = rows.some(stored.tolist())
    differ = stored[_differ(db, there)]
    if len(differ) and not upsert:
        raise BadInput(
            f"id {check.shown(rows.ids[differ[0]])} is stored already, and not as it stands there: this is not the "
            "import that was cut short, or the record has changed since; upsert replaces"
        )
    same = set(stored.tolist()) - set(differ.tolist())
    return rows.some([i for i in range(len(rows)) if i not in same])


def _differ(db: SoftDB, rows: Rows) -> list[bool]:
    """Which of some records, all of them stored, are not stored so."""
    found, schema = db.get(rows.ids), db.schema
    texts = check.payloads(rows.payloads, len(rows))
    differ = np.array([one != other for one, other in zip(texts, found.payload_texts, strict=True)], np.bool_)
    differ |= [one != other for one, other in zip(rows.texts, found.texts, strict=True)]
    keyed = np.array([one is not None for one in rows.keys])
    differ |= keyed != found.keyed.numpy()
    both = np.flatnonzero(keyed & found.keyed.numpy())
    there = rows.some(both.tolist())
    if len(both) and not isinstance(there.keys[0], str):  # else the text is in the payload
        keys = check.matrix(there.keys, "keys", schema.dim, schema.dtype)
        differ[both] |= (keys != found.keys.numpy()[both]).any(1)
    if len(both) and (values := check.values(there.values, schema, len(both))) is not None:
        own = np.asarray(found.values)[both]
        differ[both] |= (values != own).reshape(len(both), -1).any(1)
    return [bool(one) for one in differ]


def _require_same_encoder(db: SoftDB, rows: Rows) -> None:
    """BadInput where vectors of one encoder would come to lie beside those of another."""
    made, mine = None if rows.header is None else rows.header.encoder, db.encoder_name
    if None not in (made, mine) and made != mine and not isinstance(rows.keys[0], str):
        raise BadInput(
            f"its keys were made by the encoder {made!r}, this one's by {mine!r}; import it into one like it, or give "
            "the field of its texts"
        )


def is_vector(value: object) -> bool:
    """Whether something is a list of one or more finite numbers, none of them beyond what a float can hold."""
    if not isinstance(value, list) or not value:
        return False
    try:
        return all(type(number) in (int, float) and math.isfinite(number) for number in value)
    except OverflowError:  # an int of more than 308 digits
        return False


def export_records(
    db: SoftDB,
    path: str | os.PathLike[str],
    *,
    where: dict[str, Any] | None = None,
    batch_size: int = 1000,
) -> int:
    """Write records as JSON lines (gzipped where the name ends in `.gz`) and return how many.

    The first line, `{"softdb": {…}}`, holds what `read_header` reads: the schema, the declared fields and the name of
    the encoder. Then a line is `{"id": …, "key": […], "value": …, "payload": …, "text": …}`, without what a record has
    not; numbers are exact, and `read_records(path)` gives the same records back. The file appears when it is whole.
    """
    path = Path(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        raise BadInput(f"{path.name} is not the name of a JSON lines file; end it in .jsonl or .jsonl.gz")
    fresh = path.with_name(path.name + ".tmp")
    fresh.unlink(missing_ok=True)  # of an attempt that was cut short; or a link, which may lead anywhere
    with (
        gzip.open(fresh, "xt", encoding="utf-8") if path.suffix == ".gz" else fresh.open("x", encoding="utf-8") as file
    ):
        done = write_records(db, file, where=where, batch_size=batch_size)
    fresh.replace(path)
    return done


def write_records(db: SoftDB, file: IO[str], *, where: dict[str, Any] | None = None, batch_size: int = 1000) -> int:
    """As `export_records`, into a text file that is open: a pipe."""
    names, done = ("dim", "value_dim", "num_classes", "dtype", "metric", "fields"), 0
    header = {**{name: getattr(db, name) for name in names}, "encoder": db.encoder_name}
    file.write(json.dumps({"softdb": header}, ensure_ascii=False) + "\n")
    for records in db.scan(batch_size, where):
        values = [None] * len(records) if records.values is None else records.values.tolist()
        columns = (records.keys.tolist(), values)
        keys, values = (
            [one if own else None for one, own in zip(column, records.keyed, strict=True)] for column in columns
        )
        for record in zip(records.ids, keys, values, records.payloads, records.texts, strict=True):
            row = zip(("id", "key", "value", "payload", "text"), record, strict=True)
            kept = {name: part for name, part in row if part is not None}
            file.write(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")
        done += len(records)
    return done


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


def _records(path: Path, fields: Fields, vectors: Array | None, exported: bool) -> Iterator[Parsed]:
    """What the lines of a file hold; those of an export have texts, and may lack keys.

    Raises BadInput naming the line.
    """
    last: Any = None
    for i, (number, share, row, _) in enumerate(read_rows(path, fields)):
        try:
            name = check.identifiers([_taken(row, fields.id, "id")])[0]
            text = row.pop("text", None) if exported and fields.text is None else None
            keyless = exported and vectors is None and fields.text is None and fields.key not in row
            key = None if keyless else _key(row, fields, last) if vectors is None else vectors[i]
            last = last if keyless else key
            value = None if fields.value is None or keyless else _taken(row, fields.value, "value")
            payload = (row["payload"] if list(row) == ["payload"] else row) if row else None
            check.json_text(payload, "the payload")
        except BadInput as error:
            raise BadInput(f"{path.name} line {number}: {error}") from None
        yield share, number, name, key, value, payload, text


def _key(row: Row, fields: Fields, before: Any) -> Any:
    """A line's key: a text to encode, or a vector as wide as the one before it."""
    if fields.text is not None:
        text = row.get(fields.text)
        if not isinstance(text, str):
            named = f"field {fields.text!r} is {check.shown(text)}"
            raise BadInput(f"{named}, not a text; its fields are {check.shown(list(row))}")
        return text
    vector = _taken(row, fields.key, "key")
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
    vectors, texts = matrix_in(keys), (text for _, _, text in text_lines(path))
    count = sum(map(bool, csv.reader(texts))) if is_csv else sum(bool(text.strip()) for text in texts)
    count -= is_csv or read_header(path) is not None
    if len(vectors) != count:
        raise BadInput(f"{keys.name} has {len(vectors)} keys but {path.name} has {count} records; they go row by row")
    return vectors


def _bare(path: Path, vectors: Array, size: int) -> Iterator[Rows]:
    for start in range(0, len(vectors), size):
        part = vectors[start : start + size]
        end = start + len(part)
        places = range(start, end)
        none = [None] * len(part)
        yield Rows(path, None, end / len(vectors), list(places), list(places), part, None, none, list(none))
