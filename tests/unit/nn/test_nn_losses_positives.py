"""Losses over positives, against loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import D, N, awkward, holding
from worlds.retrieval import CLASSES, POSITIVES, Q, asking, clustered, log_sum, logits_of, with_keys

import softdb
from softdb.errors import UnknownId
from softdb.nn import info_nce, retrieval_loss
from softdb.scores import Boxcar, Gaussian, General


def lists(positives: list[Any]) -> list[list[int]]:
    return [positive if isinstance(positive, list) else [positive] for positive in positives]


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_retrieval_is_the_likelihood_of_the_positives(metric: str, temperature: float, dtype: torch.dtype) -> None:
    db, keys = with_keys(metric, value_dim=3)
    queries = asking().detach().to(dtype)
    expected = []
    for logits, mine in zip(logits_of(queries, keys, metric, temperature), lists(POSITIVES), strict=True):
        share = sum(math.exp(logits[i] - log_sum(logits)) for i in mine)
        expected.append(-math.log(share))
    actual = retrieval_loss(db, queries, POSITIVES, temperature=temperature, reduction="none")
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(
        actual.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 6, N, 3 * N])
def test_truncated_retrieval_is_over_the_nearest_and_the_positives_each_once(metric: str, k: int) -> None:
    db, keys = with_keys(metric)
    queries = asking()
    expected = []
    for logits, mine in zip(logits_of(queries, keys, metric, 0.5), lists(POSITIVES), strict=True):
        nearest = sorted(range(N), key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
        union = set(nearest) | set(mine)
        expected.append(log_sum([logits[i] for i in union]) - log_sum([logits[i] for i in mine]))
    actual = retrieval_loss(db, queries, POSITIVES, temperature=0.5, k=k, reduction="none")
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-9)
    whole = retrieval_loss(db, queries, POSITIVES, temperature=0.5, reduction="none")
    assert bool((actual <= whole + 1e-9).all())
    assert (k >= N) == torch.allclose(actual, whole)


@pytest.mark.parametrize("k", [None, 6])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_the_gradient_of_retrieval(k: int | None, metric: str) -> None:
    db, _ = with_keys(metric)
    assert torch.autograd.gradcheck(
        lambda q: retrieval_loss(db, q, POSITIVES, temperature=0.7, k=k, reduction="none"), asking()
    )


def test_parameters_of_the_score_learn() -> None:
    db, _ = with_keys()
    score = General(D, D).double()
    retrieval_loss(db, asking().detach(), POSITIVES, score=score).backward()  # type: ignore[no-untyped-call]
    grads = [parameter.grad for parameter in score.parameters()]
    assert grads
    assert all(grad is not None and float(grad.abs().max()) > 1e-3 for grad in grads)


def test_reductions() -> None:
    db, _ = with_keys()
    each = retrieval_loss(db, asking(), POSITIVES, reduction="none")
    assert each.shape == (Q,)
    torch.testing.assert_close(retrieval_loss(db, asking(), POSITIVES), each.mean())
    torch.testing.assert_close(retrieval_loss(db, asking(), POSITIVES, reduction="sum"), each.sum())


@pytest.mark.parametrize("k", [None, 4])
def test_a_filter_and_deletions_leave_records_out(k: int | None) -> None:
    db, keys = with_keys()
    db.delete([5, 11])
    queries, positives = asking(), [1, [3, 7], 9, [39, 1]]
    among = [i for i in range(N) if i % 2 and i not in (5, 11)]
    expected = []
    for logits, mine in zip(logits_of(queries, keys, "dot", 1.0), lists(positives), strict=True):
        nearest = sorted(among, key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
        expected.append(log_sum([logits[i] for i in {*nearest, *mine}]) - log_sum([logits[i] for i in mine]))
    actual = retrieval_loss(db, queries, positives, k=k, where={"odd": True}, reduction="none")
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("k", [None, 6])
def test_half_precision_on_disk_after_a_compaction(tmp_path: Path, k: int | None) -> None:
    keys = awkward(np.random.default_rng(3), N, D).astype(np.float16)
    with holding(keys, np.arange(N) % CLASSES, path=tmp_path / "db", num_classes=CLASSES, dtype="float16") as db:
        db.delete([0, 5, 12])
        db.compact()
        among, positives = [i for i in range(N) if i not in (0, 5, 12)], [[3], [1, 6], [7, 20, 8], [39]]
        expected = []
        for logits, positive in zip(logits_of(asking(), keys.astype(np.float64), "dot", 1.0), positives, strict=True):
            nearest = sorted(among, key=lambda i, logits=logits: -logits[i])[:k]  # type: ignore[misc]
            expected.append(
                log_sum([logits[i] for i in {*nearest, *positive}]) - log_sum([logits[i] for i in positive])
            )
        actual = retrieval_loss(db, asking(), positives, k=k, reduction="none")
        np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-9)
        with pytest.raises(UnknownId, match="id 5 is not stored"):
            retrieval_loss(db, asking(), [[3], [1, 5], [7], [39]], k=k)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda ids: [[one] for one in ids]])
def test_ids_come_as_lists_arrays_and_tensors(form: Any) -> None:
    db, _ = with_keys()
    ids = [4, 2, 30, 2]
    torch.testing.assert_close(retrieval_loss(db, asking(), form(ids)), retrieval_loss(db, asking(), ids))
    twice = [[one, one] for one in ids]  # a set: nothing counts double
    torch.testing.assert_close(retrieval_loss(db, asking(), twice), retrieval_loss(db, asking(), ids))


def test_ids_that_are_text_and_one_query_alone() -> None:
    db = holding([[1, 0], [0, 1], [1, 1]], ids=["a", "b", 7])
    query = torch.tensor([1.0, 0.0])
    expected = -math.log((math.e + 1) / (2 * math.e + 1))
    assert retrieval_loss(db, query, [["a", "b"]]).item() == pytest.approx(expected, abs=1e-6)
    assert retrieval_loss(db, query, "a").item() == pytest.approx(-math.log(math.e / (2 * math.e + 1)), abs=1e-6)


def test_a_kernel_has_its_plain_normalisation() -> None:
    db, keys = with_keys("l2")
    queries = asking()
    expected = []
    for logits, mine in zip(logits_of(queries, keys, "l2", 1.0), lists(POSITIVES), strict=True):
        kernels = [math.exp(logit / (2 * 0.8**2)) for logit in logits]
        expected.append(-math.log(sum(kernels[i] for i in mine) / sum(kernels)))
    actual = retrieval_loss(db, queries, POSITIVES, score=Gaussian(0.8), reduction="none")
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("k", [None, 4])
def test_positives_beyond_a_kernel_cost_infinity_without_gradient(k: int | None) -> None:
    db, keys = with_keys("l2")
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


def gradient(
    loss: Callable[..., Tensor], db: softdb.SoftDB, queries: Tensor, *rest: Any, **words: Any
) -> tuple[Tensor, Tensor]:
    leaf = queries.clone().requires_grad_()
    found = loss(db, leaf, *rest, **words, reduction="none")
    return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]


@pytest.mark.slow
def test_estimated_retrieval_is_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)  # always draw
    loss, grad = gradient(retrieval_loss, *clustered(), temperature=0.1)
    losses, grads = [], []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        one = gradient(
            retrieval_loss, *clustered(), temperature=0.1, rtol=1e-9, max_draws=300, generator=generator
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


def test_an_estimate_without_a_generator_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
    first, second = (gradient(retrieval_loss, *clustered(), temperature=0.1, rtol=0.05) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    exact, _ = gradient(retrieval_loss, *clustered(), temperature=0.1)
    assert 0 < float((first[0] - exact).abs().max()) < 0.15


def test_estimates_without_an_index_are_exact() -> None:
    db, _ = with_keys()
    torch.testing.assert_close(
        retrieval_loss(db, asking(), POSITIVES, rtol=0.5), retrieval_loss(db, asking(), POSITIVES)
    )


def contrasted(
    logits: list[list[float]], positives: list[list[int]], negatives: int, in_batch: bool, skip: int = 0,
    among: list[int] | None = None,
) -> list[float]:  # fmt: skip
    """InfoNCE by sets of ids."""
    found = []
    for mine, wins in zip(logits, positives, strict=True):
        others = [i for i in among or range(N) if i not in wins]
        hard = sorted(others, key=lambda i, mine=mine: -mine[i])[skip : skip + negatives]  # type: ignore[misc]
        batch = {i for positive in positives for i in positive} if in_batch else set()
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
    db, keys = with_keys(metric)
    queries, positives = asking(), [3, [0, 10], [7, 20, 8], [7, 39]]  # two queries share a positive
    logits = logits_of(queries, keys, metric, 0.3)
    expected = contrasted(logits, lists(positives), negatives, in_batch, skip)
    actual = info_nce(
        db, queries, positives, negatives=negatives, in_batch=in_batch, skip=skip, temperature=0.3, reduction="none"
    )
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-8)


@pytest.mark.parametrize("in_batch", [True, False])
def test_the_gradient_of_info_nce(in_batch: bool) -> None:
    db, _ = with_keys()
    assert torch.autograd.gradcheck(
        lambda q: info_nce(db, q, POSITIVES, negatives=4, in_batch=in_batch, temperature=0.5, reduction="none"),
        asking(),
    )


def test_negatives_pass_the_filter_and_are_not_deleted() -> None:
    db, keys = with_keys()
    db.delete([13, 15])
    queries, positives = asking(), [[1], [3, 7], [9], [39]]
    among = [i for i in range(N) if i % 2 and i not in (13, 15)]
    expected = contrasted(logits_of(queries, keys, "dot", 0.07), positives, 4, True, among=among)
    actual = info_nce(db, queries, positives, negatives=4, where={"odd": True}, reduction="none")
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-6)


def test_negatives_drawn_among_the_nearest() -> None:
    db, keys = with_keys("l2")
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


def test_all_records_as_positives_give_zero_loss() -> None:
    db = holding([[1, 0], [0, 1]], ids=[1, 2])
    queries = torch.ones(2, 2, requires_grad=True)
    loss = info_nce(db, queries, [[1, 2], [2, 1]])
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert float(queries.grad.abs().max()) < 1e-5
