"""Functional attention against loops: both paths, gradients, masks and edge cases."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from compare import close, same
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from softdb import scores
from softdb.attend import blocks
from softdb.errors import BadInput
from softdb.functional import Attended, attention
from softdb.kernels import available
from softdb.weights import Weighed, softmax

module = importlib.import_module("softdb.functional")
D, V = 3, 2

# -- the equations -----------------------------------------------------------------------------------------------------


def simplex(z: reference.Floats, alpha: float) -> reference.Floats:
    """Sparsemax (alpha 2) and entmax15: p = [(alpha - 1) z - tau]₊^(1 / (alpha - 1)) with Σ p = 1, by bisection."""
    z = (alpha - 1) * z
    low, high = z.max() - 1, z.max()
    for _ in range(200):
        tau = (low + high) / 2
        total = sum(max(0.0, one - tau) ** (1 / (alpha - 1)) for one in z)
        low, high = (tau, high) if total > 1 else (low, tau)
    return np.array([max(0.0, one - high) ** (1 / (alpha - 1)) for one in z])


def entropy(p: reference.Floats, alpha: float) -> float:
    return float((p - p**alpha).sum() / (alpha * (alpha - 1)))


def weigh(name: str, s: reference.Floats, t: float) -> tuple[reference.Floats, float]:
    """Weights and lse of the live scores (k,), k at least 1."""
    z, first = s / t, np.eye(len(s))[int(np.argmax(s))]
    if name in ("sparsemax", "entmax15"):
        p = simplex(z, alpha := 2.0 if name == "sparsemax" else 1.5)
        return p, float(p @ z) + entropy(p, alpha)
    if name == "softmax":
        return reference.softmax(s, t, [True] * len(s))
    if name == "uniform":
        return np.full(len(s), 1 / len(s)), math.log(len(s))
    if name == "argmax":
        return first, float(z.max())
    total = s.sum()
    return (s / total, math.log(total)) if total > 0 else (s * 0, -math.inf)


def loop(score: Any, name: str, q: Any, k: Any, v: Any, t: float, live: Any = None) -> tuple[Any, Any, Any]:
    """Output (m, v), lse (m,) and weights (m, n) of 2-D arrays, one query at a time."""
    q, k, v = reference.floats(q), reference.floats(k), reference.floats(v)
    output, lse, weights = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf), np.zeros((len(q), len(k)))
    for i, query in enumerate(q):
        some = [j for j in range(len(k)) if live is None or live[i, j]]
        if some:
            weights[i, some], lse[i] = weigh(name, np.array([score(query, k[j]) for j in some]), t)
        for j in some:
            output[i] += weights[i, j] * v[j]
    return output, lse, weights


def _array(tensor: Any) -> reference.Floats:
    return np.asarray(tensor.detach().double())


def _general(one: scores.General) -> reference.Score:
    return lambda q, k: float(q @ _array(one.weight) @ k)


def _additive(one: scores.Additive) -> reference.Score:
    inner, outer, last = _array(one.query_weight), _array(one.key_weight), _array(one.weight)
    return lambda q, k: sum(w * math.tanh(x) for w, x in zip(last, inner @ q + outer @ k, strict=True))


def _linear(one: scores.LinearAdditive) -> reference.Score:
    return lambda q, k: float(_array(one.query_weight) @ q + _array(one.key_weight) @ k)


def _kernel(name: str) -> Callable[[scores.Kernel], reference.Score]:
    def made(one: scores.Kernel) -> reference.Score:
        h = 1.0 if one.log_bandwidth is None else float(one.bandwidth.detach())
        return lambda q, k: reference.KERNELS[name](math.sqrt(-reference.negative_l2(q, k)) / h)

    return made


def _plain(equation: reference.Score) -> Callable[[Any], reference.Score]:
    return lambda _: equation


def _wide(h: float) -> Any:
    return {"bandwidth": torch.tensor(h, dtype=torch.float64), "learnable": True}


SCORES: dict[str, tuple[Callable[[], Any], Callable[[Any], reference.Score]]] = {
    "dot": (scores.Dot, _plain(reference.dot)),
    "scaled dot": (scores.ScaledDot, _plain(reference.scaled_dot)),
    "cosine": (scores.Cosine, _plain(reference.cosine)),
    "general": (lambda: scores.General(D, D).double(), _general),
    "additive": (lambda: scores.Additive(D, D, 4).double(), _additive),
    "linear additive": (lambda: scores.LinearAdditive(D, D).double(), _linear),
    "l2": (
        lambda: scores.NegativeL2(**_wide(1.5)),
        lambda one: lambda q, k: reference.negative_l2(q, k) / float(one.bandwidth.detach()) ** 2,
    ),
    "gaussian": (lambda: scores.Gaussian(**_wide(1.5)), _kernel("gaussian")),
    "laplacian": (lambda: scores.Laplacian(**_wide(1.5)), _kernel("laplacian")),
    "boxcar": (lambda: scores.Boxcar(**_wide(2.0)), _kernel("boxcar")),
    "epanechnikov": (lambda: scores.Epanechnikov(**_wide(2.0)), _kernel("epanechnikov")),
    "triangular": (lambda: scores.Triangular(**_wide(2.0)), _kernel("triangular")),
    "constant": (scores.Constant, _kernel("constant")),
}
KERNELS = tuple(reference.KERNELS)
WEIGHTS = ("softmax", "sparsemax", "entmax15", "normalised", "uniform", "argmax")
PAIRS = [(score, weight) for score in SCORES for weight in WEIGHTS if weight != "normalised" or score in KERNELS]
every_score = pytest.mark.parametrize("name", SCORES)
every_pair = pytest.mark.parametrize(("name", "weights"), PAIRS)
both_paths = pytest.mark.parametrize("path", ["dense", "streamed"], indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of the scores. Streams come in small blocks, masks in small chunks."""

    def never(*_: Any) -> None:
        raise AssertionError("the other path was taken")

    monkeypatch.setattr(module, "DENSE", 1 << 24 if request.param == "dense" else 0)
    monkeypatch.setattr(module, "_streamed" if request.param == "dense" else "_dense", never)
    monkeypatch.setattr(module, "MASKED", 20)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    monkeypatch.setattr(blocks, "TILE", 8)
    return str(request.param)


