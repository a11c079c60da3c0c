"""Databases that `filter_peers.py` compares, softdb among them: each works out itself what a filter matches."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from filter_engines import EFS, Columns, Effort, Engine, Filter, Floats, K, Rows

__all__ = ["DATABASES"]

BATCH = 5_000  # records of an insert, in Python's own types


class Softdb(Engine):
    """Declared fields, one index tuned on queries that know of no filter."""

    packages, database, declared = ("softdb", "apsw", "torch"), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Payloads have a title too, as payloads do."""
        import softdb

        fields: dict[str, Any] = {"fields": list(columns)} if self.declared else {}
        self.db = softdb.open(self.folder / "db", dim=keys.shape[1], **fields)
        for low in range(0, len(keys), BATCH):
            part = keys[low : low + BATCH]
            payloads = [{"title": f"record {low + i}, with a title", **p} for i, p in enumerate(_dicts(columns, low))]
            self.db.insert(range(low, low + len(part)), part, payloads=payloads)
        self.report = self.db.build_index("auto", recall=0.95, k=K, queries=queries).asdict()

    def prepare(self, wanted: Filter) -> dict[str, Any]:
        """As a user writes it."""
        return {wanted.ranged: {"$gte": wanted.low, "$lt": wanted.high}, **wanted.equal}

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Rows are the numbers inserted."""
        return self.db.search(queries, k=K, where=prepared).rows.numpy()

    def close(self) -> None:
        """The database first."""
        self.db.close()
        super().close()


class Undeclared(Softdb):
    """The same without declared fields: a new filter reads every payload."""

    declared = False


class LanceDB(Engine):
    """An index of the keys, a B-tree of every field, and the filter before the search."""

    packages, database = ("lancedb", "pyarrow"), True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """One table."""
        lancedb, pa, kinds = (import_module(name) for name in ("lancedb", "pyarrow", "lancedb.index"))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(keys.reshape(-1)), keys.shape[1])
        table = pa.table({"id": np.arange(len(keys)), "vector": vectors, **columns})
        self.table: Any = lancedb.connect(str(self.folder)).create_table("records", table)
        self.table.create_index("vector", config=self.kind(kinds, *keys.shape))
        for name, values in columns.items():
            self.table.create_index(name, config=kinds.Bitmap() if values.dtype.kind == "U" else kinds.BTree())

    def kind(self, kinds: Any, n: int, dim: int) -> Any:
        """Lists with 8-bit codes."""
        lists = max(1, round(n**0.5))
        probes = sorted({min(lists, round(2 ** (i / 2))) for i in range(40)})
        self.ladders = tuple(tuple((probe, more) for probe in probes) for more in (10, 40))
        return kinds.IvfPq(distance_type="dot", num_partitions=lists, num_sub_vectors=dim // 4)

    def prepare(self, wanted: Filter) -> str:
        """SQL."""
        return wanted.sql()

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """More lists are read where these hold fewer than K matches."""
        asked = self.table.search(queries if len(queries) > 1 else queries[0]).where(prepared, prefilter=True)
        asked = self.tried(asked.distance_type("dot"), effort).select(["id", "_distance"]).limit(K)
        found = asked.to_arrow()
        rows, of = found["id"].to_numpy(), np.zeros(len(found), np.int64)
        if len(queries) > 1:
            of = found["query_index"].to_numpy()
        return _padded([rows[of == i] for i in range(len(queries))])

    def tried(self, asked: Any, effort: Effort) -> Any:
        """With that effort."""
        return asked.minimum_nprobes(effort[0]).maximum_nprobes(0).refine_factor(effort[1])


class LanceGraph(LanceDB):
    """One graph over bytes."""

    ladders = (tuple((ef, 4) for (ef,) in EFS),)

    def kind(self, kinds: Any, n: int, dim: int) -> Any:
        """M = 32."""
        return kinds.HnswSq(distance_type="dot", num_partitions=1, m=32, ef_construction=100)

    def tried(self, asked: Any, effort: Effort) -> Any:
        """What is kept in view, at least what is compared exactly."""
        return asked.ef(max(effort[0], effort[1] * K)).refine_factor(effort[1])


class SqliteVec(Engine):
    """sqlite-vec in memory: it reads every vector whose metadata match. Inner products order as its cosines do."""

    packages, database, exact = ("sqlite-vec", "apsw"), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Fields are metadata columns."""
        self.db: Any = import_module("apsw").Connection(":memory:")
        self.db.enable_load_extension(True)
        self.db.load_extension(import_module("sqlite_vec").loadable_path())
        kinds = [f"{name} {'text' if values.dtype.kind == 'U' else 'integer'}" for name, values in columns.items()]
        vector = f"vector float[{keys.shape[1]}] distance_metric=cosine"
        self.db.execute(f"CREATE VIRTUAL TABLE records USING vec0({', '.join([vector, *kinds])})")
        marks, values = ", ".join("?" * len(columns)), [column.tolist() for column in columns.values()]
        with self.db:
            self.db.executemany(
                f"INSERT INTO records (rowid, vector, {', '.join(columns)}) VALUES (?, ?, {marks})",
                ((i, keys[i].tobytes(), *row) for i, row in enumerate(zip(*values, strict=True))),
            )

    def prepare(self, wanted: Filter) -> str:
        """SQL, which apsw keeps compiled."""
        return f"SELECT rowid FROM records WHERE vector MATCH ? AND k = {K} AND {wanted.sql()}"

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """One by one."""
        return _padded([[row for (row,) in self.db.execute(prepared, (one.tobytes(),))] for one in queries])


