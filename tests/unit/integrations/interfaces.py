"""The interfaces of benchmarks that the tests do without, as their sources have them: names and signatures alone.

ann-benchmarks at f402b2c (MIT), ann_benchmarks/algorithms/base/module.py; VectorDBBench 2.0.0 (MIT),
vectordb_bench/backend/clients/api.py and vectordb_bench/backend/filter.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from enum import Enum
from multiprocessing.pool import ThreadPool
from typing import Any

from pydantic import BaseModel


class BaseANN:
    def done(self) -> None: ...

    def get_memory_usage(self) -> float | None:
        return 0.0

    def fit(self, X: Any) -> None: ...

    def query(self, q: Any, n: int) -> Any:
        return []

    def batch_query(self, X: Any, n: int) -> None:
        self.res = ThreadPool().map(lambda q: self.query(q, n), X)

    def get_batch_results(self) -> Any:
        return self.res

    def get_additional(self) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        return self.name  # type: ignore[attr-defined, no-any-return]


class MetricType(str, Enum):
    L2 = "L2"
    COSINE = "COSINE"
    IP = "IP"
    DP = "DP"
    HAMMING = "HAMMING"


class FilterOp(str, Enum):
    NumGE = "NumGE"
    StrEqual = "Label"
    NonFilter = "NonFilter"


class Filter(BaseModel):
    type: Any
    filter_rate: float = 0.0
    int_value: int = 0
    label_value: str = ""


class DBConfig(ABC, BaseModel):
    db_label: str = ""
    version: str = ""
    note: str = ""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]: ...


class DBCaseConfig(ABC):
    @abstractmethod
    def index_param(self) -> dict[str, Any]: ...

    @abstractmethod
    def search_param(self) -> dict[str, Any]: ...


class VectorDB(ABC):
    supported_filter_types = [FilterOp.NonFilter]  # noqa: RUF012
    name: str = ""
    thread_safe: bool = True

    @classmethod
    def filter_supported(cls, filters: Filter) -> bool:
        return filters.type in cls.supported_filter_types

    def prepare_filter(self, filters: Filter) -> None:
        return

    @abstractmethod
    def __init__(
        self,
        dim: int,
        db_config: dict[str, Any],
        db_case_config: DBCaseConfig | None,
        collection_name: str,
        drop_old: bool = False,
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    @contextmanager
    def init(self) -> Any: ...

    def need_normalize_cosine(self) -> bool:
        return False

    @abstractmethod
    def insert_embeddings(
        self,
        embeddings: list[list[float]],
        metadata: list[int],
        labels_data: list[str] | None = None,
        tenant_labels_data: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[int, Exception | None]: ...

    @abstractmethod
    def search_embedding(
        self, query: list[float], k: int = 100, payload_profile: Any = "ids_only", tenant: str | None = None
    ) -> list[int]: ...

    @abstractmethod
    def optimize(self, data_size: int | None = None) -> Any: ...
