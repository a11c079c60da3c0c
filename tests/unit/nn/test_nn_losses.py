"""Losses over a database, against loops in float64 written from their equations."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import Floats, cosine, dot, negative_l2
from torch import Tensor
from worlds import awkward

import softdb
import softdb.nn.losses
from softdb import nn
from softdb.errors import BadInput, Closed, StaleRead, UnknownId
from softdb.nn import info_nce, label_loss, pooled_loss, retrieval_loss
from softdb.scores import Boxcar, Gaussian, General

N, D, Q, CLASSES = 40, 5, 4, 3
POSITIVES: list[Any] = [3, [0, 1], [7, 20, 8], [39]]  # a zero key, a pair of duplicates
SCORES: dict[Any, Callable[[Floats, Floats], float]] = {"dot": dot, "cosine": cosine, "l2": negative_l2}


def filled(metric: Any = "dot", **words: Any) -> tuple[softdb.SoftDB, Floats]:
    """A database of awkward records, ids 0 … N - 1, and its keys."""
    keys = awkward(np.random.default_rng(3), N, D)
    db = softdb.open(None, dim=D, metric=metric, **words)
    values: Any = None
    if "value_dim" in words:
        values = np.random.default_rng(4).standard_normal((N, words["value_dim"]))
    elif "num_classes" in words:
        values = np.arange(N) % words["num_classes"]
    db.insert(range(N), keys, values, [{"odd": i % 2 == 1} for i in range(N)])
    return db, keys.astype(np.float64)


def asking(seed: int = 0, q: int = Q) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(q, D, dtype=torch.float64, generator=generator, requires_grad=True)


def lists(positives: list[Any]) -> list[list[int]]:
    return [one if isinstance(one, list) else [one] for one in positives]


def log_sum(logits: list[float]) -> float:
    top = max(logits)
    return math.log(sum(math.exp(one - top) for one in logits)) + top


def logits_of(queries: Tensor, keys: Floats, metric: str, temperature: float) -> list[list[float]]:
    asked = queries.detach().numpy().astype(np.float64)
    return [[SCORES[metric](q, key) / temperature for key in keys] for q in asked]


# -- retrieval_loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_retrieval_is_the_likelihood_of_the_positives(metric: str, temperature: float, dtype: torch.dtype) -> None:
    db, keys = filled(metric, value_dim=3)
    queries = asking().detach().to(dtype)
    expected = []
    for logits, mine in zip(logits_of(queries, keys, metric, temperature), lists(POSITIVES), strict=True):
        share = sum(math.exp(logits[i] - log_sum(logits)) for i in mine)
        expected.append(-math.log(share))
    found = retrieval_loss(db, queries, POSITIVES, temperature=temperature, reduction="none")
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 6, N, 3 * N])
def test_truncated_retrieval_is_over_the_nearest_and_the_positives_each_once(metric: str, k: int) -> None:
    db, keys = filled(metric)
    queries = asking()
    expected = []
    for logits, mine in zip(logits_of(queries, keys, metric, 0.5), lists(POSITIVES), strict=True):
        nearest = sorted(range(N), key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
        union = set(nearest) | set(mine)
        expected.append(log_sum([logits[i] for i in union]) - log_sum([logits[i] for i in mine]))
    found = retrieval_loss(db, queries, POSITIVES, temperature=0.5, k=k, reduction="none")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)
    whole = retrieval_loss(db, queries, POSITIVES, temperature=0.5, reduction="none")
    assert bool((found <= whole + 1e-9).all())
    assert (k >= N) == torch.allclose(found, whole)


@pytest.mark.parametrize("k", [None, 6])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_the_gradient_of_retrieval(k: int | None, metric: str) -> None:
    db, _ = filled(metric)
    assert torch.autograd.gradcheck(
        lambda q: retrieval_loss(db, q, POSITIVES, temperature=0.7, k=k, reduction="none"), asking()
    )


def test_parameters_of_the_score_learn() -> None:
    db, _ = filled()
    score = General(D, D).double()
    retrieval_loss(db, asking().detach(), POSITIVES, score=score).backward()  # type: ignore[no-untyped-call]
    grads = [parameter.grad for parameter in score.parameters()]
    assert grads
    assert all(grad is not None and float(grad.abs().max()) > 1e-3 for grad in grads)


def test_reductions() -> None:
    db, _ = filled()
    each = retrieval_loss(db, asking(), POSITIVES, reduction="none")
    assert each.shape == (Q,)
    torch.testing.assert_close(retrieval_loss(db, asking(), POSITIVES), each.mean())
    torch.testing.assert_close(retrieval_loss(db, asking(), POSITIVES, reduction="sum"), each.sum())


@pytest.mark.parametrize("k", [None, 4])
def test_a_filter_and_deletions_leave_records_out(k: int | None) -> None:
    db, keys = filled()
    db.delete([5, 11])
    queries, positives = asking(), [1, [3, 7], 9, [39, 1]]
    among = [i for i in range(N) if i % 2 and i not in (5, 11)]
    expected = []
    for logits, mine in zip(logits_of(queries, keys, "dot", 1.0), lists(positives), strict=True):
        nearest = sorted(among, key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
        expected.append(log_sum([logits[i] for i in {*nearest, *mine}]) - log_sum([logits[i] for i in mine]))
    found = retrieval_loss(db, queries, positives, k=k, where={"odd": True}, reduction="none")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("k", [None, 6])
def test_half_precision_on_disk_after_a_compaction(tmp_path: Path, k: int | None) -> None:
    keys = awkward(np.random.default_rng(3), N, D).astype(np.float16)
    with softdb.open(tmp_path / "db", dim=D, num_classes=CLASSES, dtype="float16") as db:
        db.insert(range(N), keys, np.arange(N) % CLASSES)
        db.delete([0, 5, 12])
        db.compact()
        among, positives = [i for i in range(N) if i not in (0, 5, 12)], [[3], [1, 6], [7, 20, 8], [39]]
        expected = []
        for logits, mine in zip(logits_of(asking(), keys.astype(np.float64), "dot", 1.0), positives, strict=True):
            nearest = sorted(among, key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
            expected.append(log_sum([logits[i] for i in {*nearest, *mine}]) - log_sum([logits[i] for i in mine]))
        found = retrieval_loss(db, asking(), positives, k=k, reduction="none")
        np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)
        with pytest.raises(UnknownId, match="id 5 is not stored"):
            retrieval_loss(db, asking(), [[3], [1, 5], [7], [39]], k=k)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda ids: [[one] for one in ids]])
def test_ids_come_as_lists_arrays_and_tensors(form: Any) -> None:
    db, _ = filled()
    ids = [4, 2, 30, 2]
    torch.testing.assert_close(retrieval_loss(db, asking(), form(ids)), retrieval_loss(db, asking(), ids))
    twice = [[one, one] for one in ids]  # a set: nothing counts double
    torch.testing.assert_close(retrieval_loss(db, asking(), twice), retrieval_loss(db, asking(), ids))


def test_ids_that_are_text_and_one_query_alone() -> None:
    db = softdb.open(None, dim=2)
    db.insert(["a", "b", 7], [[1, 0], [0, 1], [1, 1]])
    query = torch.tensor([1.0, 0.0])
    expected = -math.log((math.e + 1) / (2 * math.e + 1))
    assert retrieval_loss(db, query, [["a", "b"]]).item() == pytest.approx(expected, abs=1e-6)
    assert retrieval_loss(db, query, "a").item() == pytest.approx(-math.log(math.e / (2 * math.e + 1)), abs=1e-6)


def test_a_kernel_has_its_plain_normalisation() -> None:
    db, keys = filled("l2")
    queries = asking()
    expected = []
    for logits, mine in zip(logits_of(queries, keys, "l2", 1.0), lists(POSITIVES), strict=True):
        kernels = [math.exp(one / (2 * 0.8**2)) for one in logits]
        expected.append(-math.log(sum(kernels[i] for i in mine) / sum(kernels)))
    found = retrieval_loss(db, queries, POSITIVES, score=Gaussian(0.8), reduction="none")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("k", [None, 4])
def test_positives_beyond_a_kernel_cost_infinity_without_gradient(k: int | None) -> None:
    db, keys = filled("l2")
    near = torch.tensor(keys[[10, 10]], requires_grad=True)
    loss = retrieval_loss(db, near, [10, 11], score=Boxcar(1e-3), k=k, reduction="none")
    assert loss.tolist() == [pytest.approx(0), math.inf]
    far = torch.full((1, D), 1e3, dtype=torch.float64, requires_grad=True)  # nothing has any weight
    lost = retrieval_loss(db, far, [10], score=Boxcar(1e-3), k=k)
    assert lost.item() == math.inf
    (loss.sum() + lost).backward()  # type: ignore[no-untyped-call]
    for grad in (near.grad, far.grad):
        assert grad is not None
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.fixture(scope="module")
def clustered() -> tuple[softdb.SoftDB, Tensor, list[list[int]]]:
    """30 000 records of 60 clusters with an IVF index; queries near their positives."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, 16))
    keys = centres[random.integers(0, 60, 30_000)] + 0.7 * random.standard_normal((30_000, 16))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    db = softdb.open(None, dim=16)
    db.insert(range(30_000), keys)
    db.build_index("ivf", recall=0.9)
    positives = random.integers(0, 30_000, (6, 2))
    queries = keys[positives[:, 0]] + 0.1 * random.standard_normal((6, 16))
    return db, torch.tensor(queries, dtype=torch.float32), positives.tolist()


