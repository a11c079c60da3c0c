"""Soft queries over encoded keys: candidates from a shadow, then everything by the encoder as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from softdb.answers import Explanation, Hits, Pooled, Resolve
from softdb.attend import Task, scan
from softdb.attend.blocks import Tile, pool_into
from softdb.attend.explain import explained
from softdb.attend.request import Live, Positions, SoftQuery, own_scores
from softdb.check import Metric
from softdb.errors import StaleRead
from softdb.nn.encoding import EncodedScore, Encoding
from softdb.nn.shadow import Version
from softdb.pool import State, merge, pool
from softdb.scores import Fold, fold
from softdb.scores.contract import alike
from softdb.store import Snapshot
from softdb.store.snapshot import Block

__all__ = ["attend_all", "attend_nearest", "candidates", "scored", "served", "young"]

GATHERED = 1 << 24  # numbers of encoded candidates gathered at once: 64 MB


def young(
    snapshot: Snapshot,
    version: Version,
    allowed: Live | None = None,  # (size,) over positions
) -> NDArray[np.bool_]:  # (size,)
    """Which records came after a version."""
    keep = snapshot.live.copy() if allowed is None else snapshot.live & allowed
    if snapshot.contiguous:
        keep[: version.border] = False
    else:
        keep &= snapshot.rows(np.arange(snapshot.size)) >= version.border
    return keep


def served(
    query: SoftQuery,
    metric: Metric,  # of a shadow
) -> Fold | None:
    """The score of a query as one that the shadow finds by; None where it ranks otherwise."""
    with torch.no_grad():
        folded = fold(query.score, query.queries.detach())
    return folded if folded is not None and folded.metric is metric else None


def candidates(
    query: SoftQuery,
    snapshot: Snapshot,
    encoding: Encoding,
    metric: Metric,  # of the version
    k: int,
    count: int,  # that a version is asked for, before they are scored anew
    version: Version | None,  # None: every record is compared
) -> tuple[Positions, str]:  # (q, k)
    """Positions of the k best as the encoder is, -1 = none, and what found them: "shadow" or "scan"."""
    queries = query.queries.detach()
    with torch.no_grad():
        folded = None if version is None else served(query, metric)
        if version is None or folded is None:
            every = EncodedScore(query.score, encoding, snapshot)
            return scan(queries, snapshot, every, k, allowed=query.allowed), "scan"
        recent = young(snapshot, version, query.allowed)
        fresh = int(np.count_nonzero(recent))
        all_held = query.allowed is None and snapshot.count - fresh == len(version.rows)
        held = None if all_held else version.alive(snapshot, query.allowed)
        positions = snapshot.positions(version.find(folded.queries, count, keep=held).cpu().numpy())
        if fresh:
            every = EncodedScore(query.score, encoding, snapshot)
            more = scan(queries, snapshot, every, min(count, fresh), allowed=recent)
            positions = np.concatenate([positions, more], axis=1)
        return _best(query, snapshot, encoding, positions, k), "shadow"


def _best(
    query: SoftQuery,
    snapshot: Snapshot,
    encoding: Encoding,
    positions: Positions,  # (q, c)
    k: int,
) -> Positions:  # (q, k)
    """The k best of some candidates by the encoder as it is, ties by row. Each record is encoded once."""
    known, places = np.unique(positions, return_inverse=True)
    places = np.sort(places.reshape(positions.shape), axis=1)  # of unlike engines alike: ties by row, -1 first
    queries = query.queries.detach()
    encoded = alike(_table(snapshot, known, encoding.found, encoding.dim), queries)
    best = np.empty((len(places), min(k, places.shape[1])), np.int64)
    chunk = max(1, GATHERED // max(1, places.shape[1] * encoding.dim))
    for low in range(0, len(places), chunk):
        mine = places[low : low + chunk]
        scores = own_scores(query.score, queries[low : low + chunk], encoded[torch.from_numpy(mine)])
        scores = scores.cpu().masked_fill(torch.from_numpy(known[mine] < 0), -torch.inf)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        best[low : low + chunk] = known[np.take_along_axis(mine, order.numpy(), 1)]
    return np.pad(best, ((0, 0), (0, k - best.shape[1])), constant_values=-1)


def scored(
    query: SoftQuery,
    snapshot: Snapshot,
    encoding: Encoding,
    positions: Positions,  # (q, k)
) -> tuple[Positions, Tensor, Tensor]:  # (q, k), (q, k), (q, k, d')
    """Candidates best first, their scores, -inf for none, and their encoded keys, in the encoder's current mode.

    With gradient to the queries, the score's parameters and the encoder's. Each record is encoded once.
    """
    known, places = np.unique(positions, return_inverse=True)
    encoded = alike(_table(snapshot, known, encoding.of, encoding.dim), query.queries)
    own = encoded[torch.from_numpy(places.reshape(positions.shape))]
    none = torch.from_numpy(positions < 0).to(query.queries.device)
    scores = own_scores(query.score, query.queries, own).masked_fill(none, -torch.inf)
    order = scores.detach().sort(dim=1, descending=True, stable=True).indices
    there = order.to(own.device).unsqueeze(2).expand_as(own)
    return np.take_along_axis(positions, order.cpu().numpy(), 1), scores.gather(1, order), own.gather(1, there)


def attend_nearest(
    query: SoftQuery,
    snapshot: Snapshot,
    encoding: Encoding,
    found: tuple[Positions, str],  # (q, k), what found them
    has_values: bool,  # else the encoded key serves
    resolve: Resolve,
) -> Pooled:
    """The soft query over candidates. Exact where they are all that take part."""
    positions, scores, keys = scored(query, snapshot, encoding, found[0])
    device = query.queries.device
    live = torch.from_numpy(positions >= 0).to(device)
    weights, lse, _ = query.weighting.weigh(scores, query.temperature, live)
    values = snapshot.values_at(positions) if has_values and snapshot.size else keys
    if has_values and not snapshot.size:
        values = keys.new_zeros(*positions.shape, query.pooled_dim)
    exact = live.sum(1) == query.taking_part(snapshot).to(device)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    pooled = Pooled(
        pool(weights, values, query.num_classes),
        lse,
        exact=exact,
        missed_mass=unknown,
        candidates=live.sum(1),
        hits=Hits(torch.from_numpy(snapshot.rows(positions)).to(device), query.shown_scores(scores), resolve),
        weights=weights,
        finder=found[1],
        explanation=lambda count: _explained(query, snapshot, encoding, pooled, count, resolve),
        bar=unknown.clone(),
        stderr=unknown.clone(),
        lse_stderr=unknown.clone(),
        met=exact.clone(),
    )
    return pooled


def attend_all(query: SoftQuery, snapshot: Snapshot, encoding: Encoding, has_values: bool, resolve: Resolve) -> Pooled:
    """The exact soft query: every record encoded, a block at a time; what backward needs of it is computed again."""
    queries, stamp = query.queries, encoding.stamp
    nothing = queries[:, :1] * 0
    whole = [State(nothing.expand(-1, query.pooled_dim), nothing[:, 0] - torch.inf)]
    for block in snapshot.blocks(encoding.size, query.allowed):
        # recomputing keeps the activations of one block; random numbers of dropout come out alike
        part = checkpoint(_part, query, snapshot, encoding, block, has_values, queries, use_reentrant=False)
        whole = [*whole, part] if part.output.requires_grad else [merge([*whole, part])]
    output, lse, _ = merge(whole)
    certain = torch.zeros_like(lse.detach())
    yes = torch.ones_like(certain, dtype=torch.bool)
    pooled = Pooled(
        output,
        lse,
        exact=yes,
        missed_mass=certain,
        candidates=query.taking_part(snapshot).to(queries.device),
        hits=None,
        weights=None,
        finder="all",
        explanation=lambda count: _explained(query, snapshot, encoding, pooled, count, resolve, stamp),
        bar=certain.clone(),
        stderr=certain.clone(),
        lse_stderr=certain.clone(),
        met=yes.clone(),
    )
    return pooled


def _part(
    query: SoftQuery, snapshot: Snapshot, encoding: Encoding, block: Block, has_values: bool, queries: Tensor
) -> State:
    """The soft query over a block. The queries come by themselves, too: a checkpoint finds tensors among arguments."""
    encoded = alike(encoding.of(block.keys, _row(snapshot, block.positions.numpy())), queries)
    task = Task(snapshot, query.score, query.temperature, None, None, query.num_classes, query.pooled_dim)
    scores = task.scores(queries, Tile(slice(None), block.positions, encoded, encoded, None))
    weights, lse, _ = query.weighting.weigh(scores, query.temperature, scores > -torch.inf)
    values = (block.values if has_values else encoded).to(weights.device)
    output = weights.new_zeros(len(weights), query.pooled_dim)
    pool_into(output, weights, values.to(weights.dtype) if values.is_floating_point() else values)
    return State(output, lse)


def _explained(
    query: SoftQuery,
    snapshot: Snapshot,
    encoding: Encoding,
    pooled: Pooled,
    count: int,
    resolve: Resolve,
    stamp: tuple[tuple[int, int], ...] | None = None,  # of the encoder that answered; None: it is not asked again
) -> list[Explanation]:
    """What carries an answer, with the scores as the user's own score gives them."""
    if stamp is not None and stamp != encoding.stamp:
        raise StaleRead(
            "the encoder was changed since this answer, whose weights are told by encoding the records again; explain "
            "before the step, or ask again"
        )
    # a place that no record fills would be encoded as zeros, which not every encoder takes
    count = min(count, int(query.taking_part(snapshot)[0])) if len(query.queries) else 0  # for all alike: no mask
    if not count:
        return [Explanation([], [], [], [], mass=0.0, effective=0.0) for _ in query.queries]
    asked = replace(query, score=EncodedScore(query.score, encoding, snapshot))
    found = explained(asked, snapshot, pooled, count, _nowhere, resolve)
    if pooled.hits is not None:
        return found
    return [replace(one, scores=query.shown_scores(torch.tensor(one.scores)).tolist()) for one in found]


def _nowhere(folded: Fold, k: int, allowed: Live | None) -> tuple[Positions, str]:
    raise AssertionError("a score of encoded keys has no index form")


def _table(
    snapshot: Snapshot,
    known: Positions,  # (u,) ascending, distinct, -1 = none
    encode: Callable[[Tensor, Callable[[int], int]], Tensor],
    dim: int,  # d'
) -> Tensor:  # (u, d')
    """Encoded keys of some records, zeros for none."""
    live = known[known >= 0]
    keys = snapshot.keys_at(live) if len(live) else torch.zeros(0, 1)
    encoded = encode(keys, _row(snapshot, live))
    if len(live) == len(known):
        return encoded
    return torch.cat([encoded.new_zeros(1, dim), encoded])


def _row(snapshot: Snapshot, positions: Positions) -> Callable[[int], int]:
    """The row of the i-th position."""
    return lambda i: int(snapshot.rows(positions[i : i + 1])[0])
