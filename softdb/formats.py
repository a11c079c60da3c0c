"""Import and export: JSON lines (`.jsonl`, `.jsonl.gz`), CSV, and `.npy` / `.npz` keys, read and written in batches."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.lib import format

from softdb import check
from softdb.check import Array, Id
from softdb.database import SoftDB
from softdb.errors import BadInput, SoftDBError

__all__ = [
    "Fields", "Line", "Rows", "export_records", "import_records", "is_vector", "numbers_in", "read_records",
    "read_rows",
]  # fmt: skip

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as in JSON: 007 stays text
_CELL = 1 << 27  # characters of a CSV cell
_HEADER = 1 << 14  # bytes of a .npy file's header; NumPy reads no longer one than 10,000
_LINE = 1 << 28  # bytes of a line: some kilobytes of .gz may unpack to more than there is memory
_KINDS = ".jsonl, .jsonl.gz, .csv, .csv.gz, .npy or .npz"
Row = dict[str, Any]
Parsed = tuple[float, int, Id, Any, Any, Any]  # share of the file, line, id, key, value, payload


@dataclass(frozen=True)
class Fields:
    """Names of fields. The other fields are the payload; where `payload` is the only other one, its value is."""

    id: str = "id"
    key: str = "key"  # a list of numbers
    text: str | None = None  # a text to encode instead; it stays in the payload, so that hits can show it
    value: str | None = None  # a list of numbers, or an integer label


@dataclass
class Rows:
    """A batch of consecutive records of a file."""

    path: Path
    share: float  # of the file, read so far
    lines: list[int]  # n, where each stands
    ids: list[Id]  # n
    keys: Any  # (n, d) numbers, or n texts to encode
    values: list[Any] | None  # n, where the fields name one
    payloads: list[Any]  # n

    def __len__(self) -> int:
        return len(self.ids)


class Line(NamedTuple):
    """A line of a file."""

    number: int
    share: float  # of the file, read so far
    row: Row
    empty: tuple[str, ...] = ()  # fields of a .csv or .tsv file whose cell is empty


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
        return _bare(path, _matrix(path), size)
    kind = _kind(path, _KINDS, ".jsonl", ".ndjson", ".csv")
    vectors = None if keys is None else _matched(Path(keys), path, kind == ".csv")
    return _batches(path, size, fields.value is not None, _records(path, fields, vectors))


def read_rows(path: Path, fields: Fields) -> Iterator[Line]:
    """The lines of a `.jsonl`, `.csv` or `.tsv` file (also `.gz`) that are not blank, as they are.

    Of a `.csv` or `.tsv` file, cells of the fields that are ids and texts stay text. Raises BadInput naming the line.
    """
    kind = _kind(path, ".jsonl, .csv or .tsv, also with .gz", ".jsonl", ".ndjson", ".csv", ".tsv")
    return _csv_lines(path, fields, "," if kind == ".csv" else "\t") if kind in (".csv", ".tsv") else _json_lines(path)


def _kind(path: Path, expected: str, *kinds: str) -> str:
    """The suffix before `.gz` of a file that is there, one of `kinds`."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file; give one of {expected}")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in kinds:
        raise BadInput(f"{path.name} has a name of no known kind; expected {expected}")
    return kind


def import_records(
    db: SoftDB, batches: Iterator[Rows], *, upsert: bool = False, progress: Callable[[Rows], None] | None = None
) -> int:
    """Insert (or upsert) what `read_records` yields, a commit a batch, and return how many records.

    Texts are encoded by the database's encoder. An error says how many records are in, durably.
    """
    done, put = 0, db.upsert if upsert else db.insert
    rows: Rows | None = None
    try:
        for rows in batches:
            put(rows.ids, rows.keys, rows.values, rows.payloads)
            done += len(rows)
            if progress is not None:
                progress(rows)
            rows = None
    except SoftDBError as error:
        where = "" if rows is None else f"{rows.path.name} lines {rows.lines[0]} to {rows.lines[-1]}: "
        error.args = (f"{where}{error.args[0]}; the {done} records before are in the database", *error.args[1:])
        raise
    return done


def is_vector(value: object) -> bool:
    """Whether something is a list of one or more finite numbers, none of them beyond what a float can hold."""
    if not isinstance(value, list) or not value:
        return False
    try:
        return all(type(number) in (int, float) and math.isfinite(number) for number in value)
    except OverflowError:  # an int of more than 308 digits
        return False


