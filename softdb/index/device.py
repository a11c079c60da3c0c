"""Devices that a database computes on: exact search there with torch alone, and the exact order of candidates.

Queries, keys and candidates stay on the device; what comes back are the positions found. Exact search is that of
`flat`, the second round for what rounding leaves open included. On several devices each holds a run of the positions;
each is asked for its own, and the best of them are the answer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import gpu
from softdb.check import Metric, Schema
from softdb.gpu import usable
from softdb.index import flat
from softdb.index.contract import Live, Recent, Rows
from softdb.index.on_device import OnDevice, Shard, part_of
from softdb.index.products import Best, KeyBlock, pair_scores, reduced, top
from softdb.index.rerank import ordered
from softdb.index.resident import DeviceColumn, DeviceView, Kept, Seen
from softdb.reports import DeviceReport
from softdb.store import Snapshot

__all__ = ["DEVICE_ERRORS", "Board", "forked", "radius_search"]

# what torch raises where a device is full or lost; until 2.8 the latter had no name of its own
DEVICE_ERRORS = torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError)

SCORED = 1 << 26  # scores at once: 256 MB
CONVERTED = 1 << 26  # numbers of half-precision keys converted at once
GATHERED = 1 << 25  # numbers of candidate keys gathered at once: 128 MB, twice that in float64
QUERIES = 1024  # compared with a block at once
SMALL = 1 << 27  # numbers that are compared in about a millisecond by a GPU that reads 0.5 TB/s
UNEVEN = 1.5  # times its share of the records, from which on what the last device holds is shared out anew


def forked() -> bool:
    """Whether this process was forked from one in which CUDA had started: then CUDA cannot be used here."""
    return bool(torch.cuda._is_in_bad_fork())  # which torch itself asks


class _Card:
    """One device as a database uses it: its columns, as far as they fit, and what is known of the newest snapshot."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.keys, self.values = DeviceColumn(device, False, dtype), DeviceColumn(device, True, dtype)
        self._seen: Seen | None = None

    def view(self, snapshot: Snapshot) -> DeviceView:
        """A snapshot, as it lies here."""
        seen = self._seen
        if seen is None or seen.snapshot() is not snapshot:
            seen = self._seen = Seen(snapshot, self.keys, self.values)
        return DeviceView(snapshot, seen)

    def forget(self) -> None:
        """Give all memory back."""
        self._seen = None
        self.keys.forget()
        self.values.forget()


