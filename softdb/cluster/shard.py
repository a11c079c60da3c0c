"""Protocol between a caller and the shards of a cluster: messages, shards, and transports.

Messages are frozen dataclasses of numpy arrays and plain values. They pickle, so any transport can carry them. Each
message names the version that it asks of; a shard at another version raises StaleRead. A shard knows its number, keeps
no state between messages, and gives equal messages equal replies, so any message may be retried, or sent to a replica.

Rows in messages are the cluster's: row = directory << ROW_BITS | local row * shards + shard. Two directories of the
same records number their rows differently: a row of one raises StaleRead in the other, unless the message carries the
ids, by which the other directory finds the records. Versions hold the directory's number in their high bits, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from softdb.check import Id, Metric, Schema

Array = NDArray[Any]
NEWEST = -1  # stands for the newest version
VERSION_BITS = 40  # low bits of a version; the 20 bits above are the directory's number, or 0
ROW_BITS = 43  # low bits of a row; the 20 bits above are the directory's number, or 0


def of_records(version: int) -> int:
    """Return the version of the records, without the directory's number."""
    return version & ((1 << VERSION_BITS) - 1)


def directory_of(version: int) -> int:
    """Return the directory's number in a version."""
    return version >> VERSION_BITS


@dataclass(frozen=True)
class ShardQuery:
    """Queries as a shard scores its keys by them: logits are metric(q, k) / temperature, or score(q, k) / temperature.

    A score that folds is sent as its metric and the folded queries; its parameters stay with the caller. Any other
    score is sent pickled, and the shard returns the gradients of its parameters.
    """

    queries: Array  # (q, d) float32 or float64
    metric: Metric | None  # None: `score` is used
    temperature: float = 1.0
    trains: bool = False  # True if 1 / temperature, or the score's parameters, want a gradient
    score: bytes | None = None  # pickled
    uniform: bool = False  # average pooling: all records have equal weight
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class Message:
    """A message to a shard. The docstring of each subclass names the reply's type after "->"."""

    version: int

    @property
    def by_rows(self) -> bool:
        """True if the reply depends on the rows of one directory; else any directory at the version can answer."""
        return False

    def fits(self, version: int) -> bool:
        """Return True if a shard at this version may answer."""
        return self.version == version if self.by_rows else of_records(self.version) == of_records(version)


@dataclass(frozen=True)
class Describe(Message):
    """Describe the shard, at any version -> `Description`."""


@dataclass(frozen=True)
class Refresh(Message):
    """Bring the shard to a version of its table or database, or to NEWEST -> `Description`."""

    rebuild: bool = False  # True: rebuild the shard from the table first


@dataclass(frozen=True)
class CallVerb(Message):
    """Call a method, or read a property, of the shard's SoftDB -> its result.

    One of "build_index", "count", "drop_index", "get", "id_types", "stats", "stored".
    """

    verb: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Locate(Message):
    """Look up ids -> (i,) int64 rows; -1 for ids that are not stored, have no key, or do not match the filter."""

    ids: list[Id]
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResolveRows(Message):
    """Read the records of rows (r,) -> list of RecordEntry, with the cluster's rows; deleted records are absent."""

    rows: Array
    payloads: bool = True
    texts: bool = False
    ids: list[Id] | None = None  # of the rows, for another directory at the same version


@dataclass(frozen=True)
class ScanRows(Message):
    """Read the next `size` records in row order -> (Records, last local row or None at the end)."""

    after: int  # last local row of the previous message; -1 at first
    size: int
    where: dict[str, Any] | None = None

    @property
    def by_rows(self) -> bool:
        """True: `after` is a row of one directory."""
        return True


@dataclass(frozen=True)
class Gather(Message):
    """Read keys and values of rows (r,) -> `GatheredRows`. Raises StaleRead for a deleted record."""

    rows: Array
    keys: bool = True
    values: bool = True
    ids: list[Id] | None = None  # of the rows, for another directory at the same version


@dataclass(frozen=True)
class Nearest(Message):
    """Find the k nearest records, ties by id -> `ShardHits`."""

    question: ShardQuery
    k: int | None  # None: all records that score at least `least`
    exact: bool = False
    least: float | None = None
    excluded: list[list[Id]] | None = None  # one list for all queries, or a list for each


@dataclass(frozen=True)
class PassOver(Message):
    """Pool all records that take part -> `Passed`."""

    question: ShardQuery
    pools: bool = True  # False: only the log-normaliser is wanted
    apart: bool = False  # True: do not merge the reply with those of other shards on the same host


@dataclass(frozen=True)
class Draw(Message):
    """Draw records for each query, and pool them -> `Drawn`. The caller decides when enough are drawn."""

    question: ShardQuery
    pools: bool
    budgets: Array  # (q,) int64: number of records to pool
    seed: int  # the shard salts it with its number
    confidence: float
    bounded: bool  # False: the shard may pool all its records where that is faster than drawing
    exactly: Array | None = None  # (q,) bool: queries for which all records are pooled; None: the shard decides

    @property
    def by_rows(self) -> bool:
        """True: draws are hashes of rows, so another directory would draw other records."""
        return True


