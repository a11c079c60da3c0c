"""The fused soft query on a CPU: compiled loops over contiguous parts of the records, one thread a part.

Bytes moved: keys and values once forward, once backward, whatever the number of queries; operations: 2 q n (d + v)
forward, 2 q n (2 d + v) backward. A block whose weights all lie below exp(-17.3) / n of the largest is not pooled: all
such blocks together move the normaliser by less than 2⁻²⁵, the rounding of float32, and the output by less than
2⁻²⁵ max‖v‖.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.blocks import Once
from softdb.attend.request import Request
from softdb.check import Metric
from softdb.kernels.threads import available, share_out, workers
from softdb.scores.products import length
from softdb.store import Snapshot
from softdb.weights import Sparse

if TYPE_CHECKING:
    from softdb.attend.source import Source

__all__ = ["Fused", "Pass", "backward", "forward", "pass_of"]

Array: TypeAlias = NDArray[Any]

WORTH = 1 << 22  # products: less than a compiler's start, and no slower in torch
PIECE = 1 << 18  # records visited by one compiled call: a few milliseconds, between which Ctrl-C is heard
CHUNK = 1024  # queries that share a pass; their sums are float64


class Pass(NamedTuple):
    """A request as the loops take it: the softmax of metric(q, k) / temperature over stored columns."""

    columns: Snapshot
    keep: Array  # (size,) bool over positions: which take part
    mask: Array | None  # (q, live) bool, True = takes part
    metric: Metric
    temperature: float
    num_classes: int | None
    pools: bool

    @property
    def labels(self) -> bool:
        """Whether the weight of classes is what is pooled."""
        return self.pools and self.num_classes is not None

    def chunk(self, part: slice) -> Pass:
        """The same for some of the queries."""
        return self if self.mask is None else self._replace(mask=self.mask[part])


class _PassSums(NamedTuple):
    """What a pass found: the answer, and what its gradient needs."""

    output: Array  # (q, v) float32
    top: Array  # (q,) float32, the largest score
    total: Array  # (q,) float64, Σ exp((s - top) / T); 0 where nothing takes part


def pass_of(request: Request, source: Source) -> tuple[Tensor, Pass, Tensor] | None:  # (q, d), and (q,) or ()
    """The queries as the loops take them, their pass, and what its lse lacks; None where the loops cannot answer."""
    queries, columns = request.queries, source.columns
    if columns is None or queries.dtype is not torch.float32 or queries.device.type != "cpu" or not available():
        return None
    width = source.width if request.pools else 0
    if isinstance(request.weighting, Sparse) or len(queries) * source.count * (queries.shape[1] + width) < WORTH:
        return None
    folded = None if request.streamed_score is not request.score else request.folded
    if folded is None or folded.scale is None or not _trains(request, source):
        return None
    if isinstance(folded.scale, Tensor) and folded.scale.requires_grad and torch.is_grad_enabled():
        return None  # the loops have no gradient for it
    inverse = float(folded.scale) / request.temperature
    if not 1e-30 < inverse < 1e30:  # beyond what float32 holds
        return None
    asked = folded.queries
    if folded.metric is Metric.COSINE:
        asked = asked / length(asked).unsqueeze(1)
    mask = None if request.mask is None else np.ascontiguousarray(request.mask.cpu().numpy())
    what = columns, request.keep(source), mask, folded.metric, 1 / inverse, source.num_classes, request.pools
    return asked, Pass(*what), torch.as_tensor(folded.bias) / request.temperature


def _trains(request: Request, source: Source) -> bool:
    """Whether the loops give the gradients that the source's own columns want, if they want any."""
    if not torch.is_grad_enabled() or source.trained == (None, None):
        return True
    metric, columns = getattr(request.score, "metric", None), source.columns
    if columns is None or metric is not Metric.DOT or source.num_classes is not None:
        return False
    return all(column is None or column.dtype is torch.float32 for column in source.trained)


