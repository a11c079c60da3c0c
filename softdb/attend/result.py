"""The one place where the answer of a soft query is put together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.answers import Hits, Pooled
from softdb.attend.explain import explained
from softdb.attend.request import Request
from softdb.attend.scoring import Scored
from softdb.attend.source import Source

__all__ = ["ErrorBars", "answered"]


class ErrorBars(NamedTuple):
    """How far an estimated answer may be from the exact one."""

    bar: Tensor  # (q,)
    stderr: Tensor  # (q,)
    lse_stderr: Tensor  # (q,)
    met: Tensor  # (q,) bool


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
    error: ErrorBars | None = None,  # None: none where exact, else unknown
) -> Pooled:
    """An answer, with what is known of its error, its records, and how to explain it."""
    if exact is None:
        exact = torch.ones_like(lse, dtype=torch.bool)
    unknown = torch.full_like(lse.detach(), torch.nan).masked_fill(exact, 0)
    bars = error or ErrorBars(unknown.clone(), unknown.clone(), unknown.clone(), exact.clone())
    n_pooled, hits = request.taking_part(source), None
    if found is not None:
        rows = torch.from_numpy(source.rows(found.positions)).to(lse.device)
        hits = Hits(rows, request.shown_scores(found.scores).to(lse.device), source.resolve)
        weighed = torch.from_numpy(found.positions >= 0).sum(1).to(lse.device)
        n_pooled = weighed if error is None else torch.where(exact, n_pooled, weighed)
    pooled = Pooled(
        output,
        lse,
        exact=exact,
        missed_mass=unknown if missed_mass is None else missed_mass,
        n_pooled=n_pooled,
        hits=hits,
        weights=weights,
        finder=finder,
        explanation=lambda count: explained(request, source, pooled, count),
        **bars._asdict(),
    )
    return pooled
