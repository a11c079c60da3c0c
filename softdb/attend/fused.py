"""The fused soft query on a CPU: kernels over contiguous parts of the records, one thread a part.

Bytes moved: keys and values once forward, once backward, whatever the number of queries; operations: 2 q n (d + v)
forward, 2 q n (2 d + v) backward. A block whose weights all lie below exp(-17.3) / n of the largest is not pooled: all
such blocks together move the normaliser by less than 2⁻²⁵, the rounding of float32, and the output by less than
2⁻²⁵ max‖v‖.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Request
from softdb.check import Metric, attribute
from softdb.kernels import available, native
from softdb.kernels.threads import share_out, workers
from softdb.scoring import Fold, Sparse
from softdb.scoring.once import Once
from softdb.scoring.products import length
from softdb.store import Snapshot

Array: TypeAlias = NDArray[Any]

WORTH = 1 << 16  # products below which the call costs more than torch takes
PIECE = 1 << 18  # records visited by one kernel call: a few milliseconds, so that Ctrl-C is handled in between
CHUNK = 1024  # queries that share a pass; their sums are float64


class Pass(NamedTuple):
    """A request as the kernels take it: the softmax of metric(q, k) / temperature over stored columns."""

    columns: Snapshot
    keep: Array  # (size,) bool over positions, True = takes part
    mask: Array | None  # (q, live) bool, True = takes part
    metric: Metric
    temperature: float
    num_classes: int | None
    pools: bool

    @property
    def labels(self) -> bool:
        """True if the values are labels: the answer is the weight of each class."""
        return self.pools and self.num_classes is not None

    def chunk(self, part: slice) -> Pass:
        """The pass for some of the queries."""
        return self if self.mask is None else self._replace(mask=self.mask[part])


class _PassSums(NamedTuple):
    """Result of a pass: the answer, and the state that its gradient needs."""

    output: Array  # (q, v) float32
    top: Array  # (q,) float32, the largest score
    total: Array  # (q,) float64, Σ exp((s - top) / T); 0 where nothing takes part


def kernel_form(request: Request) -> tuple[Fold, float] | None:
    """The request as the softmax of scale · metric(q, k), and the scale; None if it has no such form."""
    if isinstance(request.weighting, Sparse) or request.streamed_score is not request.score:
        return None
    folded = request.folded
    if folded is None or folded.scale is None:
        return None
    if isinstance(folded.scale, Tensor) and folded.scale.requires_grad and torch.is_grad_enabled():
        return None  # the kernels have no gradient for it
    scale = float(folded.scale) / request.temperature
    return (folded, scale) if 1e-30 < scale < 1e30 else None  # beyond what float32 holds


def pass_of(request: Request, source: SourceRecords) -> tuple[Tensor, Pass, Tensor] | None:  # (q, d), and (q,) or ()
    """Queries for the kernels, their pass, and the term to add to its lse; None if torch has to answer."""
    queries, columns = request.queries, source.columns
    if (
        columns is None
        or columns.placed is not None
        or queries.dtype is not torch.float32
        or queries.device.type != "cpu"
        or not available()
    ):
        return None
    width = source.width if request.pools else 0
    if len(queries) * source.count * (queries.shape[1] + width) < WORTH:
        return None
    form = kernel_form(request)
    if form is None or not _trains(request, source):
        return None
    folded, inverse = form
    plain = folded.queries
    if folded.metric is Metric.COSINE:
        plain = plain / length(plain).unsqueeze(1)
    mask = None if request.mask is None else np.ascontiguousarray(request.mask.cpu().numpy())
    what = columns, request.keep(source.live), mask, folded.metric, 1 / inverse, source.num_classes, request.pools
    return plain, Pass(*what), torch.as_tensor(folded.bias) / request.temperature


def _trains(request: Request, source: SourceRecords) -> bool:
    """Return True if the kernels have every gradient that the source's own columns require."""
    if not torch.is_grad_enabled() or source.trained == (None, None):
        return True
    metric, columns = attribute(request.score, "metric"), source.columns
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
        """Answer in chunks of queries."""
        plain = np.ascontiguousarray(queries.detach().numpy())
        sums = []
        for chunk in _chunks(plain):
            sums.append(forward(plain[chunk], what.chunk(chunk)))
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
        plain, *given = (tensor.detach().numpy() for tensor in (queries, *saved, output_grad, lse_grad))
        query_grad = np.empty_like(plain)
        for chunk in _chunks(plain):
            *sums, grad, grad_of_lse = (array[chunk] for array in given)
            arguments = np.ascontiguousarray(plain[chunk]), ctx.what.chunk(chunk), _PassSums(*sums)
            query_grad[chunk] = backward(*arguments, (grad, grad_of_lse), written)
        sources = queries, output_grad, lse_grad, *(column for column in ctx.columns if column is not None)
        return *Once.guarded([torch.from_numpy(query_grad), *columns], sources), None


def _chunks(queries: Array) -> list[slice]:
    return [slice(low, low + CHUNK) for low in range(0, len(queries), CHUNK)]


# -- one pass ----------------------------------------------------------------------------------------------------------


