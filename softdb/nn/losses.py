"""Retrieval losses. Their gradients reach the queries and the encoder that made the queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.answers import Pooled, shaped
from softdb.check import shown
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.index.contract import Rows
from softdb.nn.eager import eager
from softdb.nn.memory import Memory
from softdb.nn.targets import (
    Positives,
    Records,
    class_labels,
    handle,
    live,
    mined,
    positives_of,
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
ZERO_WEIGHT_LOSS = 100.0  # loss of a label whose weight is 0, as in torch.nn.BCELoss


class AttendOptions(TypedDict, total=False):
    """Arguments of `SoftDB.attend` that a loss passes on; None means the default."""

    temperature: float | Tensor | None
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
@shaped
def retrieval_loss(
    db: Records,
    queries: Vectors,  # (q, d), or (…, d)
    positives: Any,  # one id, or a list of ids, for each query
    *,
    temperature: float | Tensor | None = None,
    score: Score | ScoreFunction | None = None,
    k: int | None = None,
    rtol: float | None = None,
    max_draws: int | None = None,
    generator: torch.Generator | None = None,
    where: dict[str, Any] | None = None,
    reduction: Reduction = "mean",
    sample_weight: Any = None,  # (q,), or (…)
) -> Tensor:  # (), or (q,) or (…) for "none"
    """Negative log-likelihood that a record drawn from the soft distribution is one of the query's positives.

        loss = log Σ_i exp(s(q, k_i) / T) - log Σ_{i positive} exp(s(q, k_i) / T)

    Karpukhin et al. 2020, equation 2, with every record as a negative and any number of positives. Differentiable in
    the queries, and in the score's parameters.

    Without k and rtol the loss is exact, over every record; cost q n d. With `rtol=` the first term is estimated by
    `db.log_partition` to that tolerance: its gradient has a bias of that order, and the loss may be a little below 0.
    Over a `View` no bar proves the tolerance: the error that the draws show is within it (see `View.attend`).
    With `k=` the first sum is over the k nearest and the positives, each record once: a lower bound of the exact loss.
    Cost with k: the search, then q (k + m) d for m positives. All ids are looked up in one catalogue query.

    With a kernel as score, the kernel replaces exp(s / T), as in `attend`. If the kernel is 0 at all positives of a
    query, the query's loss is infinite, with zero gradients.

    Args:
        db: the database, a `View` or a `Memory`; a Memory without k= uses its own k.
        queries: (q, d) or (…, d) with their graph, or q texts if the database has an encoder.
        positives: ids; at least one for each query, and any number of them. For queries (…, d) a tensor (…), or lists
            nested in the same way.
        temperature: divides the scores; a number, or a floating tensor () or (q,) with its graph. None: 1, or the
            Memory's own.
        score: as in `attend`; None: the database's metric.
        k: truncate to the k nearest and the positives.
        rtol: estimate the normaliser with this relative error.
        max_draws: number of draws, with rtol; for a View also without.
        generator: random numbers for the draws; pass one in training. None: every call draws the same numbers.
        where: a filter on the payload, which every positive must match.
        reduction: "mean" over the queries, "sum" or "none".
        sample_weight: (q,) or (…) numbers w of at least 0, also a tensor with its graph; "mean" is then Σ w l / Σ w of
            the losses l, as in torch's cross_entropy with class weights, "sum" Σ w l, "none" w l. None: 1 for each.

    Raises UnknownId for a positive that is not stored; BadInput for a query without positives, a positive outside the
    filter, k and rtol together, if positives and queries differ in number, and for weights of another shape, negative,
    not finite or all 0.

    >>> import softdb
    >>> db = softdb.open(None, dim=2)
    >>> ids = db.insert(["east", "north", "west"], [[1, 0], [0, 1], [-1, 0]])
    >>> queries = torch.tensor([[0.6, 0.8], [-0.8, 0.6]], requires_grad=True)
    >>> loss = retrieval_loss(db, queries, ["north", ["north", "west"]], temperature=0.1)
    >>> loss.backward()
    >>> round(loss.item(), 4), queries.grad.shape
    (0.0635, torch.Size([2, 2]))
    """
    by_draws = isinstance(db, View)
    tolerance = check.draws(rtol, 0.0, max_draws, k) if by_draws else check.tolerance(rtol, 0.0, 0.95, max_draws, k)
    count = None if k is None else check.integer(k, "k")
    targets = positives_of(db, queries, positives, temperature, score, where, count, tolerance, generator)
    if count is None and isinstance(db, Memory):
        count = db.k
    request, source, positions = targets
    reduce = _reduce(reduction, sample_weight, check.leading(queries, len(positions)))
    if count is not None:
        others = without(source.find(request.top(count)).positions, positions)
        return reduce(_likelihood(targets, *targets.scored(np.concatenate([positions, others], 1))))
    positions, scores = targets.scored(positions)
    positives_lse = softmax(scores, request.temperature, live(positions, scores))[1]
    lse = source.log_normaliser(request) if tolerance is None else source.log_partition(request).value
    return reduce(_surprise(positives_lse, lse))


@eager
@shaped
def info_nce(
    db: Records,
    queries: Vectors,  # (q, d), or (…, d)
    positives: Any,  # one id, or a list of ids, for each query
    *,
    negatives: int = 16,
    in_batch: bool = True,
    skip: int = 0,
    among: int | None = None,
    temperature: float | Tensor | None = None,
    score: Score | ScoreFunction | None = None,
    where: dict[str, Any] | None = None,
    generator: torch.Generator | None = None,
    reduction: Reduction = "mean",
    sample_weight: Any = None,  # (q,), or (…)
) -> Tensor:  # (), or (q,) or (…) for "none"
    """Return the InfoNCE loss against hard negatives from the database and the other queries' positives.

        loss = -log( Σ_{i positive} exp(s_i / T) / Σ_{i positive or negative} exp(s_i / T) )

    van den Oord et al. 2018, equation 4; several positives are summed (MIL-NCE, Miech et al. 2020). The hard negatives
    of a query are the nearest records by the same score that are not its positives, searched with every call (Xiong et
    al. 2021). Each record counts once; a positive of a query is never its negative. Without any negative the loss is 0.
    Cost of a search for the negatives, then q (q + negatives) d.

    Args:
        db, queries, positives, score, where, reduction: see `retrieval_loss`; negatives must match the filter, too.
        sample_weight: see `retrieval_loss`; the positives of a query of weight 0 are no negatives of the others.
        negatives: hard negatives for each query; 0: only those of the batch.
        in_batch: True: the other queries' positives are negatives, too (Karpukhin et al. 2020, section 3.2).
        skip: number of nearest records to skip, which may be unlabelled positives.
        among: draw the negatives at random among this number of the nearest; None: take the very nearest.
        temperature: divides the scores; None: a Memory's own temperature, else 1 for a kernel and 0.07 for the rest.
        generator: random numbers of the draw among the nearest; None: torch's default generator.

    Raises the errors of `retrieval_loss`, and BadInput for no negatives at all, or among < negatives.
    """
    count, skip = check.integer(negatives, "negatives", 0), check.integer(skip, "skip", 0)
    if not count and not in_batch:
        raise BadInput("negatives is 0 and in_batch False, which leaves no negatives; change one of the two")
    pool = count if among is None else check.integer(among, "among")
    if pool < count:
        raise BadInput(f"among is {pool} but negatives {count}; pass among of {count} or more")
    if temperature is None and not isinstance(db, Memory):
        temperature = 1.0 if isinstance(score, Kernel) else SHARP
    targets = positives_of(db, queries, positives, temperature, score, where, max(1, count))
    request, source, positions = targets
    shape = check.leading(queries, len(positions))
    reduce = _reduce(reduction, sample_weight, shape)
    hard = mined(targets, count, skip, pool, generator)
    if not in_batch:
        return reduce(_likelihood(targets, *targets.scored(np.concatenate([positions, hard], 1))))
    present = positions if sample_weight is None else positions[check.sample_weights(sample_weight, *shape).ravel() > 0]
    batch = np.unique(present[present >= 0])  # (u,)
    every = np.broadcast_to(batch, (len(positions), len(batch)))
    hard = np.where(np.isin(hard, batch), -1, hard)
    shared = source.shared_scores(request, batch)
    if shared is None:
        return reduce(_likelihood(targets, *targets.scored(np.concatenate([every, hard], 1))))
    if hard.shape[1]:
        hard, scores = targets.scored(hard)
        every, shared = np.concatenate([every, hard], 1), torch.cat([shared, scores], 1)
    return reduce(_likelihood(targets, every, shared))


@eager
def label_loss(
    db: Records,
    queries: Vectors,  # (q, d), or (…, d)
    labels: Any,  # (q,) or (…) integers
    *,
    logits: Tensor | None = None,  # (q, num_classes), or (…, num_classes)
    interpolation: float = 0.25,
    reduction: Reduction = "mean",
    sample_weight: Any = None,  # (q,), or (…)
    **asking: Unpack[AttendOptions],
) -> Tensor:  # (), or (q,) or (…) for "none"
    """Negative log-likelihood of labels under the label distribution of the soft query.

        p_db(y) = Σ_{i: y_i = y} w_i,  loss = -log( λ p_db(y) + (1 - λ) softmax(logits)_y )

    Khandelwal et al. 2020, equations 2 and 3; without logits it is -log p_db(y). Differentiable in the queries and the
    logits. A label of weight 0, by truncation (`k=`) or underflow, has a loss of 100 as in torch.nn.BCELoss, with zero
    gradients. So with `k=` pass logits, or let the loss see every record. Cost of `attend`.

    Args:
        db, queries, reduction, sample_weight: see `retrieval_loss`; the database has labels (num_classes).
        labels: the true class of each query, (…) for queries (…, d); logits alike.
        logits: of another model, mixed with the database's distribution.
        interpolation: λ, the share of the database in the mixture, from 0 to 1; used only with logits.
        temperature, score, weights, k, rtol, atol, max_draws, generator, where, mask: as `db.attend` takes them; a View
            takes all but weights and mask, a Memory none of them.

    Raises BadInput for a database without labels, labels out of range, or shapes that do not fit.
    """
    classes = handle(db).core.schema.num_classes
    if classes is None:
        raise BadInput("this database holds no labels; open one with num_classes=, or use pooled_loss")
    share = check.share(interpolation, "interpolation")
    true = class_labels(labels, classes)
    reduce = _reduce(reduction, sample_weight, true.shape)
    if logits is not None:
        require_shape(logits, "logits", (*true.shape, classes))
    pooled = _output(db, queries, asking)
    if true.shape != pooled.shape[:-1]:
        counts = [" × ".join(map(str, shape)) for shape in (true.shape, pooled.shape[:-1])]
        raise BadInput(f"labels are {counts[0]} for {counts[1]} queries; give one label for each query")
    true = true.to(pooled.device).unsqueeze(-1)
    probability = pooled.gather(-1, true)
    zero = probability < torch.finfo(probability.dtype).tiny  # its gradient 1 / p would be infinite
    logs = probability.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)  # (…, 1)
    if logits is not None:
        model_logs = logits.to(logs).log_softmax(-1).gather(-1, true)
        shares = logs.new_tensor([share, 1 - share]).log()
        logs = torch.cat([logs, model_logs], -1) + shares
    _, likelihood = softmax(logs, 1.0, logs > -torch.inf)
    return reduce(-likelihood.masked_fill(likelihood == -torch.inf, -ZERO_WEIGHT_LOSS))


@eager
def pooled_loss(
    db: Records,
    queries: Vectors,  # (q, d), or (…, d)
    targets: Tensor,  # (q, v), or (…, v)
    *,
    reduction: Reduction = "mean",
    sample_weight: Any = None,  # (q,), or (…)
    **asking: Unpack[AttendOptions],
) -> Tensor:  # (), or (q,) or (…) for "none"
    """Squared distance ‖o - t‖² between the soft query's output o and its target t.

    "mean" is over the queries, not over the v coordinates: v times torch's mse_loss. If the database has labels, o is a
    distribution and the loss its Brier score (1950). Differentiable in queries and targets. An estimate ô (`rtol=`)
    adds its own variance: E ‖ô - t‖² = ‖E ô - t‖² + stderr². Cost of `attend`.

    Args:
        db, queries, reduction, sample_weight: see `retrieval_loss`.
        targets: the wanted output of each query, of the shape that `attend` returns.
        temperature, score, weights, k, rtol, atol, max_draws, generator, where, mask: as `db.attend` takes them; a View
            takes all but weights and mask, a Memory none of them.

    Raises BadInput for targets of another shape, which would broadcast.
    """
    handle(db)
    shape = targets.shape[:-1] if isinstance(targets, Tensor) and check.dense(targets, "targets").ndim else None
    reduce = _reduce(reduction, None if shape is None else sample_weight, shape or ())
    output = _output(db, queries, asking)
    require_shape(targets, "targets", tuple(output.shape))
    return reduce((output - targets.to(output)).square().sum(-1))


# -- parts -------------------------------------------------------------------------------------------------------------


def _output(db: Records, queries: Vectors, asking: AttendOptions) -> Tensor:  # (…, v)
    if unknown := asking.keys() - AttendOptions.__annotations__.keys():
        raise TypeError(f"a loss got unexpected arguments: {', '.join(sorted(unknown))}")
    options: dict[str, Any] = {name: value for name, value in asking.items() if value is not None}
    if isinstance(db, Verbs):
        return db.attend(queries, **options).output
    refused = {"weights", "mask"} if isinstance(db, View) else options.keys()
    refuse(db, {name: value for name, value in options.items() if name in refused})
    pooled: Pooled = db(queries, **options)
    return pooled.output


def _likelihood(
    targets: Positives,
    positions: Rows,  # (q, k) positives and other records without duplicates, -1 = none
    scores: Tensor,  # (q, k)
) -> Tensor:  # (q,)
    """Return -log of the positives' share of Σ exp(score / T) over the records at `positions`."""
    masks = (torch.from_numpy(mask).to(scores.device) for mask in (targets.wins(positions), positions >= 0))
    return _surprise(*(softmax(scores, targets.request.temperature, mask)[1] for mask in masks))


