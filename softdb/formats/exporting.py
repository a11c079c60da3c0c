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
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib import format

from softdb.answers import Records
from softdb.check import Array, shown
from softdb.database import Verbs
from softdb.errors import BadInput, WriteFailed
from softdb.formats.tables import needed

_log = logging.getLogger("softdb")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_SAFE = {"float32": "F32", "float16": "F16", "int64": "I64"}
_DISTANCES = {"cosine": "angular", "l2": "euclidean", "dot": "dot"}
T = TypeVar("T")


@dataclass
class _Export:
    """An export of records to a file."""

    db: Verbs
    where: dict[str, Any] | None
    size: int  # records a batch
    suffix: str
    note: Callable[[str], None]  # called with what the format cannot carry
    progress: Callable[[int, int], None] | None
    whole: int  # records to be written
    done: int = 0  # of them

    def scan(self) -> Iterator[Records]:
        """The records, counted."""
        return self.counted(self.db.scan(self.size, self.where))

    def arrow(self) -> tuple[Any, Iterator[Any]]:
        """Schema and batches of the records as Arrow has them, counted."""
        reader = self.db.scan_arrow(self.size, self.where)
        return reader.schema, self.counted(reader)

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches, each counted once it is written."""
        for batch in batches:
            yield batch
            self.done += len(batch)  # type: ignore[arg-type]
            if self.progress is not None:
                self.progress(self.done, self.whole)


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
    path, whole = Path(path), db.count(where)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _WRITERS or (path.suffix == ".gz" and suffix not in (".jsonl", ".ndjson", ".csv")):
        raise BadInput(f"{path.name} has a name of no known kind; end it in {', '.join(_WRITERS)}")
    if suffix == ".lance" and path.exists():
        raise BadInput(f"{path} is there already; remove it, or give another name")

    export = _Export(db, where, batch_size, suffix, note or _log.warning, progress, whole)
    try:
        with tempfile.TemporaryDirectory(prefix=".softdb-", dir=path.parent) as folder:
            fresh = Path(folder, "export")
            with contextlib.ExitStack() as opened:
                file: Any = fresh if suffix == ".lance" else opened.enter_context(fresh.open("xb"))
                if path.suffix == ".gz":
                    file = opened.enter_context(gzip.GzipFile("", "wb", 6, file, 0))
                _WRITERS[suffix](export, file)
            fresh.replace(path)
    except OSError as error:
        raise WriteFailed(f"{path} cannot be written ({error}); nothing has changed, choose another place") from error
    return export.done


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


def _json_lines(export: _Export, file: IO[bytes]) -> None:
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


def _csv(export: _Export, file: IO[bytes]) -> None:
    names = ("id", "key", *(("value",) if export.db.core.schema.has_values else ()), "text", "payload")
    export.note(".csv carries no metric, types of ids, declared fields or encoder; texts must not be empty")
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


def _parquet(export: _Export, file: IO[bytes]) -> None:
    (schema, batches), parquet = export.arrow(), needed("pyarrow.parquet", "arrow", "Parquet")
    packed = dict.fromkeys(("id", "text", "payload"), "zstd")  # vectors would be hardly smaller, and slower
    options = {"compression": packed, "use_dictionary": False, "write_page_checksum": True}
    with parquet.ParquetWriter(file, schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _arrow(export: _Export, file: IO[bytes]) -> None:
    schema, batches = export.arrow()
    with needed("pyarrow", "arrow", "Arrow").ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _lance(export: _Export, folder: Path) -> None:
    (schema, batches), lance = export.arrow(), needed("lance", "lance", "Lance")
    pa = needed("pyarrow", "arrow", "Lance")
    lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(folder), mode="create")


class _Column(NamedTuple):
    """A column of an export, read in a scan of its own."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _columns(export: _Export, *also: str) -> list[_Column]:
    """The keys, and, of values and ids, what can be an array and is wanted; the export notes what is left out."""
    schema, count = export.db.core.schema, export.db.count(export.where)
    columns, omitted = [_Column("keys", schema.dtype, (count, schema.dim))], ["payloads, texts"]
    if schema.has_values and "values" in also:
        shape = (count,) if schema.value_dim is None else (count, schema.value_dim)
        columns.append(_Column("values", np.dtype(np.int64) if schema.value_dim is None else schema.dtype, shape))
    elif schema.has_values:
        omitted.append("values")
    if export.db.core.id_types == {"integer"} and "ids" in also:
        columns.append(_Column("ids", np.dtype(np.int64), (count,)))
    else:
        omitted.append("ids")
    schemaless = "" if "header" in also else ", nor what the database is"
    export.note(f"{export.suffix} carries no {', '.join(omitted)}{schemaless}")
    return columns


