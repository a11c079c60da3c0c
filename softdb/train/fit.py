"""The training loop: minibatches, Adam on the retrieval log-likelihood, early stopping, checkpoints."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.check import Id
from softdb.database import Verbs
from softdb.errors import BadInput, TrainingWarning
from softdb.index.choose import Progress
from softdb.nn.losses import retrieval_loss
from softdb.nn.targets import database, listed
from softdb.nn.view import View
from softdb.train import checkpoint as checkpoints
from softdb.train.held_out import Ranking, Split, ranked, split
from softdb.train.pairs import require_known
from softdb.train.projection import BROKEN, QueryProjection
from softdb.typing import Vectors
from softdb.visible import table

MAX_LR = 1000.0  # largest learning rate allowed; Adam moves each parameter by about lr in a step
FIRST_HEAT, LEAST_HEAT = 0.07, 0.01  # a learnt temperature: the first, and the least (Radford et al. 2021)
MEASURES = {"recall_1": "recall@1", "recall_10": "recall@10", "mrr_100": "MRR@100"}

Criterion: TypeAlias = Literal["recall_1", "recall_10", "mrr_100"]


class Epoch(NamedTuple):
    """Results of one epoch, with measures on the held-out queries that choose the best epoch; None without patience."""

    loss: float  # mean over the training queries, each before its own step
    recall_1: float | None
    recall_10: float | None
    mrr_100: float | None
    temperature: float | None = None  # at the end of the epoch, if it is learnt


class Fitted(NamedTuple):
    """A trained projection and its measures on held-out queries. Prints as a table."""

    projection: QueryProjection  # of the best epoch
    before: Ranking  # measures of the held-out queries without the projection
    after: Ranking  # measures of the held-out queries with the projection
    history: list[Epoch]
    best: int  # number of epochs that the projection was trained
    temperature: float  # T, of the best epoch if it was learnt
    steps: int = 0  # number of Adam's steps, in all epochs
    lr: float = 0.0

    @property
    def fell(self) -> list[str]:
        """Names of the measures, out of recall_1, recall_10 and mrr_100, that are lower after training than before."""
        return [name for name in MEASURES if getattr(self.after, name) < getattr(self.before, name)]

    @property
    def fall(self) -> str:
        """Measures that fell, before -> after, and recall@10 if it rose although recall@1 fell; "" if none fell."""
        changes = {name: f"{label} {getattr(self.before, name):.3f} -> {getattr(self.after, name):.3f}"
                   for name, label in MEASURES.items()}  # fmt: skip
        rose = "recall_1" in self.fell and self.after.recall_10 > self.before.recall_10
        return ", ".join(map(changes.__getitem__, self.fell)) + f", though {changes['recall_10']} rose" * rose

    @property
    def advice(self) -> str:
        """Settings to change if no measure fell and none rose by 0.01, or "". A step moves a weight by about lr."""
        rises = (after - before for after, before in zip(self.after[:3], self.before[:3], strict=True))
        if self.fell or not self.steps or self.after.recall_1 == 1 or max(rises) >= 0.01:
            return ""
        change = "raise lr or epochs, or lower batch_size" if self.lr * self.steps < 1 else "lower lr or raise patience"
        return f"no measure rose by 0.01 in {self.steps:,} steps with lr {self.lr:g}: {change}"

    def _repr_html_(self) -> str:
        lines = [[label, *(f"{getattr(part, name):.3f}" for part in self[1:3])] for name, label in MEASURES.items()]
        run = f"epochs {len(self.history)}, best {self.best or 'none'}, steps {self.steps:,}; {self.advice}".strip("; ")
        return table(["", "before", "after"], lines, f"held-out queries {self.before.queries:,}, {run}")

    def __str__(self) -> str:
        lines = [f"{self.before.queries:,} held-out queries   before    after   {self.steps:,} steps"]
        for name, label in MEASURES.items():
            note = "   fell" if name in self.fell else ""
            lines.append(f"{label:<22}{getattr(self.before, name):9.3f}{getattr(self.after, name):9.3f}{note}")
        if self.history and self.history[-1].temperature is not None:
            lines.append(f"{'temperature':<31}{self.temperature:9.3f}")
        return "\n".join([*lines, *([f"fell: {self.fall}"] if "though" in self.fall else filter(None, [self.advice]))])


@dataclass
class _Settings:
    """Checked arguments of `fit`."""

    temperature: Any  # a number, or "learn"
    k: int | None
    rtol: float | None
    bias: bool
    hidden: int | None  # width of the hidden layer of the encoder of keys; None: keys are not trained
    batch_size: int
    lr: float
    holdout: Any  # share of the queries; None: the caller chose the held-out queries
    patience: int | None
    criterion: str
    seed: int

    def __post_init__(self) -> None:
        check.tolerance(self.rtol, 0.0, 0.95, None, self.k)
        if self.temperature != "learn":
            expected, advice = 'a finite number above 0, or "learn"', 'fit trains its own; pass "learn"'
            self.temperature = check.number(self.temperature, "temperature", expected, lambda x: x > 0, advice)
        self.lr = check.positive(self.lr, "lr")
        if self.lr > MAX_LR:
            raise BadInput(f"lr is {self.lr:g}; expected at most {MAX_LR:g}, such as 0.001")
        if self.criterion not in list(MEASURES):
            raise BadInput(f"criterion is {check.shown(self.criterion)}; expected one of {', '.join(MEASURES)}")
        explicit = isinstance(self.holdout, np.ndarray | Tensor)
        self.holdout = None if explicit else check.share(self.holdout, "holdout")
        if self.holdout in (0, 1):
            raise BadInput(f"holdout is {self.holdout:g}; expected a share between 0 and 1, such as 0.2")
        self.k = None if self.k is None else check.integer(self.k, "k")
        self.rtol = None if self.rtol is None else float(self.rtol)
        self.batch_size = check.integer(self.batch_size, "batch_size")
        self.patience = None if self.patience is None else check.integer(self.patience, "patience")
        self.seed = check.integer(self.seed, "seed", 0, 2**63 - 1)


def fit(
    db: Verbs,
    queries: Vectors,  # (m, d) numbers, or m texts
    positives: Any,  # m ids, or m lists of ids
    *,
    temperature: float | Literal["learn"] = 0.05,
    k: int | None = None,
    rtol: float | None = None,
    bias: bool = False,
    keys: bool | int = False,
    epochs: int = 10,
    batch_size: int = 256,
    lr: float = 1e-3,
    holdout: Any = 0.2,  # a share, or (m,) bool
    patience: int | None = 2,
    criterion: Criterion = "mrr_100",
    sample_weight: Any = None,  # (m,)
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Fitted:
    """Train a projection of the queries, q' = W q + b, so that queries find their right records.

        loss = mean over queries of  log Σ_all exp(s(q', k_i) / T) - log Σ_right exp(s(q', k_i) / T)

    This is minus the log of the right records' weight in a soft query (Karpukhin et al. 2020, equation 2, with every
    record as a negative), minimised by Adam. The database is only read. The same call gives the same projection, bit
    for bit, on the same machine with the same number of threads.

    Args:
        db: the database, which may be read-only.
        queries: (m, d) numbers, or m texts if the database has an encoder.
        positives: the ids of each query's right records.
        temperature: T, which divides the scores; scores that are cosines need a small one. "learn": Adam also trains
            log 1 / T, from T = 0.07 on and with T at least 0.01 (Radford et al. 2021, section 2.5). The result and the
            projection's metadata have T; pass it to soft queries.
        k: normalise over the k nearest and the positives only.
        rtol: estimate the normaliser with this relative error, with new random numbers each step; cheaper only with an
            IVF index. Without k and rtol the loss is exact, over every record.
        bias: True: the projection has a bias b.
        keys: train an encoder of the keys, too, f(k) = k + B relu(A k + a) + b (`KeyEncoder`), through a `View`; a
            number is the width of f's hidden layer, True stands for d. The result has f as `projection.keys`;
            `softdb.train.apply` replaces the stored keys by f(k). Without k and rtol every record is encoded at each
            step, forward and backward; with them candidates or draws come from an index rebuilt for each epoch.
        epochs: maximum number of rounds over the training queries.
        batch_size: queries in each step.
        lr: Adam's learning rate.
        holdout: the share of the queries that is held out, or (m,) bool, True = held out. With a share, queries that
            share a positive, or are equal, are all held out or all trained on: no positive is on both sides.
        patience: stop after this number of epochs without a better `criterion`, and keep the best epoch; half of the
            held-out queries choose it, and only the other half is reported. None: train all epochs and keep the last.
        criterion: the measure that chooses the best epoch, "recall_1", "recall_10" or "mrr_100".
        sample_weight: m numbers w of at least 0. The loss is then Σ w l / Σ w of the training queries' losses l; a step
            divides by the mean w of all of them. The measures count every query once, and the split ignores weights.
        seed: seed of the split, of the order of the queries and of the draws for `rtol`.
        checkpoint: a file that is replaced atomically after each epoch.
        resume: continue from the checkpoint, with the same result, to the bit, as an uninterrupted run; epochs may be
            higher. Settings, pairs, database and, with k or rtol, its index must be unchanged; up to 1,024 stored keys
            are compared.
        progress: called with the current stage, the number of steps done, and the total.

    The result holds recall@1, recall@10 and MRR@100 of the held-out queries before and after training; a
    TrainingWarning names the measures that fell, and `Fitted.advice` the settings to change if none rose.

    Cost of a step: a soft query of the batch, forward and backward: batch_size n d if exact. Each epoch adds an exact
    search of the queries that choose it.

    Raises BadInput, before anything is trained or written, for unknown ids, queries that do not fit, settings out of
    range, a checkpoint of another run or one that cannot be written; and if the loss or the projection becomes NaN.
    """
    if not isinstance(db, Verbs):
        raise BadInput(f"db is {check.shown(db)}; expected an open softdb database")
    hidden = None if keys is False else check.integer(db.dim if keys is True else keys, "keys", 1, check.MAX_DIM)
    settings = _Settings(temperature, k, rtol, bias, hidden, batch_size, lr, holdout, patience, criterion, seed)
    epochs = check.integer(epochs, "epochs")
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise BadInput(f"checkpoint is {check.shown(checkpoint)}; expected the path of a file")
    file = None if checkpoint is None else Path(checkpoint)
    checkpoints.may_write(file, resume, db.path)
    report = progress or (lambda *_: None)
    report("preparing", 0, 1)
    with torch.inference_mode(False), check.precise():
        vectors = _vectors(db, queries)
        right = listed(positives, *check.leading(queries, len(vectors)))
        require_known(db, right)
        sides = split(vectors, right, holdout, settings.patience is not None, settings.seed)
        sides, weights = _weighted(sides, sample_weight, len(vectors))
        given = {"sample_weight": None if weights is None else weights.tolist()}
        identity = checkpoints.identity(db, vectors, right, sides, asdict(settings) | given)
        run = _Training(db, vectors, right, sides, settings, weights)
        if resume and file is not None:
            run.restore(checkpoints.read(file, identity), file)
        while len(run.history) < epochs and not run.stalled:
            run.epoch(epochs, report)
            if file is not None:
                checkpoints.write(file, identity, run.state())
        projection = run.projection
        projection.load_state_dict(run.best_weights)
        projection.metadata |= {"encoder": db.encoder_name, "temperature": run.best_heat}
        report("measuring", 0, 1)
        before, after = run.ranked(sides.test, None), run.ranked(sides.test, projection)
        steps = len(run.history) * -(-len(sides.train) // settings.batch_size)
        fitted = Fitted(projection, before, after, run.history, run.best, run.best_heat, steps, settings.lr)
    if fitted.fell:
        advice = "choose the epoch by it with criterion=, lower lr, or keep the queries as they are"
        warnings.warn(f"fit: held-out queries fell by {fitted.fall}; {advice}", TrainingWarning, stacklevel=2)
    return fitted


def _vectors(db: Verbs, queries: Vectors) -> Tensor:  # (m, d) float32
    vectors = db.core.as_queries(queries).detach().float()
    if vectors.is_inference():
        vectors = vectors.clone()  # autograd cannot save an inference tensor
    bad = (~vectors.isfinite().all(1)).nonzero()
    if len(bad):
        raise BadInput(f"query {int(bad[0])} is NaN or infinite in float32, which training uses; scale the query")
    return vectors


def _weighted(sides: Split, sample_weight: Any, count: int) -> tuple[Split, Tensor | None]:
    """Return the split without training queries of weight 0, and the weights (m,), of mean 1 over those that train."""
    if sample_weight is None:
        return sides, None
    weights = torch.from_numpy(check.sample_weights(sample_weight, count))
    train = sides.train[weights[sides.train] > 0]
    if not len(train):
        raise BadInput("sample_weight is zero for every query that trains; give another holdout, or other weights")
    return sides._replace(train=train), weights / weights[train].mean()


class _Training:
    """A training run: its data, projection, optimiser, random numbers and history."""

    def __init__(
        self,
        db: Verbs,
        queries: Tensor,  # (m, d)
        positives: list[list[Id]],  # m
        sides: Split,
        settings: _Settings,
        sample_weight: Tensor | None,  # (m,)
    ) -> None:
        self.sample_weight = sample_weight
        self.db, self.queries, self.positives, self.sides, self.settings = db, queries, positives, sides, settings
        self.projection = QueryProjection(queries.shape[1], settings.bias, settings.hidden, settings.seed).to(queries)
        self.view = None if self.projection.keys is None else View(database(db), self.projection.keys)
        learns = settings.temperature == "learn"
        self.log_scale = torch.nn.Parameter(torch.tensor(-math.log(FIRST_HEAT))) if learns else None
        trained = [*self.projection.parameters(), *([] if self.log_scale is None else [self.log_scale])]
        self.adam = torch.optim.Adam(trained, lr=settings.lr)
        self.order = torch.Generator().manual_seed(settings.seed)
        self.draws = torch.Generator().manual_seed(settings.seed)
        self.history: list[Epoch] = []
        self.best = 0
        self.best_measure = -1.0 if settings.patience is None else self.measured(self.ranked(sides.choose, None))
        self.best_weights, self.best_heat = self.weights(), self.heat or settings.temperature

    @property
    def heat(self) -> float | None:
        """The temperature, if it is learnt."""
        return None if self.log_scale is None else math.exp(-self.log_scale.item())

    @property
    def stalled(self) -> bool:
        return self.settings.patience is not None and len(self.history) - self.best >= self.settings.patience

    def measured(self, ranking: Ranking) -> float:
        return float(getattr(ranking, self.settings.criterion))

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.projection.state_dict().items()}

    def ranked(self, numbers: Tensor, projection: QueryProjection | None) -> Ranking:
        view = None if projection is None else self.view
        return ranked(self.db, self.queries[numbers], self.right(numbers), projection, view)

    def right(self, numbers: Tensor) -> list[list[Id]]:
        return [self.positives[i] for i in numbers.tolist()]

    def epoch(self, epochs: int, progress: Progress) -> None:
        """Train once on each training query, measure, and save the weights if they are the best so far."""
        train, size = self.sides.train, self.settings.batch_size
        shuffled = train[torch.randperm(len(train), generator=self.order)]
        steps, number, total = -(-len(shuffled) // size), len(self.history), 0.0
        if self.view is not None and (self.settings.k or self.settings.rtol) is not None:
            self.view.reindex()  # with the weights in the checkpoint, so that a resumed run gives the same result
        for step, batch in enumerate(torch.split(shuffled, size), 1):
            loss = self.step(batch)
            if not math.isfinite(loss):
                raise BadInput(f"the loss became {loss} in epoch {number + 1}; lower lr, or raise temperature")
            if not all(bool(tensor.isfinite().all()) for group in self.adam.param_groups for tensor in group["params"]):
                raise BadInput("the projection became NaN or infinity; lower lr, or raise temperature")
            total += loss * len(batch)
            progress(f"epoch {number + 1}, loss {loss:.2f}", number * steps + step, epochs * steps)
        if self.settings.patience is None:
            self.history.append(Epoch(total / len(shuffled), None, None, None, self.heat))
        else:
            progress(f"epoch {number + 1}, measuring", (number + 1) * steps, epochs * steps)
            ranking = self.ranked(self.sides.choose, self.projection)
            self.history.append(Epoch(total / len(shuffled), *ranking[:3], self.heat))
            if self.measured(ranking) <= self.best_measure:
                return
            self.best_measure = self.measured(ranking)
        self.best, self.best_weights = len(self.history), self.weights()
        self.best_heat = self.heat or self.best_heat

    @torch.enable_grad()
    def step(self, batch: Tensor) -> float:
        """Make one Adam step on a batch of queries, and return the batch's mean loss before the step."""
        settings, queries = self.settings, self.projection(self.queries[batch])
        temperature = settings.temperature if self.log_scale is None else (-self.log_scale).exp()
        loss = retrieval_loss(
            self.view or self.db, queries, self.right(batch), temperature=temperature, k=settings.k,
            rtol=settings.rtol, generator=None if settings.rtol is None else self.draws, reduction="none",
            sample_weight=None if self.sample_weight is None else self.sample_weight[batch],
        ).mean()  # fmt: skip
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        if self.log_scale is not None:
            self.log_scale.data.clamp_(max=-math.log(LEAST_HEAT))
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {
            "projection": self.weights(),
            "adam": self.adam.state_dict(),
            "order": self.order.get_state(),
            "draws": self.draws.get_state(),
            "history": [list(epoch) for epoch in self.history],
            "best": (self.best, self.best_measure, self.best_weights),
            "log_scale": self.log_scale,
            "best_heat": self.best_heat,
        }

    def restore(self, state: dict[str, Any], file: Path) -> None:
        """Restore the state of a checkpoint. Raises BadInput if parts of the state are missing or broken."""
        try:
            self.projection.load_state_dict(state["projection"])
            self.adam.load_state_dict(state["adam"])
            self.order.set_state(state["order"])
            self.draws.set_state(state["draws"])
            self.history = [Epoch(*epoch) for epoch in state["history"]]
            self.best, self.best_measure, self.best_weights = state["best"]
            if self.log_scale is not None:
                self.log_scale.data.copy_(state["log_scale"])
                self.best_heat = state["best_heat"]
        except BROKEN as error:
            raise BadInput(
                f"{file} is a checkpoint whose parts are missing or broken ({check.shown(str(error))}); begin "
                "anew with another checkpoint"
            ) from None
