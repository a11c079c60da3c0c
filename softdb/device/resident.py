"""Columns on a device: copies that grow with the store, or streamed blocks if the columns do not fit."""

from __future__ import annotations

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

SPARE = 0.2  # share of the free memory left for scores, candidates and other programs
UPLOADED = 1 << 24  # numbers copied to the GPU at once
AHEAD = 2  # blocks being copied to the GPU while another is read from disk

Layout = tuple[tuple[int, int, int], ...]  # of each segment: its number, first row and length
Where: TypeAlias = "slice | Rows"  # positions: consecutive, or (m,)


def room(device: torch.device) -> int:
    """Return the bytes available on a device, including torch's reserved memory."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DeviceColumn:
    """One column of a database on one device (keys, values or labels), including dead records.

    A newer snapshot uploads its new records, a compaction all. Safe for several threads and streams: numbers are
    complete before they can be read, and are never overwritten, so older snapshots stay valid.
    """

    def __init__(self, device: torch.device, values: bool, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.values = values  # False: the column of keys
        self.dtype = dtype  # None: as stored
        self.requested = False  # True after the first request
        self._lock = threading.Lock()
        self._numbers: Tensor | None = None  # (capacity, …)
        self._layout: Layout = ()
        self._generation = 0
        self._refused: Layout = ()  # layout that did not fit

    def of(self, snapshot: Snapshot) -> Tensor | None:  # (size, …)
        """Return a snapshot's column by position; None if it does not fit, or the snapshot precedes a compaction.

        Raises BadInput if a number is too large for the column's dtype.
        """
        layout = tuple((s.number, s.first_row, len(s)) for s in snapshot.segments)
        self.requested = self.requested or bool(layout)
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
        """Bytes of device memory in use."""
        return 0 if self._numbers is None else self._numbers.nbytes

    def forget(self) -> None:
        """Free the device memory."""
        self._numbers, self._layout, self._generation, self._refused = None, (), 0, ()

    def in_segment(self, segment: Segment) -> np.ndarray:
        """Return the column's numbers of a segment, on the host."""
        return segment.values_or_keys if self.values else segment.keys

    def dtype_of(self, numbers: np.ndarray) -> torch.dtype:
        """Return the device dtype for numbers of a segment."""
        own = torch.from_numpy(numbers[:0]).dtype
        return own if self.dtype is None or not own.is_floating_point else self.dtype

    def _extended(self, snapshot: Snapshot) -> Tensor:
        """Return the column extended by a snapshot's new records. Raises OutOfMemoryError if it does not fit."""
        numbers, have = self._reserve(snapshot, sum(length for _, _, length in self._layout))
        narrowed = self.dtype is torch.float16
        for segment, start in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
            own = self.in_segment(segment)
            step = max(1, UPLOADED * len(own) // own.size)
            for low in range(max(0, have - start), len(own), step):
                high = min(low + step, len(own))
                # a copy from memory that is not pinned is complete when the call returns, on any stream
                chunk = numbers[start + low : start + high].copy_(torch.from_numpy(own[low:high]))
                if narrowed and bool(chunk.isinf().any()):
                    self.forget()
                    raise BadInput(
                        f"{'values' if self.values else 'keys'} are too large for {self.dtype} (its largest is 65504); "
                        "ask for bfloat16, or leave dtype out"
                    )
        return numbers

    def _reserve(self, snapshot: Snapshot, have: int) -> tuple[Tensor, int]:
        """Return memory for a snapshot, and the number of records that it already holds."""
        need, first = snapshot.size, self.in_segment(snapshot.segments[0])
        dtype, old = self.dtype_of(first), self._numbers
        record_bytes = first[:1].size * dtype.itemsize
        if old is not None and need <= len(old):
            return old, have
        free = int(room(self.device) * (1 - SPARE))
        if old is not None and (need + need // 8) * record_bytes <= free:
            numbers = old.new_empty((need + need // 8, *first.shape[1:]))
            numbers[:have].copy_(old[:have])
            if self.device.type == "cuda":  # other streams read it next
                torch.cuda.current_stream(self.device).synchronize()
            return numbers, have
        if need * record_bytes > free + (0 if old is None else old.nbytes):
            raise torch.cuda.OutOfMemoryError
        self._numbers = old = None  # no room for both
        return torch.empty((need, *first.shape[1:]), dtype=dtype, device=self.device), 0


def _begins(longer: Layout, shorter: Layout) -> bool:
    """Return True if `longer` begins with the records of `shorter`, whose last segment may have grown."""
    if not shorter or len(shorter) > len(longer):
        return not shorter
    *before, (number, first_row, length) = shorter
    last = longer[len(before)]
    return longer[: len(before)] == tuple(before) and last[:2] == (number, first_row) and last[2] >= length


class LiveMask(NamedTuple):
    """Mask of the records that take part, on the host and on a device."""

    mask: Live  # (size,) over positions
    on_device: Tensor  # (size,) bool
    number: int  # of records that take part

    @classmethod
    def of(cls, mask: Live, device: torch.device) -> LiveMask:
        """Upload a mask."""
        return cls(mask, torch.from_numpy(mask).to(device), int(np.count_nonzero(mask)))


class Card:
    """Caches of a database on one device: the columns that fit, n bytes for each filter, and 8 n for rows with gaps.

    Each is uploaded completely before it is returned, so that every stream can read it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.keys, self.values = DeviceColumn(device, False, dtype), DeviceColumn(device, True, dtype)
        self.masks: Recent[LiveMask] = Recent()
        self.rows: Recent[Tensor] = Recent(1)  # (size,) of a snapshot with gaps

    def forget(self) -> None:
        """Free all device memory."""
        self.masks, self.rows = Recent(), Recent(1)
        self.keys.forget()
        self.values.forget()


class Shard:
    """A range of a generation's records on a device. Its positions count from 0."""

    def __init__(self, snapshot: Snapshot, card: Card, low: int = 0) -> None:
        self.snapshot = snapshot  # of the range's records
        self.card, self.device = card, card.device
        self.low = low  # position of the first record in the generation
        self.keys = card.keys.of(snapshot)  # (size, d); None: not resident

    @cached_property
    def values(self) -> Tensor | None:
        """Values (size, v), labels (size,), or the keys if there are no values; None: not resident."""
        own = any(segment.values is not None for segment in self.snapshot.segments)
        return self.card.values.of(self.snapshot) if own else self.keys

    @property
    def high(self) -> int:
        """Position in the generation after the last record."""
        return self.low + self.snapshot.size

    def of(self, column: Live | None) -> Live | None:  # (size of the generation,) -> (size,)
        """Return the range's slice of a column over all positions."""
        return column if column is None or self.snapshot.size == len(column) else column[self.low : self.high]

    def live_mask(self, allowed: Live | None) -> LiveMask:
        """Return the mask of live records that a filter (size,) allows; None allows all."""
        live = self.snapshot.live
        mask = live if allowed is None else allowed
        return self.card.masks.of(lambda: LiveMask.of(live if mask is live else live & mask, self.device), live, mask)

    def keys_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, d)
        """Copy keys, in the column's dtype."""
        return self._at(self.keys, False, positions)

    def values_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, v), or labels (…)
        """Copy values."""
        return self._at(self.values, True, positions)

    def _at(self, column: Tensor | None, values: bool, positions: Tensor) -> Tensor:
        if column is not None:
            return column[positions]
        host = self.snapshot.values_at if values else self.snapshot.keys_at
        return host(positions.cpu().numpy()).to(self.device)

    def positions(self, rows: Tensor) -> Tensor:  # (…), -1 = none -> (…)
        """Return positions of rows, -1 for rows that the snapshot lacks."""
        snapshot = self.snapshot
        if snapshot.contiguous:
            return rows.masked_fill(rows >= snapshot.size, -1)
        every = np.arange(snapshot.size)
        stored_rows = self.card.rows.of(lambda: torch.from_numpy(snapshot.rows(every)).to(self.device), snapshot)
        places = torch.searchsorted(stored_rows, rows).clamp_(max=max(0, len(stored_rows) - 1))
        return places.masked_fill(stored_rows[places] != rows, -1)

    def blocks(self, size: int, live: LiveMask, start: int = 0, pools: bool = True) -> Iterator[Block]:
        """Yield blocks as `Snapshot.blocks`, with keys and values on the device; with pools=False positions, too."""
        keys, values = self.keys, self.values if pools else None
        own_values = pools and any(segment.values is not None for segment in self.snapshot.segments)
        streams = self.device.type == "cuda" and (keys is None or (own_values and values is None))
        sent: list[torch.cuda.Event] = []
        for where in _runs(live.mask, start, size):
            if len(sent) == AHEAD:
                sent.pop(0).synchronize()
            compared = self._part(keys, False, where)
            pooled = self._part(values, True, where) if own_values else compared
            if streams:
                sent.append(torch.cuda.current_stream(self.device).record_event())
            positions = _positions(where, None if pools else self.device)
            yield Block(positions, compared, pooled if pooled.is_floating_point() else pooled.long())

    def _part(self, column: Tensor | None, values: bool, where: Where) -> Tensor:
        """Return a column at some positions, from the device or through pinned memory."""
        if column is not None:
            return column[where if isinstance(where, slice) else torch.from_numpy(where).to(self.device)]
        return _upload(_from_host(self.snapshot, values, where), self.device)


def _positions(where: Where, device: torch.device | None) -> Tensor:
    if isinstance(where, slice):
        return torch.arange(where.start, where.stop, device=device)
    return torch.from_numpy(where).to(device)


def _runs(mask: Live, start: int, block: int) -> Iterator[Where]:
    """Yield positions from `start` on that are True in `mask`, at most `block` at a time: as slices if consecutive."""
    if 4 * int(np.count_nonzero(mask[start:])) <= len(mask) - start:
        sparse: Rows = np.flatnonzero(mask[start:]) + start
        yield from (sparse[low : low + block] for low in range(0, len(sparse), block))
        return
    for low in range(start, len(mask), block):
        block_mask = mask[low : low + block]
        if block_mask.all():
            yield slice(low, low + len(block_mask))
        elif block_mask.any():
            yield np.flatnonzero(block_mask) + low


def _from_host(snapshot: Snapshot, values: bool, where: Where) -> list[Tensor]:
    """Return a column at some positions, in a piece for each segment."""
    if not isinstance(where, slice):
        return [(snapshot.values_at if values else snapshot.keys_at)(where)]
    pieces = []
    for segment, offset in zip(snapshot.segments, snapshot.starts.tolist(), strict=False):
        low, high = max(0, where.start - offset), min(len(segment), where.stop - offset)
        if low < high:
            pieces.append(torch.from_numpy((segment.values_or_keys if values else segment.keys)[low:high]))
    return pieces


def _upload(parts: list[Tensor], device: torch.device) -> Tensor:  # each (m_i, …) -> (m, …)
    """Copy numbers to the device, in the order of its current stream."""
    if device.type != "cuda":
        return torch.cat(parts).to(device)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    staged = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)  # torch keeps it until the copy has ended
    return torch.cat(parts, out=staged).to(device, non_blocking=True)