def world(m: int = 4, n: int = 6, lead: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query (…, m, D), key (…, n, D) and value (…, n, V) that want gradients."""
    torch.manual_seed(3)
    shapes = (m, D), (n, D), (n, V)
    return [torch.randn(*lead, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


# -- the equations -----------------------------------------------------------------------------------------------------


def _scored(name: str) -> tuple[Any, reference.Score]:
    torch.manual_seed(5)
    make, equation = SCORES[name]
    score = make()
    return score, equation(score)


def _temperature(weights: str) -> float:
    return 1.0 if weights == "normalised" else 0.7


@every_pair
def test_attention_equals_the_equation(name: str, weights: str) -> None:
    (q, k, v), (score, equation) = world(lead=(2,)), _scored(name)
    live = torch.rand(2, 4, 6) < 0.7
    live[0, 1] = False
    t = _temperature(weights)
    actual = attention(q, k, v, score=score, weights=weights, temperature=t, mask=live, details=True)
    assert isinstance(actual, Attended)
    for i in range(2):
        expected = loop(equation, weights, q[i].detach(), k[i].detach(), v[i].detach(), t, live[i])
        for one, other in zip(actual, expected, strict=True):
            close(one[i], other, 1e-9)


@every_pair
def test_both_paths_agree(name: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = world(5, 11, (2,))
    score = _scored(name)[0]
    live = torch.rand(2, 5, 11) < 0.7
    live[0, 1] = False
    learnt = [one for one in getattr(score, "parameters", list)() if weights not in ("uniform", "argmax")]
    wanted = [v] if weights == "argmax" else [q, k, v, *learnt]

    def answer() -> Tensor:
        return attention(q, k, v, score=score, weights=weights, temperature=_temperature(weights), mask=live)

    expected = answer()
    monkeypatch.setattr(module, "DENSE", 0)
    monkeypatch.setattr(module, "MASKED", 20)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 4)
    same(answer(), expected, wanted, 1e-8)


def test_a_kernel_is_normalised_by_default() -> None:
    q, k, v = world()
    close(
        attention(q, k, v, score=scores.Gaussian()), attention(q, k, v, score=scores.Gaussian(), weights="normalised")
    )
    assert not attention(q, k, v, score=scores.Gaussian()).allclose(
        attention(q, k, v, score=scores.Gaussian(), weights="softmax")
    )


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    assert queries.ndim == keys.ndim == 2
    return queries @ keys.mT


@pytest.mark.parametrize(
    ("path", "keys"),
    [*((path, keys) for path in ("dense", "streamed") for keys in ((2, 5), (2, 1), (1, 1))), ("dense", (0, 5))],
    indirect=["path"],
)
def test_a_plain_callable_sees_two_dimensions(keys: tuple[int, int], path: str) -> None:
    q, (_, k, v) = world(lead=(0 if keys[0] == 0 else 2, 5))[0], world(lead=keys)
    same(attention(q, k, v, score=_product), attention(q, k, v, score=scores.Dot()), [q, k, v])
    kernel = scores.Gaussian()
    actual = attention(q, k, v, score=lambda one, other: kernel(one, other), weights="normalised")
    same(actual, attention(q, k, v, score=kernel), [q, k, v])


def test_keys_of_another_width() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5), torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    score = scores.General(5, 3)
    close(attention(q, k, v, score=score), attention(q @ score.weight, k, v, score=scores.Dot()), 1e-6)
    assert attention(q, k, v, score=score, weights="uniform").shape == (2, 4, 2)


def test_shared_keys_are_scored_once() -> None:
    asked = []

    def score(queries: Tensor, keys: Tensor) -> Tensor:
        asked.append((len(queries), len(keys)))
        return queries @ keys.mT

    q, (_, k, v) = world(lead=(2, 5))[0], world(lead=(2, 1))
    attention(q, k, v, score=score)
    assert asked == [(5 * 4, 6)] * 2  # heads become queries


def test_details_are_never_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = world(dtype=torch.float16)
    expected = attention(q, k, v)
    monkeypatch.setattr(module, "DENSE", 0)
    actual = attention(q, k, v, details=True)
    assert [one.dtype for one in actual] == [torch.float16, torch.float32, torch.float32]
    close(actual.output, expected)
    close(actual.weights.sum(-1), torch.ones(4), 1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own forward mode
@pytest.mark.skipif(not available(), reason="needs the compiled kernels")
def test_many_scores_without_a_gradient_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels, where these are faster; not where derivatives of any order or transforms of torch.func are wanted."""
    monkeypatch.setattr(module, "FEW", 40)
    (q, k, v), heat = world(5, 9, (2,), torch.float32), torch.rand(2, 5) + 0.5
    streams, streamed = [], module._streamed

    def counted(call: Any) -> Tensor:
        streams.append(call)
        return streamed(call)  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "_streamed", counted)
    plain = [one.detach() for one in (q, k, v)]
    for score in (None, scores.Cosine(), scores.NegativeL2(), scores.Gaussian()):
        warm = 1.0 if isinstance(score, scores.Gaussian) else heat
        expected = attention(q, k, v, score=score, temperature=warm)
        assert expected.requires_grad
        assert not streams
        with torch.no_grad():
            close(attention(q, k, v, score=score, temperature=warm), expected, 1e-5)
        close(attention(*plain, score=score, temperature=warm), expected, 1e-5)
        assert len(streams) == 2
        streams.clear()
    attention(*plain, score=scores.General(D, D))
    attention(plain[0][:, :4], *plain[1:])
    attention(*(one.double() for one in plain))
    attention(*plain, weights="sparsemax")
    attention(*plain, score=_product)
    torch.func.vmap(attention)(*plain)
    torch.func.jvp(lambda one: attention(one, *plain[1:]), (plain[0],), (plain[0],))
    with torch.autograd.forward_ad.dual_level():
        attention(torch.autograd.forward_ad.make_dual(plain[0], plain[0]), *plain[1:])  # type: ignore[no-untyped-call]
    assert not streams


