"""Queries of any leading shape (…, d) in every function that answers queries, against the same call with (q, d)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from compare import close
from torch import Tensor
from torch.nn import functional as F
from worlds import holding, indexed

import softdb
from softdb import BadInput, nn
from softdb.answers import Explanation
from softdb.cluster import Cluster, DatabaseShard, Local
from softdb.scores import Dot, Gaussian, NegativeL2, ScaledDot
from softdb.text import HashedNGrams
from softdb.train import QueryProjection

N, D, V, CLASSES = 40, 4, 3, 5
SHAPES = [(2, 3), (2, 1, 3), (1, 6), (6, 1, 1, 1), (2, 0), (0, 3, 1)]
Shape = tuple[int, ...]


class World(NamedTuple):
    """Handles of the same records."""

    db: softdb.SoftDB
    cluster: Cluster
    labelled: softdb.SoftDB
    view: nn.View
    memory: nn.Memory


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    keys, values = (random.standard_normal((N, width)).astype(np.float32) for width in (D, V))
    db = holding(keys, values, [{"odd": i % 2 == 1} for i in range(N)], texts=[f"text {i}" for i in range(N)])
    parts = [holding(keys[i::2], values[i::2], ids=np.arange(N)[i::2]) for i in range(2)]
    cluster = Cluster(Local([DatabaseShard(part, i, 2) for i, part in enumerate(parts)]))
    view = nn.View(db, torch.nn.Linear(D, D))
    return World(db, cluster, holding(keys, np.arange(N) % CLASSES, num_classes=CLASSES), view, nn.Memory(db, k=5))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(shape: Shape, *last: int) -> Tensor:
    """Numbers of a shape whose leading dimensions have as many queries as those of the flat call."""
    return torch.randn(math.prod(shape), *last, generator=seeded(3)).reshape((*shape, *last))


def places(shape: Shape) -> Tensor:
    return (torch.arange(math.prod(shape)) * 7 % N).reshape(shape)


def lists(shape: Shape) -> Any:
    """Two positives for each query, in nested lists."""
    return torch.stack([places(shape), (places(shape) + 1) % N], -1).tolist()


def mask(shape: Shape) -> Tensor:
    return numbered(shape, N) > -0.5


Case = Callable[[World, Any, Shape], Any]
BOTH: dict[str, list[dict[str, Any]]] = {  # verbs of a database and a cluster
    "attend": [
        {}, {"k": 4}, {"k": 4, "score": Gaussian(0.9)}, {"weights": "sparsemax"}, {"score": NegativeL2(0.8)},
        {"rtol": 0.2}, {"weights": "uniform"}, {"k": 1, "weights": "argmax"},
    ],
    "search": [{"k": 4}, {"radius": 0.5}, {"k": 3, "exact": True, "offset": 1}, {"exclude_ids": [1, 2]}],
    "log_partition": [{}, {"temperature": 0.3}],
    "log_density": [{"kernel": Gaussian(0.7)}],
    "count_within": [{"radius": 0.3}],
    "sample": [{"n": 3}],
}  # fmt: skip
ALONE: dict[str, list[dict[str, Any]]] = {  # with arguments that a cluster does not take
    "attend": [{"need_weights": True}, {"where": {"odd": True}, "weights": "entmax15"}],
    "search": [{"k": 3, "diversity": 0.5}, {"k": 2, "group_by": "odd", "group_size": 2}],
}


def asked(handle: str, verb: str, options: dict[str, Any]) -> Case:
    def call(world: World, queries: Any, shape: Shape) -> Any:
        drawn = {"generator": seeded()} if verb == "sample" or "rtol" in options else {}
        return getattr(getattr(world, handle), verb)(queries, **options, **drawn)

    return call


def by_database(function: Callable[..., Any], **options: Any) -> Case:
    def call(world: World, queries: Any, shape: Shape) -> Any:
        drawn = {"generator": seeded()} if "generator" in inspect.signature(function).parameters else {}
        return function(world.db, queries, **options, **drawn)

    return call


def by_positives(loss: Callable[..., Any], handle: str, targets: Callable[[Shape], Any], **options: Any) -> Case:
    def call(world: World, queries: Any, shape: Shape) -> Any:
        return loss(getattr(world, handle), queries, targets(shape), reduction="none", **options)

    return call


CASES: dict[str, list[Case]] = {
    **{
        f"SoftDB.{verb}": [asked("db", verb, options) for options in [*many, *ALONE.get(verb, [])]]
        for verb, many in BOTH.items()
    },
    **{f"Cluster.{verb}": [asked("cluster", verb, options) for options in many] for verb, many in BOTH.items()},
    "hard_attention": [by_database(nn.hard_attention, n=3)],
    "straight_through": [by_database(nn.straight_through), by_database(nn.straight_through, k=4)],
    "gradient_report": [
        by_database(nn.gradient_report, k=4),
        lambda world, queries, shape: nn.gradient_report(world.db, queries, k=4, upstream=numbered(shape, V)),
    ],
    "retrieval_loss": [
        by_positives(nn.retrieval_loss, source, positives, k=k)
        for source in ("db", "cluster", "view", "memory")
        for positives, k in ((places, None), (lists, 4))
    ],
    "info_nce": [
        by_positives(nn.info_nce, source, lists, negatives=3, in_batch=in_batch)
        for source, in_batch in (("db", True), ("db", False), ("cluster", True), ("view", True), ("memory", True))
    ],
    "label_loss": [
        lambda world, queries, shape: nn.label_loss(
            world.labelled, queries, places(shape) % CLASSES, logits=numbered(shape, CLASSES), reduction="none"
        )
    ],
    "pooled_loss": [
        by_positives(nn.pooled_loss, source, lambda shape: numbered(shape, V)) for source in ("db", "view", "memory")
    ],
    "View.attend": [asked("view", "attend", options) for options in ({}, {"k": 4}, {"temperature": 0.5})],
    "View.forward": [asked("view", "forward", {"k": 3})],
    "View.search": [asked("view", "search", {"k": 3})],
    "View.indexed_nearest": [lambda world, queries, _: world.view.indexed_nearest(queries, 3)],
    "Memory.forward": [asked("memory", "forward", {})],
    "KernelRegressor.forward": [
        lambda world, queries, shape: nn.KernelRegressor(world.db, bandwidth=0.9)(queries, mask=mask(shape))
    ],
    "KernelClassifier.forward": [
        lambda world, queries, _: nn.KernelClassifier(world.labelled, bandwidth=0.9)(queries, k=7)
    ],
    "Telemetry.__call__": [lambda world, queries, _: nn.Telemetry(sample=4)(world.db, queries, k=4)],
    "QueryProjection.of": [lambda world, queries, _: QueryProjection(D).of(world.db, queries)],
}
SAMPLED = {"Telemetry.__call__"}  # draws some of the queries
TYPICAL = {"SoftDB.build_index", "SoftDB.tune", "Cluster.tune"}  # take queries, but give no answer to each
TYPICAL |= {"Memory.request", "View.request"}  # internal: `Request` has flat queries


def test_the_table_has_every_public_function_of_queries() -> None:
    """A new function with an argument `queries` fails here until the table has it."""
    classes = [softdb.SoftDB, Cluster, QueryProjection, *(cls for cls in public(nn) if inspect.isclass(cls))]
    methods = {
        f"{cls.__name__}.{name}": method
        for cls in classes
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") or name == "__call__"
    }
    functions = {function.__name__: function for function in public(nn) if inspect.isfunction(function)}
    taking = {
        name for name, function in (methods | functions).items() if "queries" in inspect.signature(function).parameters
    }
    assert taking - TYPICAL == set(CASES)


def public(module: Any) -> list[Any]:
    return [getattr(module, name) for name in module.__all__]


# -- comparisons -------------------------------------------------------------------------------------------------------


def columns(answer: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an answer, by the path of its field."""
    if isinstance(answer, Tensor):
        yield name, answer
    elif isinstance(answer, tuple) and hasattr(answer, "_fields"):
        for field in answer._fields:
            yield from columns(getattr(answer, field), f"{name}.{field}")
    elif dataclasses.is_dataclass(answer):
        for field in [field.name for field in dataclasses.fields(answer)]:
            yield from columns(getattr(answer, field), f"{name}.{field}")
        if isinstance(answer, softdb.Samples):
            yield f"{name}.log_prob", answer.log_prob


