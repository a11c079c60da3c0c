"""Files with vectors but no payloads or texts, memory-mapped where the format allows: `.npy`, `.npz`, `.safetensors`,

* `.hdf5`: ann-benchmarks and VIBE. Arrays `train`, `test` and, optionally, `neighbors`; the attribute `distance` names
  the metric.
* `.fvecs`, `.ivecs`, `.bvecs` (corpus-texmex.irisa.fr): for each vector its width as an int32, then its numbers as
  float32, int32 or bytes.
* `.fbin`, `.u8bin` (big-ann-benchmarks): number of vectors and width as int32, then all numbers as float32 or bytes.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format

from softdb.check import MAX_DIM, Array, Metric, shown
from softdb.errors import BadInput
from softdb.tables.arrow_tables import needed
from softdb.tables.rows import Header, readable

DISTANCES = {
    "angular": Metric.COSINE, "cosine": Metric.COSINE, "euclidean": Metric.L2, "l2": Metric.L2,
    "dot": Metric.DOT, "ip": Metric.DOT, "normalized": Metric.DOT,
}  # fmt: skip
WIDTHS_CHECKED = 1000  # number of vectors in a .fvecs file whose widths are compared with the first vector's
_HEADER = 1 << 14  # largest number of bytes in a .npy file's header; NumPy reads at most 10,000
_UNPACKED = 1 << 28  # largest number of bytes of a decompressed array, unless 16 times the file's size is more
_SAFE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
         "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}  # fmt: skip


@dataclass(frozen=True)
class KeyFile:
    """Keys, queries and the true nearest neighbours, from a benchmark's file or folder."""

    keys: Array  # (n, d)
    queries: Array | None  # (q, d)
    metric: Metric
    neighbours: Array | None = None  # (q, m) numbers of keys


def _hdf5(path: Path) -> KeyFile:
    """Read a file of ann-benchmarks or VIBE."""
    h5py = needed("h5py", "bench", path.name)
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in ("train", "test") if name not in file]
            if missing:
                raise BadInput(f"{path} lacks {' and '.join(missing)}; expected train, test and neighbors")
            distance = file.attrs.get("distance", "euclidean")
            metric = metric_of(distance.decode() if isinstance(distance, bytes) else str(distance), path)
            neighbours = file["neighbors"][:] if "neighbors" in file else None
            keys, queries = (_vectors(_mapped(file[name], path), f"{path}, {name}") for name in ("train", "test"))
            return KeyFile(keys, queries, metric, neighbours)
    except OSError as error:
        raise BadInput(f"{path} cannot be read as HDF5 ({error}); download it again") from None


def metric_of(distance: str, path: Path) -> Metric:
    """Return the metric for a distance's name in an HDF5 file, such as "angular". Raises BadInput for other names."""
    metric = DISTANCES.get(distance)
    if metric is None:
        raise BadInput(f"{path} has the distance {shown(distance)}; expected one of {', '.join(DISTANCES)}")
    return metric


def _mapped(array: Any, path: Path) -> Array:
    """Return an HDF5 array: memory-mapped if it is contiguous in the file, else loaded."""
    offset = array.id.get_offset()
    if offset is None or not array.size or not array.dtype.isnative:
        loaded: Array = array[()]
        return loaded
    return np.memmap(path, array.dtype, "r", offset, array.shape)


def _vecs(path: Path, kind: str) -> KeyFile:
    size, dtype = _size(path, 4), np.dtype(kind)
    width = int(np.fromfile(path, "<i4", 1)[0])
    row = 4 + width * dtype.itemsize
    if not 0 < width <= MAX_DIM or size % row:
        raise BadInput(
            f"{path} begins with the width {width}, but its {size} bytes are not a multiple of the {row} bytes of such "
            f"a vector of {dtype}; it is cut short or of another format: download it again"
        )
    layout = np.dtype([("width", "<i4"), ("numbers", dtype, (width,))])
    rows = np.memmap(path, layout, "r")
    widths = rows["width"][np.unique(np.linspace(0, len(rows) - 1, WIDTHS_CHECKED).astype(np.int64))]
    if (widths != width).any():
        other = widths[widths != width][0]
        raise BadInput(f"{path} begins with the width {width} but has a vector of the width {other}; write it again")
    return KeyFile(_vectors(rows["numbers"], str(path)), None, Metric.L2)


def _bin(path: Path, kind: str) -> KeyFile:
    size, dtype = _size(path, 8), np.dtype(kind)
    count, width = (int(number) for number in np.fromfile(path, "<i4", 2))
    expected = 8 + count * width * dtype.itemsize
    if count < 1 or not 0 < width <= MAX_DIM or size != expected:
        raise BadInput(
            f"{path} has {size} bytes, but {count} vectors of {width} {dtype}, as its header says, take {expected}; it "
            "is cut short or of another format: download it again"
        )
    return KeyFile(_vectors(np.memmap(path, dtype, "r", 8, (count, width)), str(path)), None, Metric.L2)


