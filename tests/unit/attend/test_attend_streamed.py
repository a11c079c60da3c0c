"""The exact soft query against loops: answers, gradients, participants and degenerate cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from sources import stream
from torch import Tensor
from worlds import Array, awkward, snapshot

from softdb.attend import blocks as streaming
from softdb.errors import BadInput
from softdb.scores import Cosine, Dot, NegativeL2, ScaledDot, Score
from softdb.store.snapshot import Segment, Snapshot

D, V, CLASSES = 5, 3, 4
SCORES = {
    "dot": (Dot(), reference.dot),
    "scaled dot": (ScaledDot(), reference.scaled_dot),
    "cosine": (Cosine(), reference.cosine),
    "l2": (NegativeL2(), reference.negative_l2),
}
every_score = pytest.mark.parametrize(("score", "equation"), SCORES.values(), ids=SCORES.keys())


@pytest.fixture
def keys(rng: np.random.Generator) -> Array:
    return awkward(rng, 40, D)


@pytest.fixture
def values(rng: np.random.Generator) -> Array:
    return rng.standard_normal((40, V)).astype(np.float32)


@pytest.fixture
def queries(rng: np.random.Generator, keys: Array) -> Tensor:
    """Six queries in float64, one of them a stored key and one zero."""
    found = rng.standard_normal((6, D))
    found[0], found[1] = keys[0], 0
    return torch.from_numpy(found)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 records and chunks of 2 queries, so that small worlds have many of both."""
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 7)
    monkeypatch.setattr(streaming, "TILE", 14)


def _equal(found: tuple[Tensor, Tensor], expected: tuple[Array, Array], tolerance: float = 1e-9) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.detach(), other, rtol=tolerance, atol=tolerance)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@every_score
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_answer_is_the_equation(
    score: Score, equation: reference.Score, dtype: str, queries: Tensor, keys: Array, values: Array
) -> None:
    world = snapshot(keys, values, dtype=dtype, cuts=[3, 20])
    expected = reference.soft_query(equation, queries.numpy(), keys.astype(dtype), values.astype(dtype), 0.3)
    _equal(stream(queries, world, score, 0.3), expected)
    actual = stream(queries.float(), world, score, 0.3)
    assert [one.dtype for one in actual] == [torch.float32, torch.float32]
    _equal(actual, expected, 2e-5)


@pytest.mark.usefixtures("small")
def test_the_key_serves_where_there_are_no_values(queries: Tensor, keys: Array) -> None:
    expected = reference.soft_query(reference.dot, queries.numpy(), keys, keys, 0.3)
    _equal(stream(queries, snapshot(keys), Dot(), 0.3), expected)


