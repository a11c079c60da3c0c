"""Reports: what a database holds, what a build measured, what compaction gave back. Plain facts, typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CompactReport", "DeviceReport", "IndexReport", "MemoryReport", "ReembedReport", "ReindexReport", "SnapshotReport",
    "Stats", "ViewReport",
]  # fmt: skip

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
    """The index of a database, as it was built or tuned; `stats().index` adds how it serves now."""

    kind: str  # "ivf", "hnsw", on a GPU "ivf-sq8", or "flat", which is exact search
    recall: float = field(default=1.0, metadata=ALWAYS)  # the true k nearest that queries found which tuned nothing
    met: bool = field(default=True, metadata=ALWAYS)  # whether that is the target, at least
    target: float = 0.0  # the recall asked for; 0 of exact search
    k: int = 0  # for which k
    reason: str = ""  # of "flat", why there is no index
    measured_on: str = ""  # which queries measured the recall
    codes: str = ""  # how keys are stored: "PQ96x4" is a code of 96 parts of 4 bits
    lists: int = 0  # inverted lists
    records_per_match: int = 0  # search effort of lists: one is scanned that has a match among so many records
    nprobe: int = 0  # search effort on a GPU: lists probed
    ef_search: int = 0  # search effort: records visited in a graph
    fetch_k: int = 0  # records fetched for each of the k, to be compared exactly
    outliers: int = 0  # of inner products: the longest keys, which are compared with every query
    recall_by_norm: dict[str, dict[str, Any]] = field(default_factory=dict)  # by length of key: `recall`, `of` how many
    records: int = 0
    bytes: int = 0  # size of the index
    device: str = "cpu"  # where it is searched
    choose_seconds: float = 0.0  # what each step took
    build_seconds: float = 0.0
    tune_seconds: float = 0.0
    unindexed: int = 0  # records that it lacks; they are compared exactly
    live_recall: float | None = None  # mean recall of the searches that `db.watch` checked
    live_checked: int = 0  # how many were
    building: str = ""  # what a build that goes on is doing; "" where none does

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> IndexReport:
        """From the facts that an index keeps, whatever version of softdb wrote them."""
        named = {_RENAMED.get(name, name): fact for name, fact in facts.items()}
        return cls(**{fact.name: named[fact.name] for fact in dataclasses.fields(cls) if fact.name in named})


_RENAMED = {"efSearch": "ef_search", "candidates": "fetch_k", "young": "unindexed"}


@dataclass(frozen=True, repr=False)
class DeviceReport(Report):
    """Columns of a database on the devices that it computes on, as of now."""

    devices: list[str]  # each with a run of the records
    keys: str = field(metadata=ALWAYS)  # "resident", "streamed" where they do not fit, or "not asked for yet"
    values: str = field(metadata=ALWAYS)  # likewise; "the keys" where these serve
    dtype: str  # of the copies there
    bytes: int  # that these take
    kernels: str = field(metadata=ALWAYS)  # "triton", or why torch serves in their place


@dataclass(frozen=True, repr=False)
class Stats(Report):
    """Description of a database: its schema, its records and its size."""

    path: str | None  # its directory; None in memory
    mode: str  # "rw" or "r"
    durability: str  # "full" or "relaxed"
    unflushed: int  # changes that are not on disk yet
    records: int
    keyless: int  # of them without a key: no vector meets these
    dead: int  # rows of deleted and replaced records, until `compact()`
    dim: int  # d
    value_dim: int | None  # v
    num_classes: int | None
    dtype: str
    metric: str
    encoder: str | None  # the name of what made the keys, where it is known
    generation: int  # grows with every change
    segments: int  # files of a column
    fields: list[str]  # declared fields of the payload
    text_index: str | None  # "words" or "trigram"; None: the texts have no index
    bytes: int  # size on disk; 0 in memory
    kernels: str  # the instruction set of the kernels in use, or why torch serves in their place
    index: IndexReport | None  # None where nothing was built
    device: DeviceReport | None = None  # None: the CPU


@dataclass(frozen=True, repr=False)
class CompactReport(Report):
    """Report of `compact()`: what was removed."""

    records: int
    removed: int  # rows of deleted and replaced records that are gone
    segments_before: int  # files of a column
    segments: int
    bytes_before: int  # size on disk; 0 in memory
    bytes: int


@dataclass(frozen=True, repr=False)
class ReembedReport(Report):
    """A change of the encoder by `reembed()`."""

    records: int
    embedded: int  # by this run; for the others it found keys that a run before it had made
    dim: int  # d, the width of the new keys
    encoder: str | None  # the name of what made them
    generation: int  # the commit that changed them
    seconds: float


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
    """Age of the encoded keys of a View, and their cost."""

    version: int  # counts reindexings; 0: none yet
    records: int  # encoded
    unindexed: int  # not encoded yet
    age: int  # steps since
    recall: float | None  # as `measure` found it; None before
    reindexing: bool  # whether one is under way
    reindexes: int  # how many have ended
    seconds: float  # of the last
    total_seconds: float  # of all


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """Age of the candidates of a Memory, or of other trained keys, and the cost of renewing them."""

    records: int
    steps: int  # of training, so far
    age: int  # steps since candidates were renewed
    recall: float | None  # as `measure` found it; None before
    reindexing: bool  # whether a renewal is under way
    reindexes: int  # how many have ended
    seconds: float  # of the last
    total_seconds: float  # of all
    uncommitted: int | None = None  # records with a gradient since the last commit; None: keys never committed
