"""The contract of an approximate index: it says which rows may be near, by codes. It never scores and holds no keys."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.errors import MissingDependency
from softdb.kernels import available, native

__all__ = [
    "Floats",
    "Found",
    "Index",
    "Live",
    "Recent",
    "Rows",
    "Selected",
    "faiss_module",
    "measure_of",
    "prepared",
    "sampled",
]

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Live = NDArray[np.bool_]

T = TypeVar("T")


class Found(NamedTuple):
    """What a finder answers."""

    positions: Rows  # (q, k), best first, -1 = none
    scores: Floats | None  # (q, k) their exact scores in float32; None where they were not all computed
    finder: str  # the kind of the index, or "flat", which is exact


class Recent(Generic[T]):
    """What was computed from the last few objects, such as masks, known by identity. Safe to use from any thread."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: list[tuple[tuple[weakref.ref[Any], ...], T]] = []  # replaced, never changed

    def of(self, compute: Callable[[], T], *objects: object) -> T:
        """What was computed from these objects, computed now where it is not known."""
        known = self._known
        for references, result in known:
            if all(reference() is mine for reference, mine in zip(references, objects, strict=True)):
                return result
        alive = [entry for entry in known if all(reference() is not None for reference in entry[0])]
        entry = tuple(weakref.ref(mine) for mine in objects), compute()
        self._known = [*alive, entry][-self._most :]
        return entry[1]


def faiss_module() -> Any:
    """FAISS, imported when first needed. Raises MissingDependency that names the extras."""
    try:
        import faiss
    except (ImportError, RuntimeError):  # the GPU build without its libraries raises the latter
        raise MissingDependency(
            "an approximate index needs FAISS; pip install 'softdb[cpu]', or 'softdb[gpu]' (never both). "
            "Exact search needs neither"
        ) from None
    return faiss


def measure_of(metric: Metric) -> Any:
    """What FAISS calls the metric of `prepared` vectors."""
    return faiss_module().METRIC_L2 if metric is Metric.L2 else faiss_module().METRIC_INNER_PRODUCT


def prepared(vectors: NDArray[np.floating], metric: Metric) -> Floats:  # (n, d) -> (n, d)
    """Vectors as an index sees them: float32, of length 1 for the cosine (zero vectors stay)."""
    found = np.ascontiguousarray(vectors, np.float32)
    if metric is Metric.COSINE:
        found = _unit(found)
    return found


def _unit(vectors: Floats) -> Floats:
    """Of length 1, or zeros; float64 holds the squares of every float32."""
    found = np.empty_like(vectors)
    if available():
        native().prepare(vectors, True, found)
        return found
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))[:, None]
    lengths[lengths == 0] = 1
    np.divide(vectors, lengths, out=found, casting="same_kind")
    return found


def sampled(live: Live, most: int, seed: int) -> Rows:  # (m,)
    """Positions of so many live records, by chance, ascending."""
    every = np.flatnonzero(live)
    return np.sort(np.random.default_rng(seed).choice(every, min(len(every), most), replace=False, shuffle=False))


class Selected:
    """Rows that an index may return, in FAISS' own form. Safe to use from several threads."""

    def __init__(self, rows: Rows, covered: int) -> None:
        allowed = np.zeros(covered, np.bool_)
        allowed[rows] = True
        self._bits = np.packbits(allowed, bitorder="little")  # FAISS keeps a pointer only
        self.selector = faiss_module().IDSelectorBitmap(len(self._bits), faiss_module().swig_ptr(self._bits))


class Index(ABC):
    """Codes of the keys of the rows below `covered`, and how hard to look.

    A new engine writes `train`, `codes`, `record_bytes`, `parameters` and its attributes; FAISS does the rest. Safe to
    search from several threads; to add, take a `copy`.
    """

    kind: ClassVar[str]
    effort_name: ClassVar[str]  # what FAISS calls the effort
    effort_most: int  # beyond this more effort changes nothing
    on_gpu: ClassVar[bool] = False
    coverage: Any = None  # what the last snapshot has of it, kept by `softdb.index.search`
    costs: Any = None  # what searches by it cost here, kept by `softdb.index.costs`
    outliers: Any = None  # the copy of the longest keys, kept by `softdb.index.outliers`
    reach: Any = None  # what estimates know of its records, kept by `softdb.index.reach`

    def __init__(self, metric: Metric, inner: Any) -> None:
        self.metric = metric
        self.inner = inner  # the FAISS index; its ids are rows
        self.covered = 0  # rows below this are in it
        self.effort = 1
        self.fetch_k = 10  # candidates that are fetched and rescored for each of the k asked for
        self.tuned_for = 10  # the k for which effort and fetch_k were measured
        self.room: int | None = None  # outliers of norm at most that every query is compared with; None: not measured
        self.longest: Rows | None = None  # their rows, the longest first; None: not known
        self.report: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """An empty index for about `count` records, trained on prepared keys (m, d)."""

    @classmethod
    @abstractmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """What keys may be coded as, by FAISS' names, from the smallest to the finest."""

    @classmethod
    @abstractmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Bytes that a record takes: its code, its id, its links."""

    @abstractmethod
    def parameters(self, effort: int, selector: Any) -> Any:
        """FAISS' search parameters."""

    def add(
        self,
        rows: Rows,  # (n,) ascending, none below `covered`
        keys: NDArray[np.floating],  # (n, d)
    ) -> None:
        """Take records in."""
        self.inner.add_with_ids(prepared(keys, self.metric), rows)
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def find(
        self,
        queries: Floats,  # (q, d) prepared
        c: int,
        allowed: Selected | None = None,  # None: all
        effort: int | None = None,
    ) -> Rows:  # (q, c), -1 = none
        """The c rows of each query whose codes are nearest, in no promised order."""
        # made anew for each call: to search, an id map writes to the parameters
        parameters = self.parameters(min(effort or self.effort, self.effort_most), allowed and allowed.selector)
        pointer, q, queries = faiss_module().swig_ptr, len(queries), np.ascontiguousarray(queries)
        rows, scores = np.empty((q, c), np.int64), np.empty((q, c), np.float32)
        self.inner.search_c(q, pointer(queries), c, pointer(scores), pointer(rows), parameters)
        return rows

    def copy(self) -> Index:
        """An index that can grow while this one is searched."""
        return self.restored(faiss_module().clone_index(self.inner))

    def restored(self, inner: Any, engine: type[Index] | None = None) -> Index:
        """This index around another FAISS index, of its engine or of the same on another device."""
        twin = (engine or type(self))(self.metric, inner)
        for name in ("covered", "effort", "fetch_k", "tuned_for", "room", "longest", "reach"):
            setattr(twin, name, getattr(self, name))
        twin.report = dict(self.report)
        return twin

    def dump(self) -> Any:
        """The codes as bytes, a uint8 array, for the cache."""
        return faiss_module().serialize_index(self.inner)
