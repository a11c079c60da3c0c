"""The soft query estimated to a tolerance: draws that grow until the error bar fits, or a pass over every record."""

from __future__ import annotations

import numpy as np
import torch

from softdb.answers import Estimate, Hits, Pooled, Resolve
from softdb.attend.exact import attend_all, log_all
from softdb.attend.explain import explained
from softdb.attend.request import Finder, Positions, SoftQuery
from softdb.attend.rounds import Answer, Plan
from softdb.check import Tolerance, shown
from softdb.compiled.threads import available
from softdb.errors import BadInput
from softdb.index.contract import prepared
from softdb.index.tail import FEWEST, Tail
from softdb.scores import fold
from softdb.store import Snapshot
from softdb.weights import Softmax

__all__ = ["attend_estimated", "log_partition"]


def attend_estimated(
    query: SoftQuery,
    snapshot: Snapshot,
    tail: Tail | None,  # None: nothing can draw
    border: int,  # the first position that it does not cover
    tolerance: Tolerance,
    seed: int,
    find: Finder,  # an exact finder
    resolve: Resolve,
) -> Pooled:
    """The softmax over all records, to a tolerance.

    Each round draws records for the queries whose error bar does not fit yet, scores them exactly, keeps some by their
    weights and pools these with the inverse of their probabilities. Records younger than the index are pooled whole.
    Queries for which a pass over every record costs less are answered so, and all of them where nothing can be drawn:
    no index, one of another metric, a mask. Raises BadInput for weightings and scores that have no estimator.
    """
    _require_estimator(query)
    plan = None if tail is None else _plan(query, snapshot, tail, border, seed)
    if plan is None:
        return attend_all(query, snapshot, find, resolve)
    parts, rest = plan.rounds(tolerance)
    if len(rest) == len(query.queries):
        return attend_all(query, snapshot, find, resolve)
    return _joined(plan, parts, rest, tolerance, find, resolve)


def log_partition(
    query: SoftQuery,
    snapshot: Snapshot,
    tail: Tail | None,
    border: int,
    tolerance: Tolerance,  # of Z, relative to it
    seed: int,
) -> Estimate:
    """log Z alone, Z = Σ exp(s / T) over all records, as `attend_estimated` estimates it; nothing is pooled."""
    plan = None if tail is None else _plan(query, snapshot, tail, border, seed)
    parts, rest = ([], np.arange(len(query.queries))) if plan is None else plan._replace(pools=False).rounds(tolerance)
    found = [(which, part.lse, part.bar, part.met) for which, part in parts]
    if len(rest) or not found:  # no queries at all have an answer, too: an empty one
        lse = log_all(query.of(rest), snapshot)
        found.append((rest, lse, torch.zeros_like(lse.detach()), torch.ones_like(lse, dtype=torch.bool)))
    order = np.concatenate([which for which, *_ in found])
    back = torch.from_numpy(np.argsort(order)).to(query.queries.device)
    lse, bar, met = (torch.cat(column)[back] for column in list(zip(*found, strict=True))[1:])
    exact = torch.zeros_like(met)
    exact[torch.from_numpy(rest).to(exact.device)] = True
    return Estimate(lse, bar, met, exact)


def _require_estimator(query: SoftQuery) -> None:
    """Raises BadInput where no index could draw for the query."""
    if not isinstance(query.weighting, Softmax):
        raise BadInput(
            f"the weights are {type(query.weighting).__name__.lower()}, for which there is no estimate; a tolerance "
            "goes with softmax and with a gaussian kernel: leave it out for the exact answer, or give k"
        )
    with torch.no_grad():
        folded = fold(query.score, query.queries[:1])
    if folded is None or folded.scale is None:
        raise BadInput(
            f"the score is {shown(query.score)}, whose values no index knows, so nothing can be drawn for it; a "
            "tolerance goes with Dot, ScaledDot, Cosine, General, NegativeL2 and Gaussian: leave it out for the exact "
            "answer, or give k"
        )


def _plan(query: SoftQuery, snapshot: Snapshot, tail: Tail, border: int, seed: int) -> Plan | None:
    """What is drawn from; None where nothing can be drawn."""
    if not isinstance(query.weighting, Softmax) or query.mask is not None or not available() or not len(query.queries):
        return None
    with torch.no_grad():
        folded = fold(query.score, query.queries)
    if folded is None or folded.scale is None or folded.metric is not tail.index.metric:
        return None
    factor = float(folded.scale) / query.temperature
    keep, count = snapshot.live, snapshot.count
    if query.allowed is not None:
        keep = snapshot.live & query.allowed
        count = int(np.count_nonzero(keep))
    if not 1e-30 < factor < 1e30 or count < FEWEST:
        return None
    counts, young, drawable = keep, None, count
    if border < snapshot.size:
        counts, young = keep.copy(), keep.copy()
        counts[border:], young[:border] = False, False
        drawable = int(np.count_nonzero(counts))
    if not drawable:
        return None
    asked = prepared(folded.queries.detach().cpu().numpy(), tail.index.metric)
    return Plan(query, snapshot, tail, factor, asked, counts, young, count, drawable, seed)


def _joined(
    plan: Plan,
    parts: list[tuple[Positions, Answer]],
    rest: Positions,  # (r,) queries left
    tolerance: Tolerance,
    find: Finder,
    resolve: Resolve,
) -> Pooled:
    """Estimates and exact answers in the order of the queries."""
    query, snapshot = plan.query, plan.snapshot
    estimates, order = [part for _, part in parts], [which for which, _ in parts]
    if len(rest):
        estimates.append(_exactly(query.of(rest), snapshot, find, resolve))
        order.append(rest)
    whole, device = estimates[0], query.queries.device
    if len(estimates) > 1:
        width = max(part.positions.shape[1] for part in estimates)
        columns = zip(*(part.padded(width) for part in estimates), strict=True)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
        whole = Answer(*(torch.cat(column)[back] for column in columns))
    exact = torch.zeros(len(query.queries), dtype=torch.bool, device=device)
    exact[torch.from_numpy(rest).to(device)] = True
    weights, best = whole.weights.sort(dim=1, descending=True, stable=True)
    rows = torch.from_numpy(snapshot.rows(whole.positions.cpu().numpy())).to(device)
    pooled = Pooled(
        whole.output,
        whole.lse,
        exact=exact,
        missed_mass=torch.zeros_like(whole.lse.detach()),
        candidates=torch.where(exact, query.taking_part(snapshot).to(exact.device), (whole.positions >= 0).sum(1)),
        hits=Hits(rows.gather(1, best), query.shown_scores(whole.scores).gather(1, best), resolve),
        weights=weights,
        finder=plan.tail.index.kind,
        explanation=lambda count: explained(query, snapshot, pooled, count, find, resolve),
        bar=whole.bar,
        stderr=whole.stderr,
        lse_stderr=whole.lse_stderr,
        met=whole.met,
    )
    return pooled


def _exactly(query: SoftQuery, snapshot: Snapshot, find: Finder, resolve: Resolve) -> Answer:
    """The exact answer, as an estimate without error."""
    pooled = attend_all(query, snapshot, find, resolve)
    none = torch.full((len(query.queries), 1), -1, device=pooled.lse.device)
    nothing = torch.zeros_like(pooled.lse.detach())
    return Answer(
        pooled.output, pooled.lse, nothing, nothing, nothing, torch.ones_like(pooled.exact), none,
        torch.full_like(none, -torch.inf, dtype=pooled.lse.dtype), torch.zeros_like(none, dtype=pooled.lse.dtype),
    )  # fmt: skip
