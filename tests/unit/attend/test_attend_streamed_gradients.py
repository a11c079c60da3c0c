"""Streams over columns that are trained, and sparse weightings computed in passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sources import stream
from torch import Tensor
from worlds import snapshot

from softdb.attend import Columns
from softdb.attend import blocks as streaming
from softdb.errors import BadInput
from softdb.scores import Additive, Cosine, Dot, General, NegativeL2
from softdb.weights import Entmax15, Sparsemax

SPARSE = [Sparsemax(), Entmax15()]
every_sparse = pytest.mark.parametrize("by", SPARSE, ids=lambda by: by.name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven records and two queries, so that every loop goes round."""
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 7)
    monkeypatch.setattr(streaming, "TILE", 14)


def tensors(n: int, *widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(n, width, dtype=torch.float64, generator=generator) for width in widths]


def every_score() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "dot": Dot(),
        "cosine": Cosine(),
        "l2": NegativeL2(0.8),
        "l2 learnt": NegativeL2(torch.tensor(0.8, dtype=torch.float64), learnable=True),
        "general": General(3, 3).double(),
        "additive": Additive(3, 3, 4).double(),
    }


SCORES = every_score()


@pytest.mark.few(2)
@pytest.mark.parametrize("by", [None, *SPARSE], ids=lambda by: "softmax" if by is None else by.name)
@pytest.mark.parametrize("name", SCORES)
def test_queries_keys_values_and_parameters_learn(name: str, by: Any) -> None:
    score = SCORES[name]
    parameters = tuple(score.parameters()) if isinstance(score, torch.nn.Module) else ()
    (queries,), (keys, values) = tensors(4, 3), tensors(19, 3, 2)
    allowed = np.arange(19) % 6 > 0
    mask = torch.ones(4, 19, dtype=torch.bool)
    mask[1, ::2], mask[2] = False, False

    def answer(queries: Tensor, keys: Tensor, values: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = stream(queries, Columns(keys, values), score, 0.6, allowed=allowed, mask=mask, sparse=by)
        return output, lse.nan_to_num(neginf=0)  # the third query is masked out

    inputs = tuple(one.requires_grad_() for one in (queries, keys, values))
    assert torch.autograd.gradcheck(answer, (*inputs, *parameters))


@every_sparse
@pytest.mark.parametrize("temperature", [1e-9, 0.05, 1.0, 1e3, 1e9])
@pytest.mark.parametrize("n", [1, 2, 60, 900])
def test_passes_find_the_threshold(n: int, temperature: float, by: Any) -> None:
    (queries,), (keys, values) = tensors(3, 3), tensors(n, 3, 2)
    keys[n // 2] = keys[0]  # a tie
    output, lse = stream(queries, Columns(keys, values), Dot(), temperature, sparse=by)
    weights, expected, _ = by.weigh(queries @ keys.T, temperature, torch.ones(3, n, dtype=torch.bool))
    torch.testing.assert_close(output, weights @ values, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected)


@pytest.mark.slow
@every_sparse
def test_float32_is_summed_in_float64(by: Any) -> None:
    (queries,), (keys, values) = tensors(3, 8), tensors(3000, 8, 2)
    source = snapshot(keys.numpy(), values.numpy())
    segment = source.segments[0]
    rounded = Columns(torch.from_numpy(segment.keys), torch.from_numpy(segment.values))
    for temperature in (0.1, 100.0):
        output, lse = stream(queries.float(), source, Dot(), temperature, sparse=by)
        expected = stream(queries.float().double(), rounded, Dot(), temperature, sparse=by)
        torch.testing.assert_close(output.double(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-5)


@every_sparse
def test_labels_and_empty_streams_are_pooled(by: Any) -> None:
    (queries,), (keys,) = tensors(3, 4), tensors(20, 4)
    labels = torch.arange(20) % 3
    output, _ = stream(queries, Columns(keys, labels), Dot(), 2.0, num_classes=3, sparse=by)
    one_hot = torch.nn.functional.one_hot(labels, 3).double()
    torch.testing.assert_close(output, stream(queries, Columns(keys, one_hot), Dot(), 2.0, sparse=by)[0])
    torch.testing.assert_close(output.sum(1), torch.ones(3, dtype=torch.float64))
    leaf = queries.requires_grad_()
    nothing, lse = stream(leaf, Columns(keys, one_hot), Dot(), 1.0, allowed=np.zeros(20, np.bool_), sparse=by)
    assert nothing.tolist() == [[0] * 3] * 3
    assert lse.tolist() == [-math.inf] * 3
    assert torch.autograd.grad(nothing.sum() + lse.sum(), leaf)[0].tolist() == [[0] * 4] * 3


def test_a_score_of_nan_is_refused() -> None:
    (queries,), (keys, values) = tensors(2, 3), tensors(9, 3, 2)

    def score(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.where(keys[:, 0] == keys.amax(0)[0], math.nan, queries @ keys.T)

    for by in (None, *SPARSE):
        with pytest.raises(BadInput, match="the score returned NaN"):
            stream(queries, Columns(keys, values), score, 1.0, sparse=by)


def test_half_columns_are_computed_in_float32() -> None:
    (queries,), (keys, values) = tensors(3, 8), tensors(50, 8, 4)
    halves = Columns(keys.half(), values.half())
    wide = Columns(keys.half().float(), values.half().float())
    actual, expected = (stream(queries.float(), source, Dot(), 0.2) for source in (halves, wide))
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other)


def test_columns_are_read_where_they_lie() -> None:
    keys, values = tensors(30, 3, 2)
    columns = Columns(keys.float(), values.float())
    assert columns.columns is not None
    (segment,) = columns.columns.segments
    assert np.shares_memory(segment.keys, columns.keys.numpy())
    assert Columns(keys[:0].float(), values[:0].float()).columns is None
    kept = np.zeros(30, np.bool_)
    kept[[3, 4, 29]] = True
    assert [block.positions.tolist() for block in columns.blocks(7, kept)] == [[3, 4], [29]]
    torch.testing.assert_close(torch.cat([block.keys for block in columns.blocks(7, kept)]), keys.float()[[3, 4, 29]])


@pytest.mark.parametrize("trains", ["keys", "values"])
def test_a_second_derivative_is_refused_where_only_columns_learn(trains: str) -> None:
    (queries,), (keys, values) = tensors(3, 3), tensors(9, 3, 2)
    leaf = (keys if trains == "keys" else values).requires_grad_()
    output, _ = stream(queries, Columns(keys, values), Dot(), 1.0)
    (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
    with pytest.raises(BadInput, match="no second derivative"):
        torch.autograd.grad(grad.sum(), leaf)
