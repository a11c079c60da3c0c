"""Lists: an inverted file of 4-bit codes of our own, searched by one native call. The index of kind "ivf" on the CPU.

`quantizer` has how records are coded, `rule` which lists a query scans, `softdb/kernels/native/lists.cc` the search.
"""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.index.contract import Floats, Index, Rows, prepared
from softdb.index.quantizer import (
    APART,
    BLOCK,
    GAIN,
    HIGHEST,
    NO_ROW,
    Allowed,
    CodeBlocks,
    Coded,
    Matrix,
    Places,
    Quantizer,
    nearest_centroids,
    sketch_of,
)  # fmt: skip
from softdb.index.rerank import CODES
from softdb.index.rule import MOSTLY, Rule, fitted
from softdb.kernels import native
from softdb.kernels.threads import by_lines

LEAST = 24  # candidates that are scored exactly at least
JUMP = 4  # times as long as a byte of codes takes one of a key that lies anywhere
WIDTHS = (8, 4, 2, 1)  # numbers that share a word
PARTS = 32, 256  # of a code, at least and at most, where the width of keys allows it
FORM = 23  # arrays of an index file


class Among(NamedTuple):
    """The records that a scan may return, and where their keys are."""

    keys: Any  # the stored column; None: the best by their codes are returned, with estimates
    places: Places  # (slots,) positions, or whatever names a record
    allowed: Allowed
    share: float = 1.0  # of the records that the index holds


