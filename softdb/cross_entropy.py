"""Cross entropy of a softmax over trainable rows: exact, truncated to the largest scores, or estimated from draws."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from softdb import check
from softdb.attend import Columns, Request
from softdb.attend.leading import as_tensor
from softdb.check import shown
from softdb.device import placed_tensors
from softdb.errors import BadInput
from softdb.scoring import Dot
from softdb.scoring.once import Once

__all__ = ["linear_cross_entropy"]

DRAW_COST = 1.5  # time for a drawn row, over that for a row of an exact pass
GROUP = 64  # rows whose largest score is compared first in a search
NOT_FINITE = (
    "a loss is NaN or infinite: queries or weight hold NaN or infinity, or training has moved them too far; begin "
    "again from a checkpoint, with smaller steps"
)
SCORED = 1 << 23  # number of scores computed at once in a search: 32 MB


def linear_cross_entropy(
    queries: Any,  # (…, d)
    weight: Any,  # (n, d)
    targets: Any,  # (…) row numbers
    *,
    temperature: float | Tensor = 1.0,
    k: int | None = None,
    max_draws: int | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    sparse: bool | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # (), or (…) for "none"
    """Return the cross entropy of a softmax over the rows of a matrix that is trained, without a (q, n) matrix.

        loss_i = log Z_i - q_i·w_t / T,  Z_i = Σ_j exp(q_i·w_j / T),  t the target of query i

    With the defaults, value and gradients are those of F.cross_entropy(F.linear(queries / T, weight), targets). On a
    CPU native kernels compute them block by block: cost 8 q n d, memory O(q d + n) and the gradient of the weight.

    With `max_draws` Z_i is estimated from the target's row and a sample of rows that all queries share: one uniform
    draw in each of max_draws equal ranges of rows, weighted by n / max_draws. The estimate of Z_i and its gradient are
    unbiased. The loss, a logarithm, is too low by about half the relative variance of the estimate. Cost 8 q max_draws
    d, memory q max_draws bytes. If an exact pass costs less, the loss is exact.

    With `k` Z_i has the k rows with the largest scores and the target: the loss and its gradient are those of a smaller
    problem, and the loss is at most the exact one. Cost q n d for the search and 6 q k d, memory O(q k d). With k and
    max_draws these rows are summed exactly and all others are drawn, which lowers the variance if few rows have most
    of the weight, and keeps the sums unbiased (Mussmann et al. 2017, section 3).

    Args:
        queries: floating-point numbers with any leading shape, on the device of weight. The computation has their
            dtype, or float32 if that is narrower, also under autocast.
        weight: the rows, one for each class or item, such as embedding.weight.
        targets: the row number of each query's target.
        temperature: divides the scores; a tensor broadcasts to the queries' leading shape and gets a gradient.
        k, max_draws: see above; None: exact.
        ignore_index: target of queries that have no loss and no gradient; they do not count in the mean.
        reduction: "mean" over the queries, "sum" or "none". The mean of no queries is NaN, as in torch.
        sparse: True: the gradient of weight is a sparse tensor, as of torch.nn.Embedding(sparse=True), for
            torch.optim.SparseAdam; False: dense; None: sparse with k or max_draws.
        generator: random numbers for the draws; None: torch's default generator.

    Raises BadInput for arguments that do not fit, if a loss is NaN or infinite, and for a second derivative of an exact
    or drawn loss; for that use F.cross_entropy, or k=n alone.

    >>> rows = torch.nn.Parameter(torch.eye(3))
    >>> loss = linear_cross_entropy(torch.tensor([[1.0, 0.0, 0.0]]), rows, torch.tensor([0]), temperature=0.5)
    >>> loss.backward()
    >>> round(loss.item(), 4), rows.grad.shape
    (0.2395, torch.Size([3, 3]))
    """
    ignore_index = check.integer(ignore_index, "ignore_index", -(1 << 63), (1 << 63) - 1)
    queries, weight, targets = _checked(queries, weight, targets, ignore_index)
    check.one_of(reduction, "reduction", ("mean", "sum", "none"))
    if not (sparse is None or isinstance(sparse, bool)):
        raise BadInput(f"sparse is {shown(sparse)}; expected True, False or None")
    heat = check.temperature(temperature, targets.shape)
    k = None if k is None else min(check.integer(k, "k"), len(weight))
    draws = None if max_draws is None else min(check.integer(max_draws, "max_draws"), len(weight))
    sparse = (k is not None or draws is not None) if sparse is None else sparse
    check.generator(generator)
    with check.precise():
        flat, rows = queries.flatten(end_dim=-2) if queries.ndim > 1 else queries.unsqueeze(0), targets.flatten()
        flat = flat / (heat.to(flat).unsqueeze(1) if isinstance(heat, Tensor) else heat)
        keep = rows != ignore_index
        flat, rows = flat[keep], rows[keep]
        if (draws is None and k is None) or (draws is not None and DRAW_COST * draws >= len(weight)):
            losses: Tensor = _Exact.apply(flat, _RowGradient.apply(weight) if sparse else weight, rows)  # type: ignore[no-untyped-call]
        else:
            near = rows.unsqueeze(1) if k is None else torch.cat([rows.unsqueeze(1), _nearest(flat, weight, k)], 1)
            losses = _estimated(flat, weight, near, _drawn(weight, draws or 0, generator), sparse)
        if not bool(losses.detach().isfinite().all()):
            raise BadInput(NOT_FINITE)
        if reduction == "none":
            return losses.new_zeros(len(keep)).masked_scatter(keep, losses).view(targets.shape)
        return losses.mean() if reduction == "mean" else losses.sum()


def _checked(queries: Any, weight: Any, targets: Any, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments as tensors, queries in the dtype of the computation. Raises BadInput."""
    queries, weight, targets = as_tensor(queries, "queries"), as_tensor(weight, "weight"), as_tensor(targets, "targets")
    for name, tensor in (("queries", queries), ("weight", weight)):
        if not tensor.is_floating_point():
            raise BadInput(f"{name} is of type {tensor.dtype}; expected floating-point numbers")
    shapes = f"queries {tuple(queries.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}"
    if weight.ndim != 2 or not weight.numel() or not queries.ndim or queries.shape[-1] != weight.shape[1]:
        raise BadInput(f"the shapes are {shapes}; expected queries (…, d) and weight (n, d), with n and d at least 1")
    if targets.shape != queries.shape[:-1]:
        raise BadInput(f"the shapes are {shapes}; expected a row number for each query, targets (…)")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise BadInput(f"targets are of type {targets.dtype}; expected row numbers of weight, such as int64")
    if not queries.device == weight.device == targets.device:
        devices = f"{queries.device}, {weight.device} and {targets.device}"
        raise BadInput(f"queries, weight and targets are on {devices}; move them to one device")
    targets = targets.long()
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))
    if bool(wrong.any()):
        raise BadInput(
            f"targets hold {int(targets[wrong][0])}; expected row numbers from 0 to {len(weight) - 1}, or ignore_index "
            f"({ignore_index}) for queries without a loss"
        )
    return queries.to(torch.promote_types(queries.dtype, torch.float32)), weight, targets


