"""Windows: of lists far from a query, a draw reads a random part. Sums stay unbiased, and bars right."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from worlds import holding

import softdb
from softdb.check import Metric
from softdb.index.contract import prepared
from softdb.index.quantizer import CodeBlocks
from softdb.index.sampler import Answering, Drawing, DrawnSample
from softdb.index.sketches import Sketches

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

Array = NDArray[Any]
N, D, BUDGET = 40_000, 16, 300
METRICS = ["dot", "cosine", "l2"]


@functools.cache
def world(metric: Any) -> tuple[softdb.SoftDB, Array, Array]:
    """A database of tight clusters with values as wide as keys, its keys, and queries beside some clusters."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, D))
    keys = (centres[random.integers(0, 60, N)] + 0.25 * random.standard_normal((N, D))).astype(np.float32)
    db = holding(keys, keys, metric=metric)
    db.build_index("ivf")
    return db, keys.astype(np.float64), (centres[:8] + 0.3 * random.standard_normal((8, D))).astype(np.float32)


def logits(metric: str, temperature: float) -> Array:  # (q, n)
    """By the equation of the metric."""
    _, keys, given = world(metric)
    queries = given.astype(np.float64)
    if metric == "l2":
        return np.asarray(-np.square(queries[:, None] - keys).sum(2)) / temperature
    if metric == "cosine":
        queries, keys = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, keys))
    return np.asarray(queries @ keys.T) / temperature


def temperature_of(metric: str) -> float:
    return 0.3 * float(logits(metric, 1).std())


def draw(
    metric: str, seed: int, allowed: Array | None = None, which: Any = slice(None), controls: bool = True
) -> DrawnSample:
    db, _, queries = world(metric)
    snapshot = db._store.snapshot
    drawable = db._finder.sampler(snapshot, allowed)
    assert drawable is not None
    sampler, eligible = drawable
    drawing = Drawing(prepared(queries[which], sampler.index.metric), 1 / temperature_of(metric), BUDGET, seed, 0.05)
    return sampler.draw(eligible, snapshot, drawing, controls, Answering(snapshot.value_column, D, 1.96))


@pytest.mark.parametrize("metric", METRICS)
def test_a_part_of_the_codes_is_read(metric: str) -> None:
    scanned = draw(metric, 0).figures.scanned
    assert (scanned > 0).all()
    assert (scanned < 0.5).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("controls", [True, False])
def test_sums_and_their_errors_are_right_on_average(metric: str, controls: bool) -> None:
    _, keys, _ = world(metric)
    exact = logits(metric, temperature_of(metric))
    top = exact.max(1)
    weights = np.exp(exact - top[:, None])
    truth = np.column_stack([weights.sum(1), weights @ keys])
    estimates, noise = [], []
    for seed in range(200):
        sample = draw(metric, seed, controls=controls)
        assert sample.answer is not None
        total = np.exp(sample.figures.lse - top)
        estimates.append(np.column_stack([total, total[:, None] * sample.answer.output]))
        noise.append(sample.figures.noise)
    mean, deviation = np.mean(estimates, 0), np.std(estimates, 0)
    assert (np.abs(mean - truth) <= 4.5 * deviation / 200**0.5 + 1e-6 * np.abs(truth).max()).all()
    relative = deviation[:, 0] / truth[:, 0]
    assert (relative < 0.1).all()  # or the sums say nothing
    ratio = np.sqrt(np.mean(noise, 0)) / relative  # stated over actual standard error
    assert 0.85 < ratio.mean() < 1.4
    assert (ratio > 0.7).all()


