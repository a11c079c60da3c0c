"""Readers of the lines of `.jsonl`, `.csv` and `.tsv` files, and of the header of an export."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from softdb import check
from softdb.errors import BadInput
from softdb.tables.rows import Fields, Header, is_own, kind_of

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as in JSON: 007 stays text
_CELL = 1 << 27  # largest number of characters in a CSV cell
_LINE = 1 << 28  # largest number of bytes in a line: a few kilobytes of .gz may decompress to more than memory holds
Row = dict[str, Any]
T = TypeVar("T")


class Line(NamedTuple):
    """A parsed line of a file: a JSON object, or a CSV line as a dict."""

    number: int  # from 1
    share: float  # share of the file that has been read
    row: Row
    empty: tuple[str, ...] = ()  # fields of a .csv or .tsv file whose cell is empty


def read_header(path: str | os.PathLike[str]) -> Header | None:
    """Return the header of a JSON-lines file that `export_records` wrote; None for any other file. Raises BadInput."""
    path = Path(path)
    if Path(path.name.removesuffix(".gz")).suffix not in (".jsonl", ".ndjson"):
        return None
    line = next(json_rows(text_lines(path), f"{path.name} ", header=True), None)
    if line is None or line.row.keys() != {"softdb"}:
        return None
    return Header.of(line.row["softdb"], f"{path.name} line {line.number}")


def read_rows(path: Path, fields: Fields, on_error: Callable[[BadInput], None] | None = None) -> Iterator[Line]:
    """Yield the lines of a `.jsonl`, `.csv` or `.tsv` file (also `.gz`) that are not blank.

    Cells of ids and texts in a `.csv` or `.tsv` file stay text. A bad line raises BadInput with the line's number; with
    `on_error` that error is passed to `on_error`, and the line is skipped.
    """
    bad = on_error or raise_error
    kind = kind_of(path, ".jsonl, .csv or .tsv, also with .gz", ".jsonl", ".ndjson", ".csv", ".tsv")
    if kind in (".csv", ".tsv"):
        return _csv_lines(path, fields, bad)
    return json_rows(text_lines(path, bad), f"{path.name} ", bad)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of up to `size` items; raise a BadInput of `items` only after the items before it."""
    batch: list[T] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except BadInput:
        yield from [batch] * bool(batch)
        raise
    yield from [batch] * bool(batch)


def raise_error(error: BadInput) -> None:
    """Raise the error; used as `on_error` where the caller gives none."""
    raise error


def decoded(file: IO[bytes], name: str, bad: Callable[[BadInput], None] = raise_error) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line, as soon as it is read; pass other than UTF-8 to `bad`."""
    for number, line in enumerate(iter(lambda: file.readline(_LINE + 1), b""), 1):
        if len(line) > _LINE:
            raise BadInput(f"{name}line {number}: longer than {_LINE:,} bytes; split it into several lines")
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            bad(BadInput(f"{name}line {number}: not UTF-8 ({error.reason}); convert the input to UTF-8"))


def text_lines(path: Path, bad: Callable[[BadInput], None] = raise_error) -> Iterator[tuple[int, float, str]]:
    """Yield each line's number, the share of the file that is read, and the line; pass other than UTF-8 to `bad`."""
    number, size = 0, max(1, path.stat().st_size)
    with path.open("rb") as raw:
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
        try:
            for number, text in decoded(file, f"{path.name} ", bad):
                yield number, raw.tell() / size, text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise BadInput(f"{path.name} line {number + 1}: cannot be decompressed ({error}); fetch it again") from None


def json_rows(
    lines: Iterable[tuple[int, float, str]],
    name: str,
    bad: Callable[[BadInput], None] = raise_error,
    header: bool = False,
) -> Iterator[Line]:
    """Yield the JSON objects of the lines. The header line of an export is left out, unless `header` is True."""
    first = True
    for number, share, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=check.no_constant)
        except (ValueError, RecursionError) as error:
            bad(BadInput(f"{name}line {number}: not JSON ({error}); correct or remove that line"))
            continue
        if not isinstance(row, dict):
            expected = 'expected an object such as {"id": …, "key": […]}'
            bad(BadInput(f"{name}line {number}: {check.shown(row)}; {expected}"))
            continue
        if header or not (first and row.keys() == {"softdb"}):
            yield Line(number, share, row)
        first = False


def csv_header(path: Path) -> list[str]:
    """Return the column names of a `.csv` or `.tsv` file."""
    return next(csv_rows(path, (text for _, _, text in text_lines(path))), (0, []))[1]


def csv_rows(path: Path, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each line of CSV text that is not blank. Raises BadInput with a bad line's number."""
    csv.field_size_limit(max(_CELL, csv.field_size_limit()))  # a limit for the whole process: csv has no other
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
        for _, share, line in text_lines(path, bad):  # noqa: B007 - the enclosing function reads `share`
            yield line

    lines = csv_rows(path, texts())
    header = next(lines, (0, []))[1]
    repeated = next((name for i, name in enumerate(header) if name in header[:i]), None)
    if repeated is not None:
        raise BadInput(f"{path.name} has several columns {repeated!r}; rename them")
    own = is_own(header, fields)
    for number, cells in lines:
        if len(cells) != len(header):
            bad(BadInput(f"{path.name} line {number}: {len(cells)} cells, {len(header)} in the header; mend it"))
            continue
        row = {
            name: cell if own and name in ("text", "payload") else _cell(cell, name, fields)
            for name, cell in zip(header, cells, strict=True)
            if cell
        }
        if own and "payload" in row:
            try:
                row["payload"] = json.loads(row["payload"], parse_constant=check.no_constant)
            except (ValueError, RecursionError) as error:
                bad(BadInput(f"{path.name} line {number}: payload is not JSON ({error}); mend it"))
                continue
        yield Line(number, share, row, tuple(name for name in header if name not in row))


def _cell(cell: str, name: str, fields: Fields) -> Any:
    if name in (fields.id, fields.text):
        return cell
    if cell in ("true", "True", "false", "False"):  # pandas writes True
        return cell in ("true", "True")
    if _NUMBER.fullmatch(cell) or (name in (fields.key, fields.value) and cell[0] == "["):
        with contextlib.suppress(ValueError, RecursionError):  # too many digits for an int, or a bad list, for `_key`
            value = json.loads(cell)
            return cell if isinstance(value, float) and math.isinf(value) else value
    return cell
