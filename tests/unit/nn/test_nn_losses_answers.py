"""Losses over answers against loops in float64; errors of all losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from worlds import D, N, holding
from worlds.retrieval import CLASSES, POSITIVES, Q, asking, clustered, log_sum, logits_of, with_keys

import softdb
import softdb.nn.losses
from softdb.errors import BadInput, Closed, UnknownId
from softdb.nn import info_nce, label_loss, pooled_loss, retrieval_loss
from softdb.scores import Gaussian

# -- label_loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 15])
@pytest.mark.parametrize("share", [None, 0.0, 0.25, 1.0])
def test_labels_are_those_of_the_mixture(k: int | None, share: float | None) -> None:
    db, keys = with_keys(num_classes=CLASSES)
    queries, labels = asking(), [0, 2, 1, 1]
    model = torch.randn(Q, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = []
    for i, mine in enumerate(logits_of(queries, keys, "dot", 0.6)):
        nearest = sorted(range(N), key=lambda j, mine=mine: -mine[j])[:k]  # type: ignore[misc]
        whole = log_sum([mine[j] for j in nearest])
        p = sum(math.exp(mine[j] - whole) for j in nearest if j % CLASSES == labels[i])
        if share is not None:
            others = [math.exp(one) for one in model[i].tolist()]
            p = share * p + (1 - share) * others[labels[i]] / sum(others)
        expected.append(-math.log(p))
    words: dict[str, Any] = {} if share is None else {"logits": model, "interpolation": share}
    actual = label_loss(db, queries, labels, temperature=0.6, k=k, reduction="none", **words)
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-9)
    mean = label_loss(db, queries, torch.tensor(labels), temperature=0.6, k=k, **words)
    assert mean.item() == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("k", [None, 15])
def test_the_gradient_of_labels(k: int | None) -> None:
    db, _ = with_keys(num_classes=CLASSES)
    model = torch.randn(Q, CLASSES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, m: label_loss(db, q, [0, 2, 1, 1], logits=m, k=k, reduction="none"), (asking(), model)
    )
    assert torch.autograd.gradcheck(lambda q: label_loss(db, q, [0, 2, 1, 1], k=k, reduction="none"), asking())


def test_a_label_without_weight_costs_100_and_its_gradient_is_zero() -> None:
    db = holding([[1, 0], [1, 0], [0, 1], [0, 1]], [0, 0, 1, 1], num_classes=3)
    queries = torch.tensor([[5.0, 0.0], [5.0, 0.0], [500.0, 0.0]], requires_grad=True)
    loss = label_loss(db, queries, [2, 0, 1], reduction="none")  # none has it, all have it, it underflows
    assert loss.tolist() == [100, pytest.approx(0.0067, abs=1e-4), 100]
    truncated = label_loss(db, queries, [1, 0, 1], k=2, reduction="none")
    assert truncated.tolist() == [100, 0, 100]
    mixed = label_loss(db, queries, [2, 2, 2], k=2, logits=torch.zeros(3, 3), interpolation=0.25, reduction="none")
    assert mixed.tolist() == [pytest.approx(-math.log(0.75 / 3))] * 3
    (loss.sum() + truncated.sum() + mixed.sum()).backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert bool(queries.grad.isfinite().all())
    assert torch.equal(queries.grad[[0, 2]], torch.zeros(2, 2))
    assert float(queries.grad[1].abs().max()) > 1e-4


def test_impossible_logits_of_a_model() -> None:
    db = holding([[1, 0]], [0], ids=[1], num_classes=2)
    model = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    queries = torch.ones(1, 2, requires_grad=True)
    loss = label_loss(db, queries, [1], logits=model)
    assert loss.item() == 100
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.grad is not None
    assert bool(model.grad.isfinite().all())


def test_labels_over_no_records_cost_100() -> None:
    db = softdb.open(None, dim=2, num_classes=2)
    queries = torch.ones(1, 2, requires_grad=True)
    assert label_loss(db, queries, [1]).item() == 100
    assert label_loss(db, queries, [1], logits=torch.zeros(1, 2)).item() == pytest.approx(-math.log(0.75 / 2))


@pytest.mark.parametrize("k", [None, 7])
def test_pooled_values_meet_their_targets(k: int | None) -> None:
    db, keys = with_keys(value_dim=3)
    queries = asking()
    stored = db.get(range(N)).values
    assert stored is not None
    targets = torch.randn(Q, 3, dtype=torch.float64, requires_grad=True)
    expected = []
    for i, mine in enumerate(logits_of(queries, keys, "dot", 0.6)):
        nearest = sorted(range(N), key=lambda j, mine=mine: -mine[j])[:k]  # type: ignore[misc]
        whole = log_sum([mine[j] for j in nearest])
        output = np.sum([math.exp(mine[j] - whole) * stored[j].double().numpy() for j in nearest], axis=0)
        expected.append(sum((a - b) ** 2 for a, b in zip(output, targets[i].tolist(), strict=True)))
    actual = pooled_loss(db, queries, targets, temperature=0.6, k=k, reduction="none")
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-9)
    torch.testing.assert_close(pooled_loss(db, queries, targets, temperature=0.6, k=k), actual.mean())
    assert torch.autograd.gradcheck(lambda q, t: pooled_loss(db, q, t, temperature=0.6, k=k), (queries, targets))


def test_the_brier_score_of_a_distribution() -> None:
    db, _ = with_keys(num_classes=CLASSES)
    targets = torch.eye(CLASSES, dtype=torch.float64)[[0, 1, 2, 0]]
    output = db.attend(asking()).output
    torch.testing.assert_close(pooled_loss(db, asking(), targets), (output - targets).square().sum(1).mean())


def test_an_estimated_pooled_loss_falls_under_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
    db, queries, positives = clustered()
    targets = db.get([positive[1] for positive in positives]).keys
    generator = torch.Generator().manual_seed(0)
    leaf = queries.clone().requires_grad_()
    before = pooled_loss(db, leaf, targets, temperature=0.1).item()
    optimizer = torch.optim.Adam([leaf], lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        pooled_loss(db, leaf, targets, temperature=0.1, rtol=0.2, generator=generator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert pooled_loss(db, leaf, targets, temperature=0.1).item() < 0.6 * before


@pytest.mark.parametrize(
    ("positives", "words", "error", "message"),
    [
        ([1, 2, 3, 99], {}, UnknownId, "id 99 is not stored"),
        ([1, 2, "3", 4], {}, UnknownId, "id '3' is not stored"),
        ([1, 2, [], 4], {}, BadInput, "query 2 has no positives"),
        ([1, 2, 3], {}, BadInput, "positives are 3 for 4 queries"),
        (7, {}, BadInput, "positives are 1 for 4 queries"),
        ([1, 2, 3, 4.5], {}, BadInput, "id 4.5 is of type float"),
        ([1, 2, 3, None], {}, BadInput, "id None is of type NoneType"),
        ([1, 3, 5, 4], {"where": {"odd": True}}, BadInput, r"positive 4 \(1 of 4\) is outside the filter"),
        ([1, 2, 3, 4], {"temperature": 0}, BadInput, "temperature is 0; expected"),
        ([1, 2, 3, 4], {"score": "dot"}, BadInput, "score is 'dot'; expected"),
        ([1, 2, 3, 4], {"reduction": "average"}, BadInput, "reduction is 'average'; expected 'mean'"),
        ([1, 2, 3, 4], {"reduction": ["mean"]}, BadInput, r"reduction is \['mean'\]; expected 'mean'"),
    ],
)
@pytest.mark.parametrize("loss", [retrieval_loss, info_nce])
def test_positives_that_cannot_be(
    loss: Any, positives: Any, words: dict[str, Any], error: type[Exception], message: str
) -> None:
    db, _ = with_keys()
    with pytest.raises(error, match=message):
        loss(db, asking(), positives, **words)


@pytest.mark.parametrize(
    ("loss", "words", "message"),
    [
        (retrieval_loss, {"k": 0}, "k is 0; expected a whole number"),
        (retrieval_loss, {"k": 5, "rtol": 0.1}, "k and a tolerance are both given"),
        (retrieval_loss, {"max_draws": 5}, "max_draws bounds an estimate"),
        (retrieval_loss, {"rtol": -1.0}, "rtol is -1.0; expected"),
        (info_nce, {"negatives": -1}, "negatives is -1; expected"),
        (info_nce, {"negatives": 0, "in_batch": False}, "which leaves no negatives; change one"),
        (info_nce, {"among": 3}, "among is 3 but negatives 16"),
        (info_nce, {"skip": 0.5}, "skip is 0.5; expected"),
    ],
)
def test_words_that_cannot_be(loss: Any, words: dict[str, Any], message: str) -> None:
    db, _ = with_keys()
    with pytest.raises(BadInput, match=message):
        loss(db, asking(), [1, 2, 3, 4], **words)


@pytest.mark.parametrize(
    ("labels", "words", "message"),
    [
        ([0, 1, 2, 3], {}, "label 3 of query 3 is out of range; expected 0 to 2"),
        ([0, -1, 2, 1], {}, "label -1 of query 1 is out of range"),
        ([0.0, 1.0, 2.0, 0.0], {}, "labels have dtype torch.float32"),
        ([[0], [1], [2], [0]], {}, "labels are 4 × 1 for 4 queries"),
        ([0, 1, 2], {}, "labels are 3 for 4 queries"),
        ([0, 1, 2, 0], {"interpolation": 1.5}, "interpolation is 1.5; expected a number from 0 to 1"),
        ([0, 1, 2, 0], {"logits": torch.zeros(4, 2)}, r"logits have shape \(4, 2\); expected \(4, 3\)"),
        ([0, 1, 2, 0], {"logits": [[0.0]]}, "logits are .*expected a floating tensor"),
    ],
)
def test_labels_that_cannot_be(labels: Any, words: dict[str, Any], message: str) -> None:
    db, _ = with_keys(num_classes=CLASSES)
    with pytest.raises(BadInput, match=message):
        label_loss(db, asking(), labels, **words)


def test_databases_and_targets_that_cannot_be() -> None:
    db, _ = with_keys()
    with pytest.raises(BadInput, match="holds no labels"):
        label_loss(db, asking(), [0, 1, 2, 0])
    with pytest.raises(BadInput, match=r"targets have shape \(1, 5\); expected \(4, 5\)"):
        pooled_loss(db, asking(), torch.zeros(1, D))
    with pytest.raises(BadInput, match="db is 'path'; expected an open"):
        retrieval_loss("path", asking(), [1, 2, 3, 4])  # type: ignore[arg-type]
    with pytest.raises(UnknownId, match="id 1 is not stored"):
        retrieval_loss(softdb.open(None, dim=D), asking(), [1, 2, 3, 4])
    db.close()
    for call in (retrieval_loss, info_nce):
        with pytest.raises(Closed, match="closed"):
            call(db, asking(), [1, 2, 3, 4])
    with pytest.raises(Closed, match="closed"):
        label_loss(db, asking(), [1, 2, 0, 1])


def test_info_nce_is_cold_for_cosines_and_not_for_kernels() -> None:
    db, _ = with_keys("cosine")
    queries, kernel = asking(), Gaussian(2.0)
    for score, temperature in ((None, 0.07), (kernel, 1.0)):
        plain = info_nce(db, queries, POSITIVES, score=score)
        assert torch.equal(plain, info_nce(db, queries, POSITIVES, score=score, temperature=temperature))
    assert not torch.equal(info_nce(db, queries, POSITIVES), info_nce(db, queries, POSITIVES, temperature=0.5))


@pytest.mark.parametrize("labels", [["a"], [None], [[0], [1, 2]], torch.ones(1, dtype=torch.complex64)])
def test_labels_that_are_no_numbers(labels: Any) -> None:
    db, _ = with_keys(num_classes=CLASSES)
    with pytest.raises(BadInput, match=r"labels (are|have dtype) .*; expected \(q,\) whole numbers, 0 to 2"):
        label_loss(db, asking(q=1), labels)


@pytest.mark.parametrize("value", [0.1, None])
def test_an_argument_that_attend_does_not_take_is_an_error(value: Any) -> None:
    db, _ = with_keys()
    with pytest.raises(TypeError, match="a loss got unexpected arguments: temprature"):
        pooled_loss(db, asking(), torch.zeros(Q, D), temprature=value)  # type: ignore[call-arg]
