"""Lines of `.jsonl`, `.csv` and `.tsv` files, and the header of an export."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from softdb import check
from softdb.errors import BadInput
from softdb.formats.sources import kind_of

__all__ = [
    "OWN", "Fields", "Header", "Line", "Row", "csv_header", "is_own", "raised", "read_header", "read_rows",
    "text_lines",
]  # fmt: skip

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as in JSON: 007 stays text
_CELL = 1 << 27  # characters of a CSV cell
_LINE = 1 << 28  # bytes of a line: some kilobytes of .gz may unpack to more than there is memory
Row = dict[str, Any]
OWN = {"id", "id_is_int", "key", "value", "text", "payload"}  # columns of a table that softdb has written


@dataclass(frozen=True)
class Fields:
    """Names of fields. The other fields are the payload; where `payload` is the only other one, its value is."""

    id: str | None = "id"  # None: records are numbered from 0
    key: str | None = None  # a list of numbers; None: "key", or with `text` what the encoder makes of that
    text: str | None = None  # the record's text
    value: str | None = None  # a list of numbers, or an integer label

    def __post_init__(self) -> None:
        if self.key is None and self.text is None:
            object.__setattr__(self, "key", "key")


@dataclass(frozen=True)
class Header:
    """The database that an exported file is of, from its first line `{"softdb": {…}}`."""

    dim: int
    value_dim: int | None
    num_classes: int | None
    dtype: str
    metric: str
    fields: tuple[str, ...]  # declared fields of the payload
    encoder: str | None = None  # the name of the encoder of texts, as `softdb import --encoder` takes it

    @classmethod
    def of(cls, said: Any, where: str) -> Header:
        """Check the header of an exported file. Raises BadInput."""
        try:
            header = cls(**{**said, "fields": tuple(said["fields"])})
            check.schema(**header.schema, stored=None)
            if not all(isinstance(text, str) for text in (*header.fields, header.encoder or "")):
                raise ValueError("fields and encoder are texts")
        except (TypeError, KeyError, ValueError) as error:
            raise BadInput(f"{where}: not the header of an export ({error}); mend it") from None
        return header

    @property
    def schema(self) -> dict[str, Any]:
        """Arguments of `softdb.open` for such a database."""
        return {name: getattr(self, name) for name in ("dim", "value_dim", "num_classes", "dtype", "metric")}


class Line(NamedTuple):
    """A line of a file."""

    number: int
    share: float  # of the file, read so far
    row: Row
    empty: tuple[str, ...] = ()  # fields of a .csv or .tsv file whose cell is empty


def is_own(names: Collection[str], fields: Fields, header: Header | None = None) -> bool:
    """Return True where columns are those of an export, and the fields do not say otherwise."""
    columns = header is not None or {"id", "key", "text", "payload"} <= set(names) <= OWN
    return columns and fields.text in (None, "text")


def read_header(path: str | os.PathLike[str]) -> Header | None:
    """Return the header of a file that `export_records` wrote; None for any other file. Raises BadInput."""
    path = Path(path)
    if Path(path.name.removesuffix(".gz")).suffix not in (".jsonl", ".ndjson"):
        return None
    line = next(_json_lines(path, header=True), None)
    if line is None or line.row.keys() != {"softdb"}:
        return None
    return Header.of(line.row["softdb"], f"{path.name} line {line.number}")


def read_rows(path: Path, fields: Fields, on_error: Callable[[BadInput], None] | None = None) -> Iterator[Line]:
    """The lines of a `.jsonl`, `.csv` or `.tsv` file (also `.gz`) that are not blank, as they are.

    Of a `.csv` or `.tsv` file, cells of the fields that are ids and texts stay text. Raises BadInput naming the line,
    or tells `on_error` and passes over it.
    """
    bad = on_error or raised
    kind = kind_of(path, ".jsonl, .csv or .tsv, also with .gz", ".jsonl", ".ndjson", ".csv", ".tsv")
    if kind in (".csv", ".tsv"):
        return _csv_lines(path, fields, bad)
    return _json_lines(path, bad)


def raised(error: BadInput) -> None:
    """Raise an error: what to do with a bad line, unless told otherwise."""
    raise error


def text_lines(path: Path, bad: Callable[[BadInput], None] = raised) -> Iterator[tuple[int, float, str]]:
    """Number, share of the file read so far, and text of each line."""
    number, size = 0, max(1, path.stat().st_size)
    with path.open("rb") as raw:
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for number, line in enumerate(iter(lambda: file.readline(_LINE + 1), b""), 1):
                if len(line) > _LINE:
                    raise BadInput(f"{path.name} line {number}: longer than {_LINE:,} bytes; break it up")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    bad(BadInput(f"{path.name} line {number}: not UTF-8 ({error.reason}); re-encode the source"))
                    continue
                yield number, raw.tell() / size, text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"{path.name} line {number + 1}: cannot be decompressed ({error}); fetch it again") from None


def _json_lines(path: Path, bad: Callable[[BadInput], None] = raised, header: bool = False) -> Iterator[Line]:
    """The objects of a file, without the header of an export unless that is asked for."""
    first = True
    for number, share, line in text_lines(path, bad):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            bad(BadInput(f"{path.name} line {number}: not JSON ({error}); mend or remove that line"))
            continue
        if not isinstance(row, dict):
            expected = 'expected an object such as {"id": …, "key": […]}'
            bad(BadInput(f"{path.name} line {number}: {check.shown(row)}; {expected}"))
            continue
        if header or not (first and row.keys() == {"softdb"}):
            yield Line(number, share, row)
        first = False


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def csv_header(path: Path) -> list[str]:
    """The names of the columns of a `.csv` or `.tsv` file."""
    return next(csv_rows(path, (text for _, _, text in text_lines(path))), (0, []))[1]


def csv_rows(path: Path, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each line of a `.csv` or `.tsv` file that is not blank. Raises BadInput naming the line."""
    csv.field_size_limit(max(_CELL, csv.field_size_limit()))  # of the process; csv knows no other
    delimiter = "," if Path(path.name.removesuffix(".gz")).suffix == ".csv" else "\t"
    reader = csv.reader(texts, strict=True, delimiter=delimiter)
    try:
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except csv.Error as error:
        raise BadInput(f"{path.name} line {reader.line_num}: not CSV ({error}); mend that line") from None