class Fused(torch.autograd.Function):
    """A pass over every record: output (q, v) and lse (q,), NaN where a score overflows."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (q, d)
        keys: Tensor | None,  # (n, d), the source's own, given where it wants a gradient
        values: Tensor | None,  # (n, v), likewise
        what: Pass,
    ) -> tuple[Tensor, Tensor]:
        """Some queries at a time, each with its own sums."""
        asked = np.ascontiguousarray(queries.detach().numpy())
        sums = []
        for part in _chunks(asked):
            sums.append(forward(asked[part], what.chunk(part)))
        output, top, total = (torch.from_numpy(np.concatenate(column)) for column in zip(*sums, strict=True))
        ctx.what, ctx.columns = what, (keys, values)
        ctx.save_for_backward(queries, output, top, total)
        if not bool(torch.isfinite(top).all()):
            return output, torch.full_like(top, math.nan)
        return output, (total.log() + top / what.temperature).float()

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the queries, and of the columns that want them."""
        queries, *saved = ctx.saved_tensors
        columns = [None if column is None else torch.zeros_like(column) for column in ctx.columns]
        written = [None if column is None else column.numpy() for column in columns]
        asked, *given = (one.detach().numpy() for one in (queries, *saved, output_grad, lse_grad))
        query_grad = np.empty_like(asked)
        for part in _chunks(asked):
            *sums, grad, grad_of_lse = (one[part] for one in given)
            mine = np.ascontiguousarray(asked[part]), ctx.what.chunk(part), _PassSums(*sums)
            query_grad[part] = backward(*mine, grad, grad_of_lse, *written)
        sources = queries, output_grad, lse_grad, *(column for column in ctx.columns if column is not None)
        return *Once.guarded([torch.from_numpy(query_grad), *columns], sources), None


def _chunks(queries: Array) -> list[slice]:
    return [slice(low, low + CHUNK) for low in range(0, len(queries), CHUNK)]


# -- one pass ----------------------------------------------------------------------------------------------------------


def forward(queries: Array, what: Pass) -> _PassSums:  # (q, d) float32
    """One pass over every record that takes part."""
    from softdb.compiled import attention as loops

    layout = _QueryLayout(queries, what)
    labels = what.labels
    v = int(what.num_classes or 0) if labels else layout.value_width
    rows = v if labels else layout.padded

    def work(pieces: Iterator[_Piece]) -> tuple[Array, Array, Array]:
        output = np.zeros((rows, layout.padded if labels else layout.value_pitch))
        total, task, scratch = np.zeros(layout.padded), layout.task(), layout.scratch()
        for piece in pieces:
            loops.forward(layout.shape, *piece, task, output.reshape(-1), total, scratch)
        return output.T[: layout.q] if labels else output[: layout.q, :v], task.top[: layout.q], total[: layout.q]

    parts = layout.shares()
    found = [work(parts[0])] if len(parts) == 1 else share_out(work, parts)
    top = np.maximum.reduce([one[1] for one in found])  # NaN where a score overflowed
    decays = [np.exp((one[1] - top).astype(np.float64) / what.temperature) for one in found]
    total = sum(decay * one[2] for decay, one in zip(decays, found, strict=True))
    output = sum(decay[:, None] * one[0] for decay, one in zip(decays, found, strict=True))
    output /= np.where(total > 0, total, 1)[:, None]
    return _PassSums(output.astype(np.float32), np.where(total == 0, 0 * top, top).astype(np.float32), total)


def backward(
    queries: Array,  # (q, d) float32
    what: Pass,
    sums: _PassSums,
    output_grad: Array,  # (q, v) float32
    lse_grad: Array,  # (q,) float32
    key_grad: Array | None = None,  # (n, d) float32, added to; for dot products
    value_grad: Array | None = None,  # (n, v) float32, added to
) -> Array:  # (q, d) float32
    """The gradient of the queries, and of the columns where it is asked for."""
    from softdb.compiled import attention as loops

    layout = _QueryLayout(queries, what, backward=True)
    empty = sums.total == 0
    output_grad = np.where(empty[:, None], 0, output_grad).astype(np.float32)
    offset = np.where(empty, 0, lse_grad - (output_grad * sums.output).sum(1, dtype=np.float64))
    inverse_total = np.where(empty, 0, 1 / np.where(empty, 1, sums.total))
    top = np.where(empty, np.float32(np.inf), sums.top)  # so that no record matters
    labels = what.labels
    grads = layout.columns(output_grad) if labels else layout.grouped(output_grad)
    query_rows = layout.rows(layout.seen, layout.key_pitch) if key_grad is not None else _NONE
    grad_rows = layout.rows(output_grad, layout.value_pitch) if value_grad is not None else _NONE
    columns = [np.empty((0, 0), np.float32) if grad is None else grad for grad in (key_grad, value_grad)]

    def work(pieces: Iterator[_Piece]) -> tuple[Array, Array]:
        pulled, mass = np.zeros((layout.padded, layout.key_pitch)), np.zeros(layout.padded)
        task, scratch = layout.task(top), layout.scratch()
        for piece in pieces:
            loops.backward(
                layout.shape, *piece, task, grads, layout.pad(offset), layout.pad(inverse_total), pulled.reshape(-1),
                mass, query_rows, grad_rows, *columns, scratch,
            )  # fmt: skip
        return pulled[: layout.q, : queries.shape[1]], mass[: layout.q]

    parts = layout.shares()
    found = [work(parts[0])] if len(parts) == 1 else share_out(work, parts)
    pulled, mass = (np.sum(column, axis=0) for column in zip(*found, strict=True))
    if what.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        pulled = 2 * (pulled - mass[:, None] * layout.seen)
    return np.asarray(pulled, np.float32)


