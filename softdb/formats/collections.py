"""Collections in the formats of other vector databases: Chroma, Qdrant's local mode, LanceDB, FAISS; and HDF5.

A separate process, `sandbox.py`, reads formats whose libraries are unsafe for untrusted files. That process may crash,
send wrong data or hang, so it sends only JSON and the bytes of arrays, both of bounded size, and never pickles.
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
from softdb.tables.arrow_tables import read_table, table_in
from softdb.tables.rows import Fields, Header, OnError, Rows, good_rows, readable, require_plain, text_in
from softdb.visible import visible

MARKS = {  # a file (or pattern) that only folders of one kind have -> that kind
    "state.json": "datasets", "dataset_dict.json": "datasets", "chroma.sqlite3": "chroma", "meta.json": "qdrant",
    "*.lance": "lancedb",
}  # fmt: skip
_METRICS = {"cosine": "cosine", "l2": "l2", "euclid": "l2", "ip": "dot", "dot": "dot"}
VECTORS = {".faiss": "faiss", ".index": "faiss", ".hdf5": "hdf5", ".h5": "hdf5"}  # files with only a matrix
_NEEDS = {"faiss": ("faiss", "cpu"), "hdf5": ("h5py", "hdf5"), "chroma": ("chromadb", "chroma")}  # module, extra
_VERSION = "; another version of its program may have written it"
_PROGRAM = (
    "import sys; sys.path[:] = eval(sys.argv.pop()); import runpy; runpy.run_path(sys.argv.pop(), None, '__main__')"
)
_ROOT = str(Path(sandbox.__file__).parents[2])  # directory that holds the package softdb
_SLOW = "its reader did not answer in time"
_Batch = tuple[list[Any], Any, list[Any], list[Any]]  # ids, keys, payloads and texts of records


def read_collection(
    path: Path, kind: str, name: str | None, fields: Fields, size: int, on_error: OnError | None
) -> Iterator[Rows]:
    """Yield the records of another database's collection. Raises BadInput if the collection cannot be read."""
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
    """Yield batches as `Rows`; the payload's field that `text` names, if any, becomes the record's text."""
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
        yield from good_rows(rows, bad, on_error)
        at += len(ids)


def _take_texts(batch: _Batch, name: str, bad: dict[int, str]) -> None:
    """Move the field `name` of each payload to the texts; note in `bad` the faults of records where that fails."""
    ids, _, payloads, texts = batch
    for i, payload in enumerate(payloads):
        row = payload if isinstance(payload, dict) else {}
        try:
            if texts[i] is not None:
                raise BadInput(f"its document is its text already; do not name another text ({name!r})")
            texts[i] = text_in(row, name, needed=False)
            payloads[i] = {field: value for field, value in row.items() if field != name} or None
        except BadInput as error:
            bad[i] = f"record {shown(ids[i])}: {error}"


def _chosen(path: Path, name: str | None, names: list[str]) -> str:
    """Return the name of the collection to read: `name`, or the only one of `names`. Raises BadInput."""
    if name in names or (name is None and len(names) == 1):
        return name or names[0]
    contents = "no collection" if not names else "several collections" if name is None else f"no collection {name!r}"
    raise BadInput(f"{path.name} holds {contents}; name one of {shown(names)} (--collection)")


def _opened(path: Path, kind: str, size: int, name: str | None = None) -> tuple[dict[str, Any], Iterator[Array]]:
    """Read a file or folder in a separate process; return the head, which describes it, and the parts of the data."""
    module, extra = _NEEDS.get(kind, ("softdb", ""))
    if find_spec(module) is None:
        raise MissingDependency(f"{path.name} needs {module}; pip install 'softdb[{extra}]'")
    received = parts(path, kind, size, name)
    return json.loads(next(received).tobytes()), received


