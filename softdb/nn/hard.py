"""Hard attention: drawn records in place of a weighted mean, with estimators of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from softdb import check
from softdb.answers import Hits, shaped
from softdb.attend.leading import as_tensor
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn.eager import eager
from softdb.nn.targets import database, live
from softdb.pool import pool
from softdb.scoring import Score, ScoreFunction, softmax
from softdb.typing import Vectors


class HardSamples(NamedTuple):
    """Records drawn for each query, with replacement."""

    values: Tensor  # (q, n, v), or one-hot (q, n, num_classes); zeros where a query has no record; no gradient
    log_prob: Tensor  # (q, n) differentiable; -inf where a query has no record
    hits: Hits  # (q, n), in the order of drawing; row -1 where a query has no record


@eager
@shaped
def hard_attention(
    db: SoftDB,
    queries: Vectors,  # (q, d), or (…, d)
    n: int = 1,
    *,
    temperature: float | Tensor = 1.0,
    score: Score | ScoreFunction | None = None,
    where: dict[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> HardSamples:
    """Draw n records for each query from softmax(score / temperature) over all records: "hard" attention.

    Xu et al. 2015, section 4.1. The stored values get no gradient; `log_prob` carries the gradient for `reinforce`.
    Draws are exact, with or without an index. Cost: one pass over the records, two with a gradient.

    Args:
        db: the database.
        queries: (q, d) or (…, d) with their graph; an answer has their leading dimensions in place of q.
        n: draws for each query; with 2 or more, `leave_one_out` gives a baseline.
        temperature: divides the scores; a number, or a floating tensor () or (q,), which gets a gradient.
        score: as in `attend`.
        where: a filter on the payload.
        generator: random numbers of the draws; None: torch's default generator.

    Raises BadInput in the same cases as `db.sample`.

    >>> import softdb
    >>> db = softdb.open(None, dim=2, value_dim=1)
    >>> ids = db.insert(["left", "right"], [[-1, 0], [1, 0]], [[0], [1]])
    >>> query = torch.zeros(1, 2, requires_grad=True)
    >>> samples = hard_attention(db, query, 4, generator=torch.Generator().manual_seed(0))
    >>> reward = samples.values[..., 0]  # 1 for going right
    >>> reinforce(reward, samples.log_prob, leave_one_out(reward)).backward()
    >>> bool(query.grad[0, 0] < 0)  # a step down the gradient goes right
    True
    """
    count = check.integer(n, "n")
    request, source = database(db).core.request(queries, temperature, score, where=where)
    samples = source.sample(request, count, check.generator(generator) or torch.default_generator)
    snapshot = source.columns
    positions = snapshot.positions(samples.hits.rows.cpu().numpy())
    values = samples.log_prob.new_zeros(*positions.shape, source.width)
    if snapshot.size:
        stored = snapshot.values_at(positions).to(values.device)
        if not stored.is_floating_point():
            stored = F.one_hot(stored, source.width) * live(positions, values).unsqueeze(2)
        values = stored.to(values)
    return HardSamples(values, samples.log_prob, samples.hits)


def reinforce(
    reward: Tensor,  # (q, n)
    log_prob: Tensor,  # (q, n)
    baseline: Tensor | float | None = None,  # one number, (q, 1) or (q, n)
) -> Tensor:  # ()
    """Return the loss -mean (r - b) log p, for rewards r, baselines b and probabilities p of the draws.

    Its gradient is an unbiased estimate of minus the gradient of the expected reward (Williams 1992, section 4). The
    baseline of a draw must not depend on that draw; a good baseline lowers the variance. Neither reward nor baseline
    gets a gradient. Draws without a record (log p = -inf) count as 0. The value of the loss means nothing; watch the
    reward. Raises BadInput for shapes that do not fit, such as a baseline (q,).
    """
    for tensor, name in ((reward, "reward"), (log_prob, "log_prob")):
        if not isinstance(tensor, Tensor):
            raise BadInput(f"{name} is {shown(tensor)}; expected a tensor (q, n)")
        check.dense(tensor, name)
    if reward.shape != log_prob.shape:
        shapes = f"reward has shape {tuple(reward.shape)} and log_prob {tuple(log_prob.shape)}"
        raise BadInput(f"{shapes}; give one reward for each draw")
    expected = as_tensor(0.0 if baseline is None else baseline, "baseline").detach().to(log_prob)
    if expected.ndim and tuple(expected.shape) not in (tuple(reward.shape), (*reward.shape[:-1], 1)):
        raise BadInput(
            f"baseline has shape {tuple(expected.shape)} and reward {tuple(reward.shape)}; give one number, one for "
            f"each query {(*reward.shape[:-1], 1)}, or one for each draw"
        )
    missing = log_prob == -torch.inf
    advantage = (reward.detach().to(log_prob) - expected).masked_fill(missing, 0)
    return -(advantage * log_prob.masked_fill(missing, 0)).mean()


def leave_one_out(reward: Tensor) -> Tensor:  # (q, n) -> (q, n), n at least 2
    """Return the baseline of each draw: the mean reward of the query's other draws (Kool et al. 2019).

    The baseline does not depend on its draw, so `reinforce` stays unbiased. Raises BadInput for fewer than 2 draws.
    """
    if not isinstance(reward, Tensor) or check.dense(reward, "reward").ndim < 2 or reward.shape[-1] < 2:
        came = f"shape {tuple(reward.shape)}" if isinstance(reward, Tensor) else shown(reward)
        raise BadInput(f"reward has {came}; expected (q, n) with n of 2 or more draws; or use a MovingBaseline")
    reward = reward.detach() if reward.is_floating_point() else reward.float()
    return (reward.sum(-1, keepdim=True) - reward) / (reward.shape[-1] - 1)


class MovingBaseline(torch.nn.Module):
    """The moving mean of the rewards of earlier steps, as a baseline for `reinforce`.

    b_t = Σ_{i<t} μ^(t-1-i) mean(r_i) (1 - μ) / (1 - μ^(t-1)), with b_1 = 0. Only earlier rewards count, so the baseline
    does not depend on the draws of its own step. The divisor corrects the bias of the first steps (Kingma and Ba 2015,
    section 3). In eval mode the mean does not change. The state_dict holds the mean and the number of steps.

    Args:
        momentum: μ, weight of the past, at least 0 and below 1; another number raises BadInput.
    """

    mean: Tensor
    steps: Tensor

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = check.share(momentum, "momentum")
        if self.momentum == 1:
            raise BadInput("momentum is 1; expected a share below 1, as 1 would ignore every reward")
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def extra_repr(self) -> str:
        """Return the momentum of the average."""
        return f"momentum={self.momentum}"

    __call__: Callable[..., Tensor]

    @torch.no_grad()
    def forward(self, reward: Tensor) -> Tensor:  # (q, n) -> ()
        """Return the baseline, then add the reward to the mean. Raises BadInput for a reward that is not finite."""
        if not isinstance(reward, Tensor) or not reward.is_floating_point():
            came = f"of dtype {reward.dtype}" if isinstance(reward, Tensor) else shown(reward)
            raise BadInput(f"reward is {came}; expected a floating tensor (q, n)")
        if not bool(torch.isfinite(reward).all()):
            raise BadInput("reward holds NaN or infinity, which would stay in the mean for ever; repair it")
        correction = 1 - self.momentum ** int(self.steps)
        baseline = (self.mean / correction if correction else self.mean).to(reward)
        if self.training and reward.numel():
            self.mean.lerp_(reward.mean().to(self.mean), 1 - self.momentum)
            self.steps += 1
        return baseline


@eager
@shaped
def straight_through(
    db: SoftDB,
    queries: Vectors,  # (q, d), or (…, d)
    *,
    temperature: float | Tensor = 1.0,
    relaxation: float = 1.0,
    k: int | None = None,
    score: Score | ScoreFunction | None = None,
    where: dict[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # (q, v)
    """Return the value of one drawn record, with the gradient of a softmax (straight-through Gumbel-softmax).

        z_i = s(q, k_i) / T + g_i,  g_i ~ Gumbel(0, 1);  forward v_argmax z,  backward Σ_i softmax(z / τ)_i v_i

    Jang et al. 2017, section 2.2. argmax z is a draw from softmax(s / T), over every record, or with `k=` over the k
    nearest alone. The gradient is biased: a smaller τ has less bias and more variance. Labels give one-hot vectors. A
    query without records gets zeros.

    Cost with `k=`: the search, then q k (d + v). Without: q n (d + v), and memory q n, as each record has its own
    noise. For more records pass `k=` or use `hard_attention`.

    Args:
        db, queries, score, where, generator: see `hard_attention`.
        temperature: T, of the distribution that is drawn from.
        relaxation: τ, of the softmax whose gradient is used.
        k: draw among the k nearest.

    Raises BadInput in the same cases as `db.attend`.
    """
    relaxation, generator = check.positive(relaxation, "relaxation"), check.generator(generator)
    count = None if k is None else check.integer(k, "k")
    request, source = database(db).core.request(queries, temperature, score, where=where)
    if not source.columns.size:
        return request.queries.new_zeros(len(request.queries), source.width) + 0 * request.queries.sum()
    if count is None:
        _, scores, values = source.all_scores(request)
        weights = _drawn_weights(scores, request.temperature, relaxation, generator)
        if values.is_floating_point():
            return weights @ values.to(weights)
        return weights.new_zeros(len(weights), source.width).index_add(1, values, weights)
    candidates = source.scored(request, source.find(request.top(count)).positions)
    weights = _drawn_weights(candidates.scores, request.temperature, relaxation, generator)
    return pool(weights, source.columns.values_at(candidates.positions), source.num_classes)


def _drawn_weights(
    scores: Tensor,  # (q, m), -inf where there is no record
    temperature: float,
    relaxation: float,
    generator: torch.Generator | None,
) -> Tensor:  # (q, m)
    """Return 1 at the drawn record and 0 elsewhere, with the gradient of the softmax."""
    noise = -torch.empty(scores.shape, dtype=scores.dtype).exponential_(generator=generator).log().to(scores.device)
    perturbed = scores + temperature * noise  # this is z T: z itself would overflow at a small T
    soft, _ = softmax(perturbed, temperature * relaxation, scores > -torch.inf)
    hard = torch.zeros_like(soft)
    if hard.shape[1]:
        hard.scatter_(1, perturbed.detach().argmax(1, keepdim=True), 1.0)
    hard = hard.masked_fill(scores == -torch.inf, 0)
    return hard + (soft - soft.detach())