def texts(answer: Any) -> dict[str, Any]:
    """Every list of an answer with an item for each query."""
    if isinstance(answer, softdb.Pooled):
        hits = {} if answer.hits is None else texts(answer.hits)
        return hits | {"explain": answer.explain(3)}
    if isinstance(answer, softdb.Hits):
        return {"ids": answer.ids, "payloads": answer.payloads, "texts": answer.texts}
    return texts(answer.hits) if isinstance(answer, softdb.Samples | nn.HardSamples) else {}


def at(items: Any, place: Shape) -> Any:
    for i in place:
        items = items[i]
    return items


def sized(items: Any, shape: Shape) -> bool:
    """True if the outer lists have the lengths of a shape."""
    return not shape or (len(items) == shape[0] and all(sized(item, shape[1:]) for item in items))


def plain(item: Any) -> Any:
    return dataclasses.astuple(item) if isinstance(item, Explanation) else item


def differentiated(answer: Any, leaf: Tensor, q: int) -> Tensor | None:
    """The gradient of a random sum of everything in an answer; None if nothing has a gradient."""
    total, random = [], seeded(5)
    for _, column in columns(answer):
        if column.requires_grad:
            weights = torch.randn(q, column[:1].numel() if not q else column.numel() // q, generator=random)
            finite = column.reshape(weights.shape) if column.numel() else column.reshape(0, 1)
            if column.numel():
                total.append((weights * finite.masked_fill(finite.isinf(), 0)).sum())
    if not total:
        return None
    return torch.autograd.grad(torch.stack(total).sum(), leaf)[0]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_has_the_leading_shape_of_its_queries(world: World, name: str) -> None:
    every = torch.randn(6, D, generator=seeded(1))
    for case in CASES[name]:
        for shape in SHAPES:
            q = math.prod(shape)
            flat = every[:q].clone().requires_grad_()
            leaf = flat.detach().reshape(*shape, D).requires_grad_()
            if name in SAMPLED:
                if q:
                    assert {tuple(column.shape) for _, column in columns(case(world, leaf, shape))} == {(4,)}
                continue
            answer, expected = case(world, leaf, shape), case(world, flat, (q,))
            wanted = dict(columns(expected))
            assert wanted
            for field, column in columns(answer):
                assert column.shape == (*shape, *wanted[field].shape[1:]), (field, column.shape)
                close(column.flatten(0, len(shape) - 1), wanted.pop(field), 0)
            assert not wanted
            flat_lists = texts(expected)
            for field, items in texts(answer).items():
                assert sized(items, shape), field
                for i, place in enumerate(np.ndindex(*shape)):
                    assert plain(at(items, place)) == plain(flat_lists[field][i])
            gradient = differentiated(answer, leaf, q)
            if gradient is not None:
                close(gradient.reshape(q, D), differentiated(expected, flat, q), 0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_is_a_number(world: World, reduction: Any) -> None:
    queries, shape = torch.randn(6, D), (3, 2)
    loss = functools.partial(nn.retrieval_loss, world.db, reduction=reduction)
    assert loss(queries.view(*shape, D), places(shape)).shape == ()
    close(loss(queries.view(*shape, D), places(shape)), loss(queries, places((6,))))


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1)])
def test_a_mask_broadcasts_to_the_leading_shape(world: World, shape: Shape) -> None:
    queries = torch.randn(*shape, D)
    for lead in [shape, (1,) * len(shape), (1, *shape[1:]), (*shape[:-1], 1), shape[1:], ()]:
        some = numbered(lead, N) > -0.5
        whole = some.expand(*shape, N).reshape(-1, N)
        for options in ({}, {"k": 5}, {"need_weights": True}):
            answer = world.db.attend(queries, mask=some, **options)
            expected = world.db.attend(queries.view(-1, D), mask=whole, **options)
            close(answer.output.view(-1, V), expected.output, 0)
            close(answer.n_pooled.flatten(), expected.n_pooled, 0)
        drawn = world.db.sample(queries, 2, mask=some, generator=seeded()).hits.rows
        close(drawn.view(-1, 2), world.db.sample(queries.view(-1, D), 2, mask=whole, generator=seeded()).hits.rows, 0)


