"""Columns on devices: those of a generation, with the methods of `Snapshot`, and plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.check import Metric
from softdb.device import compare
from softdb.device.availability import usable
from softdb.device.pooled import nearest, pooled
from softdb.device.resident import Shard
from softdb.index.contract import Floats, Live, Rows
from softdb.index.placement import PlacedColumns, SoftmaxPass
from softdb.index.products import pair_scores
from softdb.index.query import Query
from softdb.lazy import cached_property
from softdb.pool import State, merge
from softdb.store import Snapshot
from softdb.store.snapshot import Block, value_size

GATHERED = 1 << 22  # numbers of candidates' keys scored at once: 16 MB


def served(device: torch.device) -> bool:
    """Return True if queries over tensors on this device are computed on the device."""
    return device.type == "cuda" or usable(device) is None


class DeviceTensors(NamedTuple):
    """Keys and values as tensors on one device, with their graph."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v), or int labels (n,)

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """Pool as `ColumnPass.pooled`."""
        words: dict[str, Any] = {"metric": what.metric, "scale": what.scale, "num_classes": what.num_classes}
        queries, keep, mask = self._beside(what)
        output, lse = pooled(queries, self.keys, self.values if what.pools else None, keep=keep, mask=mask, **words)
        return output.to(what.queries.device), lse.to(what.queries.device)

    def nearest(self, what: SoftmaxPass, k: int) -> Rows | None:  # (q, k)
        """Search as `TensorPass.nearest`."""
        queries, keep, mask = self._beside(what)
        scores, positions = nearest(queries, self.keys, k, metric=what.metric, keep=keep, mask=mask)
        return None if bool(scores.isnan().any()) else np.asarray(positions.cpu().numpy())

    def _beside(self, what: SoftmaxPass) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device = self.keys.device
        keep, mask = (None if mask is None else mask.to(device) for mask in (what.keep, what.mask))
        return what.queries.to(device), keep, mask


def placed_tensors(keys: Tensor, values: Tensor) -> DeviceTensors | None:
    """Return tensors wrapped for computing on their device; None for tensors of the CPU."""
    return DeviceTensors(keys, values) if served(keys.device) else None


@dataclass(frozen=True)
class DeviceColumns(PlacedColumns):
    """Columns of a generation with at least one record, in ranges on devices."""

    snapshot: Snapshot
    shards: tuple[Shard, ...]

    @cached_property
    def value_size(self) -> float:
        """Root mean square of ‖v‖, as `Snapshot.value_size`."""
        return value_size(self.generation, self.size, self.values_at)

    @property
    def device(self) -> torch.device:
        """Device of the answers."""
        return self.shards[0].device

    def resident(self, pools: bool) -> bool:
        """Return True if the keys, and with `pools` the values, stay on the devices; else they are streamed."""
        return all(shard.keys is not None and (not pools or shard.values is not None) for shard in self.shards)

    def place(self, pools: bool) -> str:
        """Return the suffix of an answer's `finder`."""
        names = " and ".join(str(shard.device) for shard in self.shards)
        return f" on {names}" if self.resident(pools) else f" streamed to {names}"

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
        """Pool as `ColumnPass.pooled`: each device pools its range, and the states merge by their normalisers."""
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
        """Return keys as `Snapshot.keys_at`, on the device."""
        return self._gathered(False, positions)

    def values_at(self, positions: Rows) -> Tensor:
        """Return values as `Snapshot.values_at`, on the device."""
        values = self._gathered(True, positions)
        return values if values.is_floating_point() else values.long()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks as `Snapshot.blocks`, with keys and values on the device and positions on the host."""
        for shard in self.shards:
            live = shard.live_mask(shard.of(allowed))
            for block in shard.blocks(size, live, max(0, start - shard.low)):
                keys = block.keys.to(self.device)
                values = keys if block.values is block.keys else block.values.to(self.device)
                yield Block(block.positions + shard.low, keys, values)

    def scores_at(
        self,
        queries: Floats,  # (q, d)
        positions: Rows,  # (q, c), -1 = none
        metric: Metric,
        dtype: torch.dtype,
    ) -> NDArray[Any]:  # (q, c)
        """Return exact scores of candidates, -inf for -1. Only the scores are copied to the host."""
        scores = np.full(positions.shape, -np.inf, np.dtype(str(dtype).removeprefix("torch.")))
        chunk = max(1, GATHERED // max(1, positions.shape[1] * queries.shape[1]))
        for low in range(0, len(positions) if positions.size else 0, chunk):
            batch = slice(low, low + chunk)
            keys = self.keys_at(positions[batch]).to(dtype)
            exact = pair_scores(torch.from_numpy(queries[batch]).to(keys).unsqueeze(1), keys, metric).cpu().numpy()
            scores[batch] = np.where(positions[batch] < 0, -np.inf, exact)
        return scores

    def radius_search(self, query: Query) -> Rows:  # (q, m), -1 = none
        """Return positions within a radius, as `softdb.index.flat.radius_search`."""
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
