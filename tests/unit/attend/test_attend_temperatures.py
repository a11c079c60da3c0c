"""Temperatures that are tensors: answers and gradients against float64, scalar, by query and by head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from with_kernels import NEEDS_KERNELS
from worlds import clusters, holding, indexed

import softdb
from softdb import scores
from softdb.attend import fused
from softdb.errors import BadInput

N, D, V, Q = 900, 12, 3, 9
METRICS = ["dot", "cosine", "l2"]
SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "one": (1,), "queries": (Q,)}


def compared(metric: str, queries: Tensor, keys: Tensor) -> Tensor:
    """The scores, from plain torch operations in the tensors' dtype."""
    if metric == "l2":
        return -(queries.unsqueeze(1) - keys).square().sum(2)
    if metric == "cosine":
        queries, keys = (torch.nn.functional.normalize(vectors, dim=1) for vectors in (queries, keys))
    return queries @ keys.T


@functools.cache
def columns() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(n, w, generator=random) for n, w in ((N, D), (N, V), (Q, D)))
    return 0.5 * keys, values, 0.7 * queries


@functools.cache
def database(metric: Any) -> softdb.SoftDB:
    keys, values, _ = columns()
    return holding(keys, values, metric=metric)


def heat_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.3 + torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()


def loss(output: Tensor, lse: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(2)
    pulls = torch.randn(output.shape, generator=random), torch.randn(lse.shape, generator=random)
    return (output * pulls[0].to(output)).sum() + (lse * pulls[1].to(lse)).sum()


def require_like_float64(
    answer: Callable[[Tensor, Tensor], softdb.Pooled],
    true: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    heat: Tensor,
) -> softdb.Pooled:
    """The answer, and its gradients to queries and temperature, are those of `true` in float64."""
    queries = columns()[2].clone().requires_grad_()
    wide, wide_heat = queries.detach().double().requires_grad_(), heat.detach().double().requires_grad_()
    pooled, expected = answer(queries, heat), true(wide, wide_heat.expand(Q))
    actual = pooled.output, pooled.lse, *torch.autograd.grad(loss(pooled.output, pooled.lse), [queries, heat])
    right = *expected, *torch.autograd.grad(loss(*expected), [wide, wide_heat])
    for found, one in zip(actual, right, strict=True):
        assert found.dtype is torch.float32
        assert float((found.detach() - one.detach()).norm() / one.detach().norm()) < 5e-6
    return pooled


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("k", [None, 7])
def test_exact_and_truncated_answers_teach_the_temperature(metric: str, shape: tuple[int, ...], k: int | None) -> None:
    keys, values = (column.double() for column in columns()[:2])

    def true(queries: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = compared(metric, queries, keys).topk(k or N)
        logits = logits / heat.unsqueeze(1)
        return torch.einsum("qk,qkv->qv", logits.softmax(1), values[chosen]), logits.logsumexp(1)

    pooled = require_like_float64(
        lambda queries, heat: database(metric).attend(queries, temperature=heat, k=k), true, heat_of(shape)
    )
    if k is not None:  # scores are those of the metric
        assert pooled.hits is not None
        plain = database(metric).attend(columns()[2], k=k)
        assert plain.hits is not None
        torch.testing.assert_close(pooled.hits.scores.detach(), plain.hits.scores, rtol=1e-5, atol=1e-6)
        heat = heat_of(shape)  # of which these scores do not depend
        scored = database(metric).attend(columns()[2], temperature=heat, k=k).hits
        assert scored is not None
        assert float(torch.autograd.grad(scored.scores.sum(), heat)[0].abs().max()) < 1e-4


@NEEDS_KERNELS
@pytest.mark.parametrize("metric", METRICS)
def test_kernels_answer_with_temperatures(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.streaming.Blocks.apply", lambda *_: pytest.fail("torch answers"))
    heat = heat_of((Q,))
    database(metric).attend(columns()[2], temperature=heat).output.sum().backward()  # type: ignore[no-untyped-call]
    assert heat.grad is not None


@NEEDS_KERNELS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("q", [3, 40])
def test_masks_labels_and_chunks_of_scaled_distances(masked: bool, q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 16)
    monkeypatch.setattr(fused, "WORTH", 0)
    keys, random = columns()[0], torch.Generator().manual_seed(3)
    labels, queries = torch.arange(N) % 5, torch.randn(q, D, generator=random)
    mask = torch.rand(q, N, generator=random) < 0.3 if masked else torch.ones(q, N, dtype=torch.bool)
    mask[1] = not masked  # without any record
    heat = (0.5 + torch.rand(q, generator=random)).requires_grad_()
    wide = heat.detach().double().requires_grad_()
    with holding(keys, labels, num_classes=5, metric="l2") as db:
        pooled = db.attend(queries, temperature=heat, mask=mask if masked else None)
    logits = (compared("l2", queries.double(), keys.double()) / wide.unsqueeze(1)).masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(1)
    shares = (logits - lse.unsqueeze(1).nan_to_num(neginf=0)).exp() @ torch.nn.functional.one_hot(labels).double()
    torch.testing.assert_close(pooled.output.double(), shares, rtol=1e-5, atol=1e-6)
    rows = lse.isfinite()
    (grad,) = torch.autograd.grad(pooled.output[:, 1].sum() + pooled.lse[rows].sum(), heat)
    (right,) = torch.autograd.grad(shares[rows, 1].sum() + lse[rows].sum(), wide)
    torch.testing.assert_close(grad.double(), right, rtol=1e-4, atol=1e-5)


SCORES: dict[str, Any] = {
    "scaled": (scores.ScaledDot(), lambda q, k: q @ k.T / D**0.5),
    "l2 with a bandwidth": (scores.NegativeL2(0.7), lambda q, k: compared("l2", q, k) / 0.49),
    "kernel": (scores.Gaussian(1.5), lambda q, k: (compared("l2", q, k) / 4.5).exp()),
    "function": (lambda q, k: (q @ k.T).tanh(), lambda q, k: (q @ k.T).tanh()),
    "bias": (scores.LinearAdditive(D, D), None),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("k", [None, 5])
def test_any_score_is_divided(name: str, k: int | None) -> None:
    score, plain = SCORES[name]
    wide = score.double().__call__ if plain is None else plain
    keys, values = (column.double() for column in columns()[:2])

    def true(queries: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = wide(queries, keys).topk(k or N)
        logits = logits / heat.unsqueeze(1)
        return torch.einsum("qk,qkv->qv", logits.softmax(1), values[chosen]), logits.logsumexp(1)

    def answer(queries: Tensor, heat: Tensor) -> softdb.Pooled:
        return database("l2").attend(queries, temperature=heat, score=score, weights="softmax", k=k)

    require_like_float64(answer, true, heat_of((Q,)))


@pytest.mark.parametrize("k", [None, 5])
def test_a_score_of_minus_infinity_weighs_nothing(k: int | None) -> None:
    keys, values, queries = columns()
    heat, barred = heat_of((Q,)), lambda q, k: (q @ k.T).masked_fill(k[:, 0] > 0, -torch.inf)
    pooled = database("dot").attend(queries, temperature=heat, score=barred, k=k)
    keep = keys[:, 0] <= 0
    with holding(keys[keep], values[keep]) as db:
        right = db.attend(queries, temperature=heat, k=k)
    grads = []
    for answer in (pooled, right):
        grads.append(torch.autograd.grad(loss(answer.output, answer.lse), heat)[0])
    torch.testing.assert_close(pooled.output, right.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["softmax", "sparsemax", "entmax15", "uniform", "argmax"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("all_weights", [False, True])
def test_every_weighting_with_temperatures_of_the_queries(weights: str, metric: str, all_weights: bool) -> None:
    db, (_, _, queries), heat = database(metric), columns(), heat_of((Q,))
    pooled = db.attend(queries, temperature=heat, weights=weights, need_weights=all_weights)
    (grad,) = torch.autograd.grad(loss(pooled.output, pooled.lse), heat)
    step, numbers = 1e-3, heat.detach().tolist()
    for i, one in enumerate(numbers):
        alone = [db.attend(queries[i : i + 1].double(), temperature=one + h, weights=weights) for h in (-step, 0, step)]
        torch.testing.assert_close(pooled.output[i], alone[1].output[0].float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pooled.lse[i], alone[1].lse[0].float(), rtol=1e-4, atol=1e-5)
        states = [(a.output.new_zeros(Q, V), a.lse.new_zeros(Q)) for a in alone]
        for (output, lse), a in zip(states, alone, strict=True):
            output[i], lse[i] = a.output[0], a.lse[0]
        slope = (loss(*states[2]) - loss(*states[0])) / (2 * step)
        torch.testing.assert_close(grad[i].double(), slope, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("score", [scores.Dot(), scores.Cosine(), scores.NegativeL2(), scores.Laplacian(0.8)])
@pytest.mark.parametrize("weights", ["softmax", "sparsemax", "entmax15"])
@pytest.mark.parametrize("shape", [(), (3, 1), (2, 3, 4)], ids=["scalar", "heads", "queries"])
def test_attention_over_tensors(score: Any, weights: str, shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 3, n, 5, dtype=torch.float64, generator=random) for n in (4, 6, 6))
    heat = heat_of(shape, torch.float64)

    def answer(query: Tensor, key: Tensor, heat: Tensor) -> Tensor:
        return softdb.attention(query, key, value, score=score, weights=weights, temperature=heat)

    assert torch.autograd.gradcheck(answer, (query.requires_grad_(), key.requires_grad_(), heat))
    each = heat.expand(2, 3, 4)[1, 2, 3].item()
    alone = softdb.attention(query[1, 2, 3:], key[1, 2], value[1, 2], score=score, weights=weights, temperature=each)
    torch.testing.assert_close(answer(query, key, heat)[1, 2, 3:], alone)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("score", [scores.ScaledDot(), scores.Cosine(), scores.NegativeL2()])
def test_streamed_attention_over_tensors(score: Any, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(4)
    query = torch.randn(2, 3, 40, 8, generator=random)
    key, value = (torch.randn(1 if shared else 2, 3, 500, 8, generator=random) for _ in "kv")
    heat, grads = heat_of((3, 1)), []
    for most in (softdb.functional.DENSE, 0):
        monkeypatch.setattr(softdb.functional, "DENSE", most)
        output = softdb.attention(query, key, value, score=score, temperature=heat)
        grads.append(torch.autograd.grad(output.square().sum(), heat)[0])
        for head, number in enumerate(heat.flatten().tolist()):
            own = [column.expand(2, 3, -1, -1)[:, head] for column in (query, key, value)]
            alone = softdb.attention(*own, score=score, temperature=number)
            torch.testing.assert_close(output[:, head], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


# -- other verbs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_log_partition_and_log_probabilities(metric: str) -> None:
    db, (keys, _, queries), heat = database(metric), columns(), heat_of((Q,))
    logits = compared(metric, queries.double(), keys.double()) / heat.double().unsqueeze(1)
    estimate, samples = (
        db.log_partition(queries, temperature=heat),
        db.sample(queries, 50, temperature=heat, generator=torch.Generator().manual_seed(0)),
    )
    torch.testing.assert_close(estimate.value.double(), logits.logsumexp(1), rtol=1e-5, atol=1e-5)
    right = logits.log_softmax(1).gather(1, samples.hits.rows)
    torch.testing.assert_close(samples.log_prob.double(), right, rtol=1e-4, atol=1e-5)
    plain = compared(metric, queries, keys).gather(1, samples.hits.rows)
    torch.testing.assert_close(samples.hits.scores.detach(), plain, rtol=1e-5, atol=1e-5)
    for actual, wide in ((samples.log_prob.sum(), right.sum()), (estimate.value.sum(), logits.logsumexp(1).sum())):
        grads = [torch.autograd.grad(one, heat, retain_graph=True)[0] for one in (actual, wide)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("metric", METRICS)
def test_explanations_show_the_users_scores(metric: str) -> None:
    db, (_, _, queries), heat = database(metric), columns(), heat_of((Q,))
    for pooled in (db.attend(queries, temperature=heat), db.attend(queries, temperature=heat, k=20)):
        for i, explanation in enumerate(pooled.explain(3)):
            (plain,) = db.attend(queries[i : i + 1], temperature=heat[i].item(), k=20).explain(3)
            assert explanation.ids == plain.ids
            assert explanation.scores == pytest.approx(plain.scores, rel=1e-5)


@pytest.fixture(scope="module")
def spread() -> tuple[Any, Tensor]:
    pytest.importorskip("faiss", reason="an estimate draws through an IVF index")
    random = np.random.default_rng(0)
    keys = clusters(random)
    queries = keys[random.integers(0, len(keys), 12)] + 0.3 * random.standard_normal((12, keys.shape[1]))
    return keys, torch.from_numpy(queries.astype(np.float32))


@NEEDS_KERNELS
@pytest.mark.parametrize("metric", METRICS)
def test_estimates_teach_the_temperature_without_bias(
    spread: Any, metric: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, queries = spread
    squares = float(np.square(keys).sum(1).mean())
    base = {"dot": 0.1 * squares, "cosine": 0.1, "l2": 0.2 * squares}[metric]
    heat = (base * (0.6 + torch.rand(12, generator=torch.Generator().manual_seed(5)))).requires_grad_()
    with indexed(keys, metric=metric, recall=0.9) as db:
        exact = db.attend(queries, temperature=heat)
        shift = exact.lse.detach()
        (true,) = torch.autograd.grad((exact.lse - shift).exp().sum(), heat)
        grads, ratios = [], []
        for seed in range(60):
            draws = torch.Generator().manual_seed(seed)
            pooled = db.attend(queries, temperature=heat, rtol=1e-9, max_draws=300, generator=draws)
            assert not pooled.exact.any()
            grads.append(torch.autograd.grad((pooled.lse - shift).exp().sum(), heat)[0])
            ratios.append((pooled.lse.detach() - shift).exp())
        for actual, right in ((torch.stack(grads), true), (torch.stack(ratios), torch.ones(12))):
            doubt = actual.std(0) / len(actual) ** 0.5
            assert ((actual.mean(0) - right).abs() <= 4.5 * doubt + 1e-4 * right.abs()).all()
        # each query is drawn by its own temperature, as if it were alone
        plain = db.attend(queries[3:4], temperature=heat[3].item(), rtol=1e-9, max_draws=300)
        pooled = db.attend(queries, temperature=heat.detach(), rtol=1e-9, max_draws=300)
        torch.testing.assert_close(pooled.lse[3:4], plain.lse, rtol=1e-6, atol=1e-6)
        assert pooled.hits is not None
        assert plain.hits is not None
        torch.testing.assert_close(pooled.hits.scores[3, :5], plain.hits.scores[0, :5], rtol=1e-5, atol=1e-5)
        # further rounds draw for some of the queries
        monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
        pooled = db.attend(queries, temperature=heat.detach(), rtol=0.01)
        assert not pooled.exact.all()
        assert len(set(pooled.n_pooled.tolist())) > 1
        assert ((pooled.output - exact.output).norm(dim=1) <= 2 * pooled.bar + 1e-6).all()
        assert ((pooled.lse - shift).exp_() - 1).abs().max() < 0.1


@NEEDS_KERNELS
def test_samples_by_codes_follow_each_temperature(spread: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.sample.pass_cost", lambda *_: np.inf)
    keys, queries = spread
    heat = torch.linspace(0.05, 2.0, 12) * float(np.square(keys).sum(1).mean())
    with indexed(keys, metric="l2", recall=0.9) as db:
        samples = db.sample(queries, 400, temperature=heat, generator=torch.Generator().manual_seed(0))
        exact = db.attend(queries, score=lambda q, k: -torch.cdist(q, k).square(), temperature=heat, need_weights=True)
        assert exact.weights is not None
        entropy = -torch.special.xlogy(exact.weights, exact.weights).sum(1)
        doubt = samples.log_prob.std(1) / 20
    assert not samples.scanned[1:].any()  # at the coldest one record holds nearly all, and codes may not tell it apart
    assert ((-samples.log_prob.mean(1) - entropy).abs() <= 5 * doubt + 1e-3).all()


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_a_number_in_a_tensor_is_a_number() -> None:
    db, queries = database("l2"), columns()[2]
    plain = db.attend(queries, temperature=0.5)
    for heat in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64), np.float32(0.5)):
        assert torch.equal(db.attend(queries, temperature=heat).output, plain.output)
    with torch.no_grad():
        assert torch.equal(db.attend(queries, temperature=torch.tensor(0.5, requires_grad=True)).output, plain.output)


@pytest.mark.parametrize(
    ("heat", "match"),
    [
        (torch.tensor(2), r"type torch.int64; expected a finite number above 0"),
        (torch.ones(Q, dtype=torch.bool), "type torch.bool"),
        (torch.ones(Q + 1), rf"shape \({Q + 1},\) and the queries \({Q},\)"),
        (torch.ones(Q, 1), rf"shape \({Q}, 1\)"),
        (torch.tensor([1.0] * (Q - 1) + [torch.nan]), "learn its logarithm"),
        (torch.tensor(-1.0, requires_grad=True), "expected numbers from 1e-30 to 1e"),
        (torch.zeros(Q), "expected numbers from 1e-30"),
        (torch.full((Q,), torch.inf), "expected numbers from 1e-30"),
        (torch.zeros(()), "expected a finite number above 0"),
        (torch.ones(Q).to_sparse(), "expected a finite number above 0"),
        (torch.ones(Q, device="meta"), "expected a finite number above 0"),
        ([0.5] * Q, "expected a finite number above 0"),
    ],
)
def test_temperatures_that_make_no_sense(heat: Any, match: str) -> None:
    queries = columns()[2]
    for answer in (database("dot").attend, database("dot").log_partition, database("dot").sample):
        with pytest.raises(BadInput, match=match):
            answer(queries, temperature=heat)
    with pytest.raises(BadInput, match=match):
        softdb.attention(queries, queries, queries, temperature=heat)


def test_normalised_weights_have_no_temperature() -> None:
    with pytest.raises(BadInput, match="normalised weights have none; leave it at 1"):
        database("l2").attend(columns()[2], score=scores.Gaussian(1.0), temperature=heat_of((Q,)))


@NEEDS_KERNELS
def test_a_bandwidth_of_distances_learns_in_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.streaming.Blocks.apply", lambda *_: pytest.fail("torch answers"))
    score, (keys, values, queries) = scores.NegativeL2(0.7, learnable=True), columns()
    pooled = database("l2").attend(queries, score=score, temperature=0.8)
    assert score.log_bandwidth is not None
    (grad,) = torch.autograd.grad(loss(pooled.output, pooled.lse), score.log_bandwidth)
    log = torch.tensor(0.7).double().log().requires_grad_()
    logits = compared("l2", queries.double(), keys.double()) * (-2 * log).exp() / 0.8
    (right,) = torch.autograd.grad(loss(logits.softmax(1) @ values.double(), logits.logsumexp(1)), log)
    torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=1e-6)