def read_queries(path: Path) -> Array:
    """Return the queries in a benchmark's HDF5 file or folder, or all vectors of a file of another format."""
    if not path.exists():
        raise BadInput(f"there is no file {path} with queries; give a file with the vectors to search for")
    source = read_keys(path)
    return source.keys if source.queries is None else source.queries


def read_keys(path: Path) -> KeyFile:
    """Return the vectors of a benchmark's folder or file, or of a `.npy` file. Raises BadInput for another format."""
    kind = "" if path.is_dir() else path.suffix.lower()
    if kind == ".npy":
        return KeyFile(_npy(path), None, Metric.DOT)
    if kind not in READERS or (kind == "" and not path.is_dir()):
        raise BadInput(f"{path} ends in {kind!r}; expected .npy or one of {', '.join(end for end in READERS if end)}")
    return READERS[kind](path)


def _npy(path: Path) -> Array:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; the folder of a dataset holds keys.npy and queries.npy")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path} cannot be read as an array of numbers ({error})") from None
    return _vectors(array, str(path))


def _vectors(array: Array, name: str) -> Array:
    """Return the array unchanged. Raises BadInput unless it is a nonempty matrix (n, d) of numbers."""
    if array.ndim != 2 or not array.size or array.dtype.kind not in "fiu":
        raise BadInput(f"{name} has shape {array.shape} of {array.dtype}; expected vectors of numbers, (n, d)")
    return array


def _size(path: Path, header: int) -> int:
    """Return the size of a file in bytes. Raises BadInput if no byte follows the header of `header` bytes."""
    size = path.stat().st_size
    if size <= header:
        raise BadInput(f"{path} has {size} bytes, less than one vector; download it again")
    return size


READERS: dict[str, Callable[[Path], KeyFile]] = {
    "": lambda path: KeyFile(_npy(path / "keys.npy"), _npy(path / "queries.npy"), Metric.DOT),
    ".hdf5": _hdf5, ".h5": _hdf5,
    ".fvecs": partial(_vecs, kind="f4"), ".ivecs": partial(_vecs, kind="i4"), ".bvecs": partial(_vecs, kind="u1"),
    ".fbin": partial(_bin, kind="f4"), ".u8bin": partial(_bin, kind="u1"),
}  # fmt: skip
COLUMNS = (".npy", ".npz", ".safetensors", *(kind for kind in READERS if kind))


@dataclass(frozen=True)
class KeyColumns:
    """The columns of a file's records: arrays, or array-like objects that can be sliced, with a row for each record."""

    keys: Any  # (n, d)
    values: Any = None  # (n, v) or (n,)
    ids: Any = None  # (n,) integers; None: the ids are the row numbers, from 0
    header: Header | None = None  # of an export of softdb


def columns_in(path: Path, kind: str) -> KeyColumns:
    """Return the columns in a file. Raises BadInput, with the file's name, for contents that cannot be records."""
    columns = _columns(path, kind)
    widths = [column.shape[1] for column in (columns.keys, columns.values) if column is not None and column.ndim == 2]
    if not all(0 < width <= MAX_DIM for width in widths):
        raise BadInput(f"{path.name} holds vectors of {shown(widths)} numbers; expected 1 to {MAX_DIM:,}")
    return columns


def _columns(path: Path, kind: str) -> KeyColumns:
    if kind in READERS:
        return KeyColumns(READERS[kind](path).keys)
    arrays, header = _safetensors(path) if kind == ".safetensors" else ({}, None)
    if kind == ".npz" and path.is_file():
        with readable(path, " as an array of numbers"):
            arrays = _archived(path, "keys", "values", "ids")
    if kind != ".safetensors" and "keys" not in arrays:
        keys = numbers_in(path)
        if keys.ndim != 2:
            raise BadInput(f"{path.name} has shape {keys.shape} and type {keys.dtype}; expected (n, d) numbers")
        return KeyColumns(keys)
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    name = "keys" if "keys" in arrays else matrices[0] if len(matrices) == 1 else None
    if name is None or arrays[name].ndim != 2 or arrays[name].dtype.kind not in "fiu":
        expected = "expected one (n, d) array of numbers, or one called keys"
        raise BadInput(f"{path.name} holds {shown(list(arrays))}; {expected}")
    keys, values, ids = arrays[name], arrays.get("values"), arrays.get("ids")
    for label, column in (("values", values), ("ids", ids)):
        if column is not None and column.shape[:1] != (len(keys),):
            raise BadInput(f"{path.name} holds {len(keys)} keys but {shown(column.shape)} {label}; expected as many")
    if ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise BadInput(f"{path.name} holds ids of shape {ids.shape} and type {ids.dtype}; expected (n,) integers")
    return KeyColumns(keys, values, ids, header)


