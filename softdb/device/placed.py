"""Columns that lie on devices: those of a generation, read as a `Snapshot` is, and plain tensors."""

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

GATHERED = 1 << 22  # numbers of keys scored at once where candidates are listed: 16 MB


def served(device: torch.device) -> bool:
    """Return True if tensors there are asked where they lie."""
    return device.type == "cuda" or usable(device) is None


class DeviceTensors(NamedTuple):
    """Keys and values as tensors on one device, with their graph."""

    keys: Tensor  # (n, d)
    values: Tensor  # (n, v), or int labels (n,)

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """As `ColumnPass.pooled`."""
        words: dict[str, Any] = {"metric": what.metric, "scale": what.scale, "num_classes": what.num_classes}
        queries, keep, mask = self._beside(what)
        output, lse = pooled(queries, self.keys, self.values if what.pools else None, keep=keep, mask=mask, **words)
        return output.to(what.queries.device), lse.to(what.queries.device)

    def nearest(self, what: SoftmaxPass, k: int) -> Rows | None:  # (q, k)
        """As `TensorPass.nearest`."""
        queries, keep, mask = self._beside(what)
        scores, positions = nearest(queries, self.keys, k, metric=what.metric, keep=keep, mask=mask)
        return None if bool(scores.isnan().any()) else np.asarray(positions.cpu().numpy())

    def _beside(self, what: SoftmaxPass) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device = self.keys.device
        keep, mask = (None if one is None else one.to(device) for one in (what.keep, what.mask))
        return what.queries.to(device), keep, mask


def placed_tensors(keys: Tensor, values: Tensor) -> DeviceTensors | None:
    """Tensors that are asked on their device; None for those of the CPU."""
    return DeviceTensors(keys, values) if served(keys.device) else None


@dataclass(frozen=True)
class DeviceColumns(PlacedColumns):
    """A generation with at least one record, in runs on devices."""

    snapshot: Snapshot
    shards: tuple[Shard, ...]

    @cached_property
    def value_size(self) -> float:
        """As `Snapshot.value_size`."""
        return value_size(self.generation, self.size, self.values_at)

    def first(self, size: int) -> DeviceColumns:
        """At most so many of the first records, all live: those of the first device."""
        shard = self.shards[0].first(size)
        return DeviceColumns(shard.snapshot, (shard,))

    @property
    def device(self) -> torch.device:
        """The device that answers come from."""
        return self.shards[0].device

    def resident(self, pools: bool) -> bool:
        """Return True if the keys, and the values if they are pooled, lie there; else they pass through."""
        return all(shard.keys is not None and (not pools or shard.values is not None) for shard in self.shards)

    def place(self, pools: bool) -> str:
        """Suffix of an answer's `finder`."""
        names = " and ".join(str(shard.device) for shard in self.shards)
        return f" on {names}" if self.resident(pools) else f" streamed to {names}"

    def pooled(self, what: SoftmaxPass) -> tuple[Tensor, Tensor] | None:  # (q, v), (q,)
        """As `ColumnPass.pooled`: each device passes over its run, and the parts merge by their normalisers."""
        if not self.resident(pools=True):
            return None
        states = []
        for shard in self.shards:
            rows, keys, values, live = slice(shard.low, shard.high), shard.keys, shard.values, shard.kept(None)
            assert keys is not None
            assert values is not None
            keep = None if live.number == len(keys) else live.there
            if what.keep is not None:
                allowed = what.keep[rows].to(shard.device)
                keep = allowed if keep is None else keep & allowed
            mask = None if what.mask is None else what.mask[:, rows]
            states.append(State(*DeviceTensors(keys, values).pooled(what._replace(keep=keep, mask=mask))))
        output, lse = states[0] if len(states) == 1 else merge(states)
        return output, lse

    def keys_at(self, positions: Rows) -> Tensor:
        """As `Snapshot.keys_at`, on the device."""
        return self._gathered(False, positions)

    def values_at(self, positions: Rows) -> Tensor:
        """As `Snapshot.values_at`, on the device."""
        found = self._gathered(True, positions)
        return found if found.is_floating_point() else found.long()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`: keys and values on the device, positions on the host."""
        for shard in self.shards:
            kept = shard.kept(shard.of(allowed))
            for block in shard.blocks(size, kept, max(0, start - shard.low)):
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
        """Exact scores of candidates, -inf for none: of what is gathered on the device the scores alone travel."""
        found = np.full(positions.shape, -np.inf, np.dtype(str(dtype).removeprefix("torch.")))
        chunk = max(1, GATHERED // max(1, positions.shape[1] * queries.shape[1]))
        for low in range(0, len(positions) if positions.size else 0, chunk):
            part = slice(low, low + chunk)
            keys = self.keys_at(positions[part]).to(dtype)
            scores = pair_scores(torch.from_numpy(queries[part]).to(keys).unsqueeze(1), keys, metric).cpu().numpy()
            found[part] = np.where(positions[part] < 0, -np.inf, scores)
        return found

    def radius_search(self, query: Query) -> Rows:  # (q, m), -1 = none
        """As `softdb.index.flat.radius_search`."""
        return compare.radius_search(self.shards, query)

    def _gathered(self, values: bool, positions: Rows) -> Tensor:
        flat = positions.reshape(-1)
        parts, places = [], []
        for shard in self.shards:
            inside = np.flatnonzero((flat >= shard.low) & (flat < shard.high))
            own = torch.from_numpy(flat[inside] - shard.low).to(shard.device)
            found = shard.values_at(own) if values else shard.keys_at(own)
            if len(inside) == len(flat):
                return found.to(self.device).view(*positions.shape, *found.shape[1:])
            parts.append(found.to(self.device))
            places.append(torch.from_numpy(inside))
        found = torch.cat(parts)
        out = found.new_zeros(len(flat), *found.shape[1:])
        out[torch.cat(places).to(self.device)] = found
        return out.view(*positions.shape, *found.shape[1:])