class Chroma(Engine):
    """Chroma in memory: metadata in SQLite, a graph with M = 32 and an effort of 256.

    The effort is set when the collection is made: one given later (`modify`, 1.5.9) changed no answer.
    """

    packages, database = ("chromadb",), True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """In batches."""
        chromadb: Any = import_module("chromadb")
        client = chromadb.EphemeralClient(chromadb.config.Settings(anonymized_telemetry=False))
        shape = {"space": "ip", "max_neighbors": 32, "ef_construction": 100, "ef_search": 256}
        self.records: Any = client.create_collection("records", embedding_function=None, configuration={"hnsw": shape})
        for low in range(0, len(keys), BATCH):
            part = keys[low : low + BATCH]
            ids = [str(low + i) for i in range(len(part))]
            self.records.add(ids, embeddings=part, metadatas=_dicts(columns, low))

    def prepare(self, wanted: Filter) -> dict[str, Any]:
        """Its own words."""
        parts = [{name: value} for name, value in wanted.equal.items()]
        return {"$and": [*parts, {wanted.ranged: {"$gte": wanted.low}}, {wanted.ranged: {"$lt": wanted.high}}]}

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Ids are texts."""
        found = self.records.query(query_embeddings=queries, n_results=K, where=prepared, include=[])
        return _padded([[int(one) for one in ids] for ids in found["ids"]])


class Qdrant(Engine):
    """Qdrant's local mode: it evaluates the filter on every payload, in Python, at each search."""

    packages, database, exact = ("qdrant-client",), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """In memory."""
        self.models: Any = import_module("qdrant_client.models")
        self.client: Any = import_module("qdrant_client").QdrantClient(":memory:")
        shape = self.models.VectorParams(size=keys.shape[1], distance=self.models.Distance.DOT)
        self.client.create_collection("records", vectors_config=shape)
        self.client.upload_collection("records", keys, _dicts(columns, 0, len(keys)), list(range(len(keys))))

    def prepare(self, wanted: Filter) -> Any:
        """Its own words."""
        words, ranged = self.models, self.models.Range(gte=wanted.low, lt=wanted.high)
        parts = [words.FieldCondition(key=n, match=words.MatchValue(value=v)) for n, v in wanted.equal.items()]
        return words.Filter(must=[*parts, words.FieldCondition(key=wanted.ranged, range=ranged)])

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """One request for all."""
        asked = [self.models.QueryRequest(query=one.tolist(), filter=prepared, limit=K) for one in queries]
        found = self.client.query_batch_points("records", asked)
        return _padded([[point.id for point in one.points] for one in found])


def _dicts(columns: Columns, low: int, count: int = BATCH) -> list[dict[str, Any]]:
    """Fields of some records, one dict a record."""
    values = [column[low : low + count].tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _padded(found: list[Any]) -> Rows:  # (q, K)
    """Answers of any length, -1 where there is none."""
    rows = np.full((len(found), K), -1, np.int64)
    for row, one in zip(rows, found, strict=True):
        row[: len(one)] = one
    return rows


DATABASES: dict[str, type[Engine]] = {
    "softdb": Softdb,
    "softdb-undeclared": Undeclared,
    "lancedb-ivf": LanceDB,
    "lancedb-hnsw": LanceGraph,
    "sqlite-vec": SqliteVec,
    "chroma": Chroma,
    "qdrant": Qdrant,
}