def _csv_lines(path: Path, fields: Fields, bad: Callable[[BadInput], None]) -> Iterator[Line]:
    share = 0.0

    def texts() -> Iterator[str]:
        nonlocal share
        for _, share, line in text_lines(path, bad):  # noqa: B007 - the share is read outside
            yield line

    lines = csv_rows(path, texts())
    header = next(lines, (0, []))[1]
    twice = next((name for i, name in enumerate(header) if name in header[:i]), None)
    if twice is not None:
        raise BadInput(f"{path.name} has several columns {twice!r}; rename them")
    own = is_own(header, fields)
    for number, cells in lines:
        if len(cells) != len(header):
            counts = f"{len(cells)} cells, {len(header)} in the header"
            bad(BadInput(f"{path.name} line {number}: {counts}; mend it"))
            continue
        row = {
            name: cell if own and name in ("text", "payload") else _cell(cell, name, fields)
            for name, cell in zip(header, cells, strict=True)
            if cell
        }
        if own and "payload" in row:
            try:
                row["payload"] = json.loads(row["payload"], parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                bad(BadInput(f"{path.name} line {number}: payload is not JSON ({error}); mend it"))
                continue
        yield Line(number, share, row, tuple(name for name in header if name not in row))


def _cell(cell: str, name: str, fields: Fields) -> Any:
    if name in (fields.id, fields.text):
        return cell
    if _NUMBER.fullmatch(cell) or cell in ("true", "false") or (name in (fields.key, fields.value) and cell[0] == "["):
        with contextlib.suppress(ValueError, RecursionError):  # too many digits, or a list that `key` will name
            value = json.loads(cell)
            return cell if isinstance(value, float) and math.isinf(value) else value
    return cell
