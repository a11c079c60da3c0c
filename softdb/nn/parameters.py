"""The parameters of a Memory as a source: candidates come from earlier keys, scores from the current ones."""

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
from softdb.nn.sparse_rows import sums_of_rows
from softdb.nn.stale_index import FEWEST, Version
from softdb.pool import pool
from softdb.store import Segment, Snapshot
from softdb.store.snapshot import Block


def chosen(schema: Schema, keys: object, values: object) -> tuple[bool, bool]:
    """Return which of keys and values are trained, as two bools. Raises BadInput for what a memory cannot train."""
    if not isinstance(keys, bool) or not (values is None or isinstance(values, bool)):
        raise BadInput(f"keys is {shown(keys)} and values {shown(values)}; expected True or False")
    if values and schema.value_dim is None:
        stored = "labels, which cannot be trained" if schema.has_values else "none: the key serves, and is trained"
        raise BadInput(f"values=True, but this database's values are {stored}; leave values out")
    trained = keys, schema.value_dim is not None if values is None else values
    if not any(trained):
        raise BadInput("neither keys nor values would be trained; train one of them, or use db.attend")
    return trained


@dataclass(frozen=True)
class Parameters(Source):
    """Source whose positions are the parameters, 0 … n - 1; a parameter is live while its record is in the database."""

    origin: Origin
    keys: torch.nn.Parameter | None  # (n, d); None: as stored
    values: torch.nn.Parameter | None  # (n, v); None: as stored
    version: Version  # a copy of earlier keys; number 0: none
    overfetch: int  # number of candidates scored, as a multiple of k

    @property
    def live(self) -> Live:
        """Mask of the parameters whose records are in the database."""
        return self.origin.present

    @property
    def count(self) -> int:
        """Number of live parameters."""
        return self.origin.count

    @property
    def width(self) -> int:
        """Width v of the values."""
        return self.origin.db.core.schema.pooled_dim

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the database's labels; None without labels."""
        return self.origin.db.core.schema.num_classes

    @property
    def resolve(self) -> Resolve:
        """Function that reads ids and payloads of rows from the database."""
        return self.origin.db.core.store.read

    @property
    def stale(self) -> bool:
        """True if candidates come from earlier keys; False if all current keys are compared.

        Always False on a GPU, where comparing all keys takes a few milliseconds.
        """
        keys = self.keys
        if keys is None or len(keys) < FEWEST or keys.dtype is not torch.float32 or keys.device.type != "cpu":
            return False
        return self.version.number > 0 or self.origin.indexed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Yield blocks of the live and allowed parameters without a graph; see `Snapshot.blocks`."""
        keep = self.live if allowed is None else self.live & allowed
        for positions in np.split(selected := np.flatnonzero(keep[start:]) + start, range(size, len(selected), size)):
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
        """Find the k nearest by the current keys among overfetch · k candidates; without an index, among all records.

        Cost: a search, and q k overfetch d; without an index q n d.
        """
        queries, k, origin = request.vectors.detach(), min(request.k, self.count), self.origin
        if not k:
            return Candidates(np.zeros((len(queries), 0), np.int64), "flat")
        if self.keys is None:
            return Candidates(*origin.find(queries, k))
        if request.exact or not self.stale:
            return Candidates(self._nearest(queries, k), "flat")
        count = min(k * self.overfetch, self.count)
        if self.version.number:
            keep = None if origin.count == len(origin.rows) else origin.present
            candidates, finder = self.version.find(queries, count, keep), "stale index"
        else:
            candidates, finder = origin.find(queries, count, certain=k)
            if finder == "flat":  # the index is no faster for so many candidates
                return Candidates(self._nearest(queries, k), finder)
        return Candidates(ordered(self._columns, queries.float().numpy(), candidates, k, origin.metric)[0], finder)

    def _nearest(self, queries: Tensor, k: int) -> Positions:  # (q, k)
        """Return the k nearest live parameters; compares all current keys, on the device of the keys."""
        keys = self._keys
        if keys.device.type == "cpu":
            return nearest(self._columns, Query(queries, k, self.origin.metric))
        keep = torch.from_numpy(self.live).to(keys.device) if self.count < len(keys) else None
        vectors, metric = queries.to(keys.dtype), self.origin.metric
        return np.asarray(nearest_on_device(vectors, keys.contiguous(), k, metric=metric, keep=keep)[1].cpu().numpy())

    @property
    def _keys(self) -> Tensor:
        """Trained keys, without a graph. Raises BadInput for a precision below float32."""
        assert self.keys is not None
        if self.keys.dtype not in (torch.float32, torch.float64):
            raise BadInput(
                f"the keys are {self.keys.dtype}, in which small steps are lost; keep the memory in float32, "
                "memory.float(), and the rest of the model as it is"
            )
        return self.keys.detach()

    @property
    def _columns(self) -> Snapshot:
        """Trained keys as a snapshot; copied only if they are not contiguous."""
        keys = self._keys
        return Snapshot.of(0, (Segment(0, 0, None, keys.contiguous().numpy(), None),), self.live)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Score candidates with sparse gradients to their keys. Raises BadInput for a score that is NaN or infinite."""
        queries, missing = request.queries, positions < 0
        if self.keys is None:
            keys = self.origin.keys(positions).to(queries)
        else:  # in place of -1 take a candidate of the query, or an unrelated key would get a gradient of 0
            filled = np.where(missing, positions.max(1, initial=0, keepdims=True), positions)
            keys = F.embedding(torch.from_numpy(filled).to(queries.device), self.keys, sparse=True)
        scores = request.score(queries, keys)
        if not bool(scores.detach().isfinite().all()):
            raise BadInput(
                "scores are NaN or infinite: training has moved the keys too far; begin again from the last commit "
                "with smaller steps"
            )
        return Scored(positions, scores.masked_fill(torch.from_numpy(missing).to(scores.device), -torch.inf), keys)

    def pooled(self, weights: Tensor, scored: Scored) -> Tensor:
        """Return the weighted sums of the candidates' values, with sparse gradients to the values."""
        schema, keys = self.origin.db.core.schema, scored.keys
        if not schema.has_values and keys is not None:
            return pool(weights, keys)
        if self.values is None or not scored.positions.size:
            stored = self.origin.values(scored.positions).to(weights.device)
            return pool(weights, stored, schema.num_classes)
        indices = torch.from_numpy(scored.positions).to(weights.device)
        return sums_of_rows(weights.to(self.values.dtype), self.values, indices).to(weights.dtype)

    def rows(self, positions: Positions) -> Positions:
        """Permanent rows of the parameters' records, -1 = none."""
        return np.where(positions < 0, -1, self.origin.rows[positions])


def on(pooled: Pooled, device: torch.device) -> Pooled:
    """Move an answer to another device."""
    assert pooled.hits is not None
    hits = replace(pooled.hits, rows=pooled.hits.rows.to(device), scores=pooled.hits.scores.to(device))
    tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(pooled).items() if isinstance(x, Tensor)}
    return replace(pooled, hits=hits, **tensors)
