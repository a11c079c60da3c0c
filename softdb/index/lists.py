"""Lists: an inverted file of 4-bit product codes, trained with FAISS, searched by one native call.

A record is coded as the centroid of its list, a rotation of words of 4 bits, one for each part of what the centroid
leaves, and a factor that makes estimates exact along it; `softdb/kernels/native/lists.cc` has the equations. Jégou et
al. 2011, "Product quantization for nearest neighbor search"; Ge et al. 2013, "Optimized product quantization", for the
rotation: the eigenvectors of the residuals' covariance, dealt to the parts so that their variances multiply to about
the same; Gao and Long 2024, "RaBitQ", arXiv 2405.12497, for the factor.
"""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.index.contract import Floats, Index, ListedIndex, Live, Numbers, Rows, faiss_module, prepared
from softdb.index.rerank import CODES
from softdb.kernels import native
from softdb.kernels.threads import by_lines, share_out, workers

POINTS_A_LIST = 40  # that a list's centroid is trained on
ROUNDS = 8  # of k-means: more changes recall by less than 0.001
TRAINED = 20_000  # residuals that rotation and words are trained on
ROUNDS_OF_FIT = 25  # of Newton's method at most
BLOCK = 16  # records whose codes stand together; words of a part
FIRST = 4  # lists that are scanned whatever the rule (kFirst of lists.cc)
KEPT = 24  # records that are scored exactly at least
LEAST_FACTOR = 0.25  # of |r|² that <r, r̂> counts at least, so that no factor is above 4
ENCODED = 1 << 22  # numbers at once: 16 MB
CODE = 127  # the largest int8
HIGHEST = 60_000  # of a float16
WIDTHS = (8, 4, 2, 1)  # numbers that share a word
PARTS = 32, 256  # of a code, at least and at most, where the width of keys allows it
NO_ROW = np.iinfo(np.uint32).max
FORM = 15  # arrays of an index file
_ORDER = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]  # records of a block by the bytes of their codes

Places = NDArray[np.uint32]
Bits = NDArray[np.uint16]


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


class Layout(NamedTuple):
    """Coded records where kernels read them: blocks of 16, list by list; the last block of a list may have spare slots."""

    sizes: Rows  # (lists,) records
    starts: Rows  # (lists + 1,) first block
    blocks: NDArray[np.uint8]  # (blocks, parts / 2, 16)
    factors: NDArray[np.float16]  # (blocks, 16)
    offsets: NDArray[np.float16]  # (blocks, 16) of l2, else (0, 16)
    rows: NDArray[np.uint32]  # (slots,) NO_ROW of spare ones
    squares: Floats  # (lists,) Σ |r|²

    @classmethod
    def of(cls, coded: Coded, lists: int, is_l2: bool) -> Layout:
        """Lay records out. Cost n."""
        coded = coded.ordered()
        sizes = np.bincount(coded.lists, minlength=lists)
        starts = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK))])
        count, slots = max(1, int(starts[-1])), _slots(sizes, starts)

        def spread(numbers: NDArray[Any], spare: int = 0) -> NDArray[Any]:
            found = np.full((count * BLOCK, *numbers.shape[1:]), spare, numbers.dtype)
            found[slots] = numbers
            return found

        blocks = spread(coded.codes).reshape(count, BLOCK, -1)[:, _ORDER].transpose(0, 2, 1)
        offsets = spread(coded.offsets).reshape(-1, BLOCK) if is_l2 else np.empty((0, BLOCK), np.float16)
        return cls(
            sizes.astype(np.int64), starts.astype(np.int64), np.ascontiguousarray(blocks),
            spread(coded.factors).reshape(-1, BLOCK), offsets, spread(coded.rows, NO_ROW),
            np.bincount(coded.lists, coded.squares, lists).astype(np.float32),
        )  # fmt: skip

    def coded(self) -> Coded:
        """The records, list by list; of |r|² the mean of their list."""
        flat = np.empty((len(self.blocks), BLOCK, self.blocks.shape[1]), np.uint8)
        flat[:, _ORDER] = self.blocks.transpose(0, 2, 1)
        slots, squares = _slots(self.sizes, self.starts), self.squares / np.maximum(self.sizes, 1)
        return Coded(
            np.repeat(np.arange(len(self.sizes)), self.sizes), flat.reshape(-1, flat.shape[2])[slots],
            self.factors.reshape(-1)[slots], self.offsets.reshape(-1)[slots if len(self.offsets) else slice(0)],
            self.rows[slots], np.repeat(squares, self.sizes).astype(np.float32),
        )  # fmt: skip

    def bits(self, keep: Live, places: Places) -> Bits:  # (size,), (slots,) -> (blocks,)
        """A bit a slot: whether it is filled, and `keep` at its place."""
        taking_part = np.append(keep, False)[np.minimum(places, len(keep))]
        return np.packbits(taking_part, bitorder="little").view(np.uint16)


