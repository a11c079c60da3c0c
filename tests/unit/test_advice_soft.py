"""Following the advice of an error gives the answer: soft queries, temperatures, scores, pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import KEYS, QUERIES, VALUES, Steps, advice, with_values
from torch import Tensor, nn

import softdb
import softdb.train
import softdb.weights
from softdb import nn as soft
from softdb import scores
from softdb.check import Metric

SCORES = {"dot": scores.Dot(), "cosine": scores.Cosine(), "l2": scores.NegativeL2()}


HEAT: Any = torch.tensor(0.5, requires_grad=True)


class Tempered(nn.Module):
    """A score divided by a temperature that is trained."""

    def __init__(self, score: Any, temperature: float, metric: Metric | None = None) -> None:
        super().__init__()
        self.score, self.temperature, self.metric = score, nn.Parameter(torch.tensor(temperature)), metric

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        scored: Tensor = self.score(queries, keys) / self.temperature
        return scored


def expected(metric: str, temperature: Tensor) -> Tensor:
    """The soft answers in float64."""
    queries, keys = QUERIES.double(), torch.from_numpy(KEYS).double()
    compared = {
        "dot": queries @ keys.T,
        "cosine": torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(keys).T,
        "l2": -torch.cdist(queries, keys).square(),
    }[metric]
    return (compared / temperature).softmax(1) @ torch.from_numpy(VALUES).double()


def require_gradient(metric: str, answer: Callable[[Tensor], Tensor]) -> None:
    """A temperature of .7 that is learnt by its logarithm gives the value and the gradient of float64."""
    log, wide = (torch.tensor(0.7).log().to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
    found, right = answer(log.exp()), expected(metric, wide.exp())
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)
    found.square().sum().backward()  # type: ignore[no-untyped-call]
    right.square().sum().backward()  # type: ignore[no-untyped-call]
    assert wide.grad is not None
    torch.testing.assert_close(log.grad, wide.grad.float(), atol=1e-5, rtol=1e-4)


@advice("to keep a learnt one above 0, learn its logarithm")
def test_a_learnt_temperature_stays_above_0_by_its_logarithm(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: db.attend(QUERIES, temperature=torch.tensor(-0.1, requires_grad=True))
    keys, values = torch.from_numpy(KEYS), torch.from_numpy(VALUES)
    for metric, score in SCORES.items():
        with with_values(metric) as db:
            require_gradient(metric, lambda heat, db=db: db.attend(QUERIES, temperature=heat).output)  # type: ignore[misc]
            require_gradient(metric, lambda heat, db=db: db.attend(QUERIES, temperature=heat, k=50).output)  # type: ignore[misc]
            view = soft.View(db, nn.Identity())
            require_gradient(metric, lambda heat, view=view: view.attend(QUERIES, temperature=heat).output)  # type: ignore[misc]
        require_gradient(
            metric,
            lambda heat, score=score: softdb.attention(QUERIES, keys, values, score=score, temperature=heat),  # type: ignore[misc]
        )


@advice("a memory trains only an nn.Parameter; pass one, or its item()")
def test_a_temperature_of_a_memory_is_a_parameter_or_a_number(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: soft.Memory(db, k=9, temperature=HEAT)
        heat, wide = nn.Parameter(HEAT.detach()), HEAT.detach().double().requires_grad_()
        soft.Memory(db, k=50, temperature=heat)(QUERIES).output.square().sum().backward()  # type: ignore[no-untyped-call]
        expected("dot", wide).square().sum().backward()  # type: ignore[no-untyped-call]
        assert wide.grad is not None
        torch.testing.assert_close(heat.grad, wide.grad.float(), atol=1e-5, rtol=1e-4)
        memory = soft.Memory(db, k=50, temperature=HEAT.item())
        torch.testing.assert_close(
            memory(QUERIES).output.double(), expected("dot", HEAT.double()), atol=1e-5, rtol=1e-5
        )


@advice(
    "ask a database for the k nearest (k=), which is made of plain torch operations, or leave out create_graph=True"
)
def test_second_derivatives_are_of_the_nearest(folder: Path) -> Steps:
    def twice(**words: Any) -> Tensor:
        queries = QUERIES.clone().requires_grad_()
        output = db.attend(queries, **words).output.square().sum()
        (first,) = torch.autograd.grad(output, queries, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), queries)
        return second

    with with_values() as db:
        yield lambda: twice()
        queries = QUERIES.double().requires_grad_()
        keys, values = torch.from_numpy(KEYS).double(), torch.from_numpy(VALUES).double()
        output = ((queries @ keys.T).softmax(1) @ values).square().sum()
        (first,) = torch.autograd.grad(output, queries, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), queries)
        torch.testing.assert_close(twice(k=50).double(), second, atol=1e-3, rtol=1e-3)


@advice("make the score an nn.Module, or detach the tensors")
def test_a_score_with_parameters_is_a_module(folder: Path) -> Steps:
    weight = torch.eye(4, requires_grad=True)
    with with_values() as db:
        yield lambda: db.attend(QUERIES, score=lambda queries, keys: queries @ weight @ keys.T)
        module = scores.General(4, 4)
        db.attend(QUERIES, score=module).output.sum().backward()  # type: ignore[no-untyped-call]
        assert next(module.parameters()).grad is not None
        detached = weight.detach()
        answer = db.attend(QUERIES, score=lambda queries, keys: queries @ detached @ keys.T).output
        torch.testing.assert_close(answer, db.attend(QUERIES).output)


@advice("leave it at 1 and set the kernel's bandwidth, or use softmax")
def test_normalised_weights_have_a_bandwidth(folder: Path) -> Steps:
    with with_values("l2") as db:
        yield lambda: db.attend(QUERIES, score=scores.Gaussian(1.0), weights="normalised", temperature=2)
        wide = db.attend(QUERIES, score=scores.Gaussian(2**0.5), weights="normalised").output
        torch.testing.assert_close(wide, db.attend(QUERIES, temperature=4).output, atol=1e-5, rtol=1e-5)


@advice("use softmax, or a score that is a kernel")
def test_normalised_weights_are_of_kernels(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: db.attend(QUERIES, score=lambda queries, keys: queries @ keys.T, weights="normalised")
        assert (
            db.attend(QUERIES, score=lambda queries, keys: queries @ keys.T, weights="softmax").output.isfinite().all()
        )
        assert db.attend(QUERIES, score=scores.Gaussian(1.0), weights="normalised").output.isfinite().all()


@advice("omit the tolerance for the exact answer, or give k")
def test_no_estimate_of_sparse_weights(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: db.attend(QUERIES, weights="sparsemax", rtol=0.1)
        exact = db.attend(QUERIES, weights="sparsemax").output
        torch.testing.assert_close(db.attend(QUERIES, weights="sparsemax", k=50).output, exact)


@advice("query with k=, or with need_weights=True")
def test_a_heat_map_needs_weights(folder: Path) -> Steps:
    plots = pytest.importorskip("softdb.plots")
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    with with_values() as db:
        yield lambda: plots.attention_heatmap(None, db.attend(QUERIES))
        for words in ({"k": 5}, {"need_weights": True}):
            (image,) = plots.attention_heatmap(None, db.attend(QUERIES, **words)).get_images()
            np.testing.assert_allclose(image.get_array().sum(1), 1, rtol=1e-5)


@advice("give learnable=True and train the score's log_bandwidth")
def test_a_bandwidth_is_trained(folder: Path) -> Steps:
    yield lambda: scores.Gaussian(torch.ones((), requires_grad=True))
    with with_values("l2") as db:
        score = scores.Gaussian(1.0, learnable=True)
        db.attend(QUERIES, score=score).output.sum().backward()  # type: ignore[no-untyped-call]
        assert score.log_bandwidth is not None
        assert score.log_bandwidth.grad is not None


@advice("give query_dim=, key_dim= and hidden= for new ones, or")
def test_an_additive_score_has_weights(folder: Path) -> Steps:
    yield lambda: scores.Additive()
    weights = torch.ones(8, 4), torch.ones(8, 4), torch.ones(8)
    for score in (scores.Additive(query_dim=4, key_dim=4, hidden=8), scores.Additive(weights=weights)):
        assert score(QUERIES, torch.from_numpy(KEYS)).shape == (3, 50)


@advice("give query_dim= and key_dim= for new ones, or weights=(w_q (query_dim,), w_k (key_dim,))")
def test_a_linear_additive_score_has_weights(folder: Path) -> Steps:
    yield lambda: scores.LinearAdditive()
    for score in (
        scores.LinearAdditive(query_dim=4, key_dim=4),
        scores.LinearAdditive(weights=torch.ones(2, 4).unbind()),
    ):
        assert score(QUERIES, torch.from_numpy(KEYS)).shape == (3, 50)


@advice("got both widths and weights=; give only weights=, which have the widths")
def test_an_additive_score_takes_one_of_both(folder: Path) -> Steps:
    yield lambda: scores.LinearAdditive(query_dim=4, key_dim=4, weights=torch.ones(2, 4).unbind())
    assert scores.LinearAdditive(weights=torch.ones(2, 4).unbind())(QUERIES, torch.from_numpy(KEYS)).shape == (3, 50)


class Halves:
    """A weighting that is none of softdb's."""

    name, sparse = "halves", False

    def weigh(self, scored: Tensor, temperature: float, live: Tensor) -> Any:
        return softdb.weights.Softmax().weigh(scored, temperature, live)


@advice("needs all scores at once, which an exact query does not store; pass k=, or use one of softdb.weights")
def test_a_weighting_of_ones_own_weighs_the_nearest(folder: Path) -> Steps:
    with with_values() as db:
        yield lambda: db.attend(QUERIES, weights=Halves())
        exact = db.attend(QUERIES, weights=softdb.weights.Softmax()).output
        torch.testing.assert_close(db.attend(QUERIES, weights=Halves(), k=50).output, exact)
