"""Snapshots: one generation of the stored columns, immutable, which searches and soft queries read.

A *row* is a record's permanent number, which is never reused. A *position* is a record's index among the used
slots of all segments of one snapshot, `0 … size - 1`, dead records included. Rows ascend with positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.kernels import native
from softdb.lazy import cached_property

if TYPE_CHECKING:
    from torch import Tensor

    from softdb.kernels._native import Column

SAMPLED = 1024  # maximum number of values from which `value_size` is estimated

Rows = NDArray[np.int64]
Live = NDArray[np.bool_]

NONE: Rows = np.empty(0, np.int64)


class Block(NamedTuple):
    """Neighbouring records of one segment, as tensors."""

    positions: Tensor  # (m,) int64, ascending
    keys: Tensor  # (m, d) in the column's dtype; a view of the segment if no record in between is skipped
    values: Tensor  # (m, v) in the column's dtype, (m,) int64 labels, or `keys` if the key serves as value


@dataclass(frozen=True)
class Segment:
    """The used slots of one pair of column files (mapped) or arrays (in memory). Read-only."""

    number: int
    first_row: int
    rows: Rows | None  # (m,) ascending; None: first_row, first_row + 1, …
    keys: NDArray[np.floating]  # (m, d)
    values: NDArray[np.generic] | None  # (m, v), labels (m,), or None: the key serves as value

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def values_or_keys(self) -> NDArray[np.generic]:
        """The values, or the keys if there are no values."""
        return self.keys if self.values is None else self.values

    def rows_of(self, slots: slice) -> Rows:
        """Return the rows of consecutive slots."""
        return np.arange(len(self))[slots] + self.first_row if self.rows is None else self.rows[slots]

    @property
    def stop_row(self) -> int:
        """The row after the last one."""
        return self.first_row + len(self) if self.rows is None else int(self.rows[-1]) + 1


@dataclass(frozen=True)
class Snapshot:
    """The columns of one generation. Safe to read from any number of threads."""

    generation: int
    segments: tuple[Segment, ...]
    starts: Rows  # (segments + 1,) position of each segment's first slot, then size
    live: Live  # (size,)
    count: int  # number of live records with a key: searches and soft queries see these
    keyless: Rows = field(default_factory=NONE.copy)  # rows of records without a key, ascending

    placed: ClassVar[None] = None  # None: no GPU holds these columns; kernels read them in main memory

    @classmethod
    def of(cls, generation: int, segments: tuple[Segment, ...], live: Live, keyless: Rows = NONE) -> Snapshot:
        """Make a snapshot from segments in row order, a mask of live slots, and the rows of records without a key."""
        starts = np.cumsum([0, *(len(s) for s in segments)], dtype=np.int64)
        return cls(generation, segments, starts, live, int(np.count_nonzero(live)), keyless)

    def part(self, low: int, high: int) -> Snapshot:
        """Return the records at positions low … high - 1 as a snapshot."""
        segments = []
        for segment, start in zip(self.segments, self.starts.tolist(), strict=False):
            slots = slice(max(0, low - start), min(len(segment), high - start))
            if slots.start < slots.stop:
                rows = None if segment.rows is None else segment.rows[slots]
                values = None if segment.values is None else segment.values[slots]
                first = segment.first_row + slots.start if rows is None else int(rows[0])
                segments.append(Segment(segment.number, first, rows, segment.keys[slots], values))
        return Snapshot.of(self.generation, tuple(segments), self.live[low:high])

    def without(self, dead: Rows) -> Snapshot:
        """Return a copy of this snapshot with rows (m,) marked as dead; ignore rows that it does not hold."""
        positions, live = self.positions(dead), self.live.copy()
        live[positions[positions >= 0]] = False
        return Snapshot.of(self.generation, self.segments, live, self.keyless)

    @property
    def records(self) -> int:
        """Number of live records, with a key or without."""
        return self.count + len(self.keyless)

    @cached_property
    def all_rows(self) -> Rows:
        """The rows (records,) of all live records, ascending."""
        rows = self.rows(np.flatnonzero(self.live))
        return np.sort(np.concatenate([rows, self.keyless])) if len(self.keyless) else rows

    @property
    def stop_row(self) -> int:
        """The row after the last one, with a key or without."""
        ends = [segment.stop_row for segment in self.segments[-1:]] + [int(row) + 1 for row in self.keyless[-1:]]
        return max(ends, default=0)

    def keyed(self, rows: Rows) -> Live:
        """Return a mask of rows (m,), True for a row with a key that lies in a slot of this generation."""
        in_slots: Live = self.positions(rows) >= 0
        return in_slots & ~np.isin(rows, self.keyless) if len(self.keyless) else in_slots

    def holds(self, rows: Rows) -> Live:
        """Return a mask of rows (m,), True for a row that this generation holds, with a key or without."""
        in_slots: Live = self.positions(rows) >= 0
        return in_slots | np.isin(rows, self.keyless) if len(self.keyless) else in_slots

    @property
    def size(self) -> int:
        """Number of positions: the used slots of all segments, dead records included."""
        return len(self.live)

    @cached_property
    def contiguous(self) -> bool:
        """True if rows equal positions, which holds until a compaction leaves gaps."""
        return all(
            s.rows is None and s.first_row == start for s, start in zip(self.segments, self.starts, strict=False)
        )

    @cached_property
    def key_column(self) -> Column:
        """The keys, for kernels that read them without a copy; valid as long as this snapshot exists."""
        return self._column([s.keys for s in self.segments])

    @cached_property
    def value_column(self) -> Column:
        """The values, for kernels that read them without a copy; valid as long as this snapshot exists."""
        return self._column([s.values_or_keys for s in self.segments])

    @cached_property
    def value_size(self) -> float:
        """Root mean square of ‖v‖, estimated from at most SAMPLED values."""
        return value_size(self.generation, self.size, self.values_at)

    def rows(self, positions: Rows) -> Rows:
        """Return the permanent row numbers of positions (…); -1 stays -1."""
        if self.contiguous:
            return positions
        rows = np.full(positions.shape, -1, np.int64)
        for segment, low, high in zip(self.segments, self.starts[:-1], self.starts[1:], strict=True):
            inside = (positions >= low) & (positions < high)
            slots = positions[inside] - low
            rows[inside] = segment.first_row + slots if segment.rows is None else segment.rows[slots]
        return rows

    def count_below(self, row: int) -> int:
        """Return the number of slots whose row is below `row`."""
        return sum(
            min(max(row - s.first_row, 0), len(s)) if s.rows is None else int(s.rows.searchsorted(row))
            for s in self.segments
        )

    def positions(self, rows: Rows) -> Rows:
        """Return the positions of rows (…); -1 for rows without a slot. Dead rows have a slot until a compaction."""
        if self.contiguous:
            return np.where((rows >= 0) & (rows < self.size), rows, -1)
        positions = np.full(rows.shape, -1, np.int64)
        for segment, start in zip(self.segments, self.starts, strict=False):
            if segment.rows is None:
                slots = rows - segment.first_row
                present = (slots >= 0) & (slots < len(segment))
            else:
                slots = np.minimum(np.searchsorted(segment.rows, rows), len(segment) - 1)
                present = segment.rows[slots] == rows
            positions[present] = slots[present] + start
        return positions

    def keys_at(self, positions: Rows) -> Tensor:
        """Copy the keys of positions (…): (…, d) in the column's dtype; zeros for the position -1."""
        return self._gather([s.keys for s in self.segments], positions)

    def values_at(self, positions: Rows) -> Tensor:
        """Copy the values of positions (…): (…, v), int64 labels (…), or keys if there are no values; zeros for -1."""
        values = self._gather([s.values_or_keys for s in self.segments], positions)
        return values if values.is_floating_point() else values.long()

    def stored_values(self, positions: Rows) -> NDArray[np.generic] | None:
        """Copy the values of positions (m,) in the column's dtype; None if the keys serve as values."""
        columns = [s.values for s in self.segments if s.values is not None]
        return self._gather(columns, positions).numpy() if columns else None

    def blocks(
        self,
        size: int,  # maximum number of records of a block
        allowed: Live | None = None,  # (size,) over positions; None: every live record
        start: int = 0,  # first position
    ) -> Iterator[Block]:
        """Yield the allowed live records from a position on, in order. Only blocks that skip records are copied."""
        import torch  # imported late: commands that read only metadata, like `softdb info`, must not wait for it

        keep = self.live if allowed is None else self.live & allowed
        for segment, offset in zip(self.segments, self.starts, strict=False):
            for low in range(max(0, start - int(offset)), len(segment), size):
                high = min(low + size, len(segment))
                mask = keep[offset + low : offset + high]
                slots: slice | Rows
                if mask.all():
                    slots = slice(low, high)
                    positions = torch.arange(offset + low, offset + high)
                elif mask.any():
                    inside = np.flatnonzero(mask)
                    slots = inside + low
                    positions = torch.from_numpy(inside + (offset + low))
                else:
                    continue
                keys = torch.from_numpy(segment.keys[slots])
                values = keys if segment.values is None else torch.from_numpy(segment.values[slots])
                yield Block(positions, keys, values if values.is_floating_point() else values.long())

    def _column(self, columns: list[NDArray[np.generic]]) -> Column:
        kind = {"float32": 0, "float16": 1, "int32": 2}[columns[0].dtype.name]
        addresses = np.array([column.ctypes.data for column in columns], np.int64)
        width = columns[0].shape[1] if columns[0].ndim == 2 else 1
        column: Column = native().Column(addresses, self.starts, width, kind)
        return column

    def _gather(self, columns: list[NDArray[np.generic]], positions: Rows) -> Tensor:
        import torch

        if not columns:
            raise ValueError("an empty snapshot has no columns to gather from")
        out = np.zeros((*positions.shape, *columns[0].shape[1:]), columns[0].dtype)
        if len(columns) == 1 and positions.size and positions.min() >= 0:
            return torch.from_numpy(columns[0].take(positions, 0, out))
        home = self.starts.searchsorted(positions, "right") - 1  # index of each position's segment; -1 for position -1
        for segment in set(home.flat):
            if segment >= 0:
                inside = home == segment
                out[inside] = columns[segment][positions[inside] - self.starts[segment]]
        return torch.from_numpy(out)


def value_size(generation: int, size: int, values_at: Callable[[Rows], Tensor]) -> float:
    """Root mean square of ‖v‖, estimated from at most SAMPLED values, drawn with replacement."""
    positions = np.random.default_rng(generation).integers(0, size, min(size, SAMPLED))
    return float(values_at(np.sort(positions)).double().square().sum(1).mean().sqrt())
