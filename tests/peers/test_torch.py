"""Functional attention equals torch's scaled_dot_product_attention, also inside MultiheadAttention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import same
from torch.nn.functional import scaled_dot_product_attention

from softdb.functional import attention

module = importlib.import_module("softdb.functional")
D, V = 3, 2

SHAPES = {
    "plain": [(4, D), (6, D), (6, V)],
    "batch": [(2, 4, D), (2, 6, D), (2, 6, V)],
    "heads": [(2, 5, 4, D), (2, 5, 6, D), (2, 5, 6, V)],
    "shared by the batch": [(2, 4, D), (1, 6, D), (1, 6, V)],
    "shared by the heads": [(2, 5, 4, D), (2, 1, 6, D), (2, 1, 6, V)],
    "shared by the batch, not the heads": [(2, 5, 4, D), (1, 5, 6, D), (1, 5, 6, V)],
    "one query": [(1, 5, 4, D), (2, 1, 6, D), (2, 5, 6, V)],
    "fewer dimensions": [(2, 5, 4, D), (6, D), (5, 6, V)],
    "no entries": [(0, 4, D), (0, 6, D), (0, 6, V)],
    "no queries": [(2, 0, D), (2, 6, D), (2, 6, V)],
    "no keys": [(2, 4, D), (2, 0, D), (2, 0, V)],
}
MASKS: dict[str, Callable[[tuple[int, ...], int, int], Any]] = {
    "none": lambda lead, m, n: None,
    "whole": lambda lead, m, n: torch.rand(*lead, m, n) < 0.6,
    "of the keys": lambda lead, m, n: torch.rand(*lead, 1, n) < 0.6,
    "shared": lambda lead, m, n: torch.rand(m, n) < 0.6,
    "nothing": lambda lead, m, n: torch.zeros(m, n, dtype=torch.bool),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", [*MASKS, "causal"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("limit", [1 << 24, 0], ids=["dense", "streamed"])
def test_attention_agrees_with_torch(
    limit: int, shapes: list[tuple[int, ...]], kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DENSE", limit)
    monkeypatch.setattr(module, "MASKED", 20)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    lead = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))  # type: ignore[no-untyped-call]
    mask = MASKS[kind](lead, shapes[0][-2], shapes[1][-2]) if kind in MASKS else None
    expected = scaled_dot_product_attention(
        q, k.expand(*lead, *k.shape[-2:]), v.expand(*lead, *v.shape[-2:]), mask, is_causal=kind == "causal"
    )
    actual = attention(q, k, v, mask=mask, is_causal=kind == "causal")
    same(actual, expected, [q, k, v], 1e-5 if dtype is torch.float32 else 1e-10)


def test_many_scores_are_streamed_and_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run over the limit in the compiled loops, if there are any."""
    monkeypatch.delattr(module, "_dense")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 30, 8), torch.randn(1, 3, 100_000, 8), torch.randn(1, 3, 100_000, 4)
    assert module.DENSE < 2 * 3 * 30 * 100_000
    q.requires_grad_()
    for live in (None, torch.rand(2, 1, 1, 100_000) < 0.5):
        same(attention(q, k, v, mask=live), scaled_dot_product_attention(q, k, v, live), [q], 1e-5)


@pytest.mark.parametrize("limit", [1 << 24, 0], ids=["dense", "streamed"])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_attention_gives_the_same_inside_multi_head_attention(
    kind: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DENSE", limit)
    torch.manual_seed(0)
    b, m, n, width, heads = 2, 5, 5 if kind == "self" else 7, 12, 3
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    x = torch.randn(b, m, width, dtype=torch.float64)
    y = x if kind == "self" else torch.randn(b, n, width, dtype=torch.float64)
    weight, bias = torch.chunk(theirs.in_proj_weight, 3), torch.chunk(theirs.in_proj_bias, 3)
    q, k, v = (
        torch.nn.functional.linear(one, w, c)
        .reshape(b, -1, heads, width // heads)
        .transpose(1, 2)  # heads are a leading dimension
        for one, w, c in zip((x, y, y), weight, bias, strict=True)
    )
    actual = theirs.out_proj(attention(q, k, v).transpose(1, 2).flatten(2))
    same(actual, theirs(x, y, y, need_weights=False)[0], list(theirs.parameters()))
