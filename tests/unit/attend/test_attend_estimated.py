"""Soft queries with a tolerance: unbiased draws, bars that hold, gradients, filters, young and dead rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from drawn import errors_of, pooled_at, sampled
from scipy import stats
from sklearn.neighbors import KernelDensity
from worlds import holding, indexed

import softdb
from softdb.attend.error import bars, f_quantile
from softdb.attend.rounds import Estimator, Round
from softdb.index.planner import pass_cost
from softdb.index.sampler import Drawing
from softdb.scores import Gaussian, Laplacian, NegativeL2

Array = np.ndarray[Any, Any]
N, D = 30_000, 16


def clusters(seed: int = 0, n: int = N) -> Any:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((60, D))
    keys = centres[random.integers(0, 60, n)] + 0.7 * random.standard_normal((n, D))
    return (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)


def halves(metric: Any = "dot", value_dim: int = 0, num_classes: int | None = None) -> softdb.SoftDB:
    """Open a database with an index, whose records are of part 0 or 1."""
    keys = clusters()
    values: Any = np.random.default_rng(5).standard_normal((N, value_dim)) if value_dim else None
    if num_classes:
        values = (np.abs(keys[:, 0]) * 40).astype(int) % num_classes
    parts = [{"part": i % 2} for i in range(N)]
    return indexed(keys, values, parts, metric=metric, num_classes=num_classes, recall=0.9)


@pytest.fixture(scope="module")
def db() -> softdb.SoftDB:
    return halves()


@pytest.fixture(scope="module")
def queries() -> Any:
    random = np.random.default_rng(7)
    return (clusters(3, 40) + 0.3 * random.standard_normal((40, D))).astype(np.float32)


def always_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over so few records costs less than any draw: forbid it."""
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)


def drawn(db: softdb.SoftDB, queries: Any, seed: int | None = None, **more: Any) -> softdb.Pooled:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    pooled = db.attend(queries, rtol=1e-9, max_draws=300, generator=generator, **more)
    assert not pooled.exact.any()
    return pooled


# -- the draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_sums_over_the_drawn_are_unbiased(metric: str, queries: Array) -> None:
    world = halves(metric)
    exact = world.attend(queries, temperature=0.1)
    ratios, errors = [], []
    for seed in range(60):
        pooled = drawn(world, queries, seed, temperature=0.1)
        ratios.append((pooled.lse - exact.lse).exp().numpy())
        errors.append(pooled.lse_stderr.numpy())
    bias = np.mean(ratios, axis=0) - 1
    assert np.abs(bias.mean()) <= 0.3 * np.mean(errors)
    spread = np.std(ratios, axis=0) / np.sqrt(len(ratios))
    assert (np.abs(bias) < 4.5 * spread + 1e-4).mean() >= 0.95


@pytest.mark.slow
def test_every_record_is_drawn_with_the_probability_stated(db: softdb.SoftDB, queries: Array) -> None:
    snapshot = db._store.snapshot
    drawable = db._finder.sampler(snapshot, None)
    assert drawable is not None
    sampler, eligible = drawable
    sums, squares, hits, (draws, budget) = np.zeros(N), np.zeros(N), np.zeros(N), (300, 1500)
    for seed in range(draws):
        sample = sampler.draw(eligible, snapshot, Drawing(queries[:1], 10.0, budget, seed, 0.05), True)
        rows = sample.positions[0]
        rows, weights = rows[rows >= 0], 1 / sample.chances[0][rows >= 0]
        assert len(set(rows.tolist())) == len(rows)
        sums[rows] += weights
        squares[rows] += weights**2
        hits[rows] += 1
    assert np.isclose(hits.sum() / draws, 1.05 * budget, rtol=0.05)
    # a threshold that each draw has anew decides the probabilities; their inverse is 1 on average
    share = np.exp(10 * (clusters().astype(float) @ queries[0]))
    share *= budget / share.sum()
    assert (hits[share > 20] == draws).all()
    many = (share > 0.1) & (hits < draws)
    assert many.sum() > 50
    mean = sums[many] / draws
    z = (mean - 1) / np.sqrt((squares[many] / draws - mean**2) / draws)
    assert np.abs(z).max() < 6
    assert 0.8 < z.std() < 1.2


