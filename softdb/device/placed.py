"""Keys and values on devices: `DeviceTensors` for plain tensors, `DeviceColumns` for a database's snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.device import compare
from softdb.device.availability import usable
from softdb.device.pooled import nearest, pooled
from softdb.device.resident import Shard
from softdb.index.contract import Live, Rows
from softdb.index.placement import PlacedColumns, SoftmaxPass
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.pool import State, merge
from softdb.store import Snapshot
from softdb.store.snapshot import Block, value_size


def served(device: torch.device) -> bool:
    """Return True if softdb computes queries over tensors on this device by `softdb.device`."""
    return device.type == "cuda" or usable(device) is None


class DeviceTensors(NamedTuple):
    """Keys and values as tensors on one device. Answers have gradients to both."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v), or int labels (n,)

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """Return the weighted mean of the values, and lse; see `ColumnPass.pooled`."""
        words: dict[str, Any] = {"metric": what.metric, "scale": what.scale, "num_classes": what.num_classes}
        queries, keep, mask = self._beside(what)
        output, lse = pooled(queries, self.keys, self.values if what.pools else None, keep=keep, mask=mask, **words)
        return output.to(what.queries.device), lse.to(what.queries.device)

    def nearest(self, what: SoftmaxPass, k: int) -> Rows | None:  # (q, k)
        """Return positions of the k nearest records; None if a score overflows. See `TensorPass.nearest`."""
        queries, keep, mask = self._beside(what)
        scores, positions = nearest(queries, self.keys, k, metric=what.metric, keep=keep, mask=mask)
        return None if bool(scores.isnan().any()) else np.asarray(positions.cpu().numpy())

    def _beside(self, what: SoftmaxPass) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device = self.keys.device
        keep, mask = (None if mask is None else mask.to(device) for mask in (what.keep, what.mask))
        return what.queries.to(device), keep, mask


def placed_tensors(keys: Tensor, values: Tensor) -> DeviceTensors | None:
    """Return `DeviceTensors` for tensors on a GPU; None for tensors on the CPU."""
    return DeviceTensors(keys, values) if served(keys.device) else None


@dataclass(frozen=True)
class DeviceColumns(PlacedColumns):
    """Columns of a snapshot with at least one record; each device holds a range of the records."""

    snapshot: Snapshot
    shards: tuple[Shard, ...]

    @cached_property
    def value_size(self) -> float:
        """Root mean square of ‖v‖ over the values v; see `Snapshot.value_size`."""
        return value_size(self.generation, self.size, self.values_at)

    @property
    def device(self) -> torch.device:
        """Device on which answers are returned: the first."""
        return self.shards[0].device

    def resident(self, pools: bool) -> bool:
        """Return True if the keys (and with `pools` the values) stay on the devices; False if they are streamed."""
        return all(shard.keys is not None and (not pools or shard.values is not None) for shard in self.shards)

    def place(self, pools: bool) -> str:
        """Return the suffix of an answer's `finder`, such as " on cuda:0"."""
        names = " and ".join(str(shard.device) for shard in self.shards)
        return f" on {names}" if self.resident(pools) else f" streamed to {names}"

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
        """Pool each device's range, and merge the outputs by lse; None if values are not resident. See `ColumnPass`."""
        if not self.resident(pools=True):
            return None
        states = []
        for shard in self.shards:
            rows, keys, values, live = slice(shard.low, shard.high), shard.keys, shard.values, shard.live_mask(None)
            assert keys is not None
            assert values is not None
            keep = None if live.number == len(keys) else live.on_device
            if what.keep is not None:
                allowed = what.keep[rows].to(shard.device)
                keep = allowed if keep is None else keep & allowed
            mask = None if what.mask is None else what.mask[:, rows]
            states.append(State(*DeviceTensors(keys, values).pooled(what._replace(keep=keep, mask=mask))))
        output, lse = states[0] if len(states) == 1 else merge(states)
        return output, lse

    def keys_at(self, positions: Rows) -> Tensor:
        """Return the keys at these positions, on the device; see `Snapshot.keys_at`."""
        return self._gathered(False, positions)

    def values_at(self, positions: Rows) -> Tensor:
        """Return the values at these positions, on the device; see `Snapshot.values_at`."""
        values = self._gathered(True, positions)
        return values if values.is_floating_point() else values.long()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks of records: keys and values on the device, positions on the host. See `Snapshot.blocks`."""
        for shard in self.shards:
            live = shard.live_mask(shard.of(allowed))
            for block in shard.blocks(size, live, max(0, start - shard.low)):
                keys = block.keys.to(self.device)
                values = keys if block.values is block.keys else block.values.to(self.device)
                yield Block(block.positions + shard.low, keys, values)

    def radius_search(self, query: Query) -> Rows:  # (q, m), -1 = none
        """Return positions of all records within the query's radius; see `softdb.index.flat.radius_search`."""
        return compare.radius_search(self.shards, query)

    def _gathered(self, values: bool, positions: Rows) -> Tensor:
        flat = positions.reshape(-1)
        shard_columns, places = [], []
        for shard in self.shards:
            inside = np.flatnonzero((flat >= shard.low) & (flat < shard.high))
            own = torch.from_numpy(flat[inside] - shard.low).to(shard.device)
            column = shard.values_at(own) if values else shard.keys_at(own)
            if len(inside) == len(flat):
                return column.to(self.device).view(*positions.shape, *column.shape[1:])
            shard_columns.append(column.to(self.device))
            places.append(torch.from_numpy(inside))
        column = torch.cat(shard_columns)
        ordered = column.new_zeros(len(flat), *column.shape[1:])
        ordered[torch.cat(places).to(self.device)] = column
        return ordered.view(*positions.shape, *column.shape[1:])
