"""Lists: an inverted file of 4-bit codes of our own, searched by one native call. The index of kind "ivf" on the CPU.

`quantizer` has how records are coded, `rule` which lists a query scans, `softdb/kernels/native/lists.cc` the search.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Rows
from softdb.index.quantizer import BLOCK, Allowed, CodeBlocks, Coded, Places, Quantizer
from softdb.index.rerank import CODES
from softdb.index.rule import MOSTLY, fitted
from softdb.index.sketches import Sketches, lists_in, parts_in
from softdb.kernels import native
from softdb.kernels.threads import by_lines

LEAST = 24  # candidates that are scored exactly at least
JUMP = 4  # times as long as a byte of codes takes one of a key that lies anywhere
WIDTHS = (8, 4, 2, 1)  # numbers that share a word
PARTS = 32, 256  # of a code, at least and at most, where the width of keys allows it


class Among(NamedTuple):
    """The records that a scan may return, and where their keys are."""

    keys: Any  # the stored column; None: the best by their codes are returned, with estimates
    places: Places  # (slots,) positions, or whatever names a record
    allowed: Allowed
    share: float = 1.0  # of the records that the index holds


class Lists(Sketches):
    """Inverted lists of 4-bit codes: parts / 2 + 6 bytes a record, 8 for l2; and about d / 8 + 2 of coarser codes, 2
    more for l2, by which estimates draw. Cost: see lists.cc and draw.cc.
    """

    kind: ClassVar[str] = "ivf"
    searches: ClassVar[bool] = True
    effort_name: ClassVar[str] = "records_per_match"
    filters_inside: ClassVar[bool] = True
    levels: ClassVar[tuple[int, ...]] = (3, 4, 6, 10, 16, 28, 50, 90, 160)

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """A word for each 8, 4, 2 numbers or one, where that makes 32 to 256 parts."""
        least, most = PARTS
        fit = [parts for parts in (_parts(dim, width) for width in WIDTHS) if least <= parts <= most]
        return tuple(f"PQ{parts}x4" for parts in dict.fromkeys(fit or [min(most, _parts(dim, 1))]))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Half a byte a part, factor and offset; and the coarser codes."""
        return parts_in(codes) // 2 + 4 + super().record_bytes(dim, codes)

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Centroids by k-means, the rotation, then the words."""
        inner = Quantizer.train(sample, lists_in(count, sample), parts_in(codes), metric is Metric.L2)
        return cls(metric, inner, inner.sketched(sample, metric is Metric.L2))

    def _use(self, layout: CodeBlocks) -> None:
        """Search these records from now on."""
        super()._use(layout)
        inner, l2 = self.inner, self.metric is Metric.L2
        table, lists = inner.centroids.rows, len(inner.centroids.scales)
        padded = np.ones((3, -(-lists // BLOCK) * BLOCK), np.float32)
        padded[0, :lists] = inner.centroids.scales * (2 if l2 else 1)
        padded[1] = 0
        padded[1, :lists] = np.einsum("ld,ld->l", table, table) if l2 else 0
        padded[2, :lists] = 1 / self.spreads
        turns = np.ones(-(-len(inner.rotation.scales) // BLOCK) * BLOCK, np.float32)
        turns[: len(inner.rotation.scales)] = inner.rotation.scales
        arrays = (
            inner.rotation.interleaved(), turns, inner.centroids.interleaved(), *padded, layout.starts,
            layout.blocks.reshape(len(layout.blocks), -1), layout.factors.view(np.uint16),
            layout.offsets.view(np.uint16), inner.unit, inner.words.reshape(-1, BLOCK), self.parts,
            inner.origin if l2 else inner.origin[:0],
        )  # fmt: skip
        self.native, self._held = native().Lists(len(inner.origin), *arrays), arrays  # which keeps the arrays alive

    def _coded(self, rows: Rows, seen: Floats, lists: Rows) -> Coded:
        fine, coarse = self.inner.coded(seen, lists), super()._coded(rows, seen, lists)
        offsets = self._in_units(fine.offsets(), self.inner)[1]
        return coarse._replace(codes=fine.codes, factors=fine.factors.astype(np.float16), offsets=offsets)

    def candidates_for(self, k: int) -> int:
        """Records that are scored exactly to find k."""
        return max(LEAST, self.fetch_k * k)

    def cost(self, queries: Floats, k: int, effort: int) -> float:
        """Bytes that a query reads: codes, and keys that are scored exactly, which lie apart from each other."""
        places, scores = np.empty((len(queries), 1), np.int64), np.empty((len(queries), 1), np.float32)
        candidates = self.candidates_for(k)
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


def _parts(dim: int, width: int) -> int:
    """Parts of a code, a multiple of 8, with a word for so many numbers at most."""
    return -(-dim // (8 * width)) * 8