@pytest.mark.usefixtures("small")
def test_labels_give_a_distribution(queries: Tensor, keys: Array, rng: np.random.Generator) -> None:
    labels = rng.integers(0, CLASSES, 40)
    expected = reference.soft_query(reference.dot, queries.numpy(), keys, reference.one_hot(labels, CLASSES), 0.3)
    actual = stream(queries, snapshot(keys, labels), Dot(), 0.3, num_classes=CLASSES)
    _equal(actual, expected)
    np.testing.assert_allclose(actual[0].sum(1), 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_only_participating_records_have_weight(
    deleted: bool, filtered: bool, masked: bool, queries: Tensor, keys: Array, values: Array, rng: np.random.Generator
) -> None:
    live, allowed = np.ones(40, np.bool_), None
    if deleted:
        live = rng.random(40) < 0.7
        live[7:16] = False  # more than a whole block
    if filtered:
        allowed = rng.random(40) < 0.7
        allowed[20:29] = False
    part = np.tile(live if allowed is None else live & allowed, (6, 1))
    mask = None
    if masked:
        mask = torch.from_numpy(rng.random((6, int(live.sum()))) < 0.7)
        mask[3] = False
        part[:, live] &= mask.numpy()
    world = snapshot(keys, values, live, cuts=[11])
    expected = reference.soft_query(reference.negative_l2, queries.numpy(), keys, values, 0.4, part)
    _equal(stream(queries, world, NegativeL2(), 0.4, allowed=allowed, mask=mask), expected)


@pytest.mark.parametrize("block_rows", [1, 7, 39, 40, 1000])
@pytest.mark.parametrize("tile", [1, 100, 10**6])
def test_blocks_of_any_size_give_the_same_answer(
    block_rows: int, tile: int, queries: Tensor, keys: Array, values: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(streaming, "TILE", tile)
    queries.requires_grad_()
    output, lse = stream(queries, snapshot(keys, values), Dot(), 0.3)
    expected = reference.soft_query(reference.dot, queries.detach().numpy(), keys, values, 0.3)
    _equal((output, lse), expected)
    (grad,) = torch.autograd.grad(output.sum() + lse.sum(), queries)
    weights = torch.softmax(queries.detach() @ torch.from_numpy(keys).double().mT / 0.3, 1)
    worth = torch.from_numpy(values).double().sum(1) - output.detach().sum(1, keepdim=True) + 1
    np.testing.assert_allclose(grad, (weights * worth / 0.3) @ torch.from_numpy(keys).double(), atol=1e-9)


def test_the_order_of_the_records_changes_nothing(
    queries: Tensor, keys: Array, values: Array, rng: np.random.Generator
) -> None:
    order = rng.permutation(40)
    actual = stream(queries, snapshot(keys[order], values[order]), Cosine(), 0.1)
    output, lse = stream(queries, snapshot(keys, values), Cosine(), 0.1)
    _equal(actual, (output.numpy(), lse.numpy()))


@every_score
@pytest.mark.parametrize("temperature", [1e-3, 0.1, 10])
def test_the_answer_lies_among_the_values(
    score: Score, equation: reference.Score, temperature: float, queries: Tensor, keys: Array, values: Array
) -> None:
    output, _ = stream(queries.float(), snapshot(keys, values), score, temperature)
    assert (output >= torch.from_numpy(values.min(0)) - 1e-6).all()
    assert (output <= torch.from_numpy(values.max(0)) + 1e-6).all()


# -- the ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@every_score
@pytest.mark.parametrize("temperature", [1e-12, 1e-300])
def test_a_tiny_temperature_gives_the_nearest_record(
    score: Score, equation: reference.Score, temperature: float, keys: Array, values: Array, rng: np.random.Generator
) -> None:
    queries = rng.standard_normal((6, D)).astype(np.float32)
    keys[1] = keys[0] + 1  # no ties for the best place
    expected = [values[best[0]] for best in reference.nearest(equation, queries, keys, 1)]
    output, _ = stream(torch.from_numpy(queries), snapshot(keys, values), score, temperature)
    np.testing.assert_allclose(output, expected, rtol=1e-6)


@pytest.mark.usefixtures("small")
def test_ties_share_at_a_tiny_temperature(values: Array) -> None:
    keys = np.zeros((40, D), np.float32)
    keys[[2, 30]] = 1
    output, _ = stream(torch.ones(1, D), snapshot(keys, values), Dot(), 1e-9)
    np.testing.assert_allclose(output[0], (values[2] + values[30]) / 2, rtol=1e-6)


@pytest.mark.usefixtures("small")
@every_score
def test_a_huge_temperature_gives_the_mean_of_all(
    score: Score, equation: reference.Score, queries: Tensor, keys: Array, values: Array
) -> None:
    output, lse = stream(queries.float(), snapshot(keys, values), score, 1e9)
    np.testing.assert_allclose(output, np.tile(values.mean(0), (6, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, math.log(40), rtol=1e-6)


def test_a_single_record_is_the_answer(queries: Tensor, keys: Array, values: Array) -> None:
    leaf = queries.requires_grad_()
    output, lse = stream(leaf, snapshot(keys[:1], values[:1]), Dot(), 0.5)
    np.testing.assert_allclose(output.detach(), np.tile(values[0], (6, 1)))
    np.testing.assert_allclose(lse.detach(), queries.detach() @ torch.from_numpy(keys[0]).double() / 0.5)
    np.testing.assert_allclose(torch.autograd.grad(output.sum(), leaf)[0], np.zeros((6, D)), atol=1e-12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_answer(offset: float, queries: Tensor, values: Array) -> None:
    plain = torch.linspace(-1, 1, 40)

    def score(queries: Tensor, keys: Tensor) -> Tensor:
        return keys[:, 0].expand(len(queries), len(keys)) + 0 * queries.sum()

    worlds = [snapshot(torch.outer(plain * 16 + shift, torch.ones(D)).numpy(), values) for shift in (0, offset)]
    leaves = [queries.float().requires_grad_() for _ in worlds]
    (near, near_lse), (far, far_lse) = (
        stream(leaf, world, score, 4.0) for leaf, world in zip(leaves, worlds, strict=True)
    )
    torch.testing.assert_close(far, near, rtol=0, atol=2e-3)  # the keys themselves have lost digits
    torch.testing.assert_close(far_lse, near_lse + offset / 4)
    assert torch.isfinite(torch.autograd.grad(far.sum() + far_lse.sum(), leaves[1])[0]).all()


def _nothing(keys: Array, values: Array) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    nobody = np.zeros(40, np.bool_)
    return {
        "no segments": lambda q: stream(q, snapshot_without_segments(), Dot(), 1.0, value_dim=V),
        "all deleted": lambda q: stream(q, snapshot(keys, values, nobody), Dot(), 1.0),
        "none allowed": lambda q: stream(q, snapshot(keys, values), Dot(), 1.0, allowed=nobody),
        "all masked": lambda q: stream(
            q, snapshot(keys, values), Cosine(), 1.0, mask=torch.zeros(6, 40, dtype=torch.bool)
        ),
        "all scored out": lambda q: stream(q, snapshot(keys, values), lambda q, k: Dot()(q, k) - math.inf, 1.0),
    }


def snapshot_without_segments() -> Snapshot:
    return Snapshot.of(0, (), np.ones(0, np.bool_))


@pytest.mark.parametrize("case", ["no segments", "all deleted", "none allowed", "all masked", "all scored out"])
def test_no_records_give_zeros_and_no_gradient(case: str, queries: Tensor, keys: Array, values: Array) -> None:
    queries.requires_grad_()
    output, lse = _nothing(keys, values)[case](queries)
    assert output.tolist() == [[0] * V] * 6
    assert lse.tolist() == [-math.inf] * 6
    for loss in (output.sum() + lse.sum(), (output * math.inf).sum() + (lse * math.inf).sum()):
        assert torch.autograd.grad(loss, queries, retain_graph=True)[0].tolist() == [[0] * D] * 6


def test_without_segments_the_width_comes_from_the_schema(queries: Tensor) -> None:
    empty = snapshot_without_segments()
    assert stream(queries, empty, Dot(), 1.0)[0].shape == (6, D)
    assert stream(queries, empty, Dot(), 1.0, num_classes=9)[0].shape == (6, 9)


def test_no_queries_give_no_answers(keys: Array, values: Array) -> None:
    queries = torch.empty(0, D, requires_grad=True)
    output, lse = stream(queries, snapshot(keys, values), Dot(), 1.0)
    assert output.shape == (0, V)
    assert lse.shape == (0,)
    assert torch.autograd.grad(output.sum() + lse.sum(), queries)[0].shape == (0, D)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@every_score
@pytest.mark.parametrize("column", ["values", "labels", "key serves"])
def test_gradients_are_the_derivatives(
    score: Score, equation: reference.Score, column: str, queries: Tensor, keys: Array, values: Array
) -> None:
    stored = {"values": values[:17], "labels": np.arange(17) % CLASSES, "key serves": None}[column]
    live = np.arange(17) % 5 > 0
    world = snapshot(keys[:17], stored, live)
    mask = torch.ones(4, int(live.sum()), dtype=torch.bool)
    mask[0, ::2], mask[1] = False, False
    output_only = stream(queries[2:], world, score, 0.7, mask=mask, num_classes=CLASSES)
    assert not output_only[0].requires_grad

    def answer(queries: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = stream(queries, world, score, 0.7, mask=mask, num_classes=CLASSES)
        return output, lse.nan_to_num(neginf=0)  # the second query is masked out

    assert torch.autograd.gradcheck(answer, queries[2:].clone().requires_grad_())


class General(torch.nn.Module):
    """qᵀWk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(D, D, dtype=torch.float64))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries @ self.weight @ keys.mT


@pytest.mark.usefixtures("small")
def test_a_score_that_is_a_module_learns(queries: Tensor, keys: Array, values: Array) -> None:
    module, world = General(), snapshot(keys, values)
    queries.requires_grad_()
    output, lse = stream(queries, world, module, 0.5)
    actual = torch.autograd.grad((output.sin().sum() + lse.sum()), (queries, module.weight))
    scores = module(queries, torch.from_numpy(keys).double()) / 0.5
    plain = (scores.softmax(1) @ torch.from_numpy(values).double()).sin().sum() + scores.logsumexp(1).sum()
    for one, other in zip(actual, torch.autograd.grad(plain, (queries, module.weight)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("small")
def test_tensors_that_a_callable_hides_are_refused(queries: Tensor, keys: Array, values: Array) -> None:
    world, seed = snapshot(keys, values), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    bandwidth = seed.exp()  # not a leaf, and the queries want no gradient

    def score(queries: Tensor, keys: Tensor) -> Tensor:
        actual: Tensor = NegativeL2()(queries, keys) / bandwidth
        return actual

    with pytest.raises(BadInput, match=r"not its parameters.*nn\.Module"):
        stream(queries, world, score, 1.0)
    with torch.no_grad():
        stream(queries, world, score, 1.0)


def test_a_constant_score_pulls_nowhere(queries: Tensor, keys: Array, values: Array) -> None:
    queries.requires_grad_()
    output, lse = stream(queries, snapshot(keys, values), lambda q, k: torch.ones(len(q), len(k)), 1.0)
    np.testing.assert_allclose(output.detach(), np.tile(values.mean(0), (6, 1)), rtol=1e-5)
    assert torch.autograd.grad(output.sum() + lse.sum(), queries)[0].tolist() == [[0] * D] * 6


def test_a_score_may_differ_in_its_last_digit_in_backward(queries: Tensor, keys: Array, values: Array) -> None:
    def score(queries: Tensor, keys: Tensor) -> Tensor:
        return Dot()(queries, keys) + 1e-6 * torch.is_grad_enabled()

    leaf = queries.float().requires_grad_()
    output, _ = stream(leaf, snapshot(keys, values), score, 1e-30)
    assert torch.isfinite(torch.autograd.grad(output.sum(), leaf)[0]).all()


@pytest.mark.parametrize("loss", [torch.sum, lambda output: output.square().sum()], ids=["linear", "curved"])
def test_a_second_derivative_is_refused(
    loss: Callable[[Tensor], Tensor], queries: Tensor, keys: Array, values: Array
) -> None:
    queries.requires_grad_()
    output, _ = stream(queries, snapshot(keys, values), Dot(), 1.0)
    (plain,) = torch.autograd.grad(loss(output), queries, retain_graph=True)
    (grad,) = torch.autograd.grad(loss(output), queries, create_graph=True)
    assert torch.equal(grad, plain)
    with pytest.raises(BadInput, match="no second derivative"):  # though the queries have another path to the loss
        torch.autograd.grad(grad.sum() + queries.square().sum(), queries)


def test_a_score_of_the_wrong_shape_is_refused(queries: Tensor, keys: Array, values: Array) -> None:
    with pytest.raises(BadInput, match=r"returned shape \(6, 1\).*expected a tensor \(6, 40\)"):
        stream(queries, snapshot(keys, values), lambda q, k: q[:, :1], 1.0)


def test_autocast_costs_no_digits(queries: Tensor, keys: Array, values: Array) -> None:
    world, leaf = snapshot(keys, values), queries.float().requires_grad_()
    expected = stream(leaf, world, Dot(), 0.3)
    (expected_grad,) = torch.autograd.grad(expected[0].sum(), leaf, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = stream(leaf, world, Dot(), 0.3)
        (grad,) = torch.autograd.grad(actual[0].sum(), leaf)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert torch.equal(grad, expected_grad)


def test_mapped_columns_are_read_in_place(tmp_path: Path, queries: Tensor, keys: Array, values: Array) -> None:
    np.save(tmp_path / "keys.npy", keys)
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="c")
    world = Snapshot.of(1, (Segment(0, 0, None, mapped, values),), np.ones(40, np.bool_))
    _equal(stream(queries, world, Dot(), 0.3), reference.soft_query(reference.dot, queries.numpy(), keys, values, 0.3))
    assert np.shares_memory(next(world.blocks(40)).keys.numpy(), mapped)
