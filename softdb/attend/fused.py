"""Soft queries by fused kernels on a CPU. Each thread handles a contiguous part of the records.

The forward pass reads keys and values once, and so does the backward pass, for any number of queries. The operations
are 2 q n (d + v) forward and 2 q n (2 d + v) backward. A block is not pooled if all of its weights are below
exp(-17.3) / n of the largest weight. All such blocks together change the normaliser by less than 2⁻²⁵, the rounding of
float32, and the output by less than 2⁻²⁵ max‖v‖.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
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

WORTH = 1 << 16  # with fewer products torch is faster than a kernel call
PIECE = 1 << 18  # records in one kernel call: a few milliseconds, so that Ctrl-C is handled between calls
CHUNK = 1024  # largest number of queries in one pass over the records, as their sums take float64 memory


class Pass(NamedTuple):
    """A request in the form of the kernels: the softmax of metric(q, k) / temperature over stored columns."""

    columns: Snapshot
    keep: Array  # (size,) bool over positions, True = takes part
    mask: Array | None  # (q, live records) bool, True = takes part
    metric: Metric
    temperature: float  # 1 if the queries have scales
    num_classes: int | None
    pools: bool

    @property
    def labels(self) -> bool:
        """True if the values are labels, so that the answer is the total weight of each class."""
        return self.pools and self.num_classes is not None

    def chunk(self, part: slice) -> Pass:
        """Return the pass for a slice of the queries."""
        return self if self.mask is None else self._replace(mask=self.mask[part])


class _PassSums(NamedTuple):
    """Result of a forward pass: the answer, and the state that the backward pass needs."""

    output: Array  # (q, v) float32
    top: Array  # (q,) float32, the largest score
    total: Array  # (q,) float64, Σ exp((s - top) / T); 0 for a query without records


def kernel_form(request: Request, scaled_l2: bool = False) -> tuple[Fold, float | Tensor] | None:
    """Return the fold and the scale, if the request is a softmax of scale · metric(q, k); else None.

    If queries differ in their scale, or it wants a gradient, it is a tensor in the shape of the queries' leading
    dimensions; then for l2 None, unless the caller's kernel supports that (`scaled_l2`).
    """
    if isinstance(request.weighting, Sparse) or request.streamed_score is not request.score:
        return None
    folded = request.folded
    if folded is None or folded.scale is None:
        return None
    scale = folded.scale
    if isinstance(scale, Tensor) and (scale.ndim or (scale.requires_grad and torch.is_grad_enabled())):
        if folded.metric is Metric.L2 and not scaled_l2:
            return None
        scales = (scale / request.temperature).to(folded.queries).expand(folded.queries.shape[:-1])
        return (folded, scales) if bool(((scales > 1e-30) & (scales < 1e30)).all()) else None
    scale = float(scale) / request.temperature
    return (folded, scale) if 1e-30 < scale < 1e30 else None  # else outside the range of float32


def pass_of(
    request: Request, source: SourceRecords
) -> tuple[Tensor, Tensor | None, Pass, Tensor] | None:  # (q, d), (q,), and (q,) or ()
    """Return queries for the kernels, their scales if the metric is l2 and they have any, the pass, and a term to add
    to its lse. None: torch has to answer.
    """
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
    form = kernel_form(request, scaled_l2=True)
    if form is None or not _trains(request, source):
        return None
    folded, inverse = form
    plain = folded.queries
    if folded.metric is Metric.COSINE:
        plain = plain / length(plain).unsqueeze(1)
    mask = None if request.mask is None else np.ascontiguousarray(request.mask.cpu().numpy())
    scales = None
    if isinstance(inverse, Tensor):
        if folded.metric is Metric.L2:
            scales = inverse
        else:  # s(cq, k) = c s(q, k), where the kernels take queries of any length also for the cosine
            plain = plain * inverse.unsqueeze(1)
        inverse = 1.0
    what = columns, request.keep(source.live), mask, folded.metric, 1 / inverse, source.num_classes, request.pools
    return plain, scales, Pass(*what), torch.as_tensor(folded.bias) / request.temperature


def _trains(request: Request, source: SourceRecords) -> bool:
    """Return True if the kernels can compute all gradients that the source's keys and values require."""
    if not torch.is_grad_enabled() or source.trained == (None, None):
        return True
    metric, columns = attribute(request.score, "metric"), source.columns
    if columns is None or metric is not Metric.DOT or source.num_classes is not None:
        return False
    return all(column is None or column.dtype is torch.float32 for column in source.trained)


