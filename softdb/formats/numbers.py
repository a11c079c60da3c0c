"""Writing files of bare vectors: `.npy`, `.npz`, `.safetensors`, `.fvecs`, `.fbin`, and `.hdf5` of ann-benchmarks."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format

from softdb.check import Array, shown
from softdb.errors import BadInput
from softdb.formats.tables import needed

__all__ = ["NUMBERS"]

_SAFE = {"float32": "F32", "float16": "F16", "int64": "I64"}
_DISTANCES = {"cosine": "angular", "l2": "euclidean", "dot": "dot"}


class _Writing(Protocol):
    """What is written, as `softdb.formats.exporting` has it."""

    db: Any
    where: Any
    suffix: str
    tell: Callable[[int], None]
    note: Callable[[str], None]

    def scan(self, told: bool = True) -> Iterator[Any]:
        """The records, told of as they go."""
        ...


class _Column(NamedTuple):
    """A column of an export, read in a scan of its own."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    batches: Callable[[], Iterator[Array]]


def _columns(export: _Writing, *also: str) -> list[_Column]:
    """The keys, and what else of values and ids there is, as arrays; what cannot be among them is noted."""
    db, count = export.db, export.db.count(export.where)
    made, whole = db.schema, db.id_types == {"integer"}
    left = ["payloads, texts"]
    found = [_Column("keys", made.dtype, (count, made.dim), lambda: _read(export, "keys", count))]
    if made.has_values and "values" in also:
        shape = (count,) if made.value_dim is None else (count, made.value_dim)
        dtype = np.dtype(np.int64) if made.value_dim is None else made.dtype
        found.append(_Column("values", dtype, shape, lambda: _read(export, "values", count)))
    elif made.has_values:
        left.append("values")
    if whole and "ids" in also:
        found.append(_Column("ids", np.dtype(np.int64), (count,), lambda: _read(export, "ids", count)))
    else:
        left.append("ids")
    export.note(f"carries no {', '.join(left)}{'' if 'header' in also else ', nor what the database is'}")
    return found


def _read(export: _Writing, what: str, count: int) -> Iterator[Array]:
    done = 0
    for records in export.scan(what == "keys"):
        if not bool(records.keyed.all()):
            name = next(one for one, own in zip(records.ids, records.keyed, strict=True) if not own)
            raise BadInput(
                f"record {shown(name)} has no key, which {export.suffix} cannot say; filter, or export .parquet"
            )
        column = np.array(records.ids, np.int64) if what == "ids" else getattr(records, what).numpy()
        done += len(column)
        if done <= count:
            yield column
    if done != count:
        raise BadInput(f"{done} records were found where {count} were counted: others write meanwhile; try again")


def _npy(export: _Writing, file: IO[bytes]) -> None:
    _array(file, _columns(export)[0])


def _npz(export: _Writing, file: IO[bytes]) -> None:
    columns = _columns(export, "values", "ids")
    with zipfile.ZipFile(file, "w") as archive:
        for column in columns:
            with archive.open(f"{column.name}.npy", "w", force_zip64=True) as member:
                _array(member, column)


def _array(file: IO[bytes], column: _Column) -> None:
    said = {"descr": format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": column.shape}
    format.write_array_header_1_0(file, said)
    for part in column.batches():
        file.write(part.tobytes())


def _safetensors(export: _Writing, file: IO[bytes]) -> None:
    header: dict[str, Any] = {"__metadata__": {"softdb": json.dumps(export.db.header, ensure_ascii=False)}}
    at, columns = 0, _columns(export, "values", "ids", "header")
    columns.sort(key=lambda column: -column.dtype.itemsize)  # so that each is aligned
    for column in columns:
        end = at + column.dtype.itemsize * int(np.prod(column.shape))
        said = {"dtype": _SAFE[column.dtype.name], "shape": column.shape, "data_offsets": [at, end]}
        header[column.name], at = said, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for column in columns:
        for part in column.batches():
            file.write(part.tobytes())


def _fvecs(export: _Writing, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    row = np.dtype([("width", "<i4"), ("numbers", "<f4", (keys.shape[1],))])
    for part in keys.batches():
        rows = np.empty(len(part), row)
        rows["width"], rows["numbers"] = keys.shape[1], part
        file.write(rows.tobytes())


def _fbin(export: _Writing, file: IO[bytes]) -> None:
    (keys,) = _columns(export)
    file.write(np.array(keys.shape, "<i4").tobytes())
    for part in keys.batches():
        file.write(part.astype("<f4").tobytes())


def _hdf5(export: _Writing, file: IO[bytes]) -> None:
    (keys,), at = _columns(export), 0
    with needed("h5py", "hdf5", "HDF5").File(file, "w") as made:
        made.attrs["distance"] = _DISTANCES[export.db.metric]
        train = made.create_dataset("train", keys.shape, keys.dtype)
        for part in keys.batches():
            train[at : at + len(part)] = part
            at += len(part)


NUMBERS: dict[str, Callable[[Any, Any], None]] = {
    ".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".fvecs": _fvecs, ".fbin": _fbin, ".hdf5": _hdf5,
}  # fmt: skip
