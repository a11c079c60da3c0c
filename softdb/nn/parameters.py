"""The parameters of a Memory as a source: keys and values that are trained, found among the keys as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from softdb.answers import Pooled, Resolve
from softdb.attend import Source
from softdb.attend.request import Candidates, Live, Positions, Request, Scored
from softdb.check import Schema, shown
from softdb.device import nearest as nearest_on_device
from softdb.errors import BadInput
from softdb.index.flat import nearest
from softdb.index.query import Query
from softdb.index.rerank import ordered
from softdb.nn.origin import Origin
from softdb.nn.stale_index import FEWEST, Version
from softdb.pool import pool
from softdb.store import Segment, Snapshot
from softdb.store.snapshot import Block


def chosen(schema: Schema, keys: object, values: object) -> tuple[bool, bool]:
    """Return which of keys and values are trained, as two bools. Raises BadInput for what a memory cannot train."""
    if not isinstance(keys, bool) or not (values is None or isinstance(values, bool)):
        raise BadInput(f"keys is {shown(keys)} and values {shown(values)}; expected True or False")
    if values and schema.value_dim is None:
        what = "labels, which cannot be trained" if schema.has_values else "none: the key serves, and is trained"
        raise BadInput(f"values=True, but this database's values are {what}; leave values out")
    trained = keys, schema.value_dim is not None if values is None else values
    if not any(trained):
        raise BadInput("neither keys nor values would be trained; db.attend asks without training")
    return trained


@dataclass(frozen=True)
class Parameters(Source):
    """Positions are parameters, 0 … n - 1, of which those are live whose record is still there."""

    origin: Origin
    keys: torch.nn.Parameter | None  # (n, d); None: as stored
    values: torch.nn.Parameter | None  # (n, v); None: as stored
    version: Version  # a copy of the keys as they were, or none
    overfetch: int  # how many times k candidates are looked at

    @property
    def live(self) -> Live:
        """Mask of the parameters whose records are there."""
        return self.origin.present

    @property
    def count(self) -> int:
        """Number of those records."""
        return self.origin.count

    @property
    def width(self) -> int:
        """v."""
        return self.origin.db.core.schema.pooled_dim

    @property
    def num_classes(self) -> int | None:
        """The database's."""
        return self.origin.db.core.schema.num_classes

    @property
    def resolve(self) -> Resolve:
        """The database's ids and payloads."""
        return self.origin.db.core.store.read

    @property
    def stale(self) -> bool:
        """True if candidates come from keys as they were; else comparing them all, as they are, costs no more.

        On a GPU it never does: what fits there is read in some milliseconds.
        """
        keys = self.keys
        if keys is None or len(keys) < FEWEST or keys.dtype is not torch.float32 or keys.device.type != "cpu":
            return False
        return self.version.number > 0 or self.origin.indexed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`, by the parameters as they are, without a graph."""
        keep = self.live if allowed is None else self.live & allowed
        for positions in np.split(which := np.flatnonzero(keep[start:]) + start, range(size, len(which), size)):
            if len(positions):
                keys = self._of(self.keys, self.origin.keys, positions)
                values = keys if not self.origin.db.core.schema.has_values else None
                if values is None:
                    values = self._of(self.values, self.origin.values, positions)
                yield Block(torch.from_numpy(positions), keys, values)

    @staticmethod
    def _of(trained: Tensor | None, stored: Callable[[Positions], Tensor], positions: Positions) -> Tensor:
        return stored(positions) if trained is None else trained.detach()[positions]

    def find(self, request: Request) -> Candidates:
        """The k nearest by the keys as they are, of overfetch · k candidates; without an index all are compared.

        Cost: a search, and q k overfetch d; without an index q n d.
        """
        queries, k, origin = request.queries.detach(), min(request.k, self.count), self.origin
        if not k:
            return Candidates(np.zeros((len(queries), 0), np.int64), "flat")
        if self.keys is None:
            return Candidates(*origin.find(queries, k))
        if request.exact or not self.stale:
            return Candidates(self._nearest(queries, k), "flat")
        count = min(k * self.overfetch, self.count)
        if self.version.number:
            keep = None if origin.count == len(origin.rows) else origin.present
            found, finder = self.version.find(queries, count, keep), "stale index"
        else:
            found, finder = origin.find(queries, count, certain=k)
            if finder == "flat":  # so many that the index does not serve
                return Candidates(self._nearest(queries, k), finder)
        return Candidates(ordered(self._columns, queries.float().numpy(), found, k, origin.metric)[0], finder)

    def _nearest(self, queries: Tensor, k: int) -> Positions:  # (q, k)
        """Every key that is there is compared, where the keys lie."""
        keys = self._keys
        if keys.device.type == "cpu":
            return nearest(self._columns, Query(queries, k, self.origin.metric))
        gone = self.count < len(keys)
        keep = torch.from_numpy(self.live).to(keys.device) if gone else None
        own, metric = queries.to(keys.dtype), self.origin.metric
        return np.asarray(nearest_on_device(own, keys.contiguous(), k, metric=metric, keep=keep)[1].cpu().numpy())

    @property
    def _keys(self) -> Tensor:
        """Trained keys, without a graph. Raises BadInput where they are less than float32."""
        assert self.keys is not None
        if self.keys.dtype not in (torch.float32, torch.float64):
            raise BadInput(
                f"the keys are {self.keys.dtype}, in which small steps are lost; keep the memory in float32, "
                "memory.float(), and the rest of the model as it is"
            )
        return self.keys.detach()

    @property
    def _columns(self) -> Snapshot:
        """Trained keys as finding reads records: no copy, unless their rows are not contiguous."""
        keys = self._keys
        return Snapshot.of(0, (Segment(0, 0, None, keys.contiguous().numpy(), None),), self.live)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Scores, with sparse gradients to the keys found. Raises BadInput where one is NaN or infinite."""
        queries, missing = request.queries, positions < 0
        if self.keys is None:
            keys = self.origin.keys(positions).to(queries)
        else:  # a record of the query stands for one that is missing, so that no other key gets a gradient, if of 0
            real = np.where(missing, positions.max(1, initial=0, keepdims=True), positions)
            keys = F.embedding(torch.from_numpy(real).to(queries.device), self.keys, sparse=True)
        scores = request.score(queries, keys)
        if not bool(scores.detach().isfinite().all()):
            raise BadInput(
                "scores are NaN or infinite: training has moved the keys too far; begin again from the last commit "
                "with smaller steps"
            )
        return Scored(positions, scores.masked_fill(torch.from_numpy(missing).to(scores.device), -torch.inf), keys)

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """The weighted sum of values, with sparse gradients to those found."""
        schema, keys = self.origin.db.core.schema, found.keys
        if not schema.has_values and keys is not None:
            return pool(weights, keys)
        if self.values is None or not found.positions.size:
            stored = self.origin.values(found.positions).to(weights.device)
            return pool(weights, stored, schema.num_classes)
        # holds no (q, k, v) copy of the values, as a gather would
        factors = weights.to(self.values.dtype)
        which = torch.from_numpy(found.positions).to(weights.device)
        output = F.embedding_bag(which, self.values, mode="sum", per_sample_weights=factors, sparse=True)
        return output.to(weights.dtype)

    def rows(self, positions: Positions) -> Positions:
        """Permanent rows of their records."""
        return np.where(positions < 0, -1, self.origin.rows[positions])


def on(pooled: Pooled, device: torch.device) -> Pooled:
    """The answer on another device."""
    assert pooled.hits is not None
    hits = replace(pooled.hits, rows=pooled.hits.rows.to(device), scores=pooled.hits.scores.to(device))
    columns: dict[str, Any] = {name: one.to(device) for name, one in vars(pooled).items() if isinstance(one, Tensor)}
    return replace(pooled, hits=hits, **columns)