def numbers_in(path: Path) -> Array:
    """Return the array of a `.npy` file, memory-mapped, or of a `.npz` file (its only array, or `keys`), loaded.

    NumPy's parser first reads the header from at most 16 KiB of the file; NumPy reads the array only if its dtype is
    numeric and the file is as large as the header says. Nothing is unpickled. Raises BadInput with the file's name.
    """
    if not path.is_file():  # reading a pipe could block forever
        raise BadInput(f"{path} cannot be read as an array of numbers (no such file); expected a .npy or .npz array")
    with readable(path, " as an array of numbers"):
        if path.suffix == ".npz":
            return next(iter(_archived(path, "keys", only=True).values()))
        with path.open("rb") as file:
            expected = _size_of(file.read(_HEADER))
        if (size := path.stat().st_size) < expected:
            raise ValueError(f"it has {size} bytes, {expected} expected")
        return format.open_memmap(path, "r")


def _archived(path: Path, *wanted: str, only: bool = False) -> dict[str, Array]:
    """Return the `wanted` arrays of a `.npz` file by name. With `only`, a file's single array may have any name."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        if only and not members.keys() & set(wanted):
            if len(members) != 1:
                raise BadInput(f"{path.name} holds {shown(list(members))}; expected one array, or one called keys")
            wanted = (*members,)
        return {name: _member(path, archive, members[name]) for name in wanted if name in members}


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may expand a million times
        raise ValueError("it is compressed in a way that NumPy does not write")
    with archive.open(member) as file:
        if member.file_size != (expected := _size_of(file.read(_HEADER))):
            name = member.filename.removesuffix(".npy")
            raise ValueError(f"{name} has {member.file_size} bytes, {expected} expected")
        if expected > max(_UNPACKED, 16 * path.stat().st_size):
            raise ValueError(f"it would unpack to {expected:,} bytes; save it as .npy, which is mapped")
        file.seek(0)
        return np.asarray(format.read_array(file, allow_pickle=False))


def _size_of(start: bytes) -> int:
    """Compute the size in bytes of a `.npy` file from its header. Raises ValueError unless its array is numeric."""
    file = io.BytesIO(start)
    version, _ = format.read_magic(file)
    if version not in (1, 2, 3):
        raise ValueError(f"it has the format version {version}; NumPy writes 1 to 3")
    # version 3 differs from 2 only in field names, which numeric arrays do not have
    read_header = format.read_array_header_1_0 if version == 1 else format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds {shown(dtype)}, not numbers")
    if len(shape) > 32 or not all(type(extent) is int and 0 <= extent < 1 << 48 for extent in shape):
        raise ValueError(f"its shape is {shown(shape)}")
    return file.tell() + dtype.itemsize * math.prod(shape)


def _safetensors(path: Path) -> tuple[dict[str, Any], Header | None]:
    """Return the memory-mapped tensors and the header of a `.safetensors` file: JSON's length (8 bytes), JSON, data."""
    with readable(path, " as safetensors", "; fetch it again"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= 100_000_000:  # the format's own limit
                raise ValueError(f"its header would have {length:,} bytes")
            tensors = json.loads(file.read(length))
        metadata, arrays = tensors.pop("__metadata__", {}), {}
        for name, tensor in tensors.items():
            (start, end), shape = tensor["data_offsets"], tuple(tensor["shape"])
            dtype = np.dtype(_SAFE[tensor["dtype"]])
            if end - start != dtype.itemsize * math.prod(shape) or not 0 <= start <= path.stat().st_size - 8 - length:
                raise ValueError(f"the size of {name} does not fit its shape")
            array = np.memmap(path, dtype, "r", 8 + length + start, shape) if end > start else np.zeros(shape, dtype)
            arrays[name] = _BFloat16(array) if tensor["dtype"] == "BF16" else array
        header = metadata.get("softdb")
        return arrays, None if header is None else Header.of(json.loads(header), path.name)


class _BFloat16:
    """An array of bfloat16 numbers that is read as float32: a bfloat16 is the upper 16 bits of a float32."""

    def __init__(self, halves: Array) -> None:
        self._halves, self.shape, self.ndim, self.dtype = halves, halves.shape, halves.ndim, np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self._halves)

    def __getitem__(self, rows: slice) -> Array:
        return (self._halves[rows].astype(np.uint32) << 16).view(np.float32)
