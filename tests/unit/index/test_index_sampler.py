"""Draws by codes: unbiased sums, allowed records, codes with measured errors."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from worlds import holding

import softdb
from softdb.index.contract import prepared
from softdb.index.lists import Lists
from softdb.index.quantizer import APART
from softdb.index.sampler import Answering, Drawing, DrawnSample, Sampler

pytest.importorskip("faiss")
native = pytest.importorskip("softdb.kernels._native")

Array = NDArray[Any]
Floats = NDArray[np.float64]
N, D, V, BUDGET = 12_000, 20, 3, 300
METRICS = ["dot", "cosine", "l2"]


class World(NamedTuple):
    """A database with an index, and all that is in it."""

    db: softdb.SoftDB
    keys: Floats  # (n, d) as they are stored
    values: Floats  # (n, v)
    queries: NDArray[np.float32]  # (q, d)

    @property
    def scores(self) -> Floats:  # (q, n)
        """By the equation of the metric."""
        queries, keys = self.queries.astype(np.float64), self.keys
        if self.db.metric == "l2":
            return np.asarray(-np.square(queries[:, None] - keys).sum(2))
        if self.db.metric == "cosine":
            queries, keys = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, keys))
        return np.asarray(queries @ keys.T)

    @property
    def sampler(self) -> Sampler:
        drawable = self.db._finder.sampler(self.db._store.snapshot, None)
        assert drawable is not None
        return drawable[0]

    def draw(
        self,
        temperature: float,
        seed: int = 0,
        budget: int = BUDGET,
        controls: bool = True,
        allowed: Array | None = None,
        shown: int = 0,
    ) -> DrawnSample:
        snapshot = self.db._store.snapshot
        drawable = self.db._finder.sampler(snapshot, allowed)
        assert drawable is not None
        asked = prepared(self.queries, drawable[0].index.metric)
        drawing, answering = (
            Drawing(asked, 1 / temperature, budget, seed, 0.05),
            Answering(snapshot.value_column, V, 1.96, shown=shown),
        )
        return drawable[0].draw(drawable[1], snapshot, drawing, controls, answering)


def clustered_world(metric: Any, dtype: Any = "float32", extreme: int = 0) -> World:
    """Clusters of unlike sizes; values go with the keys. So many of the first values are extreme."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((40, D))
    keys = (centres[(40 * random.random(N) ** 2).astype(int)] + 0.6 * random.standard_normal((N, D))).astype(dtype)
    values = (keys[:, :V] + 0.5 * random.standard_normal((N, V))).astype(dtype)
    values[:extreme] *= 1000
    db = holding(keys, values, metric=metric, dtype=dtype)
    db.build_index("ivf")
    queries = (centres[:4] + 0.5 * random.standard_normal((4, D))).astype(np.float32)
    return World(db, keys.astype(np.float64), values.astype(np.float64), queries)


@functools.cache
def world(metric: str, dtype: str = "float32") -> World:
    return clustered_world(metric, dtype)


def spread_of(here: World) -> float:
    """Deviation of the scores."""
    return float(here.scores.std())


