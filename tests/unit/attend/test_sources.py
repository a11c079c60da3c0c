"""One contract for every source: whatever answers a request over one answers it over the others, alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

import softdb
from softdb.attend import Columns, Request, Source, exact, log_normaliser, nearest, sampled, stream
from softdb.errors import BadInput
from softdb.nn import Memory, View
from softdb.scores import Dot
from softdb.weights import Softmax, Sparsemax

N, D, V, GONE, T = 40, 5, 3, 7, 0.7

Array = np.ndarray
Make = Callable[[Array, Array], tuple[Any, Source]]  # keys, values -> what keeps it alive, and the source


def database(keys: Array, values: Array) -> softdb.SoftDB:
    db = softdb.open(None, dim=D, value_dim=V)
    db.insert(range(N), keys, values)
    db.delete([GONE])
    return db


def stored(keys: Array, values: Array) -> tuple[Any, Source]:
    db = database(keys, values)
    return db, db.source(db.view()[0])


def columns(keys: Array, values: Array) -> tuple[Any, Source]:
    live = np.arange(N) != GONE
    return None, Columns(torch.from_numpy(keys[live]), torch.from_numpy(values[live]))


def encoded(keys: Array, values: Array) -> tuple[Any, Source]:
    encoder = torch.nn.Linear(D, D, bias=False)
    torch.nn.init.eye_(encoder.weight)
    view = View(database(keys, values), encoder)
    return view, view.request(torch.zeros(1, D), k=1)[1]


def parameters(keys: Array, values: Array) -> tuple[Any, Source]:
    memory = Memory(database(keys, values))
    return memory, memory.source()


@pytest.fixture(params=[stored, columns, encoded, parameters], ids=lambda make: make.__name__)
def world(request: pytest.FixtureRequest, rng: np.random.Generator) -> tuple[Any, Source, Array, Array]:
    keys, values = (rng.standard_normal((N, width)).astype(np.float32) for width in (D, V))
    live = np.arange(N) != GONE
    return *request.param(keys, values), keys[live], values[live]


@pytest.fixture
def queries(rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(rng.standard_normal((4, D)).astype(np.float32))


def close(found: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_it_tells_what_it_holds(world: tuple[Any, Source, Array, Array]) -> None:
    _, source, keys, values = world
    assert source.count == len(keys) == np.count_nonzero(source.live)
    assert (source.width, source.num_classes) == (V, None)
    blocks = [source.encoded(block) for block in source.blocks(9)]
    close(torch.cat([block.keys for block in blocks]), keys)
    close(torch.cat([block.values for block in blocks]), values)
    positions = np.concatenate([block.positions.numpy() for block in blocks])
    np.testing.assert_array_equal(positions, np.flatnonzero(source.live))
    last = next(iter(source.blocks(1, start=int(positions[-1]))))
    assert last.positions.tolist() == positions[-1:].tolist()


@pytest.mark.parametrize("k", [None, N])
def test_an_exact_answer_is_the_equation(
    world: tuple[Any, Source, Array, Array], queries: Tensor, k: int | None
) -> None:
    _, source, keys, values = world
    request = Request(queries, Dot(), Softmax(), T, k=k)
    answer = exact(request, source) if k is None else nearest(request, source)
    output, lse = reference.soft_query(reference.dot, queries.numpy(), keys, values, T)
    close(answer.output, output)
    close(answer.lse, lse)
    assert answer.exact.all()
    assert answer.n_pooled.tolist() == [len(keys)] * 4
    close(log_normaliser(request, source), lse)


def test_only_those_allowed_take_part(world: tuple[Any, Source, Array, Array], queries: Tensor) -> None:
    _, source, keys, values = world
    allowed = np.zeros(len(source.live), np.bool_)
    allowed[np.flatnonzero(source.live)[::3]] = True
    answer = exact(Request(queries, Dot(), Softmax(), T, allowed), source)
    close(answer.output, reference.soft_query(reference.dot, queries.numpy(), keys[::3], values[::3], T)[0])


def test_the_nearest_are_the_nearest(world: tuple[Any, Source, Array, Array], queries: Tensor) -> None:
    _, source, keys, values = world
    request = Request(queries, Dot(), Softmax(), T, k=3)
    best = np.argsort(-(queries.numpy() @ keys.T), axis=1)[:, :3]
    found = source.find(request, 3, exact=True)
    np.testing.assert_array_equal(np.flatnonzero(source.live)[best], found.positions)
    scored = source.scored(request, found.positions)
    close(scored.scores, np.take_along_axis(queries.numpy() @ keys.T, best, 1))
    weights = torch.full((4, 3), 1 / 3)
    close(source.pooled(weights, scored), values[best].mean(1))


def test_an_answer_is_explained(world: tuple[Any, Source, Array, Array], queries: Tensor) -> None:
    _, source, keys, _ = world
    answer = exact(Request(queries, Dot(), Softmax(), T), source)
    (first, *_) = answer.explain(N)
    assert first.mass == pytest.approx(1, abs=1e-4)
    assert len(first.ids) == len(keys)
    assert first.weights == sorted(first.weights, reverse=True)


def test_draws_are_of_those_that_are_there(world: tuple[Any, Source, Array, Array], queries: Tensor) -> None:
    _, source, keys, _ = world
    drawn = sampled(Request(queries, Dot(), Softmax(), T), source, 50, torch.Generator().manual_seed(0))
    assert set(drawn.hits.rows.flatten().tolist()) <= set(source.rows(np.flatnonzero(source.live)).tolist())
    logits = queries.numpy() @ keys.T / T
    close(drawn.log_prob.amax(1), (logits - np.log(np.exp(logits).sum(1, keepdims=True))).max(1))


def test_sparse_weights_of_encoded_keys_are_proven_from_the_nearest(queries: Tensor, rng: np.random.Generator) -> None:
    """A pass over blocks that carry a graph knows softmax alone."""
    keys, values = (rng.standard_normal((N, width)).astype(np.float32) for width in (D, V))
    _, source = encoded(keys, values)
    answer = exact(Request(queries, Dot(), Sparsemax(), T), source)
    live = np.arange(N) != GONE
    plain = softdb.attention(
        queries, torch.from_numpy(keys[live]), torch.from_numpy(values[live]), score=Dot(), weights="sparsemax",
        temperature=T,
    )  # fmt: skip
    close(answer.output, plain.numpy())
    with pytest.raises(BadInput, match="the weights are sparsemax"):
        stream(Request(queries, Dot(), Sparsemax(), T), source)