class _RowGradient(torch.autograd.Function):
    """Identity that makes the gradient of all rows a sparse tensor, without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return the weight."""
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient as a sparse tensor of all rows."""
        every = torch.arange(len(grad), device=grad.device).unsqueeze(0)
        return torch.sparse_coo_tensor(every, grad, grad.shape, is_coalesced=True, check_invariants=False)


class _Exact(torch.autograd.Function):
    """Exact losses (q,). The targets' gradient is added to the dense one in place: autograd would make a copy."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return log Z minus the target's score."""
        ctx.own = tuple(
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip((queries, weight), ctx.needs_input_grad, strict=False)
        )
        with torch.enable_grad():
            ctx.total = _log_sum(*ctx.own)
        ctx.save_for_backward(queries, weight, targets)
        losses: Tensor = ctx.total.detach() - (queries * weight[targets]).sum(1)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for queries and weight."""
        queries, weight, targets = ctx.saved_tensors
        pulled = grad.detach().unsqueeze(1)
        wanted = [tensor for tensor in ctx.own if tensor.requires_grad]
        grads = iter(torch.autograd.grad(ctx.total, wanted, grad.detach(), retain_graph=True))
        query_grad, weight_grad = (next(grads) if tensor.requires_grad else None for tensor in ctx.own)
        with torch.no_grad():
            if query_grad is not None:
                query_grad.sub_(pulled * weight[targets])
            if weight_grad is not None:
                weight_grad.index_add_(0, targets, (pulled * queries).to(weight.dtype), alpha=-1)
        return *Once.guarded([query_grad, weight_grad], (queries, weight, grad)), None


