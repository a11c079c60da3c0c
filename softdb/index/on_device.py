"""A generation whose columns lie on devices: the face of a `Snapshot`, with tensors there in place of the host's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.index.contract import Live, Rows
from softdb.index.resident import DeviceView
from softdb.store import Snapshot
from softdb.store.snapshot import Block, Segment

__all__ = ["OnDevice", "Shard", "part_of"]


class Shard(NamedTuple):
    """A run of positions, and where it lies."""

    view: DeviceView  # of these records alone
    low: int  # the first of them

    @property
    def high(self) -> int:
        """The position after the last."""
        return self.low + self.view.snapshot.size

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Keys, and values where they are not the keys; which are live, None: all. For columns that are there."""
        view = self.view
        keys, values, kept = view.seen.keys, view.values, view.kept(None)
        assert keys is not None
        return keys, None if values is keys else values, None if kept.number == len(keys) else kept.there

    def of(self, column: Live | None) -> Live | None:  # (size,) -> (m,)
        """Its part of what is known of every position."""
        return column if column is None or self.high - self.low == len(column) else column[self.low : self.high]


@dataclass(frozen=True)
class OnDevice(Snapshot):
    """What is asked by position is answered by tensors of the first device; rows and live records as on the host."""

    shards: tuple[Shard, ...] = ()

    on_host: ClassVar[bool] = False

    @classmethod
    def placed(cls, snapshot: Snapshot, shards: tuple[Shard, ...]) -> OnDevice:
        """A snapshot with at least one record, as it lies there."""
        return cls(**{one.name: getattr(snapshot, one.name) for one in fields(Snapshot)}, shards=shards)

    def first(self, part: Snapshot) -> OnDevice:
        """Some of the first records, at most those of the first device."""
        view, size = self.shards[0].view, min(part.size, self.shards[0].high)
        part = part if size == part.size else part_of(part, 0, size)
        return OnDevice.placed(part, (Shard(DeviceView(part, view.seen.first(part, view.values)), 0),))

    @property
    def device(self) -> torch.device:
        """Where answers come from."""
        return self.shards[0].view.device

    def resident(self, pools: bool) -> bool:
        """Whether the keys are there, and if asked for the values; else they pass through."""
        views = [shard.view for shard in self.shards]
        return all(view.seen.keys is not None and (not pools or view.values is not None) for view in views)

    def place(self, pools: bool) -> str:
        """How an answer over every record came about, as its `finder` tells."""
        names = " and ".join(str(shard.view.device) for shard in self.shards)
        return f" on {names}" if self.resident(pools) else f" streamed to {names}"

    def keys_at(self, positions: Rows) -> Tensor:
        """Keys of positions (…), copied: (…, d) in the column's dtype; zeros at -1."""
        return self._gathered(False, positions)

    def values_at(self, positions: Rows) -> Tensor:
        """Values of positions (…), copied: (…, v) or int64 labels (…); zeros at -1. The keys, where the key serves."""
        found = self._gathered(True, positions)
        return found if found.is_floating_point() else found.long()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`: keys and values on the device, positions on the host."""
        for shard in self.shards:
            kept = shard.view.kept(shard.of(allowed))
            for block in shard.view.blocks(size, kept, max(0, start - shard.low)):
                keys = block.keys.to(self.device)
                values = keys if block.values is block.keys else block.values.to(self.device)
                yield Block(block.positions + shard.low, keys, values)

    def _gathered(self, values: bool, positions: Rows) -> Tensor:
        flat = positions.reshape(-1)
        parts, places = [], []
        for shard in self.shards:
            inside = np.flatnonzero((flat >= shard.low) & (flat < shard.high))
            own = torch.from_numpy(flat[inside] - shard.low).to(shard.view.device)
            found = shard.view.values_at(own) if values else shard.view.keys_at(own)
            if len(inside) == len(flat):
                return found.to(self.device).view(*positions.shape, *found.shape[1:])
            parts.append(found.to(self.device))
            places.append(torch.from_numpy(inside))
        found = torch.cat(parts)
        out = found.new_zeros(len(flat), *found.shape[1:])
        out[torch.cat(places).to(self.device)] = found
        return out.view(*positions.shape, *found.shape[1:])


def part_of(snapshot: Snapshot, low: int, high: int) -> Snapshot:
    """The records at positions from low to high, as a snapshot of their own."""
    segments = []
    for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
        slots = slice(max(0, low - start), min(len(segment), high - start))
        if slots.start < slots.stop:
            rows = None if segment.rows is None else segment.rows[slots]
            values = None if segment.values is None else segment.values[slots]
            first = segment.first_row + slots.start if rows is None else int(rows[0])
            segments.append(Segment(segment.number, first, rows, segment.keys[slots], values))
    return Snapshot.of(snapshot.generation, tuple(segments), snapshot.live[low:high])
