"""Databases that `filter_peers.py` compares, softdb among them: each evaluates the filter itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from filter_engines import EFS, Columns, Effort, Engine, Filter, Floats, K, Rows

__all__ = ["DATABASES"]

BATCH = 5_000  # records in an insert


class Softdb(Engine):
    """softdb with declared fields and one index, tuned on queries without a filter."""

    packages, database, declared = ("softdb", "apsw", "torch"), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Insert the records, with a title in each payload as users have, and build the index."""
        import softdb

        fields: dict[str, Any] = {"fields": list(columns)} if self.declared else {}
        self.db = softdb.open(self.folder / "db", dim=keys.shape[1], **fields)
        for low in range(0, len(keys), BATCH):
            block = keys[low : low + BATCH]
            payloads = [{"title": f"record {low + i}, with a title", **p} for i, p in enumerate(_dicts(columns, low))]
            self.db.insert(range(low, low + len(block)), block, payloads=payloads)
        self.report = self.db.build_index("auto", recall=0.95, k=K, queries=queries).asdict()

    def prepare(self, wanted: Filter) -> dict[str, Any]:
        """Return the filter as softdb's `where`."""
        return {wanted.ranged: {"$gte": wanted.low, "$lt": wanted.high}, **wanted.equal}

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search; ids were inserted in the order of the rows."""
        return self.db.search(queries, k=K, where=prepared).rows.numpy()

    def close(self) -> None:
        """Close the database, then remove its folder."""
        self.db.close()
        super().close()


class Undeclared(Softdb):
    """softdb without declared fields: a new filter reads every payload."""

    declared = False


class LanceDB(Engine):
    """LanceDB with an index of the keys and a B-tree of every field; it filters before it searches."""

    packages, database = ("lancedb", "pyarrow"), True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Make one table and its indexes."""
        lancedb, pa, kinds = (import_module(name) for name in ("lancedb", "pyarrow", "lancedb.index"))
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(keys.reshape(-1)), keys.shape[1])
        table = pa.table({"id": np.arange(len(keys)), "vector": vectors, **columns})
        self.table: Any = lancedb.connect(str(self.folder)).create_table("records", table)
        self.table.create_index("vector", config=self.kind(kinds, *keys.shape))
        for name, values in columns.items():
            self.table.create_index(name, config=kinds.Bitmap() if values.dtype.kind == "U" else kinds.BTree())

    def kind(self, kinds: Any, n: int, dim: int) -> Any:
        """Return the settings of an IVF index with 8-bit codes, and set the efforts to try."""
        lists = max(1, round(n**0.5))
        probes = sorted({min(lists, round(2 ** (i / 2))) for i in range(40)})
        self.ladders = tuple(tuple((probe, more) for probe in probes) for more in (10, 40))
        return kinds.IvfPq(distance_type="dot", num_partitions=lists, num_sub_vectors=dim // 4)

    def prepare(self, wanted: Filter) -> str:
        """Return the filter as SQL."""
        return wanted.sql()

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search; LanceDB reads more lists if the first ones hold fewer than K matches."""
        request = self.table.search(queries if len(queries) > 1 else queries[0]).where(prepared, prefilter=True)
        request = self.with_effort(request.distance_type("dot"), effort).select(["id", "_distance"]).limit(K)
        matches = request.to_arrow()
        rows, query_of = matches["id"].to_numpy(), np.zeros(len(matches), np.int64)
        if len(queries) > 1:
            query_of = matches["query_index"].to_numpy()
        return _padded([rows[query_of == i] for i in range(len(queries))])

    def with_effort(self, request: Any, effort: Effort) -> Any:
        """Return the request with the number of lists and of candidates per hit."""
        return request.minimum_nprobes(effort[0]).maximum_nprobes(0).refine_factor(effort[1])


class LanceGraph(LanceDB):
    """LanceDB with one HNSW graph over 8-bit codes."""

    ladders = (tuple((ef, 4) for (ef,) in EFS),)

    def kind(self, kinds: Any, n: int, dim: int) -> Any:
        """Return the settings of a graph with M = 32."""
        return kinds.HnswSq(distance_type="dot", num_partitions=1, m=32, ef_construction=100)

    def with_effort(self, request: Any, effort: Effort) -> Any:
        """Return the request with ef, at least the number of candidates that are compared exactly."""
        return request.ef(max(effort[0], effort[1] * K)).refine_factor(effort[1])


class SqliteVec(Engine):
    """sqlite-vec in memory: it reads every vector whose metadata match. Keys have length 1, so cosine orders alike."""

    packages, database, exact = ("sqlite-vec", "apsw"), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Make a virtual table with the fields as metadata columns."""
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
        """Return the statement, which apsw keeps compiled."""
        return f"SELECT rowid FROM records WHERE vector MATCH ? AND k = {K} AND {wanted.sql()}"

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search one query after the other."""
        return _padded([[row for (row,) in self.db.execute(prepared, (query.tobytes(),))] for query in queries])


class Chroma(Engine):
    """Chroma in memory: metadata in SQLite, a graph with M = 32 and ef = 256.

    ef is set when the collection is made; a later `modify` (version 1.5.9) changed no answer.
    """

    packages, database = ("chromadb",), True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Make a collection and add the records in batches."""
        chromadb: Any = import_module("chromadb")
        client = chromadb.EphemeralClient(chromadb.config.Settings(anonymized_telemetry=False))
        shape = {"space": "ip", "max_neighbors": 32, "ef_construction": 100, "ef_search": 256}
        self.records: Any = client.create_collection("records", embedding_function=None, configuration={"hnsw": shape})
        for low in range(0, len(keys), BATCH):
            block = keys[low : low + BATCH]
            ids = [str(low + i) for i in range(len(block))]
            self.records.add(ids, embeddings=block, metadatas=_dicts(columns, low))

    def prepare(self, wanted: Filter) -> dict[str, Any]:
        """Return the filter as Chroma's `where`."""
        conditions = [{name: value} for name, value in wanted.equal.items()]
        return {"$and": [*conditions, {wanted.ranged: {"$gte": wanted.low}}, {wanted.ranged: {"$lt": wanted.high}}]}

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search all queries in one call; ids are strings of the rows."""
        matches = self.records.query(query_embeddings=queries, n_results=K, where=prepared, include=[])
        return _padded([[int(name) for name in ids] for ids in matches["ids"]])


class Qdrant(Engine):
    """Qdrant's local mode: it evaluates the filter on every payload, in Python, in each search."""

    packages, database, exact = ("qdrant-client",), True, True

    def build(self, keys: Floats, columns: Columns, queries: Floats) -> None:
        """Make a collection in memory and upload the records."""
        self.models: Any = import_module("qdrant_client.models")
        self.client: Any = import_module("qdrant_client").QdrantClient(":memory:")
        shape = self.models.VectorParams(size=keys.shape[1], distance=self.models.Distance.DOT)
        self.client.create_collection("records", vectors_config=shape)
        self.client.upload_collection("records", keys, _dicts(columns, 0, len(keys)), list(range(len(keys))))

    def prepare(self, wanted: Filter) -> Any:
        """Return the filter as Qdrant's model."""
        models, ranged = self.models, self.models.Range(gte=wanted.low, lt=wanted.high)
        conditions = [models.FieldCondition(key=n, match=models.MatchValue(value=v)) for n, v in wanted.equal.items()]
        return models.Filter(must=[*conditions, models.FieldCondition(key=wanted.ranged, range=ranged)])

    def search(self, queries: Floats, prepared: Any, effort: Effort) -> Rows:
        """Search all queries in one call."""
        requests = [self.models.QueryRequest(query=query.tolist(), filter=prepared, limit=K) for query in queries]
        replies = self.client.query_batch_points("records", requests)
        return _padded([[point.id for point in reply.points] for reply in replies])


def _dicts(columns: Columns, low: int, count: int = BATCH) -> list[dict[str, Any]]:
    """Return the fields of `count` records from `low` on, one dict per record."""
    values = [column[low : low + count].tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _padded(answers: list[Any]) -> Rows:  # (q, K)
    """Pad answers of up to K rows with -1."""
    rows = np.full((len(answers), K), -1, np.int64)
    for row, answer in zip(rows, answers, strict=True):
        row[: len(answer)] = answer
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
