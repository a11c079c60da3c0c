"""Writing files of bare vectors: `.npy`, `.npz`, `.safetensors`, `.fvecs`, `.fbin`, and `.hdf5` of ann-benchmarks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib import format

from softdb.answers import Records
from softdb.check import Array, shown
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.formats.tables import needed

__all__ = ["NUMBERS", "Export"]

T = TypeVar("T")

_SAFE = {"float32": "F32", "float16": "F16", "int64": "I64"}
_DISTANCES = {"cosine": "angular", "l2": "euclidean", "dot": "dot"}


class Export(NamedTuple):
    """An export of records to a file."""

    db: Verbs
    where: dict[str, Any] | None
    size: int  # records a batch
    suffix: str
    tell: Callable[[int], None]  # called with the number of records that have been written since
    note: Callable[[str], None]  # called with what the format cannot carry

    def scan(self) -> Iterator[Records]:
        """The records, counted."""
        return self.counted(self.db.scan(self.size, self.where))

    def arrow(self) -> tuple[Any, Iterator[Any]]:
        """Schema and batches of the records as Arrow has them, counted."""
        reader = self.db.scan_arrow(self.size, self.where)
        return reader.schema, self.counted(reader)

    def counted(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches, each told of once it is written."""
        for batch in batches:
            yield batch
            self.tell(len(batch))  # type: ignore[arg-type]


class _Column(NamedTuple):
    """A column of an export, read in a scan of its own."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _columns(export: Export, *also: str) -> list[_Column]:
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
    export.note(f"carries no {', '.join(omitted)}{'' if 'header' in also else ', nor what the database is'}")
    return columns


def _read(export: Export, column: _Column) -> Iterator[Array]:
    done, count = 0, column.shape[0]
    for records in export.scan() if column.name == "keys" else export.db.scan(export.size, export.where):
        if not bool(records.keyed.all()):
            name = records.ids[records.keyed.tolist().index(False)]
            raise BadInput(
                f"record {shown(name)} has no key, which {export.suffix} cannot say; filter, or export .parquet"
            )
        array = np.array(records.ids, np.int64) if column.name == "ids" else getattr(records, column.name).numpy()
        done += len(array)
        if done <= count:
            yield array
    if done != count:
        raise BadInput(f"{done} records were found where {count} were counted: others write meanwhile; try again")


def _npy(export: Export, file: IO[bytes]) -> None:
    _array(export, file, _columns(export)[0])


def _npz(export: Export, file: IO[bytes]) -> None:
    columns = _columns(export, "values", "ids")
    with zipfile.ZipFile(file, "w") as archive:
        for column in columns:
            with archive.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                _array(export, member, column)


def _array(export: Export, file: IO[bytes], column: _Column) -> None:
    header = {"descr": format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": column.shape}
    format.write_array_header_1_0(file, header)
    for part in _read(export, column):
        file.write(part.tobytes())


def _safetensors(export: Export, file: IO[bytes]) -> None:
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


def _fvecs(export: Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    row = np.dtype([("width", "<i4"), ("numbers", "<f4", (keys.shape[1],))])
    for part in _read(export, keys):
        rows = np.empty(len(part), row)
        rows["width"], rows["numbers"] = keys.shape[1], part
        file.write(rows.tobytes())


def _fbin(export: Export, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    file.write(np.array(keys.shape, "<i4").tobytes())
    for part in _read(export, keys):
        file.write(part.astype("<f4").tobytes())


def _hdf5(export: Export, file: IO[bytes]) -> None:
    (keys,), at = _columns(export), 0
    with needed("h5py", "hdf5", "HDF5").File(file, "w") as archive:
        archive.attrs["distance"] = _DISTANCES[export.db.core.schema.metric.value]
        train = archive.create_dataset("train", keys.shape, keys.dtype)
        for part in _read(export, keys):
            train[at : at + len(part)] = part
            at += len(part)


NUMBERS: dict[str, Callable[[Export, Any], None]] = {
    ".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".fvecs": _fvecs, ".fbin": _fbin, ".hdf5": _hdf5,
}  # fmt: skip
