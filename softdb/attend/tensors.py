"""Plain tensors as records: what `softdb.attention` asks."""

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
    """Keys and values as tensors, on any device, which may want gradients: of `softdb.attention`."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v) or int64 labels (n,)
    num_classes: int | None = None  # of labels
    placed: TensorPass | None = None  # the tensors as they are asked on their device; None: the CPU

    @property
    def count(self) -> int:
        """Number of records."""
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
        return replace(self, keys=self.keys.detach(), values=self.values.detach())

    def find(self, request: Request) -> Candidates:
        """Every record is compared."""
        folded, found = None if self.placed is None else request.detached.folded, None
        if folded is not None and self.placed is not None and not plateaus(request.score):
            what = SoftmaxPass(folded.queries, folded.metric, 1.0, *request.masks(self.live), None, pools=False)
            found = self.placed.nearest(what, min(request.k, self.count))
        return Candidates(scan(request, self) if found is None else found, "scan")

    def scored(self, request: Request, positions: Positions) -> Scored:
        """By the score, on copies."""
        own = torch.from_numpy(positions).to(self.keys.device)
        scores = scores_of(request.score, request.queries, self.keys[own.clamp(min=0)])
        return Scored(positions, scores.masked_fill(own.to(scores.device) < 0, -torch.inf))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """On copies."""
        own = torch.from_numpy(found.positions).to(self.values.device).clamp(min=0)
        return pool(weights, self.values[own], self.num_classes)

    @property
    def resolve(self) -> Resolve:
        """A record is called by its place."""
        return lambda rows, payloads=True, texts=False: {row: RecordEntry(row, row) for row in rows.tolist()}
