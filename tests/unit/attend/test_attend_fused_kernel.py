"""The compiled soft query against float64 torch, for every metric, dtype and shape with a path of its own."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sources import stream
from torch import Tensor
from with_kernels import NEEDS_KERNELS
from worlds import snapshot

import softdb
from softdb import kernels
from softdb.attend import Columns, fused
from softdb.attend import blocks as exact
from softdb.check import Metric
from softdb.errors import BadInput
from softdb.kernels import threads
from softdb.scores import Additive, Cosine, Dot, General, LinearAdditive, NegativeL2, ScaledDot
from softdb.store.snapshot import Snapshot

pytestmark = NEEDS_KERNELS

Array = np.ndarray


class World(NamedTuple):
    snapshot: Snapshot
    part: Array  # (q, n) bool: who takes part
    ask: fused.Pass
    queries: Array  # (q, d)
    output_grad: Array  # (q, v)
    lse_grad: Array  # (q,)


class Answer(NamedTuple):
    output: Array
    lse: Array
    queries: Array
    keys: Array
    values: Array | None


METRICS = list(Metric)
QUERIES = [1, 2, 4, 5, 16, 17, 40]  # one, few, a group, two groups, each with and without padding


def world(seed: int, q: int, metric: Metric, kind: str = "values", dtype: str = "float32", **more: Any) -> World:
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 1200)), int(rng.choice([1, 3, 16, 17, 40, 130]))
    v = {"values": int(rng.choice([1, 5, 16, 33, 64, 150])), "labels": 7, "keys": d}[kind]
    keys = rng.standard_normal((n, d)).astype(dtype)
    keys[n // 2] = 0
    values: Any = {"values": rng.standard_normal((n, v)), "labels": rng.integers(0, v, n), "keys": None}[kind]
    live = rng.random(n) < more.get("live", 1.0)
    stored = snapshot(keys, values, live, dtype=dtype, cuts=[n // 3] if n > 5 else [])
    keep = live & (rng.random(n) < more.get("allowed", 1.0))
    part, mask = np.tile(keep, (q, 1)), None
    if more.get("masked"):
        mask = rng.random((q, int(live.sum()))) < 0.5
        mask[0] = False
        part[:, live] &= mask
    temperature = float(rng.choice([0.1, 1, 10]))
    classes = v if kind == "labels" else None
    ask = fused.Pass(stored, keep, mask, metric, temperature, classes, True)
    queries, output_grad = (rng.standard_normal((q, width)).astype(np.float32) for width in (d, v))
    return World(stored, part, ask, queries, output_grad, rng.standard_normal(q).astype(np.float32))


def expected(one: World) -> Answer:
    segments, ask = one.snapshot.segments, one.ask
    keys = torch.from_numpy(np.concatenate([s.keys for s in segments]).astype(np.float64)).requires_grad_()
    stored = np.concatenate([s.keys if s.values is None else s.values for s in segments])
    table = np.eye(ask.num_classes)[stored] if ask.num_classes else stored.astype(np.float64)
    values = torch.from_numpy(table).requires_grad_()
    queries = torch.from_numpy(one.queries.astype(np.float64)).requires_grad_()
    squares = -(queries[:, None] - keys).square().sum(-1)
    scores = squares if ask.metric is Metric.L2 else queries @ keys.T
    if ask.metric is Metric.COSINE:
        lengths = keys.square().sum(1)
        scores = torch.where(lengths > 0, scores / lengths.clamp(min=1e-300).sqrt(), 0.0)
    logits = (scores / ask.temperature).masked_fill(~torch.from_numpy(one.part), -torch.inf)
    some = torch.from_numpy(one.part.any(1))
    lse = logits.masked_fill(~some.unsqueeze(1), 0).logsumexp(1)
    weights = (logits - lse.unsqueeze(1)).exp()
    output = weights @ values
    loss = (output * torch.from_numpy(one.output_grad)).sum()
    loss = loss + (lse * torch.from_numpy(one.lse_grad))[some].sum()
    grads = torch.autograd.grad(loss, (queries, keys, values))
    return Answer(
        output.detach().numpy(), torch.where(some, lse, -torch.inf).detach().numpy(), *(grad.numpy() for grad in grads)
    )


def tolerance(one: World) -> float:
    """1e-5, and what the rounding of the scores themselves makes of the weights: |Δs| ≤ 4e-7 ‖q‖ ‖k‖ over T."""
    longest = max(
        float(np.linalg.norm(s.keys.astype(np.float64), axis=1).max(initial=0)) for s in one.snapshot.segments
    )
    asked = float(np.linalg.norm(one.queries, axis=1).max())
    size = {Metric.DOT: asked * longest, Metric.COSINE: asked, Metric.L2: (asked + longest) ** 2}[one.ask.metric]
    return 1e-5 + 4e-7 * size / one.ask.temperature


def check(one: World) -> None:
    """At every level that this processor has."""
    native, truth, bound = kernels.native(), expected(one), tolerance(one)
    before = native.level()
    try:
        for level in native.levels():
            native.use(level)
            check_level(one, truth, bound)
    finally:
        native.use(before)


def check_level(one: World, truth: Answer, bound: float) -> None:
    state = fused.forward(one.queries, one.ask)
    np.testing.assert_allclose(state.output, truth.output, atol=bound * max(1.0, float(np.abs(truth.output).max())))
    with np.errstate(divide="ignore"):
        lse = np.log(state.total) + state.top / one.ask.temperature
    np.testing.assert_allclose(lse, truth.lse, rtol=1e-6, atol=bound)
    grad, _ = fused.backward(one.queries, one.ask, state, (one.output_grad, one.lse_grad))
    np.testing.assert_allclose(grad, truth.queries, atol=2 * bound * max(1.0, float(np.abs(truth.queries).max())))


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.value)
@pytest.mark.parametrize("q", QUERIES)
@pytest.mark.parametrize("seed", range(3))
def test_output_lse_and_gradient_are_the_equation(seed: int, q: int, metric: Metric) -> None:
    check(world(seed, q, metric))


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.value)
@pytest.mark.parametrize("q", [1, 3, 20])
@pytest.mark.parametrize("kind", ["values", "labels", "keys"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_kind_of_column(dtype: str, kind: str, q: int, metric: Metric) -> None:
    for seed in range(10, 14):
        check(world(seed, q, metric, kind, dtype))


@pytest.mark.parametrize("q", [1, 3, 20])
@pytest.mark.parametrize(
    "more",
    [{"live": 0.7}, {"live": 0.05}, {"allowed": 0.5}, {"masked": True}, {"live": 0.8, "allowed": 0.8, "masked": True}],
    ids=str,
)
def test_only_participating_records_have_weight(q: int, more: dict[str, Any]) -> None:
    for seed in range(20, 24):
        for metric in METRICS:
            check(world(seed, q, metric, ["values", "labels", "keys"][seed % 3], **more))


@pytest.mark.slow
def test_threads_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = world(4, 5, Metric.DOT, live=0.9, masked=True)
    whole = fused.forward(one.queries, one.ask)
    monkeypatch.setattr(fused, "PIECE", 37)
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(fused, "CHUNK", 2)
    parts = fused.forward(one.queries, one.ask)
    np.testing.assert_allclose(parts.output, whole.output, atol=tolerance(one))
    np.testing.assert_allclose(parts.total, whole.total, rtol=tolerance(one))
    check(one)


@pytest.mark.parametrize("q", [1, 20])
def test_keys_and_values_learn(q: int) -> None:
    for seed in range(30, 36):
        one = world(seed, q, Metric.DOT)
        truth, state = expected(one), fused.forward(one.queries, one.ask)
        for start, segment in zip(one.snapshot.starts.tolist(), one.snapshot.segments, strict=False):
            part = slice(start, start + len(segment))
            columns = Snapshot.of(0, (segment,), one.snapshot.live[part])
            alone = one.ask._replace(columns=columns, keep=one.ask.keep[part])
            key_grad, value_grad = (np.zeros_like(column) for column in (segment.keys, segment.values))
            # the state of the whole, so that the parts' gradients are those of the whole
            fused.backward(one.queries, alone, state, (one.output_grad, one.lse_grad), (key_grad, value_grad))
            for actual, right in ((key_grad, truth.keys), (value_grad, truth.values)):
                assert right is not None
                np.testing.assert_allclose(actual, right[part], atol=2e-5 * max(1.0, float(np.abs(right).max())))


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_exponential_is_right_to_the_last_digits() -> None:
    x = np.linspace(-87, 0, 100_001, dtype=np.float32)
    actual = exponentials(x)
    np.testing.assert_allclose(actual, np.exp(x.astype(np.float64)), rtol=3e-7)
    assert exponentials(np.array([-88, -np.inf, 0], np.float32)).tolist() == [0, 0, 1]


def exponentials(x: Array) -> Array:
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    kernels.native().exponentials(padded, found := np.empty_like(padded))
    return found[: len(x)]


@pytest.mark.parametrize("length", [1e-25, 1e-18, 1e18])
def test_the_length_of_a_key_does_not_matter_to_its_cosine(length: float) -> None:
    one = world(5, 3, Metric.COSINE)
    segments = tuple(
        s.__class__(s.number, s.first_row, s.rows, s.keys * np.float32(length), s.values) for s in one.snapshot.segments
    )
    actual = fused.forward(one.queries, one.ask._replace(columns=Snapshot.of(0, segments, one.snapshot.live)))
    np.testing.assert_allclose(actual.output, expected(one).output, atol=2e-5)


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.value)
def test_scores_of_any_size_neither_overflow_nor_lose_the_answer(metric: Metric) -> None:
    one = world(6, 4, metric)
    check(one._replace(queries=one.queries * 100))
    for temperature in (1e-6, 1e6):
        check(one._replace(ask=one.ask._replace(temperature=temperature)))


@pytest.mark.slow
def test_near_duplicates_far_out_keep_their_distances(rng: np.random.Generator) -> None:
    keys = (1000 + 1e-2 * rng.standard_normal((500, 8))).astype(np.float32)
    stored = snapshot(keys, rng.standard_normal((500, 3)))
    ask = fused.Pass(stored, stored.live, None, Metric.L2, 1e-3, None, True)
    grads = rng.standard_normal((6, 3)).astype(np.float32), np.zeros(6, np.float32)
    one = World(stored, np.ones((6, 500), np.bool_), ask, keys[:6] + np.float32(1e-3), *grads)
    truth, state = expected(one), fused.forward(one.queries, one.ask)
    np.testing.assert_allclose(state.output, truth.output, atol=1e-4)
    actual, _ = fused.backward(one.queries, one.ask, state, grads)
    np.testing.assert_allclose(actual, truth.queries, atol=2e-3 * float(np.abs(truth.queries).max()))


def test_blocks_that_cannot_matter_are_not_read(rng: np.random.Generator) -> None:
    """Values of far records are NaN: read, they would show. Those of near ones all count."""
    keys = np.zeros((2048, 4), np.float32)
    keys[:256], keys[256:512] = 100, 99.99
    values = np.full((2048, 3), np.nan)
    values[:1024] = rng.standard_normal((1024, 3))  # a block may reach beyond the near ones, but not so far
    stored = snapshot(keys, values)
    ask = fused.Pass(stored, stored.live, None, Metric.DOT, 1.0, None, True)
    queries = np.ones((2, 4), np.float32)
    weights = np.exp(queries[0] @ keys[:512].T - 400.0)
    truth = weights @ stored.segments[0].values[:512] / weights.sum()  # type: ignore[index]
    state = fused.forward(queries, ask)
    np.testing.assert_allclose(state.output, np.tile(truth, (2, 1)), rtol=1e-5)
    grad, _ = fused.backward(queries, ask, state, (np.ones((2, 3), np.float32), np.zeros(2, np.float32)))
    assert np.isfinite(grad).all()


def test_a_block_that_may_matter_is_read() -> None:
    """One record with a weight of 1e-6 among others that hold nothing."""
    keys = np.full((2048, 1), -100, np.float32)
    keys[0], keys[1500] = 0, np.log(1e-6)
    values = np.zeros((2048, 1))
    values[1500] = 1
    stored = snapshot(keys, values)
    ask = fused.Pass(stored, stored.live, None, Metric.DOT, 1.0, None, True)
    state = fused.forward(np.ones((1, 1), np.float32), ask)
    np.testing.assert_allclose(state.output, [[1e-6]], rtol=1e-4)


# -- choice of the path ------------------------------------------------------------------------------------------------


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of each soft query, however small."""
    monkeypatch.setattr(fused, "WORTH", 0)
    paths: list[str] = []
    for name, module in (("fused", fused), ("blocks", exact)):
        inner: Any = getattr(module, "forward" if module is fused else "softmax_over")

        def call(*args: Any, _name: str = name, _inner: Any = inner) -> Any:
            paths.append(_name)
            return _inner(*args)

        monkeypatch.setattr(module, "forward" if module is fused else "softmax_over", call)
    return paths