def test_records_set_apart_have_no_controls() -> None:
    """Records with extreme values are scored for every query: the sum of controls of their list leaves them out."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((60, D))
    keys = (centres[np.arange(N) % 60] + 0.25 * random.standard_normal((N, D))).astype(np.float32)
    values = keys.copy()
    values[: 60 * 8 : 60] *= 1000  # eight records of one cluster
    queries = (centres[:1] + 0.3 * random.standard_normal((4, D))).astype(np.float32)
    with holding(keys, values, metric="dot") as db:
        db.build_index("ivf")
        snapshot = db._store.snapshot
        drawable = db._finder.sampler(snapshot, None)
        assert drawable is not None
        assert set(range(0, 480, 60)) <= set(drawable[0].index.layout.rows[drawable[0]._apart].tolist())
        temperature = 0.3 * float((queries @ keys.T).std())
        truth = db.attend(torch.from_numpy(queries), temperature=temperature).lse.numpy()
        errors = []
        for seed in range(30):
            drawing = Drawing(queries, 1 / temperature, 6000, seed, 0.05)
            sample = drawable[0].draw(drawable[1], snapshot, drawing, True, Answering(snapshot.value_column, D, 1.96))
            assert sample.figures.correction.all()
            errors.append(np.expm1(sample.figures.lse - truth))
        doubt = np.std(errors) / np.size(errors) ** 0.5
        assert doubt < 0.002
        assert abs(np.mean(errors)) < 4 * doubt


def test_records_far_below_their_control_are_drawn_often_enough() -> None:
    """Some records of each list weigh next to nothing: else their terms h / p are rare errors that no bar shows."""
    random = np.random.default_rng(0)
    centres, axis, away = random.standard_normal((60, D)), np.eye(D)[:1], random.standard_normal((N, D))
    centres[:, 0] = away[:, 0] = 0
    away = 2 * away / np.linalg.norm(away, axis=1, keepdims=True) - 1.5 * axis  # all alone, so that lists are mixed
    below = (random.random((N, 1)) < 0.02) * away
    keys = (centres[np.arange(N) % 60] + below + 0.1 * random.standard_normal((N, D))).astype(np.float32)
    queries = (axis + 0.05 * random.standard_normal((8, D))).astype(np.float32)
    with holding(keys, keys, metric="dot") as db:
        db.build_index("ivf")
        snapshot = db._store.snapshot
        drawable = db._finder.sampler(snapshot, None)
        assert drawable is not None
        truth = db.attend(torch.from_numpy(queries), temperature=0.2).lse.numpy()
        errors, stated = [], []
        for seed in range(100):
            drawing = Drawing(queries, 5.0, 1000, seed, 0.05)
            sample = drawable[0].draw(drawable[1], snapshot, drawing, True, Answering(snapshot.value_column, D, 1.96))
            assert sample.figures.correction.all()
            errors.append(np.expm1(sample.figures.lse - truth))
            stated.append(sample.figures.noise)
        deviation = np.sqrt(np.mean(stated))
        assert np.abs(errors).max() < 5 * deviation
        assert 0.9 < deviation / np.std(errors) < 1.2


@pytest.mark.parametrize("metric", METRICS)
def test_the_error_is_at_least_what_codes_predict(metric: str) -> None:
    """Else draws that miss the records that err the most would have a small error."""
    for seed in range(10):
        figures = draw(metric, seed, controls=False).figures
        predicted = figures.expected * np.exp(2 * (figures.base - figures.lse))
        assert (predicted > 0).all()
        assert (figures.noise >= 0.999 * predicted).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_every_place_of_a_list_is_drawn_with_its_probability(metric: str, share: float) -> None:
    """Σ 1 / p estimates the number of records, also of those in the first, the middle and the last blocks of lists."""
    db, *_ = world(metric)
    sampler = db._finder.sampler(db._store.snapshot, None)
    assert sampler is not None
    layout = sampler[0].index.layout
    place = np.zeros(N, np.int64)  # third of its list that holds a record
    for first, size in zip(layout.starts[:-1] * 16, layout.sizes, strict=True):
        place[layout.rows[first : first + size]] = 3 * np.arange(size) // max(size, 1)
    allowed = np.random.default_rng(1).random(N) < share
    counts = []
    for seed in range(60):
        sample = draw(metric, seed, allowed)
        taken = sample.positions >= 0
        assert allowed[sample.positions[taken]].all()
        each = np.bincount(place[sample.positions[taken]], 1 / sample.chances[taken], 3) / len(sample.positions)
        counts.append(each)
    doubt = np.std(counts, 0) / len(counts) ** 0.5
    assert (np.abs(np.mean(counts, 0) - np.bincount(place[allowed], minlength=3)) <= 4.5 * doubt).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_read_the_same_windows(metric: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for query in range(4):
        alone = draw(metric, 5, which=slice(query, query + 1))
        with monkeypatch.context() as patch:
            patch.setattr("softdb.index.sampler.workers", lambda products: threads)
            shared = draw(metric, 5, which=slice(query, query + 1))
        assert sorted(alone.positions[0].tolist()) == sorted(shared.positions[0].tolist())
        np.testing.assert_allclose(shared.figures.lse, alone.figures.lse, rtol=1e-9)
        np.testing.assert_array_equal(shared.figures.scanned, alone.figures.scanned)


def test_queries_differ_in_what_they_read() -> None:
    """Two queries of the same place, with other bits, are not drawn from the same parts of far lists."""
    db, _, queries = world("dot")
    snapshot = db._store.snapshot
    drawable = db._finder.sampler(snapshot, None)
    assert drawable is not None
    twins = np.repeat(queries[:1], 40, 0) * (1 + 1e-6 * np.arange(40, dtype=np.float32)[:, None])
    drawing = Drawing(twins, 1 / temperature_of("dot"), BUDGET, 0, 0.05)
    sample = drawable[0].draw(drawable[1], snapshot, drawing, True, Answering(snapshot.value_column, D, 1.96))
    unlikely = np.where(sample.chances < 0.01, sample.positions, -1)
    rare = [set(row[row >= 0].tolist()) for row in unlikely]
    shared = [len(a & b) / max(1, min(len(a), len(b))) for a, b in itertools.pairwise(rare)]
    assert min(map(len, rare)) > 10
    assert np.mean(shared) < 0.1


def test_the_cost_of_draws_follows_what_queries_have_read() -> None:
    db, _, queries = world("dot")
    drawable = db._finder.sampler(db._store.snapshot, None)
    assert drawable is not None
    sampler = drawable[0]
    assert sampler.slots_for("new") >= sampler.slots
    temperature = temperature_of("dot")
    for _ in range(3):
        db.attend(torch.from_numpy(queries), temperature=temperature, rtol=0.1, max_draws=BUDGET)
    (kind,) = sampler._scanned
    assert sampler.slots_for(kind) < 0.6 * sampler.slots_for("new")


# -- the order of a list -----------------------------------------------------------------------------------------------


def sketches(count: int = 3000) -> Sketches:
    keys = np.random.default_rng(2).standard_normal((count, 24)).astype(np.float32)
    index = Sketches.train(Metric.DOT, keys, count, Sketches.codes(24)[0])
    assert isinstance(index, Sketches)
    index.add(np.arange(count), keys)
    index.seal()
    return index


def test_lists_are_in_random_order_whatever_is_added_or_removed() -> None:
    index = sketches()
    for change in ("built", "added", "removed"):
        if change == "added":
            index.add(np.arange(3000, 4000), np.random.default_rng(3).standard_normal((1000, 24)).astype(np.float32))
            index.seal()
        elif change == "removed":
            index.keep_only(np.arange(0, 4000, 2))
        assert index.layout.is_shuffled
        rows = index.layout.rows[index.layout.slots].astype(np.int64)
        own = np.repeat(np.arange(index.lists), index.layout.sizes)
        rising = (np.diff(rows) > 0)[np.diff(own) == 0].mean()
        assert 0.4 < rising < 0.6, change


def test_a_list_in_the_order_of_insertion_is_of_an_earlier_version() -> None:
    index = sketches()
    coded = index.layout.coded()
    order = np.lexsort((coded.rows, coded.lists))
    slots = index.layout.slots
    rows = index.layout.rows.copy()
    rows[slots] = coded.rows[order]
    layout: CodeBlocks = index.layout._replace(rows=rows)
    assert not layout.is_shuffled
    index.layout = layout
    with pytest.raises(ValueError, match="earlier version"):
        Sketches.loaded(Metric.DOT, index.dump(), 24)
