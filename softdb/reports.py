"""Reports of operations on a database and its statistics, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from softdb.visible import table

__all__ = [
    "CompactReport", "DeviceReport", "IndexReport", "MemoryReport", "ReembedReport", "ReindexReport", "ShardReport",
    "SnapshotReport", "Stats", "ViewReport",
]  # fmt: skip

ALWAYS = {"always": True}  # metadata of a field that `summary` includes even at its default


@dataclass(frozen=True, repr=False)
class Report:
    """Base of all reports."""

    def asdict(self) -> dict[str, Any]:
        """Return all fields, as a dict for JSON."""
        return dataclasses.asdict(self)

    def summary(self) -> dict[str, Any]:
        """Return the fields to print: those that differ from their defaults, and those marked with ALWAYS."""
        fields = [(field_, getattr(self, field_.name)) for field_ in dataclasses.fields(self)]
        return {field_.name: value for field_, value in fields if field_.metadata or value not in (field_.default, {})}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.summary().items())})"

    def _repr_html_(self) -> str:
        return table([type(self).__name__, ""], self.lines(), "")

    def lines(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield names and values of `summary`, and of the reports in it, for a table."""
        for name, value in self.summary().items():
            if isinstance(value, Report):
                yield from value.lines(f"{prefix}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Report):
                for i, report in enumerate(value):
                    yield f"{prefix}{name}.{i}", ", ".join(f"{key} {text}" for key, text in report.lines())
            else:
                yield prefix + name, f"{value:,}" if type(value) is int else str(value)


@dataclass(frozen=True, repr=False)
class IndexReport(Report):
    """The index of a database when it was built or tuned; `stats().index` adds its present state."""

    kind: str  # "ivf", "hnsw", on a GPU "ivf-sq8", or "flat", which is exact search
    recall: float = field(default=1.0, metadata=ALWAYS)  # share of the true k nearest found by held-out queries
    met: bool = field(default=True, metadata=ALWAYS)  # True if the recall is at least the target
    target: float = 0.0  # the recall that was requested; 0 for exact search
    k: int = 0  # number of nearest records that the recall is measured with
    reason: str = ""  # for "flat": the reason why no index was built
    measured_on: str = ""  # stored keys, each without itself, unless queries= were given
    codes: str = ""  # codes of the keys: "PQ96x4" splits a key into 96 parts of 4 bits
    lists: int = 0  # number of inverted lists
    records_per_match: int = 0  # search effort: scan a list if a share of 1 / this of its records should match
    nprobe: int = 0  # search effort on a GPU: number of lists scanned
    ef_search: int = 0  # search effort in a graph: number of records visited
    fetch_k: int = 0  # fetch_k · k records are fetched by code, and then rescored
    outliers: int = 0  # for inner products: number of longest keys, which are compared with every query
    recall_by_norm: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key length: recall, and count `of`
    records: int = 0
    bytes: int = 0  # size of the index beside the keys, which stay in their files
    device: str = "cpu"  # device that searches it
    choose_seconds: float = 0.0  # time that each step took
    build_seconds: float = 0.0
    tune_seconds: float = 0.0
    unindexed: int = 0  # number of records newer than the index, which are compared exactly
    live_recall: float | None = None  # mean recall of the searches that `db.watch` checked
    live_checked: int = 0  # number of searches that `db.watch` checked
    building: str = ""  # stage of the build in progress; "" if there is none

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> IndexReport:
        """Make a report from the facts that this or an older softdb stored with an index."""
        named = {_RENAMED.get(name, name): fact for name, fact in facts.items()}
        return cls(**{fact.name: named[fact.name] for fact in dataclasses.fields(cls) if fact.name in named})


_RENAMED = {"efSearch": "ef_search", "candidates": "fetch_k", "young": "unindexed"}


@dataclass(frozen=True, repr=False)
class DeviceReport(Report):
    """Copies of a database's columns on the devices that it computes on."""

    devices: list[str]  # names; each device holds a range of the records
    keys: str = field(metadata=ALWAYS)  # "resident" there; "streamed" if too large; "not asked for yet"
    values: str = field(metadata=ALWAYS)  # as `keys`; "the keys" if the keys are the values
    dtype: str  # number type of the copies
    bytes: int  # size of the copies
    kernels: str = field(metadata=ALWAYS)  # "triton", or why torch is used instead


@dataclass(frozen=True, repr=False)
class ShardReport(Report):
    """Report on one shard of a table, from the host that answered."""

    shard: int = field(metadata=ALWAYS)
    node: str  # name of the machine
    version: int  # version of the table that it serves
    lag: int = field(metadata=ALWAYS)  # number of the table's commits that it has not taken in yet
    served: int  # number of versions that it serves
    records: int = field(metadata=ALWAYS)
    index: str | None  # kind of its index; None: no index
    live_recall: float | None  # mean recall of the searches that were watched
    answered: int = field(metadata=ALWAYS)  # number of messages since the shard was opened
    p50: float  # median of the seconds of the last 1,000 messages
    p99: float  # their 99th percentile
    bytes: int = field(default=0, metadata=ALWAYS)  # size on disk


@dataclass(frozen=True, repr=False)
class Stats(Report):
    """Description of a database: its schema, its records and its size."""

    path: str | None  # the directory; None in memory
    mode: str  # "rw" or "r"
    durability: str  # "full" or "relaxed"
    unflushed: int  # number of changes that are not on disk yet
    records: int
    keyless: int  # number of records without a key, which searches by vector never find
    dead: int  # number of rows of deleted and replaced records that `compact()` has not removed yet
    dim: int | Any  # d; None: undecided
    value_dim: int | None  # v
    num_classes: int | None
    dtype: str
    metric: str
    encoder: str | None  # name of the encoder that made the keys, if known
    generation: int  # number of the last commit
    segments: int  # number of files per column
    fields: list[str]  # payload fields with an index
    text_index: str | None  # "words" or "trigram"; None if the texts have no index
    bytes: int  # size on disk; 0 in memory
    kernels: str  # the instruction set of the kernels in use, or why torch is used instead
    index: IndexReport | None  # None before an index is built
    device: DeviceReport | None = None  # None on the CPU
    shards: list[ShardReport] = field(default_factory=list)  # of a cluster over a table


@dataclass(frozen=True, repr=False)
class CompactReport(Report):
    """Report of `compact()`."""

    records: int
    removed: int  # number of removed rows (deleted and replaced records)
    segments_before: int  # number of files per column
    segments: int
    bytes_before: int  # size on disk; 0 in memory
    bytes: int


@dataclass(frozen=True, repr=False)
class ReembedReport(Report):
    """Report of `reembed()`."""

    records: int
    embedded: int  # number of records encoded by this run; earlier runs encoded the others
    dim: int  # d, the width of the new keys
    encoder: str | None  # name of the new encoder, if it has one
    generation: int  # number of the commit that changed the keys
    seconds: float


@dataclass(frozen=True, repr=False)
class SnapshotReport(Report):
    """Report of `snapshot()`: directory, records, generation, and size on disk of the copy in bytes."""

    path: str
    records: int
    generation: int
    bytes: int


@dataclass(frozen=True, repr=False)
class ReindexReport(Report):
    """Report of one reindexing of encoded or trained keys. `step` is the training step, `seconds` the duration."""

    version: int
    records: int
    step: int
    seconds: float


@dataclass(frozen=True, repr=False)
class ViewReport(Report):
    """Age of the encoded keys of a View, and the cost of encoding and indexing them."""

    version: int  # number of reindexings; 0 before the first
    records: int  # number of encoded records
    unindexed: int  # number of records not encoded yet
    age: int  # training steps since the last reindexing
    recall: float | None  # from the last call of `measure`; None before one
    reindexing: bool  # True while a reindexing runs
    reindexes: int  # number of completed reindexings
    seconds: float  # duration of the last reindexing
    total_seconds: float  # duration of all reindexings


@dataclass(frozen=True, repr=False)
class MemoryReport(Report):
    """Age of the index of a Memory, or of other trained keys, and the cost of reindexing."""

    records: int
    steps: int  # training steps so far
    age: int  # training steps since the last reindexing
    recall: float | None  # from the last call of `measure`; None before one
    reindexing: bool  # True while a reindexing runs
    reindexes: int  # number of completed reindexings
    seconds: float  # duration of the last reindexing
    total_seconds: float  # duration of all reindexings
    uncommitted: int | None = None  # number of records with a gradient since `commit()`; None without `commit()`