HEATED: dict[str, Callable[[World, Tensor, Shape, Tensor], Tensor]] = {
    "attend": lambda w, q, _, heat: w.db.attend(q, temperature=heat).lse,
    "nearest": lambda w, q, _, heat: w.db.attend(q, temperature=heat, k=5).output.sum(-1),
    "cluster": lambda w, q, _, heat: w.cluster.attend(q, temperature=heat).lse,
    "view": lambda w, q, _, heat: w.view.attend(q, temperature=heat).lse,
    "loss": lambda w, q, shape, heat: nn.retrieval_loss(w.db, q, places(shape), temperature=heat, reduction="none"),
    "memory": lambda w, q, shape, heat: nn.retrieval_loss(
        w.memory, q, places(shape), temperature=heat, reduction="none"
    ),
}


@pytest.mark.parametrize("name", HEATED)
def test_a_temperature_broadcasts_to_the_leading_shape(world: World, name: str) -> None:
    queries, call = torch.randn(2, 3, D), HEATED[name]
    for shape in [(), (1,), (3,), (2, 1), (1, 3), (2, 3)]:
        heat = (numbered(shape).abs() + 0.5).requires_grad_()
        answer = call(world, queries, (2, 3), heat)
        expected = call(world, queries.view(6, D), (6,), heat.expand(2, 3).reshape(6))
        assert answer.shape == (2, 3)
        close(answer.flatten(), expected, 1e-6)
        weights = numbered((6,))
        close(
            torch.autograd.grad(answer, heat, weights.view(2, 3))[0],
            torch.autograd.grad(expected, heat, weights)[0],
            1e-5,
        )
    with pytest.raises(BadInput, match=r"temperature has shape \(6,\) and the queries \(2, 3\)"):
        call(world, queries, (2, 3), torch.ones(6))


