"""The databases that `ingest.py` compares, softdb among them: each is opened, filled in bulk, and queried.

The peers are optional and untyped; the engine of a peer imports it.
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
    """Raised if an engine does not return what was stored, so that its speed means nothing."""


@dataclass
class Batch:
    """Records in columns, as users have them."""

    ids: list[Any]
    keys: NDArray[np.float32]  # (n, d)
    payloads: list[dict[str, Any]] | None


@dataclass
class Answers:
    """An engine's answers for a batch of probes."""

    count: int
    keys: NDArray[np.float32]  # (n, d), in the probes' order
    payloads: list[dict[str, Any]] | None
    nearest: list[Any]  # n ids, the best hit of each probe's key


class Engine(ABC):
    """One database, which inserts records in its own form and answers."""

    packages: ClassVar[tuple[str, ...]]  # packages to report the version of; the first is the engine
    synced: ClassVar[str]  # "yes": a returned insert survives a power loss; "no"; "partly"
    durability: ClassVar[str]
    index: ClassVar[str] = "none"
    integer_ids: ClassVar[bool] = False
    normalises: ClassVar[bool] = False  # True: returns keys at unit length, so that only directions are compared
    least_found: ClassVar[float] = 1.0  # share of probes that must find themselves; below 1 for approximate search
    largest_batch: int | None = None

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder = folder
        self.dim = dim

    @abstractmethod
    def open(self) -> None:
        """Open the database, and make it if it does not exist."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """Return the batch in the form that `insert` takes."""

    @abstractmethod
    def insert(self, native: Any) -> None:
        """Insert one prepared batch."""

    @abstractmethod
    def close(self) -> None:
        """Make everything visible to other processes and close the database."""

    @abstractmethod
    def answers(self, probes: Batch) -> Answers:
        """Count the records, fetch the probes by id, and search with k = 1."""


class SoftDB(Engine):
    """A softdb directory."""

    packages = ("softdb", "apsw", "torch", "numpy")
    synced = "yes"
    durability = "segment fsynced, then one SQLite transaction at synchronous=FULL, before each insert returns"

    def open(self) -> None:
        """Open the directory."""
        self.db = import_module("softdb").open(str(self.folder), dim=self.dim, metric="cosine", dtype="float32")

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch unchanged."""
        return batch

    def insert(self, native: Batch) -> None:
        """Insert the batch."""
        self.db.insert(native.ids, native.keys, payloads=native.payloads)

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def answers(self, probes: Batch) -> Answers:
        """Answer by exact search: no index is built."""
        hits = self.db.search(probes.keys, k=1)
        records = self.db.get(probes.ids)
        payloads = None if probes.payloads is None else list(records.payloads)
        return Answers(len(self.db), np.asarray(records.keys), payloads, [row[0] for row in hits.ids])


