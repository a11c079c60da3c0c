"""Reads a stranger's file in a process of its own: `softdb.formats.collections` starts this file as a program.

The process may take little memory and time, write nothing, open nothing more, and send nothing but arrays and JSON.
It imports no torch, and of softdb only what needs none.
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

FLOOR = 1 << 30  # bytes of memory for libraries, a chunk and a batch; a file adds twice its size
SECONDS = 60  # of CPU for a file, which adds a second for each megabyte
BATCH = 1 << 24  # bytes of vectors
DEFLATE = 1032  # times that a packed file may be larger, by zlib's own account
PART = struct.Struct("<cQ")  # a mark, and the number of bytes that follow
DATA, END, REFUSAL, ERROR = b"d", b"z", b"r", b"e"

_Range = Callable[[int, int], tuple[Any, Any]]  # ids and vectors of some rows


def room(size: int) -> int:
    """Bytes of memory that reading a file of some size may take."""
    return FLOOR + 2 * size


def _hdf5(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """The array `train` of an ann-benchmarks file, or `keys`, or its only matrix."""
    import h5py

    opened = h5py.File(file, "r")
    for link in opened:
        if not isinstance(opened.get(link, getlink=True), h5py.HardLink):
            raise BadInput(f"{path.name}: {shown(link)} is a link, which is not followed; copy the array into the file")
    matrices = [name for name, array in opened.items() if getattr(array, "ndim", 0) == 2]
    wanted = [name for name in ("train", "keys") if name in matrices] or matrices
    if not wanted or (len(wanted) > 1 and wanted is matrices) or opened[wanted[0]].dtype.kind not in "fiu":
        raise BadInput(f"{path.name} holds {shown(list(opened))}; expected an array train, (n, d) numbers")
    keys = opened[wanted[0]]
    if keys.is_virtual or keys.external:
        raise BadInput(f"{path.name}: {shown(wanted[0])} lies in other files, which are not read; copy it here")
    stored = min(keys.id.get_storage_size(), os.fstat(file.fileno()).st_size)
    if keys.size * keys.dtype.itemsize > stored * DEFLATE:
        raise BadInput(f"{path.name} says {shown(keys.shape)} vectors and holds {stored:,} bytes of them; write all")
    dtype, distance = keys.dtype.newbyteorder("="), opened.attrs.get("distance")
    metric = distance.decode() if isinstance(distance, bytes) else None if distance is None else str(distance)
    head = {"rows": len(keys), "width": keys.shape[1], "dtype": dtype.str, "metric": metric and metric[:100]}

    def part(start: int, stop: int) -> tuple[Any, Any]:
        return np.arange(start, stop), keys[start:stop].astype(dtype)

    yield from _sliced(head, size, part)


def _sliced(head: dict[str, Any], size: int, part: _Range) -> Iterator[Any]:
    """The head of a file of vectors, then of each batch its ids and its vectors."""
    yield head
    rows, step = head["rows"], max(1, min(size, BATCH // max(1, head["width"] * np.dtype(head["dtype"]).itemsize)))
    for start in range(0, rows, step):
        yield from part(start, min(start + step, rows))


def _faiss(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """An index that keeps whole vectors: flat, IVF flat or HNSW flat, also with ids of its own."""
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
            f"{path.name} is an {type(inner).__name__}, of which no vectors can be read (flat, IVF flat and HNSW flat "
            "keep them whole); import them from their source"
        )
    metric = {faiss.METRIC_INNER_PRODUCT: "dot", faiss.METRIC_L2: "l2"}.get(index.metric_type)
    if metric is None:
        raise BadInput(f"{path.name} compares by a metric that softdb has not; expected inner products or L2")
    rows, vectors = _flat(faiss, inner) if isinstance(inner, faiss.IndexFlat) else _lists(faiss, inner)

    def part(start: int, stop: int, _owner: Any = (owner, data)) -> tuple[Any, Any]:
        places, keys = vectors(start, stop)
        return places if ids is None else ids[places], keys

    yield from _sliced({"rows": rows, "width": inner.d, "dtype": "<f4", "metric": metric}, size, part)


def _flat(faiss: Any, index: Any) -> tuple[int, _Range]:
    if index.codes.size() < index.ntotal * index.d * 4:
        raise ValueError(f"it says {index.ntotal} vectors and holds fewer")
    return index.ntotal, lambda start, stop: (np.arange(start, stop), index.reconstruct_n(start, stop - start))


def _lists(faiss: Any, index: Any) -> tuple[int, _Range]:
    """List after list: an index by lists knows no order of its vectors."""
    lists = index.invlists
    if index.code_size != index.d * 4:
        raise ValueError(f"its codes have {index.code_size} bytes for {index.d} numbers")
    ends = np.cumsum([lists.list_size(number) for number in range(index.nlist)] or [0])

    def part(start: int, stop: int) -> tuple[Any, Any]:
        places, keys = [np.empty(0, np.int64)], [np.empty((0, index.d), np.float32)]
        first, last = np.searchsorted(ends, (start, stop - 1), "right")
        for number in range(first, last + 1):
            length = lists.list_size(number)
            if length:
                before = int(ends[number]) - length
                within = slice(max(start - before, 0), stop - before)
                codes = faiss.rev_swig_ptr(lists.get_codes(number), length * index.code_size)
                places.append(faiss.rev_swig_ptr(lists.get_ids(number), length)[within])
                keys.append(codes.view(np.float32).reshape(length, index.d)[within])
        return np.concatenate(places), np.concatenate(keys)

    return int(ends[-1]), part


def _qdrant(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Points in SQLite: each is a pickle, of which nothing is run. `name` is that of the vector, where it has one."""
    from softdb.store.connect import connect

    connection = connect(path, False)
    steps = iter(range(1 + path.stat().st_size // 1000))
    connection.set_progress_handler(lambda: next(steps, None) is None, 10_000)
    if [row[2] for row in connection.execute("PRAGMA main.table_list(points)")] != ["table"] or any(
        row[6] for row in connection.execute("PRAGMA main.table_xinfo(points)")
    ):
        raise BadInput(f"{path.name}: points is no plain table; only a folder as Qdrant writes it is read")
    ((rows,),) = connection.execute("SELECT coalesce(max(rowid), 0) FROM points")
    yield {"rows": rows}
    blobs = connection.execute("SELECT point FROM points")
    while part := [_Unpickled(io.BytesIO(blob)).load().__dict__ for (blob,) in islice(blobs, size)]:
        keys = [point["vector"] if name is None else (point["vector"] or {}).get(name) for point in part]
        yield [(point["id"], key, point["payload"], None) for point, key in zip(part, keys, strict=True)]


class _Point:
    """A pickled model: its fields, and nothing of its class."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state["__dict__"])


class _Unpickled(pickle.Unpickler):
    """Unpickles points, and refuses whatever else a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("qdrant_client.") and name == "PointStruct":
            return _Point
        raise pickle.UnpicklingError(f"a point names {module}.{name}, which is not run")


def _chroma(path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """By the package, of a copy: opening a folder may change it."""
    import chromadb

    from softdb.store.connect import connect

    with connect(path / "chroma.sqlite3", False) as database:
        for kind, what in database.execute("SELECT type, name FROM sqlite_schema WHERE type IN ('view', 'trigger')"):
            raise BadInput(f"chroma.sqlite3 holds the {kind} {shown(what)}, which Chroma does not write; remove it")
    database.close()
    client = chromadb.PersistentClient(str(path), settings=chromadb.config.Settings(anonymized_telemetry=False))
    names = [collection.name for collection in client.list_collections()]
    if (name is None and len(names) != 1) or (name is not None and name not in names):
        yield {"names": names}
        return
    found = client.get_collection(names[0] if name is None else name)
    space = (found.configuration.get("hnsw") or found.configuration.get("spann") or {}).get("space")
    yield {"rows": found.count(), "metric": str(space)}
    for start in range(0, found.count(), size):
        part = found.get(limit=size, offset=start, include=["embeddings", "documents", "metadatas"])
        payloads = [cells and dict(sorted(cells.items())) for cells in part["metadatas"]]  # they come in any order
        yield list(zip(part["ids"], part["embeddings"].tolist(), payloads, part["documents"], strict=True))


_OTHERS = ("Panorama", "Dedup")  # ends of the names of FAISS' classes that keep vectors, or ids, in another way
_KINDS = {"hdf5": _hdf5, "faiss": _faiss, "qdrant": _qdrant, "chroma": _chroma}


def content(kind: str, path: Path) -> Any:
    """Open a file for a library that needs no path."""
    if kind != "faiss":
        return path.open("rb") if kind == "hdf5" else None
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def opened(kind: str, path: Path, file: Any, size: int, name: str | None) -> Iterator[Any]:
    """Parts of a file of some kind: a head, then arrays, or lists of records. Errors are of every kind."""
    return _KINDS[kind](path, file, size, name)


def _confine(kind: str, room: int) -> None:
    """Give up what reading needs not; libraries, and codecs of texts, have been imported by then."""
    for codec in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(codec)
    __import__({"hdf5": "h5py", "qdrant": "softdb.store.connect", "chroma": "chromadb"}.get(kind, kind))
    limits = {"CORE": 0, "DATA": room}
    if kind != "chroma":  # of which a copy is opened, by a package with threads and files
        limits |= {"FSIZE": 0, "NOFILE": 3 if kind != "qdrant" else 8}
    for what, limit in limits.items():
        number = getattr(resource, f"RLIMIT_{what}")
        hard = resource.getrlimit(number)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (least, least))


def _send(mark: bytes, data: Any) -> None:
    sys.stdout.buffer.write(PART.pack(mark, len(data)))
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def main(kind: str, path: str, room: int, seconds: int, size: int, name: str | None) -> None:
    """Send the parts of a file, or the error that they end in."""
    try:
        file = content(kind, Path(path))
        _confine(kind, room)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU; ends the process also within a library
        for part in opened(kind, Path(path), file, size, name):
            _send(DATA, part.tobytes() if isinstance(part, np.ndarray) else json.dumps(part).encode())
        _send(END, b"")
    except Exception as error:  # libraries have errors of every kind
        memory = isinstance(error, MemoryError) or "bad_alloc" in str(error)
        reason = "it would take more memory than its size justifies" if memory else " ".join(str(error).split())
        _send(REFUSAL if isinstance(error, BadInput) else ERROR, (reason or type(error).__name__)[:300].encode())


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
