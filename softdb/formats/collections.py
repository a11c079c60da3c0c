"""Collections of other vector databases, as those write them: Chroma, Qdrant's local mode, LanceDB, FAISS."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sqlite3
import tempfile
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import shown
from softdb.errors import BadInput, MissingDependency
from softdb.formats.lines import Fields, Header
from softdb.formats.rows import OnError, Rows, passed_over, text_in
from softdb.formats.tables import needed, read_table, table_in

__all__ = ["COLLECTIONS", "MARKS", "read_collection"]

MARKS = {  # what lies in the folder of a kind
    "state.json": "datasets", "dataset_dict.json": "datasets", "chroma.sqlite3": "chroma", "meta.json": "qdrant",
    "*.lance": "lancedb",
}  # fmt: skip
_METRICS = {"cosine": "cosine", "l2": "l2", "euclid": "l2", "ip": "dot", "dot": "dot"}
_Found = tuple[list[Any], Any, list[Any], list[Any]]  # ids, keys, payloads, texts of some records


def read_collection(
    path: Path, kind: str, name: str | None, fields: Fields, size: int, on_error: OnError | None
) -> Iterator[Rows]:
    """The records of a collection. Raises BadInput where it is none that can be read."""
    try:
        if kind == "lancedb":
            tables = sorted(one.stem for one in path.glob("*.lance"))
            folder = path / f"{_chosen(path, name, tables)}.lance"
            return read_table(table_in(folder, ".lance", size), fields, size, on_error)
        metric, count, batches = COLLECTIONS[kind](path, name, size)
        return _rows(path, metric, count, batches, fields.text, on_error)
    except (BadInput, MissingDependency):
        raise
    except Exception as error:  # other packages have errors of every kind
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> BadInput:
    said = shown(" ".join(str(error).split()) or type(error).__name__)
    return BadInput(f"{path.name} cannot be read ({said}); it may be of another version of what wrote it")


def _rows(
    path: Path, metric: str | None, count: int, batches: Iterator[_Found], text: str | None, on_error: OnError | None
) -> Iterator[Rows]:
    """Batches as every format gives them, their texts taken from a field of the payload where one is named."""
    at, width = 0, 0
    while True:
        try:
            found = next(batches, None)
        except Exception as error:  # as above
            raise _unreadable(path, error) from None
        if found is None:
            return
        ids, keys, payloads, texts = found
        bad = {i: f"record {shown(ids[i])} has no vector" for i, key in enumerate(keys) if key is None}
        if text is not None:
            _take_texts(found, text, bad)
        width = width or next((len(key) for key in keys if key is not None), 0)
        header = Header(width, None, None, "float32", metric, ()) if metric is not None and width else None
        share, places = (at + len(ids)) / max(count, 1), range(at, at + len(ids))
        yield from passed_over(
            Rows(path, header, share, places, ids, keys, None, payloads, texts, what="row"), bad, on_error
        )
        at += len(ids)


def _take_texts(found: _Found, name: str, bad: dict[int, str]) -> None:
    """Move a field of the payloads to the texts."""
    ids, _, payloads, texts = found
    for i, payload in enumerate(payloads):
        row = payload or {}
        try:
            if texts[i] is not None:
                raise BadInput(f"its text is its document; leave out the text {name!r}")
            texts[i] = text_in(row, name, needed=False)
            payloads[i] = {field: one for field, one in row.items() if field != name} or None
        except BadInput as error:
            bad[i] = f"record {shown(ids[i])}: {error}"


def _chosen(path: Path, name: str | None, names: list[str]) -> str:
    """The collection of that name, or the only one."""
    if name in names or (name is None and len(names) == 1):
        return name or names[0]
    asked = "several collections" if name is None and names else f"no collection {name!r}" if names else "no collection"
    raise BadInput(f"{path.name} holds {asked}; name one of {shown(names)} (--collection)")


def _chroma(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Found]]:
    """By the package, in a copy: opening a folder may change it."""
    chroma = needed("chromadb", "chroma", path.name)
    copied = tempfile.mkdtemp()
    try:
        shutil.copytree(path, Path(copied, "db"))
        settings = chroma.config.Settings(anonymized_telemetry=False)
        client = chroma.PersistentClient(str(Path(copied, "db")), settings=settings)
    except BaseException:
        shutil.rmtree(copied)
        raise
    weakref.finalize(client, shutil.rmtree, copied, ignore_errors=True)
    found = client.get_collection(_chosen(path, name, [one.name for one in client.list_collections()]))
    space = (found.configuration.get("hnsw") or found.configuration.get("spann") or {}).get("space")
    count = found.count()

    def batches(_owner: Any = client) -> Iterator[_Found]:  # the copy goes with it
        for start in range(0, count, size):
            part = found.get(limit=size, offset=start, include=["embeddings", "documents", "metadatas"])
            payloads = [one and dict(sorted(one.items())) for one in part["metadatas"]]  # they come in any order
            yield part["ids"], np.asarray(part["embeddings"]), payloads, list(part["documents"])

    return _METRICS.get(str(space)), count, batches()


def _qdrant(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Found]]:
    """From SQLite: each point is a pickle, of which nothing is run."""
    said = json.loads((path / "meta.json").read_bytes())["collections"]
    name = _chosen(path, name, sorted(said))
    vectors = said[name]["vectors"] or {}
    named = None if "size" in vectors else _only(path, name, sorted(vectors))
    distance = (vectors if named is None else vectors[named])["distance"].lower()
    place = path / "collection" / name / "storage.sqlite"
    connection = sqlite3.connect(f"{place.absolute().as_uri()}?mode=ro", uri=True)
    (count,) = connection.execute("SELECT count(*) FROM points").fetchone()
    points = (_Unpickled(io.BytesIO(one)).load() for (one,) in connection.execute("SELECT point FROM points"))

    def batches() -> Iterator[_Found]:
        while part := [one.__dict__ for one in islice(points, size)]:
            keys = [one["vector"] if named is None else (one["vector"] or {}).get(named) for one in part]
            yield [one["id"] for one in part], keys, [one["payload"] for one in part], [None] * len(part)

    return _METRICS.get(distance), count, batches()


def _only(path: Path, name: str, names: list[str]) -> str:
    if len(names) != 1:
        raise BadInput(f"{path.name}: collection {name!r} has the vectors {shown(names)} for a point; softdb takes one")
    return names[0]


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


def _faiss(path: Path, name: str | None, size: int) -> tuple[str | None, int, Iterator[_Found]]:
    """Of indexes that keep whole vectors: flat, IVF flat and HNSW flat, also with ids of their own."""
    faiss = needed("faiss", "cpu", path.name)
    if name is not None:
        raise BadInput(f"{path.name} holds one index; leave out the collection {name!r}")
    owner = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    index = faiss.downcast_index(owner)
    metric = {faiss.METRIC_INNER_PRODUCT: "dot", faiss.METRIC_L2: "l2"}.get(index.metric_type)
    names = None
    if isinstance(index, faiss.IndexIDMap | faiss.IndexIDMap2):
        names, inner = faiss.vector_to_array(index.id_map), faiss.downcast_index(index.index)
    else:
        inner = index
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    if not isinstance(inner, faiss.IndexFlat | faiss.IndexIVFFlat) or type(inner).__name__.endswith("Panorama"):
        raise BadInput(
            f"{path.name} is an {type(inner).__name__}, of which no vectors can be read (flat, IVF flat and HNSW flat "
            "keep them whole); import them from their source"
        )
    parts = _flat(inner, size) if isinstance(inner, faiss.IndexFlat) else _lists(faiss, inner, size)

    def batches(_owner: Any = owner) -> Iterator[_Found]:  # what is within it is freed with it
        for places, keys in parts:
            ids = (places if names is None else names[places]).tolist()
            yield ids, keys, [None] * len(ids), [None] * len(ids)

    return metric, index.ntotal, batches()


def _flat(index: Any, size: int) -> Iterator[tuple[Any, Any]]:
    for start in range(0, index.ntotal, size):
        count = min(size, index.ntotal - start)
        yield np.arange(start, start + count), index.reconstruct_n(start, count)


def _lists(faiss: Any, index: Any, size: int) -> Iterator[tuple[Any, Any]]:
    """List after list: an index by lists knows no order of its vectors."""
    lists = index.invlists
    for number in range(index.nlist):
        length = lists.list_size(number)
        if length:
            ids = faiss.rev_swig_ptr(lists.get_ids(number), length).copy()
            codes = faiss.rev_swig_ptr(lists.get_codes(number), length * index.code_size)
            keys = codes.view(np.float32).reshape(length, index.d)
            for start in range(0, length, size):
                yield ids[start : start + size], keys[start : start + size].copy()


COLLECTIONS: dict[str, Callable[[Path, str | None, int], tuple[str | None, int, Iterator[_Found]]]] = {
    "chroma": _chroma, "qdrant": _qdrant, ".faiss": _faiss, ".index": _faiss,
}  # fmt: skip
