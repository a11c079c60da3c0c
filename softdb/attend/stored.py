"""Sources over the stored columns of one generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from softdb.answers import Resolve
from softdb.attend.count import count_drawn
from softdb.attend.estimate import estimate_drawn, estimate_plainly
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
        """Mask (size,) of the positions that hold a record."""
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
        """Yield blocks of records, as `Snapshot.blocks` does."""
        return self.snapshot.blocks(size, allowed, start)

    def rows(self, positions: Positions) -> Positions:
        """Return the permanent row of each position, -1 for none."""
        return self.snapshot.rows(positions)

    def positions(self, rows: Positions) -> Positions:
        """Return the position of each row, -1 for rows that are dead or do not exist."""
        positions = self.snapshot.positions(rows)
        return np.where((positions >= 0) & self.live[positions], positions, -1)


@dataclass(frozen=True)
class Stored(OfGeneration):
    """The records of a database in one generation."""

    finder: Finder
    read: Resolve
    placed: PlacedColumns | None = None  # columns on the queries' device; None: the host's columns

    hits = hits
    count_within = count_drawn
    estimate = estimate_drawn
    estimate_plainly = estimate_plainly
    sample = sample_drawn

    @property
    def resolve(self) -> Resolve:
        """Function of the database from rows to ids and payload texts."""
        return self.read

    @property
    def columns(self) -> RecordColumns:
        """Columns of the generation: on the queries' device if it holds them, else on the host."""
        return self.snapshot if self.placed is None else self.placed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks of records as `Snapshot.blocks` does, on the device of `columns`."""
        return self.columns.blocks(size, allowed, start)

    @property
    def width(self) -> int:
        """Width v of an answer."""
        return self.schema.pooled_dim

    def find(self, request: Request) -> Candidates:
        """Find the k nearest records of each query. A score that no metric can replace compares all records.

        With a mask each query searches among its own records.
        """
        folded, k = request.detached.folded, min(request.k, self.count)
        if folded is None or (isinstance(request.weighting, Argmax) and plateaus(request.plain_score)):
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
        """Return the positions of every record whose score may be at least `query.least`."""
        return radius_search(self.snapshot, query) if self.placed is None else self.placed.radius_search(query)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Return the scores of candidates, from kernels that read keys in place or from the score on copies of keys."""
        return Scored(positions, score_rows(request.score, request.queries, self.columns, positions))

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Return weighted sums of candidates' values, from kernels that read values in place or from copies."""
        if not self.columns.size:
            return pool(weights, weights.new_zeros(*scored.positions.shape, self.width))
        return pool_rows(weights, self.columns, scored.positions, self.num_classes)

    def read_from(self, pools: bool) -> str:
        """Return the text to append to an answer's `finder`: the device that holds the columns, "" for the host."""
        return "" if self.placed is None else self.placed.place(pools)

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable] | None:
        """Return a sampler and the records that it may draw (see `Finder.sampler`)."""
        return self.finder.sampler(self.snapshot, allowed)
