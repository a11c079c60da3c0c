"""The parameters of a Memory as a source: keys and values that are trained, found among the keys as they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from softdb.answers import Resolve
from softdb.attend.request import Live, Positions, Request
from softdb.attend.scoring import Candidates, Scored
from softdb.attend.source import AsStored
from softdb.errors import BadInput
from softdb.index.flat import nearest
from softdb.index.rerank import ordered
from softdb.nn.origin import Origin
from softdb.nn.stale_index import FEWEST, Version
from softdb.pool import pool
from softdb.store import Segment, Snapshot
from softdb.store.snapshot import Block

__all__ = ["Parameters"]


@dataclass(frozen=True)
class Parameters(AsStored):
    """Positions are parameters, 0 … n - 1, of which those are live whose record is still there."""

    origin: Origin
    keys: torch.nn.Parameter | None  # (n, d); None: as stored
    values: torch.nn.Parameter | None  # (n, v); None: as stored
    version: Version  # a copy of the keys as they were, or none
    overfetch: int  # how many times k candidates are looked at

    columns, trained = None, (None, None)

    @property
    def live(self) -> Live:
        """Which parameters' records are there."""
        return self.origin.present

    @property
    def count(self) -> int:
        """How many are."""
        return self.origin.count

    @property
    def width(self) -> int:
        """v."""
        return self.origin.db.schema.pooled_dim

    @property
    def num_classes(self) -> int | None:
        """The database's."""
        return self.origin.db.schema.num_classes

    @property
    def resolve(self) -> Resolve:
        """The database's ids and payloads."""
        return self.origin.db.resolve

    @property
    def stale(self) -> bool:
        """Whether candidates come from keys as they were; else comparing them all, as they are, costs no more."""
        if self.keys is None or len(self.keys) < FEWEST or self.keys.dtype is not torch.float32:
            return False
        return self.version.number > 0 or self.origin.indexed

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """As `Snapshot.blocks`, by the parameters as they are, without a graph."""
        keep = self.live if allowed is None else self.live & allowed
        for positions in np.split(which := np.flatnonzero(keep[start:]) + start, range(size, len(which), size)):
            if len(positions):
                keys = self.origin.keys(positions) if self.keys is None else self.keys.detach()[positions]
                yield Block(torch.from_numpy(positions), keys, self._values(positions, keys))

    def _values(self, positions: Positions, keys: Tensor) -> Tensor:
        if not self.origin.db.schema.has_values:
            return keys
        return self.origin.values(positions) if self.values is None else self.values.detach()[positions]

    def frozen(self) -> Parameters:
        """Itself: `blocks` have no graph."""
        return self

    def find(self, request: Request, k: int, exact: bool = False) -> Candidates:
        """The k nearest by the keys as they are, of overfetch · k candidates; without an index all are compared.

        Cost: a search, and q k overfetch d; without an index q n d.
        """
        queries, k, origin = request.queries.detach(), min(k, self.count), self.origin
        if not k:
            return Candidates(np.zeros((len(queries), 0), np.int64), "flat")
        if self.keys is None:
            return Candidates(*origin.find(queries, k))
        if exact or not self.stale:
            return Candidates(nearest(self._columns, queries, k, origin.metric), "flat")
        count = min(k * self.overfetch, self.count)
        if self.version.number:
            keep = None if origin.count == len(origin.rows) else origin.present
            found, finder = self.version.find(queries, count, keep), "stale index"
        else:
            found, finder = origin.find(queries, count, certain=k)
            if finder == "flat":  # so many that the index does not serve
                return Candidates(nearest(self._columns, queries, k, origin.metric), finder)
        return Candidates(ordered(self._columns, queries.float().numpy(), found, k, origin.metric)[0], finder)

    @property
    def _columns(self) -> Snapshot:
        """Trained keys as finding reads records: no copy, unless their rows are not contiguous."""
        keys = self.keys
        assert keys is not None
        if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.float64):
            raise BadInput(
                f"the keys are {keys.dtype} on {keys.device}; a memory lives in the RAM, in float32: move the rest of "
                "the model, its queries may come from a GPU"
            )
        return Snapshot.of(0, (Segment(0, 0, None, keys.detach().contiguous().numpy(), None),), self.live)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Scores, with sparse gradients to the keys found. Raises BadInput where one is NaN or infinite."""
        which = torch.from_numpy(positions)
        keys = (
            self.origin.keys(positions).to(request.queries.dtype)
            if self.keys is None
            else F.embedding(which, self.keys, sparse=True)
        )
        with torch.autocast("cpu", enabled=False):
            scores = request.score(request.queries, keys)
        if not bool(scores.detach().isfinite().all()):
            raise BadInput(
                "scores are NaN or infinite: training has moved the keys too far; begin again from the last commit "
                "with smaller steps"
            )
        return Scored(positions, scores, keys)

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """The weighted sum of values, with sparse gradients to those found."""
        schema, keys = self.origin.db.schema, found.keys
        with torch.autocast("cpu", enabled=False):
            if not schema.has_values and keys is not None:
                return pool(weights, keys)
            if self.values is None or not found.positions.size:
                return pool(weights, self.origin.values(found.positions), schema.num_classes)
            # holds no (q, k, v) copy of the values, as a gather would
            factors = weights.to(self.values.dtype)
            which = torch.from_numpy(found.positions)
            output = F.embedding_bag(which, self.values, mode="sum", per_sample_weights=factors, sparse=True)
            return output.to(weights.dtype)

    def rows(self, positions: Positions) -> Positions:
        """Permanent rows of their records."""
        return np.where(positions < 0, -1, self.origin.rows[positions])
