"""Losses of retrieval: functions of queries, through which the gradient flows back into what encoded them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.answers import Pooled
from softdb.check import shown
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.nn.eager import eager
from softdb.nn.memory import Memory
from softdb.nn.targets import (
    Positives,
    Records,
    Rows,
    asked,
    class_labels,
    handle,
    live,
    mined,
    refuse,
    require_shape,
    without,
)
from softdb.nn.view import View
from softdb.scoring import Kernel, Score, ScoreFunction, Weighting, softmax
from softdb.typing import Vectors

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reduction: TypeAlias = Literal["mean", "sum", "none"]
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {"mean": Tensor.mean, "sum": Tensor.sum, "none": Tensor.clone}

SHARP = 0.07  # info_nce's temperature for scores that are cosines (Wu et al. 2018, section 3.1)
IMPOSSIBLE = 100.0  # what a label without any weight costs, as in torch.nn.BCELoss


class Asking(TypedDict, total=False):
    """Arguments of the answers that a loss judges: as of `SoftDB.attend`; None is the default."""

    temperature: float | None
    score: Score | ScoreFunction | None
    weights: str | Weighting | None
    k: int | None
    rtol: float | None
    atol: float | None
    max_draws: int | None
    generator: torch.Generator | None
    where: dict[str, Any] | None
    mask: Any


@eager
def retrieval_loss(
    db: Records,
    queries: Vectors,  # (q, d)
    positives: Any,  # one id, or a list of ids, for each query
    *,
    temperature: float | None = None,
    score: Score | ScoreFunction | None = None,
    k: int | None = None,
    rtol: float | None = None,
    max_draws: int | None = None,
    generator: torch.Generator | None = None,
    where: dict[str, Any] | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # (), or (q,) for "none"
    """The negative log-likelihood that a record drawn from the soft distribution is one of the query's positives.

        loss = log Σ_i exp(s(q, k_i) / T) - log Σ_{i positive} exp(s(q, k_i) / T)

    Karpukhin et al. 2020, equation 2, with every record as a negative and any number of positives. Differentiable in
    the queries, and in the score's parameters.

    Neither k nor rtol: over every record; cost q n d. With `rtol=` the first term is `db.log_partition`: its bar is
    within rtol of the sum, its gradient has a bias of the same order, and the loss may be a little below 0. With `k=`
    the first sum is over the k nearest and the positives, each record once: a lower bound of the loss over all; cost of
    the search, then q (k + m) d for m positives. Besides, one look into the catalogue for all ids.

    A kernel as score has its plain normalisation, as in `attend`. A query whose positives all have a kernel value of 0
    costs infinity, with zero gradients.

    Args:
        db: the database, a `View` or a `Memory`; a Memory always sees the k nearest (its own k) and the positives.
        queries: (q, d) with their graph, or q texts where the database has an encoder.
        positives: ids; each query needs at least one, and they may differ in number.
        temperature: divides the scores; None: 1, or the Memory's own.
        score: as in `attend`; None: the database's metric.
        k: truncate to the k nearest and the positives.
        rtol: estimate the normaliser to that relative error.
        max_draws: as in `log_partition`, with rtol; of a View without rtol, as its `attend` takes it.
        generator: draws anew with each call; training wants one.
        where: a filter on the payload, which every positive must match.
        reduction: "mean" over the queries, "sum" or "none".

    Raises UnknownId for a positive that is not stored; BadInput for a query without positives, a positive outside the
    filter, k and rtol together, or another number of positives than of queries.

    >>> import softdb
    >>> db = softdb.open(None, dim=2)
    >>> db.insert(["east", "north", "west"], [[1, 0], [0, 1], [-1, 0]])
    >>> queries = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], requires_grad=True)
    >>> loss = retrieval_loss(db, queries, ["north", ["north", "west"]], temperature=0.1)
    >>> loss.backward()
    >>> round(loss.item(), 4), queries.grad.shape
    (0.0635, torch.Size([2, 2]))
    """
    reduce = _reduce(reduction)
    by_draws = isinstance(db, View) and rtol is None
    tolerance = check.draws(max_draws, k) if by_draws else check.tolerance(rtol, 0.0, 0.95, max_draws, k)
    count = None if k is None else check.integer(k, "k")
    ask = asked(db, queries, positives, temperature, score, where, count, tolerance, generator)
    if count is None and isinstance(db, Memory):
        count = db.k
    request, source, positions = ask
    if count is not None:
        others = without(source.find(request.top(count)).positions, positions)
        return reduce(_likelihood(ask, *ask.scored(np.concatenate([positions, others], 1))))
    positions, scores = ask.scored(positions)
    found = softmax(scores, request.temperature, live(positions, scores))[1]
    whole = source.log_normaliser(request) if tolerance is None else source.log_partition(request).value
    return reduce(_surprise(found, whole))


@eager
def info_nce(
    db: Records,
    queries: Vectors,  # (q, d)
    positives: Any,  # one id, or a list of ids, for each query
    *,
    negatives: int = 16,
    in_batch: bool = True,
    skip: int = 0,
    among: int | None = None,
    temperature: float | None = None,
    score: Score | ScoreFunction | None = None,
    where: dict[str, Any] | None = None,
    generator: torch.Generator | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # (), or (q,) for "none"
    """InfoNCE against hard negatives from the database and the other queries' positives.

        loss = -log( Σ_{i positive} exp(s_i / T) / Σ_{i positive or negative} exp(s_i / T) )

    van den Oord et al. 2018, equation 4; with several positives their sum (MIL-NCE, Miech et al. 2020). The hard
    negatives of a query are the nearest records that are not its positives, found anew with every call (Xiong et al.
    2021), by the same score. A record counts once, however it came in, and never as a negative of a query whose
    positive it is. Without any negative the loss is 0. Cost of a search for the negatives, then q (q + negatives) d.

    Args:
        db, queries, positives, score, where, reduction: as of `retrieval_loss`; negatives match the filter, too.
        negatives: how many hard negatives a query; 0: only those of the batch.
        in_batch: whether the other queries' positives are negatives, too (Karpukhin et al. 2020, section 3.2).
        skip: pass over so many of the nearest, which may be positives that nobody has labelled.
        among: draw the negatives at random among so many of the nearest, rather than take the very nearest.
        temperature: divides the scores; None: 0.07, 1 for a kernel, whose bandwidth does its work, or the Memory's own.
        generator: of that draw; None: torch's own random numbers.

    Raises UnknownId and BadInput as `retrieval_loss`; BadInput where no negatives are asked for, or among < negatives.
    """
    reduce = _reduce(reduction)
    count, skip = check.integer(negatives, "negatives", 0), check.integer(skip, "skip", 0)
    if not count and not in_batch:
        raise BadInput("negatives is 0 and in_batch False: nothing is left to tell the positives from; ask for some")
    pool = count if among is None else check.integer(among, "among")
    if pool < count:
        raise BadInput(f"among is {pool} but negatives {count}; draw them among at least as many")
    if temperature is None and not isinstance(db, Memory):
        temperature = 1.0 if isinstance(score, Kernel) else SHARP
    ask = asked(db, queries, positives, temperature, score, where, max(1, count))
    request, source, positions = ask
    hard = mined(ask, count, skip, pool, generator)
    if not in_batch:
        return reduce(_likelihood(ask, *ask.scored(np.concatenate([positions, hard], 1))))
    batch = np.unique(positions[positions >= 0])  # (u,)
    every = np.broadcast_to(batch, (len(positions), len(batch)))
    hard = np.where(np.isin(hard, batch), -1, hard)
    both = np.concatenate([every, hard], 1)
    if source.columns is None:
        return reduce(_likelihood(ask, *ask.scored(both)))
    scores = torch.cat([source.shared_scores(request, batch), ask.scored(hard)[1]], 1)
    return reduce(_likelihood(ask, both, scores))


@eager
def label_loss(
    db: Records,
    queries: Vectors,  # (q, d)
    labels: Any,  # (q,) whole numbers
    *,
    logits: Tensor | None = None,  # (q, num_classes)
    interpolation: float = 0.25,
    reduction: Reduction = "mean",
    **asking: Unpack[Asking],
) -> Tensor:  # (), or (q,) for "none"
    """The negative log-likelihood of labels under the label distribution of the soft query.

        p_db(y) = Σ_{i: y_i = y} w_i,  loss = -log( λ p_db(y) + (1 - λ) softmax(logits)_y )

    Khandelwal et al. 2020, equations 2 and 3; without logits it is -log p_db(y). Differentiable in the queries and the
    logits. A label without any weight, which truncation (`k=`) or underflow leave behind, costs 100 as in
    torch.nn.BCELoss, with zero gradients: with `k=` give logits, or let the loss see every record. Cost of `attend`.

    Args:
        db, queries, reduction: as of `retrieval_loss`; the database has labels (num_classes).
        labels: what each query should be answered.
        logits: of another model, to which the database adds.
        interpolation: λ, the share of the database in the mixture, from 0 to 1; used only with logits.
        temperature, score, weights, k, rtol, atol, max_draws, generator, where, mask: as `db.attend` takes them; a View
            takes temperature, score, k, max_draws, generator and where, a Memory none of them.

    Raises BadInput for a database without labels, labels out of range, or shapes that do not fit.
    """
    reduce = _reduce(reduction)
    classes = handle(db).core.schema.num_classes
    if classes is None:
        raise BadInput("this database holds no labels; open one with num_classes=, or use pooled_loss")
    share = check.share(interpolation, "interpolation")
    wanted = class_labels(labels, classes)
    if logits is not None:
        require_shape(logits, "logits", (len(wanted), classes))
    pooled = _answer(db, queries, asking)
    if len(wanted) != len(pooled):
        raise BadInput(f"labels are {len(wanted)} for {len(pooled)} queries; give one for each")
    wanted = wanted.to(pooled.device).unsqueeze(1)
    chance = pooled.gather(1, wanted)
    none = chance < torch.finfo(chance.dtype).tiny  # 1 / p would be infinite
    logs = chance.masked_fill(none, 1).log().masked_fill(none, -torch.inf)  # (q, 1)
    if logits is not None:
        other = logits.to(logs).log_softmax(1).gather(1, wanted)
        shares = logs.new_tensor([share, 1 - share]).log()
        logs = torch.cat([logs, other], 1) + shares
    _, likelihood = softmax(logs, 1.0, logs > -torch.inf)
    return reduce(-likelihood.masked_fill(likelihood == -torch.inf, -IMPOSSIBLE))


@eager
def pooled_loss(
    db: Records,
    queries: Vectors,  # (q, d)
    targets: Tensor,  # (q, v)
    *,
    reduction: Reduction = "mean",
    **asking: Unpack[Asking],
) -> Tensor:  # (), or (q,) for "none"
    """The squared distance ‖o - t‖² between the soft query's answer o and its target t.

    "mean" is over the queries, not over the v coordinates: v times torch's mse_loss. Of a database with labels the
    answer is a distribution, and this its Brier score (1950). Differentiable in queries and targets. An estimate ô
    (`rtol=`) adds its own variance: E ‖ô - t‖² = ‖E ô - t‖² + stderr². Cost of the `attend`.

    Args:
        db, queries, reduction: as of `retrieval_loss`.
        targets: what each query should be answered; v as `attend` answers.
        temperature, score, weights, k, rtol, atol, max_draws, generator, where, mask: as `db.attend` takes them; a View
            takes temperature, score, k, max_draws, generator and where, a Memory none of them.

    Raises BadInput for targets of another shape, which would broadcast.
    """
    reduce = _reduce(reduction)
    handle(db)
    output = _answer(db, queries, asking)
    require_shape(targets, "targets", tuple(output.shape))
    return reduce((output - targets.to(output)).square().sum(1))


# -- parts -------------------------------------------------------------------------------------------------------------


def _answer(db: Records, queries: Vectors, asking: Asking) -> Tensor:  # (q, v)
    if unknown := asking.keys() - Asking.__annotations__.keys():
        raise TypeError(f"a loss got unexpected arguments: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in asking.items() if value is not None}
    if isinstance(db, Verbs):
        return db.attend(queries, **given).output
    taken = ("temperature", "score", "k", "where", "max_draws", "generator") if isinstance(db, View) else ()
    refuse(db, {name: value for name, value in given.items() if name not in taken})
    found: Pooled = db(queries, **given)
    return found.output


def _likelihood(
    ask: Positives,
    positions: Rows,  # (q, k) the positives and others, each once, -1 = none
    scores: Tensor,  # (q, k)
) -> Tensor:  # (q,)
    """-log of the positives' share among some records."""
    sides = (torch.from_numpy(side).to(scores.device) for side in (ask.wins(positions), positions >= 0))
    return _surprise(*(softmax(scores, ask.request.temperature, side)[1] for side in sides))


def _surprise(found: Tensor, whole: Tensor) -> Tensor:  # (q,), (q,) -> (q,)
    """-log of the positives' share, by their lse and that of all; infinite where they have none, or nothing has any."""
    lost = found == -torch.inf
    return (whole.masked_fill(lost, 0) - found.masked_fill(lost, 0)).masked_fill(lost, torch.inf)


def _reduce(reduction: object) -> Callable[[Tensor], Tensor]:
    if not isinstance(reduction, str) or reduction not in REDUCED:
        raise BadInput(f"reduction is {shown(reduction)}; expected 'mean', 'sum' or 'none'")
    return REDUCED[reduction]
