"""The interface of an approximate index. An index finds candidate rows by codes; it never scores and holds no keys."""

from __future__ import annotations

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
    """The answer of a search: the records, maybe their scores, and how they were found."""

    positions: Rows  # (q, k), best first, -1 = none
    scores: Floats | None  # (q, k) exact scores in float32; None if not all were computed
    finder: str  # the kind of the index, or "flat", which is exact


class Recent(Generic[T]):
    """A cache of results for the last few objects, such as masks, compared by identity. Safe to use from any thread."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._known: list[tuple[tuple[weakref.ref[Any], ...], T]] = []  # replaced by a new list, never changed in place

    def of(self, compute: Callable[[], T], *objects: object) -> T:
        """Return the cached result for these objects; call `compute` if there is none."""
        known = self._known
        for references, result in known:
            if all(reference() is item for reference, item in zip(references, objects, strict=True)):
                return result
        alive = [entry for entry in known if all(reference() is not None for reference in entry[0])]
        entry = tuple(weakref.ref(item) for item in objects), compute()
        self._known = [*alive, entry][-self._most :]
        return entry[1]


def faiss_module() -> Any:
    """Import and return FAISS. Raises MissingDependency, whose message names the extras to install."""
    try:
        import faiss
    except (ImportError, RuntimeError):  # RuntimeError: FAISS for GPUs without its libraries
        raise MissingDependency(
            "an approximate index needs FAISS; pip install 'softdb[cpu]', or 'softdb[gpu]' (never both). "
            "Exact search needs neither"
        ) from None
    return faiss


def measure_of(metric: Metric) -> Any:
    """Return FAISS' constant for the metric that compares `prepared` vectors."""
    return faiss_module().METRIC_L2 if metric is Metric.L2 else faiss_module().METRIC_INNER_PRODUCT


def prepared(vectors: NDArray[np.floating], metric: Metric) -> Floats:  # (n, d) -> (n, d)
    """Return vectors as an index compares them: float32, and for the cosine of length 1 (zero vectors stay zero)."""
    plain = np.ascontiguousarray(vectors, np.float32)
    if metric is Metric.COSINE:
        plain = _unit(plain)
    return plain


def _unit(vectors: Floats) -> Floats:
    """Scale vectors to length 1; zero vectors stay. Lengths are float64, which holds the square of any float32."""
    units = np.empty_like(vectors)
    if available():
        native().prepare(vectors, units)
        return units
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))[:, None]
    lengths[lengths == 0] = 1
    np.divide(vectors, lengths, out=units, casting="same_kind")
    return units


def sampled(live: Live, most: int, seed: int) -> Rows:  # (m,)
    """Return the positions of `most` random live records, or of all live records if they are fewer, ascending."""
    every = np.flatnonzero(live)
    return np.sort(np.random.default_rng(seed).choice(every, min(len(every), most), replace=False, shuffle=False))


class Selected:
    """A FAISS selector of the rows that an index may return. Safe to use from several threads."""

    def __init__(self, rows: Rows, covered: int) -> None:
        allowed = np.zeros(covered, np.bool_)
        allowed[rows] = True
        self._bits = np.packbits(allowed, bitorder="little")  # stored here, as FAISS stores only a pointer
        self.selector = faiss_module().IDSelectorBitmap(len(self._bits), faiss_module().swig_ptr(self._bits))


class Reach(NamedTuple):
    """Statistics of the values of an index's records. Records set apart do not count for `value_radius`."""

    apart: Rows  # (m,) rows of the records set apart, ascending
    scales: Floats  # (m,) ‖v - centre‖ / `value_radius` for each of these rows, at least 1
    means: Floats  # (lists, v) mean value in each list; for labels their shares, (lists, 0) if classes are many
    centre: Numbers  # (v,) mean of a sample of the values; (0,) for labels
    value_radius: float  # the largest ‖v - centre‖ of records that are not set apart
    witnesses: Rows  # (w,) sampled rows; `checksums` show whether the statistics belong to a database
    checksums: NDArray[np.uint32]  # (w,) CRC-32 over key and value of each witness


