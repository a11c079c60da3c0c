"""`Board`: the devices of a database handle. Implements `softdb.index.contract.Devices`."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

import torch

from softdb.check import Schema
from softdb.device import compare, probe
from softdb.device.availability import forked, usable
from softdb.device.faiss_lists import OnGPU, engines, gpu_faiss, uploaded
from softdb.device.placed import DeviceColumns
from softdb.device.resident import Card, DeviceColumn, Shard
from softdb.errors import DeviceFailed
from softdb.index.contract import FinderResult, Index, Recent, Rows
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.reports import DeviceReport
from softdb.store import Snapshot

_log = logging.getLogger("softdb")

SMALL = 1 << 27  # largest number of key elements (n d) that a GPU compares in about 1 ms (at 0.5 TB/s)
UNEVEN = 1.5  # records are divided anew if the last device has more than UNEVEN times an equal share


class Board:
    """Devices of a database handle. Each device holds a range of the records; the first also holds the FAISS index."""

    def __init__(self, *devices: torch.device, dtype: torch.dtype | None = None) -> None:
        self.cards = tuple(Card(device, dtype) for device in devices)
        self.device = self.cards[0].device
        self.dtype = dtype  # dtype of the columns on the devices; None: as stored
        self._lock = threading.Lock()
        self._cuts: tuple[int, ...] = ()  # first positions of all cards but the first
        self._parts: Recent[tuple[Snapshot, ...]] = Recent(1)

    @classmethod
    def of(cls, devices: Sequence[torch.device] | None, dtype: torch.dtype | None = None) -> Board | None:
        """Return a board of these devices; None if `devices` is empty or the CPU."""
        return None if not devices or devices[0].type == "cpu" else cls(*devices, dtype=dtype)

    @property
    def name(self) -> str:
        """Names of all devices, for messages."""
        return " and ".join(str(card.device) for card in self.cards)

    @cached_property
    def engines(self) -> dict[str, type[OnGPU]]:
        """{kind: class} of indexes for the device; empty for several devices, which compare all records."""
        return engines(self, self.device) if len(self.cards) == 1 else {}

    def shards(self, snapshot: Snapshot) -> tuple[Shard, ...]:
        """Return, for each device that holds records, the range of the snapshot's records that it holds."""
        if len(self.cards) == 1:
            return (Shard(snapshot, self.cards[0]),)
        runs = self._parts.of(lambda: self._apart(snapshot), snapshot)
        lows = itertools.accumulate((run.size for run in runs), initial=0)
        return tuple(Shard(run, card, low) for card, run, low in zip(self.cards, runs, lows, strict=False))

    def _apart(self, snapshot: Snapshot) -> tuple[Snapshot, ...]:
        """Divide a snapshot into one range for each card. New records go to the last card until it holds too many."""
        size, cards = snapshot.size, len(self.cards)
        with self._lock:
            last = size - self._cuts[-1] if self._cuts else size
            if not -size < last <= UNEVEN * size / cards:  # out of bounds also after a compaction
                self._cuts = tuple(size * i // cards for i in range(1, cards))
            ends = itertools.pairwise((0, *(min(cut, size) for cut in self._cuts), size))
        return tuple(snapshot.part(low, high) for low, high in ends if low < high)

    def _holds(self, device: torch.device) -> bool:
        """Return True if this board includes the device."""
        own = [(card.device.type, card.device.index if card.device.type == "cuda" else None) for card in self.cards]
        return (device.type, device.index) in own

    def columns(self, snapshot: Snapshot, device: torch.device) -> DeviceColumns | None:
        """Return a snapshot's columns on the board; None if the snapshot is empty or the board lacks `device`."""
        serves = snapshot.size and self._holds(device)
        return DeviceColumns(snapshot, self.shards(snapshot)) if serves else None

    def beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Return True if the board includes `device` and all keys are resident on the board."""
        return self._holds(device) and self._resident(snapshot)

    def _resident(self, snapshot: Snapshot) -> bool:
        return all(shard.keys is not None for shard in self.shards(snapshot))

    def small(self, snapshot: Snapshot) -> bool:
        """Return True if the keys are resident, and comparing queries with all keys takes at most about 1 ms."""
        if not snapshot.size:
            return True
        numbers = snapshot.size * snapshot.segments[0].keys.shape[1]
        return numbers <= SMALL and self._resident(snapshot)

    def nearest(self, snapshot: Snapshot, query: Query, start: int = 0) -> Rows:  # (q, k)
        """Return positions (q, k) of the k nearest records, by exact search on the devices; -1 pads missing records."""
        return compare.nearest(self.shards(snapshot) if snapshot.count and len(query.queries) else (), query, start)

    def find(self, snapshot: Snapshot, index: Index, query: Query) -> FinderResult | None:  # (q, k)
        """Search an index on the device for the k nearest records; return None if comparing all records costs less."""
        assert isinstance(index, OnGPU)
        return probe.find(Shard(snapshot, self.cards[0]), index, query)

    def placed(self, index: Index) -> Index:
        """Copy an index to the device. If that is impossible, log a warning and return the index itself."""
        if not self.engines:
            _log.warning("the index stays on the CPU: with several GPUs, searches compare every record")
            return index
        return uploaded(index, self.engines, self.device)

    def require_faiss(self) -> None:
        """Raise MissingDependency if FAISS lacks GPU support or does not see the device."""
        gpu_faiss(self.device)

    def require_process(self) -> None:
        """Raise DeviceFailed if this process cannot use CUDA because it was forked from a process that used CUDA."""
        if forked(self.device):
            raise DeviceFailed(
                f"this process was forked from one that used CUDA, and cannot use {self.name}; call db.to('cpu'), or "
                "start processes by 'spawn'"
            )

    def report(self, schema: Schema) -> DeviceReport:
        """Report devices, dtype and bytes of the columns, and whether they are resident or streamed."""
        dtype = schema.dtype.name if self.dtype is None else str(self.dtype).removeprefix("torch.")
        keys, values = [card.keys for card in self.cards], [card.values for card in self.cards]
        size = sum(column.bytes for column in (*keys, *values))
        pooled = _state(values) if schema.has_values else "the keys"
        kernels = usable(self.device) or "triton"
        return DeviceReport([str(card.device) for card in self.cards], _state(keys), pooled, dtype, size, kernels)

    def forget(self) -> None:
        """Free the memory of all columns and masks on the devices."""
        for card in self.cards:
            card.forget()


def _state(columns: list[DeviceColumn]) -> str:
    """Return "resident", "streamed" or "not asked for yet" for a column, given its part on each device."""
    wanted = [column for column in columns if column.requested]
    if not wanted:
        return "not asked for yet"
    return "streamed" if any(not column.bytes for column in wanted) else "resident"