_NONE, _NO_HALVES, _NO_ROWS, _NO_LABELS = (np.empty(0, kind) for kind in (np.float32, np.uint16, np.int64, np.int32))
_NO_MASK = np.empty((0, 0), np.bool_)
_Piece: TypeAlias = tuple[Any, Any, Array, Any]  # keys, values, labels, part


class _QueryLayout:
    """Queries in groups, and memory of the sizes that go with them."""

    def __init__(self, queries: Array, what: Pass, backward: bool = False) -> None:
        from softdb.compiled import attention as loops

        self.loops, self.what, self.backward = loops, what, backward
        self.q, self.width = queries.shape
        self.group = next((g for g in loops.GROUPS if self.q <= g), loops.GROUPS[-1])
        self.shape = (0,) * self.group
        self.padded = -(-max(self.q, 1) // self.group) * self.group
        first = what.columns.segments[0]
        column = first.keys if first.values is None else first.values
        self.value_width = column.shape[1] if column.ndim == 2 and what.pools else 0
        self.key_pitch, self.value_pitch = (_pitch(width, loops.LANES) for width in (self.width, self.value_width))
        # a gradient is a difference of keys: around the queries it loses nothing to cancellation
        self.centre = queries.mean(0) if backward and what.metric is Metric.L2 else _NONE
        self.seen = queries - self.centre if self.centre.size else queries
        self.queries = self.grouped(self.seen)

    def grouped(self, rows: Array) -> Array:
        """(q, x) as (groups, x, group), or as (group, pitch) where they are few; flat."""
        if self.group <= self.loops.FEW:
            return self.rows(rows, _pitch(rows.shape[1], self.loops.LANES))
        padded = self.rows(rows, rows.shape[1]).reshape(self.padded // self.group, self.group, rows.shape[1])
        flat: Array = padded.transpose(0, 2, 1).reshape(-1)
        return flat

    def columns(self, rows: Array) -> Array:
        """(q, x) as (x, padded), flat."""
        flat: Array = self.rows(rows, rows.shape[1]).reshape(self.padded, -1).T.reshape(-1).copy()
        return flat

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
        what = self.what
        if top is None:
            top = np.full(self.q, np.finfo(np.float32).min / 4)  # above what fills a row of lanes
        negligible = -(25 * np.log(2) + np.log(max(1, len(what.keep))))
        return self.loops.Task(
            self.queries, what.metric is Metric.COSINE, what.metric is Metric.L2,
            np.float32(1 / what.temperature), np.float32(negligible),
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
        what = self.what
        mask = _NO_MASK if what.mask is None else what.mask
        place = 0 if what.mask is None else int(np.count_nonzero(what.columns.live[:low]))
        for segment, start in zip(what.columns.segments, what.columns.starts.tolist(), strict=False):
            begin, end = max(low, start), min(high, start + len(segment))
            keys = self._column(segment.keys, self.key_pitch)
            values, labels = keys, _NO_LABELS
            if not what.pools:
                values = keys._replace(width=0, pitch=0)
            elif segment.values is not None and segment.values.ndim == 1:
                values, labels = keys._replace(width=0, pitch=0), np.ascontiguousarray(segment.values, np.int32)
            elif segment.values is not None:
                values = self._column(segment.values, self.value_pitch)
            for first in range(begin, end, PIECE):
                last = min(first + PIECE, end)
                keep, live = what.keep[first:last], what.columns.live[first:last]
                rows, places = _NO_ROWS, _NO_ROWS
                part = (first - start, last - start)
                if what.mask is not None or not keep.all():
                    rows = np.flatnonzero(keep) + (first - start)
                    part = (0, len(rows))
                if what.mask is not None:
                    places = place + np.cumsum(live)[keep] - 1
                    place += int(np.count_nonzero(live))
                yield keys, values, labels, self.loops.Part(rows, places, mask, *part)

    def shares(self) -> list[Iterator[_Piece]]:
        """The pieces in equal shares of the records, one a thread."""
        size = len(self.what.keep)
        count = workers(self.q * size * (self.width + self.value_width))
        bounds = [size * w // count for w in range(count + 1)]
        return [self.pieces(low, high) for low, high in itertools.pairwise(bounds)]

    def _column(self, column: Array, pitch: int) -> Any:
        flat = np.asarray(column).reshape(-1)
        if column.dtype == np.float16:
            return self.loops.Column(_NONE, flat.view(np.uint16), column.shape[1], pitch)
        return self.loops.Column(flat, _NO_HALVES, column.shape[1], pitch)


def _pitch(width: int, lanes: int) -> int:
    return -(-width // lanes) * lanes