class Fused(torch.autograd.Function):
    """Differentiable pass over every record: output (q, v) and lse (q,), NaN if a score overflows."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (q, d)
        scales: Tensor | None,  # (q,) factors of the scores, for l2
        keys: Tensor | None,  # (n, d), keys of the source if they require a gradient
        values: Tensor | None,  # (n, v), values of the source if they require a gradient
        what: Pass,
    ) -> tuple[Tensor, Tensor]:
        """Compute output and lse, one chunk of the queries after the other."""
        plain = np.ascontiguousarray(queries.detach().numpy())
        factors = None if scales is None else np.ascontiguousarray(scales.detach().numpy())
        sums = []
        for chunk in _chunks(plain):
            sums.append(forward(plain[chunk], what.chunk(chunk), None if factors is None else factors[chunk]))
        output, top, total = (torch.from_numpy(np.concatenate(column)) for column in zip(*sums, strict=True))
        ctx.what, ctx.columns = what, (keys, values)
        ctx.save_for_backward(queries, scales, output, top, total)
        if not bool(torch.isfinite(top).all()):
            return output, torch.full_like(top, math.nan)
        return output, (total.log() + top / what.temperature).float()

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients for queries and scales, and for keys and values if they require one."""
        queries, scales, *saved = ctx.saved_tensors
        columns = [None if column is None else torch.zeros_like(column) for column in ctx.columns]
        written = [None if column is None else column.numpy() for column in columns]
        plain, *given = (tensor.detach().numpy() for tensor in (queries, *saved, output_grad, lse_grad))
        query_grad = np.empty_like(plain)
        factors, scale_grad = None if scales is None else scales.detach().numpy(), np.empty(len(plain))
        for chunk in _chunks(plain):
            *sums, grad, grad_of_lse = (array[chunk] for array in given)
            arguments = np.ascontiguousarray(plain[chunk]), ctx.what.chunk(chunk), _PassSums(*sums), (grad, grad_of_lse)
            own = None if factors is None else np.ascontiguousarray(factors[chunk])
            query_grad[chunk], scale_grad[chunk] = backward(*arguments, written, own)
        sources = queries, output_grad, lse_grad, *(t for t in (scales, *ctx.columns) if t is not None)
        grads = torch.from_numpy(query_grad), None if scales is None else torch.from_numpy(scale_grad).to(scales)
        return *Once.guarded([*grads, *columns], sources), None


def _chunks(queries: Array) -> list[slice]:
    return [slice(low, low + CHUNK) for low in range(0, len(queries), CHUNK)]


# -- one pass ----------------------------------------------------------------------------------------------------------


def forward(queries: Array, what: Pass, scales: Array | None = None) -> _PassSums:  # (q, d) and (q,) float32
    """Read every record that takes part once, and return the answer for all queries."""
    q, layout = len(queries), _PassLayout(queries, what, scales)
    attention = layout.attention(queries)
    floats = attention.scratch(layout.value_width)

    def work(pieces: Iterator[Any]) -> tuple[Array, Array, Array]:
        output = np.zeros((what.num_classes or 0, q) if what.labels else (q, layout.value_width))
        top, total, scratch = np.full(q, LOWEST), np.zeros(q), _aligned(floats)
        for _, piece in pieces:
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


def run_masses(request: Request, source: SourceRecords, most: int) -> tuple[Array, Array] | None:  # (r + 1,), (q, r)
    """Return the positions between which runs of at most `most` records lie, and log Σ exp(s / T) over each run.

    None if torch has to compute them, or a score overflows. Cost q n d, as one pass over the keys.
    """
    form = pass_of(replace(request.detached, pools=False), source)
    if form is None:
        return None
    queries, scales, what, bias = form
    plain, factors = np.ascontiguousarray(queries), None if scales is None else np.ascontiguousarray(scales)
    layout = _PassLayout(plain, what, factors)
    attention, none = layout.attention(plain), np.zeros((len(plain), 0))
    floats = attention.scratch(0)

    def work(pieces: Iterator[tuple[int, Any]]) -> list[tuple[int, Array]]:
        masses, scratch = [], _aligned(floats)
        for first, piece in pieces:
            top, total = np.full(len(plain), LOWEST), np.zeros(len(plain))
            attention.forward(piece, none, top, total, scratch)
            with np.errstate(divide="ignore", over="ignore"):
                masses.append((first, np.log(total) + top / what.temperature))
        return masses

    firsts, masses = zip(*itertools.chain(*share_out(work, layout.shares(most))), strict=True)
    table = np.stack(masses, 1) + bias.numpy()[..., None]
    return None if np.isnan(table).any() else (np.append(firsts, len(what.keep)), table)