def sums(here: World, sample: DrawnSample, temperature: float, top: Floats) -> Floats:  # (q, 1 + v)
    """Estimates of Z and of the numerator, relative to e^top."""
    assert sample.answer is not None
    weights = np.exp(sample.scores / temperature - top[:, None]) / sample.chances
    weights[sample.positions < 0] = 0
    scale = np.exp(sample.figures.base - top)
    numerator = np.einsum("qw,qwv->qv", weights, here.values[sample.positions])
    numerator += scale[:, None] * sample.answer.moved
    total = weights.sum(1) + scale * sample.figures.correction
    np.testing.assert_allclose(sample.figures.lse, top + np.log(total), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sample.answer.output, numerator / total[:, None], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sample.answer.weights, weights / total[:, None], rtol=1e-6, atol=1e-12)
    return np.column_stack([total, numerator])


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [0.15, 0.5, 2.0])  # temperature in deviations of the scores
@pytest.mark.parametrize("controls", [True, False])
def test_sums_over_the_drawn_are_right_on_average(metric: str, dtype: str, width: float, controls: bool) -> None:
    here = world(metric, dtype)
    temperature = width * spread_of(here)
    logits = here.scores / temperature
    top = logits.max(1)
    weights = np.exp(logits - top[:, None])
    truth = np.column_stack([weights.sum(1), weights @ here.values])
    drawn = [here.draw(temperature, seed, controls=controls) for seed in range(150)]
    estimates = np.stack([sums(here, sample, temperature, top) for sample in drawn])
    doubt = estimates.std(0) / len(drawn) ** 0.5
    assert (np.abs(estimates.mean(0) - truth) <= 4 * doubt + 1e-5 * np.abs(truth).max(1, keepdims=True)).all()
    assert (doubt[:, 0] < 0.05 * truth[:, 0]).all()  # or that says nothing
    corrections = np.stack([np.exp(sample.figures.base - top) * sample.figures.correction for sample in drawn])
    assert controls or not corrections.any()
    noise = corrections.std(0) / len(drawn) ** 0.5
    assert (np.abs(corrections.mean(0)) <= 4 * noise + 1e-6 * truth[:, 0]).all()


@pytest.mark.parametrize("metric", METRICS)
def test_corrections_are_right_on_average(metric: str) -> None:
    """Also where few draws have most of the weight, and whether to correct at all is in doubt."""
    here = world(metric)
    for width in (0.15, 0.3):
        temperature = width * spread_of(here)
        top = here.scores.max(1) / temperature
        drawn = [here.draw(temperature, seed) for seed in range(300)]
        corrections = np.stack([np.exp(sample.figures.base - top) * sample.figures.correction for sample in drawn])
        doubt = corrections.std(0) / len(drawn) ** 0.5
        assert (np.abs(corrections.mean(0)) <= 4 * doubt + 1e-6).all()  # Z is at least 1


@pytest.mark.parametrize("metric", METRICS)
def test_corrections_narrow_the_error(metric: str) -> None:
    here = world(metric)
    temperature = spread_of(here)
    logits = here.scores / temperature
    top = logits.max(1)
    truth = np.exp(logits - top[:, None]).sum(1)
    errors = [
        np.square(
            [
                sums(here, here.draw(temperature, seed, controls=on), temperature, top)[:, 0] - truth
                for seed in range(60)
            ]
        )
        for on in (True, False)
    ]
    assert (errors[0].mean(0) < 0.7 * errors[1].mean(0)).all()


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_exact(metric: str) -> None:
    here = world(metric, "float16")
    sample = here.draw(spread_of(here))
    for i, (positions, scores) in enumerate(zip(sample.positions, sample.scores, strict=True)):
        which = positions >= 0
        np.testing.assert_allclose(scores[which], here.scores[i, positions[which]], rtol=1e-6, atol=1e-6)
        assert np.isneginf(scores[~which]).all()


@pytest.mark.parametrize("metric", METRICS)
def test_all_are_drawn_where_the_budget_is_everything(metric: str) -> None:
    here = world(metric)
    temperature = 2 * spread_of(here)
    logits = here.scores / temperature
    top = logits.max(1)
    for budget in (N, 3 * N):
        sample = here.draw(temperature, budget=budget)
        assert not sample.figures.unseen.any()
        assert not sample.figures.hidden.any()
        for positions in sample.positions:
            assert sorted(positions[positions >= 0].tolist()) == list(range(N))
        estimate = sums(here, sample, temperature, top)[:, 0]
        np.testing.assert_allclose(estimate, np.exp(logits - top[:, None]).sum(1), rtol=1e-6)


