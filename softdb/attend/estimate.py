"""The answer estimated to a tolerance: draws that grow until the error bar fits, or a pass over every record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from softdb.answers import Estimate, Pooled
from softdb.attend.exact import exact
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Positions, Request, Scored
from softdb.attend.result import Doubt, Estimated, answered
from softdb.attend.rounds import Estimator, Round
from softdb.check import shown
from softdb.errors import BadInput
from softdb.index.sampler import FIRST
from softdb.scoring import Softmax


def estimate(source: SourceRecords, request: Request) -> Pooled:
    """The exact answer: nothing draws these records. Raises BadInput as `estimate_drawn`."""
    if request.pools:
        require_estimator(request)
    return exact(source, request)


def estimate_drawn(source: IndexedRecords, request: Request) -> Pooled:
    """The softmax over all records, to the request's tolerance.

    Each round draws records for the queries whose error bar does not fit yet, by one scan of all codes, scores them
    exactly and pools them with the inverse of their probabilities. Records younger than the index are pooled whole.
    Queries for which a pass over every record costs less are answered so, and all of them where nothing can be drawn:
    no index, one of another metric, a mask. Raises BadInput for weightings and scores that have no estimator, unless
    the log-normaliser alone is wanted.
    """
    if request.pools:
        require_estimator(request)
    estimator, bounded = Estimator.of(request, source), request.tolerance is None or request.tolerance.most is not None
    if estimator is None or estimator.too_dear(Round(np.arange(len(request.queries)), FIRST)):
        return exact(source, request)
    if not bounded and estimator.sampler.hopeless(estimator.kind):
        return exact(source, request)
    passed, answers, tasks = [np.arange(0)], list[tuple[Positions, Estimated]](), estimator.first()
    q, spent = len(request.queries), 0.0
    whole = estimator.pass_cost(q)
    while tasks:
        task = tasks.pop()
        answer, *sizes = estimator.drawn(task)
        done, further, left = estimator.after(task, *sizes)
        passed.append(left)
        if done.any():
            answers.append((task.which[done], answer.of(done)))
        spent += estimator.cost(task)
        expected = estimator.cost(task) + sum(estimator.cost(more) for more in further) + whole * len(left) / q
        if tasks and not bounded and expected > whole * len(task.which) / q:  # these show what becomes of the others
            passed += [other.which for other in (*tasks, *further)]
            break
        tasks += further
    rest = np.sort(np.concatenate(passed))
    if not bounded:
        estimator.sampler.learn(estimator.kind, (spent + estimator.pass_cost(len(rest))) / whole)
    if answers and len(rest):
        answers.append((rest, _exactly(request.at(rest), source)))
    return _joined(estimator, answers, rest) if answers else exact(source, request)


def log_partition(source: SourceRecords, request: Request) -> Estimate:
    """log Z alone, Z = Σ exp(s / T) over all records, as `estimate` estimates it; nothing is pooled."""
    found = source.estimate(replace(request, pools=False))
    return Estimate(found.lse, found.bar, found.met, found.exact, found.missing)


def require_estimator(request: Request) -> None:
    """Raises BadInput where no index could draw for the request."""
    if not isinstance(request.weighting, Softmax):
        raise BadInput(
            f"the weights are {type(request.weighting).__name__.lower()}, for which there is no estimate; a tolerance "
            "goes with softmax and with a gaussian kernel: leave it out for the exact answer, or give k"
        )
    folded = request.detached.folded
    if folded is None or folded.scale is None:
        raise BadInput(
            f"the score is {shown(request.score)}, whose values no index knows, so nothing can be drawn for it; a "
            "tolerance goes with Dot, ScaledDot, Cosine, General, NegativeL2 and Gaussian: leave it out for the exact "
            "answer, or give k"
        )


def _joined(
    estimator: Estimator,
    parts: list[tuple[Positions, Estimated]],
    rest: Positions,  # (r,) queries that were answered exactly
) -> Pooled:
    """Answers of parts in the order of the queries."""
    request, source = estimator.request, estimator.source
    order, answers = zip(*parts, strict=True)
    whole, device = answers[0], request.queries.device
    if len(parts) > 1:
        width = max(part.positions.shape[1] for part in answers)
        columns = zip(*(part.padded(width) for part in answers), strict=True)
        back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
        whole = Estimated(*(torch.cat(column)[back] for column in columns))
    certain = torch.zeros(len(request.queries), dtype=torch.bool, device=device)
    certain[torch.from_numpy(rest).to(device)] = True
    found = Scored(whole.positions.cpu().numpy(), whole.scores)
    doubt = Doubt(certain, torch.zeros_like(whole.lse.detach()), whole)
    return answered(request, source, whole[:2], estimator.sampler.index.kind, (found, whole.weights), doubt)


def _exactly(request: Request, source: SourceRecords) -> Estimated:
    """The exact answer, as an estimate without error."""
    pooled = exact(source, request)
    none = torch.full((len(request.queries), 1), -1, device=pooled.lse.device)
    nothing = torch.zeros_like(pooled.lse.detach())
    return Estimated(
        pooled.output, pooled.lse, nothing, nothing, nothing, torch.ones_like(pooled.exact), none,
        torch.full_like(none, -torch.inf, dtype=pooled.lse.dtype), torch.zeros_like(none, dtype=pooled.lse.dtype),
        torch.zeros_like(pooled.n_pooled),
    )  # fmt: skip