def test_all_are_drawn_where_the_budget_is_everything(db: softdb.SoftDB, queries: Array) -> None:
    snapshot = db._store.snapshot
    drawable = db._finder.sampler(snapshot, None)
    assert drawable is not None
    sampler, eligible = drawable
    for budget in (N, 2 * N):
        sample = sampler.draw(eligible, snapshot, Drawing(queries[:2], 10.0, budget, 0, 0.05), True)
        for rows, chances in zip(sample.positions, sample.chances, strict=True):
            assert sorted(rows[rows >= 0].tolist()) == list(range(N))
            assert (chances == 1).all()
        assert not sample.figures.unseen.any()


# -- the error bar -----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.03, 0.1, 0.5])
@pytest.mark.parametrize("values", [{}, {"value_dim": 3}, {"num_classes": 12}])
def test_the_bar_holds_at_its_confidence(values: dict[str, Any], temperature: float, queries: Array) -> None:
    world = halves(**values)
    exact = world.attend(queries, temperature=temperature)
    errors, bars = [], []
    for seed in range(40):
        pooled = drawn(world, queries, seed, temperature=temperature)
        errors.append((pooled.output - exact.output).norm(dim=1).numpy())
        bars.append(pooled.bar.numpy())
    inside = np.mean(np.stack(errors) <= np.stack(bars) + 1e-6)
    assert inside >= 0.945
    assert np.median(bars) <= 2 * np.quantile(errors, 0.95)


@pytest.mark.parametrize("confidence", [0.3, 0.9, 0.95, 0.99])
def test_quantiles_of_f(confidence: float) -> None:
    for above in (1.0, 3.0, 20.0, 400.0):
        for below in (5.0, 12.0, 60.0, 1000.0):
            expected = stats.f.ppf(confidence, above, below)
            np.testing.assert_allclose(f_quantile(confidence, above, below), expected, rtol=0.12)


@pytest.mark.parametrize("width", [1, 2, 64])
def test_the_bar_is_a_quantile_of_the_error(width: int) -> None:
    """Errors Σ √c z (v - o) with normal z, whose covariance is the one the bar is made of."""
    random = np.random.default_rng(0)
    keys, logits, logs = random.standard_normal((400, width)), random.random((1, 400)), 3 * random.random((1, 400))
    world, all_of_them = worlds.snapshot(keys), np.arange(400)[None]
    output, lse = pooled_at(logits, world, all_of_them, width)
    actual = bars(errors_of(logits, logs, world, all_of_them, (output, lse)), 0.95)
    weights = np.exp(logits[0] - lse)
    noise = (1 - np.exp(-logs[0])) * weights**2
    z = random.standard_normal((20_000, 400))
    errors = np.linalg.norm((z * np.sqrt(noise)) @ (keys - output), axis=1)
    assert 0.92 < float((errors <= float(actual.bar[0])).mean()) < 0.99
    np.testing.assert_allclose(actual.stderr**2, (errors**2).mean(), rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "labels"])
