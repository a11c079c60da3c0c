"""Protocol between a caller and the shards of a cluster: messages, shards, and transports.

Messages are frozen dataclasses of numpy arrays and plain values. They pickle, so any transport can carry them. Each
message names the version of the records that it expects. A shard of a table answers at every version that a caller
holds; any other version raises StaleRead. Equal messages get equal replies, so a message may be retried, or sent to a
replica.

Row numbers in messages are unique in the cluster: row = directory << ROW_BITS | local row * shards + shard, where
`directory` is a random number of the shard's directory on disk. Two directories of the same records number their rows
differently. A directory that gets rows of another raises StaleRead, unless the message also carries the records' ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from numpy.typing import NDArray

from softdb.check import Id, Metric, Schema
from softdb.lance_table.truth import LeftOut

Array = NDArray[Any]
NEWEST = -1  # version number that stands for the newest version
VERSION_BITS = 40  # number of low bits with the version; the 20 bits above are the directory's number, or 0
ROW_BITS = 43  # number of low bits with the row; the 20 bits above are the directory's number, or 0


def of_records(version: int) -> int:
    """Return a version without its high bits, which are the directory's number."""
    return version & ((1 << VERSION_BITS) - 1)


def directory_of(version: int) -> int:
    """Return the directory's number, which is in the high bits of a version."""
    return version >> VERSION_BITS


@dataclass(frozen=True)
class ShardQuery:
    """Queries as they are sent to a shard; logits are metric(q, k) / temperature, or score(q, k) / temperature.

    If `scaled`, the last number of a query is a factor c of its scores, and logits are c metric(q, k).
    If the score folds into the queries, the folded queries and the metric are sent; the score's parameters stay with
    the caller. Any other score is sent pickled, and the shard returns the gradients of the score's parameters.
    """

    queries: Array  # (q, d) float32 or float64; (q, d + 1) if `scaled`
    metric: Metric | None  # None: use `score`
    temperature: float = 1.0
    trains: bool = False  # True if the score's parameters want a gradient
    score: bytes | None = None  # pickled score; None: use `metric`
    scaled: bool = False
    uniform: bool = False  # True: all records have equal weight
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class Message:
    """A message to a shard. The docstring of each subclass says what the shard replies after "->"."""

    by_rows: ClassVar[bool] = False  # True: only the directory named in `version` can answer, not any at that version
    version: int

    def fits(self, version: int) -> bool:
        """Return True if a shard that is at `version` may answer this message."""
        return self.version == version if self.by_rows else of_records(self.version) == of_records(version)

    @property
    def numbers(self) -> int:
        """Number of elements of the queries; 0: the message has no queries."""
        question = getattr(getattr(self, "of", self), "question", None)
        return 0 if question is None else int(question.queries.size)


@dataclass(frozen=True)
class Describe(Message):
    """Describe the shard at its newest version -> `Description`. The caller holds that version from now on."""

    reader: int = field(default=0, kw_only=True)  # random number of the caller; 0: it needs no version
    needed: tuple[int, ...] = field(default=(), kw_only=True)  # versions that the caller's answers still need
    leaves: bool = field(default=False, kw_only=True)  # True: the caller is closed, and needs no version any more


@dataclass(frozen=True)
class Refresh(Describe):
    """Bring the shard to `version` of its table or database; NEWEST is the newest -> `Description`.

    The reply describes `version` if the shard serves it, else a later version.
    """

    rebuild: bool = False  # True: rebuild the shard from the table first
    again: bool = False  # True: if the shard has lost `version`, build it from the table, and serve it again


@dataclass(frozen=True)
class CallVerb(Message):
    """Call a method, or read a property, of the shard's database -> the result.

    `verb` is "build_index", "count", "get", "id_types", "stats" or "stored".
    """

    verb: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Locate(Message):
    """Look up n ids -> rows (n,) int64; -1 for an id that is not stored, has no key, or does not match the filter."""

    ids: list[Id]
    where: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResolveRows(Message):
    """Read ids, payloads and texts of rows (r,) -> list of RecordEntry; deleted records are absent."""

    rows: Array
    payloads: bool = True
    texts: bool = False
    ids: list[Id] | None = None  # ids of the rows, for another directory at the same version


@dataclass(frozen=True)
class ScanRows(Message):
    """Read the next `size` records, sorted by row -> (Records, the last local row; None if no more records follow)."""

    by_rows: ClassVar[bool] = True  # `after` is a row number of one directory
    after: int  # last local row of the previous message; -1 at first
    size: int
    where: dict[str, Any] | None = None
    skip: int = 0  # number of matching records to skip first


@dataclass(frozen=True)
class Gather(Message):
    """Read keys and values of rows (r,) -> `GatheredRows`. Raises StaleRead if a record was deleted."""

    rows: Array
    keys: bool = True
    values: bool = True
    ids: list[Id] | None = None  # ids of the rows, for another directory at the same version


@dataclass(frozen=True)
class Nearest(Message):
    """Find the k nearest records; sort equal scores by id -> `ShardHits`."""

    question: ShardQuery
    k: int | None  # number of hits; None: all records that score at least `least`
    exact: bool = False
    least: float | None = None
    excluded: list[list[Id]] | None = None  # ids not to return: one list for all queries, or one list for each


@dataclass(frozen=True)
class PassOver(Message):
    """Pool all records that match the filter -> `Passed`."""

    question: ShardQuery
    pools: bool = True  # False: compute only the log-normaliser
    apart: bool = False  # True: do not merge the reply with those of other shards on the same host


