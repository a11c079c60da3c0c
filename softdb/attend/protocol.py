"""Records: what a source gives, and what answers ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
from torch import Tensor

from softdb.answers import Pooled, Resolve
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.check import Schema
from softdb.index import Finder
from softdb.index.placement import ColumnPass, RecordColumns
from softdb.index.query import Query
from softdb.index.sampler import Drawable, Sampler
from softdb.store import Snapshot
from softdb.store.snapshot import Block

S = TypeVar("S", bound="SourceRecords")


class SourceRecords(Protocol):
    """Records in order: what a source must give. Positions count them, 0 … size - 1, dead ones included; -1 is none."""

    @property
    def live(self) -> Live:
        """Positions that hold a record, (size,) bool."""

    @property
    def count(self) -> int:
        """Number of records."""

    @property
    def width(self) -> int:
        """v, the width of an answer."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes, where values are labels."""

    @property
    def resolve(self) -> Resolve:
        """Ids and payload texts of rows; those deleted since are absent."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """The allowed live records from a position on, in order, at most `size` at a time."""

    def find(self, request: Request) -> Candidates:
        """The k nearest of each query by the request's score."""

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Scores of candidates (q, k), with their gradients."""

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """The weighted sum of candidates' values (q, v), with its gradients."""

    # -- answers that travel to the records, where these lie elsewhere -------------------------------------------------

    def stream(self, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """As `softdb.attend.streaming.stream`."""

    def estimate(self, request: Request) -> Pooled:
        """As `softdb.attend.estimate.estimate`."""

    def heaviest(self, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:
        """As `softdb.attend.result.heaviest`."""

    missing: tuple[int, ...] = ()  # shards that did not answer

    # -- defaults: records in this process, keys compared as they are stored ------------------------------------------

    @property
    def columns(self) -> RecordColumns | None:
        """Keys and values as kernels read them where they lie; None: they come by `blocks` alone."""
        return None

    @property
    def placed(self) -> ColumnPass | None:
        """The columns where they lie on devices; None: they come by `columns` or `blocks`."""
        return None

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """The source's own keys (n, d) and values (n, v), where they want a gradient."""
        return None, None

    @property
    def encodes(self) -> int:
        """Records that `encoded` takes at once, where it makes keys with a graph; 0: it makes none."""
        return 0

    def encoded(self, block: Block) -> Block:
        """Return a block with its keys as they are compared."""
        return block

    def frozen(self: S) -> S:
        """Return the same records without a graph, to look again. Raises StaleRead where they have changed since."""
        return self

    def whole(self: S) -> S:
        """Return the same, which gives no partial answer: a loss needs all records."""
        return self

    def rows(self, positions: Positions) -> Positions:
        """Permanent row numbers, -1 where there is none."""
        return positions

    def positions(self, rows: Positions) -> Positions:  # (n,) -> (n,)
        """Positions of rows, -1 for those that are not there."""
        places = np.flatnonzero(self.live)
        known = dict(zip(self.rows(places).tolist(), places.tolist(), strict=True))
        return np.array([known.get(row, -1) for row in rows.tolist()], np.int64)

    def read_from(self, pools: bool) -> str:
        """Place where an answer over every record was computed, as its `finder` tells; "" for this process."""
        return ""


class IndexedRecords(SourceRecords, Protocol):
    """Those of a database, which an index may know: what draws and searches ask of them."""

    @property
    def snapshot(self) -> Snapshot:
        """The generation."""

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric."""

    @property
    def finder(self) -> Finder:
        """The database's."""

    @property
    def columns(self) -> RecordColumns:
        """Those of the generation, where they lie."""

    def first(self: S, width: int) -> S:
        """So many of the first records as a pass is measured over, of which `width` numbers are read."""

    def in_radius(self, query: Query) -> Positions:  # (q, m), -1 = none
        """Positions of every record whose score may reach the least one."""

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable, int] | None:
        """As `Finder.sampler`."""