class LanceDB(Engine):
    """LanceDB, given Arrow tables."""

    packages = ("lancedb", "pyarrow")
    synced = "no"
    durability = "files and manifest are renamed into place; no fsync call before or after add() returns (strace)"

    def open(self) -> None:
        """Connect; the first insert makes the table, because it knows the schema."""
        self.db: Any = import_module("lancedb").connect(str(self.folder))
        self.table: Any = self.db.open_table("records") if (self.folder / "records.lance").exists() else None

    def prepare(self, batch: Batch) -> Any:
        """Return an Arrow table; the vectors are not copied."""
        pa: Any = import_module("pyarrow")
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(batch.keys.reshape(-1)), self.dim)
        columns = {"id": pa.array(batch.ids), "vector": vectors}
        if batch.payloads is not None:
            columns["payload"] = pa.array(batch.payloads)
        return pa.table(columns)

    def insert(self, native: Any) -> None:
        """Add the table, as one fragment and one version."""
        if self.table is None:
            self.table = self.db.create_table("records", data=native)
        else:
            self.table.add(native)

    def close(self) -> None:
        """Drop the handles; an add is visible when it returns."""
        self.table = self.db = None

    def answers(self, probes: Batch) -> Answers:
        """Answer by exact search: without an index LanceDB scans."""
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
        """Open a cosine collection without an embedding function."""
        chromadb: Any = import_module("chromadb")
        settings = chromadb.config.Settings(anonymized_telemetry=False)
        self.client: Any = chromadb.PersistentClient(str(self.folder), settings=settings)
        self.largest_batch = self.client.get_max_batch_size()
        shape = {"hnsw": {"space": "cosine"}}
        self.records: Any = self.client.get_or_create_collection(
            "records", configuration=shape, embedding_function=None
        )

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch unchanged."""
        return batch

    def insert(self, native: Batch) -> None:
        """Add the batch, of at most `largest_batch` records."""
        self.records.add(native.ids, embeddings=native.keys, metadatas=native.payloads)

    def close(self) -> None:
        """Close the client, which stops its threads."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Answer by approximate search through HNSW."""
        hits = self.records.query(query_embeddings=probes.keys, n_results=1, include=["distances"])
        fetched = self.records.get(ids=probes.ids, include=["embeddings", "metadatas"])
        rows = [
            {"id": name, "vector": vector, "payload": payload}
            for name, vector, payload in zip(fetched["ids"], fetched["embeddings"], fetched["metadatas"], strict=True)
        ]
        rows = _in_order(rows, probes.ids)
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        nearest = [row[0] for row in hits["ids"]]
        return Answers(self.records.count(), _stack(row["vector"] for row in rows), payloads, nearest)


class Qdrant(Engine):
    """Qdrant's local mode; ids are integers, because Qdrant takes only integers and UUIDs."""

    packages = ("qdrant-client",)
    synced = "yes"
    durability = "one SQLite transaction a point, 4 fdatasync calls each (strace)"
    integer_ids = True
    normalises = True
    largest_batch = 1_000  # each point commits alone, so a small batch costs nothing and lets --cap end a slow run

    def open(self) -> None:
        """Open a cosine collection; Qdrant reads every point into memory."""
        self.models: Any = import_module("qdrant_client.models")
        self.client: Any = import_module("qdrant_client").QdrantClient(path=str(self.folder))
        if not self.client.collection_exists("records"):
            shape = self.models.VectorParams(size=self.dim, distance=self.models.Distance.COSINE)
            self.client.create_collection("records", vectors_config=shape)

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch unchanged: upload_collection takes columns."""
        return batch

    def insert(self, native: Batch) -> None:
        """Upload the batch; in local mode the call waits for the write."""
        columns = {"ids": native.ids, "vectors": native.keys, "payload": native.payloads}
        self.client.upload_collection("records", **columns, wait=True)

    def close(self) -> None:
        """Close the client, which releases the lock."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Answer by exact search: local mode compares with every point."""
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
        """Open a FLAT collection, without an index; the client starts a server in a thread."""
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
        """Return one dict per record, the only form that insert takes."""
        payloads = batch.payloads or [{}] * len(batch.ids)
        records = zip(batch.ids, batch.keys, payloads, strict=True)
        return [{"id": name, "vector": key, **payload} for name, key, payload in records]

    def insert(self, native: list[dict[str, Any]]) -> None:
        """Insert the batch in one call."""
        self.client.insert("records", native)

    def close(self) -> None:
        """Flush, then stop the server, which holds the lock on the folder."""
        self.client.flush("records")
        self.client.close()
        import_module("milvus_lite.server_manager").server_manager_instance.release_server(self.path)

    def answers(self, probes: Batch) -> Answers:
        """Answer by exact search."""
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
    """Return the rows in the order of the ids; raise WrongAnswer if one is missing."""
    by_id = {row["id"]: row for row in rows}
    missing = [name for name in ids if name not in by_id]
    if missing:
        raise WrongAnswer(f"fetch: {len(missing)} of {len(ids)} ids are missing, the first is {missing[0]!r}")
    return [by_id[name] for name in ids]


def _stack(vectors: Iterator[Any]) -> NDArray[np.float32]:
    return np.asarray(list(vectors), dtype=np.float32)
