"""The databases that `ingest.py` compares, softdb among them: how each is opened, filled in bulk, and asked.

The peers are optional and untyped: each is imported by its own engine only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENGINES", "Answers", "Batch", "Engine", "WrongAnswer"]


class WrongAnswer(Exception):
    """An engine did not return what was stored, so its speed means nothing."""


@dataclass
class Batch:
    """Records in columns, as a user would hold them."""

    ids: list[Any]
    keys: NDArray[np.float32]  # (n, d)
    payloads: list[dict[str, Any]] | None


@dataclass
class Answers:
    """What an engine returned for a batch of probes."""

    count: int
    keys: NDArray[np.float32]  # (n, d), in the probes' order
    payloads: list[dict[str, Any]] | None
    nearest: list[Any]  # n ids: the best hit of each probe's own key


class Engine(ABC):
    """One database: opened, given records in its own form, closed, asked."""

    packages: ClassVar[tuple[str, ...]]  # what to report the version of; the first is the engine
    synced: ClassVar[str]  # "yes": a returned insert survives a power loss; "no"; "partly"
    durability: ClassVar[str]
    index: ClassVar[str] = "none"
    integer_ids: ClassVar[bool] = False
    normalises: ClassVar[bool] = False  # may return keys at unit length, so only their directions are compared
    least_found: ClassVar[float] = 1.0  # share of probes that must find themselves; below 1 only for approximate search
    largest_batch: int | None = None

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder = folder
        self.dim = dim

    @abstractmethod
    def open(self) -> None:
        """Open the database, made first where it is missing."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """The batch in the form that `insert` takes."""

    @abstractmethod
    def insert(self, native: Any) -> None:
        """Insert one prepared batch."""

    @abstractmethod
    def close(self) -> None:
        """Make everything visible to another process and let go of it."""

    @abstractmethod
    def answers(self, probes: Batch) -> Answers:
        """Count, fetch by id, and search with k = 1."""


class SoftDB(Engine):
    """softdb itself."""

    packages = ("softdb", "apsw", "torch", "numpy")
    synced = "yes"
    durability = "segment fsynced, then one SQLite transaction at synchronous=FULL, before each insert returns"

    def open(self) -> None:
        """Open the directory."""
        self.db = import_module("softdb").open(str(self.folder), dim=self.dim, metric="cosine", dtype="float32")

    def prepare(self, batch: Batch) -> Batch:
        """As it is."""
        return batch

    def insert(self, native: Batch) -> None:
        """One insert."""
        self.db.insert(native.ids, native.keys, payloads=native.payloads)

    def close(self) -> None:
        """Close."""
        self.db.close()

    def answers(self, probes: Batch) -> Answers:
        """Exact search: no index is built here."""
        hits = self.db.search(probes.keys, k=1)
        found = self.db.get(probes.ids)
        payloads = None if probes.payloads is None else list(found.payloads)
        return Answers(len(self.db), np.asarray(found.keys), payloads, [row[0] for row in hits.ids])


class LanceDB(Engine):
    """LanceDB, given Arrow tables."""

    packages = ("lancedb", "pyarrow")
    synced = "no"
    durability = "files and manifest are renamed into place; no fsync call before or after add() returns (strace)"

    def open(self) -> None:
        """The table is made by the first insert, which knows the schema."""
        self.db: Any = import_module("lancedb").connect(str(self.folder))
        self.table: Any = self.db.open_table("records") if (self.folder / "records.lance").exists() else None

    def prepare(self, batch: Batch) -> Any:
        """One Arrow table; the vectors are not copied."""
        pa: Any = import_module("pyarrow")
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(batch.keys.reshape(-1)), self.dim)
        columns = {"id": pa.array(batch.ids), "vector": vectors}
        if batch.payloads is not None:
            columns["payload"] = pa.array(batch.payloads)
        return pa.table(columns)

    def insert(self, native: Any) -> None:
        """One add, which is one fragment and one version."""
        if self.table is None:
            self.table = self.db.create_table("records", data=native)
        else:
            self.table.add(native)

    def close(self) -> None:
        """There is nothing to close: an add is visible when it returns."""
        self.table = self.db = None

    def answers(self, probes: Batch) -> Answers:
        """Exact search: without an index LanceDB scans."""
        quoted = ", ".join(f"'{name}'" for name in probes.ids)
        rows = self.table.search().where(f"id IN ({quoted})").limit(len(probes.ids)).to_arrow().to_pylist()
        rows = _in_order(rows, probes.ids)
        nearest = [self.table.search(key).distance_type("cosine").limit(1).to_list()[0]["id"] for key in probes.keys]
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        return Answers(self.table.count_rows(), _stack(row["vector"] for row in rows), payloads, nearest)


class Chroma(Engine):
    """Chroma's PersistentClient."""

    packages = ("chromadb",)
    synced = "partly"
    durability = "add() fsyncs its SQLite log (journal_mode=delete), not the HNSW files that hold the vectors (strace)"
    index = "HNSW, built while inserting"
    least_found = 0.9

    def open(self) -> None:
        """A cosine collection without an embedding function."""
        chromadb: Any = import_module("chromadb")
        settings = chromadb.config.Settings(anonymized_telemetry=False)
        self.client: Any = chromadb.PersistentClient(str(self.folder), settings=settings)
        self.largest_batch = self.client.get_max_batch_size()
        named: dict[str, Any] = {"name": "records", "configuration": {"hnsw": {"space": "cosine"}}}
        self.records: Any = self.client.get_or_create_collection(**named, embedding_function=None)

    def prepare(self, batch: Batch) -> Batch:
        """As it is."""
        return batch

    def insert(self, native: Batch) -> None:
        """One add, of at most `largest_batch` records."""
        self.records.add(native.ids, embeddings=native.keys, metadatas=native.payloads)

    def close(self) -> None:
        """Close the client, which stops its threads."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Approximate search through HNSW."""
        hits = self.records.query(query_embeddings=probes.keys, n_results=1, include=["distances"])
        found = self.records.get(ids=probes.ids, include=["embeddings", "metadatas"])
        rows = [
            {"id": name, "vector": vector, "payload": payload}
            for name, vector, payload in zip(found["ids"], found["embeddings"], found["metadatas"], strict=True)
        ]
        rows = _in_order(rows, probes.ids)
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        nearest = [row[0] for row in hits["ids"]]
        return Answers(self.records.count(), _stack(row["vector"] for row in rows), payloads, nearest)


