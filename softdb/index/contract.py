"""The contract of an approximate index: it says which rows may be near, by codes. It never scores and holds no keys."""

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

FLOOR = 64  # candidates that are scored exactly at least

T = TypeVar("T")


class Found(NamedTuple):
    """Answer of a finder."""

    positions: Rows  # (q, k), best first, -1 = none
    scores: Floats | None  # (q, k) their exact scores in float32; None where they were not all computed
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
    """FAISS' constant for the metric of `prepared` vectors."""
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


class Reach(NamedTuple):
    """Statistics of the values of the records that an index holds; those set apart are in none of the maxima."""

    apart: Rows  # (m,) ascending: scored for every query
    scales: Floats  # (m,) how far their values reach, in units of `value_radius`, at least 1
    means: Floats  # (lists, v) of the values; of labels their shares, or (lists, 0) where there are many classes
    centre: Numbers  # (v,) mean of some values; of labels nothing
    value_radius: float  # the largest ‖v - centre‖
    witnesses: Rows  # (w,) rows, by which it is known of which records all this was measured
    checksums: NDArray[np.uint32]  # (w,) of their keys and values


class Index(ABC):
    """Codes of the keys of the rows below `covered`, and how hard to look.

    A new engine in FAISS writes `train`, `codes`, `record_bytes`, `parameters` and its attributes; one of its own, as
    `softdb.index.lists`, all that names FAISS here. Safe to search from several threads; to change it, take a `copy`.
    """

    kind: ClassVar[str]
    effort_name: ClassVar[str]  # what a report calls the effort
    filters_inside: ClassVar[bool] = False  # one scan searches any share of the records: see `Lists`
    levels: ClassVar[tuple[int, ...]] = (6, 10, 20, 40, 80, 160)  # of fetch_k: beyond, codes are not worth their scan
    searches: ClassVar[bool] = True  # False: it holds codes for estimates alone, and search is exact
    devices: ClassVar[Devices | None] = None  # that the index lies on; None: the CPU
    effort_least, effort_most = 1, 1 << 30  # below and beyond, effort changes nothing

    def __init__(self, metric: Metric, inner: Any) -> None:
        self.metric = metric
        self.inner = inner  # the FAISS index; its ids are rows
        self.covered = 0  # rows below this are in it
        self.effort = 1
        self.fetch_k = 10  # candidates that are fetched and rescored for each of the k asked for
        self.tuned_for = 10  # the k for which effort and fetch_k were measured
        self.room: int | None = None  # outliers of norm at most that every query is compared with; None: not measured
        self.longest: Rows | None = None  # their rows, the longest first; None: not known
        self.reach: Reach | None = None  # what estimates know of its records; None: not measured
        self.companion: Index | None = None  # by which estimates draw, where codes of searches alone are in this one
        self.report: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """An empty index for about `count` records, trained on prepared keys (m, d)."""

    @classmethod
    @abstractmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Codes that keys may have, from the smallest to the finest."""

    @classmethod
    @abstractmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Bytes that a record takes: its code, its id, its links."""

    def parameters(self, effort: int, selector: Any) -> Any:
        """FAISS' search parameters; an engine with a `find` of its own needs none."""
        raise NotImplementedError

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read what `dump` wrote, by FAISS' reader. Raises ValueError where it is of keys of another width."""
        inner = faiss_module().deserialize_index(data)
        if dim is not None and inner.d != dim:
            raise ValueError(f"it is of keys {inner.d} wide")
        return cls(metric, inner)

    def dump(self) -> NDArray[np.uint8]:
        """The codes as bytes, for the cache, by FAISS' writer."""
        data: NDArray[np.uint8] = faiss_module().serialize_index(self.inner)
        return data

    @property
    def count(self) -> int:
        """Records that it holds."""
        return int(self.inner.ntotal)

    @property
    def sketches(self) -> Index | None:
        """The codes by which estimates draw, itself or its companion; None: there are none, they are exact."""
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
        """Take records in; the last ones are followed by `seal`."""
        self.inner.add_with_ids(prepared(keys, self.metric), rows)
        if self.companion is not None:
            self.companion.add(rows, keys)
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """End a run of `add`."""
        if self.companion is not None:
            self.companion.seal()

    def keep_only(self, rows: Rows) -> None:
        """Remove all other records. Raises RuntimeError where the engine cannot, as a graph."""
        self.inner.remove_ids(faiss_module().IDSelectorNot(Selected(rows, self.covered).selector))
        if self.companion is not None:
            self.companion.keep_only(rows)

    def fit(  # noqa: B027
        self,
        queries: Floats,  # (q, d) prepared
        truth: Rows,  # (q, k) the rows of their nearest, -1 = none
        rows: Rows | None = None,  # among which these are the nearest; None: all
    ) -> None:
        """Learn from queries whose answers are known, before the effort is tuned."""

    def find(
        self,
        queries: Floats,  # (q, d) prepared
        c: int,
        rows: Rows | None = None,  # that may be found; None: all
        effort: int | None = None,
    ) -> Rows:  # (q, c), -1 = none
        """The c rows of each query whose codes are nearest, in no promised order."""
        return self.search(queries, c, None if rows is None else Selected(rows, self.covered), effort)

    def search(self, queries: Floats, c: int, allowed: Selected | None, effort: int | None = None) -> Rows:
        """As `find`, for rows in FAISS' own form."""
        # made anew for each call: to search, an id map writes to the parameters
        parameters = self.parameters(min(effort or self.effort, self.effort_most), allowed and allowed.selector)
        pointer, q, queries = faiss_module().swig_ptr, len(queries), np.ascontiguousarray(queries)
        rows, scores = np.empty((q, c), np.int64), np.empty((q, c), np.float32)
        self.inner.search_c(q, pointer(queries), c, pointer(scores), pointer(rows), parameters)
        return rows

    def cost(self, queries: Floats, k: int, effort: int) -> float | None:  # (q, d) prepared
        """Cost of a query in any unit, the same on every machine; None: the clock has to tell."""
        return None

    def kept_for(self, k: int) -> int:
        """Candidates that are scored exactly to find k."""
        return max(FLOOR, self.fetch_k * k)

    def effort_for(self, k: int) -> int:
        """Effort to find k with: farther neighbours lie in more places."""
        return self.effort * max(1, -(-k // self.tuned_for))

    def copy(self) -> Index:
        """An index that can grow while this one is searched."""
        return self.restored(faiss_module().clone_index(self.inner))

    def hosted(self) -> Index:
        """A copy on the CPU, from which rows can be removed."""
        return self.copy()

    def restored(self, inner: Any, engine: type[Index] | None = None) -> Index:
        """This index around other codes, of its engine or of the same on another device."""
        twin = (engine or type(self))(self.metric, inner)
        for name in ("covered", "effort", "fetch_k", "tuned_for", "room", "longest", "reach"):
            setattr(twin, name, getattr(self, name))
        twin.companion = None if self.companion is None else self.companion.copy()
        twin.report = dict(self.report)
        return twin

    def twin(self) -> Index:
        """An index of the same codes that is tuned while this one is searched."""
        return copy.copy(self)


class Devices(Protocol):
    """The devices that a database computes on: they hold copies of its columns, and an index where they have engines.

    `softdb.device.Board` implements it; the database gives one to its finder.
    """

    @property
    def name(self) -> str:
        """The devices as they are shown."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the columns there; None: as they are stored."""

    @property
    def engines(self) -> Mapping[str, type[Index]]:
        """Kinds of index that have a form there; none: every record is compared."""

    def columns(self, snapshot: Snapshot, device: torch.device) -> PlacedColumns | None:
        """A snapshot's columns for queries that lie on a device; None where the host's serve."""

    def beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Return True if all keys lie on the devices, and queries on a device with them."""

    def nearest(self, snapshot: Snapshot, query: Query) -> Rows:  # (q, k)
        """As `softdb.index.flat.nearest`."""

    def find(self, snapshot: Snapshot, index: Index, query: Query) -> Found | None:  # (q, k)
        """As `softdb.index.search.Searcher.find`, by an index that lies there.

        None where comparing every record costs less, or is the only way.
        """

    def placed(self, index: Index) -> Index:
        """An index of the CPU, copied there; as it is where it has no form there."""

    def small(self, snapshot: Snapshot) -> bool:
        """Return True if comparing every record takes a moment."""

    def require_faiss(self) -> None:
        """Raise MissingDependency where FAISS cannot use the devices."""

    def require_process(self) -> None:
        """Raise DeviceFailed where this process cannot use the devices."""

    def report(self, schema: Schema) -> DeviceReport:
        """Columns that lie there."""

    def forget(self) -> None:
        """Give all memory back."""
