"""Encoded keys as a source: candidates from a stale index, then everything by the encoder as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Resolve
from softdb.attend.request import Live, Positions, Request
from softdb.attend.scanning import scan
from softdb.attend.scoring import Candidates, Scored, own_scores
from softdb.check import Metric, Schema
from softdb.errors import StaleRead
from softdb.lazy import cached_property
from softdb.nn.encoding import Encoding
from softdb.nn.stale_index import Version
from softdb.pool import pool
from softdb.scores.contract import alike
from softdb.store import Snapshot
from softdb.store.snapshot import Block

__all__ = ["Encoded", "unindexed"]

GATHERED = 1 << 24  # numbers of encoded candidates gathered at once: 64 MB


def unindexed(
    snapshot: Snapshot,
    version: Version,
    allowed: Live | None = None,  # (size,) over positions
) -> NDArray[np.bool_]:  # (size,)
    """Which records came after a version."""
    keep = snapshot.live.copy() if allowed is None else snapshot.live & allowed
    if snapshot.contiguous:
        keep[: version.indexed_until] = False
    else:
        keep &= snapshot.rows(np.arange(snapshot.size)) >= version.indexed_until
    return keep


@dataclass(frozen=True)
class Encoded:
    """The records of a database by their encoded keys f(k), whose graph leads to the encoder."""

    snapshot: Snapshot
    schema: Schema  # of the database
    encoding: Encoding
    metric: Metric  # of the stale index
    version: Version | None  # None: every record is compared
    overfetch: int  # how many times k candidates are asked of the version, before they are scored anew
    resolve: Resolve
    stamp: tuple[tuple[int, int], ...]  # of the encoder when this was made
    graph: bool = True  # False: in eval mode, without gradient

    columns, trained = None, (None, None)

    @property
    def live(self) -> Live:
        """Which positions hold a record."""
        return self.snapshot.live

    @property
    def count(self) -> int:
        """How many do."""
        return self.snapshot.count

    @property
    def width(self) -> int:
        """v."""
        return self.schema.pooled_dim if self.schema.has_values else self.encoding.dim

    @property
    def num_classes(self) -> int | None:
        """The database's."""
        return self.schema.num_classes

    @property
    def block_size(self) -> int:
        """Records encoded at once."""
        return self.encoding.size

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """Blocks of stored keys."""
        return self.snapshot.blocks(size, allowed, start)

    def encoded(self, block: Block) -> Block:
        """The block with encoded keys."""
        encode = self.encoding.of if self.graph else self.encoding.found
        keys = encode(block.keys, self.rows(block.positions.numpy()))
        return Block(block.positions, keys, block.values if self.schema.has_values else keys)

    @cached_property
    def _fixed(self) -> Encoded:
        return replace(self, graph=False)

    def frozen(self) -> Encoded:
        """The same without a graph. Raises StaleRead where the encoder was changed since."""
        if self.encoding.stamp != self.stamp:
            raise StaleRead(
                "the encoder was changed since this answer, whose weights are told by encoding the records again; "
                "explain before the step, or ask again"
            )
        return self._fixed

    def find(self, request: Request, k: int, exact: bool = False) -> Candidates:
        """The k best as the encoder is, of `overfetch` k that the version finds and of all that are younger."""
        request, k = request.detached, min(k, self.count)
        version, folded = (None if exact else self.version), request.folded
        if version is None or folded is None or folded.metric is not self.metric:
            return Candidates(scan(request, self._fixed, k), "scan")
        count = min(self.overfetch * k, self.count)
        recent = unindexed(self.snapshot, version, request.allowed)
        fresh = int(np.count_nonzero(recent))
        whole = request.allowed is None and self.count - fresh == len(version.rows)
        keep = None if whole else version.alive(self.snapshot, request.allowed)
        positions = self.snapshot.positions(version.find(folded.queries, count, keep))
        if fresh:
            more = scan(replace(request, allowed=recent), self._fixed, min(count, fresh))
            positions = np.concatenate([positions, more], axis=1)
        return Candidates(self._best(request, positions, k), "stale index")

    def _best(self, request: Request, positions: Positions, k: int) -> Positions:  # (q, c) -> (q, k)
        """The k best of some candidates by the encoder as it is, ties by row. Each record is encoded once."""
        positions = np.sort(positions, axis=1)  # of unlike engines alike: ties by row, -1 first
        table, places = self._fixed._table(positions, request.queries)
        best = np.empty((len(positions), min(k, positions.shape[1])), np.int64)
        chunk = max(1, GATHERED // max(1, positions.shape[1] * self.encoding.dim))
        for low in range(0, len(positions), chunk):
            part = slice(low, low + chunk)
            scores = own_scores(request.score, request.queries[part], table[torch.from_numpy(places[part])]).cpu()
            scores = scores.masked_fill(torch.from_numpy(positions[part] < 0), -torch.inf)
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
            best[part] = np.take_along_axis(positions[part], order.numpy(), 1)
        return np.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Candidates best first by their scores in the encoder's current mode. Each record is encoded once."""
        table, places = self._table(positions, request.queries)
        own = table[torch.from_numpy(places)]
        none = torch.from_numpy(positions < 0).to(request.queries.device)
        scores = own_scores(request.score, request.queries, own).masked_fill(none, -torch.inf)
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        there = order.to(own.device).unsqueeze(2).expand_as(own)
        positions = np.take_along_axis(positions, order.cpu().numpy(), 1)
        return Scored(positions, scores.gather(1, order), own.gather(1, there))

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """Stored values or labels, else the encoded keys."""
        if not self.schema.has_values and found.keys is not None:
            return pool(weights, found.keys)
        if not self.snapshot.size:
            return pool(weights, weights.new_zeros(*found.positions.shape, self.width))
        return pool(weights, self.snapshot.values_at(found.positions), self.num_classes)

    def rows(self, positions: Positions) -> Positions:
        """As `Snapshot.rows`."""
        return self.snapshot.rows(positions)

    def _table(self, positions: Positions, like: Tensor) -> tuple[Tensor, Positions]:  # (u, d'), as positions
        """Encoded keys of the distinct records, zeros for none; and where each position's are."""
        known, places = np.unique(positions, return_inverse=True)
        live = known[known >= 0]
        keys = self.snapshot.keys_at(live) if len(live) else torch.zeros(0, 1)
        block = Block(torch.from_numpy(live), keys, keys)
        table = alike(self.encoded(block).keys, like)
        if len(live) < len(known):
            table = torch.cat([table.new_zeros(1, self.encoding.dim), table])
        return table, places.reshape(positions.shape)