class Qdrant(Engine):
    """Qdrant's local mode; ids are integers, as it takes no other names but UUIDs."""

    packages = ("qdrant-client",)
    synced = "yes"
    durability = "one SQLite transaction a point, 4 fdatasync calls each (strace)"
    integer_ids = True
    normalises = True
    largest_batch = 1_000  # each point commits alone, so a small batch costs nothing and lets --cap end a slow run

    def open(self) -> None:
        """A cosine collection; opening reads every point into memory."""
        self.models: Any = import_module("qdrant_client.models")
        self.client: Any = import_module("qdrant_client").QdrantClient(path=str(self.folder))
        if not self.client.collection_exists("records"):
            shape = self.models.VectorParams(size=self.dim, distance=self.models.Distance.COSINE)
            self.client.create_collection("records", vectors_config=shape)

    def prepare(self, batch: Batch) -> Batch:
        """As it is: upload_collection takes columns."""
        return batch

    def insert(self, native: Batch) -> None:
        """One upload; it waits for the write in local mode."""
        columns = {"ids": native.ids, "vectors": native.keys, "payload": native.payloads}
        self.client.upload_collection("records", **columns, wait=True)

    def close(self) -> None:
        """Close, which gives up the lock."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Exact search: local mode compares with every point."""
        rows = self.client.retrieve("records", ids=probes.ids, with_vectors=True)
        rows = _in_order([{"id": row.id, "vector": row.vector, "payload": row.payload} for row in rows], probes.ids)
        nearest = [self.client.query_points("records", query=key, limit=1).points[0].id for key in probes.keys]
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        return Answers(self.client.count("records").count, _stack(row["vector"] for row in rows), payloads, nearest)


class Milvus(Engine):
    """Milvus Lite through MilvusClient; payload fields go into its dynamic field."""

    packages = ("milvus-lite", "pymilvus")
    synced = "no"
    durability = "log and manifest are fsynced at flush(), the Parquet data files are not; none in insert() (strace)"
    index = "none (FLAT)"

    def open(self) -> None:
        """FLAT, so that no index is built; the client starts a server in a thread."""
        pymilvus: Any = import_module("pymilvus")
        self.path = str(self.folder / "records.db")
        self.client: Any = pymilvus.MilvusClient(self.path)
        if not self.client.has_collection("records"):
            schema = self.client.create_schema(auto_id=False, enable_dynamic_field=True)
            schema.add_field("id", pymilvus.DataType.VARCHAR, is_primary=True, max_length=64)
            schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=self.dim)
            index = self.client.prepare_index_params()
            index.add_index("vector", index_type="FLAT", metric_type="COSINE")
            self.client.create_collection("records", schema=schema, index_params=index)

    def prepare(self, batch: Batch) -> list[dict[str, Any]]:
        """One dict a record, the only form that insert takes."""
        payloads = batch.payloads or [{}] * len(batch.ids)
        records = zip(batch.ids, batch.keys, payloads, strict=True)
        return [{"id": name, "vector": key, **payload} for name, key, payload in records]

    def insert(self, native: list[dict[str, Any]]) -> None:
        """One insert call."""
        self.client.insert("records", native)

    def close(self) -> None:
        """Flush, then stop the server: it holds the lock on the folder."""
        self.client.flush("records")
        self.client.close()
        import_module("milvus_lite.server_manager").server_manager_instance.release_server(self.path)

    def answers(self, probes: Batch) -> Answers:
        """Exact search."""
        self.client.load_collection("records")
        hits = self.client.search("records", probes.keys.tolist(), limit=1, output_fields=["id"])
        rows = _in_order(self.client.get("records", probes.ids, output_fields=["*"]), probes.ids)
        count = self.client.query("records", filter="", output_fields=["count(*)"])[0]["count(*)"]
        payloads = [{name: value for name, value in row.items() if name not in ("id", "vector")} for row in rows]
        nearest = [row[0]["id"] for row in hits]
        stored = _stack(row["vector"] for row in rows)
        return Answers(count, stored, None if probes.payloads is None else payloads, nearest)


ENGINES: dict[str, type[Engine]] = {
    "softdb": SoftDB,
    "lancedb": LanceDB,
    "chroma": Chroma,
    "qdrant": Qdrant,
    "milvus": Milvus,
}


def _in_order(rows: list[dict[str, Any]], ids: list[Any]) -> list[dict[str, Any]]:
    """Rows in the order of the ids asked for."""
    by_id = {row["id"]: row for row in rows}
    missing = [name for name in ids if name not in by_id]
    if missing:
        raise WrongAnswer(f"fetch: {len(missing)} of {len(ids)} ids are not there, the first is {missing[0]!r}")
    return [by_id[name] for name in ids]


def _stack(vectors: Iterator[Any]) -> NDArray[np.float32]:
    return np.asarray(list(vectors), dtype=np.float32)
