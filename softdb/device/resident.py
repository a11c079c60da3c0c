"""Keys and values of a database on a device: copies that grow with the database, or blocks streamed to the device."""

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

SPARE = 0.2  # fraction of the free memory to leave for scores, candidates and other programs
UPLOADED = 1 << 24  # number of elements copied to the GPU at once
AHEAD = 2  # number of blocks being copied to the GPU while the next block is read from disk

Layout = tuple[tuple[int, int, int], ...]  # for each segment: number, first row and length
Where: TypeAlias = "slice | Rows"  # positions: a slice if consecutive, else an array (m,)


def room(device: torch.device) -> int:
    """Return the free bytes on a device, including memory that torch has reserved but does not use."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class DeviceColumn:
    """Copy of one column of a database (keys, values or labels, including dead records) on one device.

    For a newer snapshot only new records are uploaded; after a compaction, all records. Safe for several threads and
    CUDA streams: an upload is complete before it can be read, and is never overwritten, so older snapshots stay valid.
    """

    def __init__(self, device: torch.device, values: bool, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.values = values  # True: the column of values or labels; False: of keys
        self.dtype = dtype  # dtype on the device; None: as stored
        self.requested = False  # True after the first request
        self._lock = threading.Lock()
        self._numbers: Tensor | None = None  # (capacity, …)
        self._layout: Layout = ()
        self._generation = 0
        self._refused: Layout = ()  # layout of a snapshot that did not fit on the device

    def of(self, snapshot: Snapshot) -> Tensor | None:  # (size, …)
        """Return the column of a snapshot; None if it does not fit, or the snapshot is from before a compaction.

        Raises BadInput if an element is too large for the column's dtype.
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
        """Free this column's device memory."""
        self._numbers, self._layout, self._generation, self._refused = None, (), 0, ()

    def in_segment(self, segment: Segment) -> np.ndarray:
        """Return a segment's part of this column, in host memory."""
        return segment.values_or_keys if self.values else segment.keys

    def dtype_of(self, numbers: np.ndarray) -> torch.dtype:
        """Return the dtype on the device for an array of the column, given in the stored dtype."""
        own = torch.from_numpy(numbers[:0]).dtype
        return own if self.dtype is None or not own.is_floating_point else self.dtype

    def _extended(self, snapshot: Snapshot) -> Tensor:
        """Upload a snapshot's new records; return the whole column. Raises OutOfMemoryError if it does not fit."""
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
                        "pass dtype='bfloat16', or no dtype"
                    )
        return numbers

    def _reserve(self, snapshot: Snapshot, have: int) -> tuple[Tensor, int]:
        """Return a tensor with room for a snapshot, and the number of records that it already holds."""
        need, first = snapshot.size, self.in_segment(snapshot.segments[0])
        dtype, old = self.dtype_of(first), self._numbers
        record_bytes = first[:1].size * dtype.itemsize
        if old is not None and need <= len(old):
            return old, have
        free = int(room(self.device) * (1 - SPARE))
        if old is not None and (need + need // 8) * record_bytes <= free:
            numbers = old.new_empty((need + need // 8, *first.shape[1:]))
            numbers[:have].copy_(old[:have])
            if self.device.type == "cuda":  # other streams will read the copy
                torch.cuda.current_stream(self.device).synchronize()
            return numbers, have
        if need * record_bytes > free + (0 if old is None else old.nbytes):
            raise torch.cuda.OutOfMemoryError
        self._numbers = old = None  # free the old tensor first: there is no room for both
        return torch.empty((need, *first.shape[1:]), dtype=dtype, device=self.device), 0


def _begins(longer: Layout, shorter: Layout) -> bool:
    """Return True if `longer` begins with the records of `shorter`, whose last segment may have grown."""
    if not shorter or len(shorter) > len(longer):
        return not shorter
    *before, (number, first_row, length) = shorter
    last = longer[len(before)]
    return longer[: len(before)] == tuple(before) and last[:2] == (number, first_row) and last[2] >= length


class LiveMask(NamedTuple):
    """Mask of the records that take part in a query, on the host and on a device."""

    mask: Live  # (size,) over positions
    on_device: Tensor  # (size,) bool
    number: int  # number of records that take part

    @classmethod
    def of(cls, mask: Live, device: torch.device) -> LiveMask:
        """Upload a mask to a device, and count the records that take part."""
        return cls(mask, torch.from_numpy(mask).to(device), int(np.count_nonzero(mask)))


class Card:
    """Data of a database on one device: columns, masks (n bytes a filter), row numbers (8 n bytes) if rows have gaps.

    An upload is complete before the tensor is returned, so that every CUDA stream can read the tensor.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.keys, self.values = DeviceColumn(device, False, dtype), DeviceColumn(device, True, dtype)
        self.masks: Recent[LiveMask] = Recent()
        self.rows: Recent[Tensor] = Recent(1)  # row numbers (size,) of a snapshot with gaps

    def forget(self) -> None:
        """Free all device memory."""
        self.masks, self.rows = Recent(), Recent(1)
        self.keys.forget()
        self.values.forget()


class Shard:
    """A range of a snapshot's records on one device. Positions in a shard count from 0."""

    def __init__(self, snapshot: Snapshot, card: Card, low: int = 0) -> None:
        self.snapshot = snapshot  # snapshot of this range only
        self.card, self.device = card, card.device
        self.low = low  # position of the range's first record in the whole snapshot
        self.keys = card.keys.of(snapshot)  # (size, d); None: not resident on the device

    @cached_property
    def values(self) -> Tensor | None:
        """Values (size, v) or labels (size,), or the keys if there are no values; None: not resident on the device."""
        own = any(segment.values is not None for segment in self.snapshot.segments)
        return self.card.values.of(self.snapshot) if own else self.keys

    @property
    def high(self) -> int:
        """Position after the range's last record, in the whole snapshot."""
        return self.low + self.snapshot.size

    def of(self, column: Live | None) -> Live | None:  # (size of the generation,) -> (size,)
        """Return this range's slice of a mask over the whole snapshot; None stays None."""
        return column if column is None or self.snapshot.size == len(column) else column[self.low : self.high]

    def live_mask(self, allowed: Live | None) -> LiveMask:
        """Return the mask of the live records that `allowed` (size,) selects; None selects all."""
        live = self.snapshot.live
        mask = live if allowed is None else allowed
        return self.card.masks.of(lambda: LiveMask.of(live if mask is live else live & mask, self.device), live, mask)

    def keys_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, d)
        """Return a copy of the keys at these positions, in the dtype on the device."""
        return self._at(self.keys, False, positions)

    def values_at(self, positions: Tensor) -> Tensor:  # (…) none of them -1 -> (…, v), or labels (…)
        """Return a copy of the values, or labels, at these positions."""
        return self._at(self.values, True, positions)

    def _at(self, column: Tensor | None, values: bool, positions: Tensor) -> Tensor:
        if column is not None:
            return column[positions]
        host = self.snapshot.values_at if values else self.snapshot.keys_at
        return host(positions.cpu().numpy()).to(self.device)

    def positions(self, rows: Tensor) -> Tensor:  # (…), -1 = none -> (…)
        """Convert row numbers to positions; -1 for rows that the snapshot lacks."""
        snapshot = self.snapshot
        if snapshot.contiguous:
            return rows.masked_fill(rows >= snapshot.size, -1)
        every = np.arange(snapshot.size)
        stored_rows = self.card.rows.of(lambda: torch.from_numpy(snapshot.rows(every)).to(self.device), snapshot)
        places = torch.searchsorted(stored_rows, rows).clamp_(max=max(0, len(stored_rows) - 1))
        return places.masked_fill(stored_rows[places] != rows, -1)

    def blocks(self, size: int, live: LiveMask, start: int = 0, pools: bool = True) -> Iterator[Block]:
        """Yield blocks of live records, with keys and values on the device; with pools=False, positions as well."""
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
        """Return a column's elements at some positions: from the device, or uploaded if the column is not resident."""
        if column is not None:
            return column[where if isinstance(where, slice) else torch.from_numpy(where).to(self.device)]
        return _upload(_from_host(self.snapshot, values, where), self.device)


def _positions(where: Where, device: torch.device | None) -> Tensor:
    if isinstance(where, slice):
        return torch.arange(where.start, where.stop, device=device)
    return torch.from_numpy(where).to(device)


def _runs(mask: Live, start: int, block: int) -> Iterator[Where]:
    """Yield the positions, from `start`, that are True in `mask`: at most `block` at once, slices if consecutive."""
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
    """Return a column's elements at some positions, in host memory; a slice gives one tensor for each segment."""
    if not isinstance(where, slice):
        return [(snapshot.values_at if values else snapshot.keys_at)(where)]
    segments = snapshot.part(where.start, where.stop).segments
    return [torch.from_numpy(segment.values_or_keys if values else segment.keys) for segment in segments]


def _upload(parts: list[Tensor], device: torch.device) -> Tensor:  # each (m_i, …) -> (m, …)
    """Concatenate host tensors, and copy them to the device on its current CUDA stream, through pinned memory."""
    if device.type != "cuda":
        return torch.cat(parts).to(device)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    staged = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)  # torch frees it after the copy
    return torch.cat(parts, out=staged).to(device, non_blocking=True)
