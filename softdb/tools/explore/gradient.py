"""Gradients on the map: a step of the query towards its right record, each record's pull, the answer's response."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softdb.check import Id, Metric
from softdb.database import SoftDB
from softdb.nn import retrieval_loss
from softdb.scoring import score_of
from softdb.tools.explore.display import named_id, title
from softdb.tools.explore.plane import Plane
from softdb.tools.explore.questions import Weighing

PART = 0.2  # length of a step, as a share of the distance between the right record and the answer
TRAIL = 24  # number of temperatures of a trail


@dataclass(frozen=True)
class Place:
    """A query on the map of a database, with the settings of its soft query. Autograd gives all gradients."""

    db: SoftDB
    plane: Plane
    query: Tensor  # (1, d)
    weighing: Weighing
    where: Any

    @torch.enable_grad()
    def slope(self, right: Id) -> tuple[float, Tensor]:  # (d,)
        """Return the loss log Σ exp(s_i / T) - s_right / T, and its gradient at the query.

        Raises UnknownId, and BadInput for a record that the filter excludes.
        """
        leaf, t = self.query.clone().requires_grad_(), self.weighing.temperature
        loss = retrieval_loss(self.db, leaf, [[right]], temperature=t, where=self.where, **self.weighing.options)
        (slope,) = torch.autograd.grad(loss, leaf)
        return loss.item(), slope[0]

    def rate(self, key: Tensor) -> float:  # (d,)
        """Return a learning rate that makes the length of a step PART of the right record's distance to the answer.

        It is in proportion to T, and to the length of the score's gradient, |k|, 1 / |q| or 2 |q - k|.
        """
        length = float(self.query.norm())
        scale = {Metric.DOT: length / (float(key.norm()) or 1.0) or 1.0, Metric.COSINE: length**2, Metric.L2: 0.5}
        return PART * self.weighing.temperature * scale[self.db.core.schema.metric]

    def moved(self, right: Id) -> Tensor:  # (1, d)
        """Return the query after a step of gradient descent."""
        return self.query - self.rate(self.db.get([right]).keys[0].float()) * self.slope(right)[1]

    @torch.enable_grad()
    def pulls(self, keys: Tensor, scores: Tensor, lse: float) -> Tensor:  # (k, d), (k,) -> (k, d)
        """Return each record's part of minus the gradient, (1[right] - w_i) ∂s_i/∂q / T; the first record is right."""
        leaf, t = self.query.expand(len(keys), -1).clone().requires_grad_(), self.weighing.temperature
        own = score_of(self.db.core.schema.metric)(leaf, keys[:, None])  # (k, 1): each query's own key
        (slopes,) = torch.autograd.grad(own.sum(), leaf)
        parts = -(scores / t - lse).exp()
        parts[0] += 1
        return parts[:, None] * slopes / t

    @torch.enable_grad()
    def response(self) -> list[list[float]] | None:
        """Return d answer / d query in the map's plane: row i is the answer's move if the query moves along axis i.

        None if values are not keys, so that the map does not show the answer.
        """
        if self.db.value_dim is not None or self.db.num_classes is not None:
            return None
        axes, t = torch.from_numpy(self.plane.axes), self.weighing.temperature
        leaf = self.query.expand(2, -1).clone().requires_grad_()  # one for each axis: one backward pass serves both
        output = self.db.attend(leaf, temperature=t, where=self.where, **self.weighing.options).output
        (slopes,) = torch.autograd.grad((output.double() * axes.T).sum(), leaf)
        rows: list[list[float]] = (axes.T @ slopes.double().T / self.plane.drawn_scale(self.query[0])).tolist()
        return rows

    def trail(self) -> list[list[float]]:
        """Return the answer's places from the lowest temperature to the highest; [] if values are not keys."""
        if self.db.value_dim is not None or self.db.num_classes is not None:
            return []
        low, high = (math.log10(t) for t in (self.plane.temperatures.low, self.plane.temperatures.high))
        pooled = self.db.attend(
            self.query.expand(TRAIL, -1), temperature=torch.logspace(low, high, TRAIL), where=self.where,
            **self.weighing.options,
        )  # fmt: skip
        places: list[list[float]] = self.plane.at(pooled.output.double()).tolist()
        return places if int(pooled.n_pooled[0]) else []

    def lesson(self, right: Id, others: list[Id]) -> dict[str, Any]:
        """Return loss and gradient for a right record, the next step on the map, and the pulls of it and of others."""
        loss, slope = self.slope(right)
        ids = list(dict.fromkeys([right, *others]))
        records = self.db.get(ids)
        ids = [name for name, keyed in zip(ids, records.keyed.tolist(), strict=True) if keyed]
        keys = records.keys[records.keyed].float()
        scores = score_of(self.db.core.schema.metric)(self.query, keys)[0]
        rate = self.rate(keys[0])
        parts = self.pulls(keys, scores, loss + float(scores[0]) / self.weighing.temperature)
        scale = rate * self.plane.drawn_scale(self.query[0])
        step = self.plane.query_at(self.query[0] - rate * slope) - self.plane.query_at(self.query[0])
        moves = (parts.double().numpy() @ self.plane.axes * scale).tolist()
        return {
            "right": named_id(right), "title": title(records.payloads[0], records.texts[0]),
            "loss": loss, "rate": rate, "length": float(slope.norm()),
            "gradient": [float(f"{number:.3g}") for number in slope.tolist()],
            "step": step.tolist(), "place": self.plane.at(keys[0].double()).tolist(),
            "pulls": [[named_id(name), *move] for name, move in zip(ids, moves, strict=True)],
        }  # fmt: skip
