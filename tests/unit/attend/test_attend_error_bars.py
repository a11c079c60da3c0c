"""Error bars in every world: they hold, are infinite where nothing is known, and merge."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from drawn import errors_of, pooled_at
from scipy import stats
from worlds import exact, holding, suite

import softdb
from softdb.attend.error import ErrorEstimate, bars, joined, sure
from softdb.index.sampler import Sampler

Array = np.ndarray[Any, Any]
N = 12_000  # a little more than are worth an estimate


@functools.cache
def database_of(name: str) -> tuple[softdb.SoftDB, suite.World]:
    """A database of a world, with an index."""
    world = suite.world(name, N, 12)
    values = world.values
    shape: dict[str, Any] = {"num_classes": world.num_classes} if world.num_classes else {}
    if values is not None and not world.num_classes:
        shape = {"value_dim": values.shape[1]}
    kind: Any = {"metric": world.metric, "dtype": world.dtype}
    db = softdb.open(None, dim=world.keys.shape[1], **kind, **shape)
    old = slice(0, N - world.young)
    db.insert(range(old.stop), world.keys[old], None if values is None else values[old])
    db.build_index("ivf")
    if world.young:
        new = slice(N - world.young, N)
        db.insert(range(N - world.young, N), world.keys[new], None if values is None else values[new])
    return db, world


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


# -- coverage ----------------------------------------------------------------------------------------------------------

HARD = [
    "gaussian-32", "lognormal-0.5", "student-2", "uniform-2", "spiked", "outlier-hidden", "hubs", "labels",
    "values-pareto", "young", "near-duplicates",
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HARD)
def test_the_bar_holds_in_hard_worlds(name: str) -> None:
    db, world = database_of(name)
    spread = float((world.keys[:2000].astype(float) @ world.queries.T.astype(float)).std())
    for temperature in (0.01, spread / 4, spread):
        truth = exact.answers(world, [temperature])[0]
        scale = np.maximum(np.linalg.norm(truth.output, axis=1), 1.0)
        inside, total, beyond = 0, 0, 0
        for generator in generators(12):
            actual = db.attend(world.queries, temperature=temperature, rtol=0.05, max_draws=400, generator=generator)
            assert not actual.exact.any()
            error = np.linalg.norm(actual.output.double().numpy() - truth.output, axis=1) - 2e-6 * scale
            inside, total = inside + int((error <= actual.bar.numpy()).sum()), total + len(error)
            beyond += int((actual.met.numpy() & (error > 3 * actual.bar.numpy())).sum())
            assert actual.bar.isfinite().float().mean() >= 0.75
        assert stats.binomtest(inside, total, 0.95, "less").pvalue > 1e-4, f"{inside} of {total} at {temperature}"
        assert beyond == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3, 1e-2])
def test_a_low_temperature_on_any_data_is_answered(temperature: float) -> None:
    """Shares of drawn records underflow; the remainder is pooled."""
    for name in ("uniform-2", "lognormal-1"):
        db, world = database_of(name)
        truth = exact.answers(world, [temperature])[0]
        actual = db.attend(world.queries, temperature=temperature, rtol=0.05, max_draws=400)
        error = np.linalg.norm(actual.output.double().numpy() - truth.output, axis=1)
        allowed = actual.bar.numpy() + 2e-6 * np.linalg.norm(truth.output, axis=1).max()
        assert (error <= allowed).mean() > 0.7
        assert (error <= 3 * allowed).all()


def test_more_confidence_takes_a_wider_bar() -> None:
    db, world = database_of("gaussian-32")
    results = [
        db.attend(world.queries, temperature=4, rtol=0.05, max_draws=400, confidence=one).bar
        for one in (0.5, 0.95, 0.99, 0.999)
    ]
    for less, more in itertools.pairwise(results):
        assert (more > less).all()


def test_far_queries_at_a_low_temperature_know_that_log_z_is_rounded() -> None:
    db, world = database_of("queries-far-away")
    truth = exact.answers(world, [1e-4])[0]
    actual = db.log_partition(world.queries, temperature=1e-4, max_draws=400)
    error = np.abs(np.expm1(np.clip(actual.value.double().numpy() - truth.lse, -700, 700)))
    assert (error <= actual.bar.numpy()).all()


@pytest.mark.slow
def test_extreme_records_are_set_apart() -> None:
    keys = np.random.default_rng(0).standard_normal((N, 16)).astype(np.float32)
    values = np.random.default_rng(1).standard_normal((N, 3)).astype(np.float32)
    keys[17] *= 30
    values[4711] *= 1e4
    with holding(keys, values) as db:
        db.build_index("ivf")
        drawable = db._finder.sampler(db._store.snapshot, None)
        assert drawable is not None
        sampler, reach = drawable[0], drawable[0].reach
        apart, coded = sampler.index.layout.rows[sampler._apart].tolist(), sampler.index.layout.coded()
        assert 4711 in reach.apart
        assert 4711 in apart
        assert 17 in apart or (coded.lists == coded.lists[coded.rows == 17]).sum() == 1  # k-means has seen it
        assert len(sampler._apart) < 0.02 * N
        assert reach.value_radius < 20
        assert reach.scales[reach.apart == 4711] > 100
        query = np.random.default_rng(2).standard_normal((8, 16)).astype(np.float32)
        truth = db.attend(query, temperature=8)
        for generator in generators(10):
            actual = db.attend(query, temperature=8, rtol=0.05, max_draws=400, generator=generator)
            assert ((actual.output - truth.output).norm(dim=1) <= actual.bar).float().mean() >= 0.75


def test_draws_that_contradict_the_codes_make_bars_wide() -> None:
    """Codes that claim to be exact and are not."""
    db, world = database_of("gaussian-32")
    drawable = db._finder.sampler(db._store.snapshot, None)
    assert drawable is not None
    sampler = drawable[0]
    sampler.index.layout.errors[:] = 0
    db._finder._searcher.sampler = Sampler(sampler.index, db._store.snapshot, None)  # type: ignore[union-attr]
    try:
        truth = exact.answers(world, [8.0])[0]
        for generator in generators(5):
            actual = db.attend(world.queries, temperature=8, rtol=0.05, max_draws=400, generator=generator)
            error = np.linalg.norm(actual.output.double().numpy() - truth.output, axis=1)
            assert (error <= actual.bar.numpy()).all()
            assert not actual.met.any()
    finally:
        database_of.cache_clear()


@pytest.mark.slow
def test_a_code_far_above_all_weights_spoils_no_correction() -> None:
    """Skewed features: a record far from the others has a code that makes it e^30 times as heavy as all are."""
    random = np.random.default_rng(0)
    keys, queries = (0.2 * random.exponential(1, (count, 100)) ** 2 for count in (30_000, 64))
    with holding(keys, metric="l2") as db:
        db.build_index("ivf")
        scores = -np.square(queries[:, None] - keys[None, ::20]).sum(2)
        temperature = float(scores.std(1).mean()) / 16
        truth = db.attend(queries, temperature=temperature)
        for generator in generators(4):
            pooled = db.attend(queries, temperature=temperature, rtol=0.05, max_draws=400, generator=generator)
            assert ((pooled.output - truth.output).norm(dim=1) <= 3 * pooled.bar).all()


def spread_of(snapshot: Any, logits: Array, logs: Array, positions: Array, salt: int) -> ErrorEstimate:
    answer = pooled_at(logits, snapshot, positions, 5)
    found = errors_of(logits, logs, snapshot, positions, answer, salt)
    none = np.full(len(logits), 0.01)
    bounds = {"unseen": none, "hidden": none**2, "missed": none, "thinned": none, "usual": none + 1}
    return found._replace(**bounds, reach=np.full(len(logits), 4.0))


@pytest.mark.slow
def test_merged_parts_give_the_answer_of_the_whole() -> None:
    random = np.random.default_rng(0)
    keys, q, k = random.standard_normal((400, 5)), 6, 400
    snapshot, positions = worlds.snapshot(keys), np.tile(np.arange(400), (6, 1))
    logits, logs = 2 * random.standard_normal((q, k)), random.exponential(1, (q, k)).astype(np.float32)
    logits[3, :100] = -np.inf  # one part holds nothing for a query
    whole = spread_of(snapshot, logits, logs, positions, 0)
    cuts = [slice(i * 100, i * 100 + 100) for i in range(4)]
    parts = [spread_of(snapshot, logits[:, c], logs[:, c], positions[:, c], 0) for c in cuts]
    for merged in (joined(parts), joined([joined(parts[:2]), joined(parts[2:])]), joined(parts[::-1])):
        for name in ("output", "lse", "noise", "noises", "variance", "roots"):
            np.testing.assert_allclose(getattr(merged, name), getattr(whole, name), rtol=1e-6, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(merged.first, whole.first, rtol=1e-4, atol=1e-7)  # summed in float32
        np.testing.assert_allclose(merged.signed, whole.signed, rtol=1e-4, atol=1e-5)
        assert (merged.unseen <= whole.unseen).all()
        assert (merged.hidden <= whole.hidden + 1e-12).all()
        one, other = bars(merged, 0.95), bars(whole, 0.95)
        np.testing.assert_allclose(one.stderr, other.stderr, rtol=1e-6)
        np.testing.assert_allclose(one.lse_stderr, other.lse_stderr, rtol=1e-6)
    alone = joined([sure(whole.output, whole.lse)])
    assert (bars(alone, 0.95).bar == 0).all()


def test_a_sure_part_narrows_the_bar_by_its_share() -> None:
    random = np.random.default_rng(1)
    keys, positions = random.standard_normal((200, 5)), np.tile(np.arange(200), (3, 1))
    snapshot = worlds.snapshot(keys)
    logits, logs = random.standard_normal((3, 200)), random.exponential(1, (3, 200)).astype(np.float32)
    drawn = spread_of(snapshot, logits, logs, positions, 0)
    certain = sure(drawn.output, drawn.lse + np.log(3))  # the same answer, from three times the weight
    one, other = bars(joined([drawn, certain]), 0.95), bars(drawn, 0.95)
    np.testing.assert_allclose(one.stderr, other.stderr / 4, rtol=1e-6)
    np.testing.assert_allclose(one.bar, other.bar / 4, rtol=1e-5)


@pytest.mark.slow
def test_features_that_few_records_have_cannot_hide() -> None:
    """Dense embeddings with rare flags: neither codes nor the spread of a list tell who carries a flag."""
    random = np.random.default_rng(0)

    def unit(count: int) -> Array:
        drawn = random.standard_normal((count, 48))
        actual: Array = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        return actual

    keys = np.concatenate([unit(N), np.zeros((N, 16))], axis=1).astype(np.float32)
    flagged = np.flatnonzero(random.random(N) < 0.02)
    keys[flagged, 48 + random.integers(0, 16, len(flagged))] = 1
    queries = np.concatenate([unit(10), np.eye(16)[:10]], axis=1).astype(np.float32)
    scores = queries.astype(float) @ keys.T.astype(float)
    with holding(keys) as db:
        db.build_index("ivf")
        for temperature in (0.05, 0.1):
            weights = np.exp(scores / temperature - scores.max(1, keepdims=True) / temperature)
            truth = weights @ keys / weights.sum(1, keepdims=True)
            inside, beyond = [], 0
            for generator in generators(10):
                actual = db.attend(queries, temperature=temperature, rtol=0.05, max_draws=400, generator=generator)
                error = np.linalg.norm(actual.output.double().numpy() - truth, axis=1) - 2e-6
                inside.append((error <= actual.bar.numpy()).mean())
                beyond += int((actual.met.numpy() & (error > 3 * actual.bar.numpy())).sum())
            assert np.mean(inside) > 0.85
            assert beyond == 0
        counted = db.count_within(queries, 0.7, max_draws=400)
        assert (np.abs(counted.value.numpy() - (scores >= 0.7).sum(1)) <= counted.bar.numpy()).all()


def test_sums_of_errors_follow_their_equations() -> None:
    """Of more records than are summed in float32 at a time."""
    random = np.random.default_rng(0)
    keys, q, k = random.standard_normal((2500, 5)), 3, 2500
    snapshot, positions = worlds.snapshot(keys), np.tile(np.arange(k), (q, 1))
    logits, logs = random.standard_normal((q, k)), random.exponential(1, (q, k)).astype(np.float32)
    answer = pooled_at(logits, snapshot, positions, 5)
    sums = errors_of(logits, logs, snapshot, positions, answer)
    weights, chances = np.exp(logits - answer[1][:, None]), -np.expm1(-logs.astype(np.float64))
    r = np.sqrt(chances) * weights
    y = r[:, :, None] * (snapshot.values_at(np.arange(k)).double().numpy() - answer[0][:, None])
    np.testing.assert_allclose(sums.noise, (r**2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(sums.variance, (y**2).sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(sums.variances, ((y**2).sum(2) ** 2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(sums.first, np.einsum("qk,qkv->qv", r, y), rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(np.square(sums.signed).sum((1, 2)), sums.variance, rtol=0.5)  # E (Σ ±y)² = Σ y²