class Halves:
    """A Weighting of one's own: half of softmax."""

    name, sparse = "halves", False

    def weigh(self, scores: Tensor, temperature: float, live: Tensor) -> Weighed:
        weights, lse = softmax(scores, temperature, live)
        return Weighed(weights / 2, lse, torch.full_like(lse, -torch.inf))


def test_a_weighting_of_ones_own_is_never_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DENSE", 0)
    q, k, v = world()
    close(attention(q, k, v, weights=Halves()), attention(q, k, v) / 2)


# -- gradients ---------------------------------------------------------------------------------------------------------


@both_paths
@every_pair
def test_gradients(name: str, weights: str, path: str) -> None:
    (q, _, _), (_, k, v) = world(2, 5, (2, 2)), world(2, 5, (1, 2))
    score = _scored(name)[0]
    live = torch.tensor([[True, True, False, True, True], [False] * 5])

    def answer(*_: Tensor) -> tuple[Tensor, ...] | Tensor:
        t = _temperature(weights)
        if path == "streamed":
            return attention(q, k, v, score=score, weights=weights, temperature=t, mask=live)
        actual = attention(q, k, v, score=score, weights=weights, temperature=t, mask=live, details=True)
        assert (actual.lse[..., 1] == -torch.inf).all()
        lse = actual.lse.masked_fill(actual.lse == -torch.inf, 0)  # the second query, and where a compact kernel ends
        return actual.output, lse, actual.weights

    assert gradcheck(answer, (q, k, v, *getattr(score, "parameters", list)()), fast_mode=path == "streamed")


