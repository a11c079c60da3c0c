"""Export of a database's records to a file, which gets its name only when it is complete."""

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
from softdb.tables.arrow_tables import needed

_log = logging.getLogger("softdb")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_SAFE = {"float32": "F32", "float16": "F16", "int64": "I64"}
_DISTANCES = {"cosine": "angular", "l2": "euclidean", "dot": "dot"}
T = TypeVar("T")


@dataclass
class _Export:
    db: Verbs
    where: dict[str, Any] | None
    size: int  # records in a batch
    suffix: str
    note: Callable[[str], None]  # called with a sentence that says which data the format cannot hold
    progress: Callable[[int, int], None] | None
    total: int  # number of records to write
    done: int = 0  # number of records written

    def scan(self) -> Iterator[Records]:
        """Yield the records to export in batches, and report progress."""
        return self.counted(self.db.scan(self.size, self.where))

    def arrow(self) -> tuple[Any, Iterator[Any]]:
        """Return the Arrow schema, and an iterator over Arrow batches that reports progress."""
        reader = self.db.scan_arrow(self.size, self.where)
        return reader.schema, self.counted(reader)

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and add the records of a batch to `done` after the batch is written."""
        for batch in batches:
            yield batch
            self.done += len(batch)  # type: ignore[arg-type]
            if self.progress is not None:
                self.progress(self.done, self.total)


def export_records(
    db: Verbs,
    path: str | os.PathLike[str],
    *,
    where: dict[str, Any] | None = None,
    batch_size: int = 10_000,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> int:
    """Write all records, or those that a filter matches, in the format of the file's suffix, and return their number.

    `db` is a database or a cluster; a cluster's records come shard by shard.

    `.jsonl` (also `.gz`), `.parquet`, `.arrow` and `.lance` hold everything: `import_records` makes an equal database
    from them. `.csv` and files of vectors hold less: `note` is called with a sentence about the missing data; without
    `note` it is logged. Numbers are exact. `progress` is called with the number of records written and of all records.

    The first JSON line, `{"softdb": {…}}`, is the header for `read_header`: schema, declared fields and encoder's name;
    tables have it in their metadata. Each further line is a record, `{"id": …, "key": […], "value": …, "payload": …,
    "text": …}`, without fields that the record lacks. The complete file replaces an existing one; after an error the
    existing file is unchanged. Raises BadInput for an unknown suffix and for a record that the format cannot hold, and
    WriteFailed if the file cannot be written.
    """
    path, total = Path(path), db.count(where)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _WRITERS or (path.suffix == ".gz" and suffix not in (".jsonl", ".ndjson", ".csv")):
        raise BadInput(f"{path.name} has a name of no known kind; end it in {', '.join(_WRITERS)}")
    if suffix == ".lance" and path.exists():
        raise BadInput(f"{path} is there already; remove it, or give another name")

    export = _Export(db, where, batch_size, suffix, note or _log.warning, progress, total)
    try:
        with tempfile.TemporaryDirectory(prefix=".softdb-", dir=path.parent) as folder:
            temporary = Path(folder, "export")
            with contextlib.ExitStack() as opened:
                file: Any = temporary if suffix == ".lance" else opened.enter_context(temporary.open("xb"))
                if path.suffix == ".gz":
                    file = opened.enter_context(gzip.GzipFile("", "wb", 6, file, 0))
                _WRITERS[suffix](export, file)
            temporary.replace(path)
    except OSError as error:
        raise WriteFailed(f"{path} cannot be written ({error}); nothing has changed; choose another path") from error
    return export.done


def _rows(records: Records) -> Iterator[dict[str, Any]]:
    """Yield records as JSON objects, each without the fields that its record lacks."""
    values = [None] * len(records) if records.values is None else records.values.tolist()
    columns = (records.ids, records.keyed.tolist(), records.keys.tolist(), values, records.payloads, records.texts)
    for name, keyed, key, value, payload, text in zip(*columns, strict=True):
        row = {"id": name, "key": key if keyed else None, "value": value if keyed else None}
        row |= {"payload": payload, "text": text}
        yield {field: value for field, value in row.items() if value is not None}


def write_records(db: Verbs, file: IO[str], *, where: dict[str, Any] | None = None, batch_size: int = 1000) -> int:
    """Write records as JSON lines, like `export_records`, to an open text file or pipe, and return their number."""
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
            cells = {name: value if name in ("id", "text") else _encode(value) for name, value in row.items()}
            if "" in cells.values():
                raise BadInput(f"record {row['id']!r} has an empty id or text, which .csv cannot tell from none")
            writer.writerow([cells.get(name, "") for name in names])
    text.detach()


def _parquet(export: _Export, file: IO[bytes]) -> None:
    (schema, batches), parquet = export.arrow(), needed("pyarrow.parquet", "arrow", "Parquet")
    compression = dict.fromkeys(("id", "text", "payload"), "zstd")  # not the vectors: zstd hardly shrinks them
    options = {"compression": compression, "use_dictionary": False, "write_page_checksum": True}
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
    """An array of an export: keys, values or ids. Writing an array takes one scan of the records."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _columns(export: _Export, *optional: str) -> list[_Column]:
    """Return the column of keys, and those of `optional` that can be arrays; pass names of omitted data to `note`."""
    schema, count = export.db.core.schema, export.db.count(export.where)
    columns, omitted = [_Column("keys", schema.dtype, (count, schema.dim))], ["payloads, texts"]
    if schema.has_values and "values" in optional:
        shape = (count,) if schema.value_dim is None else (count, schema.value_dim)
        columns.append(_Column("values", np.dtype(np.int64) if schema.value_dim is None else schema.dtype, shape))
    elif schema.has_values:
        omitted.append("values")
    if export.db.core.id_types == {"integer"} and "ids" in optional:
        columns.append(_Column("ids", np.dtype(np.int64), (count,)))
    else:
        omitted.append("ids")
    if "header" not in optional:
        omitted.append("schema")
    export.note(f"{export.suffix} carries no {', '.join(omitted)}")
    return columns


