"""Estimate answers to a tolerance: draw more records until the error bar is small enough, or read all records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from softdb import check
from softdb.answers import Estimate, Hits, Pooled
from softdb.attend.exact import exact
from softdb.attend.protocol import IndexedRecords, SourceRecords
from softdb.attend.request import Positions, Request, Scored
from softdb.attend.result import Doubt, Estimated, Results, answered, explain
from softdb.attend.rounds import NO_QUERIES, SHOWN, Estimator, Round
from softdb.check import shown
from softdb.errors import BadInput
from softdb.index.contract import Numbers
from softdb.index.sampler import DrawnSample
from softdb.scoring import Softmax


def estimate(source: SourceRecords, request: Request) -> Pooled:
    """Return the exact answer, for a source without codes. Raises BadInput for requests that have no estimator."""
    if request.pools:
        require_estimator(request)
    return exact(source, request)


def estimate_drawn(source: IndexedRecords, request: Request) -> Pooled:
    """Estimate the softmax answer over all records to the request's tolerance.

    Each round scans codes once and draws records for the queries whose error bar exceeds the tolerance. The drawn
    records are scored exactly and pooled with weights divided by their probabilities. Unindexed records are all pooled.
    A pass over every record answers the queries for which it costs less. It answers all queries if no record can be
    drawn: without an index, with an index of another metric, or with a mask. Raises BadInput for weightings and scores
    that have no estimator, unless only the log-normaliser is computed.
    """
    if request.pools:
        require_estimator(request)
    estimator = Estimator.of(request, source)
    if estimator is None:
        return exact(source, request)
    estimator.remember()
    return _by_rounds(estimator)


def estimate_plainly(source: IndexedRecords, queries: Any, parameters: tuple[Any, ...]) -> Pooled | None:
    """Estimate with less overhead, as before with the same temperature, rtol, atol and confidence (`parameters`).

    Return None if `estimate_drawn` has to answer, and raise errors: for parameters that are new, and for other queries
    than finite numbers (q, d) of float32 on the CPU without gradients.
    """
    vectors = check.vectors(queries, source.schema.dim)
    if vectors is None or not all(type(number) is float for number in parameters) or not check.all_finite(vectors):
        return None
    estimator = Estimator.plainly(source, vectors, parameters)
    return None if estimator is None else _by_rounds(estimator)


def _by_rounds(estimator: Estimator) -> Pooled:
    """Draw records in rounds until the error of each query is within the tolerance, or read all records."""
    request, source, bounded = estimator.request, estimator.source, estimator.tolerance.most is not None
    if estimator.too_dear(Round(np.arange(len(request.queries)), estimator.budget)):
        return exact(source, request)
    if not bounded and estimator.sampler.hopeless(estimator.kind):
        return exact(source, request)
    passed, answers, tasks = list[Positions](), list[tuple[Positions, Positions, Estimated]](), estimator.first()
    spent, waiting = 0.0, len(tasks)  # `waiting`: number of first rounds that have not run
    while tasks:
        task = tasks.pop()
        spent += estimator.cost(task)
        sample = estimator.sample(task)
        is_first, waiting = len(tasks) < waiting, min(len(tasks), waiting)
        assembled, *sizes = estimator.judged(task, sample)
        if is_first and not bounded:
            estimator.plan(task, *sizes[:2])
        done, further, to_pass = estimator.after(task, *sizes)
        if np.count_nonzero(done) == len(request.queries) and not bounded and estimator.is_plain:
            estimator.sampler.learn(estimator.kind, spent / estimator.pass_cost(len(done)))
            return _plainly(estimator, sample, sizes[0])
        passed += [to_pass] if len(to_pass) else []
        if np.count_nonzero(done):
            answers.append((task.which[done], np.flatnonzero(done), assembled()))
        if is_first and tasks and estimator.others_too_dear(task, further, to_pass, tasks):
            passed += [other.which for other in (*tasks, *further)]
            break
        tasks += further
    exact_queries = np.sort(np.concatenate(passed)) if passed else NO_QUERIES
    if not bounded:
        full_cost = estimator.pass_cost(len(request.queries))
        estimator.sampler.learn(estimator.kind, (spent + estimator.pass_cost(len(exact_queries))) / full_cost)
    if answers and len(exact_queries):
        answers.append((exact_queries, np.arange(len(exact_queries)), _exactly(request.at(exact_queries), source)))
    return _joined(estimator, answers, exact_queries) if answers else exact(source, request)


def log_partition(source: SourceRecords, request: Request) -> Estimate:
    """Estimate log Z, Z = Σ exp(s / T) over all records, to the request's tolerance, without pooling values."""
    pooled = source.estimate(replace(request, pools=False))
    return Estimate(pooled.lse, pooled.bar, pooled.met, pooled.exact, pooled.missing)


