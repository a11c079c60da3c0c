"""Assemble the answer of a soft query, and explain the answer by its heaviest records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

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

    @classmethod
    def joined(cls, q: int, parts: Sequence[tuple[Positions, Positions, Estimated]]) -> Estimated:
        """Combine answers to some of q queries. Each part: query numbers, their indices in its answer, its answer."""
        first, width = parts[0][2], max(part.positions.shape[1] for *_, part in parts)
        if len(parts) == 1 and len(parts[0][0]) == q:
            return first
        columns = [column.new_zeros(q, *(width for _ in column.shape[1:])) for column in first]
        answer = cls(*columns)._replace(output=first.output.new_zeros(q, first.output.shape[1]))
        answer.positions.fill_(-1), answer.scores.fill_(-torch.inf)
        for queries, lines, part in parts:
            to, chosen = (torch.from_numpy(numbers).to(first.lse.device) for numbers in (queries, lines))
            for column, some in zip(answer, part, strict=True):
                few = some if len(lines) == len(some) else some[chosen]
                target = column if column.ndim == 1 else column[:, : few.shape[1]]
                target[to] = few
        return answer


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
    bars = unknown.clone(), unknown.clone(), unknown.clone(), exact.clone()
    if error is not None:
        bars = error.bar, error.stderr, error.lse_stderr, error.met
    n_pooled, hits, weights = source.taking_part(request), None, None
    if weighed is not None:
        candidates, weights = weighed
        hits = hits_of(request, source, candidates, lse.device)
        count = torch.from_numpy(candidates.positions >= 0).sum(1).to(lse.device)
        n_pooled = count if error is None else torch.where(exact, n_pooled, error.drawn)
    missed_mass = unknown if missed_mass is None else missed_mass
    finder += source.read_from(request.pools)
    pooled = Pooled(
        output, lse, exact, missed_mass, n_pooled, hits, weights, finder,
        lambda count: explain(source, request, pooled, count), *bars,
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
def explain(source: SourceRecords, request: Request, pooled: Pooled, count: int) -> list[Explanation]:
    """Explain each query's answer by its `count` heaviest records. Cost: a search, and a pass if it is exact."""
    count = min(count, int(source.taking_part(request).amax()) if len(request.queries) else 0)
    if pooled.hits is not None and pooled.weights is not None:
        weights, order = pooled.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(pooled.hits.rows.gather(1, order), pooled.hits.scores.detach().gather(1, order), source.resolve)
        entropy = -torch.special.xlogy(pooled.weights.detach(), pooled.weights.detach()).sum(1)
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