def test_reports_take_a_temperature_for_each_query(world: World) -> None:
    queries, heat = torch.randn(2, 3, D), torch.rand(2, 1, generator=seeded()) + 0.5
    report = nn.gradient_report(world.db, queries, temperature=heat, k=4)
    flat = nn.gradient_report(world.db, queries.view(6, D), temperature=heat.expand(2, 3).reshape(6), k=4)
    for column, expected in zip(report, flat, strict=True):
        close(column.flatten(), expected, 1e-6)
    some = nn.Telemetry(sample=4)(world.db, queries, temperature=heat, k=4)
    assert some is not None
    assert set(some.mass.tolist()) <= set(flat.mass.tolist())


@pytest.mark.parametrize(
    "convert",
    [
        lambda queries: queries.numpy(),
        lambda queries: queries.tolist(),
        lambda queries: list(queries),
        lambda queries: [list(rows.numpy()) for rows in queries],
        lambda queries: tuple(map(tuple, queries.tolist())),
        lambda queries: queries.transpose(0, 1).contiguous().transpose(0, 1),
        lambda queries: queries.double(),
    ],
    ids=["array", "lists", "tensors", "arrays in lists", "tuples", "strided", "float64"],
)
def test_queries_of_any_kind(world: World, convert: Callable[[Tensor], Any]) -> None:
    queries = torch.randn(2, 3, D)
    for verb in (world.db.attend, world.view.attend, world.memory):
        close(verb(convert(queries)).output, verb(queries).output, 1e-6)


