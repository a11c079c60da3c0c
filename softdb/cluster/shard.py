"""Protocol between a caller and the shards of a cluster: messages, shards, and transports.

Messages are frozen dataclasses of numpy arrays and plain values, which pickle: any transport carries them. Each names
the version that it asks of; a shard that is at another one raises StaleRead. A shard knows its number, keeps nothing
between two messages, and answers the same message alike, so that asking again, or asking a replica, is always right.

Rows are the cluster's: row = directory << ROW_BITS | local row * shards + shard. A row says where it lies. Two
directories of the same records number their rows differently, so a row of one is StaleRead in the other; where the
ids are sent with the rows, the other finds the records by these. Versions name the directory in their high bits, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from softdb.check import Id, Metric, Schema

Array = NDArray[Any]
NEWEST = -1  # in place of a version
VERSION_BITS = 40  # of a version; those above are the directory's number, of 20 bits, or 0
ROW_BITS = 43  # of a row, likewise


def of_records(version: int) -> int:
    """The version of the records alone, whatever directory holds them."""
    return version & ((1 << VERSION_BITS) - 1)


def directory_of(version: int) -> int:
    """The number of the directory that is at a version."""
    return version >> VERSION_BITS


@dataclass(frozen=True)
class ShardQuery:
    """Queries as a shard compares them with its keys: logits are metric(q, k) / temperature, or score(q, k) / it.

    A score that folds travels as its metric and the folded queries: its parameters stay with the caller. Another one
    travels pickled, and its parameters' gradients come back.
    """

    queries: Array  # (q, d) float32 or float64
    metric: Metric | None  # None: by `score`
    temperature: float = 1.0
    trains: bool = False  # whether 1 / temperature wants a gradient, or the score's parameters do
    score: bytes | None = None  # pickled
    uniform: bool = False  # average pooling: every record weighs alike
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class Message:
    """A message to a shard. The reply's type stands in each one's docstring."""

    version: int

    @property
    def by_rows(self) -> bool:
        """True if the answer depends on how a directory numbers its rows; else another at the version will do."""
        return False

    def fits(self, version: int) -> bool:
        """Return True if a shard at that version may answer."""
        return self.version == version if self.by_rows else of_records(self.version) == of_records(version)


@dataclass(frozen=True)
class Describe(Message):
    """Describe the shard -> `Description`. At whatever version the shard is."""


@dataclass(frozen=True)
class Refresh(Message):
    """Go on to that version, or to NEWEST, as the truth has it -> `Description`."""

    anew: bool = False  # make the shard from the truth again, whatever it holds


@dataclass(frozen=True)
class CallVerb(Message):
    """A verb or property of SoftDB that reads, or that tends the shard's own cache -> what it returns.

    One of "build_index", "count", "drop_index", "get", "id_types", "stats", "stored".
    """

    verb: str
    words: dict[str, Any]


@dataclass(frozen=True)
class Locate(Message):
    """Locate ids that a filter matches -> (i,) int64 rows, -1 = none here, or without a key."""

    ids: list[Id]
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResolveRows(Message):
    """Read rows (r,) -> list of RecordEntry, by the cluster's rows; those that are gone are absent."""

    rows: Array
    payloads: bool = True
    texts: bool = False
    ids: list[Id] | None = None  # of the rows, for another directory at the same version


@dataclass(frozen=True)
class ScanRows(Message):
    """Some of the records with rows above `after`, in order of rows -> (Records, the last row; None: no more)."""

    after: int  # a local row, -1 at first
    size: int
    where: dict[str, Any] | None = None

    @property
    def by_rows(self) -> bool:
        """It goes on after a row."""
        return True


@dataclass(frozen=True)
class Gather(Message):
    """Keys and values of rows (r,) -> `GatheredRows`. StaleRead where one is gone."""

    rows: Array
    keys: bool = True
    values: bool = True
    ids: list[Id] | None = None  # of the rows, for another directory at the same version


@dataclass(frozen=True)
class Nearest(Message):
    """The k nearest, ties by id -> `ShardHits`."""

    question: ShardQuery
    k: int | None  # None: all that score at least `least`
    exact: bool = False
    least: float | None = None
    excluded: list[list[Id]] | None = None  # one list for all queries, or one a query


@dataclass(frozen=True)
class PassOver(Message):
    """A pass over every record -> `Passed`."""

    question: ShardQuery
    pools: bool = True
    apart: bool = False  # its reply is wanted by itself, not merged with others' of the same host


@dataclass(frozen=True)
class Draw(Message):
    """Draw so many records for each query, and pool them -> `Drawn`. No shard decides how many are enough."""

    question: ShardQuery
    pools: bool
    budgets: Array  # (q,) int64: how many to pool
    seed: int  # the shard salts it with its number
    confidence: float
    bounded: bool  # else it may pass over every record where that costs less than to draw
    exactly: Array | None = None  # (q,) bool: where it shall, as it did before; None: it decides

    @property
    def by_rows(self) -> bool:
        """Draws are hashes of rows: another directory would draw others, also for the gradient."""
        return True


