"""The one place where the answer of a soft query is put together, and explained: which records carry it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Explanation, Hits, Pooled
from softdb.attend.blocks import scored_tiles
from softdb.attend.protocol import SourceRecords
from softdb.attend.request import Request, Scored
from softdb.scoring import Uniform


class Estimated(NamedTuple):
    """An estimated answer to some of the queries, and how far it may be from the exact one."""

    output: Tensor  # (q, v)
    lse: Tensor  # (q,)
    stderr: Tensor  # (q,)
    lse_stderr: Tensor  # (q,)
    bar: Tensor  # (q,)
    met: Tensor  # (q,) bool
    positions: Tensor  # (q, k) int64, -1 = none
    scores: Tensor  # (q, k)
    weights: Tensor  # (q, k)
    drawn: Tensor  # (q,) number of records pooled, of which the heaviest are named

    def of(self, which: NDArray[np.bool_]) -> Estimated:
        """The same for some of them."""
        if which.all():
            return self
        chosen = torch.from_numpy(which).to(self.lse.device)
        return Estimated(*(column[chosen] for column in self))

    def padded(self, width: int) -> Estimated:
        """The same with so many candidates."""
        more = (0, width - self.positions.shape[1])
        pad = torch.nn.functional.pad
        return self._replace(
            positions=pad(self.positions, more, value=-1),
            scores=pad(self.scores, more, value=-torch.inf),
            weights=pad(self.weights, more),
        )


class Doubt(NamedTuple):
    """Error, as far as known, of an answer that may not be exact."""

    exact: Tensor  # (q,) bool
    missed_mass: Tensor | None  # (q,); None: unknown where not exact
    error: Estimated | None = None  # whose bars these are; None: none where exact, else unknown


def answered(
    request: Request,
    source: SourceRecords,
    state: tuple[Tensor, Tensor],  # (q, v) output, (q,) lse
    finder: str,
    weighed: tuple[Scored, Tensor] | None = None,  # records and their weights (q, k); None: all that take part
    doubt: Doubt | None = None,  # None: the answer is exact
) -> Pooled:
    """An answer, with what is known of its error, its records, and how to explain it."""
    (output, lse), (exact, missed_mass, error) = state, doubt or (None, None, None)
    if exact is None:
        exact = torch.ones_like(lse, dtype=torch.bool)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    bars = unknown.clone(), unknown.clone(), unknown.clone(), exact.clone()
    if error is not None:
        bars = error.bar, error.stderr, error.lse_stderr, error.met
    n_pooled, hits, weights = request.taking_part(source), None, None
    if weighed is not None:
        found, weights = weighed
        hits = hits_of(request, source, found, lse.device)
        count = torch.from_numpy(found.positions >= 0).sum(1).to(lse.device)
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


def hits_of(request: Request, source: SourceRecords, found: Scored, device: torch.device) -> Hits:
    """Candidates as the user sees them."""
    rows = torch.from_numpy(source.rows(found.positions)).to(device)
    return Hits(rows, request.shown_scores(found.scores).to(device), source.resolve, source.missing)


@torch.no_grad()
def explain(source: SourceRecords, request: Request, pooled: Pooled, count: int) -> list[Explanation]:
    """One explanation a query, of the `count` heaviest records. Cost of a search and a pass over what was weighed."""
    count = min(count, int(request.taking_part(source).amax()) if len(request.queries) else 0)
    if pooled.hits is not None and pooled.weights is not None:
        weights, order = pooled.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(pooled.hits.rows.gather(1, order), pooled.hits.scores.detach().gather(1, order), source.resolve)
        entropy = -torch.special.xlogy(pooled.weights.detach(), pooled.weights.detach()).sum(1)
        weights = weights * (1 - pooled.missed_mass.nan_to_num(0)).unsqueeze(1)
    else:
        request, source, lse = request.detached, source.frozen(), pooled.lse.detach()
        found, entropy = source.heaviest(request, lse, count)
        live = torch.from_numpy(found.positions >= 0).to(lse.device)
        weights = (found.scores / request.temperature - lse.unsqueeze(1)).exp().masked_fill(~live, 0)
        if isinstance(request.weighting, Uniform):
            weights = live / request.taking_part(source).to(lse).clamp(min=1).unsqueeze(1)
        hits = hits_of(request, source, found, found.scores.device)
    ids, payloads = hits.ids, hits.payloads
    explanations = []
    for i, (names, what, mine) in enumerate(zip(ids, payloads, weights.tolist(), strict=True)):
        kept = [j for j in range(len(names)) if mine[j] > 0]
        explanations.append(
            Explanation(
                [names[j] for j in kept],
                [mine[j] for j in kept],
                [what[j] for j in kept],
                hits.scores[i, kept].tolist(),
                mass=float(np.sum([mine[j] for j in kept])),
                effective=float(entropy[i].exp()) if pooled.lse[i] > -torch.inf else 0.0,
            )
        )
    return explanations


def heaviest(source: SourceRecords, request: Request, lse: Tensor, count: int) -> tuple[Scored, Tensor]:  # and (q,)
    """The `count` heaviest records and the entropy of the weights of all. Cost of a search and a pass."""
    found = source.scored(request, source.find(request.top(count, exact=True)).positions)
    if isinstance(request.weighting, Uniform):
        return found, lse
    mean = torch.zeros_like(lse)  # of log w
    for tile, scores in scored_tiles(request, source):
        logs = scores / request.temperature - lse[tile.chunk].unsqueeze(1)
        mean[tile.chunk] += (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
    return found, -mean
