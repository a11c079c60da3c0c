"""Modules of softdb.nn.Attention beside torch's own, for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import softdb
import worlds
from softdb.nn import Attention

N, L, E, HEADS, D, V, RECORDS = 3, 4, 12, 3, 5, 7, 29
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = [torch.float32, torch.float64]


filled = functools.partial(worlds.filled, n=RECORDS, d=D, value_dim=V)


def columns(db: softdb.SoftDB, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a database from `filled`, (n, 1, d) and (n, 1, v)."""
    records = db.get(list(range(len(db))))
    values = records.keys if records.values is None else records.values
    return records.keys.to(dtype).unsqueeze(1), values.to(dtype).unsqueeze(1)


def pair(db: softdb.SoftDB | None, dtype: torch.dtype, **words: Any) -> tuple[Attention, torch.nn.MultiheadAttention]:
    """The module and torch's own with the same parameters, none of them 0."""
    ours = Attention(db, E, HEADS, dtype=dtype, **words)
    torch_words = {"kdim": ours.kdim, "vdim": ours.vdim, **words}
    other = torch.nn.MultiheadAttention(E, HEADS, dtype=dtype, **torch_words)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    ours.load_state_dict(other.state_dict())
    return ours, other


def agree(
    mine: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor],
    modules: tuple[Attention, torch.nn.MultiheadAttention], query: Tensor,
) -> None:  # fmt: skip
    """Asserts equal outputs, and equal gradients of the query and of every parameter."""
    tolerance = TOLERANCE[query.dtype]
    found: list[tuple[str, Tensor | None]] = []
    expected: list[tuple[str, Tensor | None]] = []
    for ask, module, into in zip((mine, other), modules, (found, expected), strict=True):
        module.zero_grad()
        asked = query.clone().requires_grad_()
        output = ask(asked)
        torch.autograd.backward(output, torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
        assert asked.grad is not None
        into += [("output", output.detach()), ("query", asked.grad)]
        into += [(name, parameter.grad) for name, parameter in module.named_parameters()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, one), (_, two) in zip(found, expected, strict=True):
        assert one is not None
        assert two is not None
        scale = max(1.0, float(two.abs().max()))
        assert float((one - two).abs().max()) <= tolerance * scale, name
        if name != "in_proj_bias":
            assert float(two.abs().max()) > 1e-4, f"{name}: nothing is compared"


def torch_mask() -> Tensor:
    """(N·heads, L, n), True = may not attend; every query keeps some records."""
    mask = torch.rand(N * HEADS, L, RECORDS) < 0.5
    mask[..., 3] = False
    return mask


WORDS = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]
