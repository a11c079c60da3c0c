"""Sources: the stored columns of a generation, and plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Resolve
from softdb.attend.blocks import scores_of
from softdb.attend.on_device import find_on_device, served
from softdb.attend.request import AsStored, Candidates, Live, Positions, Request, Resident, Scored
from softdb.attend.scoring import pool_rows, scan, score_rows
from softdb.check import Schema
from softdb.index import Finder
from softdb.index.on_device import OnDevice, part_of
from softdb.index.tail import Tail
from softdb.lazy import cached_property
from softdb.pool import pool
from softdb.scoring import Argmax, Constant, Kernel
from softdb.store import Snapshot
from softdb.store.entry import RecordEntry
from softdb.store.snapshot import Block, Segment

__all__ = ["Columns", "OfGeneration", "Stored", "plateaus"]


MEASURED = 1 << 23  # numbers of records that a pass is measured over
MEASURED_THERE = 1 << 28  # the same where they lie on a device, which passes over the others before it is asked


@dataclass(frozen=True)
class OfGeneration:
    """A source over the stored columns of one generation."""

    snapshot: Snapshot
    schema: Schema

    @property
    def live(self) -> Live:
        """Which positions hold a record."""
        return self.snapshot.live

    @property
    def count(self) -> int:
        """How many do."""
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


@dataclass(frozen=True)
class Stored(OfGeneration, AsStored):
    """The records of a database as of one generation."""

    finder: Finder
    resolve: Resolve
    there: OnDevice | None = None  # the columns as they lie beside the queries; None: the host's serve

    trained = (None, None)

    @property
    def columns(self) -> Snapshot:
        """Those of the generation."""
        return self.snapshot if self.there is None else self.there

    @cached_property
    def resident(self) -> tuple[Resident, ...]:
        """Those that lie beside the queries, where both keys and values fit there."""
        if self.there is None or not self.there.resident(pools=True):
            return ()
        return tuple(Resident(*shard.tensors, shard.low) for shard in self.there.shards)

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`, wherever they lie."""
        return self.columns.blocks(size, allowed, start)

    @property
    def width(self) -> int:
        """v."""
        return self.schema.pooled_dim

    def first(self, width: int) -> Stored:
        """So many of the first records, all live, as a pass is measured over; `width` numbers of each are read."""
        resident = self.there is not None and self.there.resident(pools=True)
        size = min(len(self.snapshot.segments[0]), max(1, (MEASURED_THERE if resident else MEASURED) // width))
        part = part_of(self.snapshot, 0, size)
        part = Snapshot.of(part.generation, part.segments, np.ones(size, np.bool_))
        there = None if self.there is None else self.there.first(part)
        return replace(self, snapshot=part if there is None else there, there=there)

    def frozen(self) -> Stored:
        """Itself: a generation never changes."""
        return self

    def find(self, request: Request, k: int, exact: bool = False) -> Candidates:
        """By the index, or by comparing all. A score without an index form is compared with every record.

        With a mask each query searches its own records.
        """
        folded, k = request.detached.folded, min(k, self.count)
        if folded is None or (isinstance(request.weighting, Argmax) and plateaus(request.score)):
            return Candidates(scan(request, self, k), "scan")
        find = functools.partial(self.finder.find, self.snapshot, exact=exact, pairwise=False, metric=folded.metric)
        if request.mask is None:
            found = find(folded.queries, k, request.allowed)
            return Candidates(found.positions, found.finder)
        positions, finder = np.full((len(request.queries), k), -1, np.int64), "flat"
        for i, mine in enumerate(request.mask.cpu().numpy()):
            allowed = request.keep(self).copy()
            allowed[self.live] &= mine
            found = find(folded.queries[i : i + 1], k, allowed)
            positions[i], finder = found.positions[0], found.finder if finder == "flat" else finder
        return Candidates(positions, finder)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """By kernels where the keys lie, or by the score on copies of them."""
        return Scored(positions, score_rows(request.score, request.queries, self.columns, positions))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """By kernels where the values lie, or on copies of them."""
        if not self.columns.size:
            return pool(weights, weights.new_zeros(*found.positions.shape, self.width))
        return pool_rows(weights, self.columns, found.positions, self.num_classes)

    def sampler(self) -> tuple[Tail | None, int]:
        """What draws records through the index, None where nothing does; and the first position beyond it."""
        return self.finder.tail(self.snapshot)


@dataclass(frozen=True)
class Columns(AsStored):
    """Keys and values as tensors, on any device, which may want gradients: of `softdb.attention`."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v) or int64 labels (n,)
    num_classes: int | None = None  # of labels

    @property
    def count(self) -> int:
        """How many records there are."""
        return len(self.keys)

    @property
    def width(self) -> int:
        """v."""
        return self.num_classes or self.values.shape[1]

    @cached_property
    def live(self) -> Live:
        """All of them, (n,)."""
        return np.ones(len(self.keys), np.bool_)

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """Those that want a gradient."""
        keys, values = (column if column.requires_grad else None for column in (self.keys, self.values))
        return keys, values

    @cached_property
    def resident(self) -> tuple[Resident, ...]:
        """The tensors themselves, where they lie on a device."""
        return (Resident(self.keys, self.values),) if served(self.keys.device) else ()

    @cached_property
    def columns(self) -> Snapshot | None:
        """The tensors' own memory as one segment, where they lie on the CPU in a dtype that the loops read."""
        if self.keys.device.type != "cpu" or self.keys.dtype not in (torch.float32, torch.float16) or not self.count:
            return None
        if self.values.is_floating_point() and self.values.dtype is not self.keys.dtype:
            return None
        keys, values = (column.detach().contiguous().cpu().numpy() for column in (self.keys, self.values))
        if values.dtype.kind == "i":
            values = values.astype(np.int32)
        return Snapshot.of(0, (Segment(0, 0, None, keys, values),), self.live)

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`."""
        chosen = None if allowed is None else torch.from_numpy(np.flatnonzero(allowed))
        for low in range(start, len(self.keys), size):
            part = torch.arange(low, min(low + size, len(self.keys)))
            run: slice | Tensor = slice(low, low + size)
            if chosen is not None:
                run = part = chosen[(chosen >= part[0]) & (chosen <= part[-1])]
                if not len(part):
                    continue
            yield Block(part, self.keys.detach()[run], self.values.detach()[run])

    def frozen(self) -> Columns:
        """The same, detached."""
        return Columns(self.keys.detach(), self.values.detach(), self.num_classes)

    def find(self, request: Request, k: int, exact: bool = True) -> Candidates:
        """Every record is compared."""
        found = None if plateaus(request.score) else find_on_device(request, self, min(k, self.count))
        return Candidates(scan(request, self, k) if found is None else found, "scan")

    def scored(self, request: Request, positions: Positions) -> Scored:
        """By the score, on copies."""
        own = torch.from_numpy(positions).to(self.keys.device)
        scores = scores_of(request.score, request.queries, self.keys[own.clamp(min=0)])
        return Scored(positions, scores.masked_fill(own.to(scores.device) < 0, -torch.inf))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """On copies."""
        own = torch.from_numpy(found.positions).to(self.values.device).clamp(min=0)
        return pool(weights, self.values[own], self.num_classes)

    def rows(self, positions: Positions) -> Positions:
        """The positions."""
        return positions

    @property
    def resolve(self) -> Resolve:
        """A record is called by its place."""
        return lambda rows, payloads=True, texts=False: {row: RecordEntry(row, row) for row in rows.tolist()}


def plateaus(score: object) -> bool:
    """Whether records at unlike distances score alike, so that an index orders more finely than the score does."""
    return isinstance(score, Kernel) and (score.compact or isinstance(score, Constant))