class Lists(ListedIndex):
    """Inverted lists of 4-bit codes: parts / 2 + 6 bytes a record, 8 for l2. Cost: see lists.cc."""

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "records_per_match"
    filters_inside: ClassVar[bool] = True
    levels: ClassVar[tuple[int, ...]] = (3, 4, 6, 10, 16, 28, 50, 90, 160)
    looked_at = 0.1  # share of the records that a query scans, as tuned

    def __init__(self, metric: Metric, inner: Quantizer, layout: Layout | None = None) -> None:
        super().__init__(metric)
        self.inner = inner
        self.rule = Rule()
        self.slack = 0.0  # the most that rounding of factors and offsets raises a score
        self.parts = len(inner.words)
        self._pending: list[Coded] = []
        self._use(layout or Layout.of(_no_records(inner), len(inner.centroids.scales), metric is Metric.L2))

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A word for each 8, 4, 2 numbers or one, where that makes 32 to 256 parts."""
        least, most = PARTS
        fit = [parts for parts in (_parts(dim, width) for width in WIDTHS) if least <= parts <= most]
        return tuple(f"PQ{parts}x4" for parts in dict.fromkeys(fit or [min(most, _parts(dim, 1))]))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Half a byte a part, factor, offset and row."""
        return _parts_in(codes) // 2 + 8

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, the rotation, then the words."""
        faiss, d = faiss_module(), sample.shape[1]
        origin = sample.mean(0) if metric is Metric.L2 else np.zeros(d, np.float32)
        sample = np.ascontiguousarray(sample - origin)
        lists = max(1, min(lists_for(count), len(sample) // 39))
        means = faiss.Clustering(d, lists)
        means.niter, means.seed, means.max_points_per_centroid = ROUNDS, 1234, POINTS_A_LIST
        means.train(sample, faiss.IndexFlatL2(d))
        centroids = Matrix.of(faiss.vector_to_array(means.centroids).reshape(lists, d))
        some = np.ascontiguousarray(sample[:: -(-len(sample) // TRAINED)])
        residuals = some - centroids.rows[nearest_centroids(centroids.rows, some)]
        parts = _parts_in(codes)
        rotation = Matrix.of(_balanced(residuals, parts, -(-d // parts)))
        turned = np.ascontiguousarray(residuals @ rotation.rows.T)
        words = faiss.ProductQuantizer(turned.shape[1], parts, 4)
        words.cp.niter, words.cp.seed, words.cp.max_points_per_centroid = ROUNDS + 4, 1234, 1000
        words.train(turned)
        table = faiss.vector_to_array(words.centroids).reshape(parts, 16, -1).transpose(0, 2, 1)
        inner = Quantizer(rotation, centroids, np.ascontiguousarray(table, np.float32), origin.astype(np.float32), 1.0)
        if metric is Metric.L2:
            offsets = _encoded(inner, some)[2]
            inner = inner._replace(unit=float(max(np.abs(offsets).max(), 1e-30)) * 8 / HIGHEST)
        return cls(metric, inner)

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Arrays in NumPy's own format, one after the other."""
        file = io.BytesIO(data)
        try:
            arrays = [np.load(file, allow_pickle=False) for _ in range(FORM)]
        except (EOFError, OSError, MemoryError) as error:
            raise ValueError("it is cut off") from error
        *shown, rule, sizes, starts, blocks, factors, offsets, rows, squares = arrays
        turns, turn_scales, centroids, scales, words, origin, unit = shown
        inner = Quantizer(Matrix(turns, turn_scales), Matrix(centroids, scales), words, origin, float(unit))
        layout = Layout(sizes, starts, blocks, factors, offsets, rows, squares)
        _check(metric, inner, layout, rule, dim)
        index = cls(metric, inner, layout)
        *rates, index.slack, index.looked_at = map(float, rule)
        index.rule = Rule(*rates)
        return index

    def dump(self) -> NDArray[np.uint8]:
        """As `loaded` reads it."""
        inner, file = self.inner, io.BytesIO()
        rule = np.array([*self.rule, self.slack, self.looked_at])
        for array in (*inner.rotation, *inner.centroids, inner.words, inner.origin, np.array(inner.unit), rule, *self.layout):
            np.save(file, array, allow_pickle=False)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def _use(self, layout: Layout) -> None:
        """Search these records from now on."""
        inner, l2 = self.inner, self.metric is Metric.L2
        self.layout = layout
        self.filled = layout.bits(np.ones(1, np.bool_), np.where(layout.rows == NO_ROW, 1, 0).astype(np.uint32))
        table, lists = inner.centroids.rows, len(inner.centroids.scales)
        usual = np.sqrt(layout.squares.sum() / max(1, self.count))
        spreads = np.maximum(np.sqrt(layout.squares / np.maximum(layout.sizes, 1)), max(0.05 * usual, 1e-30))
        self.spreads = spreads.astype(np.float32)
        padded = np.ones((3, -(-lists // BLOCK) * BLOCK), np.float32)
        padded[0, :lists] = inner.centroids.scales * (2 if l2 else 1)
        padded[1] = 0
        padded[1, :lists] = np.einsum("ld,ld->l", table, table) if l2 else 0
        padded[2, :lists] = 1 / self.spreads
        turns = np.ones(-(-len(inner.rotation.scales) // BLOCK) * BLOCK, np.float32)
        turns[: len(inner.rotation.scales)] = inner.rotation.scales
        held = (
            inner.rotation.interleaved(), turns, inner.centroids.interleaved(), *padded, layout.starts,
            layout.blocks.reshape(len(layout.blocks), -1), layout.factors.view(np.uint16),
            layout.offsets.view(np.uint16), inner.unit, inner.words.reshape(-1, BLOCK), self.parts,
            inner.origin if l2 else inner.origin[:0],
        )  # fmt: skip
        self._native = native().Lists(len(inner.origin), *held), held  # which keeps the arrays alive

    @property
    def count(self) -> int:
        """Records that it holds."""
        return int(self.layout.sizes.sum())

    def add(self, rows: Rows, keys: NDArray[np.floating]) -> None:
        """Take records in. Cost n d (lists + parts · word)."""
        if int(rows[-1]) >= NO_ROW:
            raise BadInput(f"row {rows[-1]} is too large for an index of kind 'ivf'; it takes rows below {NO_ROW}")
        seen = prepared(keys, self.metric) - self.inner.origin
        lists, codes, offsets, factors, squares = _encoded(self.inner, seen)
        halves = offsets[:0].astype(np.float16)
        if self.metric is Metric.L2:
            whole = offsets / self.inner.unit
            halves = np.clip(whole, -HIGHEST, HIGHEST).astype(np.float16)
            rounding = self.inner.unit * float((halves - whole).max(initial=0)) + 2.0**-10 * float(squares.max())
            self.slack = max(self.slack, rounding)
        numbers = rows.astype(np.uint32)
        self._pending.append(Coded(lists, codes, factors.astype(np.float16), halves, numbers, squares))
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """Lay out what was added. Cost n."""
        if self._pending:
            whole = zip(self.layout.coded(), *self._pending, strict=True)
            self._pending = []
            self._lay_out(Coded(*map(np.concatenate, whole)))

    def keep_only(self, rows: Rows) -> None:
        """Remove all other records. Cost n."""
        keep = np.zeros(self.covered, np.bool_)
        keep[rows] = True
        coded = self.layout.coded()
        self._lay_out(coded.only(keep[coded.rows]))

    def _lay_out(self, coded: Coded) -> None:
        self._use(Layout.of(coded, len(self.inner.centroids.scales), self.metric is Metric.L2))

    def copy(self) -> Index:
        """The same arrays, which are replaced and never changed."""
        twin = copy.copy(self)
        twin.report, twin._pending = dict(self.report), []
        return twin

    def kept_for(self, k: int) -> int:
        """Records that are scored exactly to find k."""
        return max(KEPT, self.fetch_k * k)

    def effort_for(self, k: int) -> int:
        """Effort to find k with: the rule takes the k-th best into account."""
        return self.effort

    def codes_at(self, effort: int) -> float:
        """About how many codes a search compares, as tuned."""
        return self.looked_at * self.count

    def find(self, queries: Floats, c: int, rows: Rows | None = None, effort: int | None = None) -> Rows:
        """By codes alone."""
        asked, allowed = np.ascontiguousarray(queries), self._bits_of(rows)
        return self.scan(asked, c, None, self.layout.rows, allowed, min(c, self.tuned_for), c, effort)[0]

    def _bits_of(self, rows: Rows | None) -> Bits:
        if rows is None:
            return self.filled
        keep = np.zeros(self.covered, np.bool_)
        keep[rows] = True
        return self.layout.bits(keep, self.layout.rows)

    def scan(
        self,
        queries: Floats,  # (q, d) prepared
        k: int,
        keys: Any,  # the stored column; None: the best by codes
        places: Places,  # (slots,) positions
        allowed: Bits,  # (blocks,) of `Layout.bits`
        certain: int,
        kept: int,
        effort: int | None = None,
    ) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
        """The best k, their scores, and whether there were k for every query and all scores are numbers."""
        found, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        rule = np.array([*self.rule, self.effort if effort is None else effort], np.float64)
        given = allowed, places, keys, CODES[self.metric], rule, certain, kept
        loop, lists, q = native().search_lists, self._native[0], len(queries)
        threads = min(q, workers(q * (kept + len(self.spreads)) * queries.shape[1])) if q > 1 else 1
        if threads == 1:  # which feels microseconds
            return found, scores, loop(lists, queries, *given, found, scores) >= 0
        parts = [slice(q * i // threads, q * (i + 1) // threads) for i in range(threads)]
        scanned = share_out(lambda part: loop(lists, queries[part], *given, found[part], scores[part]), parts)
        return found, scores, min(scanned) >= 0

    def fit(self, queries: Floats, truth: Rows, rows: Rows | None = None) -> None:
        """Fit the rule. Poisson regression of how many of a query's nearest each list holds, given its records."""
        l2, table, (q, k) = self.metric is Metric.L2, self.inner.centroids.rows, truth.shape
        asked = queries - self.inner.origin if l2 else queries
        squares = np.einsum("qd,qd->q", asked, asked)[:, None]
        scores = asked @ table.T
        if l2:
            scores = 2 * scores - np.square(table).sum(1)
        sides = 2 * np.sqrt(np.maximum(squares - scores, 1e-30)) if l2 else np.sqrt(np.maximum(squares, 1e-30))
        allowed = self._bits_of(rows)
        edge = self.scan(queries, k, None, self.layout.rows, allowed, k, max(k, KEPT), 0)[1][:, -1:]
        own = np.full(self.covered + 1, -1)
        coded = self.layout.coded()
        own[coded.rows] = coded.lists
        lists, lines = own[truth], np.arange(q)[:, None]
        counts, deviations = np.zeros(scores.shape, np.float32), scores.std(1, keepdims=True)
        np.add.at(counts, (np.broadcast_to(lines, lists.shape)[lists >= 0], lists[lists >= 0]), 1)
        there = np.ones(scores.shape, np.bool_)
        first = min(FIRST, scores.shape[1] - 1)
        there[lines, np.argpartition(-scores, first, axis=1)[:, :first]] = False  # which are scanned whatever the rule
        there &= (self.layout.sizes > 0) & np.isfinite(edge) & (deviations > 0)
        if not counts[there].any():
            return
        with np.errstate(divide="ignore", invalid="ignore"):
            away = (scores - scores.mean(1, keepdims=True)) / deviations
            gaps = (scores - edge) / sides / self.spreads
        facts = np.stack([gaps[there], away[there], np.square(away[there])], 1).astype(np.float64)
        records = np.broadcast_to(np.log(np.maximum(self.layout.sizes, 1)), scores.shape)[there]
        self.rule = _poisson(facts, counts[there], records)
        # from a hundred times the usual share of matches to a hundred thousandth of it
        self.effort_least, self.effort_most = max(1, self.count // (100 * k)), 100_000 * self.count // k

    @property
    def centroids(self) -> Floats:
        """(lists, d)."""
        return self.inner.centroids.rows + self.inner.origin

    def members(self) -> tuple[Rows, Rows]:
        """As they lie."""
        starts = np.concatenate([[0], np.cumsum(self.layout.sizes)]).astype(np.int64)
        return self.layout.rows[_slots(self.layout.sizes, self.layout.starts)].astype(np.int64), starts

    def turned(self, vectors: Floats) -> Floats:
        """By the rotation."""
        return vectors @ self.inner.rotation.rows.T

    def near_in_lists(
        self, queries: Floats, order: Rows, nearness: Floats, count: int
    ) -> tuple[Rows, Floats, Numbers]:
        """By codes, of queries that are not rounded."""
        turned = self.turned(queries - self.inner.origin if self.metric is Metric.L2 else queries)
        found, codes = np.empty((len(queries), count), np.int64), np.empty((len(queries), count), np.float32)
        steps, nearness = np.empty(len(queries)), np.ascontiguousarray(nearness, np.float32)

        def given(part: slice) -> tuple[Any, ...]:
            asked = turned[part], order[part], nearness[part], self.filled, self.layout.rows
            return self._native[0], *asked, found[part], codes[part], steps[part]

        by_lines(native().scan_lists, given, len(queries), order.size * self.count // len(self.spreads) * self.parts)
        rounding = steps * (0.5 * self.parts * float(self.layout.factors.max(initial=0))) + self.slack
        return found, codes, rounding

    def code_errors(self, which: int, keys: Floats) -> Floats:
        """Cost m d parts · word."""
        layout, inner = self.layout, self.inner
        blocks = layout.blocks[layout.starts[which] : layout.starts[which + 1]]
        codes = np.empty((len(blocks), BLOCK, blocks.shape[1]), np.uint8)
        codes[:, _ORDER] = blocks.transpose(0, 2, 1)
        pairs = codes.reshape(-1, codes.shape[2])[: len(keys)].astype(np.int32)
        which_words = np.stack([pairs & 15, pairs >> 4], 2).reshape(len(keys), -1) + 16 * np.arange(self.parts)
        words = torch.from_numpy(inner.words.transpose(0, 2, 1).reshape(-1, inner.words.shape[1]))
        guess = words[torch.from_numpy(which_words)].view(len(keys), -1).numpy()
        factors = layout.factors[layout.starts[which] : layout.starts[which + 1]].reshape(-1)[: len(keys), None]
        stands_for = self.centroids[which] + (factors.astype(np.float32) * guess) @ inner.rotation.rows
        return keys - stands_for


def lists_for(count: int) -> int:
    """About 2 √n lists, a power of two."""
    return int(1 << max(0, round(np.log2(2 * np.sqrt(max(count, 1))))))


def _parts(dim: int, width: int) -> int:
    """Parts of a code, a multiple of 8, with a word for so many numbers at most."""
    return -(-dim // (8 * width)) * 8


def _parts_in(codes: str) -> int:
    return int(codes.removeprefix("PQ").partition("x")[0])


def _slots(sizes: Rows, starts: Rows) -> Rows:  # (lists,), (lists + 1,) -> (n,)
    """Slots of records that stand list by list."""
    first = starts[:-1] * BLOCK - np.concatenate([[0], np.cumsum(sizes)[:-1]])
    found: Rows = np.arange(int(sizes.sum())) + np.repeat(first, sizes)
    return found


def _check(metric: Metric, inner: Quantizer, layout: Layout, rule: NDArray[Any], dim: int | None) -> None:
    """Raise ValueError where arrays do not fit together: kernels do not look."""
    (turned, d), lists, (parts, word, _) = inner.rotation.numbers.shape, len(inner.centroids.scales), inner.words.shape
    blocks = len(layout.blocks)
    forms = {
        "rotation": (inner.rotation.numbers, np.int8, (parts * word, d)),
        "its scales": (inner.rotation.scales, np.float32, (turned,)),
        "centroids": (inner.centroids.numbers, np.int8, (lists, d)),
        "their scales": (inner.centroids.scales, np.float32, (lists,)),
        "words": (inner.words, np.float32, (parts, word, BLOCK)),
        "origin": (inner.origin, np.float32, (d,)),
        "rule": (rule, np.float64, (len(Rule._fields) + 2,)),
        "sizes": (layout.sizes, np.int64, (lists,)),
        "starts": (layout.starts, np.int64, (lists + 1,)),
        "codes": (layout.blocks, np.uint8, (blocks, parts // 2, BLOCK)),
        "factors": (layout.factors, np.float16, (blocks, BLOCK)),
        "offsets": (layout.offsets, np.float16, (blocks if metric is Metric.L2 else 0, BLOCK)),
        "rows": (layout.rows, np.uint32, (blocks * BLOCK,)),
        "squares": (layout.squares, np.float32, (lists,)),
    }
    for name, (array, dtype, shape) in forms.items():
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"its {name} are {array.dtype} {array.shape}; expected {np.dtype(dtype)} {shape}")
    if dim is not None and d != dim:
        raise ValueError(f"it is of keys {d} wide")
    ends = np.concatenate([[0], np.cumsum(-(-layout.sizes // BLOCK))])
    if parts % 8 or not lists or (layout.sizes < 0).any() or (layout.starts != ends).any() or blocks < max(1, ends[-1]):
        raise ValueError("its lists do not fit together")


def _no_records(inner: Quantizer) -> Coded:
    halves = np.empty(0, np.float16)
    codes = np.empty((0, len(inner.words) // 2), np.uint8)
    return Coded(np.empty(0, np.int64), codes, halves, halves, np.empty(0, np.uint32), np.empty(0, np.float32))


def _poisson(facts: NDArray[np.float64], counts: Floats, records: Floats) -> Rule:  # (m, 3), (m,), (m,)
    """The rule of the greatest likelihood: counts ~ Poisson(exp(facts · weights + constant + records)).

    By Newton's method, the step halved until the likelihood rises (McCullagh and Nelder 1989, section 2.5).
    """
    middle, spread = facts.mean(0), facts.std(0) + 1e-9
    given = np.column_stack([np.ones(len(facts)), (facts - middle) / spread])

    def likelihood(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        logs = np.minimum(given @ weights + records, 50)
        expected = np.exp(logs)
        return float((counts * logs - expected).sum()), expected

    weights = np.array([np.log(max(counts.sum(), 1) / np.exp(records).sum()), 0, 0, 0])
    reached, expected = likelihood(weights)
    for _ in range(ROUNDS_OF_FIT):
        curvature = (given * expected[:, None]).T @ given + 1e-9 * np.eye(4)
        step = np.linalg.solve(curvature, given.T @ (counts - expected))
        for halving in range(ROUNDS_OF_FIT):
            likely, moved = likelihood(weights + step / 2**halving)
            if likely > reached:
                break
        else:
            break
        weights, gained, (reached, expected) = weights + step / 2**halving, likely - reached, (likely, moved)
        if gained < 1e-6 * abs(reached):
            break
    rates = weights[1:] / spread
    if not np.isfinite(weights).all() or rates[0] <= 0:
        return Rule(constant=float(np.log(max(counts.sum(), 1) / np.exp(records).sum())))
    return Rule(*map(float, rates), float(weights[0] - rates @ middle))


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


def nearest_centroids(centroids: Floats, keys: Floats) -> Rows:  # (l, d), (n, d) -> (n,)
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
    lists = nearest_centroids(centroids, keys)
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
