"""Pooling, merging and the estimate of the missed mass, against the equations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import reference
import torch
from drawn import Drawn, exact, merged, sampled
from torch import Tensor

from softdb.errors import BadInput
from softdb.pool import State, merge, missed_mass, pool
from softdb.weights import softmax


def _weights(q: int, k: int) -> Tensor:
    return torch.softmax(torch.randn(q, k, dtype=torch.float64), 1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def test_pooling_is_the_weighted_sum() -> None:
    weights, values = _weights(3, 5), torch.randn(3, 5, 4, dtype=torch.float64)
    expected = [sum(weights[i, j] * values[i, j] for j in range(5)) for i in range(3)]
    torch.testing.assert_close(pool(weights, values), torch.stack(expected))  # type: ignore[arg-type]
    assert pool(weights.float(), values.half()).dtype is torch.float32


def test_pooling_labels_is_pooling_their_one_hot_vectors() -> None:
    weights, labels = _weights(3, 6), torch.tensor([[0, 2, 2, 1, 0, 2], [3] * 6, [1, 0, 3, 2, 1, 0]])
    vectors = np.stack([reference.one_hot(row, 5) for row in labels])
    actual = pool(weights, labels, num_classes=5)
    torch.testing.assert_close(actual, pool(weights, torch.from_numpy(vectors)))
    torch.testing.assert_close(actual.sum(1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(pool(weights, labels.int(), 5), actual)


def test_labels_need_the_number_of_classes() -> None:
    with pytest.raises(BadInput, match="give num_classes"):
        pool(_weights(2, 3), torch.zeros(2, 3, dtype=torch.int64))


def test_pooling_has_the_right_gradients() -> None:
    weights = _weights(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(pool, (weights, torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)))
    assert torch.autograd.gradcheck(lambda w: pool(w, torch.tensor([[0, 2, 0], [1, 1, 1]]), 3), weights)


def test_one_hot_weights_pick_the_record_and_equal_ones_average() -> None:
    values = torch.randn(1, 4, 3)
    assert torch.equal(pool(torch.eye(4)[2:3], values), values[:, 2])
    torch.testing.assert_close(pool(torch.full((1, 4), 0.25), values), values.mean(1))


def _state(scores: Tensor, values: Tensor) -> State:
    """State of records with scores (q, k) and values (k, v)."""
    weights, lse = softmax(scores, 0.5, torch.ones_like(scores, dtype=torch.bool))
    return State(weights @ values, lse)


def _close(found: State | Drawn | tuple[Tensor, Tensor], expected: State | Drawn | tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other)


def test_merged_parts_are_the_whole_in_any_order_and_grouping() -> None:
    scores, values = 30 * torch.randn(3, 12, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    a, b, c = (_state(scores[:, part], values[part]) for part in (slice(0, 2), slice(2, 7), slice(7, 12)))
    whole = _state(scores, values)
    for actual in (merge([a, b, c]), merge([merge([a, b]), c]), merge([a, merge([b, c])]), merge([c, a, b])):
        _close(actual, whole)
    _close(merge([a]), a)


def test_empty_parts_add_nothing_and_leave_gradients_finite() -> None:
    output, lse = torch.randn(2, 3, requires_grad=True), torch.tensor([0.5, -math.inf], requires_grad=True)
    nothing = (torch.zeros(2, 3, requires_grad=True), torch.full((2,), -math.inf, requires_grad=True))
    whole = merge([nothing, (output, lse)])
    _close((whole[0][:1], whole[1]), (output[:1], lse))
    assert whole[0][1].tolist() == [0, 0, 0]
    actual = torch.autograd.grad(whole[0].sum() + whole[1].sum(), (output, lse, *nothing))
    assert all(torch.isfinite(grad).all() for grad in actual)
    assert actual[1].tolist() == [1, 0]
    assert actual[3].tolist() == [0, 0]


def test_merging_has_the_right_gradients() -> None:
    inputs = [torch.randn(2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)] * 2
    leaves = tuple(one.clone().requires_grad_() for one in inputs)
    assert torch.autograd.gradcheck(lambda o1, l1, o2, l2: merge([(o1, l1), (o2, 2 * l2)])[:2], leaves)


def _candidates(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (3, k), log-weights of which half are 0, values (3, k, 4)."""
    double = torch.float64
    log_weights = torch.rand(3, k, dtype=double) * 4 * (torch.arange(k) % 2)
    return 5 * torch.randn(3, k, dtype=double), log_weights, torch.randn(3, k, 4, dtype=double)