@dataclass(frozen=True)
class Backward(Message):
    """Gradients of what `of` was answered with, worked out anew -> `Gradient`.

    Where that was merged into a whole o of lse L, the gradients are of the whole, and each part works out its own:
    with w = e^(lse - L), of its output w output_grad, of its lse w (output_grad · (output - o) + lse_grad).
    """

    of: PassOver | Draw
    output_grad: Array  # (q, v)
    lse_grad: Array  # (q,); of a whole: less output_grad · o
    whole: Array | None = None  # (q,) L; None: the answer is the shard's own

    @property
    def by_rows(self) -> bool:
        """As the answer itself."""
        return self.of.by_rows


@dataclass(frozen=True)
class CountWithin(Message):
    """Count the records that score at least so much, exactly -> `Counted`."""

    question: ShardQuery
    least: float


@dataclass(frozen=True)
class Sample(Message):
    """Records drawn by softmax weights in this shard, with replacement -> `ShardHits`, -1 after each query's own."""

    question: ShardQuery
    counts: Array  # (q,) int64
    seed: int  # the shard salts it


@dataclass(frozen=True)
class Explain(Message):
    """The k heaviest, given the normaliser of the whole -> `Explained`."""

    question: ShardQuery
    lse: Array  # (q,)
    k: int


class LeftOut(NamedTuple):
    """A row of the table that cannot be stored as a record."""

    id: Id | None
    reason: str


class Description(NamedTuple):
    """Description of a shard."""

    shard: int
    shards: int
    version: int  # that it is at
    schema: Schema
    keyed: int  # records with a key
    value_size: float  # root mean square of ‖v‖
    finder: str | None  # the kind of its index
    encoder: str | None  # the name of what made the keys
    records: int
    identity: str | None = None  # of a table's version; None: the shard is its own truth
    left_out: tuple[LeftOut, ...] = ()  # rows of the table


class Passed(NamedTuple):
    """A state, of which those of all shards merge."""

    output: Array  # (q, v)
    lse: Array  # (q,)
    taking_part: int  # how many records


class Drawn(NamedTuple):
    """The fields of an ErrorEstimate, to be `joined`; and what the caller judges for all shards together."""

    estimate: tuple[Array, ...]
    pooled: Array  # (q,) int64: how many were pooled
    exactly: Array  # (q,) bool: a pass over every record, without error
    taking_part: int


class Gradient(NamedTuple):
    """Of the queries, and of 1 / temperature or the score's parameters where they want one, summed over the queries."""

    queries: Array  # (q, d)
    parameters: tuple[Array, ...]


class ShardHits(NamedTuple):
    """Candidates, best first."""

    rows: Array  # (q, k) int64, -1 = none
    scores: Array  # (q, k) by the metric, or by the score; -inf = none
    ids: list[list[Id]]  # of each query's, without the missing
    finder: str
    certain: bool
    taking_part: int  # how many records


class GatheredRows(NamedTuple):
    """Columns of some rows, in their order; None: not asked for."""

    keys: Array | None  # (r, d)
    values: Array | None  # (r, v), or (r,) labels


class Counted(NamedTuple):
    """Exact counts."""

    counts: Array  # (q,) int64


class Explained(NamedTuple):
    """The heaviest records, and this shard's part of the entropy."""

    found: ShardHits
    entropy: Array  # (q,) -Σ w log w


class ClusterShard(Protocol):
    """A part of the records, which answers for them."""

    def answer(self, ask: Message) -> Any:
        """The reply that `ask` names. Raises StaleRead at another version, and whatever SoftDB's verbs raise."""


class ShardReplies(NamedTuple):
    """Replies, and the shards that gave them."""

    replies: dict[int, Any]  # by shard; one that is of several, by the first of them
    missing: dict[int, str]  # shards without an answer in time, and why
    merged: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # whose a reply is that is of several

    def of(self, shard: int) -> tuple[int, ...]:
        """Shards whose replies are merged in the one of this shard."""
        return self.merged.get(shard, (shard,))


class Transport(Protocol):
    """Carries messages to shards: to each its own, all at once."""

    shards: int  # how many there are; they are numbered from 0
    collective: bool  # whether every rank must ask whenever one asks

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send each shard its message; come back with the replies within the timeout, whoever is dead.

        An error of softdb that a shard raises is raised here; a shard that cannot be reached, or is too slow, is
        `missing`. Replies of shards that lie together may come merged (`softdb.cluster.merge.together`). Raises
        ShardUnavailable where nothing can be said of any, such as a collective call that only some
        ranks made.
        """

    def anyone(self, more: bool) -> bool:
        """Return True if any rank has more to ask; `more` itself where ranks ask on their own."""

    def close(self) -> None:
        """Let go of the shards; those that others use live on."""
