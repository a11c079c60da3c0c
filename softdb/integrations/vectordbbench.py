"""A database as a client of VectorDBBench. docs/integrations/benchmarks.md says how to register it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from vectordb_bench.backend.clients.api import DBCaseConfig, DBConfig, MetricType, VectorDB
from vectordb_bench.backend.filter import Filter, FilterOp

from softdb.database import SoftDB
from softdb.errors import BadInput, SoftDBError
from softdb.opening import open as open_database
from softdb.store.ours import remove_database

METRICS: dict[Any, Any] = {
    MetricType.L2: "l2", MetricType.COSINE: "cosine", MetricType.IP: "dot", MetricType.DP: "dot",
}  # fmt: skip
LABEL = "label"  # the payload's field for VectorDBBench's labels


class SoftDBConfig(DBConfig):
    """The folder of the databases: each collection is a directory in `path`."""

    path: str

    def to_dict(self) -> dict[str, Any]:
        """Return the client's `db_config`."""
        return {"path": self.path}


class SoftDBCaseConfig(BaseModel, DBCaseConfig):
    """Settings of the index: its kind, and the recall of the `k` nearest that its search effort is tuned to reach."""

    metric_type: MetricType = MetricType.COSINE
    kind: str = "auto"
    recall: float = 0.95
    k: int = 100

    def index_param(self) -> dict[str, Any]:
        """Return the arguments of `SoftDB.build_index`."""
        return {"kind": self.kind, "recall": self.recall, "k": self.k}

    def search_param(self) -> dict[str, Any]:
        """Return no arguments: the search effort is part of the index."""
        return {}


class SoftDBClient(VectorDB):
    """VectorDBBench's client. `insert_embeddings` and `optimize` open the database for writing, searches for reading.

    One process can write at a time. A search sees all records that other processes committed before it. Raises BadInput
    for a metric that softdb lacks.
    """

    name = "softdb"
    supported_filter_types = [FilterOp.NonFilter, FilterOp.NumGE, FilterOp.StrEqual]  # noqa: RUF012 - as the base has it
    thread_safe = True

    def __init__(
        self,
        dim: int,
        db_config: dict[str, Any],
        db_case_config: SoftDBCaseConfig | None,
        collection_name: str = "vector_bench",
        drop_old: bool = False,
        **kwargs: Any,
    ) -> None:
        self.case = db_case_config or SoftDBCaseConfig()
        if self.case.metric_type not in METRICS:
            raise BadInput(f"metric_type is {self.case.metric_type}; expected {', '.join(map(str, METRICS))}")
        self.path = Path(db_config["path"]) / collection_name
        self.where: dict[str, Any] | None = None
        self._db: SoftDB | None = None
        if drop_old and (self.path / "catalog.sqlite").exists():
            remove_database(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open_database(self.path, dim=dim, metric=METRICS[self.case.metric_type], fields=[LABEL]).close()

    @contextmanager
    def init(self) -> Iterator[None]:
        """Return a context that closes the database at its end; the first call within it opens the database."""
        try:
            yield
        finally:
            if self._db is not None:
                self._db.close()
            self._db = None

    def insert_embeddings(
        self,
        embeddings: list[list[float]],
        metadata: list[int],
        labels_data: list[str] | None = None,
        tenant_labels_data: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[int, Exception | None]:
        """Insert a batch and return its size, or insert nothing and return 0 and the error. `metadata` are the ids."""
        payloads = None if labels_data is None else [{LABEL: label} for label in labels_data]
        try:
            self._open("rw").insert(metadata, embeddings, payloads=payloads)
        except SoftDBError as error:
            return 0, error
        return len(metadata), None

    def optimize(self, data_size: int | None = None) -> None:
        """Build the index, and return when searches use it."""
        self._open("rw").build_index(**self.case.index_param())

    def prepare_filter(self, filters: Filter) -> None:
        """Set the filter of the next searches: ids of at least a number, or a label."""
        if filters.type == FilterOp.NonFilter:
            self.where = None
        elif filters.type == FilterOp.NumGE:
            self.where = {"$id": {"$gte": filters.int_value}}
        elif filters.type == FilterOp.StrEqual:
            self.where = {LABEL: filters.label_value}
        else:
            raise BadInput(f"filter {filters!r} is not supported; expected one of supported_filter_types")

    def search_embedding(self, query: list[float], k: int = 100, *_: Any, **kwargs: Any) -> list[int]:
        """Return the ids of the k nearest records, nearest first."""
        db = self._open("r")
        if db.mode == "r":
            db.refresh()
        ids: list[Any] = db.search(query, k, where=self.where).ids[0]
        return ids

    def _open(self, mode: Any) -> SoftDB:
        """Return this process's handle; open it if needed, for "rw" also if the handle is read-only."""
        if self._db is not None and mode == "rw" and self._db.mode == "r":
            self._db.close()
            self._db = None
        if self._db is None:
            self._db = open_database(self.path, mode=mode)
        return self._db

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without the handle; the process that unpickles the client opens its own."""
        return {**self.__dict__, "_db": None}
