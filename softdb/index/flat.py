"""Exact search: compare every allowed record, in blocks that are read directly from the segments.

There are two steps. Matrix products of blocks give approximate scores, and a few more than k candidates are kept. The
candidates are scored again in float64, pair by pair, and sorted by score, then row. If rounding of the products may
have hidden one of the true k (many ties; near duplicates far from the other keys), a second round in float64 decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Live, Rows, prepared
from softdb.index.products import Best, BlockKeys, Probe, merge, pair_scores
from softdb.index.query import Query
from softdb.index.rerank import CODES
from softdb.kernels import available, native
from softdb.kernels.threads import share_out, workers
from softdb.store.snapshot import Block, Snapshot

_BLOCK = 1 << 20  # numbers in a block of keys: 4 MB of float32; twice as many for few queries
PIECE = 1 << 30  # multiplications in one kernel call: a tenth of a second, so that Ctrl-C is handled between calls
_QUERIES = 256  # queries compared with a block at once
PANEL = 16  # queries that kernels compare at once
_SECOND = 16  # queries that the second round handles at once


def nearest(
    snapshot: Snapshot,
    query: Query,
    start: int = 0,  # first position that is compared
) -> Rows:  # (q, k)
    """Return positions of the k nearest allowed records, ties by row, -1 = none. Cost q n d, memory O(block + q k)."""
    queries, keep = query.queries, query.keep(snapshot.live)
    count = int(np.count_nonzero(keep[start:]))
    positions = np.full((len(queries), query.k), -1, np.int64)
    k = min(query.k, count)
    if not k or not len(queries):
        return positions
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    positions[:, :k] = Scan(snapshot, keep, start, count, query.metric).answer(queries, k)
    return positions


def radius_search(
    snapshot: Snapshot,
    query: Query,
) -> Rows:  # (q, m) ascending, then -1; m: the largest number of hits of a query
    """Return the positions of every allowed live record that scores at least `query.least`, or would but for rounding.

    Cost q n d, memory O(block + hits).
    """
    queries, keep = query.queries, query.keep(snapshot.live)
    count = int(np.count_nonzero(keep))
    if not count or not len(queries) or query.least is None:
        return np.empty((len(queries), 0), np.int64)
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    return Scan(snapshot, keep, 0, count, query.metric).in_radius(queries, query.least)


def _padded(which: Rows, matches: Rows, queries: int) -> Rows:  # (q, m)
    """Arrange matches (p,) of the queries `which` (p,) in one ascending row for each query, padded with -1."""
    counts = np.bincount(which, minlength=queries)
    order = np.lexsort((matches, which))
    column = np.arange(len(matches)) - np.repeat(np.cumsum(counts) - counts, counts)
    lines = np.full((queries, int(counts.max())), -1, np.int64)
    lines[which[order], column] = matches[order]
    return lines


def _block_for(queries: int, dim: int) -> int:
    """Return the number of records in a block, for a number of queries and a width of keys."""
    return min(max(_BLOCK * (2 if queries <= 8 else 1) // dim, 256), 1 << 16)


def _in_panels(queries: Floats) -> Floats:  # (q, d) -> (p, d · PANEL)
    """Return the first queries transposed, in panels. A last one that is less than half full is left out."""
    q, d = queries.shape
    count = (q + PANEL // 2) // PANEL
    padded = np.zeros((count * PANEL, d), np.float32)
    padded[:q] = queries[: count * PANEL]
    panels: Floats = padded.reshape(count, PANEL, d).swapaxes(1, 2).reshape(count, PANEL * d)
    return panels


class Scan:
    """An exact search among the records in the mask `keep`. A subclass in `softdb.device.compare` runs it on a GPU."""

    merge = staticmethod(merge)

    def __init__(self, snapshot: Snapshot, keep: Live, start: int, count: int, metric: Metric) -> None:
        self.snapshot, self.keep, self.start, self.count, self.metric = snapshot, keep, start, count, metric
        self.dim = snapshot.segments[0].keys.shape[1]
        self.queries, self.gathered = _QUERIES, _BLOCK  # queries compared with a block at once; numbers copied at once

    def answer(
        self,
        queries: Tensor,  # (q, d)
        k: int,  # at most count
    ) -> Rows:  # (q, k)
        """Return the positions of the k nearest records of each query, ties sorted by row."""
        near, worst, unsure = self.compared(queries, k) or self.nearest(queries, k)
        positions: Rows = near.cpu().numpy()
        if self.metric is not Metric.L2:  # every record scores 0 for a zero query: return the first k rows
            zero = ~queries.any(1)
            if bool(zero.any()):
                positions[zero.cpu().numpy()] = np.flatnonzero(self.keep[self.start :])[:k] + self.start
                unsure &= ~zero
        again = unsure.nonzero()[:, 0]
        for few in torch.split(again, _SECOND) if len(again) else ():
            positions[few.cpu().numpy()] = self.second_round(queries[few], worst[few], k)
        return positions

    def in_radius(self, queries: Tensor, least: float) -> Rows:  # (q, d) -> (q, m)
        """Return the positions of the records that score at least `least`, as the function `radius_search` does."""
        # a pairwise distance is wrong by at most d roundings; records that are here by an inexact product only drop out
        eps = torch.finfo(queries.dtype).eps
        slack = eps * (queries.shape[1] + 8) * abs(least) if self.metric is Metric.L2 else np.inf
        which, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for low in range(0, len(queries), _QUERIES):
            chunk = queries[low : low + _QUERIES]
            floor = torch.full((len(chunk),), least, dtype=torch.float64, device=chunk.device)
            for query, places, scores in self.reaching(chunk, floor):
                near = scores >= least - slack
                which.append(query[near] + low)
                positions.append(places[near])
        return _padded(np.concatenate(which), np.concatenate(positions), len(queries))

    def nearest(
        self,
        queries: Tensor,  # (q, d)
        k: int,  # at most count
    ) -> tuple[Tensor, Tensor, Tensor]:  # (q, k), (q,) float64, (q,) bool
        """Return the positions of the k nearest, the k-th score, and True if rounding or ties may have changed them."""
        width = min(k + 8 + k // 8, self.count)
        probes = [Probe(self.metric, part) for part in torch.split(queries, self.queries)]
        answers = []
        for probe, best in zip(probes, self._candidates(probes, width), strict=True):
            positions = best.positions.sort(dim=1).values
            exact, order = self.scores(probe.given.double(), positions).sort(dim=1, descending=True, stable=True)
            positions, worst, floor = positions.gather(1, order[:, :k]), exact[:, k - 1], best.scores.amin(1)
            unsure = floor.isinf()  # a matrix product overflowed
            if width < self.count:
                # negated, so that a NaN counts as unsure
                unsure |= ~(worst > probe.full(floor) + probe.slack(worst, self._longest(positions)))
            answers.append((positions, worst, unsure))
        positions, worst, unsure = (torch.cat(parts) for parts in zip(*answers, strict=True))
        return positions, worst, unsure

    def compared(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `nearest` returns, from kernels that read keys in place and do not wake torch's threads.

        Return None if there are no kernels, if queries are float64, or if a score overflows float32.
        """
        if queries.dtype is not torch.float32 or not available():
            return None
        results = []
        for chunk in torch.split(queries, self.queries):
            result = self._compared(np.ascontiguousarray(chunk.numpy()), k)
            if result is None:
                return None
            results.append(result)
        near, worst, unsure = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*results, strict=True))
        return near, worst, unsure

    def _compared(self, plain: Floats, k: int) -> tuple[Rows, NDArray[np.float64], Live] | None:
        width, size, metric = min(k + 8 + k // 8, self.count), self.snapshot.size, CODES[self.metric]
        seen, keys, kernels = prepared(plain, self.metric), self.snapshot.key_column, native()
        panels = _in_panels(seen)
        products = len(plain) * self.count * self.dim
        threads = workers(products)
        count = max(threads, -(-products // PIECE))
        pieces = [self.start + (size - self.start) * i // count for i in range(count + 1)]
        per_piece = np.empty((count, len(seen), width), np.int64)
        scores = np.empty(per_piece.shape, np.float32)

        def work(numbers: range) -> bool:
            lost = [
                kernels.scan(seen, panels, keys, metric, self.keep, pieces[i], pieces[i + 1], per_piece[i], scores[i])
                for i in numbers
            ]
            return any(lost)

        if any(share_out(work, [range(first, count, threads) for first in range(threads)])):
            return None
        floor = np.full(len(seen), -np.inf)
        if width < self.count:  # no record outside the candidates scored higher than this
            floor = scores[:, :, -1].max(0).astype(np.float64)
        candidates = np.ascontiguousarray(per_piece.transpose(1, 0, 2)).reshape(len(seen), -1)
        ordered, exact = np.empty_like(candidates), np.empty(candidates.shape)
        unsure = np.empty(len(seen), np.bool_)
        kernels.rescore(plain, candidates, floor, keys, metric, ordered, exact, k, unsure)
        return ordered[:, :k], exact[:, k - 1], unsure

    def _candidates(self, probes: list[Probe], width: int) -> list[Best]:
        best: list[Best | None] = [None] * len(probes)
        prepared, dtype = None, probes[0].queries.dtype
        for block in self.blocks(len(probes[0].queries)):
            prepared = BlockKeys(self.metric, block.keys.to(dtype), prepared)
            for i, probe in enumerate(probes):
                scores = probe.approximate(prepared)
                best[i] = self.merge(best[i], scores, block.positions, width)
        return [top for top in best if top is not None]

    def blocks(self, queries: int) -> Iterator[Block]:
        """Yield the records that take part, in blocks of a few megabytes."""
        size = _block_for(queries, self.dim)
        if 4 * self.count > len(self.keep) - self.start:
            yield from self.snapshot.blocks(size, self.keep, self.start)
        else:
            sparse = np.flatnonzero(self.keep[self.start :]) + self.start
            for low in range(0, len(sparse), size):
                positions = torch.from_numpy(sparse[low : low + size])
                yield Block(positions, keys := self.keys_at(positions), keys)

    def keys_at(self, positions: Tensor) -> Tensor:
        """Return copies of the keys (…, d) at positions (…)."""
        return self.snapshot.keys_at(positions.numpy())

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Return exact scores (q, c) of the records at positions (q, c), in the dtype of the queries (q, d)."""
        which = torch.arange(len(positions)).repeat_interleave(positions.shape[1])
        return self._paired(queries, which, positions.flatten()).view_as(positions)

    def _paired(self, queries: Tensor, which: Tensor, positions: Tensor) -> Tensor:
        """Return exact scores (p,) of pairs: query number `which` (p,) with the key at `positions` (p,)."""
        chunk = max(1, _BLOCK // 4 // self.dim)
        pairs = zip(torch.split(which, chunk), torch.split(positions, chunk), strict=True)
        scores = [pair_scores(queries[q], self.keys_at(at).to(queries.dtype), self.metric) for q, at in pairs]
        return torch.cat(scores)

    def _longest(self, candidates: Tensor) -> Tensor:  # (q,) float64
        """Return the length of the longest key among each query's candidates (q, k). It bounds rounding errors."""
        if self.metric is not Metric.DOT:
            return torch.zeros(len(candidates), dtype=torch.float64, device=candidates.device)
        keys = self.keys_at(candidates[:, : max(1, self.gathered // self.dim // len(candidates))])
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float64)
        return lengths.amax(1)

    def second_round(
        self,
        queries: Tensor,  # (q, d)
        worst: Tensor,  # (q,) float64, at most the true k-th score
        k: int,
    ) -> Rows:  # (q, k)
        """Return the positions of the k nearest, from exact scores of all records that may reach the k-th score."""
        which, positions, scores = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        for near, places, exact in self.reaching(queries.double(), worst):
            which, positions = np.concatenate([which, near]), np.concatenate([positions, places])
            scores = np.concatenate([scores, exact])
            order = np.lexsort((positions, -scores, which))
            first = np.searchsorted(which[order], np.arange(len(queries)))
            order = order[np.arange(len(order)) - first[which[order]] < k]
            which, positions, scores = which[order], positions[order], scores[order]
        return positions.reshape(-1, k)

    def reaching(
        self,
        queries: Tensor,  # (q, d); products are computed in this dtype
        least: Tensor,  # (q,) float64
    ) -> Iterator[tuple[Rows, Rows, NDArray[np.float64]]]:
        """Yield for each block the pairs that may score `least`: query number, position, float64 score, (p,) each."""
        probe, prepared = Probe(self.metric, queries), None
        constant = probe.full(queries.new_zeros(len(queries)))  # (q,) exact score minus approximate score
        for block in self.blocks(len(queries)):
            prepared = BlockKeys(self.metric, block.keys.to(queries.dtype), prepared)
            longest = torch.linalg.vector_norm(prepared.keys, dim=1, dtype=torch.float64).amax().expand(len(queries))
            floor = (least - probe.slack(least, longest) - constant).to(queries.dtype)
            floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf))  # rounding must not raise the floor
            # negated, so that a NaN counts as near
            near = ~(probe.approximate(prepared) < floor.unsqueeze(1))
            which, places = near.nonzero(as_tuple=True)
            if len(which):
                positions = block.positions[places]
                scores = self._paired(queries.double(), which, positions)
                yield which.cpu().numpy(), positions.cpu().numpy(), scores.cpu().numpy()
