"""Export: the records of a database into a file of some format, which appears when it is whole."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from softdb.answers import Records
from softdb.database import Verbs
from softdb.errors import BadInput, WriteFailed
from softdb.formats.numbers import NUMBERS, Export
from softdb.formats.tables import needed

__all__ = ["export_records", "write_records"]

_log = logging.getLogger("softdb")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def export_records(
    db: Verbs,
    path: str | os.PathLike[str],
    *,
    where: dict[str, Any] | None = None,
    batch_size: int = 10_000,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> int:
    """Write records, all or those that a filter matches, in the format that the name ends in, and return how many.

    `db` is a database, or a cluster, whose records come shard by shard.

    `.jsonl` (also `.gz`), `.parquet`, `.arrow` and `.lance` carry everything: `import_records` makes the same database
    of them. `.csv` and files of vectors carry less; what stays behind is told to `note`, or logged. Numbers are exact.
    `progress` is told how many are written, and of how many.

    The first line of JSON lines, `{"softdb": {…}}`, holds what `read_header` reads: the schema, the declared fields and
    the name of the encoder; tables have it in their metadata. Then a line is `{"id": …, "key": […], "value": …,
    "payload": …, "text": …}`, without what a record has not. The file appears when it is whole, in place of one that
    was there; else nothing has changed. Raises BadInput for a name of another kind, or a record that the format cannot
    hold, and WriteFailed where the disk refuses.
    """
    path, done, whole = Path(path), 0, db.count(where)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _WRITERS or (path.suffix == ".gz" and suffix not in (".jsonl", ".ndjson", ".csv")):
        raise BadInput(f"{path.name} has a name of no known kind; end it in {', '.join(_WRITERS)}")
    if suffix == ".lance" and path.exists():
        raise BadInput(f"{path} is there already; remove it, or give another name")

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, whole)

    def said(what: str) -> None:
        (note or _log.warning)(f"{suffix} {what}")

    export = Export(db, where, batch_size, suffix, tell, said)
    try:
        _write(export, path)
    except OSError as error:
        raise WriteFailed(f"{path} cannot be written ({error}); nothing has changed, choose another place") from error
    return done


def _write(export: Export, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".softdb-", dir=path.parent) as folder:
        fresh = Path(folder, "export")
        if export.suffix == ".lance":
            _lance(export, fresh)
        else:
            with contextlib.ExitStack() as opened:
                file: Any = opened.enter_context(fresh.open("xb"))
                if path.suffix == ".gz":
                    file = opened.enter_context(gzip.GzipFile("", "wb", 6, file, 0))
                _WRITERS[export.suffix](export, file)
        fresh.replace(path)


def _rows(records: Records) -> Iterator[dict[str, Any]]:
    """Records as objects, without the parts that they lack."""
    values = [None] * len(records) if records.values is None else records.values.tolist()
    columns = (records.ids, records.keyed.tolist(), records.keys.tolist(), values, records.payloads, records.texts)
    for name, keyed, key, value, payload, text in zip(*columns, strict=True):
        row = {"id": name, "key": key if keyed else None, "value": value if keyed else None}
        row |= {"payload": payload, "text": text}
        yield {part: cell for part, cell in row.items() if cell is not None}


def write_records(db: Verbs, file: IO[str], *, where: dict[str, Any] | None = None, batch_size: int = 1000) -> int:
    """Write records to an open text file or pipe, as `export_records` writes JSON lines, and return how many."""
    return _write_lines(db, db.scan(batch_size, where), file)


def _json_lines(export: Export, file: IO[bytes]) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="\n")
    _write_lines(export.db, export.scan(), text)
    text.detach()


def _write_lines(db: Verbs, batches: Iterator[Records], file: IO[str]) -> int:
    done = 0
    file.write(json.dumps({"softdb": db.core.header}, ensure_ascii=False) + "\n")
    for records in batches:
        file.write("".join(_encode(row) + "\n" for row in _rows(records)))
        done += len(records)
    return done


def _csv(export: Export, file: IO[bytes]) -> None:
    names = ("id", "key", *(("value",) if export.db.core.schema.has_values else ()), "text", "payload")
    export.note("carries no metric, types of ids, declared fields or encoder; texts must not be empty")
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(names)
    for records in export.scan():
        for row in _rows(records):
            cells = {name: part if name in ("id", "text") else _encode(part) for name, part in row.items()}
            if "" in cells.values():
                raise BadInput(f"record {row['id']!r} has an empty id or text, which .csv cannot tell from none")
            writer.writerow([cells.get(name, "") for name in names])
    text.detach()


def _parquet(export: Export, file: IO[bytes]) -> None:
    (schema, batches), parquet = export.arrow(), needed("pyarrow.parquet", "arrow", "Parquet")
    packed = dict.fromkeys(("id", "text", "payload"), "zstd")  # vectors would be hardly smaller, and slower
    options = {"compression": packed, "use_dictionary": False, "write_page_checksum": True}
    with parquet.ParquetWriter(file, schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _arrow(export: Export, file: IO[bytes]) -> None:
    schema, batches = export.arrow()
    with needed("pyarrow", "arrow", "Arrow").ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _lance(export: Export, folder: Path) -> None:
    (schema, batches), lance = export.arrow(), needed("lance", "lance", "Lance")
    pa = needed("pyarrow", "arrow", "Lance")
    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(folder), mode="create")


_WRITERS: dict[str, Callable[[Export, Any], None]] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow,
    ".feather": _arrow, ".lance": _lance, **NUMBERS,
}  # fmt: skip