def _chroma(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """Read a folder of Chroma by its package. The package gets a copy, as it may change a folder that it opens."""
    temporary = tempfile.mkdtemp()
    try:
        folder = Path(shutil.copytree(path, Path(temporary, path.name)))
        head, received = _opened(folder, "chroma", size, name)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    weakref.finalize(received, shutil.rmtree, temporary, ignore_errors=True)
    if "names" in head:
        _chosen(path, name, head["names"])
    return _METRICS.get(head["metric"]), head["rows"], _records(received)


def _qdrant(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """Read the points in Qdrant's SQLite file. Each point is a pickle, but no code in the pickle is run."""
    collections = json.loads((path / "meta.json").read_bytes())["collections"]
    name = _chosen(path, name, sorted(collections))
    vectors = collections[name]["vectors"] or {}
    if "size" not in vectors and len(vectors) != 1:
        names = shown(sorted(vectors))
        raise BadInput(f"{path.name}: collection {name!r} has the vectors {names} for a point; softdb takes one")
    vector_name = None if "size" in vectors else next(iter(vectors))
    distance = (vectors if vector_name is None else vectors[vector_name])["distance"].lower()
    file = path / "collection" / name / "storage.sqlite"
    if Path(name).name != name:
        raise BadInput(f"{path.name}: the collection {name!r} would lie outside of the folder, which is not read")
    if distance not in _METRICS:
        metric = f"collection {name!r} compares by {shown(distance)}"
        raise BadInput(f"{path.name}: {metric}; expected cosine, dot or euclid")
    head, received = _opened(file, "qdrant", size, vector_name)
    return _METRICS[distance], head["rows"], _records(received)


def _vectors(path: Path, kind: str, size: int) -> tuple[str | None, int, Iterator[_Batch]]:
    """Read a FAISS index or an HDF5 array; return the metric, the number of vectors, and batches of them with ids."""
    head, received = _opened(path, VECTORS[kind], size)
    width, dtype, metric = head["width"], np.dtype(head["dtype"]), head["metric"]
    if not 0 < width <= MAX_DIM or dtype.kind not in "fiu":
        raise ValueError(f"it holds vectors of {width:,} numbers of {dtype}")

    def batches() -> Iterator[_Batch]:
        for data in received:
            ids, keys = data.view(np.int64).tolist(), next(received).view(dtype).reshape(-1, width)
            if len(ids) != len(keys):
                raise ValueError(f"it holds {len(ids)} ids for {len(keys)} vectors")
            yield ids, keys, [None] * len(ids), [None] * len(ids)

    return metric and metric_of(metric, path).value, head["rows"], batches()


def _records(received: Iterator[Array]) -> Iterator[_Batch]:
    for data in received:
        ids, vectors, payloads, texts = map(list, zip(*json.loads(data.tobytes()), strict=True))
        keys = [None if vector is None else np.array(vector, np.float64) for vector in vectors]
        if any(key is not None and key.ndim != 1 for key in keys):
            raise ValueError("a record has several vectors")
        yield ids, keys, payloads, texts


def parts(path: Path, kind: str, size: int, name: str | None = None) -> Generator[Array, None, None]:
    """Read a file or folder by the process `softdb.formats.sandbox`; yield the bytes that it sends. Raises BadInput."""
    length = sum(file.stat().st_size for file in (path, *path.rglob("*")))
    seconds = sandbox.SECONDS + length // 1_000_000
    arguments = json.dumps([kind, str(path.absolute()), sandbox.room(length), seconds, size, name])
    try:
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", _PROGRAM, arguments, sandbox.__file__, repr([*sys.path, _ROOT])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read in a separate process ({error})") from None
    try:
        yield from _received(process, seconds + 5, 4 * (sandbox.BATCH + length))
    except BadInput:  # of the reader: the file is not damaged
        raise
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        text = f"{path.name} cannot be read ({error}); it is damaged, or of another version of its writer"
        raise BadInput(text) from None
    finally:
        process.kill()
        process.communicate()


def _received(process: subprocess.Popen[bytes], seconds: int, max_bytes: int) -> Iterator[Array]:
    while True:
        deadline = time.monotonic() + seconds
        mark, length = sandbox.PART.unpack(_bytes(process, sandbox.PART.size, deadline).data)
        if length > max_bytes:
            raise ValueError(f"a part of more than {max_bytes:,} bytes")
        data = _bytes(process, length, deadline)
        if mark == sandbox.END:
            return
        if mark != sandbox.DATA:
            text = visible(data.tobytes().decode(errors="replace"))
            raise BadInput(text) if mark == sandbox.REFUSAL else ValueError(text)
        yield data


def _bytes(process: subprocess.Popen[bytes], count: int, deadline: float) -> Array:
    buffer, done = np.empty(count, np.uint8), 0
    pipe, poll = process.stdout.fileno(), select.poll()  # type: ignore[union-attr]
    poll.register(pipe, select.POLLIN)
    while done < count:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ValueError(_SLOW)
        length = os.readv(pipe, [buffer[done:].data])
        if not length:
            code = process.wait(5)
            end = f"its reader ended by {signal.Signals(-code).name}" if code < 0 else f"its reader ended: {code}"
            raise ValueError(_SLOW if code == -signal.SIGPROF else end)
        done += length
    return buffer


COLLECTIONS: dict[str, Callable[[Path, str | None, int], tuple[str | None, int, Iterator[_Batch]]]] = {
    "chroma": _chroma, "qdrant": _qdrant,
}  # fmt: skip