def test_errors_are_summed_in_place(dtype: str) -> None:
    """The loops over stored values say what torch says of copies, nothing found and dead lines too."""
    random = np.random.default_rng(0)
    keys = worlds.awkward(random, 60, 5)
    values: Any = random.integers(0, 4, 60) if dtype == "labels" else random.standard_normal((60, 7))
    classes = 4 if dtype == "labels" else None
    world = worlds.snapshot(keys, values, dtype="float32" if dtype == "labels" else dtype, cuts=(11, 12, 40))
    positions = np.stack([random.permutation(60)[:30] for _ in range(6)])
    positions[1, 4:], positions[2] = -1, -1
    logs = random.exponential(1, (6, 30)).astype(np.float32)
    logs[0, :5] = 0
    scores = 2 * random.standard_normal((6, 30))
    scores[positions < 0] = -np.inf
    logits = scores / 0.3 + logs
    output, lse = pooled_at(logits, world, positions, classes or 7)
    actual = bars(errors_of(logits, logs, world, positions, (output, lse)), 0.95)
    state = sampled(
        torch.from_numpy(scores), 0.3, torch.from_numpy(positions >= 0), torch.from_numpy(logs).double(),
        world.values_at(positions) if classes else world.values_at(positions).double(), classes,
    )  # fmt: skip
    np.testing.assert_allclose(output, state.output, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, state.lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(actual.stderr, state.stderr, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(actual.lse_stderr, state.lse_stderr, rtol=1e-6, atol=1e-6)
    assert (actual.bar[[0, 1, 3]] > actual.stderr[[0, 1, 3]]).all()
    assert actual.bar[2] == 0


# -- the tolerance -----------------------------------------------------------------------------------------------------


def test_draws_grow_until_the_tolerance_is_met(
    db: softdb.SoftDB, queries: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draw(monkeypatch)
    exact = db.attend(queries, temperature=0.1)
    few = db.attend(queries, temperature=0.1, rtol=0.3)
    more = db.attend(queries, temperature=0.1, rtol=0.02)
    for rtol, pooled in ((0.3, few), (0.02, more)):
        assert pooled.met.all()
        assert (pooled.bar <= rtol * pooled.output.norm(dim=1).clamp(min=0.1) + 1e-6).all()
        error = (pooled.output - exact.output).norm(dim=1)
        assert (error <= rtol * exact.output.norm(dim=1).clamp(min=0.1)).float().mean() >= 0.9
    assert more.n_pooled.sum() > 2 * few.n_pooled.sum()


def test_cheap_questions_are_answered_exactly(db: softdb.SoftDB, queries: Array) -> None:
    pooled = db.attend(queries, temperature=0.1, rtol=1e-6)
    exact = db.attend(queries, temperature=0.1)
    assert pooled.exact.all()
    assert pooled.met.all()
    assert (pooled.bar == 0).all()
    torch.testing.assert_close(pooled.output, exact.output)


@pytest.mark.parametrize("values", [{}, {"value_dim": 3}, {"num_classes": 12}])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_a_wanted_gradient_changes_no_estimate(values: dict[str, Any], temperature: float, queries: Array) -> None:
    """By torch, with the graph, as by the kernel; corrections move both alike."""
    world = halves(**values)
    plain = drawn(world, queries, 3, temperature=temperature)
    leaf = torch.from_numpy(queries).requires_grad_()
    graphed = drawn(world, leaf, 3, temperature=temperature)
    assert graphed.output.requires_grad
    torch.testing.assert_close(graphed.output.detach(), plain.output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(graphed.lse.detach(), plain.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(graphed.bar, plain.bar, rtol=1e-3, atol=1e-5)


def test_the_same_draw_again_and_others_by_a_generator(db: softdb.SoftDB, queries: Array) -> None:
    one, again = (drawn(db, queries, temperature=0.1) for _ in range(2))
    assert torch.equal(one.output, again.output)
    assert not torch.equal(drawn(db, queries, 1, temperature=0.1).output, one.output)
    assert torch.equal(drawn(db, queries, 1, temperature=0.1).output, drawn(db, queries, 1, temperature=0.1).output)


def test_max_draws_bounds_the_pooled_records(db: softdb.SoftDB, queries: Array) -> None:
    pooled = db.attend(queries, temperature=0.5, rtol=1e-9, max_draws=50)
    assert not pooled.met.any()
    assert int(pooled.n_pooled.max()) < 120


def test_the_effective_number_is_of_all_records(db: softdb.SoftDB, queries: Array) -> None:
    """Not of the few hundred that were drawn."""
    pooled, true = drawn(db, queries, temperature=0.2), db.attend(queries, temperature=0.2)
    actual, expected = (np.array([one.effective for one in answer.explain(1)]) for answer in (pooled, true))
    assert expected.min() > 600
    np.testing.assert_allclose(actual, expected, rtol=0.5)
    assert np.median(actual / expected) == pytest.approx(1, abs=0.1)


def test_exact_answers_among_estimates_are_explained(
    db: softdb.SoftDB, queries: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draw(monkeypatch)
    plan = Estimator.after

    def after(self: Estimator, task: Round, *errors: Any) -> Any:
        return task.which % 3 > 0, [], task.which[task.which % 3 == 0]

    monkeypatch.setattr(Estimator, "after", after)
    pooled = db.attend(queries, temperature=0.2, rtol=0.05)
    monkeypatch.setattr(Estimator, "after", plan)
    true = db.attend(queries, temperature=0.2).explain(3)
    assert pooled.exact.tolist() == [i % 3 == 0 for i in range(len(queries))]
    for actual, expected in list(zip(pooled.explain(3), true, strict=True))[::3]:
        assert actual.ids == expected.ids
        assert actual.effective == pytest.approx(expected.effective, rel=1e-5)


def test_max_draws_may_exceed_the_records(db: softdb.SoftDB, queries: Array) -> None:
    for most in (10 * N, 10**18):
        pooled = db.attend(queries[:2], temperature=1.0, rtol=1e-9, max_draws=most)
        assert not pooled.exact.any()
        torch.testing.assert_close(pooled.output, db.attend(queries[:2], temperature=1.0).output)
        counted = db.count_within(queries[:2], 0.4, max_draws=most)
        truth = (db.search(queries[:2], radius=0.4).rows >= 0).sum(1)
        assert ((counted.value - truth).abs() <= counted.bar).all()


def test_too_few_draws_give_an_infinite_bar(db: softdb.SoftDB, queries: Array) -> None:
    pooled = db.attend(queries, temperature=0.05, rtol=0.5, max_draws=5)
    assert (pooled.bar == torch.inf).all()
    assert not pooled.met.any()


# -- inserted and deleted records --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_filters_deletions_and_young_records(queries: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draw(monkeypatch)
    world = halves(value_dim=4)
    world.delete(range(0, N, 7))
    young = clusters(8, 500)
    world.insert(range(N, N + 500), young, 5 + np.zeros((500, 4)), [{"part": 0}] * 500)
    inside = []
    for where in (None, {"part": 0}):
        exact = world.attend(queries, temperature=0.1, where=where)
        for seed in range(20):
            pooled = drawn(world, queries, seed, temperature=0.1, where=where)
            assert pooled.hits is not None
            live = pooled.hits.rows[pooled.hits.rows >= 0]
            assert (live % 7 != 0).all()
            assert where is None or (live % 2 == 0).all()
            inside.append(((pooled.output - exact.output).norm(dim=1) <= pooled.bar + 1e-6).float().mean())
    assert np.mean(inside) >= 0.9
    world.compact()
    exact = world.attend(queries, temperature=0.1)
    pooled = drawn(world, queries, temperature=0.1)
    assert ((pooled.output - exact.output).norm(dim=1) <= 1.5 * pooled.bar + 1e-6).all()


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_of_sums_are_unbiased(db: softdb.SoftDB, queries: Array) -> None:
    def gradient(pooled: softdb.Pooled, asked: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        (actual,) = torch.autograd.grad((pooled.lse - shift).exp().sum(), asked)
        return actual

    asked = torch.tensor(queries, requires_grad=True)
    exact = db.attend(asked, temperature=0.1)
    shift = exact.lse.detach()
    true = gradient(exact, asked, shift)
    actual = torch.stack([gradient(drawn(db, asked, seed, temperature=0.1), asked, shift) for seed in range(80)])
    bias = (actual.mean(0) - true).norm() / true.norm()
    assert bias < 3 * (actual.std(0).norm() / true.norm()) / 80**0.5


@pytest.mark.slow
def test_gradients_of_the_output_are_near(db: softdb.SoftDB, queries: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draw(monkeypatch)
    grads = []
    for rtol in (None, 0.02):
        asked = torch.tensor(queries, requires_grad=True)
        pooled = db.attend(asked, temperature=0.1, rtol=rtol)
        (pooled.output.square().sum() + pooled.lse.sum()).backward()  # type: ignore[no-untyped-call]
        assert asked.grad is not None
        grads.append(asked.grad)
    cosine = torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=1)
    assert float(cosine.min()) > 0.98


# -- log-normalisers ---------------------------------------------------------------------------------------------------


def test_log_partition_meets_its_tolerance(db: softdb.SoftDB, queries: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draw(monkeypatch)
    exact = db.attend(queries, temperature=0.1).lse
    results = [
        db.log_partition(queries, temperature=0.1, rtol=0.05, generator=torch.Generator().manual_seed(seed))
        for seed in range(20)
    ]
    error = torch.stack([(result.value - exact).expm1().abs() for result in results])
    bar = torch.stack([result.bar for result in results])
    assert all(result.met.all() for result in results)
    assert (bar <= 0.05).all()
    assert (error <= bar).float().mean() >= 0.92
    assert bar.median() <= 3 * error.quantile(0.95)
    assert (error <= 0.05).float().mean() >= 0.95


def test_log_partition_is_exact_without_a_sampler(queries: Array) -> None:
    with holding(clusters(n=100)) as bare:
        asked = torch.tensor(queries, requires_grad=True)
        actual = bare.log_partition(asked, temperature=0.2)
        assert actual.exact.all()
        torch.testing.assert_close(actual.value, bare.attend(asked, temperature=0.2).lse)
        actual.value.sum().backward()  # type: ignore[no-untyped-call]
        assert asked.grad is not None
    with softdb.open(None, dim=D) as bare, pytest.raises(softdb.BadInput, match="rtol is None"):
        bare.log_partition(queries, rtol=None)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", [Gaussian(0.3), Laplacian(0.2)])
def test_the_density_of_a_kernel(kernel: Any, queries: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draw(monkeypatch)
    world = halves("l2")
    name = "gaussian" if isinstance(kernel, Gaussian) else "exponential"
    width, twice = 0.3 if name == "gaussian" else 0.2, np.concatenate([queries, queries * np.float32(1.00001)])
    for where, keys in ((None, clusters()), ({"part": 1}, clusters()[1::2])):
        truth = KernelDensity(bandwidth=width, kernel=name).fit(keys).score_samples(twice)
        actual = world.log_density(twice, kernel, where=where)
        assert actual.exact.all() == (name == "exponential")
        error = np.abs(np.expm1(actual.value.numpy() - truth))
        assert (error <= actual.bar.numpy() + 1e-4).mean() > 0.85
    with holding(clusters(n=50), metric="l2") as bare:
        asked = torch.tensor(queries, requires_grad=True)
        bare.log_density(asked, kernel).value.sum().backward()  # type: ignore[no-untyped-call]
        assert asked.grad is not None
        assert bare.log_density(queries, kernel, where={"part": 9}).value.isneginf().all()
        with pytest.raises(softdb.BadInput, match=r"kernel is 0\.3; expected one of softdb\.scores"):
            bare.log_density(queries, 0.3)  # type: ignore[arg-type]


# -- counts within a radius --------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("metric", "radius", "where"), [("dot", 0.4, None), ("cosine", 0.4, {"part": 1}), ("l2", 1.3, None)]
)
def test_counts_within_a_radius(metric: str, radius: float, where: Any, queries: Array) -> None:
    world = halves(metric)
    world.delete(range(0, N, 5))
    world.insert(range(N, N + 300), clusters(8, 300), payloads=[{"part": i % 2} for i in range(300)])
    truth = (world.search(queries, radius=radius, where=where).rows >= 0).sum(1).double()
    assert 100 < truth.median() < N / 2
    errors, bars, relative = [], [], []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        actual = world.count_within(queries, radius, where=where, max_draws=1200, generator=generator)
        assert not actual.exact.any()
        errors.append((actual.value - truth).abs())
        bars.append(actual.bar)
        relative.append((actual.value - truth) / truth.clamp(min=1))
    error, bar = torch.stack(errors), torch.stack(bars)
    assert (error <= bar).double().mean() >= 0.94
    assert bar.median() <= max(2.5 * error.quantile(0.95), 0.1 * truth.median())  # or it is narrow enough
    many = truth > 100
    bias, spread = torch.stack(relative)[:, many].mean(0), torch.stack(relative)[:, many].std(0)
    assert (bias.abs() < 5 * spread / 40**0.5 + 1e-3).double().mean() >= 0.95
    doubt = float(spread.square().sum().sqrt()) / len(spread) / 40**0.5  # of the mean over queries
    assert float(bias.mean().abs()) <= 4 * doubt + 1e-4


def test_a_count_of_few_draws_is_uncertain(queries: Array) -> None:
    with holding(clusters(), payloads=[{"part": i % 3} for i in range(N)], metric="l2") as world:
        world.build_index("ivf")
        truth = (world.search(queries, radius=1.3, where={"part": 1}).rows >= 0).sum(1).double()
        actual = world.count_within(queries, 1.3, where={"part": 1}, max_draws=5)
        assert (actual.bar >= (actual.value - truth).abs()).all()
        assert not actual.met.any()
        every = world.count_within(queries, 100.0, where={"part": 1}, max_draws=5)  # no code leaves a doubt about these
        assert (every.bar >= (every.value - N // 3).abs()).all()


def test_counts_end_within_their_tolerance_or_exactly(
    db: softdb.SoftDB, queries: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = (db.search(queries, radius=0.4).rows >= 0).sum(1).double()
    actual = db.count_within(queries, 0.4, rtol=0.01)
    assert actual.exact.all()  # of so few records
    assert torch.equal(actual.value, truth)
    monkeypatch.setattr("softdb.attend.count.pass_cost", lambda *given: 200 * pass_cost(*given))
    actual = db.count_within(queries, 0.4, rtol=0.1)
    assert actual.met.all()
    assert not actual.exact.all()
    assert ((actual.value - truth).abs() <= 0.1 * truth).float().mean() >= 0.93
    none = db.count_within(queries, 50.0)
    assert (none.value == 0).all()
    assert none.met.all()
    assert (db.count_within(queries, 0.4, where={"part": 9}).value == 0).all()
    for more, match in (
        ({"radius": "far"}, "radius is 'far'"),
        ({"rtol": None}, "rtol is None"),
        ({"radius": None}, "radius is None; expected "),
    ):
        asked: dict[str, Any] = {"queries": queries, "radius": 0.4, **more}
        with pytest.raises(softdb.BadInput, match=match):
            db.count_within(**asked)


# -- records from the soft distribution --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, {"part": 1}])
def test_records_are_drawn_by_their_weights(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.blocks.BLOCK_ROWS", 7)
    keys = clusters(2, 40)
    with holding(keys, payloads=[{"part": i % 2} for i in range(40)]) as few:
        few.delete([3])
        asked = torch.tensor(clusters(4, 2), requires_grad=True)
        actual = few.sample(asked, 20_000, temperature=0.3, where=where, generator=torch.Generator().manual_seed(0))
        takes_part = np.array([i != 3 and (where is None or i % 2 == 1) for i in range(40)])
        logits = np.where(takes_part, asked.detach().double().numpy() @ keys.T.astype(float) / 0.3, -np.inf)
        truth = np.exp(logits - logits.max(1, keepdims=True))
        truth /= truth.sum(1, keepdims=True)
        for i in range(2):
            counts = np.bincount(actual.hits.rows[i].numpy(), minlength=40)
            assert counts[~takes_part].sum() == 0
            assert stats.chisquare(counts[takes_part], 20_000 * truth[i][takes_part]).pvalue > 1e-4
            np.testing.assert_allclose(
                actual.log_prob[i].detach().exp().numpy(), truth[i][actual.hits.rows[i].numpy()], rtol=1e-4
            )
        (mean,) = torch.autograd.grad(actual.log_prob.mean(), asked)  # the score function has mean 0
        assert float(mean.abs().max()) < 0.05


def test_no_records_are_drawn_if_none_take_part(db: softdb.SoftDB, queries: Array) -> None:
    actual = db.sample(queries[:2], 3, where={"part": 9})
    assert actual.hits.rows.tolist() == [[-1] * 3] * 2
    assert (actual.log_prob == -torch.inf).all()
    with pytest.raises(softdb.BadInput, match="n is 0"):
        db.sample(queries[:2], 0)


# -- undrawable questions ----------------------------------------------------------------------------------------------


def test_without_a_sampler_the_answer_is_exact(db: softdb.SoftDB, queries: Array) -> None:
    for more in ({"mask": np.ones(N, np.bool_)}, {"score": NegativeL2()}):
        pooled = db.attend(queries[:3], rtol=0.1, **more)
        assert pooled.exact.all()
        assert pooled.met.all()
    with holding(clusters()) as bare:
        assert bare.attend(queries[:3], rtol=0.1).exact.all()
        bare.build_index("ivf")
        bare.delete(where={})
        gone = bare.attend(queries[:3], rtol=0.1)
        assert gone.exact.all()
        assert (gone.output == 0).all()


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"weights": "entmax15"}, "the weights are entmax15, for which there is no estimate"),
        ({"weights": "uniform"}, "the weights are uniform, for which there is no estimate"),
        ({"score": lambda q, k: q @ k.T}, "goes with Dot, ScaledDot, Cosine, General, NegativeL2 and Gaussian"),
        ({"score": Laplacian(0.3)}, "which no index can estimate"),
    ],
)
def test_scores_without_an_estimator_are_refused(db: softdb.SoftDB, queries: Array, more: Any, match: str) -> None:
    with pytest.raises(softdb.BadInput, match=match):
        db.attend(queries[:3], rtol=0.1, **more)


@pytest.mark.slow
def test_a_kernel_of_the_metric_is_drawn_for(queries: Array, monkeypatch: pytest.MonkeyPatch) -> None:
    always_draw(monkeypatch)
    world = halves("l2", value_dim=2)
    exact = world.attend(queries, score=Gaussian(0.3))
    pooled = world.attend(queries, score=Gaussian(0.3), rtol=0.05)
    assert not pooled.exact.all()
    assert ((pooled.output - exact.output).norm(dim=1) <= pooled.bar + 1e-6).float().mean() > 0.85


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"rtol": -0.1}, "rtol is -0.1; expected a number above 0 and below 1"),
        ({"rtol": 0.0}, "rtol is 0.0; expected a number above 0 and below 1, or 0 with an atol above 0"),
        ({"rtol": 1.0}, "rtol is 1.0; expected a number above 0 and below 1"),
        ({"rtol": float("nan")}, "rtol is nan"),
        ({"rtol": "much"}, "rtol is 'much'; expected a number"),
        ({"rtol": 0.1, "atol": float("inf")}, "atol is inf"),
        ({"rtol": 0.1, "k": 5}, "k and a tolerance are both given"),
        ({"rtol": 0.1, "confidence": 1.0}, "confidence is 1.0; expected a number between 0 and 1"),
        ({"rtol": 0.1, "max_draws": 0}, "max_draws is 0"),
        ({"max_draws": 10}, "max_draws bounds an estimate, but no tolerance is asked for"),
    ],
)
def test_a_tolerance_that_makes_no_sense(db: softdb.SoftDB, queries: Array, more: Any, match: str) -> None:
    with pytest.raises(softdb.BadInput, match=match):
        db.attend(queries, **more)


def test_a_density_of_double_queries_is_double() -> None:
    keys, queries = torch.randn(33, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    with holding(keys, metric="l2") as db:
        actual = db.log_density(queries, Gaussian(0.7)).value
    squares = torch.cdist(queries, keys.float().double()).square() / (2 * 0.49)
    expected = (-squares).logsumexp(1) - math.log(33) - 1.5 * math.log(2 * math.pi * 0.49)
    assert actual.dtype is torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_list_is_as_precise_as_a_tensor() -> None:
    numbers = [[0.1, 0.2], [0.3, -0.7]]
    with holding(numbers) as db:
        for asked in (numbers, torch.tensor(numbers), tuple(map(tuple, numbers)), np.array(numbers, np.float32)):
            assert torch.equal(db.search(asked, 2).scores, db.search(torch.tensor(numbers), 2).scores)
            assert db.attend(asked).output.dtype is torch.float32
        assert db.search(np.array(numbers), 2).scores.dtype is torch.float64
        assert db.search(torch.tensor(numbers).double(), 2).scores.dtype is torch.float64
        with pytest.raises(softdb.BadInput, match="queries hold NaN or infinity, first in query 0"):
            db.search([[1e300, 0.0]])
    assert softdb.attention(numbers, numbers, numbers).dtype is torch.float32
    assert softdb.attention(np.array(numbers), numbers, numbers).dtype is torch.float64


def test_a_trained_bandwidth_has_the_gradient_of_the_exact_answer(
    queries: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draw(monkeypatch)
    slopes, l2 = [], halves("l2", num_classes=10)
    torch.set_warn_always(True)  # what torch says once a process is a defect, too
    try:
        for tolerance in (0.01, None):
            score = NegativeL2(0.5, learnable=True)
            answer = l2.attend(queries, score=score, rtol=tolerance)
            assert bool(answer.exact.any()) == (tolerance is None)
            (answer.output[:, 3] + 1e-3).log().mean().backward()  # type: ignore[no-untyped-call]
            assert score.log_bandwidth is not None
            assert score.log_bandwidth.grad is not None
            slopes.append(float(score.log_bandwidth.grad))
    finally:
        torch.set_warn_always(False)
    assert slopes[0] == pytest.approx(slopes[1], rel=0.15)  # a standard error is some 4 %
    assert slopes[1] != 0