def test_one_query_is_still_a_batch_of_one_and_texts_stay_a_list() -> None:
    db = softdb.open(None, dim=64, encoder=HashedNGrams(64))
    db.insert([1, 2], ["one text", "another"])
    assert db.attend("text").output.shape == (1, 64)
    assert db.attend(["text", "other"]).output.shape == (2, 64)
    assert db.attend(torch.ones(64)).lse.shape == (1,)
    assert db.attend([[1.0] * 64]).lse.shape == (1,)
    assert db.attend(torch.zeros(0, 64)).output.shape == (0, 64)
    for refused in ([["text"], ["other"]], np.array([["text"], ["other"]])):
        with pytest.raises(BadInput, match=r"queries (are of type|mix)"):
            db.attend(refused)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda w, q: w.db.attend(q[..., 1:]),
            r"queries are of shape \(2, 3, 3\) but this database's keys are 4",
        ),
        (lambda w, q: w.view.attend(q[..., 1:]), r"queries are of shape \(2, 3, 3\) but the encoded keys"),
        (lambda w, q: w.db.attend([[[1.0] * 4], [[1.0] * 4] * 2]), "queries are ragged"),
        (lambda w, q: w.db.attend(q.log()), r"NaN or infinity, first in query \(0, 0\)"),
        (lambda w, q: w.db.attend(q, mask=torch.ones(6, N).bool()), r"mask has shape \(6, 40\); expected \(2, 3, 40\)"),
        (lambda w, q: w.db.attend(q, mask=torch.ones(2, 3, 1).bool()), r"mask has shape \(2, 3, 1\); expected \(2, 3,"),
        (
            lambda w, q: nn.retrieval_loss(w.db, q, places((6,))),
            r"positives are 6 for 2 queries; .* nested as the queries",
        ),
        (
            lambda w, q: nn.retrieval_loss(w.db, q, [[1, 2], [3, 4, 5, 6]]),
            r"positives are 2 for 3 queries; give one id",
        ),
        (lambda w, q: nn.retrieval_loss(w.db, q, places((2,))), r"positives are 1 for 3 queries; give one id"),
        (lambda w, q: nn.label_loss(w.labelled, q, places((3, 2)) % 5), "labels are 3 × 2 for 2 × 3 queries; give one"),
        (lambda w, q: nn.label_loss(w.labelled, q, places((2, 3))), r"label 7 of query \(0, 1\) is out of range"),
        (lambda w, q: nn.pooled_loss(w.db, q, torch.ones(6, V)), r"targets have shape \(6, 3\); expected \(2, 3, 3\)"),
        (lambda w, q: nn.gradient_report(w.db, q, upstream=torch.ones(6, V)), r"shape \(6, 3\); expected \(2, 3, 3\)"),
    ],
)
def test_errors_name_the_shape_that_came(world: World, call: Callable[[World, Tensor], Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call(world, -torch.ones(2, 3, D))


# -- answers -----------------------------------------------------------------------------------------------------------


def test_hits_of_a_leading_shape_are_nested(world: World) -> None:
    queries = torch.randn(2, 3, D)
    hits: Any = world.db.search(queries, k=4)
    flat = world.db.search(queries.view(6, D), k=4)
    assert len(hits) == 2
    assert [len(some) for some in hits] == [3, 3]
    assert list(hits[1][2]) == list(flat[5])
    assert hits[0][1:].ids == flat.ids[1:3]
    assert hits[1:].ids == [flat.ids[3:]]
    assert hits.flat.ids == flat.ids
    assert repr(hits) == repr(flat).replace("6 queries", "2 × 3 queries")
    assert hits._repr_html_() == flat._repr_html_()
    with pytest.raises(IndexError):
        hits[2]
    pandas = pytest.importorskip("pandas")
    pandas.testing.assert_frame_equal(hits.to_pandas(), flat.to_pandas())


def test_answers_of_a_leading_shape_print(world: World) -> None:
    queries = torch.randn(2, 3, D)
    for k in (None, 2):
        answer, flat = world.db.attend(queries, k=k), world.db.attend(queries.view(6, D), k=k)
        assert repr(answer) == repr(flat).replace("(6, 3)", "(2, 3, 3)")
        assert answer._repr_html_() == flat._repr_html_().replace("(6, 3)", "(2, 3, 3)")
    estimates = world.db.log_partition(queries), world.db.log_partition(queries.view(6, D))
    assert repr(estimates[0]) == repr(estimates[1])
    assert "2 × 3 queries" in repr(world.db.sample(queries))


def test_rewards_of_any_leading_shape(world: World) -> None:
    """`reinforce` and `leave_one_out` take the draws as they come."""
    queries = torch.randn(2, 3, D, requires_grad=True)
    samples = nn.hard_attention(world.db, queries, 4, generator=seeded())
    reward = samples.values[..., 0]
    loss = nn.reinforce(reward, samples.log_prob, nn.leave_one_out(reward))
    flat = reward.view(6, 4), samples.log_prob.view(6, 4)
    close(loss, nn.reinforce(*flat, nn.leave_one_out(flat[0])))


# -- many records ------------------------------------------------------------------------------------------------------


def drawn_answers(db: softdb.SoftDB, queries: Tensor) -> list[Any]:
    draws: Any = {"rtol": 0.3, "max_draws": 200}
    return [
        db.attend(queries, **draws, generator=seeded()),
        db.log_partition(queries, **draws, generator=seeded()),
        db.count_within(queries, float(queries.detach().square().sum(-1).mean()) / 2, rtol=0.3, generator=seeded()),
        db.sample(queries, 3, temperature=3.0, generator=seeded()),
    ]


def test_answers_drawn_through_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.sample.pass_cost", lambda *_: 1e18)  # so few records are worth a draw
    monkeypatch.setattr("softdb.attend.sample.PROPOSED", 1)
    db = indexed()
    keys = db.get(list(range(0, 3000, 500))).keys
    flat, leaf = keys.clone().requires_grad_(), keys.view(3, 2, -1).clone().requires_grad_()
    pairs = list(zip(drawn_answers(db, leaf), drawn_answers(db, flat), strict=True))
    assert not any(pairs[0][1].exact)
    assert not any(pairs[-1][1].scanned)
    for answer, expected in pairs:
        for (name, column), (_, wanted) in zip(columns(answer), columns(expected), strict=True):
            assert column.shape[:2] == (3, 2), name
            close(column.flatten(0, 1), wanted, 0)
        gradient = differentiated(answer, leaf, 6)
        if gradient is not None:
            close(gradient.flatten(0, 1), differentiated(expected, flat, 6), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attend_takes_the_place_of_scaled_dot_product_attention(world: World, dtype: torch.dtype) -> None:
    """A block's queries (b, h, m, d), with a mask by sequence: value and gradient are those of torch."""
    records = world.db.get(list(range(N)))
    assert records.values is not None
    keys, values = (column.to(dtype).expand(2, 3, -1, -1) for column in (records.keys, records.values))
    queries = torch.randn(2, 3, 5, D, dtype=dtype, requires_grad=True)
    upstream, tolerance = torch.randn(2, 3, 5, V, dtype=dtype), 2e-6 if dtype is torch.float32 else 1e-12
    for some in (None, torch.rand(2, 1, 1, N, generator=seeded()) > 0.4):
        output = world.db.attend(queries, score=ScaledDot(), mask=some).output
        expected = F.scaled_dot_product_attention(queries, keys, values, attn_mask=some)
        close(output, expected, tolerance)
        ours, theirs = (torch.autograd.grad(result, queries, upstream)[0] for result in (output, expected))
        close(ours, theirs, tolerance)


@pytest.mark.parametrize("options", [{}, {"k": 5}, {"score": Dot(), "weights": "sparsemax"}])
def test_gradcheck_through_a_leading_shape(world: World, options: Any) -> None:
    def call(leaf: Tensor) -> tuple[Tensor, Tensor]:
        answer = world.db.attend(leaf, **options)
        return answer.output, answer.lse

    queries = torch.randn(2, 2, D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, queries)
