"""Columns on a device: copies that grow with the store, or, where they do not fit, blocks that pass through."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.index.contract import Live, Recent, Rows
from softdb.index.products import KeyBlock
from softdb.store import Snapshot
from softdb.store.snapshot import Block, Segment

__all__ = ["DeviceColumn", "DeviceView", "Kept", "Seen", "room"]

SPARE = 0.2  # of the memory that is free: for scores, candidates, and whatever else runs there
UPLOADED = 1 << 24  # numbers sent to the GPU at once

Layout = tuple[tuple[int, int, int], ...]  # of each segment: its number, first row and length
Where: TypeAlias = "slice | Rows"  # positions: consecutive, or (m,)


def room(device: torch.device) -> int:
    """Bytes that can be had on a device, what torch holds in reserve included."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DeviceColumn:
    """One column of a database on one device, keys or values or labels, dead records included.

    A newer snapshot costs the upload of what is new in it; a compaction, of all. Safe to use from several threads and
    streams: what is there was written before it can be read, and is never written over, so that an older snapshot reads
    what it always read.
    """

    def __init__(self, device: torch.device, values: bool, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.values = values  # rather than the keys
        self.dtype = dtype  # None: as they are stored
        self.asked = False  # whether anything was
        self._lock = threading.Lock()
        self._numbers: Tensor | None = None  # (capacity, …)
        self._layout: Layout = ()
        self._generation = 0

    def of(self, snapshot: Snapshot) -> Tensor | None:  # (size, …)
        """A snapshot's column by position; None where it does not fit, or is from before a compaction.

        Raises BadInput where a number is too large for the dtype that was asked for.
        """
        layout = tuple((s.number, s.first_row, len(s)) for s in snapshot.segments)
        if not layout:
            return None
        self.asked = True
        with self._lock:
            if self._numbers is None or not _begins(self._layout, layout):
                if not _begins(layout, self._layout):
                    if snapshot.generation < self._generation:
                        return None
                    self.forget()
                try:
                    self._numbers = self._extended(snapshot)
                except torch.cuda.OutOfMemoryError:
                    self.forget()
                    return None
                self._layout, self._generation = layout, snapshot.generation
            return self._numbers[: snapshot.size]

    @property
    def bytes(self) -> int:
        """That are taken there."""
        return 0 if self._numbers is None else self._numbers.nbytes

    def forget(self) -> None:
        """Give the memory back."""
        self._numbers, self._layout, self._generation = None, (), 0

    def in_segment(self, segment: Segment) -> np.ndarray:
        """The column's part in a segment, on the host."""
        return segment.values_or_keys if self.values else segment.keys

    def dtype_of(self, numbers: np.ndarray) -> torch.dtype:
        """What those of a segment are there."""
        own = torch.from_numpy(numbers[:0]).dtype
        return own if self.dtype is None or not own.is_floating_point else self.dtype

    def _extended(self, snapshot: Snapshot) -> Tensor:
        """What is there with what is not there yet. Raises OutOfMemoryError where it does not fit."""
        numbers, have = self._reserve(snapshot, sum(length for _, _, length in self._layout))
        narrowed = self.dtype is torch.float16
        for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
            own = self.in_segment(segment)
            step = max(1, UPLOADED * len(own) // own.size)
            for low in range(max(0, have - start), len(own), step):
                high = min(low + step, len(own))
                # from memory that is not pinned: the copy has ended when this returns, whatever the stream
                part = numbers[start + low : start + high].copy_(torch.from_numpy(own[low:high]))
                if narrowed and bool(part.isinf().any()):
                    self.forget()
                    raise BadInput(
                        f"{'values' if self.values else 'keys'} are too large for {self.dtype} (its largest is 65504); "
                        "ask for bfloat16, or leave dtype out"
                    )
        return numbers

    def _reserve(self, snapshot: Snapshot, have: int) -> tuple[Tensor, int]:
        """Room for a snapshot, and how many records are there already."""
        need, first = snapshot.size, self.in_segment(snapshot.segments[0])
        dtype, old = self.dtype_of(first), self._numbers
        each = first[:1].size * dtype.itemsize
        if old is not None and need <= len(old):
            return old, have
        free = int(room(self.device) * (1 - SPARE))
        if old is not None and (need + need // 8) * each <= free:
            numbers = old.new_empty((need + need // 8, *first.shape[1:]))
            numbers[:have].copy_(old[:have])
            if self.device.type == "cuda":  # other streams read it next
                torch.cuda.current_stream(self.device).synchronize()
            return numbers, have
        if need * each > free + (0 if old is None else old.nbytes):
            raise torch.cuda.OutOfMemoryError
        self._numbers = old = None  # no room for both
        return torch.empty((need, *first.shape[1:]), dtype=dtype, device=self.device), 0


def _begins(longer: Layout, shorter: Layout) -> bool:
    """Whether one layout's records are the first of those of the other: only the last segment may have grown."""
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
    """What a device keeps of one snapshot: its columns, n bytes a filter, 8 n for rows after a compaction.

    All of it is made here and uploaded, so that it is whole for every stream.
    """

    def __init__(self, snapshot: Snapshot, keys: DeviceColumn, values: DeviceColumn) -> None:
        self.snapshot = weakref.ref(snapshot)  # an old one must not keep its segments mapped
        self.device = keys.device
        self.columns = keys, values
        self.keys = keys.of(snapshot)  # (size, d); None: not there
        self._every = self._kept(snapshot.live)
        self._filtered: Recent[Kept] = Recent()
        self._lock = threading.Lock()
        self._values: tuple[Tensor | None] | None = None  # None: not asked for yet
        self._rows: Tensor | None = None

    def values(self, snapshot: Snapshot) -> Tensor | None:
        """(size, v), labels (size,), or the keys where they serve; None: not there."""
        if all(segment.values is None for segment in snapshot.segments):
            return self.keys
        with self._lock:
            if self._values is None:
                self._values = (self.columns[1].of(snapshot),)
            return self._values[0]

    def first(self, part: Snapshot, values: Tensor | None) -> Seen:
        """The same of the first records alone."""
        few = copy.copy(self)
        few.snapshot, few._every, few._filtered, few._rows = weakref.ref(part), self._kept(part.live), Recent(), None
        few.keys = None if self.keys is None else self.keys[: part.size]
        few._values = (None if values is None else values[: part.size],)
        return few

    def rows(self, snapshot: Snapshot) -> Tensor | None:
        """(size,); None: rows are positions."""
        if self._rows is None and not snapshot.contiguous:
            self._rows = torch.from_numpy(snapshot.rows(np.arange(snapshot.size))).to(self.device)
        return self._rows

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

    @property
    def values(self) -> Tensor | None:
        """(size, v), labels (size,), or the keys where they serve; None: not there."""
        return self.seen.values(self.snapshot)

    def kept(self, allowed: Live | None) -> Kept:
        """The live records that a filter (size,) allows."""
        return self.seen.kept(self.snapshot, allowed)

    def keys_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, d)
        """Keys, copied, in the column's dtype."""
        return self._at(self.seen.keys, False, positions)

    def values_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, v), or labels (…)
        """Values, copied."""
        return self._at(self.values, True, positions)

    def _at(self, column: Tensor | None, values: bool, positions: Tensor) -> Tensor:
        if column is not None:
            return column[positions]
        host = self.snapshot.values_at if values else self.snapshot.keys_at
        return host(positions.cpu().numpy()).to(self.device)

    def positions(self, rows: Tensor) -> Tensor:  # (…), -1 = none -> (…)
        """Positions of rows, -1 where this snapshot has no such row."""
        held = self.seen.rows(self.snapshot)
        if held is None:
            return rows.masked_fill(rows >= self.snapshot.size, -1)
        places = torch.searchsorted(held, rows).clamp_(max=max(0, len(held) - 1))
        return places.masked_fill(held[places] != rows, -1)

    def parts(
        self,
        kept: Kept,
        start: int,  # first position
        block: int,  # records a part at most
    ) -> Iterator[KeyBlock]:
        """The records that count from a position on, in order: slices where most do, gathered where few do."""
        staging = _Staging(self.device)
        for turn, (where, dead) in enumerate(_runs(kept.mask, start, block, sliced=self.seen.keys is not None)):
            keys = self._part(self.seen.keys, False, where, staging, turn)
            yield KeyBlock(_positions(where, self.device), keys, ~kept.there[where] if dead else None)

    def blocks(self, size: int, kept: Kept, start: int = 0, pools: bool = True) -> Iterator[Block]:
        """As `Snapshot.blocks`, with keys and values on the device; positions stay on the host."""
        keys, values = self.seen.keys, self.values if pools else None
        own_values = pools and any(segment.values is not None for segment in self.snapshot.segments)
        staging = _Staging(self.device), _Staging(self.device)
        for turn, (where, _) in enumerate(_runs(kept.mask, start, size)):
            mine = self._part(keys, False, where, staging[0], turn)
            pooled = self._part(values, True, where, staging[1], turn) if own_values else mine
            yield Block(_positions(where), mine, pooled if pooled.is_floating_point() else pooled.long())

    def _part(self, column: Tensor | None, values: bool, where: Where, staging: _Staging, turn: int) -> Tensor:
        """A column at some positions, from the device or through pinned memory."""
        if column is not None:
            return column[where if isinstance(where, slice) else torch.from_numpy(where).to(self.device)]
        return staging.upload(_from_host(self.snapshot, values, where), turn % 2)


def _positions(where: Where, device: torch.device | None = None) -> Tensor:
    if isinstance(where, slice):
        return torch.arange(where.start, where.stop, device=device)
    return torch.from_numpy(where).to(device)


def _runs(mask: Live, start: int, block: int, sliced: bool = False) -> Iterator[tuple[Where, bool]]:
    """The positions from `start` on that count, at most `block` at a time; and whether dead ones are among them.

    They are, in slices, only where `sliced` and most of all count.
    """
    count = int(np.count_nonzero(mask[start:]))
    if 4 * count <= len(mask) - start:
        sparse: Rows = np.flatnonzero(mask[start:]) + start
        for low in range(0, len(sparse), block):
            yield sparse[low : low + block], False
        return
    for low in range(start, len(mask), block):
        part = slice(low, min(low + block, len(mask)))
        some = mask[part]
        if sliced or some.all():
            yield part, not some.all()
        elif some.any():
            yield np.flatnonzero(some) + low, False


def _from_host(snapshot: Snapshot, values: bool, where: Where) -> list[Tensor]:
    """A column at some positions, in pieces where they lie in several segments."""
    if not isinstance(where, slice):
        return [(snapshot.values_at if values else snapshot.keys_at)(where)]
    pieces = []
    for segment, offset in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
        low, high = max(0, where.start - offset), min(len(segment), where.stop - offset)
        if low < high:
            pieces.append(torch.from_numpy((segment.values_or_keys if values else segment.keys)[low:high]))
    return pieces


class _Staging:
    """Two pieces of pinned memory, used in turn: one is read from disk while another is on its way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[Tensor | None] = [None, None]
        self.events: list[torch.cuda.Event | None] = [None, None]

    def upload(self, parts: list[Tensor], which: int) -> Tensor:  # each (m_i, …) -> (m, …)
        """The numbers on the device, ordered after what its current stream was told before."""
        if self.device.type != "cuda":
            return torch.cat(parts).to(self.device)
        piece, event = self.pieces[which], self.events[which]
        if event is not None:
            event.synchronize()  # what was in it has arrived
        count = sum(part.numel() for part in parts)
        if piece is None or piece.numel() < count:
            piece = self.pieces[which] = torch.empty(count, dtype=parts[0].dtype, pin_memory=True)
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        staged = torch.cat(parts, out=piece[:count].view(shape))
        sent = staged.to(self.device, non_blocking=True)
        self.events[which] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.events[which].record(torch.cuda.current_stream(self.device))  # type: ignore[union-attr]
        return sent