def export_records(
    db: SoftDB, path: str | os.PathLike[str], *, where: dict[str, Any] | None = None, batch_size: int = 1000
) -> int:
    """Write records as JSON lines (gzipped where the name ends in `.gz`) and return how many.

    A line is `{"id": …, "key": […], "value": …, "payload": …}`, without what a record has not; numbers are exact, and
    `read_records(path, fields=Fields(value="value"))` gives the same records back. The file appears when it is whole.
    """
    path = Path(path)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        raise BadInput(f"{path.name} is not the name of a JSON lines file; end it in .jsonl or .jsonl.gz")
    fresh, done = path.with_name(path.name + ".tmp"), 0
    with (
        gzip.open(fresh, "wt", encoding="utf-8") if path.suffix == ".gz" else fresh.open("w", encoding="utf-8") as file
    ):
        for records in db.scan(batch_size, where):
            values = [None] * len(records) if records.values is None else records.values.tolist()
            for record in zip(records.ids, records.keys.tolist(), values, records.payloads, strict=True):
                row = zip(("id", "key", "value", "payload"), record, strict=True)
                kept = {name: part for name, part in row if part is not None}
                file.write(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")
            done += len(records)
    fresh.replace(path)
    return done


# -- lines -------------------------------------------------------------------------------------------------------------


def _text_lines(path: Path) -> Iterator[tuple[int, float, str]]:
    """Number, share of the file read so far, and text of each line."""
    number, size = 0, max(1, path.stat().st_size)
    with path.open("rb") as raw:
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for number, line in enumerate(iter(lambda: file.readline(_LINE + 1), b""), 1):
                if len(line) > _LINE:
                    raise BadInput(f"{path.name} line {number}: longer than {_LINE:,} bytes; break it up")
                yield number, raw.tell() / size, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"{path.name} line {number}: not UTF-8 ({error.reason}); re-encode the source") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"{path.name} line {number + 1}: cannot be decompressed ({error}); fetch it again") from None


def _json_lines(path: Path) -> Iterator[Line]:
    for number, share, line in _text_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path.name} line {number}: not JSON ({error}); mend or remove that line") from None
        if not isinstance(row, dict):
            expected = 'expected an object such as {"id": …, "key": […]}'
            raise BadInput(f"{path.name} line {number}: {check.shown(row)}; {expected}")
        yield Line(number, share, row)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _csv_lines(path: Path, fields: Fields, delimiter: str) -> Iterator[Line]:
    share = 0.0

    def texts() -> Iterator[str]:
        nonlocal share
        for _, share, line in _text_lines(path):  # noqa: B007 - the share is read outside
            yield line

    csv.field_size_limit(max(_CELL, csv.field_size_limit()))  # of the process; csv knows no other
    reader = csv.reader(texts(), strict=True, delimiter=delimiter)
    try:
        lines = filter(None, reader)
        header = next(lines, [])
        for cells in lines:
            if len(cells) != len(header):
                counts = f"{len(cells)} cells, {len(header)} in the header"
                raise BadInput(f"{path.name} line {reader.line_num}: {counts}; mend it")
            row = {name: _cell(cell, name, fields) for name, cell in zip(header, cells, strict=True) if cell}
            yield Line(reader.line_num, share, row, tuple(name for name in header if name not in row))
    except csv.Error as error:
        raise BadInput(f"{path.name} line {reader.line_num}: not CSV ({error}); mend that line") from None


def _cell(cell: str, name: str, fields: Fields) -> Any:
    if name in (fields.id, fields.text):
        return cell
    if _NUMBER.fullmatch(cell) or cell in ("true", "false") or (name in (fields.key, fields.value) and cell[0] == "["):
        with contextlib.suppress(ValueError, RecursionError):  # too many digits, or a list that `key` will name
            value = json.loads(cell)
            return cell if isinstance(value, float) and math.isinf(value) else value
    return cell


# -- records -----------------------------------------------------------------------------------------------------------


def _batches(path: Path, size: int, has_values: bool, records: Iterator[Parsed]) -> Iterator[Rows]:
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
        shares, lines, ids, keys, values, payloads = map(list, zip(*batch, strict=True))
        yield Rows(path, shares[-1], lines, ids, keys, values if has_values else None, payloads)
    if failure is not None:
        raise failure


