"""The scan of lists against numpy: tables, estimates and selection, at every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from softdb.check import Metric
from softdb.index.lists import Among, Lists
from softdb.index.quantizer import BLOCK, Coded, Matrix, Quantizer, nearest_centroids
from softdb.index.rule import Rule

native = pytest.importorskip("softdb.kernels._native")

Floats = NDArray[np.float32]
LEVELS = native.levels()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.use(request.param)
    yield request.param
    native.use(before)


@dataclass(frozen=True)
class World:
    index: Lists
    coded: Coded
    keys: Floats
    queries: Floats


def world(metric: Metric = Metric.DOT, d: int = 20, parts: int = 8, n: int = 3000, lists: int = 21) -> World:
    """An index with a quantizer by chance: estimates need no good one to be right."""
    random = np.random.default_rng(d + parts)
    word = -(-d // parts)
    rotation = Matrix.of((random.standard_normal((parts * word, d)) / d**0.5).astype(np.float32))
    centroids = Matrix.of(2 * random.standard_normal((lists, d)).astype(np.float32))
    words = random.standard_normal((parts, word, BLOCK)).astype(np.float32)
    origin = random.standard_normal(d).astype(np.float32) if metric is Metric.L2 else np.zeros(d, np.float32)
    quantizer = Quantizer(rotation, centroids, words, origin, 0.01, 0.1)
    index = Lists(metric, quantizer, quantizer)
    keys = (centroids.rows[random.integers(0, lists - 1, n)] + random.standard_normal((n, d))).astype(np.float32)
    keys += origin
    index.add(np.arange(n), keys)
    index.seal()
    index.rule = Rule(1.0, 0.5, -0.1, -3.0)
    return World(index, index.layout.coded(), keys, (random.standard_normal((9, d)) + origin).astype(np.float32))


def rounded(query: Floats) -> Floats:
    """A query in 63 steps of its largest number, half away from zero."""
    step = np.abs(query).max() / 63
    steps: Floats = np.sign(query) * np.floor(np.abs(query / step) + 0.5) * step
    return steps


def estimates(world: World, query: Floats) -> NDArray[np.float64]:  # (n,)
    """The equation of lists.cc, with tables in 127 steps, in float64."""
    index, coded = world.index, world.coded
    inner, l2 = index.inner, index.metric is Metric.L2
    seen = rounded((query - inner.origin).astype(np.float64))
    turned = inner.rotation.rows.astype(np.float64) @ seen
    gain = 2 if l2 else 1
    parts, word, _ = inner.words.shape
    table = gain * np.einsum("pw,pwc->pc", turned.reshape(parts, word), inner.words.astype(np.float64))
    low = min(table.min(), 0)
    step = (max(table.max(), 0) - low) / 127
    steps = np.floor((table - low) / step + 0.5)
    both = np.stack([coded.codes & 15, coded.codes >> 4], 2).reshape(len(coded.codes), -1)
    sums = steps[np.arange(parts), both].sum(1) * step + parts * low
    table = inner.centroids.rows.astype(np.float64)
    near = gain * (table @ seen) - (np.square(table).sum(1) if l2 else 0)
    lowered = coded.offsets.astype(np.float64) * inner.unit if l2 else 0.0
    return np.asarray(near[coded.lists] + coded.factors.astype(np.float64) * sums - lowered)


def found_by_codes(world: World, queries: Any, c: int, effort: int, allowed: Any = None) -> tuple[Any, Floats]:
    index = world.index
    slots = index.filled if allowed is None else index.layout.allowed(allowed, index.layout.rows)
    return index.scan(queries, c, Among(None, index.layout.rows, slots), c, c, effort)[:2]


EVERYTHING = 1 << 60


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.L2])
@pytest.mark.parametrize(("d", "parts"), [(20, 8), (33, 16), (64, 32), (7, 8), (130, 40)])
def test_estimates_are_those_of_the_equation(level: str, metric: Metric, d: int, parts: int) -> None:
    here = world(metric, d, parts)
    rows, scores = found_by_codes(here, here.queries, 3000, EVERYTHING)
    order = np.argsort(here.coded.rows)
    for query, row, own in zip(here.queries, rows, scores, strict=True):
        expected = estimates(here, query)[order]
        assert sorted(row) == list(range(3000))
        np.testing.assert_allclose(own, expected[row], rtol=1e-4, atol=1e-4 * np.abs(expected).max())
        assert (np.diff(own) <= 0).all()


@pytest.mark.parametrize("c", [1, 10, 100])
def test_the_best_candidates_are_returned(level: str, c: int) -> None:
    here = world()
    whole, scores = found_by_codes(here, here.queries, 3000, EVERYTHING)
    few, own = found_by_codes(here, here.queries, c, EVERYTHING)
    np.testing.assert_array_equal(own, scores[:, :c])
    if c > 1:
        np.testing.assert_array_equal(few, whole[:, :c])


def test_of_many_ties_the_first_are_returned(level: str) -> None:
    here = world(n=3000)
    coded = here.coded._replace(codes=np.zeros_like(here.coded.codes), factors=np.ones_like(here.coded.factors))
    here.index._lay_out(coded)
    here.index.inner.centroids.numbers[:] = 0
    here.index._use(here.index.layout)
    rows, scores = found_by_codes(here, here.queries, 50, EVERYTHING)
    assert (scores == scores[:, :1]).all()
    assert all(len(set(each)) == 50 for each in rows.tolist())


@pytest.mark.parametrize("share", [0.5, 0.02, 0.0])
def test_records_that_are_not_allowed_are_never_found(level: str, share: float) -> None:
    here = world()
    keep = np.random.default_rng(3).random(3000) < share
    rows, scores = found_by_codes(here, here.queries, 3000, 1, keep)
    every, known = found_by_codes(here, here.queries, 3000, EVERYTHING)
    for i in range(len(rows)):
        allowed = keep[every[i]]
        count = int(allowed.sum())
        assert rows[i, :count].tolist() == every[i][allowed].tolist()  # the lists are scanned until there are enough
        assert (rows[i, count:] == -1).all()
        np.testing.assert_array_equal(scores[i, :count], known[i][allowed])


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.L2])
@pytest.mark.parametrize("queries", [2, 64, 65, 200])
def test_a_batch_answers_as_each_alone(level: str, metric: Metric, queries: int) -> None:
    here = world(metric, d=64, parts=32, lists=50)
    random = np.random.default_rng(1)
    asked = here.keys[random.integers(0, 3000, queries)] + 0.3 * random.standard_normal((queries, 64))
    asked = asked.astype(np.float32)
    together = found_by_codes(here, asked, 20, 3000)
    for i in range(queries):
        alone = found_by_codes(here, asked[i : i + 1], 20, 3000)
        np.testing.assert_array_equal(alone[0][0], together[0][i])
        np.testing.assert_array_equal(alone[1][0], together[1][i])


def test_more_effort_never_finds_worse(level: str) -> None:
    here = world()
    best = None
    for effort in (1, 10, 100, 1000, EVERYTHING):
        _, scores = found_by_codes(here, here.queries, 200, effort)
        assert best is None or (scores >= best - 1e-6).all()
        best = scores


@pytest.mark.parametrize(("lists", "dim"), [(1, 1), (21, 5), (300, 24), (64, 70)])
def test_the_nearest_centroid_is_the_nearest_of_the_rounded(level: str, lists: int, dim: int) -> None:
    """Scores by loops over integers: keys rounded to 63 steps, centroids to 127. The first of equal ones is chosen."""
    random = np.random.default_rng(lists)
    centroids, keys = (
        Matrix.of(random.standard_normal((lists, dim)).astype(np.float32)),
        random.standard_normal((37, dim)).astype(np.float32),
    )
    centroids.numbers[-1], centroids.scales[-1] = centroids.numbers[0], centroids.scales[0]  # a tie
    keys[0] = 0
    steps = np.stack([rounded(key) for key in keys[1:]])
    scores = (
        np.concatenate([keys[:1], steps]) @ centroids.rows.T.astype(np.float64) - np.square(centroids.rows).sum(1) / 2
    )
    chosen = nearest_centroids(centroids, keys)
    assert (scores[np.arange(37), chosen] >= scores.max(1) - 1e-5).all()
    assert not (chosen == lists - 1).any() or lists == 1