class Board:
    """The devices that one database computes on, each with a run of the records; FAISS' index lies on the first."""

    def __init__(self, *devices: torch.device, dtype: torch.dtype | None = None) -> None:
        self.cards = tuple(_Card(device, dtype) for device in devices)
        self.device = self.cards[0].device
        self.dtype = dtype  # of the columns there; None: as they are stored
        self._lock = threading.Lock()
        self._cuts: tuple[int, ...] = ()  # the first position of every card but the first
        self._parts: Recent[tuple[Snapshot, ...]] = Recent(1)

    @classmethod
    def of(cls, devices: Sequence[torch.device] | None, dtype: torch.dtype | None = None) -> Board | None:
        """The board of some devices; None for the CPU."""
        return None if not devices or devices[0].type == "cpu" else cls(*devices, dtype=dtype)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them."""
        return tuple(card.device for card in self.cards)

    @property
    def name(self) -> str:
        """As it is shown."""
        return " and ".join(map(str, self.devices))

    def holds(self, device: torch.device) -> bool:
        """Whether it is one of these."""
        mine = [(one.type, one.index if one.type == "cuda" else None) for one in self.devices]
        return (device.type, device.index) in mine

    def view(self, snapshot: Snapshot) -> DeviceView:
        """A snapshot, as it lies on the first device alone."""
        return self.cards[0].view(snapshot)

    def shards(self, snapshot: Snapshot) -> tuple[Shard, ...]:
        """The records of a snapshot, as they lie on the devices: runs of positions."""
        if len(self.cards) == 1:
            return (Shard(self.view(snapshot), 0),)
        parts = self._parts.of(lambda: self._apart(snapshot), snapshot)
        lows = itertools.accumulate((part.size for part in parts), initial=0)
        return tuple(Shard(card.view(part), low) for card, part, low in zip(self.cards, parts, lows, strict=False))

    def _apart(self, snapshot: Snapshot) -> tuple[Snapshot, ...]:
        """A part for each card; new records come to the last one, until it has far more than the others."""
        size, cards = snapshot.size, len(self.cards)
        with self._lock:
            last = size - self._cuts[-1] if self._cuts else size
            if not -size < last <= UNEVEN * size / cards:  # or most of them were compacted away
                self._cuts = tuple(size * i // cards for i in range(1, cards))
            ends = itertools.pairwise((0, *(min(cut, size) for cut in self._cuts), size))
        return tuple(part_of(snapshot, low, high) for low, high in ends if low < high)

    def columns(self, snapshot: Snapshot) -> OnDevice | None:
        """A snapshot's columns there; None where it has none."""
        return OnDevice.placed(snapshot, self.shards(snapshot)) if snapshot.size else None

    def resident(self, snapshot: Snapshot) -> bool:
        """Whether all keys are there."""
        return all(shard.view.seen.keys is not None for shard in self.shards(snapshot))

    def small(self, snapshot: Snapshot) -> bool:
        """Whether a search of every record takes a moment: the keys are here, and few."""
        if not snapshot.size:
            return True
        numbers = snapshot.size * snapshot.segments[0].keys.shape[1]
        return numbers <= SMALL and self.resident(snapshot)

    def nearest(
        self,
        snapshot: Snapshot,
        queries: Tensor,  # (q, d) floating point, any device
        k: int,
        metric: Metric,
        allowed: Live | None = None,  # (size,) over positions; None: every live record
        start: int = 0,  # first position
    ) -> Rows:  # (q, k)
        """As `flat.nearest`, computed here. Cost q n d, memory O(block + q k) beside the keys.

        Where torch may multiply float32 in TF32, the products are made in float64: TF32 leaves too little to tell.
        """
        found = np.full((len(queries), k), -1, np.int64)
        if not snapshot.count or not len(queries):
            return found
        dtype = torch.promote_types(queries.dtype, torch.float64 if reduced() else torch.float32)
        parts, shards = [], self.shards(snapshot)
        for shard in shards:
            view, own = shard.view, shard.of(allowed)
            scan = _DeviceScan.of(view, own, max(0, start - shard.low), metric)
            count = min(k, scan.count)
            if count:
                asked = queries.detach().to(view.device, dtype)
                near = scan.answer(asked, count)
                if len(shards) == 1:
                    found[:, :count] = near
                    return found
                scores = scan.scores(asked.double(), torch.from_numpy(near).to(view.device))
                parts.append((near + shard.low, scores.cpu().numpy()))
        if parts:
            best = _best_of(parts, k)
            found[:, : best.shape[1]] = best
        return found

    def ordered(
        self,
        view: DeviceView,
        queries: Tensor,  # (q, d) float32, here
        positions: Tensor,  # (q, c), -1 = none, here
        k: int,
        metric: Metric,
    ) -> Rows:  # (q, k)
        """Positions of the k best candidates by exact score, ties by row, then -1. Cost q c d."""
        if view.seen.keys is None:  # only the candidates' numbers travel; the mapped keys are read in place
            own = np.ascontiguousarray(queries.cpu().numpy())
            return ordered(view.snapshot, own, positions.cpu().numpy(), k, metric)[0]
        positions = positions.masked_fill(positions < 0, view.snapshot.size).sort(dim=1).values  # none: last
        there = positions < view.snapshot.size
        scores = _scores(view, queries, positions.masked_fill(~there, 0), metric).masked_fill_(~there, -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        found = positions.masked_fill(~there, -1).gather(1, order)
        return np.asarray(torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1).cpu().numpy())

    def report(self, schema: Schema) -> DeviceReport:
        """What lies here."""
        dtype = schema.dtype.name if self.dtype is None else str(self.dtype).removeprefix("torch.")
        keys, values = [card.keys for card in self.cards], [card.values for card in self.cards]
        size = sum(column.bytes for column in (*keys, *values))
        told = _state(values) if schema.has_values else "the keys"
        kernels = usable(self.device) or "triton"
        return DeviceReport([*map(str, self.devices)], _state(keys), told, dtype, size, kernels)

    def forget(self) -> None:
        """Give all memory back."""
        for card in self.cards:
            card.forget()


def _state(columns: list[DeviceColumn]) -> str:
    """Of one column, on all devices."""
    asked = [column for column in columns if column.asked]
    if not asked:
        return "not asked for yet"
    return "streamed" if any(not column.bytes for column in asked) else "resident"


def _best_of(parts: list[tuple[Rows, NDArray[np.float64]]], k: int) -> Rows:  # (q, k_i) each -> (q, ≤ k)
    """The best of what the devices found, by exact score, ties by position."""
    positions, scores = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    order = np.lexsort((positions, -scores), axis=1)[:, :k]
    return np.take_along_axis(positions, order, 1)


def radius_search(
    snapshot: Snapshot,
    queries: Tensor,  # (q, d) floating point, any device
    least: float,
    metric: Metric,
    allowed: Live | None = None,  # (size,) over positions; None: every live record
) -> Rows:  # (q, m), -1 = none
    """As `flat.radius_search`, computed where the columns lie; a run of positions after the other."""
    if not isinstance(snapshot, OnDevice):
        return flat.radius_search(snapshot, queries, least, metric, allowed)
    dtype, found = torch.promote_types(queries.dtype, torch.float32), [np.empty((len(queries), 0), np.int64)]
    for shard in snapshot.shards:
        scan = _DeviceScan.of(shard.view, shard.of(allowed), 0, metric)
        if scan.count and len(queries):
            near = scan.in_radius(queries.detach().to(shard.view.device, dtype), least)
            found.append(np.where(near < 0, -1, near + shard.low))
    return np.concatenate(found, axis=1)


