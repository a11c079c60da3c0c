"""Estimates over encoded records, from records that are drawn by the codes of an earlier training step."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from softdb.answers import Pooled
from softdb.attend.error import f_quantile
from softdb.attend.estimate import require_estimator
from softdb.attend.request import Live, Positions, Request, Scored
from softdb.attend.result import Doubt, Estimated, answered
from softdb.attend.rounds import SHOWN, SMALL, WRONG, factors_of
from softdb.index.contract import Floats, prepared
from softdb.index.sampler import Drawing
from softdb.nn.encoded import Encoded
from softdb.pool import State, merge
from softdb.scoring import softmax

PILOT = 100  # number of draws that predict how many a query needs for its tolerance; its answer has at least as many
MARGIN = 2.0  # safety factor on the number of draws that a pilot predicts, whose error estimate is rough
OTHER_SEEDS = 1 << 41  # added to the seed of a pilot, so that its draws are independent of the answer's

Drawn: TypeAlias = tuple[Estimated, Tensor]  # the estimate, and the ratio (q,) of its error to the tolerance


class DrawnRecords(Encoded):
    """Encoded records, of which estimates encode only some. A record drawn with probability p counts 1 / p times."""

    def estimate(self, request: Request) -> Pooled:
        """Estimate the softmax over all records from records that are drawn with the version's codes and then encoded.

        Sums are unbiased however the encoder has changed. All records newer than the version are encoded. `bar` is NaN,
        as codes of stale vectors bound no error; `met` compares the error that the draws show with the tolerance.

        Without `most`, pilot draws, encoded without gradient, predict how many a query needs. The answer comes from
        other draws: sums over draws that decided when to stop would be biased (two-stage sampling, Cox 1952). It is
        exact if that encodes no more records, or without codes. Raises BadInput for weights without an estimator.
        """
        if request.pools:
            require_estimator(request)
        tolerance, q = request.tolerance, len(request.queries)
        assert tolerance is not None
        budgets, unsure = np.full(q, tolerance.most or PILOT), np.arange(q if tolerance.most is None else 0)
        pilot, fixed = replace(request.detached, seed=request.seed + OTHER_SEEDS), replace(self, graph=False)
        while len(unsure) and budgets.sum() < self.count:
            with torch.no_grad():
                drawn = fixed._drawn(pilot.at(unsure), budgets[unsure])
            if drawn is None:
                return self.exact(request)
            growth = MARGIN * drawn[1].square().double().cpu().numpy()
            budgets[unsure] = np.ceil(budgets[unsure] * np.minimum(growth, WRONG)).clip(PILOT)
            unsure = unsure[growth > WRONG]
        drawn = self._drawn(request, budgets)
        if drawn is None:
            return self.exact(request)
        answer = drawn[0]
        records = Scored(answer.positions.cpu().numpy(), answer.scores), answer.weights
        doubt = Doubt(torch.zeros_like(answer.met), error=answer)
        return answered(request, self, answer[:2], "stale index", records, doubt)

    def _drawn(self, request: Request, budgets: Positions) -> Drawn | None:  # (q,)
        """Draw about `budgets` records. Returns None if none can be drawn, or if encoding all costs no more."""
        version, folded = self.version, request.detached.folded
        factors = factors_of(request.detached)
        if version is None or folded is None or factors is None or not 0 < budgets.sum() < self.count:
            return None
        recent, keep = self._split(request, version)
        vectors = prepared(folded.queries.cpu().numpy(), self.metric)
        parts, ratios = list[tuple[Positions, Positions, Estimated]](), request.queries.detach().new_zeros(len(budgets))
        for size in np.unique(sizes := np.ceil(np.log2(budgets))):  # queries that need about as many draws
            which = np.flatnonzero(sizes == size)
            drawing = Drawing(vectors[which], factors[which], int(budgets[which].max()), request.seed, 1.0)
            drawn = version.draw(drawing, keep)
            if drawn is None:
                return None
            estimated, ratio = self._weighed(request.at(which), *drawn, recent)
            ratios[torch.from_numpy(which).to(ratios.device)] = ratio
            parts.append((which, np.arange(len(which)), estimated))
        return Estimated.joined(len(budgets), parts), ratios

    def _weighed(self, request: Request, rows: Positions, log_weights: Floats, recent: Live) -> Drawn:
        """Encode and pool the drawn records (q, w) and all recent ones; estimate the error from the draws."""
        positions = self.snapshot.positions(rows)
        keys, scores = self._encoded_scores(request, positions)
        live = torch.from_numpy(positions >= 0).to(scores.device)
        logs = torch.from_numpy(log_weights).to(scores).masked_fill(~live, 0)
        weights, lse = softmax(scores + logs * request.temperature, request.temperature, live)
        width, candidates = self.width if request.pools else 0, Scored(positions, scores, keys)
        state = State(self.pooled(weights, candidates) if width else weights.new_zeros(len(weights), 0), lse)
        if recent.any():
            state = merge([state, self.stream(replace(request, allowed=recent))])
        with torch.no_grad():
            weights = weights * (lse - state.lse).exp().nan_to_num(0).unsqueeze(1)
            noise = weights.square() * -torch.expm1(-logs)  # (1 - p) w² / p² of each draw
            values = self.snapshot.values_at(positions) if self.schema.has_values else keys
            if not values.is_floating_point():
                values = torch.nn.functional.one_hot(values.long(), self.width)
            values = values.to(noise)[..., :width]
            errors = noise * (values - state.output.unsqueeze(1)).square().sum(2), noise
            size = torch.maximum(state.output.norm(dim=1), SMALL * (weights * values.square().sum(2)).sum(1).sqrt())
            ratio = _ratio(request, errors[0 if width else 1], size)
            stderr, lse_stderr = (error.sum(1).sqrt() for error in errors)
            unknown = torch.full_like(lse, torch.nan)
            surprise = (weights * (state.lse.unsqueeze(1) - scores / request.temperature).masked_fill(~live, 0)).sum(1)
            entropy = surprise / weights.sum(1)
            weights, order = weights.topk(min(SHOWN, weights.shape[1]), dim=1)
            heaviest = torch.from_numpy(positions).to(live.device).gather(1, order)
            scores = scores.detach().gather(1, order)
            estimated = Estimated(
                *state, stderr, lse_stderr, unknown, ratio <= 1, heaviest, scores, weights, live.sum(1), entropy
            )  # fmt: skip
        return estimated, ratio


def _ratio(request: Request, squares: Tensor, size: Tensor) -> Tensor:  # (q, w), (q,) -> (q,)
    """Return √(F Σ squares) over the tolerance, atol + rtol · size of the output or rtol of Z; infinite if unknown.

    F is the quantile of an F distribution with 1 and m degrees of freedom. m = (Σ squares)² / Σ squares² is the
    effective number of the draws that show the error.
    """
    tolerance, total = request.tolerance, squares.sum(1)
    assert tolerance is not None
    effective = (total.square() / squares.square().sum(1)).nan_to_num(1).tolist()
    quantiles = total.new_tensor([f_quantile(tolerance.confidence, 1, m) for m in effective])
    allowed = tolerance.atol + tolerance.rtol * size if request.pools else tolerance.rtol
    return ((quantiles * total).sqrt() / allowed).nan_to_num(torch.inf, torch.inf)
