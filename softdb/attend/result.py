"""The one place where the answer of a soft query is put together, and explained: which records carry it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Explanation, Hits, Pooled
from softdb.attend.blocks import scored_tiles
from softdb.attend.remote import Remote
from softdb.attend.request import Request, Scored, Source
from softdb.index.on_device import OnDevice
from softdb.scoring import Uniform

__all__ = ["Estimated", "answered", "explained", "hits_of"]


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

    def of(self, which: Tensor) -> Estimated:
        """The same for some of them."""
        return self if bool(which.all()) else Estimated(*(column[which] for column in self))

    def padded(self, width: int) -> Estimated:
        """The same with so many candidates."""
        more = (0, width - self.positions.shape[1])
        pad = torch.nn.functional.pad
        return self._replace(
            positions=pad(self.positions, more, value=-1),
            scores=pad(self.scores, more, value=-torch.inf),
            weights=pad(self.weights, more),
        )


def answered(
    request: Request,
    source: Source,
    output: Tensor,  # (q, v)
    lse: Tensor,  # (q,)
    *,
    finder: str,
    exact: Tensor | None = None,  # (q,) bool; None: all are
    found: Scored | None = None,  # the records that were weighed; None: all that take part
    weights: Tensor | None = None,  # (q, k) of them
    missed_mass: Tensor | None = None,  # (q,); None: unknown where not exact
    error: Estimated | None = None,  # whose bars these are; None: none where exact, else unknown
) -> Pooled:
    """An answer, with what is known of its error, its records, and how to explain it."""
    if exact is None:
        exact = torch.ones_like(lse, dtype=torch.bool)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    bars = unknown.clone(), unknown.clone(), unknown.clone(), exact.clone()
    if error is not None:
        bars = error.bar, error.stderr, error.lse_stderr, error.met
    n_pooled, hits = request.taking_part(source), None
    if found is not None:
        hits = hits_of(request, source, found, lse.device)
        weighed = torch.from_numpy(found.positions >= 0).sum(1).to(lse.device)
        n_pooled = weighed if error is None else torch.where(exact, n_pooled, weighed)
    missed_mass = unknown if missed_mass is None else missed_mass
    if isinstance(source.columns, OnDevice):
        finder += source.columns.place(request.pools)
    pooled = Pooled(
        output, lse, exact, missed_mass, n_pooled, hits, weights, finder,
        lambda count: explained(request, source, pooled, count), *bars,
    )  # fmt: skip
    if isinstance(source, Remote) and source.missing:
        none, inf = torch.zeros_like(exact), torch.full_like(unknown, torch.inf)
        return replace(
            pooled, missing=source.missing, exact=none, met=none, bar=inf, stderr=inf, lse_stderr=inf,
            missed_mass=torch.full_like(inf, torch.nan),
        )  # fmt: skip
    return pooled


def hits_of(request: Request, source: Source, found: Scored, device: torch.device) -> Hits:
    """Candidates as the user sees them."""
    rows = torch.from_numpy(source.rows(found.positions)).to(device)
    missing = source.missing if isinstance(source, Remote) else ()
    return Hits(rows, request.shown_scores(found.scores).to(device), source.resolve, missing)


@torch.no_grad()
def explained(request: Request, source: Source, pooled: Pooled, count: int) -> list[Explanation]:
    """One explanation a query, of the `count` heaviest records. Cost of a search and a pass over what was weighed."""
    count = min(count, int(request.taking_part(source).amax()) if len(request.queries) else 0)
    if pooled.hits is not None and pooled.weights is not None:
        weights, order = pooled.weights.detach().sort(dim=1, descending=True, stable=True)
        weights, order = weights[:, :count], order[:, :count]
        hits = Hits(pooled.hits.rows.gather(1, order), pooled.hits.scores.detach().gather(1, order), source.resolve)
        entropy = -torch.special.xlogy(pooled.weights.detach(), pooled.weights.detach()).sum(1)
        weights = weights * (1 - pooled.missed_mass.nan_to_num(0)).unsqueeze(1)
    elif isinstance(source, Remote):
        return source.explained(request, pooled, count)
    else:
        request, source = request.detached, source.frozen()
        found = source.scored(request, source.find(request, count, exact=True).positions)
        weights, entropy = _all_weights(request, source, pooled.lse.detach(), found)
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


def _all_weights(request: Request, source: Source, lse: Tensor, found: Scored) -> tuple[Tensor, Tensor]:
    """Weights (q, k) of some records and the entropy (q,) of the weights of all."""
    live = torch.from_numpy(found.positions >= 0).to(lse.device)
    if isinstance(request.weighting, Uniform):
        return live / request.taking_part(source).to(lse).clamp(min=1).unsqueeze(1), lse
    weights = (found.scores / request.temperature - lse.unsqueeze(1)).exp().masked_fill(~live, 0)
    mean = torch.zeros_like(lse)  # of log w
    for tile, scores in scored_tiles(request, source):
        logs = scores / request.temperature - lse[tile.chunk].unsqueeze(1)
        mean[tile.chunk] += (logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).nan_to_num(0).sum(1)
    return weights, -mean