class _DeviceScan(flat.Scan):
    """The records of one exact search, on a GPU."""

    def __init__(self, view: DeviceView, kept: Kept, start: int, count: int, metric: Metric) -> None:
        super().__init__(view.snapshot, kept.mask, start, count, metric)
        self.view, self.kept = view, kept
        self.queries, self.gathered = QUERIES, GATHERED

    @classmethod
    def of(cls, view: DeviceView, allowed: Live | None, start: int, metric: Metric) -> _DeviceScan:
        """Of what a filter (size,) allows."""
        kept = view.kept(allowed)
        count = int(np.count_nonzero(kept.mask[start:])) if start else kept.number
        return cls(view, kept, start, count, metric)

    def compared(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """As `nearest`, by the kernels of the device, which read the keys once; None where they do not serve."""
        keys, few = self.view.seen.keys, 4 * self.count <= len(self.keep) - self.start
        if keys is None or few or queries.dtype is not torch.float32 or usable(self.view.device) is not None:
            return None
        kept, parts = min(k + 8 + k // 8, self.count), []
        there = self.kept.there[self.start :]
        for asked in torch.split(queries, self.queries):
            scores, positions = gpu.nearest(asked, keys[self.start :], kept, metric=self.metric, keep=there)
            exact, order = self._settled(asked, positions + self.start)
            worst, floor = exact[:, k - 1], scores[:, -1].double()
            unsure = ~floor.isfinite() | scores[:, 0].isnan()
            if kept < self.count:  # negated, so that a NaN counts as unsure
                unsure |= ~(worst > floor + self._slack(asked, worst, order))
            parts.append((order[:, :k], worst, unsure))
        near, worst, unsure = (torch.cat(column) for column in zip(*parts, strict=True))
        return near, worst, unsure

    def _settled(self, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # (q, c), (q, c)
        """Exact scores and positions of candidates, best first, ties by position."""
        positions = positions.sort(dim=1).values
        exact, order = self.scores(queries.double(), positions).sort(dim=1, descending=True, stable=True)
        return exact, positions.gather(1, order)

    def _slack(self, queries: Tensor, worst: Tensor, found: Tensor) -> Tensor:  # (q,) float64
        """As `Probe.slack`, of scores that the kernels sum in float32, wherever they see them from."""
        terms = torch.finfo(torch.float32).eps / 2 * (2 * self.dim + 16)
        lengths: Tensor = torch.linalg.vector_norm(queries.double(), dim=1)
        if self.metric is Metric.L2:
            lengths = (2 * lengths + (-worst).clamp(min=0).sqrt()).square()
        slack: Tensor = terms * lengths * (self._longest(found) if self.metric is Metric.DOT else 1)
        return slack

    def second_round(self, queries: Tensor, worst: Tensor, k: int) -> Rows:
        """As on the CPU; there, where the keys would have to travel."""
        if self.view.seen.keys is not None:
            return super().second_round(queries, worst, k)
        return flat.nearest(self.snapshot, queries.cpu(), k, self.metric, self.kept.mask, self.start)

    @staticmethod
    def merge(best: Best | None, scores: Tensor, positions: Tensor, kept: int) -> Best:
        """As `products.merge`: a GPU sorts whole blocks."""
        here = top(None, scores, positions.expand(scores.shape), kept)
        return here if best is None else top(best, *here, kept)

    def blocks(self, queries: int) -> Iterator[KeyBlock]:
        """The records, as many at a time as their scores leave room for."""
        return self.view.parts(self.kept, self.start, max(4096, min(SCORED // queries, CONVERTED // self.dim, 1 << 20)))

    def keys_at(self, positions: Tensor) -> Tensor:
        """Keys, copied."""
        return self.view.keys_at(positions)

    def scores(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Exact scores (q, c), -inf of those that do not count: they stand where products overflowed."""
        found = _scores(self.view, queries, positions, self.metric)
        return found.masked_fill_(~self.kept.there[positions], -torch.inf)


def _scores(view: DeviceView, queries: Tensor, positions: Tensor, metric: Metric) -> Tensor:
    """Exact scores of positions (q, c), none of them -1, in the dtype of the queries (q, d)."""
    if not positions.shape[1]:
        return queries.new_empty(positions.shape)
    chunk = max(1, GATHERED // (positions.shape[1] * queries.shape[1]))
    parts = zip(torch.split(queries, chunk), torch.split(positions, chunk), strict=True)
    return torch.cat([pair_scores(q.unsqueeze(1), view.keys_at(at).to(q.dtype), metric) for q, at in parts])
