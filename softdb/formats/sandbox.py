"""Reader of untrusted files in a separate process: `softdb.formats.collections` starts this file as a program.

Resource limits bound the process's memory and CPU time, and forbid it to write or open files. The process sends only
arrays and JSON. This module does not import torch, nor modules of softdb that import torch.
"""

from __future__ import annotations

import codecs
import io
import json
import mmap
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import shown
from softdb.errors import BadInput

FLOOR = 1 << 30  # bytes of memory for libraries, a chunk and a batch; the limit is this and twice the file's size
SECONDS = 60  # CPU seconds allowed for a file, and one more for each megabyte
BATCH = 1 << 24  # largest number of bytes of vectors in a batch
DEFLATE = 1032  # largest compression ratio of zlib
PART = struct.Struct("<cQ")  # header of a part: a mark, and the number of bytes that follow
DATA, END, REFUSAL, ERROR = b"d", b"z", b"r", b"e"  # marks: data, end of data, message of BadInput, other message

_Range = Callable[[int, int], tuple[Any, Any]]  # (start, stop) -> ids and vectors of these rows


def room(size: int) -> int:
    """Return the number of bytes of memory that the process may use to read a file of `size` bytes."""
    return FLOOR + 2 * size


def _hdf5(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Read the vectors in an HDF5 file: the array `train` (of ann-benchmarks), or `keys`, or the only matrix."""
    import h5py

    opened = h5py.File(file, "r")
    for link in opened:
        if not isinstance(opened.get(link, getlink=True), h5py.HardLink):
            raise BadInput(f"{path.name}: {shown(link)} is a link, which is not followed; copy the array into the file")
    matrices = [name for name, array in opened.items() if getattr(array, "ndim", 0) == 2]
    wanted = [name for name in ("train", "keys") if name in matrices] or matrices
    if not wanted or (len(wanted) > 1 and wanted is matrices) or opened[wanted[0]].dtype.kind not in "fiu":
        raise BadInput(f"{path.name} holds {shown(list(opened))}; expected an array of shape (n, d) named 'train'")
    keys = opened[wanted[0]]
    if keys.is_virtual or keys.external:
        raise BadInput(f"{path.name}: {shown(wanted[0])} is stored in other files, which are not read; copy it here")
    stored = min(keys.id.get_storage_size(), os.fstat(file.fileno()).st_size)
    if keys.size * keys.dtype.itemsize > stored * DEFLATE:
        raise BadInput(f"{path.name} claims {shown(keys.shape)} vectors but stores {stored:,} bytes; write all vectors")
    dtype, distance = keys.dtype.newbyteorder("="), opened.attrs.get("distance")
    metric = distance.decode() if isinstance(distance, bytes) else None if distance is None else str(distance)
    head = {"rows": len(keys), "width": keys.shape[1], "dtype": dtype.str, "metric": metric and metric[:100]}

    def read(start: int, stop: int) -> tuple[Any, Any]:
        return np.arange(start, stop), keys[start:stop].astype(dtype)

    yield from _batches(head, size, read)


def _batches(head: dict[str, Any], size: int, read: _Range) -> Iterator[Any]:
    """Yield `head`, which describes a file of vectors, then for each batch an array of ids and an array of vectors."""
    yield head
    rows, step = head["rows"], max(1, min(size, BATCH // max(1, head["width"] * np.dtype(head["dtype"]).itemsize)))
    for start in range(0, rows, step):
        yield from read(start, min(start + step, rows))


def _faiss(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Read a FAISS index that stores its vectors uncompressed: flat, IVF flat or HNSW flat, also with a map of ids."""
    faiss: Any = __import__("faiss")
    flags = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY
    data = np.frombuffer(file, np.uint8)
    faiss.set_deserialization_vector_byte_limit(data.size)
    try:
        owner = faiss.read_index(faiss.ZeroCopyIOReader(faiss.swig_ptr(data), data.size), flags)
    except RuntimeError as error:
        if "OnDisk" not in str(error):
            raise
        advice = "import the indexes that it was merged from"
        raise BadInput(f"{path.name} keeps its lists in another file, which is not read; {advice}") from None
    index = inner = faiss.downcast_index(owner)
    ids = None
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        ids, inner = faiss.vector_to_array(index.id_map), faiss.downcast_index(index.index)
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    if not isinstance(inner, faiss.IndexFlat | faiss.IndexIVFFlat) or type(inner).__name__.endswith(_OTHERS):
        raise BadInput(
            f"{path.name} is an {type(inner).__name__}, of which no vectors can be read; expected flat, IVF flat or "
            "HNSW flat: import the vectors from their source"
        )
    metric = {faiss.METRIC_INNER_PRODUCT: "dot", faiss.METRIC_L2: "l2"}.get(index.metric_type)
    if metric is None:
        raise BadInput(f"{path.name} has a metric that softdb does not have; expected inner products or L2")
    rows, vectors = _flat(faiss, inner) if isinstance(inner, faiss.IndexFlat) else _lists(faiss, inner)

    def read(start: int, stop: int, _owner: Any = (owner, data)) -> tuple[Any, Any]:
        numbers, keys = vectors(start, stop)
        return numbers if ids is None else ids[numbers], keys

    yield from _batches({"rows": rows, "width": inner.d, "dtype": "<f4", "metric": metric}, size, read)


def _flat(faiss: Any, index: Any) -> tuple[int, _Range]:
    if index.codes.size() < index.ntotal * index.d * 4:
        raise ValueError(f"it claims {index.ntotal} vectors but holds fewer")
    return index.ntotal, lambda start, stop: (np.arange(start, stop), index.reconstruct_n(start, stop - start))


def _lists(faiss: Any, index: Any) -> tuple[int, _Range]:
    """Return the number of vectors in an IVF index, and a function that reads a range of them, list by list."""
    lists = index.invlists
    if index.code_size != index.d * 4:
        raise ValueError(f"its codes have {index.code_size} bytes for {index.d} numbers")
    ends = np.cumsum([lists.list_size(number) for number in range(index.nlist)] or [0])

    def read(start: int, stop: int) -> tuple[Any, Any]:
        numbers, keys = [np.empty(0, np.int64)], [np.empty((0, index.d), np.float32)]
        first, last = np.searchsorted(ends, (start, stop - 1), "right")
        for number in range(first, last + 1):
            length = lists.list_size(number)
            if length:
                before = int(ends[number]) - length
                overlap = slice(max(start - before, 0), stop - before)
                codes = faiss.rev_swig_ptr(lists.get_codes(number), length * index.code_size)
                numbers.append(faiss.rev_swig_ptr(lists.get_ids(number), length)[overlap])
                keys.append(codes.view(np.float32).reshape(length, index.d)[overlap])
        return np.concatenate(numbers), np.concatenate(keys)

    return int(ends[-1]), read


def _qdrant(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Read Qdrant's points from SQLite: pickles, whose code is never run. `name`: the vector's name, if it has one."""
    from softdb.store.connect import connect

    connection = connect(path, False)
    steps = iter(range(1 + path.stat().st_size // 1000))
    connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
    if [row[2] for row in connection.execute("PRAGMA main.table_list(points)")] != ["table"] or any(
        row[6] for row in connection.execute("PRAGMA main.table_xinfo(points)")
    ):
        raise BadInput(f"{path.name} has no plain table points; give a folder that Qdrant has written")
    ((rows,),) = connection.execute("SELECT coalesce(max(rowid), 0) FROM points")
    yield {"rows": rows}
    blobs = connection.execute("SELECT point FROM points")
    while points := [_PointUnpickler(io.BytesIO(blob)).load().__dict__ for (blob,) in islice(blobs, size)]:
        keys = [point["vector"] if name is None else (point["vector"] or {}).get(name) for point in points]
        yield [(point["id"], key, point["payload"], None) for point, key in zip(points, keys, strict=True)]


class _Point:
    """A stand-in for Qdrant's class of points: takes the fields of a pickled point and runs no code of Qdrant."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state["__dict__"])


class _PointUnpickler(pickle.Unpickler):
    """Unpickler of points, which refuses every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("qdrant_client.") and name == "PointStruct":
            return _Point
        raise pickle.UnpicklingError(f"a point names {module}.{name}, which is not run")


def _chroma(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Read a copy of a Chroma folder by the package chromadb."""
    import chromadb

    from softdb.store.connect import connect

    with connect(path / "chroma.sqlite3", False) as database:
        for kind, item in database.execute("SELECT type, name FROM sqlite_schema WHERE type IN ('view', 'trigger')"):
            raise BadInput(f"chroma.sqlite3 holds the {kind} {shown(item)}, which Chroma does not write; remove it")
    database.close()
    client = chromadb.PersistentClient(str(path), settings=chromadb.config.Settings(anonymized_telemetry=False))
    names = [collection.name for collection in client.list_collections()]
    if (name is None and len(names) != 1) or (name is not None and name not in names):
        yield {"names": names}
        return
    collection = client.get_collection(names[0] if name is None else name)
    space = (collection.configuration.get("hnsw") or collection.configuration.get("spann") or {}).get("space")
    yield {"rows": collection.count(), "metric": str(space)}
    for start in range(0, collection.count(), size):
        batch = collection.get(limit=size, offset=start, include=["embeddings", "documents", "metadatas"])
        payloads = [fields and dict(sorted(fields.items())) for fields in batch["metadatas"]]  # their order varies
        yield list(zip(batch["ids"], batch["embeddings"].tolist(), payloads, batch["documents"], strict=True))


_OTHERS = ("Panorama", "Dedup")  # suffixes of FAISS classes that store vectors or ids in another layout
# each yields the head that describes a file, then arrays or lists of records; it may raise an error of any class
READERS = {"hdf5": _hdf5, "faiss": _faiss, "qdrant": _qdrant, "chroma": _chroma}


def content(kind: str, path: Path) -> Any:
    """Open a file for the libraries that read open files (h5py, FAISS); return None for those that take a path."""
    if kind != "faiss":
        return path.open("rb") if kind == "hdf5" else None
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _confine(kind: str, room: int) -> None:
    """Import the libraries and codecs that reading needs, then set the process's resource limits."""
    for codec in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(codec)
    __import__({"hdf5": "h5py", "qdrant": "softdb.store.connect", "chroma": "chromadb"}.get(kind, kind))
    limits = {"CORE": 0, "DATA": room}
    if kind != "chroma":  # Chroma's package needs threads and files, and reads a copy
        limits |= {"FSIZE": 0, "NOFILE": 3 if kind != "qdrant" else 8}
    for name, limit in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (lower, lower))


def _send(mark: bytes, data: Any) -> None:
    sys.stdout.buffer.write(PART.pack(mark, len(data)))
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main(kind: str, path: str, room: int, seconds: int, size: int, name: str | None) -> None:
    """Send the parts of a file to standard output; after an error send the error's message."""
    try:
        file = content(kind, Path(path))
        _confine(kind, room)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # limits CPU time, also inside a library's code
        for data in READERS[kind](Path(path), file, size, name):
            _send(DATA, data.tobytes() if isinstance(data, np.ndarray) else json.dumps(data).encode())
        _send(END, b"")
    except Exception as error:  # libraries raise errors of any class
        memory = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        reason = "it would take more memory than its size justifies" if memory else " ".join(str(error).split())
        mark = REFUSAL if isinstance(error, BadInput | PermissionError) else ERROR
        _send(mark, (reason or type(error).__name__)[:300].encode())


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
