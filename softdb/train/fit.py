"""The training loop: minibatches, Adam on the retrieval log-likelihood, early stopping, checkpoints."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
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
from softdb.nn.losses import retrieval_loss
from softdb.nn.targets import database, listed
from softdb.nn.view import View
from softdb.train import checkpoint as checkpoints
from softdb.train.held_out import Ranking, Split, ranked, split
from softdb.train.pairs import require_known
from softdb.train.projection import BROKEN, QueryProjection
from softdb.typing import Vectors

MAX_LR = 1000.0  # Adam moves each number by about lr a step
MEASURES = {"recall_1": "recall@1", "recall_10": "recall@10", "mrr_100": "MRR@100"}

Progress = Callable[[str, int, int], None]
Criterion: TypeAlias = Literal["recall_1", "recall_10", "mrr_100"]


class Epoch(NamedTuple):
    """One round over the training queries; the measures are of the queries that choose the epoch, None without them."""

    loss: float  # mean over the queries, each at its step
    recall_1: float | None
    recall_10: float | None
    mrr_100: float | None


class Fitted(NamedTuple):
    """A trained projection and what it is worth on queries that it never saw. Prints as a table."""

    projection: QueryProjection  # of the best epoch
    before: Ranking  # of the held-out queries as they are
    after: Ranking  # of the same, projected
    history: list[Epoch]
    best: int  # how many epochs the projection was trained

    @property
    def fell(self) -> list[str]:
        """The measures that are lower after than before, of recall_1, recall_10 and mrr_100."""
        return [name for name in MEASURES if getattr(self.after, name) < getattr(self.before, name)]

    def __str__(self) -> str:
        lines = [f"{self.before.queries:,} held-out queries   before    after"]
        for name, label in MEASURES.items():
            note = "   fell" if name in self.fell else ""
            lines.append(f"{label:<22}{getattr(self.before, name):9.3f}{getattr(self.after, name):9.3f}{note}")
        return "\n".join(lines)


@dataclass
class _Settings:
    """Checked arguments of a training."""

    temperature: float
    k: int | None
    rtol: float | None
    bias: bool
    hidden: int | None  # the width inside the encoder of keys; None: the keys stay
    batch_size: int
    lr: float
    holdout: Any  # a share; None: the caller says which
    patience: int | None
    criterion: str
    seed: int

    def __post_init__(self) -> None:
        check.tolerance(self.rtol, 0.0, 0.95, None, self.k)
        if self.hidden is not None and self.rtol is not None:
            raise BadInput(
                f"rtol is {self.rtol:g} but keys are trained, too, through an index that lags; give k, or neither"
            )
        self.temperature, self.lr = check.positive(self.temperature, "temperature"), check.positive(self.lr, "lr")
        if self.lr > MAX_LR:
            raise BadInput(f"lr is {self.lr:g}; expected at most {MAX_LR:g}, such as 0.001")
        if self.criterion not in list(MEASURES):
            raise BadInput(f"criterion is {check.shown(self.criterion)}; expected one of {', '.join(MEASURES)}")
        named = isinstance(self.holdout, np.ndarray | Tensor)
        self.holdout = None if named else check.share(self.holdout, "holdout")
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
    temperature: float = 0.05,
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
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Fitted:
    """Train a projection of the queries, q' = W q + b, so that queries find their right records.

        loss = mean over queries of  log Σ_all exp(s(q', k_i) / T) - log Σ_right exp(s(q', k_i) / T)

    minus the log of the weight that a soft query gives to the right records (Karpukhin et al. 2020, equation 2, with
    every record as a negative), by Adam. The database is only read. The same call gives the same projection, bit for
    bit, on the same machine with as many threads.

    Args:
        db: the database, which may be read-only.
        queries: what asks; texts where the database has an encoder.
        positives: the ids of each query's right records.
        temperature: of the softmax; scores that are cosines need a small one.
        k: normalise over the k nearest and the positives only.
        rtol: estimate the normaliser to this tolerance, with new random numbers each step; needs an IVF index to be
            cheaper. Without k and rtol every record takes part, exactly.
        bias: whether the projection has a b.
        keys: train an encoder of the keys, too, f(k) = k + B relu(A k + a) + b (`KeyEncoder`), through a `View`; a
            number is the width inside, True that of the keys. It is `projection.keys`, and `softdb.train.apply` makes
            the stored keys f(k). Without k every record is encoded at each step, forth and back; with k candidates
            come from an index that is made anew with each epoch. Not with rtol.
        epochs: rounds over the training queries, at most.
        batch_size: queries a step.
        lr: Adam's learning rate.
        holdout: the share of the queries that is held out, or (m,) bool, True = held out. No right record of a held-out
            query is trained on: of a share, queries that share a positive, or are equal, stay on one side.
        patience: stop after so many epochs that brought no better `criterion`, and keep the best; half of the held-out
            queries choose it, and only the other half is reported. None: train all epochs and keep the last.
        criterion: the measure that chooses the best epoch, "recall_1", "recall_10" or "mrr_100".
        seed: of the split, the order of the queries and the draws of `rtol`.
        checkpoint: a file that is written after each epoch, whole or not at all.
        resume: go on from the checkpoint, to the same bits as without the break; epochs may be more. Settings, pairs,
            database and, with k or rtol, its index must be as they were; up to 1,024 stored keys are compared.
        progress: called with what is being done, how many steps are done, and the whole.

    Recall@1, recall@10 and MRR@100 of the held-out queries are reported before and after; a TrainingWarning names those
    that fell.

    Cost a step: a soft query of the batch, forth and back: batch_size n d exactly. Each epoch searches the queries that
    choose it exactly.

    Raises BadInput, before anything is trained or written, for unknown ids, queries that do not fit, settings that make
    no sense, a checkpoint of another run or one that cannot be written; and where loss or projection become NaN.
    """
    hidden = _hidden(keys, db)
    settings = _Settings(temperature, k, rtol, bias, hidden, batch_size, lr, holdout, patience, criterion, seed)
    epochs = check.integer(epochs, "epochs")
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike):
        raise BadInput(f"checkpoint is {check.shown(checkpoint)}; expected the path of a file")
    file = None if checkpoint is None else Path(checkpoint)
    checkpoints.may_write(file, resume, db.path)
    with torch.inference_mode(False), check.precise():
        asked = _asked(db, queries)
        right = listed(positives, len(asked))
        require_known(db, right)
        parts = split(asked, right, holdout, settings.patience is not None, settings.seed)
        identity = checkpoints.identity(db, asked, right, parts, asdict(settings))
        run = _Training(db, asked, right, parts, settings)
        if resume and file is not None:
            run.restore(checkpoints.read(file, identity), file)
        while len(run.history) < epochs and not run.stalled:
            run.epoch(epochs, progress)
            if file is not None:
                checkpoints.write(file, identity, run.state())
        projection = run.projection
        projection.load_state_dict(run.best_weights)
        projection.metadata["encoder"] = db.encoder_name
        before, after = (run.ranked(parts.test, one) for one in (None, projection))
        found = Fitted(projection, before, after, run.history, run.best)
    if found.fell:
        fallen = [f"{MEASURES[name]} {getattr(before, name):.3f} -> {getattr(after, name):.3f}" for name in found.fell]
        advice = "choose the epoch by it with criterion=, lower lr, or keep the queries as they are"
        warnings.warn(f"fit: held-out queries fell by {', '.join(fallen)}; {advice}", TrainingWarning, stacklevel=2)
    return found


def _hidden(keys: object, db: Verbs) -> int | None:
    """The width inside the encoder of keys; None where there is none."""
    if isinstance(keys, bool):
        return db.dim if keys else None
    return check.integer(keys, "keys", 1, check.MAX_DIM)


def _asked(db: Verbs, queries: Vectors) -> Tensor:  # (m, d) float32
    found = db.core.as_queries(queries).detach().float()
    if found.is_inference():
        found = found.clone()  # autograd may not save the other
    bad = (~found.isfinite().all(1)).nonzero()
    if len(bad):
        raise BadInput(f"query {int(bad[0])} is NaN or infinite in float32, which training computes in; scale it")
    return found


class _Training:
    """A run of training between two epochs."""

    def __init__(
        self,
        db: Verbs,
        queries: Tensor,  # (m, d)
        positives: list[list[Id]],  # m
        parts: Split,
        settings: _Settings,
    ) -> None:
        self.db, self.queries, self.positives, self.parts, self.settings = db, queries, positives, parts, settings
        self.projection = QueryProjection(queries.shape[1], settings.bias, settings.hidden, settings.seed).to(queries)
        self.view = None if self.projection.keys is None else View(database(db), self.projection.keys)
        self.adam = torch.optim.Adam(self.projection.parameters(), lr=settings.lr)
        self.order = torch.Generator().manual_seed(settings.seed)
        self.draws = torch.Generator().manual_seed(settings.seed)
        self.history: list[Epoch] = []
        self.best = 0
        self.best_measure = -1.0 if settings.patience is None else self.measured(self.ranked(parts.choose, None))
        self.best_weights = self.weights()

    @property
    def stalled(self) -> bool:
        return self.settings.patience is not None and len(self.history) - self.best >= self.settings.patience

    def measured(self, ranking: Ranking) -> float:
        return float(getattr(ranking, self.settings.criterion))

    def weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.projection.state_dict().items()}

    def ranked(self, part: Tensor, projection: QueryProjection | None) -> Ranking:
        view = None if projection is None else self.view
        return ranked(self.db, self.queries[part], self.right(part), projection, view)

    def right(self, part: Tensor) -> list[list[Id]]:
        return [self.positives[i] for i in part.tolist()]

    def epoch(self, epochs: int, progress: Progress | None) -> None:
        """One round over the training queries; the projection is noted if it is the best so far."""
        train, size = self.parts.train, self.settings.batch_size
        mixed = train[torch.randperm(len(train), generator=self.order)]
        steps, number, total = -(-len(mixed) // size), len(self.history), 0.0
        if self.view is not None and self.settings.k is not None:
            self.view.reindex()  # of what a checkpoint holds, so that a resumed run goes on to the bit
        for step, part in enumerate(torch.split(mixed, size), 1):
            loss = self.step(part)
            if not math.isfinite(loss):
                raise BadInput(f"the loss became {loss} in epoch {number + 1}; lower lr, or raise temperature")
            if not all(bool(parameter.isfinite().all()) for parameter in self.projection.parameters()):
                raise BadInput("the projection became NaN or infinity; lower lr, or raise temperature")
            total += loss * len(part)
            if progress is not None:
                progress(f"epoch {number + 1}, loss {loss:.2f}", number * steps + step, epochs * steps)
        if self.settings.patience is None:
            self.history.append(Epoch(total / len(mixed), None, None, None))
        else:
            ranking = self.ranked(self.parts.choose, self.projection)
            self.history.append(Epoch(total / len(mixed), *ranking[:3]))
            if self.measured(ranking) <= self.best_measure:
                return
            self.best_measure = self.measured(ranking)
        self.best, self.best_weights = len(self.history), self.weights()

    @torch.enable_grad()
    def step(self, part: Tensor) -> float:
        """One step of Adam on some of the queries; their mean loss before it."""
        how, queries, right = self.settings, self.projection(self.queries[part]), self.right(part)
        draws = None if how.rtol is None else self.draws
        loss = retrieval_loss(
            self.view or self.db, queries, right, temperature=how.temperature, k=how.k, rtol=how.rtol, generator=draws
        )
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {
            "projection": self.weights(),
            "adam": self.adam.state_dict(),
            "order": self.order.get_state(),
            "draws": self.draws.get_state(),
            "history": [list(one) for one in self.history],
            "best": (self.best, self.best_measure, self.best_weights),
        }

    def restore(self, state: dict[str, Any], file: Path) -> None:
        """Stand where the run stood. Raises BadInput naming the file where parts of the state are missing or broken."""
        try:
            self.projection.load_state_dict(state["projection"])
            self.adam.load_state_dict(state["adam"])
            self.order.set_state(state["order"])
            self.draws.set_state(state["draws"])
            self.history = [Epoch(*one) for one in state["history"]]
            self.best, self.best_measure, self.best_weights = state["best"]
        except BROKEN as error:
            raise BadInput(
                f"{file} is a checkpoint whose parts are missing or broken ({check.shown(str(error))}); begin "
                "anew with another"
            ) from None
