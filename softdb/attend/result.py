"""Assemble the answer of a soft query, and explain the answer by its heaviest records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from softdb.answers import Explanation, Hits, Pooled
from softdb.attend.blocks import scored_tiles
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Positions, Request, Scored
from softdb.scoring import Uniform


class Estimated(NamedTuple):
    """An estimated answer to some of the queries, with error bars."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,)
    stderr: Tensor  # (q,)
    lse_stderr: Tensor  # (q,)
    bar: Tensor  # (q,)
    met: Tensor  # (q,) bool
    positions: Tensor  # (q, k) int64, -1 = none
    scores: Tensor  # (q, k)
    weights: Tensor  # (q, k)
    drawn: Tensor  # (q,) number of records pooled; `positions` holds the heaviest of them
    entropy: Tensor  # (q,) of the weights of all records, estimated as the mean of -log weight over the draws

    @classmethod
    def joined(cls, q: int, parts: Sequence[tuple[Positions, Positions, Estimated]]) -> Estimated:
        """Combine answers to all of q queries. Each part: query numbers, their indices in its answer, its answer.

        Operations that torch shares among threads at small sizes are avoided: OpenMP's threads go on to spin.
        """
        first, width = parts[0][2], max(part.positions.shape[1] for *_, part in parts)
        if len(parts) == 1 and len(parts[0][0]) == q:
            return first
        order = torch.from_numpy(np.argsort(np.concatenate([queries for queries, *_ in parts]))).to(first.lse.device)

        def column(name: str, fill: float | None) -> Tensor:
            pieces = []
            for _, lines, answer in parts:
                piece: Tensor = getattr(answer, name)
                if len(lines) < len(piece):
                    piece = piece.index_select(0, torch.from_numpy(lines).to(order.device))
                pieces.append(piece if fill is None else pad(piece, (0, width - piece.shape[1]), value=fill))
            return torch.cat(pieces).index_select(0, order)

        fills = {"positions": -1.0, "scores": -torch.inf, "weights": 0.0}
        return cls(*(column(name, fills.get(name)) for name in cls._fields))


class Doubt(NamedTuple):
    """The known error of an answer that might not be exact."""

    exact: Tensor  # (q,) bool
    missed_mass: Tensor | None  # (q,); None: unknown for queries that are not exact
    error: Estimated | None = None  # an estimate with error bars; None: bars are 0 for exact answers, else unknown


def answered(
    request: Request,
    source: SourceRecords,
    state: tuple[Tensor, Tensor],  # (q, v) output, (q,) lse
    finder: str,
    weighed: tuple[Scored, Tensor] | None = None,  # candidates and their weights (q, k); None: all records
    doubt: Doubt | None = None,  # None: the answer is exact
) -> Pooled:
    """Assemble the answer from output and lse, its error, its records, and a function that explains the answer."""
    (output, lse), (exact, missed_mass, error) = state, doubt or (None, None, None)
    if exact is None:
        exact = torch.ones_like(lse, dtype=torch.bool)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    n_pooled, hits, weights, entropy = source.taking_part(request), None, None, None
    if weighed is not None:
        candidates, weights = weighed
        hits = hits_of(request, source, candidates, lse.device)
    if error is not None:
        bars = error.bar, error.stderr, error.lse_stderr, error.met
        n_pooled = torch.where(exact, n_pooled, error.drawn)
        entropy = error.entropy
    else:
        bars = unknown.clone(), unknown.clone(), unknown.clone(), exact.clone()
        if weighed is not None:
            n_pooled = torch.from_numpy(weighed[0].positions >= 0).sum(1).to(lse.device)
    missed_mass = unknown if missed_mass is None else missed_mass
    finder += source.read_from(request.pools)
    pooled = Pooled(
        output, lse, exact, missed_mass, n_pooled, hits, weights, finder,
        lambda count: explain(source, request, pooled, count, entropy), *bars,
    )  # fmt: skip
    if source.missing:
        none, inf = torch.zeros_like(exact), torch.full_like(unknown, torch.inf)
        return replace(
            pooled, missing=source.missing, exact=none, met=none, bar=inf, stderr=inf, lse_stderr=inf,
            missed_mass=torch.full_like(inf, torch.nan),
        )  # fmt: skip
    return pooled


def hits_of(request: Request, source: SourceRecords, candidates: Scored, device: torch.device) -> Hits:
    """Return candidates as hits, with ids, payloads, and scores on the scale of the user's score."""
    rows = torch.from_numpy(source.rows(candidates.positions)).to(device)
    return Hits(rows, request.shown_scores(candidates.scores).to(device), source.resolve, source.missing)


@torch.no_grad()
def explain(
    source: SourceRecords,
    request: Request,
    pooled: Pooled,
    count: int,
    estimate: Tensor | None = None,  # (q,) entropy of an estimate; None: the hits are all of the answer's records
) -> list[Explanation]:
    """Explain each query's answer by its `count` heaviest records. Cost: a search, and a pass if it is exact."""
    count = min(count, int(source.taking_part(request).amax()) if len(request.queries) else 0)
    if pooled.hits is not None and pooled.weights is not None:
        weights, order = pooled.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(pooled.hits.rows.gather(1, order), pooled.hits.scores.detach().gather(1, order), source.resolve)
        entropy = torch.special.entr(pooled.weights.detach()).sum(1) if estimate is None else estimate
        weights = weights * (1 - pooled.missed_mass.nan_to_num(0)).unsqueeze(1)
    else:
        request, source, lse = request.detached, source.frozen(), pooled.lse.detach()
        top, entropy = source.heaviest(request, lse, count)
        live = torch.from_numpy(top.positions >= 0).to(lse.device)
        weights = (top.scores / request.temperature - lse.unsqueeze(1)).exp().masked_fill(~live, 0)
        if isinstance(request.weighting, Uniform):
            weights = live / source.taking_part(request).to(lse).clamp(min=1).unsqueeze(1)
        hits = hits_of(request, source, top, top.scores.device)
    ids, payloads = hits.ids, hits.payloads
    explanations = []
    for i, (names, own_payloads, own_weights) in enumerate(zip(ids, payloads, weights.tolist(), strict=True)):
        positive = [j for j in range(len(names)) if own_weights[j] > 0]
        explanations.append(
            Explanation(
                [names[j] for j in positive],
                [own_weights[j] for j in positive],
                [own_payloads[j] for j in positive],
                hits.scores[i, positive].tolist(),
                mass=float(np.sum([own_weights[j] for j in positive])),
                effective=float(entropy[i].exp()) if pooled.lse[i] > -torch.inf else 0.0,
            )
        )
    if estimate is not None and bool(pooled.exact.any()):
        which = np.flatnonzero(pooled.exact.cpu().numpy())
        unnamed = replace(
            pooled, lse=pooled.lse[torch.from_numpy(which).to(pooled.lse.device)], hits=None, weights=None
        )
        for i, explanation in zip(which.tolist(), explain(source, request.at(which), unnamed, count), strict=True):
            explanations[i] = explanation
    return explanations


def heaviest(source: SourceRecords, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:  # (q,)
    """Return the `count` heaviest records, and the entropy of all weights. Cost: a search and a pass over records."""
    top = source.scored(request, source.find(request.top(count, exact=True)).positions)
    if isinstance(request.weighting, Uniform):
        return top, lse
    mean = torch.zeros_like(lse)  # Σ w log w
    for tile, scores in scored_tiles(request, source):
        logs = scores / request.temperature - lse[tile.chunk].unsqueeze(1)
        mean[tile.chunk] += (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
    return top, -mean
