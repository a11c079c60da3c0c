"""Columns on a device: copies that grow with the store, or, where they do not fit, blocks that pass through."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from softdb.errors import BadInput
from softdb.index.contract import Live, Recent, Rows
from softdb.lazy import cached_property
from softdb.store import Snapshot
from softdb.store.snapshot import Block, Segment

SPARE = 0.2  # of the memory that is free: for scores, candidates, and whatever else runs there
UPLOADED = 1 << 24  # numbers sent to the GPU at once
AHEAD = 2  # blocks on their way to the GPU while another is read from disk

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
        self._refused: Layout = ()  # did not fit

    def of(self, snapshot: Snapshot) -> Tensor | None:  # (size, …)
        """A snapshot's column by position; None where it does not fit, or is from before a compaction.

        Raises BadInput where a number is too large for the dtype that was asked for.
        """
        layout = tuple((s.number, s.first_row, len(s)) for s in snapshot.segments)
        self.asked = self.asked or bool(layout)
        if layout == self._refused:
            return None
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
                    self._refused = layout
                    return None
                self._layout, self._generation = layout, snapshot.generation
            return self._numbers[: snapshot.size]

    @property
    def bytes(self) -> int:
        """That are taken there."""
        return 0 if self._numbers is None else self._numbers.nbytes

    def forget(self) -> None:
        """Give the memory back."""
        self._numbers, self._layout, self._generation, self._refused = None, (), 0, ()

    def in_segment(self, segment: Segment) -> np.ndarray:
        """The column's part in a segment, on the host."""
        return segment.values_or_keys if self.values else segment.keys

    def dtype_of(self, numbers: np.ndarray) -> torch.dtype:
        """Dtype that numbers of a segment have on the device."""
        own = torch.from_numpy(numbers[:0]).dtype
        return own if self.dtype is None or not own.is_floating_point else self.dtype

    def _extended(self, snapshot: Snapshot) -> Tensor:
        """Extend the resident columns by what is missing. Raises OutOfMemoryError where it does not fit."""
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
    """Return True if one layout's records are the first of those of the other: only the last segment may have grown."""
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

    @classmethod
    def of(cls, mask: Live, device: torch.device) -> Kept:
        """A mask, uploaded."""
        return cls(mask, torch.from_numpy(mask).to(device), int(np.count_nonzero(mask)))


class Card:
    """One device as a database uses it: its columns, as far as they fit, n bytes a filter, 8 n for rows with gaps.

    All of it is uploaded where it is made, so that it is whole for every stream.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.keys, self.values = DeviceColumn(device, False, dtype), DeviceColumn(device, True, dtype)
        self.masks: Recent[Kept] = Recent()
        self.rows: Recent[Tensor] = Recent(1)  # (size,) of a snapshot with gaps

    def forget(self) -> None:
        """Give all memory back."""
        self.masks, self.rows = Recent(), Recent(1)
        self.keys.forget()
        self.values.forget()


class Shard:
    """A run of a generation's positions, as the records lie on a device. Positions count from 0 in it."""

    def __init__(self, snapshot: Snapshot, card: Card, low: int = 0) -> None:
        self.snapshot = snapshot  # of these records alone
        self.card, self.device = card, card.device
        self.low = low  # the first of them in the generation
        self.keys = card.keys.of(snapshot)  # (size, d); None: not there

    @cached_property
    def values(self) -> Tensor | None:
        """(size, v), labels (size,), or the keys where they serve; None: not there."""
        own = any(segment.values is not None for segment in self.snapshot.segments)
        return self.card.values.of(self.snapshot) if own else self.keys

    def first(self, size: int) -> Shard:
        """At most so many of the first records, all live."""
        few = copy.copy(self)
        few.snapshot = self.snapshot.first(size)
        few.keys, few.values = (None if one is None else one[: few.snapshot.size] for one in (self.keys, self.values))
        return few

    @property
    def high(self) -> int:
        """The position after the last."""
        return self.low + self.snapshot.size

    def of(self, column: Live | None) -> Live | None:  # (size of the generation,) -> (size,)
        """The part of a column over all positions."""
        return column if column is None or self.snapshot.size == len(column) else column[self.low : self.high]

    def kept(self, allowed: Live | None) -> Kept:
        """The live records that a filter (size,) allows."""
        live = self.snapshot.live
        mask = live if allowed is None else allowed
        return self.card.masks.of(lambda: Kept.of(live if mask is live else live & mask, self.device), live, mask)

    def keys_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, d)
        """Keys, copied, in the column's dtype."""
        return self._at(self.keys, False, positions)

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
        snapshot = self.snapshot
        if snapshot.contiguous:
            return rows.masked_fill(rows >= snapshot.size, -1)
        every = np.arange(snapshot.size)
        held = self.card.rows.of(lambda: torch.from_numpy(snapshot.rows(every)).to(self.device), snapshot)
        places = torch.searchsorted(held, rows).clamp_(max=max(0, len(held) - 1))
        return places.masked_fill(held[places] != rows, -1)

    def blocks(self, size: int, kept: Kept, start: int = 0, pools: bool = True) -> Iterator[Block]:
        """As `Snapshot.blocks`, with keys and values on the device; positions too where no values are pooled."""
        keys, values = self.keys, self.values if pools else None
        own_values = pools and any(segment.values is not None for segment in self.snapshot.segments)
        streams = self.device.type == "cuda" and (keys is None or (own_values and values is None))
        sent: list[torch.cuda.Event] = []
        for where in _runs(kept.mask, start, size):
            if len(sent) == AHEAD:
                sent.pop(0).synchronize()
            compared = self._part(keys, False, where)
            pooled = self._part(values, True, where) if own_values else compared
            if streams:
                sent.append(torch.cuda.current_stream(self.device).record_event())
            positions = _positions(where, None if pools else self.device)
            yield Block(positions, compared, pooled if pooled.is_floating_point() else pooled.long())

    def _part(self, column: Tensor | None, values: bool, where: Where) -> Tensor:
        """A column at some positions, from the device or through pinned memory."""
        if column is not None:
            return column[where if isinstance(where, slice) else torch.from_numpy(where).to(self.device)]
        return _upload(_from_host(self.snapshot, values, where), self.device)


def _positions(where: Where, device: torch.device | None) -> Tensor:
    if isinstance(where, slice):
        return torch.arange(where.start, where.stop, device=device)
    return torch.from_numpy(where).to(device)


def _runs(mask: Live, start: int, block: int) -> Iterator[Where]:
    """The positions from `start` on that count, at most `block` at a time: slices where all between them count."""
    if 4 * int(np.count_nonzero(mask[start:])) <= len(mask) - start:
        sparse: Rows = np.flatnonzero(mask[start:]) + start
        yield from (sparse[low : low + block] for low in range(0, len(sparse), block))
        return
    for low in range(start, len(mask), block):
        some = mask[low : low + block]
        if some.all():
            yield slice(low, low + len(some))
        elif some.any():
            yield np.flatnonzero(some) + low


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


def _upload(parts: list[Tensor], device: torch.device) -> Tensor:  # each (m_i, …) -> (m, …)
    """The numbers on the device, ordered after what its current stream was told before."""
    if device.type != "cuda":
        return torch.cat(parts).to(device)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    staged = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)  # which torch holds until the copy has ended
    return torch.cat(parts, out=staged).to(device, non_blocking=True)