def gradient(
    loss: Callable[..., Tensor], db: softdb.SoftDB, queries: Tensor, *rest: Any, **words: Any
) -> tuple[Tensor, Tensor]:
    leaf = queries.clone().requires_grad_()
    found = loss(db, leaf, *rest, **words, reduction="none")
    return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]


@pytest.mark.slow
def test_estimated_retrieval_is_right_on_average(
    clustered: tuple[softdb.SoftDB, Tensor, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.rounds.Estimator._exact_seconds", lambda *_: np.inf)  # always draw
    loss, grad = gradient(retrieval_loss, *clustered, temperature=0.1)
    losses, grads = [], []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        one = gradient(
            retrieval_loss, *clustered, temperature=0.1, rtol=1e-9, max_draws=300, generator=generator
        )  # fmt: skip
        losses.append(one[0])
        grads.append(one[1])
    for many, exact in ((torch.stack(losses), loss), (torch.stack(grads), grad)):
        spread = many.std(0) / len(many) ** 0.5
        assert float(spread.max()) > 0  # drawn anew each time
        t = (many.mean(0) - exact) / (spread + 1e-5)
        assert float(t.abs().median()) < 1.5  # the bias of a logarithm, a 300th, is small beside the spread
        assert float((t.abs() < 4).double().mean()) > 0.95
    cosine = torch.nn.functional.cosine_similarity(torch.stack(grads).mean(0), grad)
    assert float(cosine.min()) > 0.99


def test_an_estimate_without_a_generator_is_the_same_every_time(
    clustered: tuple[softdb.SoftDB, Tensor, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.rounds.Estimator._exact_seconds", lambda *_: np.inf)
    first, second = (gradient(retrieval_loss, *clustered, temperature=0.1, rtol=0.05) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    exact, _ = gradient(retrieval_loss, *clustered, temperature=0.1)
    assert 0 < float((first[0] - exact).abs().max()) < 0.15


def test_estimates_without_an_index_are_exact() -> None:
    db, _ = filled()
    torch.testing.assert_close(
        retrieval_loss(db, asking(), POSITIVES, rtol=0.5), retrieval_loss(db, asking(), POSITIVES)
    )


# -- info_nce ----------------------------------------------------------------------------------------------------------


def contrasted(
    logits: list[list[float]], positives: list[list[int]], negatives: int, in_batch: bool, skip: int = 0,
    among: list[int] | None = None,
) -> list[float]:  # fmt: skip
    """InfoNCE by sets of ids."""
    found = []
    for mine, wins in zip(logits, positives, strict=True):
        others = [i for i in among or range(N) if i not in wins]
        hard = sorted(others, key=lambda i, mine=mine: -mine[i])[skip : skip + negatives]  # type: ignore[misc]
        batch = {i for one in positives for i in one} if in_batch else set()
        everything = set(wins) | set(hard) | batch
        found.append(log_sum([mine[i] for i in everything]) - log_sum([mine[i] for i in wins]))
    return found


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("negatives", [0, 1, 5, 2 * N])
@pytest.mark.parametrize("in_batch", [True, False])
@pytest.mark.parametrize("skip", [0, 3])
def test_info_nce_against_hard_and_batch_negatives(metric: str, negatives: int, in_batch: bool, skip: int) -> None:
    if not negatives and not in_batch:
        pytest.skip("no negatives are asked for")
    db, keys = filled(metric)
    queries, positives = asking(), [3, [0, 10], [7, 20, 8], [7, 39]]  # two queries share a positive
    logits = logits_of(queries, keys, metric, 0.3)
    expected = contrasted(logits, lists(positives), negatives, in_batch, skip)
    found = info_nce(
        db, queries, positives, negatives=negatives, in_batch=in_batch, skip=skip, temperature=0.3, reduction="none"
    )
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("in_batch", [True, False])
def test_the_gradient_of_info_nce(in_batch: bool) -> None:
    db, _ = filled()
    assert torch.autograd.gradcheck(
        lambda q: info_nce(db, q, POSITIVES, negatives=4, in_batch=in_batch, temperature=0.5, reduction="none"),
        asking(),
    )


def test_negatives_pass_the_filter_and_are_not_deleted() -> None:
    db, keys = filled()
    db.delete([13, 15])
    queries, positives = asking(), [[1], [3, 7], [9], [39]]
    among = [i for i in range(N) if i % 2 and i not in (13, 15)]
    expected = contrasted(logits_of(queries, keys, "dot", 0.07), positives, 4, True, among=among)
    found = info_nce(db, queries, positives, negatives=4, where={"odd": True}, reduction="none")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-6)


def test_negatives_drawn_among_the_nearest() -> None:
    db, keys = filled("l2")
    queries, positives = asking(q=1), [[3]]
    logits = logits_of(queries, keys, "l2", 1.0)[0]
    pool = sorted((i for i in range(N) if i != 3), key=lambda i: -logits[i])[2:8]
    possible = {
        round(log_sum([logits[3], logits[a], logits[b]]) - logits[3], 7): (a, b) for a in pool for b in pool if a < b
    }
    seen: list[int] = []
    for seed in range(200):
        loss = info_nce(
            db, queries, positives, negatives=2, among=6, skip=2, temperature=1.0,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        seen += possible[round(loss.item(), 7)]
    counts = np.array([seen.count(i) for i in pool])
    assert counts.min() > 40  # 400 draws among 6, each expected 67 times
    assert counts.max() < 95


def test_all_positives_leave_nothing_to_tell_apart() -> None:
    db = softdb.open(None, dim=2)
    db.insert([1, 2], [[1, 0], [0, 1]])
    queries = torch.ones(2, 2, requires_grad=True)
    loss = info_nce(db, queries, [[1, 2], [2, 1]])
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert float(queries.grad.abs().max()) < 1e-5


# -- label_loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 15])
@pytest.mark.parametrize("share", [None, 0.0, 0.25, 1.0])
def test_labels_are_those_of_the_mixture(k: int | None, share: float | None) -> None:
    db, keys = filled(num_classes=CLASSES)
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
    found = label_loss(db, queries, labels, temperature=0.6, k=k, reduction="none", **words)
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)
    mean = label_loss(db, queries, torch.tensor(labels), temperature=0.6, k=k, **words)
    assert mean.item() == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("k", [None, 15])
def test_the_gradient_of_labels(k: int | None) -> None:
    db, _ = filled(num_classes=CLASSES)
    model = torch.randn(Q, CLASSES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, m: label_loss(db, q, [0, 2, 1, 1], logits=m, k=k, reduction="none"), (asking(), model)
    )
    assert torch.autograd.gradcheck(lambda q: label_loss(db, q, [0, 2, 1, 1], k=k, reduction="none"), asking())


def test_a_label_without_weight_costs_100_and_its_gradient_is_zero() -> None:
    db = softdb.open(None, dim=2, num_classes=3)
    db.insert(range(4), [[1, 0], [1, 0], [0, 1], [0, 1]], [0, 0, 1, 1])
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
    db = softdb.open(None, dim=2, num_classes=2)
    db.insert([1], [[1, 0]], [0])
    model = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    queries = torch.ones(1, 2, requires_grad=True)
    loss = label_loss(db, queries, [1], logits=model)
    assert loss.item() == 100
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.grad is not None
    assert bool(model.grad.isfinite().all())


def test_labels_of_nothing() -> None:
    db = softdb.open(None, dim=2, num_classes=2)
    queries = torch.ones(1, 2, requires_grad=True)
    assert label_loss(db, queries, [1]).item() == 100
    assert label_loss(db, queries, [1], logits=torch.zeros(1, 2)).item() == pytest.approx(-math.log(0.75 / 2))


# -- pooled_loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 7])
def test_pooled_values_meet_their_targets(k: int | None) -> None:
    db, keys = filled(value_dim=3)
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
    found = pooled_loss(db, queries, targets, temperature=0.6, k=k, reduction="none")
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-9)
    torch.testing.assert_close(pooled_loss(db, queries, targets, temperature=0.6, k=k), found.mean())
    assert torch.autograd.gradcheck(lambda q, t: pooled_loss(db, q, t, temperature=0.6, k=k), (queries, targets))


def test_the_brier_score_of_a_distribution() -> None:
    db, _ = filled(num_classes=CLASSES)
    targets = torch.eye(CLASSES, dtype=torch.float64)[[0, 1, 2, 0]]
    output = db.attend(asking()).output
    torch.testing.assert_close(pooled_loss(db, asking(), targets), (output - targets).square().sum(1).mean())


def test_an_estimated_pooled_loss_falls_under_descent(
    clustered: tuple[softdb.SoftDB, Tensor, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.rounds.Estimator._exact_seconds", lambda *_: np.inf)
    db, queries, positives = clustered
    targets = db.get([mine[1] for mine in positives]).keys
    generator = torch.Generator().manual_seed(0)
    leaf = queries.clone().requires_grad_()
    before = pooled_loss(db, leaf, targets, temperature=0.1).item()
    optimizer = torch.optim.Adam([leaf], lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        pooled_loss(db, leaf, targets, temperature=0.1, rtol=0.2, generator=generator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert pooled_loss(db, leaf, targets, temperature=0.1).item() < 0.6 * before


# -- bad input ---------------------------------------------------------------------------------------------------------


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
    db, _ = filled()
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
        (info_nce, {"negatives": 0, "in_batch": False}, "nothing is left to tell the positives from"),
        (info_nce, {"among": 3}, "among is 3 but negatives 16"),
        (info_nce, {"skip": 0.5}, "skip is 0.5; expected"),
    ],
)
def test_words_that_cannot_be(loss: Any, words: dict[str, Any], message: str) -> None:
    db, _ = filled()
    with pytest.raises(BadInput, match=message):
        loss(db, asking(), [1, 2, 3, 4], **words)


@pytest.mark.parametrize(
    ("labels", "words", "message"),
    [
        ([0, 1, 2, 3], {}, "label 3 of query 3 is out of range; expected 0 to 2"),
        ([0, -1, 2, 1], {}, "label -1 of query 1 is out of range"),
        ([0.0, 1.0, 2.0, 0.0], {}, "labels have dtype torch.float32"),
        ([[0], [1], [2], [0]], {}, r"shape \(4, 1\); expected \(q,\) whole"),
        ([0, 1, 2], {}, "labels are 3 for 4 queries"),
        ([0, 1, 2, 0], {"interpolation": 1.5}, "interpolation is 1.5; expected a number from 0 to 1"),
        ([0, 1, 2, 0], {"logits": torch.zeros(4, 2)}, r"logits have shape \(4, 2\); expected \(4, 3\)"),
        ([0, 1, 2, 0], {"logits": [[0.0]]}, "logits are .*expected a floating tensor"),
    ],
)
def test_labels_that_cannot_be(labels: Any, words: dict[str, Any], message: str) -> None:
    db, _ = filled(num_classes=CLASSES)
    with pytest.raises(BadInput, match=message):
        label_loss(db, asking(), labels, **words)


def test_databases_and_targets_that_cannot_be() -> None:
    db, _ = filled()
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


def test_the_example_runs() -> None:
    finished = doctest.testmod(softdb.nn.losses, extraglobs={"torch": torch})
    assert finished.attempted > 0
    assert not finished.failed


def test_info_nce_is_cold_for_cosines_and_not_for_kernels() -> None:
    db, _ = filled("cosine")
    queries, kernel = asking(), Gaussian(2.0)
    for score, temperature in ((None, 0.07), (kernel, 1.0)):
        plain = info_nce(db, queries, POSITIVES, score=score)
        assert torch.equal(plain, info_nce(db, queries, POSITIVES, score=score, temperature=temperature))
    assert not torch.equal(info_nce(db, queries, POSITIVES), info_nce(db, queries, POSITIVES, temperature=0.5))


@pytest.mark.parametrize("labels", [["a"], [None], [[0], [1, 2]], torch.ones(1, dtype=torch.complex64)])
def test_labels_that_are_no_numbers(labels: Any) -> None:
    db, _ = filled(num_classes=CLASSES)
    with pytest.raises(BadInput, match=r"labels (are|have dtype) .*; expected \(q,\) whole numbers, 0 to 2"):
        label_loss(db, asking(q=1), labels)


# -- views and memories ------------------------------------------------------------------------------------------------


def small() -> tuple[softdb.SoftDB, Tensor, Tensor, list[list[int]]]:
    """A database with deleted records, its keys by id, queries and positives."""
    draws = torch.Generator().manual_seed(5)
    keys = torch.randn(40, 4, generator=draws)
    db = softdb.open(None, dim=4, num_classes=3)
    db.insert(range(40), keys, [i % 3 for i in range(40)])
    db.delete([3, 17])
    return db, keys, torch.randn(5, 4, generator=draws), [[0], [1, 2], [39, 5, 7], [8], [2]]


def expected(scores: Tensor, positives: list[list[int]], taking_part: Tensor) -> Tensor:  # (q, 40), (q, 40) -> ()
    wins = torch.zeros_like(taking_part)
    for i, mine in enumerate(positives):
        wins[i, mine] = True
    sides = (scores.masked_fill(~side, -torch.inf).logsumexp(1) for side in (taking_part, wins))
    whole, found = sides
    return (whole - found).mean()


def alive(queries: Tensor) -> Tensor:
    live = torch.ones(len(queries), 40, dtype=torch.bool)
    live[:, [3, 17]] = False
    return live


@pytest.mark.parametrize("k", [None, 3, 100])
def test_the_loss_of_a_view_is_that_of_its_encoded_keys(k: int | None) -> None:
    db, keys, queries, positives = small()
    encoder = torch.nn.Linear(4, 4)
    asked = queries.clone().requires_grad_()
    loss = retrieval_loss(nn.View(db, encoder, metric="dot"), asked, positives, temperature=0.5, k=k)
    leaf = queries.clone().requires_grad_()
    scores, live = leaf @ encoder(keys).T / 0.5, alive(queries)
    if k == 3:
        near = torch.zeros_like(live)
        near.scatter_(1, scores.detach().masked_fill(~live, -torch.inf).topk(3).indices, True)
        for i, mine in enumerate(positives):
            near[i, mine] = True
        live = near
    truth = expected(scores, positives, live)
    torch.testing.assert_close(loss, truth)
    parameters = [encoder.weight, encoder.bias]
    for found, right in zip(
        torch.autograd.grad(loss, [asked, *parameters]), torch.autograd.grad(truth, [leaf, *parameters]), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_memory_is_over_its_nearest_and_the_positives() -> None:
    db, keys, queries, positives = small()
    memory = nn.Memory(db, k=6, temperature=0.5)
    assert memory.keys is not None
    memory.keys.data += 0.1
    asked = queries.clone().requires_grad_()
    places = {int(i): place for place, i in enumerate(i for i in range(40) if i not in (3, 17))}
    table = (keys + 0.1).requires_grad_()
    leaf = queries.clone().requires_grad_()
    scores, live = leaf @ table.T / 0.5, alive(queries)
    near = torch.zeros_like(live).scatter_(1, scores.detach().masked_fill(~live, -torch.inf).topk(6).indices, True)
    for i, mine in enumerate(positives):
        near[i, mine] = True
    truth = expected(scores, positives, near)
    loss = retrieval_loss(memory, asked, positives)
    torch.testing.assert_close(loss, truth)
    truth.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(asked.grad, leaf.grad, rtol=1e-4, atol=1e-5)
    assert memory.keys.grad is not None
    assert memory.keys.grad.is_sparse
    assert table.grad is not None
    torch.testing.assert_close(memory.keys.grad.to_dense(), table.grad[list(places)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("negatives", [0, 4])
def test_info_nce_of_views_and_memories_is_that_of_the_database(in_batch: bool, negatives: int) -> None:
    if not in_batch and not negatives:
        pytest.skip("nothing to tell apart")
    db, _, queries, positives = small()
    words: dict[str, Any] = {"in_batch": in_batch, "negatives": negatives, "temperature": 0.3, "skip": 1}
    right = info_nce(db, queries, positives, **words)
    identity = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(identity.weight)
    for records in (nn.View(db, identity, metric="dot"), nn.Memory(db)):
        found = info_nce(records, queries, positives, **words)
        torch.testing.assert_close(found, right)
        found.backward()  # type: ignore[no-untyped-call]
        assert any(one.grad is not None and bool(one.grad.to_dense().any()) for one in records.parameters())


def test_losses_of_answers_take_views_and_memories() -> None:
    db, _, queries, _ = small()
    labels, targets = torch.tensor([0, 1, 2, 0, 1]), torch.rand(5, 3)
    identity = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(identity.weight)
    view, memory = nn.View(db, identity, metric="dot"), nn.Memory(db, values=False, k=38)
    for records in (view, memory):
        torch.testing.assert_close(label_loss(records, queries, labels), label_loss(db, queries, labels))
        torch.testing.assert_close(pooled_loss(records, queries, targets), pooled_loss(db, queries, targets))
    cold = pooled_loss(view, queries, targets, temperature=0.1, k=5)
    torch.testing.assert_close(cold, pooled_loss(db, queries, targets, temperature=0.1, k=5))


def test_what_views_and_memories_do_not_take_is_said() -> None:
    db, _, queries, positives = small()
    view, memory = nn.View(db, torch.nn.Linear(4, 4), metric="dot"), nn.Memory(db)
    with pytest.raises(BadInput, match="a View takes no rtol; leave it out, or ask the database"):
        retrieval_loss(view, queries, positives, rtol=0.1)
    with pytest.raises(BadInput, match="a Memory takes no where"):
        info_nce(memory, queries, positives, where={"a": 1})
    with pytest.raises(BadInput, match="a View takes no weights and no rtol"):
        pooled_loss(view, queries, torch.rand(5, 3), weights="sparsemax", rtol=0.1)
    with pytest.raises(BadInput, match="a Memory takes no temperature"):
        label_loss(memory, queries, [0] * 5, temperature=0.1)
    with pytest.raises(BadInput, match="db is 3; expected an open softdb database"):
        retrieval_loss(3, queries, positives)  # type: ignore[arg-type]
    db.insert([100], torch.ones(1, 4), [0])
    with pytest.raises(StaleRead, match=r"positive 100 .* reload\(\) the memory"):
        retrieval_loss(memory, queries, [100] * 5)