def _arrays(export: _Export, column: _Column) -> Iterator[Array]:
    """Yield a column's numbers in batches. Raises BadInput for a record without a key, and for concurrent writes."""
    done, count = 0, column.shape[0]
    for records in export.scan() if column.name == "keys" else export.db.scan(export.size, export.where):
        if not bool(records.keyed.all()):
            name = records.ids[records.keyed.tolist().index(False)]
            remedy = f"which {export.suffix} cannot hold; leave it out by where=, or export .parquet"
            raise BadInput(f"record {shown(name)} has no key, {remedy}")
        array = np.array(records.ids, np.int64) if column.name == "ids" else getattr(records, column.name).numpy()
        done += len(array)
        if done <= count:
            yield array
    if done != count:
        raise BadInput(f"{done} records were read but {count} were counted, as another writer changed them; try again")


def _npy(export: _Export, file: IO[bytes]) -> None:
    _write_array(export, file, _columns(export)[0])


def _npz(export: _Export, file: IO[bytes]) -> None:
    columns = _columns(export, "values", "ids")
    with zipfile.ZipFile(file, "w") as archive:
        for column in columns:
            with archive.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                _write_array(export, member, column)


def _write_array(export: _Export, file: IO[bytes], column: _Column) -> None:
    header = {"descr": format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": column.shape}
    format.write_array_header_1_0(file, header)
    for array in _arrays(export, column):
        file.write(array.tobytes())


def _safetensors(export: _Export, file: IO[bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"softdb": json.dumps(export.db.core.header, ensure_ascii=False)}}
    at, columns = 0, _columns(export, "values", "ids", "header")
    columns.sort(key=lambda column: -column.dtype.itemsize)  # widest numbers first, so that each column is aligned
    for column in columns:
        end = at + column.dtype.itemsize * int(np.prod(column.shape))
        header[column.name] = {"dtype": _SAFE[column.dtype.name], "shape": column.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for column in columns:
        for array in _arrays(export, column):
            file.write(array.tobytes())


def _fvecs(export: _Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    row = np.dtype([("width", "<i4"), ("numbers", "<f4", (keys.shape[1],))])
    for array in _arrays(export, keys):
        rows = np.empty(len(array), row)
        rows["width"], rows["numbers"] = keys.shape[1], array
        file.write(rows.tobytes())


def _fbin(export: _Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    file.write(np.array(keys.shape, "<i4").tobytes())
    for array in _arrays(export, keys):
        file.write(array.astype("<f4").tobytes())


def _hdf5(export: _Export, file: IO[bytes]) -> None:
    (keys,), at = _columns(export), 0
    with needed("h5py", "hdf5", "HDF5").File(file, "w") as archive:
        archive.attrs["distance"] = _DISTANCES[export.db.core.schema.metric.value]
        train = archive.create_dataset("train", keys.shape, keys.dtype)
        for array in _arrays(export, keys):
            train[at : at + len(array)] = array
            at += len(array)


_WRITERS: dict[str, Callable[[_Export, Any], None]] = {
    ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow,
    ".feather": _arrow, ".lance": _lance, ".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".fvecs": _fvecs,
    ".fbin": _fbin, ".hdf5": _hdf5,
}  # fmt: skip
