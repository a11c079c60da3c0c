"""Convert a request to the form that is sent to shards, and backpropagate through the shards' replies."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.attend import Request
from softdb.check import Metric, shown
from softdb.cluster import shard as messages
from softdb.cluster.caller import Caller
from softdb.errors import BadInput
from softdb.index.contract import Rows
from softdb.pool import State
from softdb.scoring import Score, ScoreFunction, Tempered, Uniform, divisor
from softdb.scoring.once import Once


class Posed(NamedTuple):
    """A query to send to shards, and the tensors with gradients, which stay with the caller."""

    question: messages.ShardQuery
    queries: Tensor  # (q, d) the queries that are sent, before they are detached from autograd
    parameters: tuple[Tensor, ...]  # parameters whose gradients the shards return
    shift: Tensor | float  # (q,) added to the log-normalisers that the shards return


def posed(request: Request, metric: Metric, dim: int, where: dict[str, Any] | None) -> Posed:
    """Convert a request to a query for shards. Raises BadInput for a score that neither folds nor can be pickled."""
    queries, temperature = request.queries, divisor(request.temperature, request.queries.dtype)
    if isinstance(request.weighting, Uniform):  # all records have equal weight, whatever the score
        alike = queries[:, :1].expand(-1, dim) * 0
        return Posed(messages.ShardQuery(array(alike), metric, uniform=True, where=where), alike, (), 0.0)
    folded = request.folded
    if folded is None or folded.scale is None:
        score, parameters = pickled(request.plain_score)
        scaled = isinstance(request.score, Tempered)
        question = messages.ShardQuery(array(queries), None, temperature, bool(parameters), score, scaled, where=where)
        return Posed(question, queries, parameters, 0.0)
    sent_queries, scale, shift, scaled = folded.queries, folded.scale, folded.bias / temperature, False
    if isinstance(scale, Tensor) and (scale.ndim or (scale.requires_grad and torch.is_grad_enabled())):
        factors = (scale / temperature).to(sent_queries).expand(len(sent_queries)).unsqueeze(1)
        scaled = folded.metric is not Metric.DOT
        sent_queries = torch.cat([sent_queries, factors], 1) if scaled else sent_queries * factors
        scale = temperature = 1.0
    factor = torch.as_tensor(scale, dtype=torch.float64) / temperature
    question = messages.ShardQuery(array(sent_queries), folded.metric, float(1 / factor), scaled=scaled, where=where)
    return Posed(question, sent_queries, (), shift)


def pickled(score: Score | ScoreFunction) -> tuple[bytes, tuple[Tensor, ...]]:
    """Pickle a score; return the bytes and the parameters that want gradients. Raises BadInput.

    Where Ray is used, its cloudpickle takes classes and functions of a notebook or script along, and lambdas.
    """
    try:
        ray = sys.modules.get("ray")
        data = pickle.dumps(score) if ray is None else ray.cloudpickle.dumps(score)
    except Exception as error:
        raise BadInput(
            f"the score {shown(score)} cannot be sent to shards ({type(error).__name__}: {error}); make "
            "it a class or a function of a module that the shards can import, or use one of softdb.scores"
        ) from error
    trained = score.parameters() if isinstance(score, torch.nn.Module) else ()
    return data, tuple(p for p in trained if p.requires_grad)


def array(tensor: Tensor) -> NDArray[Any]:
    """Convert a tensor to a contiguous numpy array in host memory, detached from autograd."""
    return tensor.detach().cpu().contiguous().numpy()


class Parts(torch.autograd.Function):
    """Autograd function that returns the shards' outputs and lses; backward asks each shard for gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        caller: Caller,
        asks: Sequence[dict[int, messages.PassOver | messages.Draw]],  # for each round, {shard: message}
        states: State,  # (p, q, v) and (p, q)
        places: Sequence[dict[int, Rows]],  # for each round, {shard: indices of the message's queries}
        used: Sequence[dict[int, NDArray[np.bool_]]],  # True for each query whose reply is part of `states`
        owners: Sequence[tuple[int, ...]],  # for each state, the shards whose replies it merges
        queries: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return `states` unchanged, as tensors with gradients."""
        ctx.caller, ctx.asks, ctx.places, ctx.used, ctx.owners = caller, asks, places, used, owners
        ctx.save_for_backward(states.output, states.lse, queries, *parameters)
        return states.output, states.lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send each shard the gradients for its output and lse; sum the gradients that the shards return."""
        output, lse, queries, *parameters = ctx.saved_tensors
        query_grad, *parameter_grads = (torch.zeros_like(tensor) for tensor in (queries, *parameters))
        state_of = {shard: state for state, shards in enumerate(ctx.owners) for shard in shards}
        merged = [len(shards) > 1 for shards in ctx.owners]
        along = (output_grad.double() * output).sum(2).to(lse_grad) if any(merged) else 0
        lses, of_output, of_lse, of_merged = map(list, map(array, (lse, output_grad, lse_grad, lse_grad - along)))
        for asks, places, used in zip(ctx.asks, ctx.places, ctx.used, strict=True):

            def message(
                shard: int, version: int, asks: Any = asks, places: Any = places, used: Any = used
            ) -> messages.Message:
                state, ask, mask = state_of[shard], asks[shard], used[shard]
                if merged[state]:  # shards on one host get equal gradients
                    return messages.Backward(ask.version, ask, of_output[state], of_merged[state], lses[state])
                grads = (grad[state][places[shard]] for grad in (of_output, of_lse))
                masked = (
                    np.where(mask.reshape(-1, *[1] * (grad.ndim - 1)), grad, 0).astype(grad.dtype) for grad in grads
                )
                return messages.Backward(ask.version, ask, *masked)

            answers = ctx.caller.ask(
                message, [shard for shard in asks if ctx.caller.transport.collective or used[shard].any()]
            )
            for shard, gradient in answers.replies.items():
                own_queries = torch.from_numpy(places[shard]).to(queries.device)
                query_grad[own_queries] += torch.tensor(gradient.queries).to(query_grad)
                for total, grad in zip(parameter_grads, gradient.parameters, strict=True):
                    total += torch.tensor(grad).to(total)
        sources = queries, output_grad, lse_grad, *parameters
        return None, None, None, None, None, None, *Once.guarded([query_grad, *parameter_grads], sources)