@dataclass(frozen=True)
class Backward(Message):
    """Compute the reply to `of` again, with its gradients -> `Gradient`.

    If that reply was merged with others into an output o with log-normaliser L, the gradients sent are those of the
    merged output, and each shard computes its own: with w = e^(lse - L), the gradient of its output is w output_grad,
    and the gradient of its lse is w (output_grad · (output - o) + lse_grad).
    """

    of: PassOver | Draw
    output_grad: Array  # (q, v)
    lse_grad: Array  # (q,); of a merged reply: less output_grad · o
    merged_lse: Array | None = None  # (q,) L; None: the reply was not merged

    @property
    def by_rows(self) -> bool:
        """True if the reply to `of` depends on rows."""
        return self.of.by_rows


@dataclass(frozen=True)
class CountWithin(Message):
    """Count the records that score at least `least`, exactly -> `Counted`."""

    question: ShardQuery
    least: float


@dataclass(frozen=True)
class Sample(Message):
    """Draw records by softmax weight within the shard, with replacement -> `ShardHits`, padded with -1."""

    question: ShardQuery
    counts: Array  # (q,) int64
    seed: int  # the shard salts it with its number


@dataclass(frozen=True)
class Explain(Message):
    """Find the k records of largest weight, and the shard's share of the entropy -> `Explained`."""

    question: ShardQuery
    lse: Array  # (q,) log-normaliser over all shards
    k: int


class LeftOut(NamedTuple):
    """A row of the table that cannot be stored as a record."""

    id: Id | None
    reason: str


class Description(NamedTuple):
    """Description of a shard."""

    shard: int
    shards: int
    version: int
    schema: Schema
    keyed: int  # records with a key
    value_size: float  # root mean square of ‖v‖
    finder: str | None  # kind of the index; None: no index
    encoder: str | None  # name of the encoder of the keys
    records: int
    identity: str | None = None  # of the table's version; None: no table, the shard is a database of its own
    left_out: tuple[LeftOut, ...] = ()  # rows of the table


class Passed(NamedTuple):
    """Output and log-normaliser of a shard, which merge with those of others."""

    output: Array  # (q, v)
    lse: Array  # (q,)
    taking_part: int  # number of records


class Drawn(NamedTuple):
    """An estimate of a shard's output, and the parts of its error."""

    estimate: tuple[Array, ...]  # fields of an ErrorEstimate
    pooled: Array  # (q,) int64: number of pooled records
    exactly: Array  # (q,) bool: all records were pooled, without error
    taking_part: int  # number of records


class Gradient(NamedTuple):
    """Gradients of the queries, and of the trained parameters summed over the queries."""

    queries: Array  # (q, d)
    parameters: tuple[Array, ...]  # 1 / temperature, or the score's


class ShardHits(NamedTuple):
    """Candidates, best first."""

    rows: Array  # (q, k) int64, -1 = none
    scores: Array  # (q, k) by the metric, or by the score; -inf = none
    ids: list[list[Id]]  # of each query's hits; row -1 has no entry
    finder: str
    certain: bool  # True if the candidates are exact
    taking_part: int  # number of records


class GatheredRows(NamedTuple):
    """Columns of the requested rows, in their order; None for a column that was not requested."""

    keys: Array | None  # (r, d)
    values: Array | None  # (r, v), or (r,) labels


class Counted(NamedTuple):
    """Exact counts."""

    counts: Array  # (q,) int64


class Explained(NamedTuple):
    """Records of largest weight, and the shard's share of the entropy."""

    hits: ShardHits
    entropy: Array  # (q,) -Σ w log w over the shard's records


class ClusterShard(Protocol):
    """A shard: it answers messages about its records."""

    def answer(self, ask: Message) -> Any:
        """Return the reply to a message. Raises StaleRead at another version, and the errors of SoftDB's verbs."""


class ShardReplies(NamedTuple):
    """Replies, and the shards that gave them."""

    replies: dict[int, Any]  # by shard; a merged reply by the first of its shards
    missing: dict[int, str]  # shards that did not reply in time -> the reason
    merged: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # first shard of a merged reply -> all its shards

    def of(self, shard: int) -> tuple[int, ...]:
        """Return the shards whose replies are merged in the reply of `shard`."""
        return self.merged.get(shard, (shard,))


class Transport(Protocol):
    """Carries a message to each of several shards at once."""

    shards: int  # number of shards; they are numbered from 0
    collective: bool  # True: if one rank asks, every rank must ask

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send each shard its message, and return the replies that arrive within `timeout` seconds.

        Raises the error of softdb that a shard raised, if any. A shard that cannot be reached, or is too slow, is
        listed in `missing`. Replies of shards on one host may be merged (`softdb.cluster.merge.together`). Raises
        ShardUnavailable if no reply of any shard is usable, as when only some ranks make a collective call.
        """

    def anyone(self, more: bool) -> bool:
        """Return True if any rank passes more=True; without ranks, return `more`."""

    def close(self) -> None:
        """Release the shards; shards that other callers use keep running."""