ROUGH = ("laplacian", "triangular")  # of these there is no second derivative
TWICE = [pair for pair in PAIRS if pair[0] not in ROUGH and pair[1] not in ("uniform", "argmax")]


@pytest.mark.parametrize(("name", "weights"), TWICE)
def test_held_scores_are_differentiable_twice(name: str, weights: str) -> None:
    q, k, v = world(2, 4)
    score = _scored(name)[0]
    assert gradgradcheck(
        lambda *_: attention(q, k, v, score=score, weights=weights), (q, k, v, *getattr(score, "parameters", list)())
    )


@pytest.mark.parametrize("path", ["streamed"], indirect=True)
def test_streamed_scores_refuse_second_derivatives(path: str) -> None:
    q, k, v = world()
    (grad,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(BadInput, match="no second derivative"):
        torch.autograd.grad(grad.sum(), k)


@pytest.mark.parametrize("path", ["streamed"], indirect=True)
def test_a_hidden_parameter_is_refused_where_scores_are_streamed(path: str) -> None:
    q, k, v = world()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(BadInput, match=r"make the score an nn\.Module, or detach"):
        attention(q, k, v, score=lambda one, other: one @ other.mT * scale)


# -- participants ------------------------------------------------------------------------------------------------------


@both_paths
def test_valid_lengths(path: str) -> None:
    q, k, v = world(4, 6, (2, 3))
    each = torch.tensor([[0, 1, 5, 6], [2, 2, 6, 3]])
    for lengths, live in (
        (each, torch.arange(6) < each[:, None, :, None]),
        (each[:, 0], torch.arange(6) < each[:, :1, None, None]),
        (each[:, 0].tolist(), torch.arange(6) < each[:, :1, None, None]),
    ):
        same(attention(q, k, v, valid_len=lengths), attention(q, k, v, mask=live), [q, k, v])
    q, k, v = world(4, 6)
    live = torch.arange(6) < each[:1].mT
    close(attention(q, k, v, valid_len=each[:1]), attention(q, k, v, mask=live))
    close(attention(q, k, v, valid_len=[4]), attention(q, k, v, mask=torch.arange(6) < 4))


@both_paths
def test_a_key_must_pass_them_all(path: str) -> None:
    q, k, v = world(4, 6, (2, 3))
    mask, lengths = torch.rand(2, 1, 4, 6) < 0.7, torch.tensor([3, 5])
    live = mask & (torch.arange(6) < lengths[:, None, None, None]) & torch.ones(4, 6, dtype=torch.bool).tril()
    actual = attention(q, k, v, mask=mask.numpy(), valid_len=lengths, is_causal=True)
    same(actual, attention(q, k, v, mask=live), [q, k, v])


@both_paths
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_participants_give_zeros(weights: str, path: str) -> None:
    q, k, v = world()
    score = scores.Gaussian()
    live = torch.ones(4, 6, dtype=torch.bool)
    live[2] = False
    output = attention(q, k, v, score=score, weights=weights, mask=live)
    assert (output[2] == 0).all()
    assert (output[1] != 0).all()
    for grad in torch.autograd.grad(output[2].sum(), [q, k, v], allow_unused=True):
        assert grad is None or (grad == 0).all()
    if path == "dense":
        actual = attention(q, k, v, score=score, weights=weights, mask=live, details=True)
        assert actual.lse[2] == -torch.inf
        assert (actual.weights[2] == 0).all()


@both_paths
def test_a_key_that_takes_no_part_may_be_anything(path: str) -> None:
    q, k, v = world()
    live = torch.tensor([True, True, True, False, True, True])
    expected = attention(q, k, v, mask=live)
    with torch.no_grad():
        k[3], v[3] = 1e6, -1e6
    close(attention(q, k, v, mask=live), expected)


# -- the ends ----------------------------------------------------------------------------------------------------------


@both_paths
@every_pair
def test_the_output_lies_among_the_values(name: str, weights: str, path: str) -> None:
    q, k, v = world()
    output = attention(q, k, v, score=_scored(name)[0], weights=weights).detach()
    empty = (output == 0).all(-1, keepdim=True)  # no record in a compact kernel's support
    assert ((output >= v.detach().amin(0) - 1e-12) | empty).all()
    assert ((output <= v.detach().amax(0) + 1e-12) | empty).all()


@both_paths
@pytest.mark.parametrize("weights", ["softmax", "sparsemax", "entmax15", "uniform", "argmax"])
def test_the_order_of_the_records_changes_nothing(weights: str, path: str) -> None:
    q, k, v = world()
    order = torch.randperm(6)
    close(attention(q, k[order], v[order], weights=weights), attention(q, k, v, weights=weights))


@both_paths
@pytest.mark.parametrize("weights", ["softmax", "sparsemax", "entmax15", "argmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores(dtype: torch.dtype, weights: str, path: str) -> None:
    q, k, v = (
        torch.ones(1, 1, dtype=dtype),
        torch.tensor([[1e4], [-1e4], [9e3]], dtype=dtype),
        torch.eye(3, dtype=dtype),
    )
    q.requires_grad_()
    output = attention(q, k, v, score=scores.Dot(), weights=weights)
    close(output, [[1.0, 0, 0]])
    if output.requires_grad:
        assert torch.autograd.grad(output.sum(), q)[0].isfinite().all()
    if path == "dense":
        close(attention(q, k, v, score=scores.Dot(), weights=weights, details=True).lse, [1e4])


@both_paths
@pytest.mark.parametrize("weights", ["softmax", "sparsemax", "entmax15"])
def test_the_limits_of_the_temperature(weights: str, path: str) -> None:
    q, k, v = world()
    for name, temperature in (("argmax", 1e-6), ("uniform", 1e9)):
        close(attention(q, k, v, weights=weights, temperature=temperature), attention(q, k, v, weights=name), 1e-7)


@both_paths
def test_a_stored_key_finds_its_value(path: str) -> None:
    _, k, v = world()
    actual = attention(k, k, v, score=scores.NegativeL2(), temperature=1e-6)
    close(actual, v)
    assert (attention(k, k, v, score=scores.NegativeL2(), weights="argmax") == v).all()


@both_paths
def test_of_ties_argmax_takes_the_first(path: str) -> None:
    v = torch.arange(6.0).unsqueeze(1)
    assert attention(torch.ones(2, D), torch.ones(6, D), v, weights="argmax").tolist() == [[0], [0]]


@both_paths
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, path: str) -> None:
    q, k, v = world(dtype=dtype)
    output = attention(q, k, v)
    assert output.dtype is dtype
    expected = attention(q.float(), k.float(), v.float())
    assert (output == expected.to(dtype)).all()
    for one in torch.autograd.grad(output.float().sum(), [q, k, v]):
        assert one.dtype is dtype
    with torch.autocast("cpu", torch.bfloat16):
        close(attention(q.float(), k.float(), v.float()), expected, 1e-6)


@both_paths
def test_arrays_lists_and_whole_numbers(path: str) -> None:
    q, k, v = (one.detach() for one in world())
    expected = attention(q, k, v)
    close(attention(q.numpy(), k.tolist(), v.numpy()), expected)
    read_only = np.broadcast_to(q.numpy(), (2, 4, D))
    close(attention(read_only, k, v.tolist()), expected.expand(2, -1, -1))
    assert attention(q.float(), k, v).dtype is torch.float32
    whole = attention([[1, 2, 3]], k, v)
    assert whole.dtype is torch.float32
    close(whole, attention([[1.0, 2, 3]], k, v), 1e-6)


# -- bad input ---------------------------------------------------------------------------------------------------------

NO_SCORE = {"score": lambda queries, keys: pytest.fail("something was computed")}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one dimension": ({"query": torch.ones(3)}, "query (3,), key (6, 3), value (6, 2); expected query (…, m, d_q)"),
    "no width": ({"value": torch.ones(6, 0)}, "value (6, 0); expected query (…, m, d_q), key (…, n, d)"),
    "count": ({"value": torch.ones(5, 2)}, "key (6, 3), value (5, 2); expected"),
    "width": (
        {"key": torch.ones(6, 2), "score": scores.Dot()},
        "query is 3 wide but for keys 2 wide this score needs queries 2 wide (shapes (4, 3) and (6, 2))",
    ),
    "width of general": ({"score": scores.General(4, 3)}, "query is 3 wide but for keys 3 wide this score"),
    "width of uniform": ({"key": torch.ones(6, 2), "score": None, "weights": "uniform"}, "3 wide but for keys 2"),
    "batch": ({"key": torch.ones(2, 6, 3), "value": torch.ones(3, 6, 2)}, "key (2, 6, 3), value (3, 6, 2); expected"),
    "text": ({"query": "near"}, "query is 'near'; expected a tensor"),
    "ragged": ({"key": [[1.0], [1.0, 2.0]]}, "key is [[1.0], [1.0, 2.0]]; expected a tensor"),
    "nothing": ({"value": None}, "value is None; expected a tensor"),
    "bool": ({"query": torch.ones(4, 3) > 0}, "query is of type torch.bool; expected real numbers"),
    "complex": ({"key": torch.ones(6, 3) * 1j}, "key is of type torch.complex64; expected real numbers"),
    "NaN": ({"query": torch.full((4, 3), math.nan)}, "query holds NaN or infinity (in torch.float32), first at (0, 0)"),
    "infinity": ({"value": [[1.0, 2.0], [math.inf, 0.0]] * 3}, "value holds NaN or infinity"),
    "overflow": (
        {"key": torch.full((6, 3), 1e200, dtype=torch.float64)},
        "key holds NaN or infinity (in torch.float32)",
    ),
    "mask": ({"mask": torch.ones(4, 5) > 0}, "mask has shape (4, 5); expected (4, 6) or one that broadcasts to it"),
    "mask of a batch": ({"mask": torch.ones(2, 4, 6) > 0}, "mask has shape (2, 4, 6); expected (4, 6)"),
    "mask of numbers": ({"mask": torch.zeros(4, 6)}, "mask has dtype torch.float32; expected bool"),
    "mask of nothing": ({"mask": object()}, "expected a tensor, an array or a list"),
    "lengths": ({"valid_len": [1, 2, 3]}, "valid_len has shape (3,); expected (1,) or (1, 4)"),
    "lengths beyond": ({"valid_len": [7]}, "valid_len holds 7; expected 0 to 6"),
    "lengths below": ({"valid_len": [[1, 2, -1, 3]]}, "valid_len holds -1; expected 0 to 6"),
    "lengths of floats": ({"valid_len": [1.5]}, "valid_len has dtype torch.float64; expected whole numbers"),
    "weights": ({"weights": "hard"}, "weights is 'hard'; choose one of 'softmax'"),
    "temperature": ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
    "temperature of normalised": ({"temperature": 2.0, "weights": "normalised"}, "normalised weights have none"),
    "score": ({"score": "dot"}, "score is 'dot'; expected an object of softdb.scores or a callable"),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_before_anything_is_computed(wrong: dict[str, Any], message: str) -> None:
    right = {"query": torch.ones(4, 3), "key": torch.ones(6, 3), "value": torch.ones(6, 2), **NO_SCORE}
    with pytest.raises(BadInput, match=re.escape(message)):
        attention(**{**right, **wrong})


@both_paths
def test_a_score_that_is_wrong_is_refused(path: str) -> None:
    q, k, v = world(lead=(2,))
    with pytest.raises(BadInput, match="the score returned NaN"):
        attention(q, k, v, score=lambda one, other: one @ other.mT * math.nan)
    with pytest.raises(BadInput, match=r"the score returned shape \(\d, 3\)"):
        attention(q, k, v, score=lambda one, other: one)
    with pytest.raises(BadInput, match=r"a score is -.*; normalised weights need kernel values"):
        attention(q, k, v, score=lambda one, other: one @ other.mT, weights="normalised")


def test_a_score_must_return_a_tensor() -> None:
    with pytest.raises(BadInput, match="the score returned a float"):
        attention(*world(), score=lambda one, other: 1.0)  # type: ignore[arg-type, return-value]


# -- torch.func --------------------------------------------------------------------------------------------------------


def test_transforms_of_torch_func_are_right_or_refused_with_a_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 2)
    refused = (
        r"softdb\.attention cannot run here inside torch\.func\.grad, vmap or jvp; use torch\.autograd\.grad or back"
    )

    def loss(asked: Tensor, weights: str = "softmax") -> Tensor:
        return attention(asked, key, value, weights=weights).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(query), expected)
    each = torch.func.vmap(lambda one: loss(one[None]))(query)
    torch.testing.assert_close(each.sum(), loss(query))
    for weights in ("sparsemax", "entmax15"):
        with pytest.raises(BadInput, match=refused):
            torch.func.grad(loss)(query, weights)
        with pytest.raises(BadInput, match=refused):
            torch.func.vmap(lambda one, weights=weights: loss(one[None], weights))(query)
    monkeypatch.setattr("softdb.functional.DENSE", 0)
    with pytest.raises(BadInput, match=refused):
        torch.func.grad(loss)(query)