class Lists(Index):
    """Inverted lists of 4-bit codes: parts / 2 + 6 bytes a record, 8 for l2; and about d / 8 + 2 of coarser codes, 2
    more for l2, by which estimates draw. Cost: see lists.cc and draw.cc.
    """

    kind: ClassVar[str] = "ivf"
    effort_name: ClassVar[str] = "records_per_match"
    filters_inside: ClassVar[bool] = True
    levels: ClassVar[tuple[int, ...]] = (3, 4, 6, 10, 16, 28, 50, 90, 160)

    def __init__(self, metric: Metric, inner: Quantizer, sketch: Quantizer, layout: CodeBlocks | None = None) -> None:
        super().__init__(metric, inner)
        self.sketch = sketch  # of the coarser codes, by which estimates draw
        self.rule = Rule()
        self.parts = len(inner.words)
        self._pending: list[Coded] = []
        self._use(layout or CodeBlocks.of(_no_records(inner, sketch), len(inner.centroids.scales), metric is Metric.L2))

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A word for each 8, 4, 2 numbers or one, where that makes 32 to 256 parts."""
        least, most = PARTS
        fit = [parts for parts in (_parts(dim, width) for width in WIDTHS) if least <= parts <= most]
        return tuple(f"PQ{parts}x4" for parts in dict.fromkeys(fit or [min(most, _parts(dim, 1))]))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Half a byte a part, factor, offset and row; coarser codes, two bytes of theirs and an offset."""
        return _parts_in(codes) // 2 + 8 + sketch_of(dim)[1] // 2 + 4

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, the rotation, then the words."""
        lists = max(1, min(lists_for(count), len(sample) // 39))
        inner = Quantizer.train(sample, lists, _parts_in(codes), metric is Metric.L2)
        return cls(metric, inner, inner.sketched(sample, metric is Metric.L2))

    @classmethod
    def loaded(cls, metric: Metric, data: NDArray[np.uint8], dim: int | None) -> Index:
        """Arrays in NumPy's own format, one after the other."""
        file = io.BytesIO(data.tobytes())
        try:
            arrays = [np.load(file, allow_pickle=False) for _ in range(FORM)]
        except (EOFError, OSError, MemoryError) as error:
            raise ValueError("it is cut off") from error
        turns, turn_scales, centroids, scales, words, origin, units, *sketched, rule = arrays[:11]
        layout = CodeBlocks(*arrays[11:])
        if units.shape != (4,):
            raise ValueError("an earlier version made it")
        inner = Quantizer(Matrix(turns, turn_scales), Matrix(centroids, scales), words, origin, *units[:2].tolist())
        sketch = Quantizer(Matrix(*sketched[:2]), inner.centroids, sketched[2], origin, *units[2:].tolist())
        _check(metric, (inner, sketch), layout, rule, dim)
        index = cls(metric, inner, sketch, layout)
        index.rule = Rule(*map(float, rule))
        return index

    def dump(self) -> NDArray[np.uint8]:
        """As `loaded` reads it."""
        inner, sketch, file = self.inner, self.sketch, io.BytesIO()
        units = np.array([inner.unit, inner.error_step, sketch.unit, sketch.error_step])
        trained = *inner.rotation, *inner.centroids, inner.words, inner.origin, units
        for array in (*trained, *sketch.rotation, sketch.words, np.array(self.rule), *self.layout):
            np.save(file, array, allow_pickle=False)
        return np.frombuffer(file.getbuffer(), np.uint8)

    def _use(self, layout: CodeBlocks) -> None:
        """Search these records from now on."""
        inner, l2 = self.inner, self.metric is Metric.L2
        self.layout = layout
        self.filled = layout.allowed(np.ones(1, np.bool_), np.where(layout.rows == NO_ROW, 1, 0).astype(np.uint32))
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
        self.native, self._held = native().Lists(len(inner.origin), *held), held  # which keeps the arrays alive

    @property
    def count(self) -> int:
        """Records that it holds."""
        return int(self.layout.sizes.sum())

    def add(self, rows: Rows, keys: NDArray[np.floating]) -> None:
        """Take records in. Cost n d (lists + parts · word)."""
        if int(rows[-1]) >= NO_ROW:
            raise BadInput(f"row {rows[-1]} is too large for an index of kind 'ivf'; it takes rows below {NO_ROW}")
        seen = prepared(keys, self.metric) - self.inner.origin
        lists = nearest_centroids(self.inner.centroids.rows, seen)
        fine, coarse = self.inner.coded(seen, lists), self.sketch.coded(seen, lists)
        errors, halves = np.ceil(coarse.errors / self.sketch.error_step), list[NDArray[np.float16]]()
        for offsets, unit in ((fine.offsets(), self.inner.unit), (coarse.offsets(1.0), self.sketch.unit)):
            in_units = offsets / unit if self.metric is Metric.L2 else np.zeros(len(rows), np.float32)
            halves.append(np.clip(in_units, -HIGHEST, HIGHEST).astype(np.float16))
        errors[~(errors < APART) | (np.abs(in_units) > HIGHEST)] = APART
        gains = np.rint(GAIN * np.maximum(coarse.factors, 1)).astype(np.uint8)
        self._pending.append(
            Coded(
                lists, fine.codes, fine.factors.astype(np.float16), halves[0], rows.astype(np.uint32), fine.squares,
                1.0001 * np.sqrt(fine.squares), coarse.codes, gains, errors.astype(np.uint8), halves[1],
            )
        )  # fmt: skip
        self.covered = int(rows[-1]) + 1
        self.longest = self.reach = None

    def seal(self) -> None:
        """Lay out what was added. Cost n."""
        if self._pending:
            columns = zip(self.layout.coded(), *self._pending, strict=True)
            self._pending = []
            self._lay_out(Coded(*map(np.concatenate, columns)))

    def keep_only(self, rows: Rows) -> None:
        """Remove all other records. Cost n."""
        keep = np.zeros(self.covered, np.bool_)
        keep[rows] = True
        coded = self.layout.coded()
        self._lay_out(coded.take(keep[coded.rows]))

    def _lay_out(self, coded: Coded) -> None:
        self._use(CodeBlocks.of(coded, len(self.inner.centroids.scales), self.metric is Metric.L2))

    def copy(self) -> Index:
        """The same arrays, which are replaced and never changed."""
        twin = copy.copy(self)
        twin.report, twin._pending = dict(self.report), []
        return twin

    def kept_for(self, k: int) -> int:
        """Records that are scored exactly to find k."""
        return max(LEAST, self.fetch_k * k)

    def cost(self, queries: Floats, k: int, effort: int) -> float:
        """Bytes that a query reads: codes, and keys that are scored exactly, which lie apart from each other."""
        places, scores = np.empty((len(queries), 1), np.int64), np.empty((len(queries), 1), np.float32)
        candidates = self.kept_for(k)
        given = *self.filled, self.layout.rows, None, CODES[self.metric], *self.rule.of_kernels(effort, 1.0)
        scanned: int = abs(native().search_lists(self.native, queries, *given, k, candidates, places, scores))
        return float(scanned / len(queries) * (self.parts / 2 + 4) + JUMP * candidates * queries.shape[1] * 4)

    def find(self, queries: Floats, c: int, rows: Rows | None = None, effort: int | None = None) -> Rows:
        """By codes alone."""
        among = Among(None, self.layout.rows, self._allowed(rows), 1.0 if rows is None else len(rows) / self.count)
        return self.scan(np.ascontiguousarray(queries), c, among, min(c, self.tuned_for), c, effort)[0]

    def _allowed(self, rows: Rows | None) -> Allowed:
        if rows is None:
            return self.filled
        keep = np.zeros(self.covered, np.bool_)
        keep[rows] = True
        return self.layout.allowed(keep, self.layout.rows)

    def scan(
        self,
        queries: Floats,  # (q, d) prepared
        k: int,
        among: Among,
        certain: int,  # of the k so many need the recall that the index was tuned to
        candidates: int,  # by their codes, which are scored exactly
        effort: int | None = None,
    ) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
        """The places of the k best, -1 for none, and their scores; True if there are k for each, and all is finite."""
        places, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        effort = self.effort_for(certain) if effort is None else effort
        if among.share < MOSTLY:  # lists as dense in matches as all records are: tuning may have needed none of them
            effort = max(effort, self.count // certain)
        rule = self.rule.of_kernels(effort, among.share)
        given = *among.allowed, among.places, among.keys, CODES[self.metric], *rule, certain, candidates
        loop, lists = native().search_lists, self.native
        if len(queries) == 1:  # which feels microseconds
            return places, scores, loop(lists, queries, *given, places, scores) >= 0

        def some(run: slice) -> tuple[Any, ...]:
            return lists, queries[run], *given, places[run], scores[run]

        scanned = by_lines(loop, some, len(queries), queries.size * (candidates + self.lists))
        return places, scores, min(scanned, default=0) >= 0

    def fit(self, queries: Floats, truth: Rows, rows: Rows | None = None) -> None:
        """Fit the rule."""
        table, k = self.inner.centroids.rows, truth.shape[1]
        seen = queries - self.inner.origin
        scores, squares = seen @ table.T, np.einsum("qd,qd->q", seen, seen)[:, None]
        sides = np.sqrt(squares)
        if self.metric is Metric.L2:
            scores = 2 * scores - np.square(table).sum(1)
            sides = 2 * np.sqrt(np.maximum(squares - scores, 0))
        among, lists = Among(None, self.layout.rows, self._allowed(rows)), np.full(self.covered + 1, -1)
        edges = self.scan(queries, k, among, k, max(k, LEAST), 0)[1][:, -1:]
        lists[self.layout.rows[self.layout.slots]] = np.repeat(np.arange(self.lists), self.layout.sizes)
        deviations = np.maximum(sides, 1e-30) * self.spreads
        means = scores - np.square(self.spreads) if self.metric is Metric.L2 else scores
        gaps = (means - edges) / deviations
        rule, least = fitted(scores, gaps, among.allowed.sizes[: self.lists].astype(np.int64), lists[truth])
        self.rule, self.effort_least = rule, max(1, round(least / 4))  # at which hardly any scans more
        self.effort_most = max(self.effort_least, 1000 * self.count // k)  # where a list has a thousandth of the usual

    @property
    def lists(self) -> int:
        """Number of lists."""
        return len(self.spreads)


def lists_for(count: int) -> int:
    """Between 1.2 and 2.5 √n lists, a power of two: more are faster to search and slower to make."""
    return int(1 << max(0, int(np.log2(2 * np.sqrt(max(count, 1))) + 0.3)))


def _parts(dim: int, width: int) -> int:
    """Parts of a code, a multiple of 8, with a word for so many numbers at most."""
    return -(-dim // (8 * width)) * 8


def _parts_in(codes: str) -> int:
    return int(codes.removeprefix("PQ").partition("x")[0])


def _check(
    metric: Metric, by: tuple[Quantizer, Quantizer], layout: CodeBlocks, rule: NDArray[Any], dim: int | None
) -> None:
    """Raise ValueError where arrays do not fit together: kernels do not look."""
    inner, sketch = by
    (turned, d), lists, (parts, word, _) = inner.rotation.numbers.shape, len(inner.centroids.scales), inner.words.shape
    coarse, length, _ = sketch.words.shape
    blocks = len(layout.blocks)
    forms: dict[str, tuple[NDArray[Any], Any, tuple[int, ...]]] = {
        "rotation": (inner.rotation.numbers, np.int8, (parts * word, d)),
        "its scales": (inner.rotation.scales, np.float32, (turned,)),
        "centroids": (inner.centroids.numbers, np.int8, (lists, d)),
        "their scales": (inner.centroids.scales, np.float32, (lists,)),
        "words": (inner.words, np.float32, (parts, word, BLOCK)),
        "origin": (inner.origin, np.float32, (d,)),
        "coarse rotation": (sketch.rotation.numbers, np.int8, (coarse * length, d)),
        "its scales of rows": (sketch.rotation.scales, np.float32, (coarse * length,)),
        "coarse words": (sketch.words, np.float32, (coarse, length, BLOCK)),
        "rule": (rule, np.float64, (len(Rule._fields),)),
        "sizes": (layout.sizes, np.int64, (lists,)),
        "starts": (layout.starts, np.int64, (lists + 1,)),
        "codes": (layout.blocks, np.uint8, (blocks, parts // 2, BLOCK)),
        "factors": (layout.factors, np.float16, (blocks, BLOCK)),
        "offsets": (layout.offsets, np.float16, (blocks if metric is Metric.L2 else 0, BLOCK)),
        "rows": (layout.rows, np.uint32, (blocks * BLOCK,)),
        "squares": (layout.squares, np.float32, (lists,)),
        "radii": (layout.radii, np.float32, (lists,)),
        "sketches": (layout.sketches, np.uint8, (blocks, coarse // 2, BLOCK)),
        "gains": (layout.gains, np.uint8, (blocks, BLOCK)),
        "errors": (layout.errors, np.uint8, (blocks, BLOCK)),
        "corrections": (layout.corrections, np.float16, layout.offsets.shape),
    }
    for name, (array, dtype, shape) in forms.items():
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"its {name} are {array.dtype} {array.shape}; expected {np.dtype(dtype)} {shape}")
    if dim is not None and d != dim:
        raise ValueError(f"it is of keys {d} wide")
    ends = np.concatenate([[0], np.cumsum(-(-layout.sizes // BLOCK))])
    if (
        parts % 8
        or coarse % 8
        or not lists
        or (layout.sizes < 0).any()
        or (layout.starts != ends).any()
        or blocks < max(1, ends[-1])
    ):
        raise ValueError("its lists do not fit together")


def _no_records(inner: Quantizer, sketch: Quantizer) -> Coded:
    halves, octets = np.empty(0, np.float16), np.empty(0, np.uint8)
    codes, sketches = (np.empty((0, len(by.words) // 2), np.uint8) for by in (inner, sketch))
    squares, rows = np.empty(0, np.float32), np.empty(0, np.uint32)
    return Coded(np.empty(0, np.int64), codes, halves, halves, rows, squares, squares, sketches, octets, octets, halves)
