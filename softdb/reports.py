"""Reports: what a database holds, what a build measured, what compaction gave back. Plain facts, typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CompactReport",
    "IndexReport",
    "MemoryReport",
    "ReindexReport",
    "Report",
    "SnapshotReport",
    "Stats",
    "ViewReport",
]


ALWAYS = {"always": True}  # told even where it is as by default


@dataclass(frozen=True, repr=False)
class Report:
    """Facts by name."""

    def asdict(self) -> dict[str, Any]:
        """All of them, as JSON takes them."""
        return dataclasses.asdict(self)

    def told(self) -> dict[str, Any]:
        """Those worth telling: what differs from the default, which says that there is nothing."""
        facts = [(fact, getattr(self, fact.name)) for fact in dataclasses.fields(self)]
        return {fact.name: value for fact, value in facts if fact.metadata or value not in (fact.default, {})}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={fact!r}' for name, fact in self.told().items())})"


@dataclass(frozen=True, repr=False)
class IndexReport(Report):
    """The index of a database, as it was built or tuned; `stats().index` adds how it serves now.

    Attributes:
        kind: "ivf", "ivf-rabitq", "ivf-sq8", "hnsw", or "flat", which is exact search.
        recall: the share of the true k nearest that queries found which took no part in tuning.
        met: whether that is the target, at least.
        target, k: the recall asked for, and for which k; 0 of exact search.
        reason: of "flat", why there is no index.
        measured_on: which queries measured the recall.
        codes: how FAISS stores keys; lists: how many inverted lists there are.
        nprobe, ef_search: search effort: lists probed, or records visited in a graph.
        fetch_k: records fetched for each of the k, to be compared exactly.
        outliers: of inner products, how many of the longest keys are compared with every query.
        recall_by_norm: of inner products, for each class of lengths its `recall` and `of` how many it was measured.
        records: how many there were.
        bytes: size of the index.
        device: where it is searched.
        choose_seconds, build_seconds, tune_seconds: what each step took.
        unindexed: records that it lacks; they are compared exactly.
        live_recall, live_checked: mean recall of searches that were checked, and how many were; see `db.watch`.
        building: what a build that goes on is doing; "" where none does.
    """

    kind: str
    recall: float = field(default=1.0, metadata=ALWAYS)
    met: bool = field(default=True, metadata=ALWAYS)
    target: float = 0.0
    k: int = 0
    reason: str = ""
    measured_on: str = ""
    codes: str = ""
    lists: int = 0
    nprobe: int = 0
    ef_search: int = 0
    fetch_k: int = 0
    outliers: int = 0
    recall_by_norm: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: int = 0
    bytes: int = 0
    device: str = "cpu"
    choose_seconds: float = 0.0
    build_seconds: float = 0.0
    tune_seconds: float = 0.0
    unindexed: int = 0
    live_recall: float | None = None
    live_checked: int = 0
    building: str = ""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> IndexReport:
        """From the facts that an index keeps, whatever version of softdb wrote them."""
        named = {_RENAMED.get(name, name): fact for name, fact in facts.items()}
        return cls(**{fact.name: named[fact.name] for fact in dataclasses.fields(cls) if fact.name in named})


_RENAMED = {"efSearch": "ef_search", "candidates": "fetch_k", "young": "unindexed"}


@dataclass(frozen=True, repr=False)
class Stats(Report):
    """What a database is, holds and occupies.

    Attributes:
        path: its directory; None in memory.
        mode: "rw" or "r".
        durability: "full" or "relaxed".
        unflushed: changes that are not on disk yet.
        records: how many there are; dead: rows of deleted and replaced ones, until `compact()`.
        dim, value_dim, num_classes: widths of key and value, or the number of classes.
        dtype, metric: as in `softdb.open`.
        generation: grows with every change.
        segments: how many files a column has.
        fields: declared fields of the payload.
        bytes: size on disk; 0 in memory.
        index: None where search is exact.
    """

    path: str | None
    mode: str
    durability: str
    unflushed: int
    records: int
    dead: int
    dim: int
    value_dim: int | None
    num_classes: int | None
    dtype: str
    metric: str
    generation: int
    segments: int
    fields: list[str]
    bytes: int
    index: IndexReport | None


@dataclass(frozen=True, repr=False)
class CompactReport(Report):
    """What `compact()` has removed.

    Attributes:
        records: how many there are; removed: rows of deleted and replaced ones that are gone.
        segments_before, segments: how many files a column had and has.
        bytes_before, bytes: size on disk; 0 in memory.
    """

    records: int
    removed: int
    segments_before: int
    segments: int
    bytes_before: int
    bytes: int


@dataclass(frozen=True, repr=False)
class SnapshotReport(Report):
    """A copy that `snapshot()` has made: its directory, records, generation, and size on disk in bytes."""

    path: str
    records: int
    generation: int
    bytes: int


@dataclass(frozen=True, repr=False)
class ReindexReport(Report):
    """An indexed copy of encoded or trained keys: its version, records, step of training, and seconds it took."""

    version: int
    records: int
    step: int
    seconds: float


@dataclass(frozen=True, repr=False)
class ViewReport(Report):
    """How old the encoded keys of a View are, and what they cost.

    Attributes:
        version: counts reindexings; 0: none yet.
        records: how many are encoded; unindexed: how many are not yet.
        age: steps since.
        recall: as `measure` found it; None before.
        reindexing: whether one is under way; reindexes: how many have ended.
        seconds, total_seconds: of the last, and of all.
    """

    version: int
    records: int
    unindexed: int
    age: int
    recall: float | None
    reindexing: bool
    reindexes: int
    seconds: float
    total_seconds: float


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """How old the candidates of a Memory, or of other trained keys, are, and what renewing them cost.

    Attributes:
        records, steps: how many there are, and steps of training so far.
        age: steps since candidates were renewed.
        recall: as `measure` found it; None before.
        reindexing: whether a renewal is under way; reindexes: how many have ended.
        seconds, total_seconds: of the last, and of all.
        uncommitted: records that had a gradient since the last commit; None for keys that are never committed.
    """

    records: int
    steps: int
    age: int
    recall: float | None
    reindexing: bool
    reindexes: int
    seconds: float
    total_seconds: float
    uncommitted: int | None = None
