"""The contract of an approximate index, which finds candidate rows by codes. It never scores and holds no keys."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric, Schema
from softdb.errors import MissingDependency
from softdb.index.placement import PlacedColumns
from softdb.index.query import Query
from softdb.kernels import available, native
from softdb.reports import DeviceReport
from softdb.store import Snapshot

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Live = NDArray[np.bool_]
Numbers = NDArray[np.float64]

FLOOR = 64  # least number of candidates that are scored exactly

T = TypeVar("T")


class FinderResult(NamedTuple):
    """Answer of a finder."""

    positions: Rows  # (q, k), best first, -1 = none
    scores: Floats | None  # (q, k) exact scores in float32; None if not all were computed
    finder: str  # the kind of the index, or "flat", which is exact


class Recent(Generic[T]):
    """Results computed from the last few objects, such as masks, known by identity. Safe to use from any thread."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: list[tuple[tuple[weakref.ref[Any], ...], T]] = []  # replaced, never changed

    def of(self, compute: Callable[[], T], *objects: object) -> T:
        """Return the result for these objects, computed if it is not cached."""
        known = self._known
        for references, result in known:
            if all(reference() is item for reference, item in zip(references, objects, strict=True)):
                return result
        alive = [entry for entry in known if all(reference() is not None for reference in entry[0])]
        entry = tuple(weakref.ref(item) for item in objects), compute()
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
    """FAISS' constant for the metric of `prepared` vectors."""
    return faiss_module().METRIC_L2 if metric is Metric.L2 else faiss_module().METRIC_INNER_PRODUCT


def prepared(vectors: NDArray[np.floating], metric: Metric) -> Floats:  # (n, d) -> (n, d)
    """Vectors as an index sees them: float32, of length 1 for the cosine (zero vectors stay)."""
    plain = np.ascontiguousarray(vectors, np.float32)
    if metric is Metric.COSINE:
        plain = _unit(plain)
    return plain


def _unit(vectors: Floats) -> Floats:
    """Vectors of length 1, or zeros. Lengths are computed in float64, which holds the square of every float32."""
    units = np.empty_like(vectors)
    if available():
        native().prepare(vectors, True, units)
        return units
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))[:, None]
    lengths[lengths == 0] = 1
    np.divide(vectors, lengths, out=units, casting="same_kind")
    return units


def sampled(live: Live, most: int, seed: int) -> Rows:  # (m,)
    """Positions of `most` random live records, or all if they are fewer, ascending."""
    every = np.flatnonzero(live)
    return np.sort(np.random.default_rng(seed).choice(every, min(len(every), most), replace=False, shuffle=False))


class Selected:
    """Rows that an index may return, as a FAISS selector. Safe to use from several threads."""

    def __init__(self, rows: Rows, covered: int) -> None:
        allowed = np.zeros(covered, np.bool_)
        allowed[rows] = True
        self._bits = np.packbits(allowed, bitorder="little")  # FAISS keeps a pointer only
        self.selector = faiss_module().IDSelectorBitmap(len(self._bits), faiss_module().swig_ptr(self._bits))


class Reach(NamedTuple):
    """Statistics of the values of the records that an index holds; those set apart are in none of the maxima."""

    apart: Rows  # (m,) ascending: scored for every query
    scales: Floats  # (m,) ‖v - centre‖ of their values in units of `value_radius`, at least 1
    means: Floats  # (lists, v) means of the values; shares of the labels, or (lists, 0) for many classes
    centre: Numbers  # (v,) mean of some values; (0,) for labels
    value_radius: float  # the largest ‖v - centre‖
    witnesses: Rows  # (w,) rows whose checksums prove that the statistics are of these records
    checksums: NDArray[np.uint32]  # (w,) of their keys and values


