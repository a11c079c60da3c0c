"""Soft queries and nearest records on a device, by Triton's interpreter and by torch, against float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from worlds import awkward

from softdb import attention
from softdb.attend import Columns, Request
from softdb.attend.scoring import scan
from softdb.check import Metric
from softdb.device import launch, nearest, placed_tensors, pooled, usable
from softdb.device.passes import DevicePass
from softdb.device.plan import Plan, Way
from softdb.errors import BadInput
from softdb.scores import Cosine, Dot, Gaussian, NegativeL2, Score

EQUATIONS = {Metric.DOT: reference.dot, Metric.COSINE: reference.cosine, Metric.L2: reference.negative_l2}
every_metric = pytest.mark.parametrize("metric", Metric)
CLASSES = 19
SMALL = Plan(BQ=16, BN=16, BD=16, BV=16, BL=16, num_warps=4, num_stages=1)
WIDE = SMALL._replace(BD=256, BV=256, BL=64)  # the interpreter takes as long for each tile, small or large
EXACT = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}  # of the columns as they are stored
FinderResult = list[Tensor]


@pytest.fixture
def kernels(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in tiles so small that few records fall into many, and ranges merge in several rounds."""

    def small(what: DevicePass, way: Way = Way.FORWARD) -> Plan:
        return SMALL if max(what.queries.shape[-1], what.width) <= 128 else WIDE

    monkeypatch.setattr(launch, "plan_of", small)
    monkeypatch.setattr(launch, "splits_of", lambda n, *_: (max(1, -(-n // 32)), 32))
    monkeypatch.setattr(launch, "MERGED", (2, 16))


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways."""
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    else:
        monkeypatch.setattr("softdb.device.twin.SCORED", 200)
    return str(request.param)


def placed(keys: Tensor, values: Tensor) -> Columns:
    """Tensors as `attention` asks them: on their device, if it serves."""
    return Columns(keys, values, placed=placed_tensors(keys, values))


class World:
    """Queries, keys and values whose scores differ by little, and what takes part."""

    def __init__(self, q: int, n: int, d: int, v: int, dtype: torch.dtype = torch.float32, heads: int = 0) -> None:
        random = np.random.default_rng([q, n, d, v])
        lead = (heads,) if heads else ()

        def drawn(*shape: int) -> Tensor:
            return torch.from_numpy(random.standard_normal(lead + shape).astype(np.float32))

        self.queries, self.keys, self.values = drawn(q, d) / d**0.5, drawn(n, d).to(dtype), drawn(n, v).to(dtype)
        self.labels = torch.from_numpy(random.integers(0, CLASSES, (*lead, n)))
        self.keep, self.mask = (torch.from_numpy(random.random(s) < 0.7) for s in ((n,), (*lead, q, n)))

    def asked(self, precise: bool, values: Tensor | None, trained: bool, **how: Any) -> FinderResult:
        """Output, lse, and gradients of a random sum; precisely: in float64, which is torch's."""
        given = [self.queries, self.keys, values]
        given = [one.double() if precise and one is not None and one.is_floating_point() else one for one in given]
        queries, keys, pooling = given
        assert queries is not None
        assert keys is not None
        wanted = [queries.requires_grad_()]
        if trained:
            wanted += [one.requires_grad_() for one in (keys, pooling) if one is not None and one.is_floating_point()]
        output, lse = pooled(queries, keys, pooling, num_classes=CLASSES, **how)
        weights = torch.Generator().manual_seed(1)
        loss = (output * torch.randn(output.shape, generator=weights)).sum() + (
            lse * torch.randn(lse.shape, generator=weights)
        ).where(lse > -torch.inf, 0).sum()
        grads = torch.autograd.grad(loss, wanted)
        for one in wanted:
            one.requires_grad_(False)
        return [output.detach(), lse.detach(), *grads]


def agree(found: FinderResult, expected: FinderResult, tolerance: float = 1e-6) -> None:
    """Each number, by the largest of its tensor, half as much again for a gradient, which is a difference of two."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.shape == other.shape
        within = tolerance * (1 if place < 2 else 4)
        if one.dtype is not torch.float32:  # rounded once, to the stored dtype
            within = torch.finfo(one.dtype).eps
        least = 1.0 if place == 1 else 1e-30  # lse is a logarithm: its error is one of the sum
        scale = other[other.isfinite()].abs().amax().clamp(min=least) if other.isfinite().any() else 1.0
        np.testing.assert_allclose(one.double() / scale, other.double() / scale, rtol=0, atol=within)


# -- the equations -----------------------------------------------------------------------------------------------------


@every_metric
def test_the_equations(way: str, metric: Metric, rng: np.random.Generator) -> None:
    queries, keys = rng.standard_normal((6, 5)).astype(np.float32), awkward(rng, 40, 5)
    values = rng.standard_normal((40, 3)).astype(np.float32)
    live = rng.random((6, 40)) < 0.7
    live[2] = False
    expected = reference.soft_query(EQUATIONS[metric], queries, keys, values, 2.0, live)
    asked = [torch.from_numpy(one) for one in (queries, keys, values)]
    actual = pooled(*asked, metric=metric, scale=0.5, mask=torch.from_numpy(live))
    agree(list(actual), [torch.from_numpy(one) for one in expected])
    scores, positions = nearest(asked[0], asked[1], 7, metric=metric, keep=torch.from_numpy(live[0]))
    table = torch.from_numpy(reference.scores(EQUATIONS[metric], queries, keys)).float()
    torch.testing.assert_close(scores, table.gather(1, positions))
    torch.testing.assert_close(scores, table[:, live[0]].sort(dim=1, descending=True).values[:, :7])
    assert live[0][positions.numpy()].all()


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.COSINE])
def test_a_scale_for_each_query(way: str, metric: Metric, rng: np.random.Generator) -> None:
    asked = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((6, 5), (40, 5), (40, 3))]
    scales = torch.linspace(0.2, 3, 6).requires_grad_()
    actual = pooled(*asked, metric=metric, scale=scales)
    alone = [pooled(asked[0][i : i + 1], *asked[1:], metric=metric, scale=scales[i].item()) for i in range(6)]
    agree([each.detach() for each in actual], [torch.cat(column) for column in zip(*alone, strict=True)], 2e-6)
    wide, (queries, keys, values) = scales.detach().double().requires_grad_(), (one.double() for one in asked)
    if metric is Metric.COSINE:
        queries, keys = (torch.nn.functional.normalize(vectors, dim=1) for vectors in (queries, keys))
    logits = queries @ keys.T * wide.unsqueeze(1)
    (expected,) = torch.autograd.grad((logits.softmax(1) @ values).sum() + logits.logsumexp(1).sum(), wide)
    (grad,) = torch.autograd.grad(actual[0].sum() + actual[1].sum(), scales)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


CASES = [  # each dtype and each metric with vectors within a tile and beyond
    ((1, 1, 1, 1), torch.float32, Metric.DOT),
    ((3, 50, 5, 3), torch.float16, Metric.COSINE),
    ((3, 50, 5, 3), torch.bfloat16, Metric.L2),
    ((17, 49, 16, 17), torch.bfloat16, Metric.DOT),
    ((2, 60, 33, 40), torch.float32, Metric.COSINE),
    ((2, 60, 33, 40), torch.float16, Metric.L2),
]
SHAPES = [(16, 16, 128, 16), (5, 47, 52, 40), (18, 35, 33, 20), (2, 20, 768, 300), (2, 35, 1024, 1024)]
MORE = [(shape, dtype, list(Metric)[(i + j) % 3]) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(EXACT)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)], ids=str)
def test_kernels_agree_with_float64(case: tuple[tuple[int, int, int, int], torch.dtype, Metric]) -> None:
    shape, dtype, metric = case
    world = World(*shape, dtype)
    scale = min(0.7, 4 / shape[2]) if metric is Metric.L2 else 0.7  # a score of 90 is rounded by 4e-6 in float32
    how = {"metric": metric, "scale": scale}
    actual = world.asked(False, world.values, True, **how)
    agree(actual, world.asked(True, world.values, True, **how))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_agrees_with_float64(case: tuple[tuple[int, int, int, int], torch.dtype, Metric]) -> None:
    shape, dtype, metric = case
    world = World(*shape, dtype)
    how = {"metric": metric, "scale": 0.7}
    agree(world.asked(False, world.values, True, **how), world.asked(True, world.values, True, **how))


TAKING_PART = [
    ("labels", True, True, Metric.DOT),
    ("labels", False, True, Metric.L2),
    ("nothing", True, False, Metric.L2),
    ("nothing", False, True, Metric.COSINE),
    ("values", True, True, Metric.COSINE),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("pooling", "keep", "mask", "metric"), TAKING_PART)
def test_filters_and_value_kinds_match_float64(pooling: str, keep: bool, mask: bool, metric: Metric) -> None:
    world = World(18, 70, 20, 18)
    world.mask[1] = False
    how = {"metric": metric, "scale": 1.3}
    how |= {"keep": world.keep if keep else None, "mask": world.mask if mask else None}
    values = {"values": world.values, "labels": world.labels, "nothing": None}[pooling]
    actual, expected = (world.asked(precise, values, True, **how) for precise in (False, True))
    agree(actual, expected)
    if mask:
        assert [actual[1][1].item(), actual[0][1].abs().sum().item(), actual[2][1].abs().sum().item()] == [
            -torch.inf,
            0,
            0,
        ]


def test_heads(way: str) -> None:
    world = World(2, 20, 6, 4, heads=3)
    given = [world.queries, world.keys, world.values]
    given = [one.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for one in given]  # strides
    actual = pooled(*given, metric=Metric.DOT, mask=world.mask, keep=world.keep)
    each = [
        pooled(*(one[i] for one in given), metric=Metric.DOT, mask=world.mask[i], keep=world.keep) for i in range(3)
    ]
    expected = [torch.stack(one) for one in zip(*each, strict=True)]
    grads = [torch.autograd.grad(o.sin().sum() + lse.sum(), given) for o, lse in (actual, expected)]
    for one, other in zip((*actual, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@every_metric
def test_no_participating_records_give_zeros(way: str, metric: Metric) -> None:
    world = World(3, 20, 4, 2)
    none = torch.zeros(20, dtype=torch.bool)
    empty = World(3, 0, 4, 2)
    for one, how in ((world, {"keep": none}), (empty, {})):
        output, lse, grad = one.asked(False, one.values, False, metric=metric, **how)
        assert not output.any()
        assert not grad.any()
        assert (lse == -torch.inf).all()
        scores, positions = nearest(one.queries, one.keys, 3, metric=metric, **how)
        assert (scores == -torch.inf).all()
        assert (positions == -1).all()
    assert [tuple(one.shape) for one in World(0, 9, 4, 2).asked(False, None, True, metric=metric)[:2]] == [(0, 0), (0,)]


@every_metric
def test_bytes_of_records_that_take_no_part_are_not_looked_at(way: str, metric: Metric) -> None:
    world = World(3, 40, 5, 4)
    expected = world.asked(False, world.values, True, metric=metric, keep=world.keep)
    world.keys[~world.keep], world.values[~world.keep] = torch.nan, torch.inf
    for one, other in zip(
        world.asked(False, world.values, True, metric=metric, keep=world.keep), expected, strict=True
    ):
        assert torch.equal(one, other)


@every_metric
def test_a_score_that_overflows_is_nan_for_its_query_alone(way: str, metric: Metric) -> None:
    world = World(3, 40, 5, 4)
    expected = pooled(world.queries, world.keys, world.values, metric=metric)
    world.queries[1] = 3e38
    world.keys[7] = torch.tensor([3e38, 3e38, 0, 0, 0]) * (1 if metric is Metric.DOT else -1)
    keep = torch.ones(40, dtype=torch.bool)
    output, lse = pooled(world.queries, world.keys, world.values, metric=metric)
    overflows = [False, metric is not Metric.COSINE, False]
    if metric is Metric.L2:
        overflows = [True] * 3
    assert lse.isnan().tolist() == overflows
    assert nearest(world.queries, world.keys, 2, metric=metric)[0][:, 0].isnan().tolist() == overflows
    keep[7] = False
    again = pooled(world.queries, world.keys, world.values, metric=metric, keep=keep)[1]
    assert bool(again[0].isfinite())
    assert output.shape == expected[0].shape


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-15, 1e15, 1e30, 3e38])
def test_cosines_of_any_length(size: float) -> None:
    world = World(3, 30, 4, 2)
    expected = world.asked(True, world.values, False, metric=Metric.COSINE)
    world.keys[::2] *= size / world.keys[::2].abs().amax()
    world.keys[5] = 0
    expected = world.asked(True, world.values, False, metric=Metric.COSINE)
    agree(world.asked(False, world.values, False, metric=Metric.COSINE), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e30])
def test_queries_of_any_length_keep_their_digits_on_half_columns(size: float) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        _keeps_digits(size, dtype)


def _keeps_digits(size: float, dtype: torch.dtype) -> None:
    world = World(3, 30, 20, 4, dtype)
    world.queries *= size
    how = {"metric": Metric.DOT, "scale": 1 / size}
    agree(world.asked(False, world.values, False, **how), world.asked(True, world.values, False, **how))


@every_metric
def test_weights_far_apart(way: str, metric: Metric) -> None:
    """Thousands of small weights together matter; so does the one that comes last and is far larger."""
    n = 500
    world = World(2, n, 3, 2, torch.float16)
    world.keys.zero_()
    world.keys[:, 0] = -torch.linspace(0, 3, n).half() * (1 if metric is Metric.DOT else 0.7)
    world.queries[:] = torch.tensor([[20.0, 0, 0], [-20.0, 0, 0]]) if metric is Metric.DOT else 0.25
    how = {"metric": metric, "scale": 1.0}
    agree(world.asked(False, world.values, False, **how), world.asked(True, world.values, False, **how), 4e-6)


# -- the nearest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 64, 200, 400])
@every_metric
def test_the_nearest_with_ties_by_position(way: str, k: int, metric: Metric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CANDIDATES", 400)  # a query at a time
    random = np.random.default_rng(k)
    keys = torch.from_numpy(random.integers(-2, 3, (300, 3)).astype(np.float32))
    queries = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.0, 0.0], [-1.0, 1.0, 1.0]])
    mask = torch.from_numpy(random.random((3, 300)) < 0.9)
    keep = torch.from_numpy(random.random(300) < 0.9)
    actual, positions = nearest(queries, keys, k, metric=metric, keep=keep, mask=mask)
    for i in range(3):
        live = (keep & mask[i]).numpy()
        expected = reference.nearest(EQUATIONS[metric], queries[i : i + 1].numpy(), keys.numpy(), k, live)[0]
        if metric is not Metric.COSINE:  # its ties are rounded
            assert positions[i, : len(expected)].tolist() == expected
        assert len(set(positions[i, : len(expected)].tolist())) == len(expected)
        assert (positions[i, len(expected) :] == -1).all()
        assert (actual[i, len(expected) :] == -torch.inf).all()
        assert live[positions[i, : len(expected)].numpy()].all()


def test_zeros_of_both_signs_tie_and_nan_is_the_largest() -> None:
    scores = torch.tensor([0.0, -0.0, -1.0, 2.0, torch.nan, -torch.inf, torch.inf, 0.0])
    assert launch._first(scores, 8).tolist() == [4, 6, 3, 0, 1, 7, 2, 5]


@pytest.mark.usefixtures("kernels")
def test_an_overflow_far_from_the_nearest_is_reported() -> None:
    keys = torch.zeros(300, 2)
    keys[3], keys[170] = 1e-30, 3e38
    queries = torch.tensor([[3e38, -3e38], [1.0, 0.0]])
    actual = nearest(queries, keys, 1, metric=Metric.DOT)[0]
    assert actual[:, 0].isnan().tolist() == [True, False]


# -- further promises --------------------------------------------------------------------------------------------------


def test_two_calls_are_equal_to_the_bit_and_modes_change_nothing(way: str) -> None:
    world = World(2, 60, 20, 6)
    first = world.asked(False, world.values, True, metric=Metric.DOT)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            again = world.asked(False, world.values, True, metric=Metric.DOT)
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.usefixtures("interpreted")
def test_records_beyond_four_billion_numbers(tmp_path: Any) -> None:
    """Rows lie 2³⁰ numbers apart in a sparse file: offsets are past int32 from the third row on."""
    n, apart = 5, 1 << 30
    file = torch.from_file(str(tmp_path / "keys"), shared=True, size=n * apart, dtype=torch.float16)
    keys = file.as_strided((n, 4), (apart, 1))
    small = World(2, n, 4, 4, torch.float16)
    keys.copy_(small.keys)
    for metric in (Metric.DOT, Metric.L2):
        far = [pooled(small.queries, keys, keys, metric=metric), nearest(small.queries, keys, 2, metric=metric)]
        near = [pooled(small.queries, small.keys, small.keys, metric=metric)]
        near += [nearest(small.queries, small.keys, 2, metric=metric)]
        for one, other in zip(itertools.chain(*far), itertools.chain(*near), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("interpreted")
def test_unsupported_cases_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch, "forward", refuse)
    monkeypatch.setattr(launch, "nearest", refuse)
    wide = World(2, 4, 1025, 2)
    for queries, keys in ((wide.queries, wide.keys), (wide.queries[:, :3].double(), wide.keys[:, :3])):
        pooled(queries, keys, wide.values, metric=Metric.DOT)
        nearest(queries, keys, 2, metric=Metric.DOT)
    with pytest.raises(AssertionError, match="launched"):
        pooled(wide.queries[:, :1024], wide.keys[:, :1024], wide.values, metric=Metric.DOT)


def test_why_not() -> None:
    assert "cpu is not a CUDA device" in str(usable(torch.device("cpu")))


BAD = {
    "widths": ((2, 3), (4, 5), (4, 1), None, None),
    "values": ((2, 3), (4, 3), (5, 1), None, None),
    "keep": ((2, 3), (4, 3), (4, 1), (5,), None),
    "mask": ((2, 3), (4, 3), (4, 1), None, (1, 4)),
    "heads": ((2, 2, 3), (3, 4, 3), (4, 1), None, None),
}


@pytest.mark.parametrize("shapes", BAD.values(), ids=BAD)
def test_shapes_that_do_not_fit(shapes: tuple[Any, ...]) -> None:
    queries, keys, values, keep, mask = (None if shape is None else torch.zeros(shape) for shape in shapes)
    with pytest.raises(BadInput, match=r"the shapes are queries .*; expected queries \(q, d\)"):
        pooled(queries, keys, values, metric=Metric.DOT, keep=keep, mask=mask)  # type: ignore[arg-type]


def test_tensors_on_several_devices() -> None:
    with pytest.raises(BadInput, match=r"queries \(1, 2\) on cpu, keys \(3, 2\) on meta; .* on one device"):
        nearest(torch.zeros(1, 2), torch.zeros(3, 2, device="meta"), 1, metric=Metric.DOT)


def test_labels_need_a_width() -> None:
    with pytest.raises(BadInput, match="give num_classes"):
        pooled(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), metric=Metric.DOT)


def test_no_second_derivative(way: str) -> None:
    world = World(2, 6, 3, 2)
    queries = world.queries.requires_grad_()
    (grad,) = torch.autograd.grad(
        pooled(queries, world.keys, world.values, metric=Metric.DOT)[0].sum(), queries, create_graph=True
    )
    with pytest.raises(BadInput, match="no second derivative"):
        grad.sum().backward()


# -- selection ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    found: list[str] = []
    for name in ("forward", "backward", "nearest"):

        def noted(*args: Any, name: str, real: Callable[..., Any]) -> Any:
            found.append(name)
            return real(*args)

        monkeypatch.setattr(launch, name, functools.partial(noted, name=name, real=getattr(launch, name)))
    return found


def on_and_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Off the device, then on it."""
    yield
    request.getfixturevalue("interpreted")
    yield


@pytest.mark.parametrize("score", [Dot(), Cosine(), Gaussian(0.7), NegativeL2(2.0)])
@pytest.mark.parametrize("pools", [True, False])
def test_columns_on_a_device_are_pooled_there(
    score: Score, pools: bool, request: pytest.FixtureRequest, launched: list[str], rng: np.random.Generator
) -> None:
    keys, mask = awkward(rng, 40, 5), torch.ones(6, 40).tril(20).bool()
    results = []
    for _ in on_and_off(request):
        given = [torch.from_numpy(one).requires_grad_() for one in (keys[:6] + 0.5, keys, keys[:, :3].copy())]
        asked = replace(Request.of(given[0], score), allowed=np.arange(40) % 3 > 0, mask=mask, pools=pools)
        output, lse = placed(*given[1:]).stream(asked)
        loss = output.sum() + lse.sum()
        results.append((output, lse, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert launched == ["forward", "backward"]


def test_attention_with_heads_is_one_pass(
    request: pytest.FixtureRequest, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.functional.DENSE", 0)
    results = []
    for _ in on_and_off(request):
        world = World(7, 9, 4, 3, heads=6)
        given = [
            one.reshape(2, 3, *one.shape[1:]).requires_grad_() for one in (world.queries, world.keys, world.values)
        ]
        output = attention(*given, is_causal=True)
        results.append((output, *torch.autograd.grad(output.sin().sum(), given)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert launched == ["forward", "backward"]


@pytest.mark.usefixtures("interpreted")
def test_the_nearest_of_columns(launched: list[str]) -> None:
    world = World(4, 60, 5, 2)
    source, asked = placed(world.keys, world.values), replace(Request.of(world.queries, Dot()), mask=world.mask)
    np.testing.assert_array_equal(source.find(asked.top(70)).positions, scan(asked.top(60), source))
    assert launched == ["nearest"]


@pytest.mark.usefixtures("interpreted")
def test_an_overflow_on_a_device_is_reported_as_on_the_cpu() -> None:
    keys = torch.tensor([[3e38, 3e38], [1.0, 1.0]])
    with pytest.raises(BadInput, match="the score returned NaN"):
        placed(keys, keys).stream(Request.of(torch.tensor([[3e38, -3e38]]), Dot()))