def _part(scores: Tensor, log_weights: Tensor, values: Tensor, part: slice, live: Tensor | None = None) -> Drawn:
    alive = torch.ones_like(scores, dtype=torch.bool) if live is None else live
    return sampled(scores[:, part], 0.5, alive[:, part], log_weights[:, part], values[:, part])


def _same(found: Drawn, expected: Drawn) -> None:
    _close(found, expected)
    for moment, other in zip(found.moments, expected.moments, strict=True):
        torch.testing.assert_close(moment, other)
    torch.testing.assert_close(found.stderr, expected.stderr)


def test_the_error_of_a_sample_is_the_equation() -> None:
    scores, log_weights, values = _candidates(9)
    state = _part(scores, log_weights, values, slice(None))
    for i in range(3):
        logits = [float(s) / 0.5 + float(w) for s, w in zip(scores[i], log_weights[i], strict=True)]
        weights, lse = reference.softmax(logits, 1.0, [True] * 9)
        output = sum(w * v for w, v in zip(weights, values[i].numpy(), strict=True))
        np.testing.assert_allclose(state.output[i], output)
        assert state.lse[i].item() == pytest.approx(lse)
        noise = [(1 - math.exp(-float(a))) * w**2 for a, w in zip(log_weights[i], weights, strict=True)]
        spread = [float(np.square(v - output).sum()) for v in values[i].numpy()]
        assert state.stderr[i].item() == pytest.approx(
            math.sqrt(sum(c * s for c, s in zip(noise, spread, strict=True)))
        )
        assert state.lse_stderr[i].item() == pytest.approx(math.sqrt(sum(noise)))


@pytest.mark.parametrize("seed", range(5))
def test_any_split_in_any_order_gives_the_same_state(seed: int) -> None:
    random, candidates = np.random.default_rng(seed), _candidates(40)
    live = torch.from_numpy(random.random((3, 40)) < 0.8)
    live[0, :12] = False  # a part may hold nothing for a query
    whole = _part(*candidates, slice(None), live)
    cuts = [0, *sorted(random.choice(np.arange(1, 40), 5, replace=False)), 40]
    parts = [_part(*candidates, slice(low, high), live) for low, high in itertools.pairwise(cuts)]
    random.shuffle(parts)
    _same(merged(parts), whole)
    while len(parts) > 1:  # any tree of merges
        i, j = sorted(random.choice(len(parts), 2, replace=False))
        parts.append(merged([parts.pop(j), parts.pop(i)]))
    _same(parts[0], whole)


def test_exact_parts_add_no_error() -> None:
    scores, log_weights, values = _candidates(8)
    whole = _part(scores, log_weights.masked_fill(torch.arange(8) < 4, 0), values, slice(None))
    sure = exact(*_state(scores[:1, :4], values[0, :4]))
    assert sure.stderr.tolist() == sure.lse_stderr.tolist() == [0]
    both = merged([sure, _part(scores[:1], log_weights[:1], values[:1], slice(4, 8))])
    assert both.stderr.item() == pytest.approx(whole.stderr[0].item())


