"""Interfaces of sources of records: their columns, and the answers that they may compute themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import numpy as np
import torch
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
    """Numbered records. Positions are 0 … size - 1, dead records included; -1 means no record."""

    @property
    def live(self) -> Live:
        """Mask (size,) of the positions that hold a record."""

    @property
    def count(self) -> int:
        """Number of records."""

    @property
    def width(self) -> int:
        """Width v of an answer."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes if values are labels, else None."""

    @property
    def resolve(self) -> Resolve:
        """Function from rows to ids and payload texts. Records that were deleted since are missing in its result."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield the allowed live records from position `start` on in blocks of at most `size`, sorted by position."""

    def find(self, request: Request) -> Candidates:
        """Find the k nearest records of each query by the request's score."""

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Return the scores of candidates (q, k), with gradients."""

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Return the weighted sums (q, v) of candidates' values, with gradients."""

    # -- answers that a source of remote records computes remotely ----------------------------------------------------

    def stream(self, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """Return output and lse over every record, as `softdb.attend.streaming.stream` does."""

    def estimate(self, request: Request) -> Pooled:
        """Return an answer to the request's tolerance, as `softdb.attend.estimate.estimate` does."""

    def heaviest(self, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:
        """Return the `count` heaviest records and the entropy (q,), as `softdb.attend.result.heaviest` does."""

    missing: tuple[int, ...] = ()  # numbers of the shards that did not answer

    # -- defaults: records in this process, keys compared as they are stored ------------------------------------------

    @property
    def columns(self) -> RecordColumns | None:
        """Keys and values in memory that kernels read in place. None: read them through `blocks`."""
        return None

    @property
    def placed(self) -> ColumnPass | None:
        """The columns on devices. None: read `columns` or `blocks`."""
        return None

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """The source's keys (n, d) and values (n, v), each None unless it requires a gradient."""
        return None, None

    @property
    def encodes(self) -> int:
        """Largest block for `encoded` if the keys it returns carry gradients; 0 if they carry none."""
        return 0

    def encoded(self, block: Block) -> Block:
        """Return a block whose keys have passed through the source's encoder, if it has one."""
        return block

    def frozen(self: S) -> S:
        """Return the same records without gradients. Raises StaleRead if the records have changed since."""
        return self

    def whole(self: S) -> S:
        """Return the same records, but raise an error instead of partial answers, as a loss needs all records."""
        return self

    def taking_part(self, request: Request) -> Tensor:  # (q,)
        """Return the number of records that take part in each query."""
        queries, mask = request.queries, request.mask
        if mask is None:
            count = self.count if request.allowed is None else int(np.count_nonzero(request.keep(self.live)))
            return torch.full((len(queries),), count, device=queries.device)
        if request.allowed is not None:
            mask = mask.cpu() & torch.from_numpy(request.allowed[self.live])
        return mask.sum(1).to(queries.device)

    def rows(self, positions: Positions) -> Positions:
        """Return the permanent row of each position, -1 for none."""
        return positions

    def positions(self, rows: Positions) -> Positions:  # (n,) -> (n,)
        """Return the position of each row, -1 for rows that do not exist."""
        places = np.flatnonzero(self.live)
        known = dict(zip(self.rows(places).tolist(), places.tolist(), strict=True))
        return np.array([known.get(row, -1) for row in rows.tolist()], np.int64)

    def read_from(self, pools: bool) -> str:
        """Return the text to append to an answer's `finder`: where it was computed; "" for this process."""
        return ""


class IndexedRecords(SourceRecords, Protocol):
    """Records of a database, which may have an index."""

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot whose records these are."""

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric of the database."""

    @property
    def finder(self) -> Finder:
        """Finder of the database."""

    @property
    def columns(self) -> RecordColumns:
        """Columns of the generation, on the host or on devices."""

    def in_radius(self, query: Query) -> Positions:  # (q, m), -1 = none
        """Return the positions of every record whose score may be at least `query.least`."""

    def sampler(self, allowed: Live | None) -> tuple[Sampler, Drawable] | None:
        """Return a sampler and the records that it may draw (see `Finder.sampler`)."""
