"""torch.compile around softdb: where its graphs break, and where they do not. Lines of docs/works-with.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds.towers import BATCH, CASES, D, N, V, alike, batch, gradients, opened, stored, tower

import softdb
from softdb.nn import (
    Attention,
    LearnedPositions,
    Memory,
    MILPooling,
    ProductKeys,
    RecurrentAttention,
    RotaryPositions,
    SinusoidalPositions,
    View,
    info_nce,
    pooled_loss,
    retrieval_loss,
)
from softdb.scores import Cosine, Gaussian, NegativeL2


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    with warnings.catch_warnings():
        # torch looks at .grad of tensors of any kind when it puts guards on them
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # functions of entmax
        yield
    torch._dynamo.reset()


def layers() -> dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]:
    """Calls on plain tensors, and their inputs."""
    torch.manual_seed(2)
    keys, values = stored()
    q, bags, lengths = torch.randn(7, D), torch.randn(2, 4, 8), torch.tensor([2, 3])
    heads, pooling, recurrent = Attention(None, 8, 2, batch_first=True), MILPooling(8, 4), RecurrentAttention(8, 8)
    calls: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
        "attention": (lambda q: softdb.attention(q, keys, values), (q,)),
        "attention, details": (lambda q: softdb.attention(q, keys, values, details=True), (q,)),
        "attention, causal": (lambda x: softdb.attention(x, x, x, is_causal=True), (bags,)),
        "attention, lengths": (lambda x, n: softdb.attention(x, x, x, valid_len=n), (bags, lengths)),
        "attention, mask": (lambda q, m: softdb.attention(q, keys, values, mask=m), (q, torch.rand(7, N) < 0.5)),
        "attention, callable": (lambda q: softdb.attention(q, keys, values, score=lambda a, b: a @ b.mT), (q,)),
        "nn.Attention": (lambda x: heads(x, x, x, need_weights=True), (bags,)),
        "nn.Attention, masks": (lambda x, m: heads(x, x, x, attn_mask=m)[0], (bags, torch.randn(4, 4))),
        "MILPooling": (pooling, (bags, lengths)),
        "RecurrentAttention": (lambda x: recurrent(x[:, 0], x), (bags,)),
        "LearnedPositions": (LearnedPositions(9, 8), (bags,)),
        "SinusoidalPositions": (SinusoidalPositions(8), (bags,)),
        "RotaryPositions": (RotaryPositions(8), (bags,)),
    }
    for score in (NegativeL2(), Cosine(), Gaussian(0.7)):
        calls[f"attention, {score.__class__.__name__}"] = (
            lambda q, score=score: softdb.attention(q, keys, values, score=score),
            (q,),
        )
    for weights in ("sparsemax", "entmax15", "uniform", "argmax"):
        calls[f"attention, {weights}"] = (
            lambda q, weights=weights: softdb.attention(q, keys, values, weights=weights),
            (q,),
        )
    return calls


def first(answer: Any) -> Tensor:
    tensor: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", layers())
def test_plain_tensors_compile_to_one_graph(name: str) -> None:
    """`fullgraph=True` raises at any break; the gradient flows through the compiled graph, too."""
    call, inputs = layers()[name]
    slopes = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        leaf = inputs[0].clone().requires_grad_()
        answer = function(leaf, *inputs[1:])
        if first(answer).requires_grad:  # not of a look-up
            first(answer).square().sum().backward()  # type: ignore[no-untyped-call]
        slopes.append((first(answer).detach(), torch.zeros(()) if leaf.grad is None else leaf.grad))
    torch.testing.assert_close(slopes[1], slopes[0])


def test_attention_compiles_to_one_graph_for_any_length() -> None:
    compiled = torch.compile(lambda x: softdb.attention(x, x, x), fullgraph=True, backend="eager", dynamic=True)
    for length in (3, 5):
        x = torch.randn(2, length, D)
        torch.testing.assert_close(compiled(x), softdb.attention(x, x, x))
    with pytest.raises(softdb.BadInput, match="holds NaN or infinity"):
        softdb.attention(x * torch.nan, x, x)
    assert bool(compiled(x * torch.nan).isnan().all())  # a graph reads no values


@pytest.mark.slow
def test_more_scores_break_the_graph_and_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.functional.DENSE", 0)
    keys, values = stored()
    slopes = []
    for compiled in (False, True):
        leaf = batch()[0].requires_grad_()
        call = torch.compile(softdb.attention, backend="aot_eager") if compiled else softdb.attention
        call(leaf, keys, values).square().sum().backward()  # type: ignore[no-untyped-call]
        slopes.append(leaf.grad)
    torch.testing.assert_close(slopes[1], slopes[0])


@pytest.mark.slow
def test_product_keys_break_once() -> None:
    memory, x = ProductKeys(8, 6, 5, k=4), torch.randn(7, 8)
    report = torch._dynamo.explain(memory)(x)
    assert (report.graph_count, report.graph_break_count) == (2, 1)
    slopes = []
    for function in (memory, torch.compile(memory, backend="aot_eager")):
        slopes.append(gradients(memory, function(x).square().sum()))
    alike(slopes[1], slopes[0])


def parts() -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
    """Calls of a database, and the number of breaks that each makes in the graph around it."""
    db = opened(None)
    memory, view, ids = Memory(db, k=5), View(db, torch.nn.Linear(D, D)), list(range(BATCH))
    layer, targets = Attention(db, D, 2, batch_first=True), torch.zeros(BATCH, V)
    return {
        "nn.Attention": (lambda q: layer(q[None])[0], 5),
        "nn.Memory": (lambda q: memory(q).output, 1),
        "nn.View": (lambda q: view.attend(q, k=5).output, 1),
        "retrieval_loss": (lambda q: retrieval_loss(db, q, ids), 1),
        "info_nce": (lambda q: info_nce(db, q, ids), 1),
        "pooled_loss": (lambda q: pooled_loss(memory, q, targets), 1),
        "db.attend": (lambda q: db.attend(q).output, 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", parts())
def test_a_call_of_a_database_breaks_the_graph(name: str) -> None:
    part, breaks = parts()[name]
    report = torch._dynamo.explain(lambda q: 2 * part(torch.tanh(q)))(batch()[0])
    assert (report.graph_break_count, report.graph_count) == (breaks, breaks + 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_learns_as_the_plain_one(case: str) -> None:
    model = tower(case)
    x, right = batch()
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(x, right)
    torch.testing.assert_close(loss, model(x, right))
    alike(gradients(model, loss.mean()), gradients(model, model(x, right).mean()))
