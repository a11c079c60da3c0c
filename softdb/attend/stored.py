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
        """Number of classes, if values are labels."""
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
    placed: PlacedColumns | None = None  # columns on the queries' device; None: those of the host

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
        """Columns of the generation, on the queries' device if they lie there."""
        return self.snapshot if self.placed is None else self.placed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`, on the columns' device."""
        return self.columns.blocks(size, allowed, start)

    @property
    def width(self) -> int:
        """Width v of an answer."""
        return self.schema.pooled_dim

    def find(self, request: Request) -> Candidates:
        """The k nearest, by the index or by comparing all records, as for a score without an index form.

        With a mask each query searches its own records.
        """
        folded, k = request.detached.folded, min(request.k, self.count)
        if folded is None or (isinstance(request.weighting, Argmax) and plateaus(request.score)):
            return Candidates(scan(request, self), "scan")
        query = Query(folded.queries, k, folded.metric, request.allowed, exact=request.exact, pairwise=False)
        if request.mask is None:
            result = self.finder.find(self.snapshot, query)
            return Candidates(result.positions, result.finder)
        positions, finder = np.full((len(request.queries), k), -1, np.int64), "flat"
        for i, own_mask in enumerate(request.mask.cpu().numpy()):
            allowed = request.keep(self.live).copy()
            allowed[self.live] &= own_mask
            alone = replace(query, queries=folded.queries[i : i + 1], allowed=allowed)
            result = self.finder.find(self.snapshot, alone)
            positions[i], finder = result.positions[0], result.finder if finder == "flat" else finder
        return Candidates(positions, finder)

    def in_radius(self, query: Query) -> Positions:  # (q, m), -1 = none
        """Positions of every record whose score may reach `query.least`."""
        return radius_search(self.snapshot, query) if self.placed is None else self.placed.radius_search(query)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Scores by kernels that read keys in place, or by the score on copies."""
        return Scored(positions, score_rows(request.score, request.queries, self.columns, positions))

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Weighted sums by kernels that read values in place, or of copies."""
        if not self.columns.size:
            return pool(weights, weights.new_zeros(*scored.positions.shape, self.width))
        return pool_rows(weights, self.columns, scored.positions, self.num_classes)

    def read_from(self, pools: bool) -> str:
        """As `Source.read_from`."""
        return "" if self.placed is None else self.placed.place(pools)

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable, int] | None:
        """As `Finder.sampler`."""
        return self.finder.sampler(self.snapshot, allowed)