def forward(queries: Array, what: Pass) -> _PassSums:  # (q, d) float32
    """One pass over every record that takes part."""
    q, layout = len(queries), _PassLayout(queries, what)
    attention = layout.attention(queries)
    floats = attention.scratch(layout.value_width)

    def work(pieces: Iterator[Any]) -> tuple[Array, Array, Array]:
        output = np.zeros((what.num_classes or 0, q) if what.labels else (q, layout.value_width))
        top, total, scratch = np.full(q, LOWEST), np.zeros(q), _aligned(floats)
        for piece in pieces:
            attention.forward(piece, output, top, total, scratch)
        return output.T if what.labels else output, top, total

    parts = layout.shares()
    outputs, tops, totals = zip(*share_out(work, parts), strict=True)
    top = np.maximum.reduce(tops)  # NaN where a score overflowed
    decays = [np.exp((own_top - top).astype(np.float64) / what.temperature) for own_top in tops]
    total = sum(decay * own_total for decay, own_total in zip(decays, totals, strict=True))
    output = sum(decay[:, None] * own_output for decay, own_output in zip(decays, outputs, strict=True))
    output /= np.where(total > 0, total, 1)[:, None]
    return _PassSums(output.astype(np.float32), np.where(total == 0, 0 * top, top).astype(np.float32), total)


def backward(
    queries: Array,  # (q, d) float32
    what: Pass,
    sums: _PassSums,
    grads: Sequence[Array],  # of output (q, v) and lse (q,), float32
    column_grads: Sequence[Array | None] = (None, None),  # (n, d), for dot products, and (n, v) float32, added to
) -> Array:  # (q, d) float32
    """The gradient of the queries, and of the columns where it is asked for.

    Threads share the records, so that each adds to rows of its own.
    """
    layout, (output_grad, lse_grad) = _PassLayout(queries, what), grads
    # a gradient is a difference of keys: seen from the mean query, cancellation loses no digits
    centre = queries.mean(0) if what.metric is Metric.L2 else None
    seen = queries if centre is None else queries - centre
    attention = layout.attention(seen, centre)
    floats = attention.scratch(layout.value_width)
    empty = sums.total == 0
    output_grad = np.where(empty[:, None], 0, output_grad).astype(np.float32)
    offset = np.where(empty, 0, lse_grad - (output_grad * sums.output).sum(1, dtype=np.float64)).astype(np.float32)
    inverse_total = np.where(empty, 0, 1 / np.where(empty, 1, sums.total)).astype(np.float32)
    top = np.where(empty, np.float32(np.inf), sums.top)  # so that no record matters
    pooled_grad = np.ascontiguousarray(output_grad.T) if what.labels else output_grad

    def work(pieces: Iterator[Any]) -> tuple[Array, Array]:
        pulled, mass, scratch = np.zeros(queries.shape), np.zeros(len(queries)), _aligned(floats)
        for piece in pieces:
            attention.backward(
                piece, pooled_grad, offset, inverse_total, top, pulled, mass, *column_grads, scratch
            )  # fmt: skip
        return pulled, mass

    parts = layout.shares()
    pulled, mass = (np.sum(column, axis=0) for column in zip(*share_out(work, parts), strict=True))
    if what.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        pulled = 2 * (pulled - mass[:, None] * seen)
    return np.asarray(pulled, np.float32)


LOWEST = np.finfo(np.float32).min  # below every score


def _aligned(size: int) -> Array:
    """Memory of one thread, (size,) float32, aligned to a cache line."""
    memory = np.empty(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


class _PassLayout:
    """Division of the records into pieces for the kernels, and of pieces among threads."""

    def __init__(self, queries: Array, what: Pass) -> None:
        self.what = what
        first = what.columns.segments[0]
        column = first.keys if first.values is None else first.values
        self.value_width = column.shape[1] if column.ndim == 2 and what.pools else 0
        products = queries.size + len(queries) * self.value_width
        self.threads = workers(products * len(what.keep))

    def attention(self, queries: Array, centre: Array | None = None) -> Any:
        """Kernel arguments common to all pieces."""
        what = self.what
        negligible = -(25 * math.log(2) + math.log(max(1, len(what.keep))))
        return native().Attention(
            queries, what.metric.value, 1 / what.temperature, negligible, what.num_classes or 0, centre
        )

    def shares(self) -> list[Iterator[Any]]:
        """The pieces in equal shares of the records, one a thread."""
        size = len(self.what.keep)
        bounds = [size * i // self.threads for i in range(self.threads + 1)]
        return [self.pieces(low, high) for low, high in itertools.pairwise(bounds)]

    def pieces(self, low: int, high: int) -> Iterator[Any]:
        """The records at positions from low to high that take part."""
        what, piece = self.what, native().Piece
        place = 0 if what.mask is None else int(np.count_nonzero(what.columns.live[:low]))
        for segment, start in zip(what.columns.segments, what.columns.starts.tolist(), strict=False):
            begin, end = max(low, start), min(high, start + len(segment))
            keys, values, labels = np.ascontiguousarray(segment.keys), None, None
            if what.pools and segment.values is not None and segment.values.ndim == 1:
                labels = np.ascontiguousarray(segment.values, np.int32)
            elif what.pools:
                values = keys if segment.values is None else np.ascontiguousarray(segment.values)
            for first in range(begin, end, PIECE):
                last = min(first + PIECE, end)
                keep, live = what.keep[first:last], what.columns.live[first:last]
                rows = places = None
                bounds = (first - start, last - start)
                if what.mask is not None or not keep.all():
                    rows = np.flatnonzero(keep) + (first - start)
                    bounds = (0, len(rows))
                if what.mask is not None:
                    places = place + np.cumsum(live)[keep] - 1
                    place += int(np.count_nonzero(live))
                yield piece(keys, values, labels, rows, places, what.mask, *bounds)