class Index(ABC):
    """Codes of the keys of rows below `covered`, and the search effort.

    An engine in FAISS implements `train`, `codes`, `record_bytes`, `parameters` and the attributes; another engine, as
    `softdb.index.lists`, also overrides every method that calls FAISS. Safe to search from several threads; change a
    `copy`.
    """

    kind: ClassVar[str]
    effort_name: ClassVar[str]  # name of the effort in reports
    filters_inside: ClassVar[bool] = False  # True: a search scans only records that a filter allows
    levels: ClassVar[tuple[int, ...]] = (6, 10, 20, 40, 80, 160)  # values of fetch_k that tuning tries
    searches: ClassVar[bool] = True  # False: the codes serve estimates alone, and search is exact
    devices: ClassVar[Devices | None] = None  # devices that hold the index; None: the CPU
    effort_least, effort_most = 1, 1 << 30  # range in which effort has an effect

    def __init__(self, metric: Metric, inner: Any) -> None:
        self.metric = metric
        self.inner = inner  # the FAISS index; its ids are rows
        self.covered = 0  # all rows below are in the index
        self.effort = 1
        self.fetch_k = 10  # candidates that are fetched and rescored, for each of the k wanted
        self.tuned_for = 10  # the k for which effort and fetch_k were measured
        self.room: int | None = None  # most outliers of norm that queries are compared with; None: not measured
        self.longest: Rows | None = None  # rows of the outliers, the longest first; None: unknown
        self.reach: Reach | None = None  # statistics for estimates; None: not measured
        self.companion: Index | None = None  # sketches for estimates, if this index has none itself
        self.report: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """An empty index for about `count` records, trained on prepared keys (m, d)."""

    @classmethod
    @abstractmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Names of the codes that keys may have, from the smallest to the finest."""

    @classmethod
    @abstractmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Bytes of a record in the index: its code, its id, its links."""

    def parameters(self, effort: int, selector: Any) -> Any:
        """FAISS search parameters; unused by an engine with a `find` of its own."""
        raise NotImplementedError

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read what `dump` wrote. Raises ValueError if it holds keys of another width than `dim`."""
        inner = faiss_module().deserialize_index(data)
        if dim is not None and inner.d != dim:
            raise ValueError(f"it is of keys {inner.d} wide")
        return cls(metric, inner)

    def dump(self) -> NDArray[np.uint8]:
        """The index as bytes, for the cache."""
        data: NDArray[np.uint8] = faiss_module().serialize_index(self.inner)
        return data

    @property
    def count(self) -> int:
        """Number of records in the index."""
        return int(self.inner.ntotal)

    @property
    def sketches(self) -> Index | None:
        """The index whose codes estimates draw by, itself or its companion; None: estimates are exact."""
        return self.companion

    @property
    def place(self) -> str:
        """Name of the device that the index lies on, for reports."""
        return "cpu"

    def add(
        self,
        rows: Rows,  # (n,) ascending, none below `covered`
        keys: NDArray[np.floating],  # (n, d)
    ) -> None:
        """Add records. Call `seal` after the last ones."""
        self.inner.add_with_ids(prepared(keys, self.metric), rows)
        if self.companion is not None:
            self.companion.add(rows, keys)
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """Finish a series of `add`."""
        if self.companion is not None:
            self.companion.seal()

    def keep_only(self, rows: Rows) -> None:
        """Remove all other records. Raises RuntimeError if the engine cannot remove, as a graph."""
        self.inner.remove_ids(faiss_module().IDSelectorNot(Selected(rows, self.covered).selector))
        if self.companion is not None:
            self.companion.keep_only(rows)

    def fit(  # noqa: B027
        self,
        queries: Floats,  # (q, d) prepared
        truth: Rows,  # (q, k) the rows of their nearest, -1 = none
        rows: Rows | None = None,  # records that `truth` is taken from; None: all
    ) -> None:
        """Learn from queries with known answers, before the effort is tuned."""

    def find(
        self,
        queries: Floats,  # (q, d) prepared
        c: int,
        rows: Rows | None = None,  # that may be returned; None: all
        effort: int | None = None,
    ) -> Rows:  # (q, c), -1 = none
        """The c rows of each query whose codes are nearest, in any order."""
        return self.search(queries, c, None if rows is None else Selected(rows, self.covered), effort)

    def search(self, queries: Floats, c: int, allowed: Selected | None, effort: int | None = None) -> Rows:
        """As `find`, for rows as a FAISS selector."""
        # new ones for each call, as a search by an id map writes to them
        parameters = self.parameters(min(effort or self.effort, self.effort_most), allowed and allowed.selector)
        pointer, q, queries = faiss_module().swig_ptr, len(queries), np.ascontiguousarray(queries)
        rows, scores = np.empty((q, c), np.int64), np.empty((q, c), np.float32)
        self.inner.search_c(q, pointer(queries), c, pointer(scores), pointer(rows), parameters)
        return rows

    def cost(self, queries: Floats, k: int, effort: int) -> float | None:  # (q, d) prepared
        """Cost of a query in a unit that is the same on every machine; None: it has to be timed."""
        return None

    def candidates_for(self, k: int) -> int:
        """Number of candidates that are scored exactly to find k."""
        return max(FLOOR, self.fetch_k * k)

    def effort_for(self, k: int) -> int:
        """Effort of a search for k: farther neighbours lie in more lists."""
        return self.effort * max(1, -(-k // self.tuned_for))

    def copy(self) -> Index:
        """A copy that can grow while this index is searched."""
        return self.restored(faiss_module().clone_index(self.inner))

    def hosted(self) -> Index:
        """A copy on the CPU, from which rows can be removed."""
        return self.copy()

    def restored(self, inner: Any, engine: type[Index] | None = None) -> Index:
        """An index with the attributes of this one around another FAISS index, maybe of another engine."""
        twin = (engine or type(self))(self.metric, inner)
        for name in ("covered", "effort", "fetch_k", "tuned_for", "room", "longest", "reach"):
            setattr(twin, name, getattr(self, name))
        twin.companion = None if self.companion is None else self.companion.copy()
        twin.report = dict(self.report)
        return twin

    def twin(self) -> Index:
        """An index of the same codes that can be tuned while this one is searched."""
        return copy.copy(self)


class Devices(Protocol):
    """Devices that a database computes on. They hold copies of its columns, and an index of an engine that they have.

    `softdb.device.Board` implements it; the database gives one to its finder.
    """

    @property
    def name(self) -> str:
        """Name of the devices in reports."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the columns on the devices; None: as stored."""

    @property
    def engines(self) -> Mapping[str, type[Index]]:
        """Engines of the devices by kind; empty: every record is compared."""

    def columns(self, snapshot: Snapshot, device: torch.device) -> PlacedColumns | None:
        """A snapshot's columns on a device; None if queries there read the host's."""

    def beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Return True if the devices hold all keys, and `device` is one of them."""

    def nearest(self, snapshot: Snapshot, query: Query) -> Rows:  # (q, k)
        """As `softdb.index.flat.nearest`."""

    def find(self, snapshot: Snapshot, index: Index, query: Query) -> FinderResult | None:  # (q, k)
        """As `softdb.index.search.Searcher.find`, by an index on the devices.

        None if comparing every record costs less or is the only way.
        """

    def placed(self, index: Index) -> Index:
        """A copy of an index on the devices, or the index itself if they have no such engine."""

    def small(self, snapshot: Snapshot) -> bool:
        """Return True if comparing every record takes a few milliseconds at most."""

    def require_faiss(self) -> None:
        """Raise MissingDependency if FAISS cannot use the devices."""

    def require_process(self) -> None:
        """Raise DeviceFailed if this process cannot use the devices."""

    def report(self, schema: Schema) -> DeviceReport:
        """Report on the columns that the devices hold."""

    def forget(self) -> None:
        """Release all memory."""
