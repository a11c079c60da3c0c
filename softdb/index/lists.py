"""Lists: an inverted file of 4-bit product codes, trained with FAISS, searched by one native call.

A record is coded as the centroid of its list, a rotation of words of 4 bits, one for each part of what the centroid
leaves, and a factor that makes estimates exact along it; `softdb/kernels/native/lists.cc` has the equations. Jégou et
al. 2011, "Product quantization for nearest neighbor search"; Ge et al. 2013, "Optimized product quantization", for the
rotation: the eigenvectors of the residuals' covariance, dealt to the parts so that their variances multiply to about
the same; Gao and Long 2024, "RaBitQ", arXiv 2405.12497, for the factor.
"""

from __future__ import annotations

import io
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Rows, Selected, faiss_module, prepared
from softdb.index.rerank import CODES
from softdb.kernels import native
from softdb.kernels.threads import share_out, workers

POINTS_A_LIST = 40  # that a list's centroid is trained on
ROUNDS = 8  # of k-means: more changes recall by less than 0.001
TRAINED = 40_000  # residuals that rotation and words are trained on
BLOCK = 16  # records whose codes stand together
LEAST_FACTOR = 0.25  # of |r|² that <r, r̂> counts at least, so that no factor is above 4
ENCODED = 1 << 22  # numbers at once: 16 MB
MOST_EFFORT = 1 << 30
CODE = 127  # the largest int8
WIDTHS = (8, 4, 2, 1)  # numbers that share a word
PARTS = 32, 256  # of a code, at least and at most, where the width of keys allows it
_ORDER = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]  # records of a block by the bytes of their codes


class Rule(NamedTuple):
    """The logarithm of how many of a query's matches a record of a list is, by the list's score (lists.cc, step 3)."""

    gap: float = 1.0
    linear: float = 0.0
    square: float = 0.0
    constant: float = 0.0


