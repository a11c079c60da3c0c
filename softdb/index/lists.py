"""The index of kind "ivf" on the CPU: softdb's own inverted lists of 4-bit codes, searched in one native call.

Module `quantizer` encodes records, `rule` chooses the lists that a query scans, and `lists.cc` (C++) searches them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Index, Rows
from softdb.index.quantizer import BLOCK, Allowed, CodeBlocks, Coded, Places, Quantizer, product
from softdb.index.rerank import CODES
from softdb.index.rule import MOSTLY, fitted
from softdb.index.sketches import Sketches, lists_in, parts_in
from softdb.kernels import native
from softdb.kernels.threads import by_lines

LEAST = 24  # least number of candidates that are scored exactly
JUMP = 4  # time to read a byte of a key at a random address, over that of a byte of codes in sequence
WIDTHS = (8, 4, 2, 1)  # numbers of a key that one 4-bit word encodes, from the smallest codes to the finest
PARTS = 32, 256  # least and largest number of parts of a code, if the width of keys allows it


class Among(NamedTuple):
    """The records that a scan may return, and the address of their keys."""

    keys: Any  # the stored column; None: rank by codes and return estimated scores
    places: Places  # (slots,) the position, or another number, that a scan returns for each slot
    allowed: Allowed
    share: float = 1.0  # allowed records, over the records in the index


class Lists(Sketches):
    """Inverted lists of 4-bit codes. A record takes parts / 2 + 6 bytes (8 for l2). Coarser codes for estimates take
    about d / 8 + 2 bytes more (d / 8 + 4 for l2). Cost: see lists.cc and draw.cc.
    """

    kind: ClassVar[str] = "ivf"
    searches: ClassVar[bool] = True
    effort_name: ClassVar[str] = "records_per_match"
    filters_inside: ClassVar[bool] = True
    levels: ClassVar[tuple[int, ...]] = (3, 4, 6, 10, 16, 28, 50, 90, 160)

    @classmethod
    def codes(cls, dim: int) -> tuple[str, ...]:
        """Return the names of codes with one word for 8, 4, 2 or 1 numbers, if that makes 32 to 256 parts."""
        least, most = PARTS
        fit = [parts for parts in (_parts(dim, width) for width in WIDTHS) if least <= parts <= most]
        return tuple(f"PQ{parts}x4" for parts in dict.fromkeys(fit or [min(most, _parts(dim, 1))]))

    @classmethod
    def record_bytes(cls, dim: int, codes: str) -> int:
        """Return the bytes of a record: half a byte for each part, factor, offset, and the coarser codes."""
        return parts_in(codes) // 2 + 4 + super().record_bytes(dim, codes)

    @classmethod
    def train(cls, metric: Metric, sample: Floats, count: int, codes: str) -> Index:
        """Return an empty index with centroids (by k-means), a rotation and codebooks trained on the sample."""
        inner = Quantizer.train(sample, lists_in(count, sample), parts_in(codes), metric is Metric.L2)
        return cls(metric, inner, inner.sketched(sample, metric is Metric.L2))

    def _use(self, layout: CodeBlocks) -> None:
        """Replace the records of the index by `layout`, and build the native object that searches them."""
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
        self.native, self._held = native().Lists(len(inner.origin), *arrays), arrays  # `_held` keeps the arrays alive

    def _coded(self, rows: Rows, seen: Floats, lists: Rows) -> Coded:
        fine, coarse = self.inner.coded(seen, lists), super()._coded(rows, seen, lists)
        offsets = self._in_units(fine.offsets(), self.inner)[1]
        return coarse._replace(codes=fine.codes, factors=fine.factors.astype(np.float16), offsets=offsets)

    def candidates_for(self, k: int) -> int:
        """Return the number of candidates that a search for k records scores exactly."""
        return max(LEAST, self.fetch_k * k)

    def cost(self, queries: Floats, k: int, effort: int) -> float:
        """Return the cost of a query in bytes: codes, which are read in sequence, plus JUMP times candidates' keys."""
        places, scores = np.empty((len(queries), 1), np.int64), np.empty((len(queries), 1), np.float32)
        candidates = self.candidates_for(k)
        given = *self.filled, self.layout.rows, None, CODES[self.metric], *self.rule.of_kernels(effort, 1.0)
        scanned: int = abs(native().search_lists(self.native, queries, *given, k, candidates, places, scores))
        return float(scanned / len(queries) * (self.parts / 2 + 4) + JUMP * candidates * queries.shape[1] * 4)

    def find(self, queries: Floats, c: int, rows: Rows | None = None, effort: int | None = None) -> Rows:
        """Return the c rows whose codes are nearest to each query, in any order, without exact scores."""
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
        certain: int,  # number of the k records that need the tuned recall; at least 1
        candidates: int,  # number of candidates that are scored exactly
        effort: int | None = None,
    ) -> tuple[Rows, Floats, bool]:  # (q, k), (q, k)
        """Return the k best as numbers from `among.places`, -1 = none; scores; True if all are present and finite."""
        places, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        effort = self.effort_for(certain) if effort is None else effort
        if among.share < MOSTLY:  # scan lists where matches are as frequent as in all records
            effort = max(effort, self.count // certain)
        rule = self.rule.of_kernels(effort, among.share)
        given = *among.allowed, among.places, among.keys, CODES[self.metric], *rule, certain, candidates
        loop, lists = native().search_lists, self.native
        if len(queries) == 1:  # avoids the microseconds of `by_lines`
            return places, scores, loop(lists, queries, *given, places, scores) >= 0

        def some(run: slice) -> tuple[Any, ...]:
            return lists, queries[run], *given, places[run], scores[run]

        scanned = by_lines(loop, some, len(queries), queries.size * (candidates + self.lists))
        return places, scores, min(scanned, default=0) >= 0

    def fit(self, queries: Floats, truth: Rows, rows: Rows | None = None) -> None:
        """Fit the rule that chooses lists to queries with known answers, and set the range of the effort."""
        table, k = self.inner.centroids.rows, truth.shape[1]
        seen = queries - self.inner.origin
        scores, squares = product(seen, table.T), np.einsum("qd,qd->q", seen, seen)[:, None]
        sides = np.sqrt(squares)
        if self.metric is Metric.L2:
            scores = 2 * scores - np.square(table).sum(1)
            sides = 2 * np.sqrt(np.maximum(squares - scores, 0))
        among, lists = Among(None, self.layout.rows, self._allowed(rows)), np.full(self.covered + 1, -1)
        edges = self.scan(queries, k, among, k, max(k, LEAST), 0)[1][:, -1:]
        lists[self.layout.rows[self.layout.slots]] = np.repeat(np.arange(self.lists), self.layout.sizes)
        deviations = np.maximum(sides * self.spreads, 1e-30)
        means = scores - np.square(self.spreads) if self.metric is Metric.L2 else scores
        with np.errstate(over="ignore"):  # a query at a centroid has no deviation: `fitted` skips infinite gaps
            gaps = (means - edges) / deviations
        rule, least = fitted(scores, gaps, among.allowed.sizes[: self.lists].astype(np.int64), lists[truth])
        self.rule, self.effort_least = rule, max(1, round(least / 4))  # below it hardly any query scans more
        self.effort_most = max(self.effort_least, 1000 * self.count // k)  # scans lists with 1/1000 of the mean share


def _parts(dim: int, width: int) -> int:
    """Return the number of parts of a code, a multiple of 8, if a word encodes at most `width` numbers of a key."""
    return -(-dim // (8 * width)) * 8
