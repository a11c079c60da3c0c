"""A source whose records are plain tensors, for `softdb.attention`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Resolve
from softdb.attend.blocks import scores_of
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.attend.scoring import plateaus, scan
from softdb.attend.source import Source
from softdb.index.placement import SoftmaxPass, TensorPass
from softdb.lazy import cached_property
from softdb.pool import pool
from softdb.store import Snapshot
from softdb.store.entry import RecordEntry
from softdb.store.snapshot import Block, Segment


@dataclass(frozen=True)
class Columns(Source):
    """Records whose keys and values are tensors on any device. The tensors may require gradients."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v) or int64 labels (n,)
    num_classes: int | None = None  # number of classes if values are labels
    placed: TensorPass | None = None  # computes passes on the tensors' device; None: the CPU computes

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.keys)

    @property
    def width(self) -> int:
        """Width v of an answer."""
        return self.num_classes or self.values.shape[1]

    @cached_property
    def live(self) -> Live:
        """Mask (n,) of the records, all True."""
        return np.ones(len(self.keys), np.bool_)

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """Keys and values, each None unless it requires a gradient."""
        keys, values = (column if column.requires_grad else None for column in (self.keys, self.values))
        return keys, values

    @cached_property
    def columns(self) -> Snapshot | None:
        """The tensors as one segment that kernels read, if they are on the CPU in a dtype that kernels accept."""
        if self.keys.device.type != "cpu" or self.keys.dtype not in (torch.float32, torch.float16) or not self.count:
            return None
        if self.values.is_floating_point() and self.values.dtype is not self.keys.dtype:
            return None
        keys, values = (column.detach().contiguous().cpu().numpy() for column in (self.keys, self.values))
        if values.dtype.kind == "i":
            values = values.astype(np.int32)
        return Snapshot.of(0, (Segment(0, 0, None, keys, values),), self.live)

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks of records, as `Snapshot.blocks` does."""
        chosen = None if allowed is None else torch.from_numpy(np.flatnonzero(allowed))
        for low in range(start, len(self.keys), size):
            places = torch.arange(low, min(low + size, len(self.keys)))
            run: slice | Tensor = slice(low, low + size)
            if chosen is not None:
                run = places = chosen[(chosen >= places[0]) & (chosen <= places[-1])]
                if not len(places):
                    continue
            yield Block(places, self.keys.detach()[run], self.values.detach()[run])

    def frozen(self) -> Columns:
        """Return the records with keys and values that require no gradient."""
        return replace(self, keys=self.keys.detach(), values=self.values.detach())

    def find(self, request: Request) -> Candidates:
        """Find the k nearest records of each query by comparing every record."""
        folded, positions = None if self.placed is None else request.detached.folded, None
        if folded is not None and self.placed is not None and not plateaus(request.plain_score):
            what = SoftmaxPass(folded.queries, folded.metric, 1.0, *request.masks(self.live), None, pools=False)
            positions = self.placed.nearest(what, min(request.k, self.count))
        return Candidates(scan(request, self) if positions is None else positions, "scan")

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Return the scores of candidates, from copies of their keys."""
        own = torch.from_numpy(positions).to(self.keys.device)
        scores = scores_of(request.score, request.queries, self.keys[own.clamp(min=0)])
        return Scored(positions, scores.masked_fill(own.to(scores.device) < 0, -torch.inf))

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Return weighted sums of candidates' values, from copies of the values."""
        own = torch.from_numpy(scored.positions).to(self.values.device).clamp(min=0)
        return pool(weights, self.values[own], self.num_classes)

    @property
    def resolve(self) -> Resolve:
        """Function from row numbers to `RecordEntry` objects, with the row number as id."""
        return lambda rows, payloads=True, texts=False: {row: RecordEntry(row, row) for row in rows.tolist()}