def _surprise(positives_lse: Tensor, lse: Tensor) -> Tensor:  # (q,), (q,) -> (q,)
    """Return lse - positives_lse, which is -log of the positives' share; infinite if the share is 0."""
    zero = positives_lse == -torch.inf
    return (lse.masked_fill(zero, 0) - positives_lse.masked_fill(zero, 0)).masked_fill(zero, torch.inf)


def _reduce(reduction: object, sample_weight: Any, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function of losses l (…): their mean, sum or copy, or Σ w l / Σ w, Σ w l or w l with weights w."""
    if not isinstance(reduction, str) or reduction not in REDUCED:
        raise BadInput(f"reduction is {shown(reduction)}; expected 'mean', 'sum' or 'none'")
    if sample_weight is None:
        return REDUCED[reduction]
    numbers = torch.from_numpy(check.sample_weights(sample_weight, *shape))
    weights = sample_weight.double() if isinstance(sample_weight, Tensor) else numbers
    if reduction == "mean":
        weights = weights / weights.sum()

    def reduce(losses: Tensor) -> Tensor:
        own = weights.to(losses).reshape(losses.shape)
        weighed = losses.masked_fill(torch.isinf(losses) & (own == 0), 0) * own  # else 0 · infinity would be NaN
        return weighed if reduction == "none" else weighed.sum()

    return reduce