def backward(
    queries: Array,  # (q, d) float32
    what: Pass,
    sums: _PassSums,
    grads: Sequence[Array],  # gradients for output (q, v) and lse (q,), float32
    column_grads: Sequence[Array | None] = (None, None),  # (n, d) and (n, v) float32, to add to
    scales: Array | None = None,  # (q,) float32
) -> tuple[Array, Array]:  # (q, d) float32, (q,) float64
    """Return the gradients for queries and scales. Add those for keys and values to `column_grads` unless it is None.

    With c the scales and z = c s the logits, dL/dc = Σ dz s = (Σ dz (z - top) + g_lse top) / c, as Σ dz = g_lse. Keys
    have a gradient for dot products only. Each thread handles its own records, so no two write the same row.
    """
    layout, (output_grad, lse_grad) = _PassLayout(queries, what, scales), grads
    # a gradient is a difference of keys: relative to the mean query, cancellation loses no digits
    centre = queries.mean(0) if what.metric is Metric.L2 else None
    seen = queries if centre is None else queries - centre
    attention = layout.attention(seen, centre)
    floats = attention.scratch(layout.value_width)
    empty = sums.total == 0
    output_grad = np.where(empty[:, None], 0, output_grad).astype(np.float32, order="C")
    offset = np.where(empty, 0, lse_grad - (output_grad * sums.output).sum(1, dtype=np.float64)).astype(np.float32)
    inverse_total = np.where(empty, 0, 1 / np.where(empty, 1, sums.total)).astype(np.float32)
    top = np.where(empty, np.float32(np.inf), sums.top)  # so that all weights are 0
    pooled_grad = np.ascontiguousarray(output_grad.T) if what.labels else output_grad

    def work(pieces: Iterator[Any]) -> tuple[Array, Array, Array]:
        pulled, (mass, along), scratch = np.zeros(queries.shape), np.zeros((2, len(queries))), _aligned(floats)
        for _, piece in pieces:
            attention.backward(
                piece, pooled_grad, offset, inverse_total, top, pulled, mass, None if scales is None else along,
                *column_grads, scratch,
            )  # fmt: skip
        return pulled, mass, along

    parts = layout.shares()
    pulled, mass, along = (np.sum(column, axis=0) for column in zip(*share_out(work, parts), strict=True))
    if what.metric is Metric.L2:  # d/dq of -‖q - k‖² is 2 (k - q)
        pulled = 2 * (pulled - mass[:, None] * seen)
    factors = np.ones(len(queries)) if scales is None else scales
    scale_grad = (along + np.where(empty, 0, lse_grad * sums.top.astype(np.float64))) / factors
    return np.asarray(pulled * factors[:, None], np.float32), scale_grad


LOWEST = np.finfo(np.float32).min  # below every score


def _aligned(size: int) -> Array:
    """Allocate memory for one thread: (size,) float32, aligned to a cache line."""
    memory = np.empty(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


class _PassLayout:
    """Splits the records into pieces for kernel calls, and assigns pieces to threads."""

    def __init__(self, queries: Array, what: Pass, scales: Array | None = None) -> None:
        self.what, self.scales = what, scales
        first = what.columns.segments[0]
        column = first.keys if first.values is None else first.values
        self.value_width = column.shape[1] if column.ndim == 2 and what.pools else 0
        products = queries.size + len(queries) * self.value_width
        self.threads = workers(products * len(what.keep))

    def attention(self, queries: Array, centre: Array | None = None) -> Any:
        """Return the native object that holds the kernel arguments common to all pieces."""
        what = self.what
        negligible = -(25 * math.log(2) + math.log(max(1, len(what.keep))))
        return native().Attention(
            queries, what.metric.value, 1 / what.temperature, negligible, what.num_classes or 0, centre, self.scales
        )

    def shares(self, most: int | None = None) -> list[Iterator[tuple[int, Any]]]:
        """Return an iterator over `pieces` for each thread. All threads get about equal numbers of positions.

        With `most` the pieces are the same for any number of threads.
        """
        size, unit = len(self.what.keep), most or 1
        bounds = [*(size * i // self.threads // unit * unit for i in range(self.threads)), size]
        return [self.pieces(low, high, most or PIECE) for low, high in itertools.pairwise(bounds)]

    def pieces(self, low: int, high: int, most: int) -> Iterator[tuple[int, Any]]:
        """Yield the records that take part at positions from low to high - 1 in pieces of at most `most` positions.

        Each piece comes with its first position.
        """
        what, piece = self.what, native().Piece
        place = 0 if what.mask is None else int(np.count_nonzero(what.columns.live[:low]))
        for segment, start in zip(what.columns.segments, what.columns.starts.tolist(), strict=False):
            begin, end = max(low, start), min(high, start + len(segment))
            keys, values, labels = np.ascontiguousarray(segment.keys), None, None
            if what.pools and segment.values is not None and segment.values.ndim == 1:
                labels = np.ascontiguousarray(segment.values, np.int32)
            elif what.pools:
                values = keys if segment.values is None else np.ascontiguousarray(segment.values)
            for first in range(begin, end, most):
                last = min(first + most, end)
                keep, live = what.keep[first:last], what.columns.live[first:last]
                rows = places = None
                bounds = (first - start, last - start)
                if what.mask is not None or not keep.all():
                    rows = np.flatnonzero(keep) + (first - start)
                    bounds = (0, len(rows))
                if what.mask is not None:
                    places = place + np.cumsum(live)[keep] - 1
                    place += int(np.count_nonzero(live))
                yield first, piece(keys, values, labels, rows, places, what.mask, *bounds)
