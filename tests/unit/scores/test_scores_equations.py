"""Scores against the equations: values, precision, gradients, dtypes and folds."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from worlds import awkward

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.scores import (
    Additive,
    Constant,
    Cosine,
    Dot,
    Fold,
    Gaussian,
    General,
    LinearAdditive,
    NegativeL2,
    ScaledDot,
    Score,
    fold,
    score_of,
)
from softdb.scoring import additive, distance

Floats = np.ndarray[Any, np.dtype[np.float64]]

# -- the equations, of one query and one key, as loops in float64 ------------------------------------------------------


def general(weight: Floats, query: Floats, key: Floats) -> float:
    return sum(float(query[i] * weight[i, j] * key[j]) for i in range(len(query)) for j in range(len(key)))


def additive_loop(inner: Floats, outer: Floats, weight: Floats, query: Floats, key: Floats) -> float:
    return sum(
        float(weight[u]) * math.tanh(reference.dot(inner[u], query) + reference.dot(outer[u], key))
        for u in range(len(weight))
    )


def linear_additive(ours: Floats, theirs: Floats, query: Floats, key: Floats) -> float:
    return reference.dot(ours, query) + reference.dot(theirs, key)


def scaled_l2(bandwidth: Floats, query: Floats, key: Floats) -> float:
    return -sum(((float(a) - float(b)) / float(h)) ** 2 for a, b, h in zip(query, key, bandwidth, strict=True))


# -- the scores --------------------------------------------------------------------------------------------------------

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
    for actual in _shared_and_own(score, queries, keys):
        assert actual.dtype is torch.float32
        assert actual.shape == expected.shape
        assert (np.abs(actual.double().numpy() - expected) <= bound + 1e-6 * np.abs(expected)).all()


@pytest.mark.parametrize("world", ["near duplicates, far out", "far groups", "wide column"])
def test_distances_of_near_duplicates_are_not_lost(world: str) -> None:
    """‖q‖‖k‖ is large here, so the project's tolerance says little: the distance itself must be right."""
    keys = torch.from_numpy(WORLDS[world])
    queries = (keys[:8].double() + 0.01).float()
    expected = reference.scores(reference.negative_l2, queries.numpy(), keys.numpy())
    for actual in _shared_and_own(NegativeL2(), queries, keys):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)


def test_a_distance_is_never_negative() -> None:
    keys = torch.from_numpy(WORLDS["wide column"])
    assert (NegativeL2()(keys, keys) <= 0).all()


def test_many_keys_are_widened_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.from_numpy(WORLDS["awkward"])
    whole = NegativeL2()(keys[:5], keys)
    monkeypatch.setattr(distance, "BLOCK", 7)
    torch.testing.assert_close(NegativeL2()(keys[:5], keys), whole)


@every_score
def test_float64_queries_give_float64_scores(score: Score, equation: reference.Score) -> None:
    keys, queries = WORLDS["awkward"], WORLDS["awkward"][:6].astype(np.float64) + 0.1
    for actual in _shared_and_own(score, torch.from_numpy(queries), torch.from_numpy(keys)):
        np.testing.assert_allclose(actual, reference.scores(equation, queries, keys), rtol=1e-12, atol=1e-12)


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
    for actual in _shared_and_own(score, queries, keys):
        for grad in torch.autograd.grad(actual.sum(), (queries, keys)):
            assert torch.isfinite(grad).all()