def _read(export: _Export, column: _Column) -> Iterator[Array]:
    done, count = 0, column.shape[0]
    for records in export.scan() if column.name == "keys" else export.db.scan(export.size, export.where):
        if not bool(records.keyed.all()):
            name = records.ids[records.keyed.tolist().index(False)]
            cannot = f"which {export.suffix} cannot say; filter, or export .parquet"
            raise BadInput(f"record {shown(name)} has no key, {cannot}")
        array = np.array(records.ids, np.int64) if column.name == "ids" else getattr(records, column.name).numpy()
        done += len(array)
        if done <= count:
            yield array
    if done != count:
        raise BadInput(f"{done} records were found where {count} were counted: others write meanwhile; try again")


def _npy(export: _Export, file: IO[bytes]) -> None:
    _array(export, file, _columns(export)[0])


def _npz(export: _Export, file: IO[bytes]) -> None:
    columns = _columns(export, "values", "ids")
    with zipfile.ZipFile(file, "w") as archive:
        for column in columns:
            with archive.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                _array(export, member, column)


def _array(export: _Export, file: IO[bytes], column: _Column) -> None:
    header = {"descr": format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": column.shape}
    format.write_array_header_1_0(file, header)
    for part in _read(export, column):
        file.write(part.tobytes())


def _safetensors(export: _Export, file: IO[bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"softdb": json.dumps(export.db.core.header, ensure_ascii=False)}}
    at, columns = 0, _columns(export, "values", "ids", "header")
    columns.sort(key=lambda column: -column.dtype.itemsize)  # so that each is aligned
    for column in columns:
        end = at + column.dtype.itemsize * int(np.prod(column.shape))
        header[column.name] = {"dtype": _SAFE[column.dtype.name], "shape": column.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for column in columns:
        for part in _read(export, column):
            file.write(part.tobytes())


def _fvecs(export: _Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    row = np.dtype([("width", "<i4"), ("numbers", "<f4", (keys.shape[1],))])
    for part in _read(export, keys):
        rows = np.empty(len(part), row)
        rows["width"], rows["numbers"] = keys.shape[1], part
        file.write(rows.tobytes())


def _fbin(export: _Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    file.write(np.array(keys.shape, "<i4").tobytes())
    for part in _read(export, keys):
        file.write(part.astype("<f4").tobytes())


def _hdf5(export: _Export, file: IO[bytes]) -> None:
    (keys,), at = _columns(export), 0
    with needed("h5py", "hdf5", "HDF5").File(file, "w") as archive:
        archive.attrs["distance"] = _DISTANCES[export.db.core.schema.metric.value]
        train = archive.create_dataset("train", keys.shape, keys.dtype)
        for part in _read(export, keys):
            train[at : at + len(part)] = part
            at += len(part)


_WRITERS: dict[str, Callable[[_Export, Any], None]] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow,
    ".feather": _arrow, ".lance": _lance, ".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".fvecs": _fvecs,
    ".fbin": _fbin, ".hdf5": _hdf5,
}  # fmt: skip