def _records(path: Path, fields: Fields, vectors: Array | None) -> Iterator[Parsed]:
    """What the lines of a file hold. Raises BadInput naming the line."""
    key: Any = None
    for i, (number, share, row, _) in enumerate(read_rows(path, fields)):
        try:
            name = check.identifiers([_taken(row, fields.id, "id")])[0]
            key = _key(row, fields, key) if vectors is None else vectors[i]
            value = None if fields.value is None else _taken(row, fields.value, "value")
            payload = (row["payload"] if list(row) == ["payload"] else row) if row else None
            check.json_text(payload, "the payload")
        except BadInput as error:
            raise BadInput(f"{path.name} line {number}: {error}") from None
        yield share, number, name, key, value, payload


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


# -- arrays ------------------------------------------------------------------------------------------------------------


def numbers_in(path: Path) -> Array:
    """The array of a `.npy` file, mapped, or of a `.npz` file: its only one, or the one called `keys`, loaded.

    NumPy reads it, after its own parser of headers was given no more than 16 KiB of the file, and only where the dtype
    is a number's and the file is as large as its header says. Nothing is ever unpickled. Raises BadInput naming it.
    """
    if not path.is_file():  # a pipe might never answer
        raise BadInput(f"{path} cannot be read as an array of numbers (no such file); expected a .npy or .npz array")
    try:
        if path.suffix == ".npz":
            return _archived(path)
        with path.open("rb") as file:
            expected = _whole_size(file.read(_HEADER))
        if (size := path.stat().st_size) < expected:
            raise ValueError(f"it has {size} bytes, {expected} expected")
        return format.open_memmap(path, "r")
    except BadInput:
        raise
    except Exception as error:  # zipfile and its decompressors have no one error for a file that is none
        reason = str(error) or type(error).__name__
        raise BadInput(f"{path.name} cannot be read as an array of numbers ({check.shown(reason)})") from None


def _archived(path: Path) -> Array:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        name = "keys" if "keys" in names else names[0] if len(names) == 1 else None
        if name is None:
            raise BadInput(f"{path.name} holds {check.shown(names)}; expected one array, or one called keys")
        member = archive.infolist()[names.index(name)]
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others blow up a million times
            raise ValueError("it is compressed in a way that NumPy does not write")
        with archive.open(member) as file:
            if member.file_size != (expected := _whole_size(file.read(_HEADER))):
                raise ValueError(f"{name} has {member.file_size} bytes, {expected} expected")
            file.seek(0)
            return np.asarray(format.read_array(file, allow_pickle=False))


def _whole_size(begins: bytes) -> int:
    """The bytes of a `.npy` file that begins so, by its header. Raises ValueError where it is no array of numbers."""
    file = io.BytesIO(begins)
    version, _ = format.read_magic(file)
    if version not in (1, 2, 3):
        raise ValueError(f"it has the format version {version}; NumPy writes 1 to 3")
    # versions 2 and 3 differ only in names of fields, which arrays of numbers do not have
    read = format.read_array_header_1_0 if version == 1 else format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds {check.shown(dtype)}, not numbers")
    if len(shape) > 32 or not all(type(extent) is int and 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"its shape is {check.shown(shape)}")
    return file.tell() + dtype.itemsize * math.prod(shape)


def _matrix(path: Path) -> Array:
    """The (n, d) array of a file."""
    found = numbers_in(path)
    if found.ndim != 2:
        raise BadInput(f"{path.name} has shape {found.shape} and type {found.dtype}; expected (n, d) numbers")
    return found


def _matched(keys: Path, path: Path, is_csv: bool) -> Array:
    """Keys that have a row for each line of a file."""
    vectors, texts = _matrix(keys), (text for _, _, text in _text_lines(path))
    count = sum(map(bool, csv.reader(texts))) - 1 if is_csv else sum(bool(text.strip()) for text in texts)
    if len(vectors) != count:
        raise BadInput(f"{keys.name} has {len(vectors)} keys but {path.name} has {count} records; they go row by row")
    return vectors


def _bare(path: Path, vectors: Array, size: int) -> Iterator[Rows]:
    for start in range(0, len(vectors), size):
        part = vectors[start : start + size]
        end = start + len(part)
        places = range(start, end)
        yield Rows(path, end / len(vectors), list(places), list(places), part, None, [None] * len(part))
