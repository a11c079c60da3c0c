"""Weights of the queries in every loss, against float64 loops: a weight of 2 is a query twice, a weight of 0 none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds.retrieval import CLASSES, POSITIVES, Q, asking, log_sum, logits_of, with_keys

from softdb import nn
from softdb.errors import BadInput
from softdb.nn import info_nce, label_loss, pooled_loss, retrieval_loss
from softdb.scores import Boxcar

WEIGHTS = [0.5, 2.0, 0.0, 1.25]
Loss = Callable[..., Tensor]


@functools.cache
def losses() -> dict[str, tuple[Loss, list[Any]]]:
    """Each loss as a function of queries and targets, and a target for each query."""
    db, _ = with_keys()
    labelled, _ = with_keys(num_classes=CLASSES)
    valued, _ = with_keys(value_dim=2)
    goals = list(torch.arange(2.0 * Q, dtype=torch.float64).reshape(Q, 2))

    def pooled(queries: Tensor, targets: Any, **words: Any) -> Tensor:
        return pooled_loss(valued, queries, torch.stack(targets), **words)

    return {
        "retrieval": (functools.partial(retrieval_loss, db), POSITIVES),
        "truncated": (functools.partial(retrieval_loss, db, k=3), POSITIVES),
        "info_nce": (functools.partial(info_nce, db, negatives=4, temperature=1.0), POSITIVES),
        "batch alone": (functools.partial(info_nce, db, negatives=0, temperature=1.0), POSITIVES),
        "hard alone": (functools.partial(info_nce, db, negatives=4, in_batch=False), POSITIVES),
        "label": (functools.partial(label_loss, labelled), [0, 2, 1, 1]),
        "pooled": (pooled, goals),
    }


NAMES = ["retrieval", "truncated", "info_nce", "batch alone", "hard alone", "label", "pooled"]


def test_the_mean_is_that_of_a_float64_loop() -> None:
    db, keys = with_keys()
    queries, total = asking(), 0.0
    for weight, logits, right in zip(WEIGHTS, logits_of(queries, keys, "dot", 0.7), POSITIVES, strict=True):
        own = [logits[i] for i in ([right] if isinstance(right, int) else right)]
        total += weight * (log_sum(logits) - log_sum(own))
    weighed = functools.partial(retrieval_loss, db, queries, POSITIVES, temperature=0.7, sample_weight=WEIGHTS)
    assert weighed().item() == pytest.approx(total / sum(WEIGHTS), abs=1e-9)
    assert weighed(reduction="sum").item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("info_nce", "batch alone")])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_reductions_weigh_the_losses_and_their_gradients(name: str, form: Any) -> None:
    loss, targets = losses()[name]
    queries, weights = asking(), torch.tensor(WEIGHTS, dtype=torch.float64)
    each = loss(queries, targets, reduction="none")
    for reduction, expected in (
        ("none", each * weights), ("sum", (each * weights).sum()), ("mean", (each * weights).sum() / weights.sum()),
    ):  # fmt: skip
        actual = loss(queries, targets, reduction=reduction, sample_weight=form(WEIGHTS))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)
        gradients = [torch.autograd.grad(value.sum(), queries, retain_graph=True)[0] for value in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_2_is_a_query_twice_and_a_weight_of_0_is_none(name: str) -> None:
    loss, targets = losses()[name]
    counts = [2, 0, 1, 3]
    queries, again = asking(), asking()
    order = [i for i, count in enumerate(counts) for _ in range(count)]
    weighed = loss(queries, targets, sample_weight=torch.tensor(counts))
    repeated = loss(again[order], [targets[i] for i in order])
    torch.testing.assert_close(weighed, repeated, rtol=1e-9, atol=1e-12)
    gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((weighed, queries), (repeated, again))]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert not gradients[0][1].any()


@pytest.mark.parametrize("name", ["retrieval", "label", "pooled"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradients_of_queries_and_weights(name: str, reduction: str) -> None:
    loss, targets = losses()[name]
    weights = torch.tensor([0.5, 2.0, 0.3, 1.25], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, w: loss(q, targets, sample_weight=w, reduction=reduction), (asking(), weights)
    )


def test_an_infinite_loss_of_weight_0_does_not_count() -> None:
    db, keys = with_keys("l2")
    near = torch.tensor(keys[[10, 0]]).requires_grad_()  # the kernel does not reach the second positive
    words: dict[str, Any] = {"score": Boxcar(1e-3), "sample_weight": [1.0, 0.0]}
    loss = retrieval_loss(db, near, [10, 11], **words)
    assert loss.item() == pytest.approx(retrieval_loss(db, near[:1], [10], score=Boxcar(1e-3)).item())
    loss.backward()  # type: ignore[no-untyped-call]
    assert near.grad is not None
    assert bool(near.grad.isfinite().all())


def test_views_and_memories_weigh_alike_and_gradients_reach_the_encoder() -> None:
    db, keys = with_keys()
    encoder = torch.nn.Linear(keys.shape[1], keys.shape[1], bias=False)
    torch.nn.init.eye_(encoder.weight)
    cases: list[tuple[Loss, dict[str, Any]]] = [
        (retrieval_loss, {}), (info_nce, {"negatives": 4, "temperature": 0.3}),
        (info_nce, {"negatives": 0, "temperature": 0.3}),
    ]  # fmt: skip
    for loss, words in cases:
        expected = loss(db, asking(), POSITIVES, sample_weight=WEIGHTS, **words)
        for records in (nn.View(db, encoder), nn.Memory(db, k=len(keys))):
            actual = loss(records, asking(), POSITIVES, sample_weight=WEIGHTS, **words)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("negatives", [0, 4])
def test_a_batch_of_a_view_has_the_gradient_of_a_float64_loop(negatives: int) -> None:
    db, keys = with_keys()
    encoder = torch.nn.Linear(keys.shape[1], 3, bias=False).double()
    queries = torch.randn(Q, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = info_nce(nn.View(db, encoder), queries, POSITIVES, negatives=negatives, temperature=0.5)
    twin = encoder.weight.detach().clone().requires_grad_()
    scores = queries @ (torch.tensor(keys) @ twin.T).T / 0.5
    lists = [right if isinstance(right, list) else [right] for right in POSITIVES]
    batch, total = {i for right in lists for i in right}, torch.zeros((), dtype=torch.float64)
    for i, right in enumerate(lists):
        ranked = [j for j in scores[i].argsort(descending=True, stable=True).tolist() if j not in right]
        every = sorted(batch | set(ranked[:negatives]))
        total = total + (scores[i, every].logsumexp(0) - scores[i, right].logsumexp(0)) / Q
    torch.testing.assert_close(actual, total, rtol=1e-6, atol=1e-8)
    gradients = torch.autograd.grad(actual, encoder.weight)[0], torch.autograd.grad(total, twin)[0]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1, 1, 1], r"shape \(3,\); expected \(4,\)"), (torch.ones(4, 1), r"shape \(4, 1\); expected \(4,\)"),
        (2.0, r"shape \(\); expected \(4,\)"), ([1, -0.5, 1, 1], "least number is -0.5"),
        ([0, 0, 0, 0], "the sum 0; expected no negative number, and a finite sum above zero"),
        ([1, float("nan"), 1, 1], "hold NaN or infinity in 1 of 4 rows, first in row 1"),
        ([1, float("inf"), 1, 1], "hold NaN or infinity"), ([1e308] * 4, "the sum inf"), (["a"] * 4, "of type <U1"),
        ([True] * 4, "of type bool"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["retrieval", "batch alone", "label", "pooled"])
def test_senseless_weights_are_refused(name: str, weights: Any, match: str) -> None:
    loss, targets = losses()[name]
    with pytest.raises(BadInput, match=f"sample_weight.*{match}"):
        loss(asking(), targets, sample_weight=weights)


def test_refused_weights_use_no_random_numbers() -> None:
    (db, _), (valued, _) = with_keys(), with_keys(value_dim=2)
    draws = torch.Generator().manual_seed(3)
    before = draws.get_state()
    asks: list[Callable[[], Tensor]] = [
        lambda: info_nce(db, asking(), POSITIVES, negatives=2, among=5, generator=draws, sample_weight=[1.0]),
        lambda: pooled_loss(valued, asking(), torch.ones(Q, 2), rtol=0.5, generator=draws, sample_weight=[1.0]),
    ]
    for ask in asks:
        with pytest.raises(BadInput, match=r"sample_weight has shape \(1,\)"):
            ask()
    assert torch.equal(draws.get_state(), before)