def test_merged_errors_have_the_right_gradients() -> None:
    scores, log_weights, values = _candidates(6)

    def error(scores: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        state = merged(
            [_part(scores, log_weights, values, slice(0, 2)), _part(scores, log_weights, values, slice(2, 6))]
        )
        return state.output, state.lse, state.stderr, state.lse_stderr

    assert torch.autograd.gradcheck(error, (scores.requires_grad_(), values.requires_grad_()))


def test_sampled_sums_are_right_on_average() -> None:
    """Over many draws the sums Σ e^a and Σ e^a v are those of all records, and their errors what stderr says."""
    generator = torch.Generator().manual_seed(1)
    n, draws = 60, 4000
    scores, values = (
        torch.randn(1, n, dtype=torch.float64, generator=generator),
        torch.randn(1, n, 2, dtype=torch.float64, generator=generator),
    )
    chance = torch.linspace(0.3, 1, n, dtype=torch.float64)
    drawn = torch.rand(draws, n, dtype=torch.float64, generator=generator) < chance
    every = (scores.expand(draws, n), (-chance.log()).expand(draws, n), values.expand(draws, n, 2))
    state = sampled(every[0], 1.0, drawn, every[1], every[2])
    truth = _state(scores / 2, values[0])
    ratio = (state.lse - truth.lse).exp()
    assert ratio.mean().item() == pytest.approx(1, abs=4 * ratio.std().item() / math.sqrt(draws))
    assert ratio.std().item() == pytest.approx((state.lse_stderr * ratio).square().mean().sqrt().item(), rel=0.1)
    error = (state.output - truth.output).square().sum(1).mean().sqrt()
    assert error.item() == pytest.approx(state.stderr.square().mean().sqrt().item(), rel=0.1)


def test_sampled_labels_are_pooled_as_one_hot_vectors() -> None:
    scores, log_weights, _ = _candidates(6)
    labels = torch.tensor([[0, 1, 2, 0, 1, 2]] * 3)
    live = torch.ones(3, 6, dtype=torch.bool)
    _same(
        sampled(scores, 0.5, live, log_weights, labels, 3),
        sampled(scores, 0.5, live, log_weights, torch.nn.functional.one_hot(labels, 3).double()),
    )


def test_merging_no_parts_is_an_error() -> None:
    with pytest.raises(BadInput, match="at least one"):
        merge([])


def _sampled(
    n: int, k: int, m: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:  # scores (n,), the sample's scores (draws, m), taken (draws, m)
    """Many uniform draws of m from n records, with a query's k best as its hits."""
    scores = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    hits = torch.zeros(n, dtype=torch.bool)
    hits[scores.topk(k).indices] = True
    rng = np.random.default_rng(seed)
    drawn = torch.from_numpy(np.stack([rng.choice(n, m, replace=False) for _ in range(4000)]))
    return torch.where(hits, torch.inf, scores), scores[drawn], hits[drawn]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_estimated_tail_is_unbiased(temperature: float) -> None:
    scores, sample, taken = _sampled(n=60, k=7, m=20, seed=4)
    truth = (scores[scores.isfinite()] / temperature).exp().sum()
    missed = missed_mass(sample, taken, 60 - 7, torch.zeros(len(sample), dtype=sample.dtype), temperature)
    estimates = missed / (1 - missed)  # Z of the rest over that of the hits, here 1
    error = estimates.std() / math.sqrt(len(estimates))
    assert abs(estimates.mean() - truth) < 4 * error
    assert error < 0.02 * truth  # or the line above says nothing


def test_a_sample_of_everything_gives_the_truth() -> None:
    scores = torch.randn(3, 30, dtype=torch.float64)
    taken = scores >= scores.topk(4, dim=1).values[:, -1:]
    _, head = softmax(scores, 0.3, taken)
    _, tail = softmax(scores, 0.3, ~taken)
    actual = missed_mass(scores, taken, torch.full((3,), 26), head, 0.3)
    torch.testing.assert_close(actual, tail.exp() / (head.exp() + tail.exp()))
    torch.testing.assert_close(missed_mass(scores, taken, 26, head, 0.3), actual)
    # each sampled record stands for more of them
    assert (missed_mass(scores, taken, 260, head, 0.3) > actual).all()


def test_huge_scores_do_not_overflow_the_ratio() -> None:
    for offset in (1e4, -1e4):
        sample, head = torch.full((1, 4), offset), torch.tensor([offset])
        actual = missed_mass(sample, torch.zeros(1, 4, dtype=torch.bool), 1, head, 1.0)
        torch.testing.assert_close(actual, torch.tensor([0.5]))


def test_missed_mass_without_hits_or_samples() -> None:
    sample, none = torch.zeros(4, 2), torch.zeros(2, dtype=torch.bool)
    taken, empty = torch.stack([~none, none, ~none, none]), torch.full((4,), -math.inf)
    others = torch.tensor([0, 5, 5, 0])
    actual = missed_mass(sample, taken, others, empty, 1.0)
    assert actual[[0, 1, 3]].tolist() == [0, 1, 0]
    assert actual[2].isnan()
    drawn_none = missed_mass(torch.empty(1, 0), torch.empty(1, 0, dtype=torch.bool), 0, torch.zeros(1), 1.0)
    assert drawn_none.tolist() == [0]


def test_the_estimate_carries_no_gradient() -> None:
    sample = torch.zeros(1, 2, requires_grad=True)
    head = torch.zeros(1, requires_grad=True)
    assert not missed_mass(sample, torch.zeros(1, 2, dtype=torch.bool), 3, head, 1.0).requires_grad
