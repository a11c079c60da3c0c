"""Exact search: every allowed record is compared, in blocks straight from the segments.

Two steps. Blocked matrix products give approximate scores, from which a few more than k candidates are kept; those are
scored again in float64, pair by pair, and ordered by score, then row. A bound on the rounding of the products says
whether a record left out could be among the k: where it could (many ties, near duplicates far from the others), a
second round in float64 decides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.index.contract import Floats, Live, Rows, prepared
from softdb.index.products import Best, BlockKeys, KeyBlock, Probe, merge, pair_scores
from softdb.index.query import Query
from softdb.index.rerank import CODES
from softdb.kernels import available, native
from softdb.kernels.threads import share_out, workers
from softdb.store.snapshot import Snapshot

_BLOCK = 1 << 20  # numbers a block of keys holds: 4 MB of float32, 8 MB where few queries make little of each
MANY, WIDE, LARGE = 64, 256, 1 << 28  # queries, numbers of a key, products, from which on torch is the faster one
PIECE = 1 << 30  # products of one call of a kernel: a tenth of a second, between which Ctrl-C is heard
_QUERIES = 256  # compared with a block at once
_SECOND = 16  # queries of the second round at once


def nearest(
    snapshot: Snapshot,
    query: Query,
    start: int = 0,  # first position
) -> Rows:  # (q, k)
    """Positions of the k nearest allowed live records, ties by row, then -1. Cost q n d, memory O(block + q k)."""
    queries, keep = query.queries, query.keep(snapshot.live)
    count = int(np.count_nonzero(keep[start:]))
    found = np.full((len(queries), query.k), -1, np.int64)
    k = min(query.k, count)
    if not k or not len(queries):
        return found
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    found[:, :k] = Scan(snapshot, keep, start, count, query.metric).answer(queries, k)
    return found


def radius_search(
    snapshot: Snapshot,
    query: Query,
) -> Rows:  # (q, m) ascending, then -1, where m is the most that a query has
    """Positions of every allowed live record whose score may reach `least`, in whatever precision it is computed.

    None is missed; those that rounding may bring in are there too. Cost q n d, memory O(block + hits).
    """
    queries, keep = query.queries, query.keep(snapshot.live)
    count = int(np.count_nonzero(keep))
    if not count or not len(queries) or query.least is None:
        return np.empty((len(queries), 0), np.int64)
    queries = queries.detach().to("cpu", torch.promote_types(queries.dtype, torch.float32))
    return Scan(snapshot, keep, 0, count, query.metric).in_radius(queries, query.least)


def _padded(which: Rows, found: Rows, queries: int) -> Rows:  # (q, m)
    """Hits (p,) and the query of each (p,) as one line for each query."""
    counts = np.bincount(which, minlength=queries)
    order = np.lexsort((found, which))
    column = np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)
    lines = np.full((queries, int(counts.max())), -1, np.int64)
    lines[which[order], column] = found[order]
    return lines


def _block_for(queries: int, dim: int) -> int:
    """Records a block."""
    return min(max(_BLOCK * (2 if queries <= 8 else 1) // dim, 256), 1 << 16)


class Scan:
    """The records that take part in one exact search. The one in `softdb.device.compare` reads them on a GPU."""

    merge = staticmethod(merge)

    def __init__(self, snapshot: Snapshot, keep: Live, start: int, count: int, metric: Metric) -> None:
        self.snapshot, self.keep, self.start, self.count, self.metric = snapshot, keep, start, count, metric
        self.dim = snapshot.segments[0].keys.shape[1]
        self.queries, self.gathered = _QUERIES, _BLOCK  # compared with a block at once; numbers of keys copied at once

    def answer(
        self,
        queries: Tensor,  # (q, d)
        k: int,  # at most count
    ) -> Rows:  # (q, k)
        """Positions of the k nearest, ties by row."""
        near, worst, unsure = self.compared(queries, k) or self.nearest(queries, k)
        found: Rows = near.cpu().numpy()
        if self.metric is not Metric.L2:  # for a query of zeros every record scores 0: nothing but the row decides
            zero = ~queries.any(1)
            if bool(zero.any()):
                found[zero.cpu().numpy()] = np.flatnonzero(self.keep[self.start :])[:k] + self.start
                unsure &= ~zero
        again = unsure.nonzero()[:, 0]
        for few in torch.split(again, _SECOND) if len(again) else ():
            found[few.cpu().numpy()] = self.second_round(queries[few], worst[few], k)
        return found

    def in_radius(self, queries: Tensor, least: float) -> Rows:  # (q, d) -> (q, m)
        """As `radius_search`."""
        # a distance summed from differences is off by d roundings at most; what a product misplaced farther drops out
        eps = torch.finfo(queries.dtype).eps
        slack = eps * (queries.shape[1] + 8) * abs(least) if self.metric is Metric.L2 else np.inf
        which, found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for low in range(0, len(queries), _QUERIES):
            part = queries[low : low + _QUERIES]
            floor = torch.full((len(part),), least, dtype=torch.float64, device=part.device)
            for query, places, scores in self.reaching(part, floor):
                near = scores >= least - slack
                which.append(query[near] + low)
                found.append(places[near])
        return _padded(np.concatenate(which), np.concatenate(found), len(queries))

    def nearest(
        self,
        queries: Tensor,  # (q, d)
        k: int,  # at most count
    ) -> tuple[Tensor, Tensor, Tensor]:  # (q, k), (q,) float64, (q,) bool
        """Positions of the k nearest, ties by row; the k-th score; whether rounding or a tie may have misled."""
        kept = min(k + 8 + k // 8, self.count)
        probes = [Probe(self.metric, part) for part in torch.split(queries, self.queries)]
        found = []
        for probe, best in zip(probes, self._candidates(probes, kept), strict=True):
            positions = best.positions.sort(dim=1).values
            exact, order = self.scores(probe.asked.double(), positions).sort(dim=1, descending=True, stable=True)
            positions, worst, floor = positions.gather(1, order[:, :k]), exact[:, k - 1], best.scores.amin(1)
            unsure = floor.isinf()  # a product that overflowed
            if kept < self.count:
                # negated, so that a NaN counts as unsure
                unsure |= ~(worst > probe.full(floor) + probe.slack(worst, self._longest(positions)))
            found.append((positions, worst, unsure))
        positions, worst, unsure = (torch.cat(parts) for parts in zip(*found, strict=True))
        return positions, worst, unsure

    def compared(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `nearest`, by the kernels, without waking torch's threads.

        None for float64, where there are no kernels or scores too large for float32, and where many narrow products are
        faster made as matrices. A filter's few records are compared where they lie, too: copying them costs more.
        """
        if queries.dtype is not torch.float32 or not available():
            return None
        if len(queries) > MANY and self.dim < WIDE and len(queries) * self.count * self.dim > LARGE:
            return None
        found = []
        for part in torch.split(queries, self.queries):
            one = self._compared(np.ascontiguousarray(part.numpy()), k)
            if one is None:
                return None
            found.append(one)
        near, worst, unsure = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True))
        return near, worst, unsure

    def _compared(self, plain: Floats, k: int) -> tuple[Rows, NDArray[np.float64], Live] | None:
        kept, size, metric = min(k + 8 + k // 8, self.count), self.snapshot.size, CODES[self.metric]
        asked, keys, kernels = prepared(plain, self.metric), self.snapshot.key_column, native()
        products = len(plain) * self.count * self.dim
        threads = workers(products)
        count = max(threads, -(-products // PIECE))
        pieces = [self.start + (size - self.start) * i // count for i in range(count + 1)]
        found = np.empty((count, len(asked), kept), np.int64)
        scores = np.empty(found.shape, np.float32)

        def work(mine: range) -> bool:
            lost = [
                kernels.scan(asked, keys, metric, self.keep, pieces[i], pieces[i + 1], found[i], scores[i])
                for i in mine
            ]
            return any(lost)

        if any(share_out(work, [range(first, count, threads) for first in range(threads)])):
            return None
        floor = np.full(len(asked), -np.inf)
        if kept < self.count:  # no record that was left out scored more
            floor = scores[:, :, -1].max(0).astype(np.float64)
        candidates = np.ascontiguousarray(found.transpose(1, 0, 2)).reshape(len(asked), -1)
        ordered, exact = np.empty_like(candidates), np.empty(candidates.shape)
        unsure = np.empty(len(asked), np.bool_)
        kernels.settle(plain, candidates, floor, keys, metric, ordered, exact, k, unsure)
        return ordered[:, :k], exact[:, k - 1], unsure

    def _candidates(self, probes: list[Probe], kept: int) -> list[Best]:
        best: list[Best | None] = [None] * len(probes)
        prepared, dtype = None, probes[0].queries.dtype
        for block in self.blocks(len(probes[0].queries)):
            prepared = BlockKeys(self.metric, block.keys.to(dtype), prepared)
            for i, probe in enumerate(probes):
                scores = probe.approximate(prepared)
                best[i] = self.merge(best[i], scores, block.positions, kept)
        return [one for one in best if one is not None]

    def blocks(self, queries: int) -> Iterator[KeyBlock]:
        """The records, a few megabytes at a time."""
        size = _block_for(queries, self.dim)
        if 4 * self.count > len(self.keep) - self.start:
            for positions, keys, _ in self.snapshot.blocks(size, self.keep, self.start):
                yield KeyBlock(positions, keys)
        else:
            sparse = np.flatnonzero(self.keep[self.start :]) + self.start
            for low in range(0, len(sparse), size):
                positions = torch.from_numpy(sparse[low : low + size])
                yield KeyBlock(positions, self.keys_at(positions))

    def keys_at(self, positions: Tensor) -> Tensor:
        """Keys (…, d) of positions (…), copied."""
        return self.snapshot.keys_at(positions.numpy())

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Exact scores of positions (q, c), in the dtype of the queries (q, d)."""
        which = torch.arange(len(positions)).repeat_interleave(positions.shape[1])
        return self._paired(queries, which, positions.flatten()).view_as(positions)

    def _paired(self, queries: Tensor, which: Tensor, positions: Tensor) -> Tensor:
        """Exact scores of pairs: positions (p,) and the query of each (p,)."""
        chunk = max(1, _BLOCK // 4 // self.dim)
        pairs = zip(torch.split(which, chunk), torch.split(positions, chunk), strict=True)
        found = [pair_scores(queries[q], self.keys_at(at).to(queries.dtype), self.metric) for q, at in pairs]
        return torch.cat(found)

    def _longest(self, found: Tensor) -> Tensor:  # (q,) float64
        """Length of the longest key found (q, k) for each query; the others' scores are rounded alike."""
        if self.metric is not Metric.DOT:
            return torch.zeros(len(found), dtype=torch.float64, device=found.device)
        keys = self.keys_at(found[:, : max(1, self.gathered // self.dim // len(found))])
        lengths: Tensor = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float64)
        return lengths.amax(1)

    def second_round(
        self,
        queries: Tensor,  # (q, d)
        worst: Tensor,  # (q,) float64: no better k-th score exists below it
        k: int,
    ) -> Rows:  # (q, k)
        """Positions of the k nearest among all records that may reach the k-th score, scored exactly."""
        which, found, scores = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        for near, places, exact in self.reaching(queries.double(), worst):
            which, found = np.concatenate([which, near]), np.concatenate([found, places])
            scores = np.concatenate([scores, exact])
            order = np.lexsort((found, -scores, which))
            first = np.searchsorted(which[order], np.arange(len(queries)))
            order = order[np.arange(len(order)) - first[which[order]] < k]
            which, found, scores = which[order], found[order], scores[order]
        return found.reshape(-1, k)

    def reaching(
        self,
        queries: Tensor,  # (q, d); products are made in their dtype
        least: Tensor,  # (q,) float64
    ) -> Iterator[tuple[Rows, Rows, NDArray[np.float64]]]:
        """Pairs that may reach their query's least score, block by block: query, position, float64 score, each (p,)."""
        probe, prepared = Probe(self.metric, queries), None
        constant = probe.full(queries.new_zeros(len(queries)))  # (q,) that approximate scores lack
        for block in self.blocks(len(queries)):
            prepared = BlockKeys(self.metric, block.keys.to(queries.dtype), prepared)
            longest = torch.linalg.vector_norm(prepared.keys, dim=1, dtype=torch.float64).amax().expand(len(queries))
            floor = (least - probe.slack(least, longest) - constant).to(queries.dtype)
            floor = torch.nextafter(floor, torch.full_like(floor, -torch.inf))  # rounding must not raise it
            # negated, so that a NaN counts as near
            near = ~(probe.approximate(prepared) < floor.unsqueeze(1))
            which, places = near.nonzero(as_tuple=True)
            if len(which):
                positions = block.positions[places]
                scores = self._paired(queries.double(), which, positions)
                yield which.cpu().numpy(), positions.cpu().numpy(), scores.cpu().numpy()
