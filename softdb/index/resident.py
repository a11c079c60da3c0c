"""The key column on a GPU: a copy that grows with the store, or, where it does not fit, blocks that pass through."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.index.contract import Live, Recent, Rows
from softdb.index.products import KeyBlock
from softdb.store import Snapshot

__all__ = ["DeviceView", "Kept", "KeyColumn", "Seen", "room"]

SPARE = 0.2  # of the memory that is free: for scores, candidates, and whatever else runs there
UPLOADED = 1 << 24  # numbers sent to the GPU at once

Layout = tuple[tuple[int, int, int], ...]  # of each segment: its number, first row and length


def room(device: torch.device) -> int:
    """Bytes that can be had on a device, what torch holds in reserve included."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class KeyColumn:
    """The keys of one database on one device, in the dtype they are stored in, dead ones included.

    A newer snapshot costs the upload of its new keys; a compaction, of all of them. Safe to use from several threads
    and streams: keys are written before they can be read, and never written over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._keys: Tensor | None = None  # (capacity, d)
        self._layout: Layout = ()
        self._generation = 0

    def of(self, snapshot: Snapshot) -> Tensor | None:  # (size, d)
        """A snapshot's keys by position; None where they do not fit, or are from before a compaction."""
        layout = tuple((s.number, s.first_row, len(s)) for s in snapshot.segments)
        if not layout:
            return None
        with self._lock:
            if self._keys is None or not _begins(self._layout, layout):
                if not _begins(layout, self._layout):
                    if snapshot.generation < self._generation:
                        return None
                    self._forget()
                try:
                    self._keys = self._extended(snapshot)
                except torch.cuda.OutOfMemoryError:
                    self._forget()
                    return None
                self._layout, self._generation = layout, snapshot.generation
            return self._keys[: snapshot.size]

    def _forget(self) -> None:
        self._keys, self._layout, self._generation = None, (), 0

    def _extended(self, snapshot: Snapshot) -> Tensor:
        """The keys there with those that are not there yet. Raises OutOfMemoryError where they do not fit."""
        keys, have = self._reserve(snapshot, sum(length for _, _, length in self._layout))
        for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
            step = max(1, UPLOADED // segment.keys.shape[1])
            for low in range(max(0, have - start), len(segment), step):
                high = min(low + step, len(segment))
                # from memory that is not pinned: the copy has ended when this returns, whatever the stream
                keys[start + low : start + high].copy_(torch.from_numpy(segment.keys[low:high]))
        return keys

    def _reserve(self, snapshot: Snapshot, have: int) -> tuple[Tensor, int]:
        """Room for a snapshot, and how many keys are there already."""
        need, first = snapshot.size, snapshot.segments[0].keys
        old, each = self._keys, first.shape[1] * first.itemsize
        if old is not None and need <= len(old):
            return old, have
        free = int(room(self.device) * (1 - SPARE))
        if old is not None and (need + need // 8) * each <= free:
            keys = old.new_empty((need + need // 8, first.shape[1]))
            keys[:have].copy_(old[:have])
            if self.device.type == "cuda":  # other streams read it next
                torch.cuda.current_stream(self.device).synchronize()
            return keys, have
        if need * each > free + (0 if old is None else old.nbytes):
            raise torch.cuda.OutOfMemoryError
        self._keys = old = None  # no room for both
        dtype = torch.from_numpy(first[:0]).dtype
        return torch.empty((need, first.shape[1]), dtype=dtype, device=self.device), 0


def _begins(longer: Layout, shorter: Layout) -> bool:
    """Whether the keys of one layout are the first of those of the other: only the last segment may have grown."""
    if not shorter or len(shorter) > len(longer):
        return not shorter
    *before, (number, first_row, length) = shorter
    last = longer[len(before)]
    return longer[: len(before)] == tuple(before) and last[:2] == (number, first_row) and last[2] >= length


class Kept(NamedTuple):
    """The records that count, here and there."""

    mask: Live  # (size,) over positions
    there: Tensor  # (size,) bool on the device
    number: int  # of them


class Seen:
    """What a device keeps of one snapshot, beside its keys: n bytes a filter, 8 n for rows after a compaction.

    All of it is made here and uploaded, so that it is whole for every stream.
    """

    def __init__(self, snapshot: Snapshot, column: KeyColumn) -> None:
        self.snapshot = weakref.ref(snapshot)  # an old one must not keep its segments mapped
        self.device = column.device
        self.keys = column.of(snapshot)  # (size, d); None: not there
        self.rows: Tensor | None = None  # (size,); None: rows are positions
        if not snapshot.contiguous:
            self.rows = torch.from_numpy(snapshot.rows(np.arange(snapshot.size))).to(self.device)
        self._every = self._kept(snapshot.live)
        self._filtered: Recent[Kept] = Recent()

    def kept(self, snapshot: Snapshot, allowed: Live | None) -> Kept:
        """The live records that a filter allows."""
        if allowed is None:
            return self._every
        return self._filtered.of(lambda: self._kept(snapshot.live & allowed), allowed)

    def _kept(self, mask: Live) -> Kept:
        return Kept(mask, torch.from_numpy(mask).to(self.device), int(np.count_nonzero(mask)))


class DeviceView(NamedTuple):
    """A snapshot and what a device has of it."""

    snapshot: Snapshot
    seen: Seen

    @property
    def device(self) -> torch.device:
        """Where tensors come from and go to."""
        return self.seen.device

    def kept(self, allowed: Live | None) -> Kept:
        """The live records that a filter (size,) allows."""
        return self.seen.kept(self.snapshot, allowed)

    def keys_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, d)
        """Keys, copied, in the column's dtype."""
        if self.seen.keys is not None:
            return self.seen.keys[positions]
        return self.snapshot.keys_at(positions.cpu().numpy()).to(self.device)

    def positions(self, rows: Tensor) -> Tensor:  # (…), -1 = none -> (…)
        """Positions of rows, -1 where this snapshot has no such row."""
        if self.seen.rows is None:
            return rows.masked_fill(rows >= self.snapshot.size, -1)
        held = self.seen.rows
        places = torch.searchsorted(held, rows).clamp_(max=max(0, len(held) - 1))
        return places.masked_fill(held[places] != rows, -1)

    def parts(
        self,
        kept: Kept,
        start: int,  # first position
        block: int,  # records a part at most
    ) -> Iterator[KeyBlock]:
        """The records that count from a position on, in order: slices where most do, gathered where few do."""
        count = int(np.count_nonzero(kept.mask[start:])) if start else kept.number
        if 4 * count <= self.snapshot.size - start:
            sparse: Rows = np.flatnonzero(kept.mask[start:]) + start
            for low in range(0, len(sparse), block):
                positions = torch.from_numpy(sparse[low : low + block]).to(self.device)
                yield KeyBlock(positions, self.keys_at(positions))
        elif self.seen.keys is None:
            yield from self._streamed(kept, start, block)
        else:
            for low in range(start, self.snapshot.size, block):
                part = slice(low, min(low + block, self.snapshot.size))
                dead = None if kept.mask[part].all() else ~kept.there[part]
                yield KeyBlock(torch.arange(low, part.stop, device=self.device), self.seen.keys[part], dead)

    def _streamed(self, kept: Kept, start: int, block: int) -> Iterator[KeyBlock]:
        """Blocks from the segments through pinned memory: one is read from disk while another is on its way."""
        staging = _Staging(self.device)
        for turn, found in enumerate(self.snapshot.blocks(block, kept.mask, start)):
            yield KeyBlock(found.positions.to(self.device), staging.upload(found.keys, turn % 2))


class _Staging:
    """Two pieces of pinned memory, used in turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[Tensor | None] = [None, None]
        self.events: list[torch.cuda.Event | None] = [None, None]

    def upload(self, keys: Tensor, which: int) -> Tensor:  # (m, d) -> (m, d)
        """The keys on the device, ordered after what its current stream was told before."""
        if self.device.type != "cuda":
            return keys.to(self.device)
        piece, event = self.pieces[which], self.events[which]
        if event is not None:
            event.synchronize()  # what was in it has arrived
        if piece is None or piece.numel() < keys.numel():
            piece = self.pieces[which] = torch.empty(keys.numel(), dtype=keys.dtype, pin_memory=True)
        staged = piece[: keys.numel()].view_as(keys).copy_(keys)
        sent = staged.to(self.device, non_blocking=True)
        self.events[which] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.events[which].record(torch.cuda.current_stream(self.device))  # type: ignore[union-attr]
        return sent
