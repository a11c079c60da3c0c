"""Stored records: the columns of one generation, of a database or under a trained encoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from softdb.answers import Resolve
from softdb.attend.count import count_drawn
from softdb.attend.estimate import estimate_drawn
from softdb.attend.hits import hits
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.attend.sample import sample_drawn
from softdb.attend.scoring import plateaus, pool_rows, scan, score_rows
from softdb.attend.source import Source
from softdb.check import Schema
from softdb.index import Finder
from softdb.index.flat import radius_search
from softdb.index.placement import PlacedColumns, RecordColumns
from softdb.index.query import Query
from softdb.index.sampler import Drawable, Sampler
from softdb.pool import pool
from softdb.scoring import Argmax
from softdb.store import Snapshot
from softdb.store.snapshot import Block

MEASURED = 1 << 23  # numbers of records that a pass is measured over
MEASURED_THERE = 1 << 28  # the same where they lie on a device, which passes over the others before it is asked


@dataclass(frozen=True)
class OfGeneration(Source):
    """A source over the stored columns of one generation."""

    snapshot: Snapshot
    schema: Schema

    @property
    def live(self) -> Live:
        """Mask of positions that hold a record."""
        return self.snapshot.live

    @property
    def count(self) -> int:
        """Number of records."""
        return self.snapshot.count

    @property
    def num_classes(self) -> int | None:
        """The database's."""
        return self.schema.num_classes

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`."""
        return self.snapshot.blocks(size, allowed, start)

    def rows(self, positions: Positions) -> Positions:
        """As `Snapshot.rows`."""
        return self.snapshot.rows(positions)

    def positions(self, rows: Positions) -> Positions:
        """As `Source.positions`."""
        positions = self.snapshot.positions(rows)
        return np.where((positions >= 0) & self.live[positions], positions, -1)


@dataclass(frozen=True)
class Stored(OfGeneration):
    """The records of a database as of one generation."""

    finder: Finder
    read: Resolve
    placed: PlacedColumns | None = None  # the columns as they lie beside the queries; None: the host's serve

    hits = hits
    count_within = count_drawn
    estimate = estimate_drawn
    sample = sample_drawn

    @property
    def resolve(self) -> Resolve:
        """Ids and payload texts of rows, as the database reads them."""
        return self.read

    @property
    def columns(self) -> RecordColumns:
        """Those of the generation."""
        return self.snapshot if self.placed is None else self.placed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`, wherever they lie."""
        return self.columns.blocks(size, allowed, start)

    @property
    def width(self) -> int:
        """v."""
        return self.schema.pooled_dim

    def first(self, width: int) -> Stored:
        """So many of the first records, all live, as a pass is measured over; `width` numbers of each are read."""
        resident = self.placed is not None and self.placed.resident(pools=True)
        size = min(len(self.snapshot.segments[0]), max(1, (MEASURED_THERE if resident else MEASURED) // width))
        placed = None if self.placed is None else self.placed.first(size)
        return replace(self, snapshot=self.snapshot.first(size) if placed is None else placed.snapshot, placed=placed)

    def find(self, request: Request) -> Candidates:
        """By the index, or by comparing all. A score without an index form is compared with every record.

        With a mask each query searches its own records.
        """
        folded, k = request.detached.folded, min(request.k, self.count)
        if folded is None or (isinstance(request.weighting, Argmax) and plateaus(request.score)):
            return Candidates(scan(request, self), "scan")
        query = Query(folded.queries, k, folded.metric, request.allowed, exact=request.exact, pairwise=False)
        if request.mask is None:
            found = self.finder.find(self.snapshot, query)
            return Candidates(found.positions, found.finder)
        positions, finder = np.full((len(request.queries), k), -1, np.int64), "flat"
        for i, mine in enumerate(request.mask.cpu().numpy()):
            allowed = request.keep(self.live).copy()
            allowed[self.live] &= mine
            alone = replace(query, queries=folded.queries[i : i + 1], allowed=allowed)
            found = self.finder.find(self.snapshot, alone)
            positions[i], finder = found.positions[0], found.finder if finder == "flat" else finder
        return Candidates(positions, finder)

    def in_radius(self, query: Query) -> Positions:  # (q, m), -1 = none
        """Positions of every record whose score may reach the least one, compared where the columns lie."""
        return radius_search(self.snapshot, query) if self.placed is None else self.placed.radius_search(query)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """By kernels where the keys lie, or by the score on copies of them."""
        return Scored(positions, score_rows(request.score, request.queries, self.columns, positions))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """By kernels where the values lie, or on copies of them."""
        if not self.columns.size:
            return pool(weights, weights.new_zeros(*found.positions.shape, self.width))
        return pool_rows(weights, self.columns, found.positions, self.num_classes)

    def read_from(self, pools: bool) -> str:
        """As `Source.read_from`."""
        return "" if self.placed is None else self.placed.place(pools)

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable, int] | None:
        """As `Finder.sampler`."""
        return self.finder.sampler(self.snapshot, allowed)
