"""The fused soft query on a CPU: compiled loops over contiguous parts of the records, one thread a part.

Bytes moved: keys and values once forward, once backward, whatever the number of queries; operations: 2 q n (d + v)
forward, 2 q n (2 d + v) backward. A block whose weights all lie below exp(-17.3) / n of the largest is not pooled: all
such blocks together move the normaliser by less than 2⁻²⁵, the rounding of float32, and the output by less than
2⁻²⁵ max‖v‖.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.compiled.threads import share_out, workers
from softdb.store.snapshot import Segment

__all__ = ["Ask", "State", "backward", "forward"]

Array: TypeAlias = NDArray[Any]

PIECE = 1 << 18  # records visited by one compiled call: a few milliseconds, between which Ctrl-C is heard
CHUNK = 1024  # queries that share a pass; their sums are float64


class Ask(NamedTuple):
    """A soft query but for its queries: the softmax of metric(q, k) / temperature."""

    segments: tuple[Segment, ...]
    starts: Array  # (segments + 1,) position of each segment's first record
    keep: Array  # (size,) bool over positions: which take part
    live: Array  # (size,) bool over positions: which the mask has columns for
    mask: Array | None  # (q, live) bool, True = takes part
    metric: Metric
    temperature: float
    num_classes: int | None

    def chunk(self, part: slice) -> Ask:
        """The same for some of the queries."""
        return self if self.mask is None else self._replace(mask=self.mask[part])


class State(NamedTuple):
    """What a soft query found: the answer, and what its gradient needs."""

    output: Array  # (q, v) float32
    top: Array  # (q,) float32, the largest score
    total: Array  # (q,) float64, Σ exp((s - top) / T); 0 where nothing takes part


def forward(
    queries: Array,  # (q, d) float32
    ask: Ask,
) -> State:
    """The soft query over every record that takes part."""
    parts = [slice(low, low + CHUNK) for low in range(0, len(queries), CHUNK)]
    states = [_forward(queries[part], ask.chunk(part)) for part in parts]
    return State(*(np.concatenate(column) for column in zip(*states, strict=True)))


def backward(
    queries: Array,  # (q, d) float32
    ask: Ask,
    state: State,
    output_grad: Array,  # (q, v) float32
    lse_grad: Array,  # (q,) float32
    key_grad: Array | None = None,  # (n, d) float32, added to; for dot products and squared distances
    value_grad: Array | None = None,  # (n, v) float32, added to
) -> Array:  # (q, d) float32
    """The gradient of the queries, and of the columns where it is asked for."""
    found = []
    for low in range(0, len(queries), CHUNK):
        part = slice(low, low + CHUNK)
        mine = State(state.output[part], state.top[part], state.total[part])
        found.append(
            _backward(queries[part], ask.chunk(part), mine, output_grad[part], lse_grad[part], key_grad, value_grad)
        )
    return np.concatenate(found)


# -- one pass ----------------------------------------------------------------------------------------------------------


def _forward(queries: Array, ask: Ask) -> State:
    from softdb.compiled import attention as loops

    layout = _Layout(queries, ask)
    labels = ask.num_classes is not None
    v = ask.num_classes if ask.num_classes is not None else layout.value_width
    rows = layout.padded if not labels else v

    def work(pieces: Iterator[_Piece]) -> tuple[Array, Array, Array]:
        output = np.zeros((rows, layout.padded if labels else layout.value_pitch))
        total, task, scratch = np.zeros(layout.padded), layout.task(), layout.scratch()
        for piece in pieces:
            loops.forward(layout.shape, *piece, task, output.reshape(-1), total, scratch)
        return output.T[: layout.q] if labels else output[: layout.q, :v], task.top[: layout.q], total[: layout.q]

    found = _threads(work, layout)
    top = np.maximum.reduce([one[1] for one in found])  # NaN where a score overflowed
    decays = [np.exp((one[1] - top).astype(np.float64) / ask.temperature) for one in found]
    total = sum(decay * one[2] for decay, one in zip(decays, found, strict=True))
    output = sum(decay[:, None] * one[0] for decay, one in zip(decays, found, strict=True))
    output /= np.where(total > 0, total, 1)[:, None]
    return State(output.astype(np.float32), np.where(total == 0, 0 * top, top).astype(np.float32), total)


def _backward(
    queries: Array,
    ask: Ask,
    state: State,
    output_grad: Array,
    lse_grad: Array,
    key_grad: Array | None,
    value_grad: Array | None,
) -> Array:
    from softdb.compiled import attention as loops

    layout = _Layout(queries, ask, backward=True)
    empty = state.total == 0
    output_grad = np.where(empty[:, None], 0, output_grad).astype(np.float32)
    offset = np.where(empty, 0, lse_grad - (output_grad * state.output).sum(1, dtype=np.float64))
    inverse_total = np.where(empty, 0, 1 / np.where(empty, 1, state.total))
    top = np.where(empty, np.float32(np.inf), state.top)  # so that no record matters
    labels = ask.num_classes is not None
    grads = layout.columns(output_grad) if labels else layout.grouped(output_grad)
    query_rows = layout.rows(layout.seen, layout.key_pitch) if key_grad is not None else _NONE
    grad_rows = layout.rows(output_grad, layout.value_pitch) if value_grad is not None else _NONE
    columns = (
        np.empty((0, 0), np.float32) if key_grad is None else key_grad,
        np.empty((0, 0), np.float32) if value_grad is None else value_grad,
    )

    def work(pieces: Iterator[_Piece]) -> tuple[Array, Array]:
        sums, mass = np.zeros((layout.padded, layout.key_pitch)), np.zeros(layout.padded)
        task, scratch = layout.task(top), layout.scratch()
        for piece in pieces:
            loops.backward(
                layout.shape, *piece, task, grads, layout.pad(offset), layout.pad(inverse_total), sums.reshape(-1),
                mass, query_rows, grad_rows, *columns, scratch,
            )  # fmt: skip
        return sums[: layout.q, : queries.shape[1]], mass[: layout.q]

    found = _threads(work, layout)
    pulled, mass = sum(one[0] for one in found), sum(one[1] for one in found)
    if ask.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        pulled = 2 * (pulled - mass[:, None] * layout.seen)
    return np.asarray(pulled, np.float32)


_NONE, _NO_HALVES, _NO_ROWS, _NO_LABELS = (np.empty(0, kind) for kind in (np.float32, np.uint16, np.int64, np.int32))
_NO_MASK = np.empty((0, 0), np.bool_)
_Piece: TypeAlias = tuple[Any, Any, Array, Any]  # keys, values, labels, part


class _Layout:
    """Queries in groups, and memory of the sizes that go with them."""

    def __init__(self, queries: Array, ask: Ask, backward: bool = False) -> None:
        from softdb.compiled import attention as loops

        self.loops, self.ask, self.backward = loops, ask, backward
        self.q, self.width = queries.shape
        self.group = next((g for g in loops.GROUPS if self.q <= g), loops.GROUPS[-1])
        self.shape = (0,) * self.group
        self.padded = -(-max(self.q, 1) // self.group) * self.group
        first = ask.segments[0]
        column = first.keys if first.values is None else first.values
        self.value_width = column.shape[1] if column.ndim == 2 else 0
        self.key_pitch, self.value_pitch = (_pitch(width, loops.LANES) for width in (self.width, self.value_width))
        # a gradient is a difference of keys: around the queries it loses nothing to cancellation
        self.centre = queries.mean(0) if backward and ask.metric is Metric.L2 else _NONE
        self.seen = queries - self.centre if self.centre.size else queries
        self.queries = self.grouped(self.seen)

    def grouped(self, rows: Array) -> Array:
        """(q, x) as (groups, x, group), or as (group, pitch) where they are few; flat."""
        if self.group <= self.loops.FEW:
            return self.rows(rows, _pitch(rows.shape[1], self.loops.LANES))
        out = np.zeros((self.padded // self.group, rows.shape[1], self.group), np.float32)
        for g in range(len(out)):
            part = rows[g * self.group : (g + 1) * self.group]
            out[g, :, : len(part)] = part.T
        return out.reshape(-1)

    def columns(self, rows: Array) -> Array:
        """(q, x) as (x, padded), flat."""
        return self.rows(rows, rows.shape[1]).reshape(self.padded, -1).T.reshape(-1).copy()

    def rows(self, rows: Array, pitch: int) -> Array:
        """(q, x) as (padded, pitch), flat."""
        out = np.zeros((self.padded, pitch), np.float32)
        out[: self.q, : rows.shape[1]] = rows
        return out.reshape(-1)

    def pad(self, row: Array, rest: float = 0.0) -> Array:
        """(q,) as (padded,)."""
        out = np.full(self.padded, rest, np.float32)
        out[: self.q] = row
        return out

    def task(self, top: Array | None = None) -> Any:
        """What the loops are asked; the running maximum is each thread's own. To padding no record matters."""
        ask = self.ask
        if top is None:
            top = np.full(self.q, np.finfo(np.float32).min / 4)  # above what fills a row of lanes
        negligible = -(25 * np.log(2) + np.log(max(1, len(ask.keep))))
        return self.loops.Task(
            self.queries, ask.metric is Metric.COSINE, ask.metric is Metric.L2,
            np.float32(1 / ask.temperature), np.float32(negligible),
            self.pad(top, np.inf), self.centre, _NONE,
        )  # fmt: skip

    def scratch(self) -> Any:
        """One thread's memory."""
        block, group, wide = self.loops.BLOCK, self.group, max(self.key_pitch, self.value_pitch)
        lanes = self.loops.LANES if group == 1 else group
        sizes = (
            block * self.key_pitch, block * self.value_pitch, block * group, block * group * self.backward,
            block * wide * self.backward, group * wide, block, lanes, lanes,
        )  # fmt: skip
        return self.loops.Scratch(*(np.empty(size, np.float32) for size in sizes))

    def pieces(self, low: int, high: int) -> Iterator[_Piece]:
        """The records at positions from low to high that take part, as the loops take them."""
        ask = self.ask
        mask = _NO_MASK if ask.mask is None else ask.mask
        place = 0 if ask.mask is None else int(np.count_nonzero(ask.live[:low]))
        for segment, start in zip(ask.segments, ask.starts.tolist(), strict=False):
            begin, end = max(low, start), min(high, start + len(segment))
            keys = self._column(segment.keys, self.key_pitch)
            values, labels = keys, _NO_LABELS
            if segment.values is not None and segment.values.ndim == 1:
                values, labels = keys._replace(width=0, pitch=0), np.ascontiguousarray(segment.values, np.int32)
            elif segment.values is not None:
                values = self._column(segment.values, self.value_pitch)
            for first in range(begin, end, PIECE):
                last = min(first + PIECE, end)
                keep, live = ask.keep[first:last], ask.live[first:last]
                rows, places = _NO_ROWS, _NO_ROWS
                part = (first - start, last - start)
                if not keep.all():
                    rows = np.flatnonzero(keep) + (first - start)
                    part = (0, len(rows))
                if ask.mask is not None:
                    places = place + np.cumsum(live)[keep] - 1
                    place += int(np.count_nonzero(live))
                    rows = np.flatnonzero(keep) + (first - start)
                    part = (0, len(rows))
                yield keys, values, labels, self.loops.Part(rows, places, mask, *part)

    def _column(self, column: Array, pitch: int) -> Any:
        flat = np.asarray(column).reshape(-1)
        if column.dtype == np.float16:
            return self.loops.Column(_NONE, flat.view(np.uint16), column.shape[1], pitch)
        return self.loops.Column(flat, _NO_HALVES, column.shape[1], pitch)


def _pitch(width: int, lanes: int) -> int:
    return -(-width // lanes) * lanes


def _threads(work: Callable[[Iterator[_Piece]], Any], layout: _Layout) -> list[Any]:
    """What the work finds in each of some equal parts of the records."""
    size = len(layout.ask.keep)
    count = workers(layout.q * size * (layout.width + layout.value_width))
    bounds = [size * w // count for w in range(count + 1)]
    return share_out(work, [layout.pieces(low, high) for low, high in itertools.pairwise(bounds)])
