"""Records that are plain tensors: what the functional `attention` streams over, and what may itself be learnt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.lazy import cached_property
from softdb.store.snapshot import Block, Segment, Snapshot

__all__ = ["Columns", "Live", "Source"]

Live = NDArray[np.bool_]


class Source(Protocol):
    """Records in order: a database's snapshot, or columns."""

    @property
    def live(self) -> Live:
        """Which positions hold a record, (size,) bool."""

    @property
    def count(self) -> int:
        """How many do."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The columns in memory or mapped; none where nothing is stored."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """The allowed live records from a position on, in order."""


@dataclass(frozen=True)
class Columns:
    """Keys and values as tensors, on any device, which may want gradients."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v) or int64 labels (n,)

    @property
    def count(self) -> int:
        """How many records there are."""
        return len(self.keys)

    @cached_property
    def live(self) -> Live:
        """All of them, (n,)."""
        return np.ones(len(self.keys), np.bool_)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One segment that shares the tensors' memory where they lie on the CPU."""
        keys, values = (column.detach().contiguous().cpu().numpy() for column in (self.keys, self.values))
        if values.dtype.kind == "i":
            values = values.astype(np.int32)
        return (Segment(0, 0, None, keys, values),) if len(keys) else ()

    @property
    def snapshot(self) -> Snapshot:
        """The same as a database would show it."""
        return Snapshot.of(0, self.segments, self.live)

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`."""
        chosen = None if allowed is None else torch.from_numpy(np.flatnonzero(allowed))
        for low in range(start, len(self.keys), size):
            part = torch.arange(low, min(low + size, len(self.keys)))
            if chosen is not None:
                part = chosen[(chosen >= part[0]) & (chosen <= part[-1])]
                if not len(part):
                    continue
                yield Block(part, self.keys.detach()[part], self.values.detach()[part])
            else:
                run = slice(low, low + size)
                yield Block(part, self.keys.detach()[run], self.values.detach()[run])