class Matrix(NamedTuple):
    """A matrix of int8, rows (r, d) each with a scale: what kernels multiply queries by."""

    numbers: NDArray[np.int8]  # (r, d)
    scales: Floats  # (r,)

    @classmethod
    def of(cls, rows: Floats) -> Matrix:  # (r, d)
        """The nearest such matrix."""
        scales = np.abs(rows).max(1, initial=0) / CODE
        scales[scales == 0] = 1
        return cls(np.rint(rows / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    @property
    def rows(self) -> Floats:  # (r, d)
        """The matrix in float32."""
        return self.numbers * self.scales[:, None]

    def interleaved(self) -> NDArray[np.uint8]:  # (groups, …)
        """As kernels read it: 128 added, 16 rows together, and of these four numbers each."""
        rows, width = self.numbers.shape
        padded = np.full((-(-rows // BLOCK) * BLOCK, -(-width // 4) * 4), 128, np.uint8)
        padded[:rows, :width] = self.numbers.view(np.uint8) ^ 128
        groups = padded.reshape(-1, BLOCK, padded.shape[1] // 4, 4).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(groups).reshape(len(groups), -1)


class Quantizer(NamedTuple):
    """What records are coded by."""

    rotation: Matrix  # (parts · word, d)
    centroids: Matrix  # (lists, d)
    words: Floats  # (parts, word, 16)
    origin: Floats  # (d,) that keys are seen from: their mean for l2, else 0
    unit: float  # of offsets


class Coded(NamedTuple):
    """Records by list, in the order in which they came."""

    lists: Rows  # (n,)
    codes: NDArray[np.uint8]  # (n, parts / 2)
    factors: NDArray[np.float16]  # (n,)
    offsets: NDArray[np.float16]  # (n,) of l2, else (0,)
    rows: NDArray[np.uint32]  # (n,)
    squares: Floats  # (n,) |r|²

    def ordered(self) -> Coded:
        """List by list."""
        order = np.argsort(self.lists, kind="stable")
        return Coded(*(part[order] if len(part) else part for part in self))

    def only(self, keep: NDArray[np.bool_]) -> Coded:
        """Some of them."""
        return Coded(*(part[keep] if len(part) else part for part in self))


class Lists(Index):
    """Inverted lists of 4-bit codes: parts / 2 + 6 bytes a record, 8 for l2. Cost: see lists.cc."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "records_per_match"
    effort_most = MOST_EFFORT

    def __init__(self, metric: Metric, inner: Quantizer) -> None:
        super().__init__(metric, inner)
        self.rule = Rule()
        self.count = 0
        self._pending: list[Coded] = []
        self._lay_out(_no_records(inner))

    @property
    def is_l2(self) -> bool:
        return self.metric is Metric.L2

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A word for each 8, 4, 2 numbers or one, where that makes 32 to 256 parts."""
        least, most = PARTS
        fit = [parts for parts in (_parts(dim, width) for width in WIDTHS) if least <= parts <= most]
        return tuple(f"PQ{parts}x4" for parts in dict.fromkeys(fit or [min(most, _parts(dim, 1))]))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Half a byte a part, factor, offset and row."""
        return _named(codes) // 2 + 8

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, the rotation, then the words."""
        faiss, d = faiss_module(), sample.shape[1]
        origin = sample.mean(0) if metric is Metric.L2 else np.zeros(d, np.float32)
        sample = sample - origin
        lists = max(1, min(lists_for(count), len(sample) // 39))
        means = faiss.Clustering(d, lists)
        means.niter, means.seed, means.max_points_per_centroid = ROUNDS, 1234, POINTS_A_LIST
        means.train(sample, faiss.IndexFlatL2(d))
        centroids = Matrix.of(faiss.vector_to_array(means.centroids).reshape(lists, d))
        some = sample[:: -(-len(sample) // TRAINED)]
        residuals = some - centroids.rows[_nearest(centroids.rows, some)]
        parts = _named(codes)
        rotation = Matrix.of(_balanced(residuals, parts, -(-d // parts)))
        turned = residuals @ rotation.rows.T
        words = faiss.ProductQuantizer(turned.shape[1], parts, 4)
        words.cp.niter, words.cp.seed, words.cp.max_points_per_centroid = ROUNDS + 4, 1234, 1000
        words.train(np.ascontiguousarray(turned))
        table = faiss.vector_to_array(words.centroids).reshape(parts, 16, -1).transpose(0, 2, 1)
        quantizer = Quantizer(rotation, centroids, np.ascontiguousarray(table, np.float32), origin, 1.0)
        if metric is Metric.L2:
            offsets = _encoded(quantizer._replace(unit=0.0), some)[2]
            quantizer = quantizer._replace(unit=float(max(np.abs(offsets).max(), 1e-30) / 8192))
        return cls(metric, quantizer)

    def parameters(self, effort: int, selector: Any) -> Any:
        raise NotImplementedError

    def add(self, rows: Rows, keys: NDArray[np.floating]) -> None:
        """Take records in; `seal` lays them out."""
        seen = prepared(keys, self.metric) - self.inner.origin
        lists, codes, offsets, factors, squares = _encoded(self.inner, seen)
        halves = np.clip(offsets / self.inner.unit, -60_000, 60_000).astype(np.float16) if self.is_l2 else offsets[:0]
        self._pending.append(
            Coded(lists, codes, factors.astype(np.float16), halves.astype(np.float16), rows.astype(np.uint32), squares)
        )
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """Lay out what was added."""
        if self._pending:
            whole = [self.coded(), *self._pending]
            self._pending = []
            self._lay_out(Coded(*(np.concatenate(part) for part in zip(*whole, strict=True))))

    def _lay_out(self, coded: Coded) -> None:
        """Blocks of 16 records, list by list, and what kernels read of them."""
        inner, coded = self.inner, coded.ordered()
        count, pairs = len(inner.centroids.scales), len(inner.words) // 2
        sizes = np.bincount(coded.lists, minlength=count)
        self.count, self.sizes = len(coded.lists), sizes
        self.starts = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK))]).astype(np.int64)
        first = self.starts[:-1] * BLOCK - np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.slots = np.arange(self.count) + np.repeat(first, sizes)  # of the records
        blocks = max(1, int(self.starts[-1]))
        flat = np.zeros((blocks * BLOCK, pairs), np.uint8)
        flat[self.slots] = coded.codes
        self.blocks = np.ascontiguousarray(flat.reshape(blocks, BLOCK, pairs)[:, _ORDER].transpose(0, 2, 1))
        self.factors = np.zeros((blocks, BLOCK), np.float16)
        self.factors.reshape(-1)[self.slots] = coded.factors
        self.offsets = np.zeros((blocks if self.is_l2 else 0, BLOCK), np.float16)
        if self.is_l2:
            self.offsets.reshape(-1)[self.slots] = coded.offsets
        self.rows = np.full(blocks * BLOCK, np.iinfo(np.uint32).max, np.uint32)
        self.rows[self.slots] = coded.rows
        self.squares = np.bincount(coded.lists, coded.squares, count)  # Σ |r|² of each list
        self.filled = self.bits(np.ones(self.count, np.bool_))
        self._bind()

    def _bind(self) -> None:
        inner = self.inner
        padded = -(-len(inner.centroids.scales) // BLOCK) * BLOCK
        centroids = inner.centroids.rows
        gain = 2.0 if self.is_l2 else 1.0
        scales, lengths, spreads = np.ones(padded, np.float32), np.zeros(padded, np.float32), np.ones(padded, np.float32)
        scales[: len(centroids)] = gain * inner.centroids.scales
        if self.is_l2:
            lengths[: len(centroids)] = np.einsum("ld,ld->l", centroids, centroids)
        self.spreads = np.sqrt(self.squares / np.maximum(self.sizes, 1))
        usual = max(float(np.sqrt(self.squares.sum() / max(1, self.count))), 1e-30)
        self.spreads = np.maximum(self.spreads, 0.05 * usual).astype(np.float32)
        spreads[: len(centroids)] = 1 / self.spreads
        turns = np.ones(-(-len(inner.rotation.scales) // BLOCK) * BLOCK, np.float32)
        turns[: len(inner.rotation.scales)] = inner.rotation.scales
        self._held = (
            inner.rotation.interleaved(), turns, inner.centroids.interleaved(), scales, lengths, spreads, self.starts,
            self.blocks.reshape(len(self.blocks), -1), self.factors.view(np.uint16), self.offsets.view(np.uint16),
            float(inner.unit), inner.words.reshape(-1, 16), len(inner.words),
            inner.origin if self.is_l2 else inner.origin[:0],
        )  # fmt: skip
        self._native = native().Lists(len(inner.origin), *self._held)

    def bits(self, keep: NDArray[np.bool_]) -> NDArray[np.uint16]:  # (count,) -> (blocks,)
        """A bit a slot, for records in the order of the slots."""
        slots = np.zeros(len(self.rows), np.bool_)
        slots[self.slots] = keep
        return np.packbits(slots, bitorder="little").view(np.uint16)

    def coded(self) -> Coded:
        """The records, list by list."""
        flat = np.empty((len(self.blocks), BLOCK, self.blocks.shape[1]), np.uint8)
        flat[:, _ORDER] = self.blocks.transpose(0, 2, 1)
        spread = self.squares / np.maximum(self.sizes, 1)
        return Coded(
            np.repeat(np.arange(len(self.sizes)), self.sizes),
            flat.reshape(-1, flat.shape[2])[self.slots],
            self.factors.reshape(-1)[self.slots],
            self.offsets.reshape(-1)[self.slots] if self.is_l2 else self.offsets.reshape(-1),
            self.rows[self.slots],
            np.repeat(spread, self.sizes).astype(np.float32),
        )

    def search(
        self,
        queries: Floats,  # (q, d) prepared
        k: int,
        column: Any,  # of the keys; None: by codes alone
        places: NDArray[np.uint32],  # (slots,) positions
        allowed: NDArray[np.uint16],  # (blocks,) as `bits`
        nearest: int,
        kept: int,
        effort: float,
    ) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
        """The best k, their scores, and whether there were k for every query."""
        found, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        loop, rule = native().search_lists, np.array([*self.rule, effort])
        work = len(queries) * (kept + len(self.sizes)) * queries.shape[1]
        count = min(len(queries), workers(work))
        if count <= 1:
            scanned = loop(
                self._native, queries, allowed, places, column, CODES[self.metric], rule, nearest, kept, found, scores
            )
            return found, scores, scanned >= 0

        def run(part: slice) -> int:
            return loop(  # type: ignore[no-any-return]
                self._native, queries[part], allowed, places, column, CODES[self.metric], rule, nearest, kept,
                found[part], scores[part],
            )  # fmt: skip

        parts = [slice(len(queries) * i // count, len(queries) * (i + 1) // count) for i in range(count)]
        return found, scores, all(scanned >= 0 for scanned in share_out(run, parts))


def lists_for(count: int) -> int:
    """About 2 √n lists, a power of two."""
    return int(1 << max(0, round(np.log2(2 * np.sqrt(max(count, 1))))))


def _parts(dim: int, width: int) -> int:
    """Parts of a code, a multiple of 8, with a word for so many numbers at most."""
    return -(-dim // (8 * width)) * 8


def _named(codes: str) -> int:
    return int(codes.removeprefix("PQ").partition("x")[0])


def _no_records(inner: Quantizer) -> Coded:
    halves = np.empty(0, np.float16)
    codes = np.empty((0, len(inner.words) // 2), np.uint8)
    return Coded(np.empty(0, np.int64), codes, halves, halves, np.empty(0, np.uint32), np.empty(0, np.float32))


def _balanced(residuals: Floats, parts: int, word: int) -> Floats:  # (m, d) -> (parts · word, d)
    """A rotation whose parts have about equal products of variances: each axis goes to the part that has least."""
    values, axes = np.linalg.eigh((residuals.T @ residuals).astype(np.float64) / len(residuals))
    logs = np.log(np.maximum(values[::-1], 1e-12 * max(values[-1], 1e-30)))
    logs -= logs.min() - 1e-3
    sums, held = np.zeros(parts), np.zeros(parts, np.int64)
    found = np.zeros((parts * word, len(values)), np.float32)
    for axis, log in zip(axes.T[::-1], logs, strict=True):
        part = int(np.argmin(np.where(held < word, sums, np.inf)))
        found[part * word + held[part]] = axis
        sums[part] += log
        held[part] += 1
    return found


def _nearest(centroids: Floats, keys: Floats) -> Rows:  # (l, d), (n, d) -> (n,)
    """The centroid that is nearest to each key."""
    table, half = torch.from_numpy(centroids), torch.from_numpy(np.square(centroids).sum(1) / 2)
    size = max(1, ENCODED // len(centroids))
    parts = [torch.addmm(half, part, table.T, beta=-1).argmax(1) for part in torch.from_numpy(keys).split(size)]
    return torch.cat(parts).numpy() if parts else np.empty(0, np.int64)


def _encoded(
    inner: Quantizer, keys: Floats
) -> tuple[Rows, NDArray[np.uint8], Floats, Floats, Floats]:  # (n, d) -> (n,), (n, parts / 2), (n,), (n,), (n,)
    """Lists, codes, offsets, factors and |r|² of keys seen from the origin."""
    centroids, turn = inner.centroids.rows, torch.from_numpy(inner.rotation.rows.T.copy())
    lists = _nearest(centroids, keys)
    words = torch.from_numpy(inner.words)  # (parts, word, 16)
    parts, word, _ = words.shape
    half, outs = words.square().sum(1, keepdim=True) / 2, []
    size = max(1, ENCODED // (parts * 16))
    for low in range(0, len(keys), size):
        own = centroids[lists[low : low + size]]
        residual = torch.from_numpy(keys[low : low + size] - own)
        turned = (residual @ turn).view(-1, parts, word)
        best = torch.baddbmm(half, turned.transpose(0, 1), words, beta=-1).argmax(2)  # (parts, n)
        guess = words.transpose(1, 2)[torch.arange(parts)[:, None], best].transpose(0, 1)  # (n, parts, word)
        code = best.T.to(torch.uint8)
        square, along = residual.square().sum(1), (turned * guess).sum((1, 2))
        factor = square / torch.maximum(along, LEAST_FACTOR * square).clamp(min=1e-30)
        factor[square == 0] = 0
        central = (torch.from_numpy(own) @ turn * guess.flatten(1)).sum(1)  # <c, Rᵀ w>
        outs.append((code[:, 0::2] | code[:, 1::2] << 4, 2 * factor * central + square, factor, square))
    codes, offsets, factors, squares = (torch.cat(part).numpy() for part in zip(*outs, strict=True))
    return lists, codes, offsets, factors, squares