def test_an_extreme_value_is_in_no_mean() -> None:
    here = clustered_world("dot", extreme=2)
    layout, reach = here.sampler.index.layout, here.sampler.reach
    assert {0, 1} <= set(reach.apart.tolist())
    lists = np.repeat(np.arange(len(layout.sizes)), layout.sizes)
    rows = layout.rows[layout.slots]
    for which in np.flatnonzero(layout.sizes):
        members = np.setdiff1d(rows[lists == which], reach.apart)
        if len(members):
            expected = here.values[members].mean(0)
            np.testing.assert_allclose(reach.means[which], expected, rtol=1e-4, atol=1e-4)


# -- allowed records ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_records_that_may_not_be_drawn_never_are(metric: str) -> None:
    here = clustered_world(metric, extreme=2)
    apart = here.sampler.index.layout.rows[here.sampler._apart]
    assert {0, 1} <= set(apart.tolist())
    gone, random = np.arange(5, N, 7), np.random.default_rng(1)
    here.db.delete(gone.tolist())
    allowed = random.random(N) < 0.4
    allowed[:2] = False, True
    live = np.ones(N, np.bool_)
    live[gone] = False
    for keep in (None, allowed):
        possible = live if keep is None else live & keep
        for temperature in (0.2 * spread_of(here), 5 * spread_of(here)):
            for seed in range(5):
                for positions in here.draw(temperature, seed, allowed=keep).positions:
                    drawn = positions[positions >= 0]
                    assert possible[drawn].all()
                    assert len(set(drawn.tolist())) == len(drawn) > 0


def test_no_allowed_records_give_no_draws() -> None:
    here = world("dot")
    sample = here.draw(1.0, allowed=np.zeros(N, np.bool_))
    assert (sample.positions == -1).all()
    assert not sample.figures.unseen.any()
    assert not sample.figures.correction.any()