@dataclass(frozen=True)
class Draw(Message):
    """Draw records for each query, and pool the drawn records -> `Drawn`. The caller decides if more are needed."""

    by_rows: ClassVar[bool] = True  # another directory has other row numbers, and would draw other records
    question: ShardQuery
    pools: bool
    budgets: Array  # (q,) int64: about how many records to draw
    seed: int  # the shard mixes its own number into the seed
    confidence: float  # share of answers whose error shall be below the error bar
    bounded: bool  # False: the shard may pool all its records if that is faster than drawing
    exactly: Array | None = None  # (q,) bool: True to pool all records for a query; None: the shard decides


@dataclass(frozen=True)
class Backward(Message):
    """Compute the reply to the message `of` again, with gradients -> `Gradient`.

    If the shard's reply (output, lse) was merged with others into an output o with log-normaliser L, let g be the
    gradient of o and h that of L. With w = e^(lse - L), the gradient of the shard's own output is w g, and that of its
    lse is w (g · (output - o) + h). The message then has output_grad = g and lse_grad = h - g · o.
    """

    of: PassOver | Draw
    output_grad: Array  # (q, v) gradient of the loss by the output
    lse_grad: Array  # (q,) gradient of the loss by the lse; for a merged reply, h - g · o
    merged_lse: Array | None = None  # (q,) log-normaliser L of the merged reply; None: not merged

    def fits(self, version: int) -> bool:
        """Return True if a shard that is at `version` may answer the message `of`."""
        return self.of.fits(version)


@dataclass(frozen=True)
class CountWithin(Message):
    """Count, by an exact scan, the records that score at least `least` -> counts (q,) int64."""

    question: ShardQuery
    least: float


@dataclass(frozen=True)
class Sample(Message):
    """Draw records with replacement, with probabilities equal to softmax weights -> `ShardHits`, padded with row -1."""

    question: ShardQuery
    counts: Array  # (q,) int64: number of records to draw for each query
    seed: int  # the shard mixes its own number into the seed


@dataclass(frozen=True)
class Explain(Message):
    """Find the k records of largest weight, and sum the shard's terms of the weights' entropy -> `Explained`."""

    question: ShardQuery
    lse: Array  # (q,) log-normaliser over the records of all shards
    k: int


class Description(NamedTuple):
    """Number, version, schema and statistics of a shard."""

    shard: int  # number of this shard
    shards: int  # number of shards
    version: int
    schema: Schema
    keyed: int  # number of records with a key
    value_size: float  # root mean square of ‖v‖ over the values v
    finder: str | None  # kind of the index; None: no index
    encoder: str | None  # name of the encoder of the keys
    records: int  # number of records
    identity: str | None = None  # identity of the table's version; None: the shard is not a copy of a table
    left_out: tuple[LeftOut, ...] = ()  # rows of the table that cannot be stored


class Passed(NamedTuple):
    """Output and log-normaliser over the records of one shard; the caller merges the replies of all shards."""

    output: Array  # (q, v)
    lse: Array  # (q,)
    taking_part: int  # number of records that match the filter


class Drawn(NamedTuple):
    """Estimate of the output over one shard's records, and sums from which the caller computes the error bar."""

    estimate: tuple[Array, ...]  # fields of a `softdb.attend.error.ErrorEstimate`
    pooled: Array  # (q,) int64: number of records that were pooled
    exactly: Array  # (q,) bool: True if all records were pooled, so that there is no error
    taking_part: int  # number of records that match the filter


class Gradient(NamedTuple):
    """Gradients of the queries, and of the trained parameters summed over the queries."""

    queries: Array  # (q, d)
    parameters: tuple[Array, ...]  # gradients of the score's parameters


class ShardHits(NamedTuple):
    """Hits of one shard for each query, best first."""

    rows: Array  # (q, k) int64; -1: no hit
    scores: Array  # (q, k); -inf: no hit
    ids: list[list[Id]]  # for each query, the ids of its hits; none for row -1
    finder: str
    certain: bool  # True if the search was exact
    taking_part: int  # number of records that match the filter


class GatheredRows(NamedTuple):
    """Keys and values, in the order of the requested rows; None for a column that was not requested."""

    keys: Array | None  # (r, d)
    values: Array | None  # (r, v), or (r,) labels


class Explained(NamedTuple):
    """Records of largest weight, and the shard's terms of the entropy."""

    hits: ShardHits
    entropy: Array  # (q,) -Σ w log w over the shard's records


class ClusterShard(Protocol):
    """A shard, which replies to messages about its records."""

    def answer(self, ask: Message) -> Any:
        """Return the reply to a message. Raises StaleRead if the shard is at another version, and SoftDB's errors."""


class ShardReplies(NamedTuple):
    """Replies of several shards, and the shards that did not reply."""

    replies: dict[int, Any]  # shard -> reply; a merged reply is listed under the first of its shards
    missing: dict[int, str]  # shard that did not reply in time -> the reason
    merged: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # first shard of a merged reply -> all its shards

    def of(self, shard: int) -> tuple[int, ...]:
        """Return the shards whose replies were merged into the reply that is listed under `shard`."""
        return self.merged.get(shard, (shard,))


class Transport(Protocol):
    """Carries messages to several shards at once, and their replies back."""

    shards: int  # number of shards; they are numbered from 0
    collective: bool = False  # True: if one rank asks, every rank must ask

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        """Send each shard its message, and return the replies that arrive within `timeout` seconds.

        If a shard raised an error of softdb, raises that error. A shard that cannot be reached, or is too slow, is
        listed in `missing`. Replies of shards on one host may be merged (`softdb.cluster.merge.together`). Raises
        ShardUnavailable if no reply of any shard is usable, for example if only some ranks make a collective call.
        """

    def anyone(self, more: bool) -> bool:
        """Return True if any rank passes more=True. A transport without ranks returns `more`."""
        return more

    def close(self) -> None:
        """End the connection to the shards. Shards that other callers use keep running."""