def test_cosine_of_a_zero_vector_is_zero_and_pulls_nowhere() -> None:
    queries = torch.tensor([[0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    actual = Cosine()(queries, torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    assert actual[0].tolist() == [0, 0]
    assert actual[1, 0] == 0
    assert torch.autograd.grad(actual[0].sum(), queries)[0].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_cosine_knows_no_size(size: float) -> None:
    queries, keys = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])
    for actual in _shared_and_own(Cosine(), queries * size, keys) + _shared_and_own(Cosine(), queries, keys * size):
        assert actual.item() == pytest.approx(0.96, rel=1e-6)


@every_score
def test_no_keys_give_no_scores(score: Score, equation: reference.Score) -> None:
    queries = torch.ones(2, 3, requires_grad=True)
    for actual in _shared_and_own(score, queries, torch.empty(0, 3)):
        assert actual.shape == (2, 0)
        (grad,) = torch.autograd.grad(actual.sum(), queries)
        assert grad.tolist() == torch.zeros(2, 3).tolist()


def test_metrics_and_scores_name_each_other() -> None:
    assert [type(score_of(metric)) for metric in Metric] == [Dot, Cosine, NegativeL2]
    assert all(score_of(metric).metric is metric for metric in Metric)  # type: ignore[attr-defined]
    assert ScaledDot().metric is Metric.DOT
    assert Dot() == Dot()


# -- scores with weights and bandwidths --------------------------------------------------------------------------------

D_Q, D_K, HIDDEN = 3, 4, 5


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _made() -> dict[str, tuple[Any, Callable[..., float], tuple[int, int]]]:
    """Scores with parameters, in float64, each with its equation and the widths it takes."""
    torch.manual_seed(5)
    bilinear, network, linear = (
        General(D_Q, D_K).double(),
        Additive(D_Q, D_K, HIDDEN).double(),
        LinearAdditive(D_Q, D_K),
    )
    linear = linear.double()
    bandwidth = torch.tensor([0.5, 2.0, 1.5, 0.7], dtype=torch.float64)

    def array(parameter: torch.Tensor) -> Floats:
        return parameter.detach().numpy()

    return {
        "general": (bilinear, lambda q, k: general(array(bilinear.weight), q, k), (D_Q, D_K)),
        "additive": (
            network,
            lambda q, k: additive_loop(
                array(network.query_weight), array(network.key_weight), array(network.weight), q, k
            ),
            (D_Q, D_K),
        ),
        "linear additive": (
            linear,
            lambda q, k: linear_additive(array(linear.query_weight), array(linear.key_weight), q, k),
            (D_Q, D_K),
        ),
        "l2, one bandwidth": (
            NegativeL2(torch.tensor(0.6, dtype=torch.float64), learnable=True),
            lambda q, k: scaled_l2(np.full(D_K, 0.6), q, k),
            (D_K, D_K),
        ),
        "l2, bandwidths": (
            NegativeL2(bandwidth, learnable=True),
            lambda q, k: scaled_l2(bandwidth.numpy(), q, k),
            (D_K, D_K),
        ),
        "l2, fixed bandwidth": (NegativeL2(0.6), lambda q, k: scaled_l2(np.full(D_K, 0.6), q, k), (D_K, D_K)),
    }


MADE = _made()
made = pytest.mark.parametrize(("score", "equation", "widths"), MADE.values(), ids=MADE.keys())
PLAIN = {name: (score, equation, (D_K, D_K)) for name, (score, equation) in PAIRS.items()}
ALL = {**PLAIN, **MADE}
each = pytest.mark.parametrize(("score", "equation", "widths"), ALL.values(), ids=ALL.keys())


def _loops(equation: Callable[..., float], queries: torch.Tensor, keys: torch.Tensor) -> Floats:
    """The equation over batches: shared keys where dimensions agree, else each query's own."""
    q, k = queries.numpy(), keys.numpy()
    if q.ndim == 2 and k.ndim == 2:
        return reference.scores(equation, q, k)
    if q.ndim == 2:
        return np.array([reference.scores(equation, one[None], own)[0] for one, own in zip(q, k, strict=True)])
    return np.array([_loops(equation, a, b) for a, b in zip(queries, keys, strict=True)])


SHAPES = {
    "shared": ((3,), (6,)),
    "own": ((3,), (3, 6)),
    "batched, shared": ((2, 3), (2, 6)),
    "batched, own": ((2, 3), (2, 3, 6)),
    "batched twice, shared": ((2, 1, 3), (2, 1, 6)),
}
every_shape = pytest.mark.parametrize(("ours", "theirs"), SHAPES.values(), ids=SHAPES.keys())


@each
@every_shape
def test_every_shape_gives_the_equation(
    score: Any, equation: Any, widths: tuple[int, int], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    torch.manual_seed(1)
    queries, keys = _random(*ours, widths[0]), _random(*theirs, widths[1])
    keys[..., 1, :] = 0
    actual = score(queries, keys)
    assert actual.dtype is torch.float64
    np.testing.assert_allclose(actual.detach(), _loops(equation, queries, keys), rtol=1e-12, atol=1e-12)
    # keys in another dtype are compared in the queries'
    half = score(queries, keys.half())
    assert half.dtype is torch.float64
    np.testing.assert_allclose(half.detach(), _loops(equation, queries, keys.half().double()), rtol=1e-12, atol=1e-12)


@each
@every_shape
def test_every_gradient_is_the_derivative(
    score: Any, equation: Any, widths: tuple[int, int], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    torch.manual_seed(2)
    queries, keys = _random(*ours, widths[0]).requires_grad_(), _random(*theirs, widths[1]).requires_grad_()
    parameters = list(score.parameters()) if isinstance(score, torch.nn.Module) else []
    # gradcheck moves the numbers in place, so the parameters it moves are the score's own
    assert torch.autograd.gradcheck(lambda q, k, *_: score(q, k), (queries, keys, *parameters))


@made
@pytest.mark.parametrize("size", [1e4, 1e6])
def test_large_scores_stay_right(score: Any, equation: Any, widths: tuple[int, int], size: float) -> None:
    torch.manual_seed(3)
    queries, keys = (_random(4, widths[0]) * size).float(), _random(7, widths[1]).float()
    narrow = copy.deepcopy(score).float()
    expected = _loops(equation, queries.double(), keys.double())
    for actual in _shared_and_own(narrow, queries, keys):
        assert actual.dtype is torch.float32
        np.testing.assert_allclose(actual.detach(), expected, rtol=2e-5, atol=1e-5 * np.abs(expected).max())


@made
def test_gradients_stay_finite_at_zeros_and_duplicates(score: Any, equation: Any, widths: tuple[int, int]) -> None:
    keys = torch.zeros(4, widths[1], dtype=torch.float64)
    keys[1:3] = 1
    queries = torch.zeros(2, widths[0], dtype=torch.float64)
    queries[1] = 1
    keys.requires_grad_()
    queries.requires_grad_()
    sources = [one for one in (queries, keys, *score.parameters()) if one.requires_grad]
    for actual in _shared_and_own(score, queries, keys):
        for grad in torch.autograd.grad(actual.sum(), sources):
            assert torch.isfinite(grad).all()


@made
def test_no_keys_give_no_scores_of_scores_with_weights(score: Any, equation: Any, widths: tuple[int, int]) -> None:
    for shape in ((0, widths[1]), (3, 0, widths[1])):
        assert score(_random(3, widths[0]), _random(*shape)).shape == (3, 0)
    assert score(_random(0, widths[0]), _random(4, widths[1])).shape == (0, 4)


def test_general_starts_as_the_dot_product() -> None:
    queries, keys = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(General(4, 4)(queries, keys), Dot()(queries, keys))
    weight = General(6, 3).weight.detach()
    torch.testing.assert_close(weight.mT @ weight, torch.eye(3))


@pytest.mark.parametrize("shape", [(40, D_K), (6, 40, D_K)], ids=["shared", "own"])
def test_additive_blocks_do_not_change_the_result(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    score, queries = MADE["additive"][0], _random(6, D_Q).requires_grad_()
    keys = _random(*shape).requires_grad_()
    sources = (queries, keys, *score.parameters())
    whole = score(queries, keys)
    wanted = torch.autograd.grad(whole.square().sum(), sources)
    calls: list[int] = []
    inner = additive._scores
    monkeypatch.setattr(additive, "BLOCK", 6 * HIDDEN * 7)

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[1].shape[-2])
        return inner(*arguments)

    monkeypatch.setattr(additive, "_scores", counted)
    parts = score(queries, keys)
    assert calls == [7] * 5 + [5]
    torch.testing.assert_close(parts, whole)
    for actual, expected in zip(torch.autograd.grad(parts.square().sum(), sources), wanted, strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(calls) == 12  # made again in backward, not kept


def test_weights_of_the_linear_additive_score_do_not_depend_on_the_query() -> None:
    score, keys = MADE["linear additive"][0], _random(6, D_K)
    weights = score(_random(3, D_Q), keys).softmax(1)
    torch.testing.assert_close(weights, weights[:1].expand_as(weights))


def test_additive_scores_take_weights() -> None:
    network, linear = MADE["additive"][0], MADE["linear additive"][0]
    queries, keys = _random(2, D_Q), _random(3, D_K)
    twin = Additive(weights=[network.query_weight, network.key_weight, network.weight])
    torch.testing.assert_close(twin(queries, keys), network(queries, keys))
    assert twin.weight.data_ptr() != network.weight.data_ptr()
    other = LinearAdditive(weights=list(linear.parameters()))
    torch.testing.assert_close(other(queries, keys), linear(queries, keys))
    assert repr(twin) == f"Additive({D_Q}, {D_K}, hidden={HIDDEN})"
    assert repr(other) == f"LinearAdditive({D_Q}, {D_K})"
    assert repr(General(2, 3)) == "General(2, 3)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Additive(), "has no weights; give query_dim=, key_dim= and hidden="),
        (lambda: Additive(weights=None), "has no weights"),
        (lambda: Additive(2, 3), "has no weights"),
        (lambda: Additive(2, 3, 0), "hidden is 0; expected a whole number at least 1"),
        (lambda: Additive(2, weights=[torch.ones(2, 2)] * 3), "both widths and weights"),
        (lambda: Additive(weights=[torch.ones(2, 2)] * 3), r"expected 3 tensors: W_q \(hidden, query_dim\)"),
        (lambda: Additive(weights=[torch.ones(2, 2)] * 2), "expected 3 tensors"),
        (lambda: Additive(weights=[torch.ones(2, 2), torch.ones(3, 2), torch.ones(2)]), r"\(2, 2\), \(3, 2\) and"),
        (lambda: LinearAdditive(), "has no weights; give query_dim= and key_dim="),
        (lambda: LinearAdditive(2), "has no weights"),
        (lambda: LinearAdditive(2, 3, weights=[torch.ones(2)] * 2), "both widths and weights"),
        (lambda: LinearAdditive(weights=[torch.ones(2)]), "expected 2 tensors"),
        (lambda: LinearAdditive(weights=[torch.ones(2), 3]), "expected 2 tensors"),  # type: ignore[list-item]
        (lambda: General(0, 3), "query_dim is 0"),
        (lambda: General(2, None), "key_dim is None"),  # type: ignore[arg-type]
    ],
)
def test_scores_without_their_weights_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make()


@made
def test_wrong_widths_are_refused(score: Any, equation: Any, widths: tuple[int, int]) -> None:
    ours, theirs = widths
    with pytest.raises(BadInput, match=r"queries are 9 wide.*(made for|keys are)"):
        score(torch.ones(2, 9), torch.ones(5, theirs))
    with pytest.raises(BadInput, match=r"keys are 9 wide"):
        score(torch.ones(2, ours), torch.ones(5, 9))


@each
@pytest.mark.parametrize(("ours", "theirs"), [((), (5,)), ((2,), (3, 5)), ((2, 3), (5,)), ((2, 3), (4, 5))])
def test_shapes_that_do_not_meet_are_refused(
    score: Any, equation: Any, widths: tuple[int, int], ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    queries, keys = torch.ones(*ours, widths[0]), torch.ones(*theirs, widths[1])
    named = re.escape(f"queries have shape {tuple(queries.shape)} and keys {tuple(keys.shape)}")
    with pytest.raises(BadInput, match=named):
        score(queries, keys)


# -- bandwidths of L2 --------------------------------------------------------------------------------------------------


def test_the_bandwidth_comes_back() -> None:
    assert NegativeL2().bandwidth.item() == 1
    assert NegativeL2(learnable=True).bandwidth.item() == 1
    for given in (0.3, [0.3, 4.0], np.array([0.3, 4.0]), torch.tensor([0.3, 4.0]), 2):
        expected = torch.as_tensor(given, dtype=torch.float64)
        torch.testing.assert_close(NegativeL2(given).bandwidth, expected, rtol=1e-14, atol=0)  # type: ignore[arg-type]
        torch.testing.assert_close(NegativeL2(given, learnable=True).bandwidth, expected.float())  # type: ignore[arg-type]
    assert NegativeL2(torch.tensor(2.0).double(), learnable=True).bandwidth.dtype is torch.float64
    assert repr(NegativeL2()) == "NegativeL2()"
    assert repr(NegativeL2(0.3, learnable=True)) == "NegativeL2(bandwidth=0.3, learnable=True)"
    assert repr(NegativeL2([1.0, 2.0])) == "NegativeL2(bandwidth=[1.0, 2.0])"


def test_only_a_learnable_bandwidth_is_a_parameter_and_both_are_saved() -> None:
    assert not list(NegativeL2(0.3).parameters())
    assert not NegativeL2().state_dict()
    (log_bandwidth,) = NegativeL2(0.3, learnable=True).parameters()
    assert log_bandwidth.item() == pytest.approx(math.log(0.3))
    other = NegativeL2(1.0)
    other.load_state_dict(NegativeL2(0.3).state_dict())
    assert other.bandwidth.item() == pytest.approx(0.3, rel=1e-15)


@pytest.mark.parametrize(
    ("bandwidth", "words"),
    [
        (0.0, "finite numbers above 0"),
        (-1, "finite numbers above 0"),
        (math.nan, "finite numbers above 0"),
        ([1.0, math.inf], "finite numbers above 0"),
        ([[1.0, 2.0]], r"shape \(1, 2\)"),
        ([], r"shape \(0,\)"),
        (True, "expected a number above 0"),
        ("wide", "'wide'; expected a number above 0"),
        (torch.tensor(1.0, requires_grad=True), "learnable=True"),
    ],
)
@pytest.mark.parametrize("kind", [NegativeL2, Gaussian])
def test_bad_bandwidths_are_refused(kind: Any, bandwidth: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        kind(bandwidth)


def test_a_bandwidth_a_coordinate_must_fit_the_queries() -> None:
    with pytest.raises(BadInput, match=r"queries are 3 wide \(shape \(2, 3\)\) but this score was made for 2"):
        NegativeL2([1.0, 2.0])(torch.ones(2, 3), torch.ones(5, 3))


def test_near_duplicates_survive_a_bandwidth() -> None:
    keys = torch.from_numpy(WORLDS["far groups"])
    queries = (keys[:8].double() + 0.01).float()
    for h in (np.full(16, 0.02), np.linspace(0.01, 0.05, 16)):
        expected = np.array([[scaled_l2(h, q, k) for k in keys.numpy()] for q in queries.numpy()])
        for actual in _shared_and_own(NegativeL2(h.tolist()), queries, keys):
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)


# -- folds -------------------------------------------------------------------------------------------------------------

PLAIN_SCORES: dict[Metric, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Metric.DOT: lambda q, k: q @ k.mT,
    Metric.COSINE: lambda q, k: torch.nn.functional.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1),
    Metric.L2: lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1),
}
FOLDED = {
    name: (score, widths) for name, (score, _, widths) in ALL.items() if name not in ("additive", "l2, bandwidths")
}
FOLDED["constant"] = (Constant(), (D_K, D_K))


@pytest.mark.parametrize(("score", "widths"), FOLDED.values(), ids=FOLDED.keys())
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_fold_is_the_score(score: Any, widths: tuple[int, int], batch: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    queries, keys = _random(*batch, 3, widths[0]).requires_grad_(), _random(*batch, 6, widths[1])
    folded = fold(score, queries)
    assert folded is not None
    assert folded.queries.shape == (*batch, 3, widths[1])
    assert folded.scale is not None
    assert torch.as_tensor(folded.scale).detach() > 0
    bias = torch.as_tensor(folded.bias).unsqueeze(-1)
    again = folded.scale * PLAIN_SCORES[folded.metric](folded.queries, keys) + bias
    actual = score(queries, keys)
    torch.testing.assert_close(again, actual)
    sources = [queries, *(score.parameters() if isinstance(score, torch.nn.Module) else ())]
    for one, other in zip(
        torch.autograd.grad(again.square().sum(), sources, materialize_grads=True),
        torch.autograd.grad(actual.square().sum(), sources, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_scores_without_an_index_form_have_no_fold() -> None:
    queries = torch.ones(2, 3)
    for score in (Additive(3, 3, 4), NegativeL2([1.0, 2.0, 3.0]), Gaussian([1.0, 2.0, 3.0]), lambda q, k: q @ k.mT):
        assert fold(score, queries) is None
    # these have an index, but not for the queries as they are
    for moved in (General(3, 3), LinearAdditive(3, 3)):
        assert fold(moved, queries) is not None


def test_the_fold_of_a_plain_callable_with_a_metric_is_its_order() -> None:
    class Named:
        metric = Metric.COSINE

        def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return Cosine()(queries, keys).exp()

    queries = torch.ones(2, 3)
    assert fold(Named(), queries) == Fold(Metric.COSINE, queries, None, 0.0)


def test_an_invalid_fold_is_refused() -> None:
    class Odd:
        def __call__(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return queries

        def fold(self, queries: torch.Tensor) -> str:
            return "dot"

    with pytest.raises(BadInput, match=r"is 'dot'; return a softdb.scores.Fold or None"):
        fold(Odd(), torch.ones(2, 3))


def test_standard_scores_are_made_once() -> None:
    assert all(score_of(metric) is score_of(metric) for metric in Metric)
    assert NegativeL2(2.0).metric is Metric.L2
    assert Gaussian().metric is Metric.L2
