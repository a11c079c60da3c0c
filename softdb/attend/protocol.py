"""Protocols of sources of records: the columns that they give, and the answers that they may override."""

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
    """Records in order. Positions count them, 0 … size - 1, dead ones included; -1 is none."""

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

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """The weighted sum of candidates' values (q, v), with its gradients."""

    # -- answers that a source of remote records computes where they lie ----------------------------------------------

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
        """Keys and values in memory that kernels read in place; None: only `blocks` gives them."""
        return None

    @property
    def placed(self) -> ColumnPass | None:
        """The columns on devices; None: `columns` or `blocks` gives them."""
        return None

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """The source's own keys (n, d) and values (n, v), if they require a gradient."""
        return None, None

    @property
    def encodes(self) -> int:
        """Number of records that `encoded` takes at once if its keys have a graph; 0 if they have none."""
        return 0

    def encoded(self, block: Block) -> Block:
        """Return a block with its keys as they are compared."""
        return block

    def frozen(self: S) -> S:
        """Return the same records without a graph. Raises StaleRead if they have changed since."""
        return self

    def whole(self: S) -> S:
        """Return the same records, refusing partial answers: a loss needs all records."""
        return self

    def rows(self, positions: Positions) -> Positions:
        """Permanent row numbers, -1 where there is none."""
        return positions

    def positions(self, rows: Positions) -> Positions:  # (n,) -> (n,)
        """Positions of rows, -1 for rows that do not exist."""
        places = np.flatnonzero(self.live)
        known = dict(zip(self.rows(places).tolist(), places.tolist(), strict=True))
        return np.array([known.get(row, -1) for row in rows.tolist()], np.int64)

    def read_from(self, pools: bool) -> str:
        """Suffix of an answer's `finder`: the place where it was computed; "" for this process."""
        return ""


class IndexedRecords(SourceRecords, Protocol):
    """Records of a database, which an index may hold codes of."""

    @property
    def snapshot(self) -> Snapshot:
        """Columns of the generation."""

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric."""

    @property
    def finder(self) -> Finder:
        """Finder of the database."""

    @property
    def columns(self) -> RecordColumns:
        """Columns of the generation, on the host or on devices."""

    def in_radius(self, query: Query) -> Positions:  # (q, m), -1 = none
        """Positions of every record whose score may reach `query.least`."""

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable, int] | None:
        """As `Finder.sampler`."""