def _records(rng: np.random.Generator) -> tuple[Tensor, Snapshot]:
    queries = torch.from_numpy(rng.standard_normal((3, 6)).astype(np.float32))
    return queries, snapshot(rng.standard_normal((40, 6)), rng.standard_normal((40, 2)))


def test_scores_that_fold_exactly_are_compiled(used: list[str], rng: np.random.Generator) -> None:
    queries, stored = _records(rng)
    torch.manual_seed(0)
    general = General(6, 6)
    with torch.no_grad():
        general.weight.copy_(torch.randn(6, 6))
    for score in (Dot(), ScaledDot(), Cosine(), NegativeL2(), NegativeL2(0.7), general, LinearAdditive(6, 6)):
        leaf, parameters = queries.clone().requires_grad_(), list(getattr(score, "parameters", list)())
        inputs = (leaf, *(p for p in parameters if p.requires_grad))
        answers, grads = [], []
        for wide in (leaf, leaf.double()):
            output, lse = stream(wide, stored, score, 0.3)
            answers.append((output.detach().double(), lse.detach().double()))
            loss = output.sin().sum() + lse.sum()
            grads.append(torch.autograd.grad(loss, inputs, allow_unused=True))
        assert used == ["fused", "blocks"]
        used.clear()
        for one, other in zip(answers[0], answers[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for one, other in zip(grads[0], grads[1], strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_others_are_not(used: list[str], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, stored = _records(rng)
    for score in (lambda q, k: q @ k.T, Additive(6, 6, 4), NegativeL2([0.5] * 6)):
        stream(queries, stored, score, 0.3)
        assert used.pop() == "blocks"
    stream(queries, stored, NegativeL2(0.7, learnable=True), 0.3)
    assert used.pop() == "fused"
    monkeypatch.setattr(fused, "available", lambda: False)
    stream(queries, stored, Dot(), 0.3)
    assert used.pop() == "blocks"


def test_few_pairs_go_to_torch(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, stored = _records(rng)
    monkeypatch.setattr(fused, "forward", lambda *args: pytest.fail("compiled"))
    stream(queries, stored, Dot(), 1.0)


def test_scores_beyond_float32_go_to_torch(used: list[str]) -> None:
    stored = snapshot(np.full((3, 2), 3e38), np.eye(3, 2))
    with pytest.raises(BadInput, match="NaN"):
        stream(torch.tensor([[1e30, -1e30]]), stored, Dot(), 1.0)
    assert used == ["fused", "blocks"]


@pytest.mark.parametrize("trains", ["keys", "values", "both"])
def test_columns_learn_on_both_paths(trains: str, used: list[str], rng: np.random.Generator) -> None:
    keys, values = (torch.from_numpy(rng.standard_normal((50, w)).astype(np.float32)) for w in (6, 3))
    keys.requires_grad_(trains != "values")
    values.requires_grad_(trains != "keys")
    queries = torch.from_numpy(rng.standard_normal((4, 6)).astype(np.float32)).requires_grad_()
    leaves = [one for one in (queries, keys, values) if one.requires_grad]
    results = []
    for asked in (queries, queries.double()):
        output, lse = stream(asked, Columns(keys, values), Dot(), 0.5)
        results.append(torch.autograd.grad(output.sin().sum() + lse.sum(), leaves))
    scores = (queries @ keys.T) / 0.5
    loss = (scores.softmax(1) @ values).sin().sum() + scores.logsumexp(1).sum()
    for one, other, plain in zip(*results, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)
    assert used == ["fused", "blocks"]


@pytest.mark.parametrize("loss", [torch.sum, lambda output: output.square().sum()], ids=["linear", "curved"])
def test_a_second_derivative_is_refused(loss: Any, used: list[str], rng: np.random.Generator) -> None:
    queries, stored = _records(rng)
    leaf = queries.requires_grad_()
    output, _ = stream(leaf, stored, Dot(), 1.0)
    (grad,) = torch.autograd.grad(loss(output), leaf, create_graph=True)
    with pytest.raises(BadInput, match="no second derivative"):
        torch.autograd.grad(grad.sum(), leaf)
    assert used == ["fused"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it has threads, which is the point
def test_a_forked_child_answers_too(used: list[str], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    queries, stored = _records(rng)
    with torch.no_grad():
        output, _ = stream(queries, stored, Dot(), 1.0)
        child = os.fork()
        if child == 0:
            again, _ = stream(queries, stored, Dot(), 1.0)
            os._exit(0 if np.allclose(again.numpy(), output.numpy(), atol=1e-6) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_gradient_in_column_order_is_as_good_as_one_in_row_order() -> None:
    keys = torch.randn(5000, 96, generator=torch.Generator().manual_seed(0))  # enough for the fused pass
    db = softdb.open(None, dim=96)
    db.insert(range(5000), keys)
    factors = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
    expected, actual = keys[:3].clone().requires_grad_(), keys[:3].clone().requires_grad_()
    torch.autograd.backward(db.attend(expected).output, factors.T.contiguous())
    torch.autograd.backward(db.attend(actual).output, factors.T)
    torch.testing.assert_close(actual.grad, expected.grad)