class Index(ABC):
    """An approximate index: codes of the keys of rows below `covered`, and the search effort.

    An engine in FAISS implements `train`, `record_bytes`, `parameters` and the class attributes. An engine of our own
    (`softdb.index.lists`) also overrides every method that calls FAISS. Several threads may search an index at once; to
    change an index in use, change a `copy`.
    """

    kind: ClassVar[str]
    effort_name: ClassVar[str]  # name of the effort in reports
    filters_inside: ClassVar[bool] = False  # True: a search scans only the records that a filter allows
    levels: ClassVar[tuple[int, ...]] = (6, 10, 20, 40, 80, 160)  # values of fetch_k that tuning tries
    searches: ClassVar[bool] = True  # False: the codes are used for estimates only; searches are exact
    devices: ClassVar[Devices | None] = None  # devices that hold the index; None: the CPU
    effort_least, effort_most = 1, 1 << 30  # range of useful values of `effort`

    def __init__(self, metric: Metric, inner: Any) -> None:
        self.metric = metric
        self.inner = inner  # the FAISS index; its ids are rows
        self.covered = 0  # all rows below this number are in the index
        self.effort = 1
        self.fetch_k = 10  # number of candidates rescored for each of the k wanted records
        self.tuned_for = 10  # the k for which effort and fetch_k were measured
        self.room: int | None = None  # largest number of outliers of norm; None: not measured
        self.longest: Rows | None = None  # rows of the outliers of norm, the longest key first; None: unknown
        self.reach: Reach | None = None  # statistics for estimates; None: not measured
        self.companion: Index | None = None  # sketches for estimates; None if the index has its own
        self.report: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Return an empty index for about `count` records, trained on a sample (m, d) of prepared keys."""

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Return the names of the engine's codes, from the smallest to the finest. "SQ8": a byte for each number."""
        return ("SQ8",)

    @classmethod
    @abstractmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes that one record takes in the index: its code, its id, and the links of a graph."""

    def parameters(self, effort: int, selector: Any) -> Any:
        """Return FAISS search parameters. An engine that overrides `find` does not need this method."""
        raise NotImplementedError

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Read the bytes that `dump` wrote. Raises ValueError if the keys have another width than `dim`."""
        inner = faiss_module().deserialize_index(data)
        if dim is not None and inner.d != dim:
            raise ValueError(f"the keys of the index are {inner.d} wide; expected {dim}")
        return cls(metric, inner)

    def dump(self) -> NDArray[np.uint8]:
        """Return the index as bytes for the index file."""
        data: NDArray[np.uint8] = faiss_module().serialize_index(self.inner)
        return data

    @property
    def count(self) -> int:
        """Number of records in the index."""
        return int(self.inner.ntotal)

    @property
    def sketches(self) -> Index | None:
        """The index from whose codes estimates draw: this index or its companion. None: estimates are exact."""
        return self.companion

    @property
    def place(self) -> str:
        """Name of the device that holds the index, for reports."""
        return "cpu"

    def add(
        self,
        rows: Rows,  # (n,) ascending, all at least `covered`
        keys: NDArray[np.floating],  # (n, d)
    ) -> None:
        """Add records to the index. Call `seal` after the last call of `add`."""
        self.inner.add_with_ids(prepared(keys, self.metric), rows)
        if self.companion is not None:
            self.companion.add(rows, keys)
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """Finish a series of `add` calls, so that searches find the added records."""
        if self.companion is not None:
            self.companion.seal()

    def keep_only(self, rows: Rows) -> None:
        """Remove all records but those in `rows`. Raises RuntimeError if the engine cannot remove records (a graph)."""
        self.inner.remove_ids(faiss_module().IDSelectorNot(Selected(rows, self.covered).selector))
        if self.companion is not None:
            self.companion.keep_only(rows)

    def fit(  # noqa: B027
        self,
        queries: Floats,  # (q, d) prepared
        truth: Rows,  # (q, k) rows of the true nearest records, -1 = none
        rows: Rows | None = None,  # records that `truth` is taken from; None: all
    ) -> None:
        """Fit the index to queries with known answers, before the effort is tuned. Does nothing for most engines."""

    def find(
        self,
        queries: Floats,  # (q, d) prepared
        c: int,
        rows: Rows | None = None,  # rows that may be returned; None: all
        effort: int | None = None,
    ) -> Rows:  # (q, c), -1 = none
        """Return the c rows whose codes are nearest to each query, in any order."""
        return self.search(queries, c, None if rows is None else Selected(rows, self.covered), effort)

    def search(self, queries: Floats, c: int, allowed: Selected | None, effort: int | None = None) -> Rows:
        """Search as `find` does, with the allowed rows given as a FAISS selector (None: all rows)."""
        # new parameters for each call, as FAISS' id map writes to them
        parameters = self.parameters(min(effort or self.effort, self.effort_most), allowed and allowed.selector)
        pointer, q, queries = faiss_module().swig_ptr, len(queries), np.ascontiguousarray(queries)
        rows, scores = np.empty((q, c), np.int64), np.empty((q, c), np.float32)
        self.inner.search_c(q, pointer(queries), c, pointer(scores), pointer(rows), parameters)
        return rows

    def cost(self, queries: Floats, k: int, effort: int) -> float | None:  # (q, d) prepared
        """Return the cost of a query in a unit that does not depend on the machine. None: time the search instead."""
        return None

    def candidates_for(self, k: int) -> int:
        """Return the number of candidates that a search for k records scores exactly."""
        return max(FLOOR, self.fetch_k * k)

    def effort_for(self, k: int) -> int:
        """Return the effort of a search for k records. It grows with k, as more records are spread over more lists."""
        return self.effort * max(1, -(-k // self.tuned_for))

    def copy(self) -> Index:
        """Return a copy to which records can be added while this index is searched."""
        return self.restored(faiss_module().clone_index(self.inner))

    def hosted(self) -> Index:
        """Return a copy on the CPU, from which rows can be removed."""
        return self.copy()

    def restored(self, inner: Any, engine: type[Index] | None = None) -> Index:
        """Wrap another FAISS index, maybe of another engine. Copy this index's effort, statistics and report to it."""
        twin = (engine or type(self))(self.metric, inner)
        for name in ("covered", "effort", "fetch_k", "tuned_for", "room", "longest", "reach"):
            setattr(twin, name, getattr(self, name))
        twin.companion = None if self.companion is None else self.companion.copy()
        twin.report = dict(self.report)
        return twin


class Devices(Protocol):
    """Devices that a database computes on. They hold copies of its columns, and maybe an index.

    Class `softdb.device.Board` implements this protocol; a database passes a board to its finder.
    """

    @property
    def name(self) -> str:
        """Name of the devices in reports."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the columns on the devices; None: as stored."""

    @property
    def engines(self) -> Mapping[str, type[Index]]:
        """Engines that the devices can run, by kind of index. Empty: searches compare every record."""

    def columns(self, snapshot: Snapshot, device: torch.device) -> PlacedColumns | None:
        """Return a snapshot's columns on a device. None: queries on that device read the host's columns."""

    def beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Return True if the devices hold all keys, and `device` is one of them."""

    def nearest(self, snapshot: Snapshot, query: Query) -> Rows:  # (q, k)
        """Return the positions of the k nearest records by comparing all, as `softdb.index.flat.nearest` does."""

    def find(self, snapshot: Snapshot, index: Index, query: Query) -> FinderResult | None:  # (q, k)
        """Find the k nearest records by an index on the devices, as `softdb.index.search.Searcher.find` does.

        Return None if comparing every record costs less or is the only way.
        """

    def placed(self, index: Index) -> Index:
        """Copy an index to the devices. Return the index itself if the devices cannot run its engine."""

    def small(self, snapshot: Snapshot) -> bool:
        """Return True if comparing every record takes a few milliseconds at most."""

    def require_faiss(self) -> None:
        """Raise MissingDependency if FAISS cannot use the devices."""

    def require_process(self) -> None:
        """Raise DeviceFailed if this process cannot use the devices."""

    def report(self, schema: Schema) -> DeviceReport:
        """Return a report on the columns that the devices hold."""

    def forget(self) -> None:
        """Release all memory on the devices."""