def test_a_seed_and_a_query_determine_the_draws() -> None:
    here = world("dot")
    first, again, other = (here.draw(1.0, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.positions, again.positions)
    assert set(first.positions[0].tolist()) != set(other.positions[0].tolist())
    alone = here._replace(queries=here.queries[2:3]).draw(1.0, 3)
    assert set(alone.positions[0].tolist()) - {-1} == set(first.positions[2].tolist()) - {-1}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("startable", [True, False])
def test_threads_that_share_one_query_draw_as_one_does(
    metric: str, threads: int, startable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no other thread can be started."""
    here = world(metric)
    here = here._replace(queries=here.queries[:1])
    alone = here.draw(0.5 * spread_of(here), 5)
    monkeypatch.setattr("softdb.index.sampler.workers", lambda products: threads)
    if not startable:

        def refused(process: int, count: int) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("softdb.kernels.threads._pool", refused)
    shared = [here.draw(0.5 * spread_of(here), 5) for _ in range(20)]
    for sample in shared:
        assert sorted(sample.positions[0].tolist()) == sorted(alone.positions[0].tolist())
        np.testing.assert_allclose(sample.figures.lse, alone.figures.lse, rtol=1e-9)
        np.testing.assert_allclose(sample.figures.bar, alone.figures.bar, rtol=1e-3)
        np.testing.assert_array_equal(sample.figures, shared[0].figures)  # whichever thread did which block


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("share", [1.0, 0.02])
def test_queries_that_share_a_scan_draw_as_each_alone_does(
    metric: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.index.sampler.workers", lambda products: 1)
    here = world(metric)
    allowed = np.random.default_rng(1).random(N) < share
    together = here.draw(0.5 * spread_of(here), 5, allowed=allowed)
    assert len(here.queries) >= 4  # fewer are scanned one by one
    for i in range(len(here.queries)):
        alone = here._replace(queries=here.queries[i : i + 1]).draw(0.5 * spread_of(here), 5, allowed=allowed)
        np.testing.assert_array_equal(together.positions[i], alone.positions[0])
        for shared, single in zip(together.figures, alone.figures, strict=True):
            np.testing.assert_array_equal(shared[i], single[0])


# -- every level of the processor --------------------------------------------------------------------------------------


@pytest.fixture
def levels() -> Iterator[list[str]]:
    before = native.level()
    yield native.levels()
    native.use(before)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("controls", [True, False])
def test_every_level_draws_alike(levels: list[str], metric: str, controls: bool) -> None:
    here = world(metric)
    drawn = []
    for name in levels:
        native.use(name)
        drawn.append(here.draw(0.5 * spread_of(here), controls=controls))
    for sample in drawn[1:]:
        for i in range(len(here.queries)):
            same, (left, right) = (
                0,
                (
                    dict(zip(one.positions[i].tolist(), (-np.log(one.chances[i])).tolist(), strict=True))
                    for one in (drawn[0], sample)
                ),
            )
            common = left.keys() & right.keys() - {-1}
            same = sum(abs(left[row] - right[row]) < 1e-2 for row in common)
            assert same >= 0.99 * max(len(left), len(right)) - 1
        for name, close in (("lse", 0.01), ("unseen", 0.05), ("hidden", 0.05), ("bar", 0.05)):
            ours, theirs = getattr(sample.figures, name), getattr(drawn[0].figures, name)
            np.testing.assert_allclose(ours, theirs, rtol=close, atol=1e-9, err_msg=name)


# -- the coarser codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [8, 20, 40, 100])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_errors_of_codes_are_known(metric: Any, dim: int) -> None:
    random = np.random.default_rng(dim)
    keys = 2 * random.standard_normal((30, dim))[random.integers(0, 30, 5000)] + random.standard_normal((5000, dim))
    keys[7] *= 40
    keys = keys.astype(np.float32)
    with holding(keys, metric=metric) as db:
        db.build_index("ivf")
        index = db._finder.index
    assert isinstance(index, Lists)
    sketch, coded = index.sketch, index.layout.coded()
    pairs = np.stack([coded.sketches & 15, coded.sketches >> 4], 2).reshape(len(keys), -1)
    words = sketch.words[np.arange(len(sketch.words)), :, pairs].reshape(len(keys), -1).astype(np.float64)
    known = sketch.origin + sketch.centroids.rows[coded.lists] + words @ sketch.rotation.rows
    left = keys[coded.rows].astype(np.float64) - known
    bound = coded.errors * sketch.error_step
    ordinary = coded.errors < APART
    assert ordinary.mean() > 0.998
    assert (np.linalg.norm(left, axis=1) <= bound)[ordinary].all()
    assert np.median(bound[ordinary] / np.linalg.norm(left, axis=1)[ordinary]) < 1.6  # or any bound would do
    queries = random.standard_normal((9, dim))
    off = np.abs(queries @ left.T)
    assert (off <= np.linalg.norm(queries, axis=1)[:, None] * bound)[:, ordinary].all()


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "width"), [("dot", 1.5), ("cosine", 1.0), ("l2", 1.5)])
def test_counts_lie_within_their_bars(metric: str, width: float) -> None:
    here = world(metric)
    scores = here.scores
    least = float(scores.mean() + width * scores.std())
    radius = (-least) ** 0.5 if metric == "l2" else least
    truth = (scores >= least).sum(1)
    assert (truth > 50).all()
    inside = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        counted = here.db.count_within(here.queries, radius, max_draws=400, generator=generator)
        assert not counted.exact.any()
        inside.append((np.abs(counted.value.numpy() - truth) <= counted.bar.numpy()).mean())
        assert (counted.bar.numpy() < 0.5 * truth.max()).all()
    assert np.mean(inside) >= 0.9


def test_a_count_of_few_records_is_exact() -> None:
    here = world("dot")
    with holding(here.keys[:2000]) as few:
        few.build_index("ivf")
        counted = few.count_within(here.queries, 1.0)
        truth = (here.queries.astype(np.float64) @ here.keys[:2000].T >= 1.0).sum(1)
        assert counted.exact.all()
        assert not counted.bar.any()
        assert counted.value.tolist() == truth.tolist()


class Hard(NamedTuple):
    """Records of which few matter much, and queries near these."""

    db: softdb.SoftDB
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    queries: NDArray[np.float32]


@functools.cache
def hard(kind: str) -> Hard:
    """A feature that 1 record in 500 has, along a direction of no axis; or near copies of the queries."""
    random, n, d = np.random.default_rng(4), 15_000, 32
    keys, queries = random.standard_normal((n, d)), random.standard_normal((20, d))
    values = random.standard_normal((n, V))
    if kind == "rare feature":
        direction = random.standard_normal(d)
        direction /= np.linalg.norm(direction)
        few = random.permutation(n)[: n // 500]
        keys[few] += 6 * direction
        queries += 1.5 * direction
    else:
        few = random.permutation(n)[: 20 * 5]
        keys[few] = np.repeat(queries, 5, 0) + 0.1 * random.standard_normal((100, d))
    values[few] += 3
    db = holding(keys, values)
    db.build_index("ivf")
    return Hard(db, keys.astype(np.float32), values.astype(np.float32), queries.astype(np.float32))


@pytest.mark.parametrize("kind", ["rare feature", "near copies"])
@pytest.mark.parametrize("temperature", [1.5, 6.0])
def test_bars_hold_where_few_records_matter(kind: str, temperature: float) -> None:
    here = hard(kind)
    logits = here.queries.astype(np.float64) @ here.keys.astype(np.float64).T / temperature
    top = logits.max(1, keepdims=True)
    weights = np.exp(logits - top)
    totals = weights.sum(1)
    truth, lse = weights @ here.values / totals[:, None], np.log(totals) + top[:, 0]
    inside: list[NDArray[np.bool_]] = []
    for seed in range(5):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        ask: dict[str, Any] = {"temperature": temperature, "rtol": 0.05, "max_draws": 400}
        pooled = here.db.attend(here.queries, **ask, generator=generators[0])
        log_z = here.db.log_partition(here.queries, **ask, generator=generators[1])
        assert not pooled.exact.any()
        error = np.linalg.norm(pooled.output.double().numpy() - truth, axis=1)
        inside.append(error <= pooled.bar.numpy() + 1e-5)
        inside.append(np.abs(np.expm1(log_z.value.double().numpy() - lse)) <= log_z.bar.numpy())
    assert np.mean(inside[::2]) >= 0.9
    assert np.mean(inside[1::2]) >= 0.9


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_errors_scale_with_the_values(scale: float) -> None:
    """Their squares are out of the range of float32."""
    plain = world("dot")
    values = (plain.values * np.float32(scale)).astype(np.float32)
    db = holding(plain.keys.astype(np.float32), values)
    db.build_index("ivf")
    answers = [World(own, plain.keys, plain.values, plain.queries).draw(spread_of(plain)) for own in (plain.db, db)]
    for name, power in (("variance", 2), ("variances", 4), ("usual", 1), ("drift", 1), ("reach", 1)):
        usual, scaled = (getattr(sample.figures, name) for sample in answers)
        np.testing.assert_allclose(scaled / scale**power, usual, rtol=1e-5, err_msg=name)
    usual, scaled = (sample.answer for sample in answers)
    assert usual is not None
    assert scaled is not None
    np.testing.assert_allclose(scaled.first / scale, usual.first, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(scaled.signed / scale, usual.signed, rtol=1e-4, atol=1e-6)


def test_the_heaviest_records_come_first() -> None:
    here = world("dot")
    every = here.draw(spread_of(here), shown=BUDGET * 2)
    some = here.draw(spread_of(here), shown=10)
    assert every.answer is not None
    assert some.answer is not None
    assert (np.diff(every.answer.weights) <= 0).all()
    assert np.array_equal(some.positions[:, :10], every.positions[:, :10])
    assert np.array_equal(np.sort(some.positions), np.sort(every.positions))
    assert np.array_equal(np.sort(some.answer.weights), np.sort(every.answer.weights))
