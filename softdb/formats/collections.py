"""Collections of other vector databases, as those write them: Chroma, Qdrant's local mode, LanceDB, FAISS; HDF5.

Files that libraries read which are not made for strangers' files are read by `sandbox.py` in a process of its own. It
may crash, lie and take its time: it sends bytes of arrays and JSON of bounded sizes, never pickles.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import MAX_DIM, Array, shown
from softdb.errors import BadInput, MissingDependency
from softdb.formats import sandbox
from softdb.formats.arrays import metric_of
from softdb.formats.rows import Fields, Header, OnError, Rows, passed_over, readable, require_plain, text_in
from softdb.formats.tables import read_table, table_in
from softdb.visible import visible

MARKS = {  # what lies in the folder of a kind
    "state.json": "datasets", "dataset_dict.json": "datasets", "chroma.sqlite3": "chroma", "meta.json": "qdrant",
    "*.lance": "lancedb",
}  # fmt: skip
_METRICS = {"cosine": "cosine", "l2": "l2", "euclid": "l2", "ip": "dot", "dot": "dot"}
VECTORS = {".faiss": "faiss", ".index": "faiss", ".hdf5": "hdf5", ".h5": "hdf5"}  # files of one matrix
_NEEDS = {"faiss": ("faiss", "cpu"), "hdf5": ("h5py", "hdf5"), "chroma": ("chromadb", "chroma")}  # module, extra
_VERSION = "; it may be of another version of what wrote it"
_PROGRAM = (
    "import sys; sys.path[:] = eval(sys.argv.pop()); import runpy; runpy.run_path(sys.argv.pop(), None, '__main__')"
)
_ROOT = str(Path(sandbox.__file__).parents[2])  # where softdb lies, however it is installed
_SLOW = "its reader did not answer in time"
_Batch = tuple[list[Any], Any, list[Any], list[Any]]  # ids, keys, payloads, texts of some records


def read_collection(
    path: Path, kind: str, name: str | None, fields: Fields, size: int, on_error: OnError | None
) -> Iterator[Rows]:
    """The records of a collection. Raises BadInput where it is none that can be read."""
    with readable(path, advice=_VERSION):
        if path.is_dir():
            require_plain(path)
        if kind == "lancedb":
            tables = sorted(table.stem for table in path.glob("*.lance"))
            folder = path / f"{_chosen(path, name, tables)}.lance"
            return read_table(table_in(folder, ".lance", size), fields, size, on_error)
        metric, count, batches = _vectors(path, kind, size) if kind in VECTORS else COLLECTIONS[kind](path, name, size)
        return _rows(path, metric, count, batches, fields.text, on_error)


def _rows(
    path: Path, metric: str | None, count: int, batches: Iterator[_Batch], text: str | None, on_error: OnError | None
) -> Iterator[Rows]:
    """Batches as every format gives them, their texts taken from a field of the payload where one is named."""
    at, width = 0, 0
    while True:
        with readable(path, advice=_VERSION):
            batch = next(batches, None)
        if batch is None:
            return
        ids, keys, payloads, texts = batch
        bad = {i: f"record {shown(ids[i])} has no vector" for i, key in enumerate(keys) if key is None}
        if text is not None:
            _take_texts(batch, text, bad)
        width = width or next((len(key) for key in keys if key is not None), 0)
        header = Header(width, None, None, "float32", metric, ()) if metric is not None and width else None
        share, places = (at + len(ids)) / max(count, 1), range(at, at + len(ids))
        rows = Rows(path, header, share, places, ids, keys, None, payloads, texts, what="row")
        yield from passed_over(rows, bad, on_error)
        at += len(ids)


def _take_texts(batch: _Batch, name: str, bad: dict[int, str]) -> None:
    """Move a field of the payloads to the texts."""
    ids, _, payloads, texts = batch
    for i, payload in enumerate(payloads):
        row = payload if isinstance(payload, dict) else {}
        try:
            if texts[i] is not None:
                raise BadInput(f"its text is its document; leave out the text {name!r}")
            texts[i] = text_in(row, name, needed=False)
            payloads[i] = {field: cell for field, cell in row.items() if field != name} or None
        except BadInput as error:
            bad[i] = f"record {shown(ids[i])}: {error}"


def _chosen(path: Path, name: str | None, names: list[str]) -> str:
    """The collection of that name, or the only one."""
    if name in names or (name is None and len(names) == 1):
        return name or names[0]
    held = "no collection" if not names else "several collections" if name is None else f"no collection {name!r}"
    raise BadInput(f"{path.name} holds {held}; name one of {shown(names)} (--collection)")


def _opened(path: Path, kind: str, size: int, name: str | None = None) -> tuple[dict[str, Any], Iterator[Array]]:
    """Return the head of a file or folder that a process of its own reads, and its further parts."""
    module, extra = _NEEDS.get(kind, ("softdb", ""))
    if find_spec(module) is None:
        raise MissingDependency(f"{path.name} needs {module}; pip install 'softdb[{extra}]'")
    received = parts(path, kind, size, name)
    return json.loads(next(received).tobytes()), received


def _chroma(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """By the package, in a copy: opening a folder may change it."""
    copied = tempfile.mkdtemp()
    try:
        folder = Path(shutil.copytree(path, Path(copied, path.name)))
        head, received = _opened(folder, "chroma", size, name)
    except BaseException:
        shutil.rmtree(copied)
        raise
    weakref.finalize(received, shutil.rmtree, copied, ignore_errors=True)
    if "names" in head:
        _chosen(path, name, head["names"])
    return _METRICS.get(head["metric"]), head["rows"], _records(received)


def _qdrant(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """From SQLite: each point is a pickle, of which nothing is run."""
    collections = json.loads((path / "meta.json").read_bytes())["collections"]
    name = _chosen(path, name, sorted(collections))
    vectors = collections[name]["vectors"] or {}
    if "size" not in vectors and len(vectors) != 1:
        names = shown(sorted(vectors))
        raise BadInput(f"{path.name}: collection {name!r} has the vectors {names} for a point; softdb takes one")
    named = None if "size" in vectors else next(iter(vectors))
    distance = (vectors if named is None else vectors[named])["distance"].lower()
    place = path / "collection" / name / "storage.sqlite"
    if Path(name).name != name:
        raise BadInput(f"{path.name}: the collection {name!r} would lie outside of the folder, which is not followed")
    if distance not in _METRICS:
        compares = f"collection {name!r} compares by {shown(distance)}"
        raise BadInput(f"{path.name}: {compares}; expected cosine, dot or euclid")
    head, received = _opened(place, "qdrant", size, named)
    return _METRICS[distance], head["rows"], _records(received)


def _vectors(path: Path, kind: str, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """Ids and vectors of an index of FAISS, or of an array in HDF5."""
    head, received = _opened(path, VECTORS[kind], size)
    width, dtype, metric = head["width"], np.dtype(head["dtype"]), head["metric"]
    if not 0 < width <= MAX_DIM or dtype.kind not in "fiu":
        raise ValueError(f"it holds vectors of {width:,} numbers of {dtype}")

    def batches() -> Iterator[_Batch]:
        for part in received:
            ids, keys = part.view(np.int64).tolist(), next(received).view(dtype).reshape(-1, width)
            if len(ids) != len(keys):
                raise ValueError(f"it holds {len(ids)} ids for {len(keys)} vectors")
            yield ids, keys, [None] * len(ids), [None] * len(ids)

    return metric and metric_of(metric, path).value, head["rows"], batches()


def _records(received: Iterator[Array]) -> Iterator[_Batch]:
    for part in received:
        ids, vectors, payloads, texts = map(list, zip(*json.loads(part.tobytes()), strict=True))
        keys = [None if vector is None else np.array(vector, np.float64) for vector in vectors]
        if any(key is not None and key.ndim != 1 for key in keys):
            raise ValueError("a record has several vectors")
        yield ids, keys, payloads, texts


def parts(path: Path, kind: str, size: int, name: str | None = None) -> Generator[Array, None, None]:
    """Yield the bytes of each part of a file or folder, as `softdb.formats.sandbox` sends them. Raises BadInput."""
    length = sum(part.stat().st_size for part in (path, *path.rglob("*")))
    seconds = sandbox.SECONDS + length // 1_000_000
    order = json.dumps([kind, str(path.absolute()), sandbox.room(length), seconds, size, name])
    try:
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _PROGRAM, order, sandbox.__file__, repr([*sys.path, _ROOT])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read by a process of its own ({error})") from None
    try:
        yield from _received(process, seconds + 5, 4 * (sandbox.BATCH + length))
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        text = f"{path.name} cannot be read ({error}); it is damaged, or of another version of its writer"
        raise BadInput(text) from None
    finally:
        process.kill()
        process.communicate()


def _received(process: subprocess.Popen[bytes], seconds: int, most: int) -> Iterator[Array]:
    while True:
        limit = time.monotonic() + seconds
        mark, length = sandbox.PART.unpack(_bytes(process, sandbox.PART.size, limit).data)
        if length > most:
            raise ValueError(f"a part of more than {most:,} bytes")
        part = _bytes(process, length, limit)
        if mark == sandbox.END:
            return
        if mark != sandbox.DATA:
            text = visible(part.tobytes().decode(errors="replace"))
            raise BadInput(text) if mark == sandbox.REFUSAL else ValueError(text)
        yield part


def _bytes(process: subprocess.Popen[bytes], count: int, limit: float) -> Array:
    buffer, done = np.empty(count, np.uint8), 0
    pipe, waiting = process.stdout.fileno(), select.poll()  # type: ignore[union-attr]
    waiting.register(pipe, select.POLLIN)
    while done < count:
        if not waiting.poll(max(0.0, limit - time.monotonic()) * 1000):
            raise ValueError(_SLOW)
        length = os.readv(pipe, [buffer[done:].data])
        if not length:
            code = process.wait(5)
            how = f"its reader ended by {signal.Signals(-code).name}" if code < 0 else f"its reader ended: {code}"
            raise ValueError(_SLOW if code == -signal.SIGPROF else how)
        done += length
    return buffer


COLLECTIONS: dict[str, Callable[[Path, str | None, int], tuple[str | None, int, Iterator[_Batch]]]] = {
    "chroma": _chroma, "qdrant": _qdrant,
}  # fmt: skip
