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
    entropy: Tensor | None = None  # (q,) of all records' weights: the mean of -log weight over draws; None: not known

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


class Results(NamedTuple):
    """The columns of an answer that its explanation reads."""

    lse: Tensor  # (q,)
    exact: Tensor  # (q,) bool
    missed_mass: Tensor  # (q,)
    hits: Hits | None
    weights: Tensor | None  # (q, k)
    entropy: Tensor | None  # (q,) of an estimate that names its heaviest records; None: hits are all of its records


class Doubt(NamedTuple):
    """The known error of an answer that might not be exact."""

    exact: Tensor  # (q,) bool
    missed_mass: Tensor | None = None  # (q,), 0 for an estimate; None: unknown for queries that are not exact
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
    hits, weights = None, None
    if exact is None:
        exact = torch.ones_like(lse, dtype=torch.bool)
    if weighed is not None:
        candidates, weights = weighed
        hits = hits_of(request, source, candidates, lse.device)
    if error is not None:
        bars, n_pooled = (error.bar, error.stderr, error.lse_stderr, error.met), error.drawn
        missed_mass = torch.zeros_like(error.stderr)
    else:
        unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
        bars = unknown.clone(), unknown.clone(), unknown.clone(), exact.clone()
        missed_mass = unknown if missed_mass is None else missed_mass
        if weighed is None:
            n_pooled = source.taking_part(request)
        else:
            n_pooled = torch.from_numpy(weighed[0].positions >= 0).sum(1).to(lse.device)
    results = Results(lse, exact, missed_mass, hits, weights, None if error is None else error.entropy)
    pooled = Pooled(
        output, lse, exact, missed_mass, n_pooled, hits, weights, finder + source.read_from(request.pools),
        lambda count: explain(source, request, results, count), *bars,
    )  # fmt: skip
    if source.missing:
        none, inf = torch.zeros_like(exact), torch.full_like(missed_mass, torch.inf)
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
def explain(source: SourceRecords, request: Request, results: Results, count: int) -> list[Explanation]:
    """Explain each query's answer by its `count` heaviest records. Cost: a search, and a pass if it is exact."""
    count = min(count, int(source.taking_part(request).amax()) if len(request.queries) else 0)
    if results.hits is not None and results.weights is not None:
        weights, order = results.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(results.hits.rows.gather(1, order), results.hits.scores.detach().gather(1, order), source.resolve)
        entropy = torch.special.entr(results.weights.detach()).sum(1) if results.entropy is None else results.entropy
        weights = weights * (1 - results.missed_mass.nan_to_num(0)).unsqueeze(1)
    else:
        request, source, lse = request.detached, source.frozen(), results.lse.detach()
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
                effective=float(entropy[i].exp()) if results.lse[i] > -torch.inf else 0.0,
            )
        )
    if results.entropy is not None and bool(results.exact.any()):
        which = np.flatnonzero(results.exact.cpu().numpy())
        chosen = torch.from_numpy(which).to(results.lse.device)
        of_exact = Results(results.lse[chosen], results.exact[chosen], results.missed_mass[chosen], None, None, None)
        for i, explanation in zip(which.tolist(), explain(source, request.at(which), of_exact, count), strict=True):
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
