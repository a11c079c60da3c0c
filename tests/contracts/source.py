"""One contract for every source: each answer over one is that of the equations, and so that over the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb.attend import Request, Source
from softdb.check import Tolerance
from softdb.scores import Dot
from softdb.weights import Softmax

N, D, V, GONE, T = 40, 5, 3, 7, 0.7

Array = np.ndarray


class World(NamedTuple):
    """A source and its records."""

    source: Source
    keys: Array  # (n, d) of the live records
    values: Array  # (n, v)
    ids: list[int]  # as the source names them


def database(keys: Array, values: Array) -> softdb.SoftDB:
    """All records but one, which is deleted again."""
    db = holding(keys, values)
    db.delete([GONE])
    return db


def close(found: Tensor, expected: Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, tolerance, tolerance)


class SourceContract:
    """Answers of every source. A subclass makes one of keys (N, D) and values (N, V), without the record GONE."""

    def make(self, keys: Array, values: Array) -> Source:
        raise NotImplementedError

    def ids(self) -> list[int]:
        return [name for name in range(N) if name != GONE]

    @pytest.fixture
    def world(self, rng: np.random.Generator) -> World:
        keys, values = (rng.standard_normal((N, width)).astype(np.float32) for width in (D, V))
        live = np.arange(N) != GONE
        return World(self.make(keys, values), keys[live], values[live], self.ids())

    @pytest.fixture
    def request_of_all(self, rng: np.random.Generator) -> Request:
        queries = torch.from_numpy(rng.standard_normal((4, D)).astype(np.float32))
        return Request(queries, Dot(), Softmax(), T)

    def expected(self, request: Request, world: World) -> tuple[Array, Array]:
        found: Any = reference.soft_query(reference.dot, request.queries.detach().numpy(), world.keys, world.values, T)
        return found[0], found[1]

    def scores(self, request: Request, world: World) -> Array:
        return np.asarray(request.queries.detach().numpy().astype(np.float64) @ world.keys.T.astype(np.float64))

    def test_a_source_knows_its_count_and_the_width_of_answers(self, world: World) -> None:
        assert (world.source.count, world.source.width, world.source.num_classes) == (N - 1, V, None)

    @pytest.mark.parametrize("way", ["exact", "nearest", "estimate"])
    def test_an_answer_over_every_record_is_the_equation(self, world: World, request_of_all: Request, way: str) -> None:
        source, request = world.source, request_of_all
        if way == "nearest":
            request = request.top(N)
        elif way == "estimate":
            request = replace(request, tolerance=Tolerance(0.01, 0.0, 0.95, None))
        answer = getattr(source, way)(request)
        output, lse = self.expected(request, world)
        close(answer.output, output)
        close(answer.lse, lse)
        assert answer.exact.all()
        assert answer.n_pooled.tolist() == [N - 1] * 4

    def test_the_normaliser_alone(self, world: World, request_of_all: Request) -> None:
        lse = self.expected(request_of_all, world)[1]
        close(world.source.log_normaliser(request_of_all), lse)
        tolerance = Tolerance(0.01, 0.0, 0.95, None)
        close(world.source.log_partition(replace(request_of_all, tolerance=tolerance)).value, lse)

    def test_queries_get_the_gradient_of_the_equation(self, world: World, request_of_all: Request) -> None:
        queries = request_of_all.queries.clone().requires_grad_()
        answer = world.source.exact(replace(request_of_all, queries=queries))
        actual = torch.autograd.grad(answer.output.sum() + answer.lse.sum(), queries)[0]
        plain = request_of_all.queries.clone().requires_grad_()
        logits = plain @ torch.from_numpy(world.keys).T / T
        output = logits.softmax(1) @ torch.from_numpy(world.values)
        expected = torch.autograd.grad(output.sum() + logits.logsumexp(1).sum(), plain)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    def test_the_nearest_are_the_nearest(self, world: World, request_of_all: Request) -> None:
        source, scores = world.source, self.scores(request_of_all, world)
        best = np.argsort(-scores, axis=1)[:, :3]
        actual = source.find(request_of_all.top(3, exact=True))
        assert actual.certain
        rows = source.rows(actual.positions)
        known = source.resolve(np.unique(rows))
        assert [[known[row].id for row in line] for line in rows.tolist()] == np.array(world.ids)[best].tolist()
        scored = source.scored(request_of_all, actual.positions)
        close(scored.scores, np.take_along_axis(scores, best, 1))
        close(source.pooled(torch.full((4, 3), 1 / 3), scored), world.values[best].mean(1))

    def test_a_truncated_answer_is_the_equation_over_the_nearest(self, world: World, request_of_all: Request) -> None:
        answer = world.source.nearest(request_of_all.top(3, exact=True))
        for i, best in enumerate(np.argsort(-self.scores(request_of_all, world), axis=1)[:, :3]):
            few = request_of_all.queries[i : i + 1].numpy(), world.keys[best], world.values[best]
            close(answer.output[i : i + 1], reference.soft_query(reference.dot, *few, T)[0])

    def test_missing_candidates_score_minus_infinity(self, world: World, request_of_all: Request) -> None:
        positions = world.source.find(request_of_all.top(2, exact=True)).positions.copy()
        scores = world.source.scored(request_of_all, positions).scores
        positions[:, 1] = -1
        with_none = world.source.scored(request_of_all, positions)
        close(with_none.scores[:, 0], scores[:, 0].detach().numpy())
        assert with_none.scores[:, 1].isneginf().all()

    def test_an_answer_is_explained(self, world: World, request_of_all: Request) -> None:
        scores = self.scores(request_of_all, world) / T
        weights = np.exp(scores - np.log(np.exp(scores).sum(1, keepdims=True)))
        for i, explanation in enumerate(world.source.exact(request_of_all).explain(N)):
            assert explanation.mass == pytest.approx(1, abs=1e-4)
            assert explanation.ids == np.array(world.ids)[np.argsort(-weights[i])].tolist()
            np.testing.assert_allclose(explanation.weights, np.sort(weights[i])[::-1], atol=1e-5)
            entropy = -(weights[i] * np.log(weights[i])).sum()
            assert explanation.effective == pytest.approx(np.exp(entropy), rel=1e-4)

    def test_draws_are_live_records_with_their_log_probabilities(self, world: World, request_of_all: Request) -> None:
        drawn = world.source.sample(request_of_all, 50, torch.Generator().manual_seed(0))
        logits = self.scores(request_of_all, world) / T
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        places = np.array([[world.ids.index(int(name)) for name in names] for names in drawn.hits.ids])
        close(drawn.log_prob, np.take_along_axis(logs, places, 1), 1e-4)

    def test_records_within_a_radius_are_counted(self, world: World, request_of_all: Request) -> None:
        request = replace(request_of_all, tolerance=Tolerance(0.05, 0.0, 0.95, None))
        actual = world.source.count_within(request, 0.5)
        assert actual.value.tolist() == (self.scores(request, world) >= 0.5).sum(1).tolist()
        assert actual.exact.all()
        assert actual.met.all()

    def test_frozen_and_complete_sources_give_the_same_answer(self, world: World, request_of_all: Request) -> None:
        for same in (world.source.frozen(), world.source.whole()):
            close(same.exact(request_of_all).output, self.expected(request_of_all, world)[0])


class LocalContract(SourceContract):
    """And what those answer whose records lie in this process."""

    def test_blocks_are_the_live_records(self, world: World) -> None:
        source = world.source
        blocks = [source.encoded(block) for block in source.blocks(9)]
        close(torch.cat([block.keys for block in blocks]), world.keys)
        close(torch.cat([block.values for block in blocks]), world.values)
        positions = np.concatenate([block.positions.numpy() for block in blocks])
        np.testing.assert_array_equal(positions, np.flatnonzero(source.live))
        np.testing.assert_array_equal(source.positions(source.rows(positions)), positions)
        assert source.positions(np.array([10**6])).tolist() == [-1]
        last = next(iter(source.blocks(1, start=int(positions[-1]))))
        assert last.positions.tolist() == positions[-1:].tolist()

    def test_only_allowed_records_take_part(self, world: World, request_of_all: Request) -> None:
        source = world.source
        allowed = np.zeros(len(source.live), np.bool_)
        allowed[np.flatnonzero(source.live)[::3]] = True
        few = world._replace(keys=world.keys[::3], values=world.values[::3])
        answer = source.exact(replace(request_of_all, allowed=allowed))
        close(answer.output, self.expected(request_of_all, few)[0])
