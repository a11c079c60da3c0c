"""A request as it travels to shards, and the gradients as they come back."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend import Request
from softdb.check import Metric, shown
from softdb.cluster import shard as say
from softdb.cluster.caller import Caller
from softdb.errors import BadInput
from softdb.pool import State
from softdb.scoring import Score, ScoreFunction, Uniform, divisor
from softdb.scoring.once import Once

Rows = NDArray[np.int64]


class Posed(NamedTuple):
    """A request as shards take it, and what of it stays with the caller."""

    question: say.ShardQuery
    queries: Tensor  # (q, d) that the question's were taken of, with their graph
    parameters: tuple[Tensor, ...]  # whose gradients the shards give
    shift: Tensor | float  # (q,) what their normalisers lack


def posed(request: Request, metric: Metric, dim: int, where: dict[str, Any] | None) -> Posed:
    """Form of a request that travels. Raises BadInput for a score that neither folds nor pickles."""
    queries, temperature = request.queries, divisor(request.temperature, request.queries.dtype)
    if isinstance(request.weighting, Uniform):  # which asks no score
        alike = queries[:, :1].expand(-1, dim) * 0
        return Posed(say.ShardQuery(array(alike), metric, uniform=True, where=where), alike, (), 0.0)
    folded = request.folded
    if folded is None or folded.scale is None:
        sent, parameters = pickled(request.score)
        question = say.ShardQuery(array(queries), None, temperature, bool(parameters), sent, where=where)
        return Posed(question, queries, parameters, 0.0)
    asked, scale = folded.queries, folded.scale
    wanted = isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled()
    if wanted and folded.metric is Metric.DOT:
        asked, scale, wanted = asked * scale, 1.0, False  # a product folds its factor, too
    factor = torch.as_tensor(scale, dtype=torch.float64) / temperature
    question = say.ShardQuery(array(asked), folded.metric, float(1 / factor), wanted, where=where)
    shift = folded.bias / temperature
    return Posed(question, asked, (factor,) if wanted else (), shift)


def pickled(score: Score | ScoreFunction) -> tuple[bytes, tuple[Tensor, ...]]:
    """A score as it travels, and its parameters that want gradients."""
    try:
        sent = pickle.dumps(score)
    except Exception as error:
        raise BadInput(
            f"the score {shown(score)} cannot be sent to shards ({type(error).__name__}: {error}); make "
            "it a class or a function of a module that they can import, or use one of softdb.scores"
        ) from error
    trained = score.parameters() if isinstance(score, torch.nn.Module) else ()
    return sent, tuple(one for one in trained if one.requires_grad)


def array(tensor: Tensor) -> NDArray[Any]:
    """A tensor as it travels: without its graph, on the host."""
    return tensor.detach().cpu().contiguous().numpy()


class Parts(torch.autograd.Function):
    """States of the shards as they came; backward asks each shard for its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        caller: Caller,
        asks: Sequence[dict[int, say.PassOver | say.Draw]],  # rounds of them
        states: State,  # (p, q, v) and (p, q)
        places: Sequence[dict[int, Rows]],  # for each message which queries it asks
        kept: Sequence[dict[int, NDArray[np.bool_]]],  # and of which of those its answer was kept
        owners: Sequence[tuple[int, ...]],  # (p,) the shards that each state is of
        queries: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The states themselves."""
        ctx.caller, ctx.asks, ctx.places, ctx.kept, ctx.owners = caller, asks, places, kept, owners
        ctx.save_for_backward(states.output, states.lse, queries, *parameters)
        return states.output, states.lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """(query, its gradients of output and lse) to each shard, its gradient of the query back."""
        output, lse, queries, *parameters = ctx.saved_tensors
        found = [torch.zeros_like(one) for one in (queries, *parameters)]
        part_of = {shard: part for part, mine in enumerate(ctx.owners) for shard in mine}
        several = [len(mine) > 1 for mine in ctx.owners]
        along = (output_grad.double() * output).sum(2).to(lse_grad) if any(several) else 0
        lses, of_output, of_lse, of_whole = (list(array(one)) for one in (lse, output_grad, lse_grad, lse_grad - along))
        for asks, places, kept in zip(ctx.asks, ctx.places, ctx.kept, strict=True):

            def message(
                shard: int, version: int, asks: Any = asks, places: Any = places, kept: Any = kept
            ) -> say.Message:
                part, ask, own = part_of[shard], asks[shard], kept[shard]
                if several[part]:  # of a pass; all shards of it are told the same, which travels once
                    return say.Backward(ask.version, ask, of_output[part], of_whole[part], lses[part])
                grads = (one[part][places[shard]] for one in (of_output, of_lse))
                masked = (
                    np.where(own.reshape(-1, *[1] * (grad.ndim - 1)), grad, 0).astype(grad.dtype) for grad in grads
                )
                return say.Backward(ask.version, ask, *masked)

            answers = ctx.caller.ask(
                message, [one for one in asks if ctx.caller.transport.collective or kept[one].any()]
            )
            for shard, gradient in answers.replies.items():
                mine = torch.from_numpy(places[shard]).to(queries.device)
                found[0][mine] += torch.tensor(gradient.queries).to(found[0])
                for whole, part in zip(found[1:], gradient.parameters, strict=True):
                    whole += torch.tensor(part).to(whole)
        sources = queries, output_grad, lse_grad, *parameters
        return None, None, None, None, None, None, *Once.guarded(list(found), sources)