@torch.no_grad()
def _nearest(queries: Tensor, weight: Tensor, k: int) -> Tensor:  # (q, k)
    """Return the rows with the largest scores, some at a time. They lie in the k groups with the largest maxima."""
    n, rows = len(weight), weight.to(queries.dtype)
    groups, together = -(-n // GROUP), max(1, min(SCORED // n, len(queries)))
    table = queries.new_full((together, groups * GROUP), -torch.inf)
    best = [torch.empty(0, k, dtype=torch.int64, device=queries.device)]
    for some in torch.split(queries, together):
        torch.mm(some, rows.mT, out=table[: len(some), :n])
        scores = table[: len(some)].view(len(some), groups, GROUP)
        chosen = scores.amax(2).topk(min(k, groups), sorted=False).indices
        among = scores.take_along_dim(chosen.unsqueeze(2), 1).flatten(1)
        at = among.topk(k, sorted=False).indices
        best.append(chosen.gather(1, at // GROUP) * GROUP + at % GROUP)
    return torch.cat(best)


def _drawn(weight: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:  # (m,)
    """Draw one row uniformly from each of m equal ranges; a row on the border of two may be drawn twice."""
    device = weight.device if generator is None else generator.device
    chances = torch.rand(draws, dtype=torch.float64, generator=generator, device=device)
    places = (torch.arange(draws, device=device) + chances) * (len(weight) / max(1, draws))
    return places.long().clamp(max=len(weight) - 1).to(weight.device)


def _estimated(
    queries: Tensor,  # (q, d)
    weight: Tensor,  # (n, d)
    known: Tensor,  # (q, 1 + k) rows that are summed exactly, the target first
    drawn: Tensor,  # (m,) rows that stand for all others
    sparse: bool,
) -> Tensor:  # (q,)
    """Return the losses with Z summed over known rows, and estimated from the draws over all others."""
    own = F.embedding(known, weight, sparse=sparse).to(queries.dtype)
    scores = (own @ queries.unsqueeze(2)).squeeze(2)
    again = (known == known[:, :1]).index_fill(1, known.new_zeros(1), False)
    total = scores.masked_fill(again, -torch.inf).logsumexp(1)
    if len(drawn):
        others = torch.ones(len(queries), len(drawn), dtype=torch.bool, device=drawn.device)
        for last in (False, True):  # of the at most two draws of a row; draws are ascending
            at = (torch.searchsorted(drawn, known, right=last) - int(last)).clamp(0, len(drawn) - 1)
            summed = drawn[at] == known
            others[summed.nonzero()[:, 0], at[summed]] = False
        sample = F.embedding(drawn, weight, sparse=sparse).to(queries.dtype)
        rest = _log_sum(queries, sample, others) + math.log(len(weight) / len(drawn))
        total = torch.logaddexp(total, rest)
    return total - scores[:, 0]


def _log_sum(queries: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:  # (q, d), (n, d), (q, n) -> (q,)
    """Return log Σ exp(q·w) over the rows that the mask allows, computed block by block, with gradients to both."""
    fixed = rows.detach()
    source = Columns(rows, fixed, placed=placed_tensors(rows, fixed))
    try:
        return source.log_normaliser(Request.of(queries, Dot(), mask=mask))
    except BadInput as error:  # a score is NaN
        raise BadInput(NOT_FINITE) from error