def require_estimator(request: Request) -> None:
    """Raise BadInput if the request's weighting or score has no estimator, whatever the index."""
    if not isinstance(request.weighting, Softmax):
        raise BadInput(
            f"the weights are {type(request.weighting).__name__.lower()}, for which there is no estimate; a tolerance "
            "goes with softmax and with a gaussian kernel: omit the tolerance for the exact answer, or give k"
        )
    folded = request.detached.folded
    if folded is None or folded.scale is None:
        raise BadInput(
            f"the score is {shown(request.score)}, which no index can estimate; a tolerance goes with Dot, ScaledDot, "
            "Cosine, General, NegativeL2 and Gaussian: omit the tolerance for the exact answer, or give k"
        )


def _joined(
    estimator: Estimator,
    parts: list[tuple[Positions, Positions, Estimated]],  # queries, their indices in the answer, the answer
    exact_queries: Positions,  # (r,) numbers of the queries that were answered exactly
) -> Pooled:
    """Combine answers to some of the queries into the answer to all queries."""
    request, source = estimator.request, estimator.source
    answer = Estimated.joined(len(request.queries), parts)
    certain = torch.zeros_like(answer.met)
    if len(exact_queries):
        certain[torch.from_numpy(exact_queries).to(certain.device)] = True
    scored = Scored(answer.positions.cpu().numpy(), answer.scores)
    weighed, doubt = (scored, answer.weights), Doubt(certain, error=answer)
    return answered(request, source, answer[:2], estimator.sampler.index.kind, weighed, doubt)


def _plainly(estimator: Estimator, sample: DrawnSample, bar: Numbers) -> Pooled:  # (q,)
    """Return the answer of a plain estimate of which one round met the tolerance for all queries; cheaply."""
    request, source, figures, drawn = estimator.request, estimator.source, sample.figures, sample.answer
    assert drawn is not None
    scores, weights, none = sample.scores[:, :SHOWN], drawn.weights[:, :SHOWN], np.zeros(len(bar))
    numbers = drawn.output, figures.lse, none, scores, weights, bar, figures.stderr, figures.lse_stderr, figures.entropy
    output, lse, missed, scores_of, weights_of, bars, stderr, lse_stderr, entropy = (
        torch.from_numpy(column.astype(np.float32)) for column in numbers
    )
    exact, met_of, pooled, rows = (
        torch.from_numpy(column)
        for column in (none > 0, none == 0, figures.drawn.astype(np.int64), source.rows(sample.positions[:, :SHOWN]))
    )
    hits = Hits(rows, scores_of, source.resolve)
    results = Results(lse, exact, missed, hits, weights_of, entropy)
    return Pooled(
        output, lse, exact, missed, pooled, hits, weights_of, estimator.sampler.index.kind,
        lambda count: explain(source, request, results, count), bars, stderr, lse_stderr, met_of,
    )  # fmt: skip


def _exactly(request: Request, source: SourceRecords) -> Estimated:
    """Return the exact answer in the form of an estimate whose error is 0."""
    pooled = exact(source, request)
    none = torch.full((len(request.queries), 1), -1, device=pooled.lse.device)
    nothing = torch.zeros_like(pooled.lse.detach())
    return Estimated(
        pooled.output, pooled.lse, nothing, nothing, nothing, torch.ones_like(pooled.exact), none,
        torch.full_like(none, -torch.inf, dtype=pooled.lse.dtype), torch.zeros_like(none, dtype=pooled.lse.dtype),
        pooled.n_pooled, nothing,
    )  # fmt: skip
