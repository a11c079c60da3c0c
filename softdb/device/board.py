"""The devices that one database computes on: `softdb.index.contract.Devices`."""

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
from softdb.index.contract import Found, Index, Recent, Rows
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.reports import DeviceReport
from softdb.store import Snapshot

_log = logging.getLogger("softdb")

SMALL = 1 << 27  # numbers that are compared in about a millisecond by a GPU that reads 0.5 TB/s
UNEVEN = 1.5  # times its share of the records, from which on what the last device holds is shared out anew


class Board:
    """Devices, each with a run of the records; FAISS' index lies on the first."""

    def __init__(self, *devices: torch.device, dtype: torch.dtype | None = None) -> None:
        self.cards = tuple(Card(device, dtype) for device in devices)
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
    def name(self) -> str:
        """All devices, as they are shown."""
        return " and ".join(str(card.device) for card in self.cards)

    @cached_property
    def engines(self) -> dict[str, type[OnGPU]]:
        """Kinds of index that have a form here; several devices compare every record."""
        return engines(self, self.device) if len(self.cards) == 1 else {}

    def shards(self, snapshot: Snapshot) -> tuple[Shard, ...]:
        """The records of a snapshot, as they lie on the devices: runs of positions."""
        if len(self.cards) == 1:
            return (Shard(snapshot, self.cards[0]),)
        parts = self._parts.of(lambda: self._apart(snapshot), snapshot)
        lows = itertools.accumulate((part.size for part in parts), initial=0)
        return tuple(Shard(part, card, low) for card, part, low in zip(self.cards, parts, lows, strict=False))

    def _apart(self, snapshot: Snapshot) -> tuple[Snapshot, ...]:
        """A part for each card; new records come to the last one, until it has far more than the others."""
        size, cards = snapshot.size, len(self.cards)
        with self._lock:
            last = size - self._cuts[-1] if self._cuts else size
            if not -size < last <= UNEVEN * size / cards:  # or most of them were compacted away
                self._cuts = tuple(size * i // cards for i in range(1, cards))
            ends = itertools.pairwise((0, *(min(cut, size) for cut in self._cuts), size))
        return tuple(snapshot.part(low, high) for low, high in ends if low < high)

    def _holds(self, device: torch.device) -> bool:
        """Return True if a device is one of these."""
        own = [(card.device.type, card.device.index if card.device.type == "cuda" else None) for card in self.cards]
        return (device.type, device.index) in own

    def columns(self, snapshot: Snapshot, device: torch.device) -> DeviceColumns | None:
        """A snapshot's columns for queries that lie on a device; None where it has none, or the host's serve."""
        held = snapshot.size and self._holds(device)
        return DeviceColumns(snapshot, self.shards(snapshot)) if held else None

    def beside(self, snapshot: Snapshot, device: torch.device) -> bool:
        """Return True if queries on a device lie beside all keys."""
        return self._holds(device) and self._resident(snapshot)

    def _resident(self, snapshot: Snapshot) -> bool:
        return all(shard.keys is not None for shard in self.shards(snapshot))

    def small(self, snapshot: Snapshot) -> bool:
        """Return True if a search of every record takes a moment: the keys are here, and few."""
        if not snapshot.size:
            return True
        numbers = snapshot.size * snapshot.segments[0].keys.shape[1]
        return numbers <= SMALL and self._resident(snapshot)

    def nearest(self, snapshot: Snapshot, query: Query, start: int = 0) -> Rows:  # (q, k)
        """As `softdb.index.flat.nearest`, computed here."""
        return compare.nearest(self.shards(snapshot) if snapshot.count and len(query.queries) else (), query, start)

    def find(self, snapshot: Snapshot, index: Index, query: Query) -> Found | None:  # (q, k)
        """The k nearest by an index that lies here; None where comparing every record costs less."""
        assert isinstance(index, OnGPU)
        return probe.find(Shard(snapshot, self.cards[0]), index, query)

    def placed(self, index: Index) -> Index:
        """An index of the CPU, copied here; as it is, with a line in the log, where it has no form here."""
        if not self.engines:
            _log.warning("the index stays on the CPU: the GPUs together compare every record")
            return index
        return uploaded(index, self.engines, self.device)

    def require_faiss(self) -> None:
        """Raise MissingDependency where FAISS has no GPU part, or does not see the device."""
        gpu_faiss(self.device)

    def require_process(self) -> None:
        """Raise DeviceFailed in a process that was forked from one that used CUDA."""
        if forked(self.device):
            raise DeviceFailed(
                f"this process was forked from one that used CUDA, and cannot use {self.name}; go on with "
                "db.to('cpu'), or start processes by 'spawn'"
            )

    def report(self, schema: Schema) -> DeviceReport:
        """Columns that lie here."""
        dtype = schema.dtype.name if self.dtype is None else str(self.dtype).removeprefix("torch.")
        keys, values = [card.keys for card in self.cards], [card.values for card in self.cards]
        size = sum(column.bytes for column in (*keys, *values))
        pooled = _state(values) if schema.has_values else "the keys"
        kernels = usable(self.device) or "triton"
        return DeviceReport([str(card.device) for card in self.cards], _state(keys), pooled, dtype, size, kernels)

    def forget(self) -> None:
        """Give all memory back."""
        for card in self.cards:
            card.forget()


def _state(columns: list[DeviceColumn]) -> str:
    """Place of one column, on all devices."""
    wanted = [column for column in columns if column.asked]
    if not wanted:
        return "not asked for yet"
    return "streamed" if any(not column.bytes for column in wanted) else "resident"
