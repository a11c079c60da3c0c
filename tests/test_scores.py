"""Scores against the equations: values, precision, gradients, dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from worlds import awkward

from softdb import scores
from softdb.check import Metric
from softdb.errors import BadInput
from softdb.scores import Cosine, Dot, NegativeL2, ScaledDot, Score, metric_of, score_of

PAIRS = {
    "dot": (Dot(), reference.dot),
    "scaled dot": (ScaledDot(), reference.scaled_dot),
    "cosine": (Cosine(), reference.cosine),
    "l2": (NegativeL2(), reference.negative_l2),
}
every_score = pytest.mark.parametrize(("score", "equation"), PAIRS.values(), ids=PAIRS.keys())


def _worlds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((60, 16)).astype(np.float32)
    far_groups = plain.copy()
    far_groups[::2] += 1000
    wide_column = plain.copy()
    wide_column[:, 0] *= 1e5
    return {
        "plain": plain,
        "awkward": awkward(rng, 60, 16),
        "near duplicates, far out": (100 + 1e-3 * plain).astype(np.float32),
        "far groups": far_groups,
        "wide column": wide_column,
    }


WORLDS = _worlds()


def _shared_and_own(score: Score, queries: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
    return [score(queries, keys), score(queries, keys.expand(len(queries), *keys.shape))]


@every_score
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scores_are_the_equation(score: Score, equation: reference.Score, world: str, dtype: str) -> None:
    stored = WORLDS[world].astype(dtype) if dtype == "float32" else np.clip(WORLDS[world], -6e4, 6e4).astype(dtype)
    keys = torch.from_numpy(stored)
    queries = torch.from_numpy(np.concatenate([WORLDS[world][:5], WORLDS[world][:3] + np.float32(1e-3)]))
    expected = reference.scores(equation, queries.numpy(), stored)
    # the project's tolerance, and the rounding of the answer itself where a short query meets a long key
    bound = 1e-5 * np.linalg.norm(queries.double(), axis=1)[:, None] * np.linalg.norm(stored.astype(float), axis=1)
    if isinstance(score, Cosine):
        bound = np.full_like(bound, 2e-6)
    for found in _shared_and_own(score, queries, keys):
        assert found.dtype is torch.float32
        assert found.shape == expected.shape
        assert (np.abs(found.double().numpy() - expected) <= bound + 1e-6 * np.abs(expected)).all()


@pytest.mark.parametrize("world", ["near duplicates, far out", "far groups", "wide column"])
def test_distances_of_near_duplicates_are_not_lost(world: str) -> None:
    """‖q‖‖k‖ is large here, so the project's tolerance says little: the distance itself must be right."""
    keys = torch.from_numpy(WORLDS[world])
    queries = (keys[:8].double() + 0.01).float()
    expected = reference.scores(reference.negative_l2, queries.numpy(), keys.numpy())
    for found in _shared_and_own(NegativeL2(), queries, keys):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_a_distance_is_never_negative() -> None:
    keys = torch.from_numpy(WORLDS["wide column"])
    assert (NegativeL2()(keys, keys) <= 0).all()


def test_many_keys_are_widened_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.from_numpy(WORLDS["awkward"])
    whole = NegativeL2()(keys[:5], keys)
    monkeypatch.setattr(scores, "WIDENED", 7)
    torch.testing.assert_close(NegativeL2()(keys[:5], keys), whole)


@every_score
def test_float64_queries_give_float64_scores(score: Score, equation: reference.Score) -> None:
    keys, queries = WORLDS["awkward"], WORLDS["awkward"][:6].astype(np.float64) + 0.1
    for found in _shared_and_own(score, torch.from_numpy(queries), torch.from_numpy(keys)):
        np.testing.assert_allclose(found, reference.scores(equation, queries, keys), rtol=1e-12, atol=1e-12)


@every_score
def test_gradients_are_the_derivatives(score: Score, equation: reference.Score) -> None:
    torch.manual_seed(0)
    queries = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for shape in ((5, 4), (3, 5, 4)):
        keys = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(score, (queries, keys))


@every_score
def test_gradients_are_finite_at_zero_vectors_and_duplicates(score: Score, equation: reference.Score) -> None:
    keys = torch.from_numpy(WORLDS["awkward"]).clone().requires_grad_()
    queries = torch.cat([torch.zeros(1, 16), keys.detach()[:5]]).requires_grad_()
    for found in _shared_and_own(score, queries, keys):
        for grad in torch.autograd.grad(found.sum(), (queries, keys)):
            assert torch.isfinite(grad).all()


def test_cosine_of_a_zero_vector_is_zero_and_pulls_nowhere() -> None:
    queries = torch.tensor([[0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    found = Cosine()(queries, torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    assert found[0].tolist() == [0, 0]
    assert found[1, 0] == 0
    assert torch.autograd.grad(found[0].sum(), queries)[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_cosine_knows_no_size(size: float) -> None:
    queries, keys = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])
    for found in _shared_and_own(Cosine(), queries * size, keys) + _shared_and_own(Cosine(), queries, keys * size):
        assert found.item() == pytest.approx(0.96, rel=1e-6)


@every_score
def test_no_keys_give_no_scores(score: Score, equation: reference.Score) -> None:
    queries = torch.ones(2, 3, requires_grad=True)
    for found in _shared_and_own(score, queries, torch.empty(0, 3)):
        assert found.shape == (2, 0)
        (grad,) = torch.autograd.grad(found.sum(), queries)
        assert grad.tolist() == torch.zeros(2, 3).tolist()


def test_metrics_and_scores_name_each_other() -> None:
    assert [type(score_of(metric)) for metric in Metric] == [Dot, Cosine, NegativeL2]
    assert all(metric_of(score_of(metric)) is metric for metric in Metric)
    assert metric_of(ScaledDot()) is Metric.DOT
    assert Dot() == Dot()


def test_no_index_finds_for_a_plain_callable() -> None:
    with pytest.raises(BadInput, match=r"names no metric.*leave out k"):
        metric_of(lambda queries, keys: queries @ keys.mT)
