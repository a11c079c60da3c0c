"""The files of other benchmarks, mapped into memory where their format allows it.

* `.hdf5`: ann-benchmarks and VIBE. Arrays `train`, `test`, and `neighbors` where there are any; the attribute
  `distance` says how they are compared.
* `.fvecs`, `.ivecs`, `.bvecs` (corpus-texmex.irisa.fr): each vector is its width as an int32, then float32 or int32
  numbers, or bytes.
* `.fbin`, `.u8bin` (big-ann-benchmarks): two int32, count and width, then float32 numbers or bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.check import MAX_DIM, Metric, shown
from softdb.errors import BadInput, MissingDependency

__all__ = ["DISTANCES", "READERS", "KeyFile", "metric_of", "read_queries"]

Vectors = NDArray[Any]

DISTANCES = {
    "angular": Metric.COSINE, "cosine": Metric.COSINE, "euclidean": Metric.L2, "l2": Metric.L2,
    "dot": Metric.DOT, "ip": Metric.DOT, "normalized": Metric.DOT,
}  # fmt: skip
LOOKED = 1000  # vectors whose own width is compared with the first's


@dataclass(frozen=True)
class KeyFile:
    """Keys, and what else a benchmark's file or folder holds."""

    keys: Vectors  # (n, d)
    queries: Vectors | None  # (q, d)
    metric: Metric
    neighbours: Vectors | None = None  # (q, m)


def _folder(path: Path) -> KeyFile:
    """A folder with keys.npy and queries.npy."""
    return KeyFile(_npy(path / "keys.npy"), _npy(path / "queries.npy"), Metric.DOT)


def _hdf5(path: Path) -> KeyFile:
    """A file of ann-benchmarks or VIBE."""
    try:
        import h5py
    except ImportError:
        raise MissingDependency(f"{path.name} needs h5py; pip install 'softdb[bench]'") from None
    try:
        with h5py.File(path, "r") as file:
            missing = [part for part in ("train", "test") if part not in file]
            if missing:
                raise BadInput(f"{path} lacks {' and '.join(missing)}; expected train, test and neighbors")
            distance = file.attrs.get("distance", "euclidean")
            metric = metric_of(distance.decode() if isinstance(distance, bytes) else str(distance), path)
            near = file["neighbors"][:] if "neighbors" in file else None
            keys, queries = (_vectors(_mapped(file[part], path), f"{path}, {part}") for part in ("train", "test"))
            return KeyFile(keys, queries, metric, near)
    except OSError as error:
        raise BadInput(f"{path} cannot be read as HDF5 ({error}); download it anew") from None


def metric_of(distance: str, path: Path) -> Metric:
    """The metric of a name of a distance. Raises BadInput."""
    metric = DISTANCES.get(distance)
    if metric is None:
        raise BadInput(f"{path} has the distance {shown(distance)}; expected one of {', '.join(DISTANCES)}")
    return metric


def _mapped(array: Any, path: Path) -> Vectors:
    """An HDF5 array straight from the file where it lies there in one piece."""
    offset = array.id.get_offset()
    if offset is None or not array.size or not array.dtype.isnative:
        loaded: Vectors = array[()]
        return loaded
    return np.memmap(path, array.dtype, "r", offset, array.shape)


def _vecs(path: Path, kind: str) -> KeyFile:
    size, dtype = _size(path, 4), np.dtype(kind)
    width = int(np.fromfile(path, "<i4", 1)[0])
    row = 4 + width * dtype.itemsize
    if not 0 < width <= MAX_DIM or size % row:
        raise BadInput(
            f"{path} begins with the width {width}, but its {size} bytes are no whole number of such vectors of {dtype}"
            ", so it is cut short or of another format; give a whole file of its kind"
        )
    layout = np.dtype([("width", "<i4"), ("numbers", dtype, (width,))])
    rows = np.memmap(path, layout, "r")
    widths = rows["width"][np.unique(np.linspace(0, len(rows) - 1, LOOKED).astype(np.int64))]
    if (widths != width).any():
        raise BadInput(
            f"{path} begins with the width {width}, but holds {widths[widths != width][0]} as another; re-make it"
        )
    return KeyFile(_vectors(rows["numbers"], str(path)), None, Metric.L2)


def _bin(path: Path, kind: str) -> KeyFile:
    size, dtype = _size(path, 8), np.dtype(kind)
    count, width = (int(number) for number in np.fromfile(path, "<i4", 2))
    expected = 8 + count * width * dtype.itemsize
    if count < 1 or not 0 < width <= MAX_DIM or size != expected:
        raise BadInput(
            f"{path} says that it holds {count} vectors of {width} {dtype}, which are {expected} bytes with the two "
            f"numbers before them, but it has {size}; it is cut short or of another format"
        )
    return KeyFile(_vectors(np.memmap(path, dtype, "r", 8, (count, width)), str(path)), None, Metric.L2)


def read_queries(path: Path) -> Vectors:
    """The vectors of a file of their own; of an HDF5 file or a folder its queries."""
    if not path.exists():
        raise BadInput(f"there is no file {path} with queries; give one with the vectors to search for")
    if path.suffix.lower() == ".npy":
        return _npy(path)
    kind = "" if path.is_dir() else path.suffix.lower()
    if kind not in READERS or (kind == "" and not path.is_dir()):
        raise BadInput(f"{path} ends in {kind!r}; expected .npy or one of {', '.join(end for end in READERS if end)}")
    source = READERS[kind](path)
    return source.keys if source.queries is None else source.queries


def _npy(path: Path) -> Vectors:
    if not path.is_file():
        raise BadInput(f"{path} is not there; the folder of a dataset holds keys.npy and queries.npy")
    try:
        return _vectors(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
    except BadInput:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path} cannot be read as an array of numbers ({error})") from None


def _vectors(array: Vectors, what: str) -> Vectors:
    """BadInput unless it is a matrix of numbers with something in it."""
    number = array.dtype.kind in "fiu"
    if array.ndim != 2 or not array.size or not number:
        raise BadInput(f"{what} has shape {array.shape} of {array.dtype}; expected vectors of numbers, (n, d)")
    return array


def _size(path: Path, least: int) -> int:
    size = path.stat().st_size
    if size <= least:
        raise BadInput(f"{path} has {size} bytes, less than one vector; download it anew")
    return size


READERS: dict[str, Callable[[Path], KeyFile]] = {
    "": _folder, ".hdf5": _hdf5, ".h5": _hdf5,
    ".fvecs": partial(_vecs, kind="f4"), ".ivecs": partial(_vecs, kind="i4"), ".bvecs": partial(_vecs, kind="u1"),
    ".fbin": partial(_bin, kind="f4"), ".u8bin": partial(_bin, kind="u1"),
}  # fmt: skip
