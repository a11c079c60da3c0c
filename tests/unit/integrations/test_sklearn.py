"""The estimators equal scikit-learn's own where they overlap, learn, and refuse senseless arguments."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn import neighbors as theirs
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_iris
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from softdb.errors import BadInput, Closed, NotADatabase, ReadOnly
from softdb.integrations.sklearn import (
    KernelDensity,
    KNeighborsTransformer,
    NadarayaWatsonRegressor,
    SoftKNeighborsClassifier,
    SoftKNeighborsRegressor,
)
from softdb.scores import Boxcar, leave_one_out

X, LABELS = load_iris(return_X_y=True)
QUERIES = X[::3].astype(np.float32) + np.random.default_rng(0).normal(0, 0.1, (50, 4)).astype(np.float32)
X, QUERIES = X.astype(np.float32).astype(np.float64), QUERIES.astype(np.float64)  # what float32 holds
TARGETS = np.stack([X @ [1.0, -2.0, 0.5, 3.0] + 1e6, X[:, 0] ** 2], axis=1)  # need more than float32


def softmax(temperature: float) -> Any:
    return lambda distances: np.exp(-(distances**2) / temperature)


@pytest.mark.parametrize("k", [1, 5, 30])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_neighbours_are_those_of_scikit_learn(k: int, metric: str) -> None:
    ours = SoftKNeighborsClassifier(k, temperature=0.3, metric=metric).fit(X, LABELS)
    weights = softmax(0.3) if metric == "euclidean" else (lambda d: np.exp((1 - d) / 0.3))
    peer = theirs.KNeighborsClassifier(k, metric=metric, weights=weights).fit(X, LABELS)
    np.testing.assert_allclose(ours.kneighbors(QUERIES)[0], peer.kneighbors(QUERIES)[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.predict_proba(QUERIES), peer.predict_proba(QUERIES), rtol=1e-9, atol=1e-12)
    assert (ours.predict(QUERIES) == peer.predict(QUERIES)).all()
    graph, expected = (one.kneighbors_graph(mode="distance", n_neighbors=3) for one in (ours, peer))
    np.testing.assert_allclose(graph.sum(axis=1), expected.sum(axis=1), rtol=1e-9, atol=1e-12)  # iris has duplicates
    assert graph.diagonal().sum() == 0


@pytest.mark.parametrize("weights", ["uniform", "softmax"])
def test_means_of_neighbours_are_those_of_scikit_learn_to_float64(weights: str) -> None:
    ours = SoftKNeighborsRegressor(7, temperature=0.5, weights=weights).fit(X, TARGETS)
    peer = theirs.KNeighborsRegressor(7, weights="uniform" if weights == "uniform" else softmax(0.5)).fit(X, TARGETS)
    apart = np.random.default_rng(1).normal(X.mean(0), 1, (40, 4))  # of no two samples at one distance
    np.testing.assert_allclose(ours.predict(apart), peer.predict(apart.astype(np.float32)), rtol=1e-12)
    np.testing.assert_allclose(clone(ours).fit(X, TARGETS[:, 0]).predict(apart), ours.predict(apart)[:, 0], rtol=1e-14)


def test_all_samples_are_the_neighbours_where_no_number_is_given() -> None:
    ours = SoftKNeighborsClassifier(temperature=2.0).fit(X, LABELS)
    peer = theirs.KNeighborsClassifier(len(X), weights=softmax(2.0)).fit(X, LABELS)
    np.testing.assert_allclose(ours.predict_proba(QUERIES), peer.predict_proba(QUERIES), rtol=1e-9)
    far = ours.predict_proba(QUERIES + 1e4)  # where the peer's weights underflow, and it raises
    np.testing.assert_allclose(far.sum(axis=1), 1)


@pytest.mark.parametrize("mode", ["distance", "connectivity"])
def test_the_graph_is_that_of_scikit_learns_transformer(mode: str) -> None:
    apart = np.random.default_rng(2).standard_normal((60, 3)).astype(np.float32).astype(np.float64)
    ours = KNeighborsTransformer(mode=mode, n_neighbors=4).fit(apart[:50])
    peer = theirs.KNeighborsTransformer(mode=mode, n_neighbors=4).fit(apart[:50])
    for given in (apart[:50], apart[50:]):
        results, expected = ours.transform(given), peer.transform(given)
        np.testing.assert_array_equal([*results.indices, *results.indptr], [*expected.indices, *expected.indptr])
        np.testing.assert_allclose(results.data, expected.data, rtol=1e-9, atol=1e-12)
    if mode == "distance":
        steps = make_pipeline(KNeighborsTransformer(n_neighbors=9), theirs.KNeighborsClassifier(metric="precomputed"))
        assert (
            steps.fit(X, LABELS).predict(X) == theirs.KNeighborsClassifier().fit(X, LABELS).predict(X)
        ).mean() > 0.98


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kernel", ["gaussian", "tophat", "epanechnikov", "exponential", "linear"])
def test_densities_are_those_of_scikit_learn(kernel: str, weighted: bool) -> None:
    weights = np.random.default_rng(3).uniform(0.1, 3, len(X)) if weighted else None
    ours = KernelDensity(kernel=kernel, bandwidth=0.8).fit(X, sample_weight=weights)
    peer = theirs.KernelDensity(kernel=kernel, bandwidth=0.8).fit(X, sample_weight=weights)
    np.testing.assert_allclose(ours.score_samples(QUERIES), peer.score_samples(QUERIES), rtol=1e-9, atol=1e-9)
    assert ours.score(X) == pytest.approx(peer.score(X))
    if kernel in ("gaussian", "tophat"):
        np.testing.assert_allclose(ours.sample(30, 7), peer.sample(30, 7), rtol=1e-6)
    for rule in ("scott", "silverman"):
        assert clone(ours).set_params(bandwidth=rule).fit(X).bandwidth_ == pytest.approx(
            clone(peer).set_params(bandwidth=rule).fit(X).bandwidth_
        )


def test_a_weight_is_as_many_samples_and_no_weight_is_none() -> None:
    counts = np.arange(len(X)) % 4
    weighed = KernelDensity(bandwidth=0.5).fit(X, sample_weight=counts).score_samples(QUERIES)
    repeated = KernelDensity(bandwidth=0.5).fit(np.repeat(X, counts, axis=0)).score_samples(QUERIES)
    np.testing.assert_allclose(weighed, repeated, rtol=1e-12)


MODELS: dict[str, tuple[Any, Any]] = {
    "classifier": (SoftKNeighborsClassifier(temperature=0.5), LABELS),
    "cosine": (SoftKNeighborsClassifier(temperature=0.01, metric="cosine"), LABELS),
    "regressor": (SoftKNeighborsRegressor(temperature=0.5), TARGETS),
    "one output": (SoftKNeighborsRegressor(temperature=0.5), TARGETS[:, 1]),
    "kernel": (NadarayaWatsonRegressor(bandwidth=0.6), TARGETS),
    "compact": (NadarayaWatsonRegressor("epanechnikov", bandwidth=1.0), TARGETS[:, 1]),
}


def predicted(model: Any) -> Any:
    return model.predict_proba(QUERIES) if hasattr(model, "predict_proba") else model.predict(QUERIES)


@pytest.mark.parametrize(("model", "targets"), MODELS.values(), ids=MODELS)
def test_weights_multiply_the_weights_of_the_neighbours(model: Any, targets: Any) -> None:
    counts, weights = np.arange(len(X)) % 4, np.random.default_rng(3).uniform(0, 2, len(X))
    fitted = clone(model).fit(X, targets, sample_weight=counts)
    repeated = clone(model).fit(np.repeat(X, counts, axis=0), np.repeat(targets, counts, axis=0))
    np.testing.assert_allclose(predicted(fitted), predicted(repeated), rtol=1e-11)
    for other in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        np.testing.assert_array_equal(predicted(other), predicted(fitted))
    if isinstance(model, NadarayaWatsonRegressor):
        kernels = [
            theirs.KernelDensity(kernel=model.kernel, bandwidth=model.bandwidth).fit(X[[i]]) for i in range(len(X))
        ]
        shares = np.exp([kernel.score_samples(QUERIES) for kernel in kernels]).T
    elif model.metric == "cosine":
        lengths = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (QUERIES, X)]
        shares = np.exp((QUERIES / lengths[0]) @ (X / lengths[1]).T / model.temperature)
    else:
        shares = np.exp(-np.square(QUERIES[:, None] - X[None]).sum(2) / model.temperature)
    values = np.eye(3)[targets] if hasattr(model, "predict_proba") else targets
    with np.errstate(invalid="ignore"):
        expected = (shares * weights) @ values / (shares * weights).sum(1).reshape(-1, *[1] * (values.ndim - 1))
    np.testing.assert_allclose(predicted(clone(model).fit(X, targets, sample_weight=weights)), expected, rtol=1e-6)


@pytest.mark.parametrize("weights", ["softmax", "uniform"])
def test_of_the_nearest_samples_each_counts_by_its_weight(weights: str) -> None:
    shares = np.random.default_rng(4).uniform(0.1, 2, len(X))
    model = SoftKNeighborsRegressor(5, temperature=0.5, weights=weights).fit(X, TARGETS, sample_weight=shares)
    distances, near = model.kneighbors(QUERIES)
    own = shares[near] * (np.exp(-(distances**2) / 0.5) if weights == "softmax" else 1.0)
    expected = np.einsum("qk,qkv->qv", own / own.sum(1, keepdims=True), TARGETS[near])
    np.testing.assert_allclose(model.predict(QUERIES), expected, rtol=1e-9)


def test_learnt_settings_minimise_the_weighted_losses_and_ignore_samples_of_weight_0() -> None:
    few, labels = X[::3], LABELS[::3]
    shares = np.where(np.arange(len(few)) % 5, np.random.default_rng(5).uniform(0.1, 3, len(few)), 0.0)
    some = shares > 0
    model = SoftKNeighborsClassifier().fit(few, labels, sample_weight=shares)
    plain = SoftKNeighborsClassifier().fit(few[some], labels[some]).temperature_

    def loss(temperature: float) -> float:
        logits = -np.square(few[some][:, None] - few[some][None]).sum(2) / temperature
        np.fill_diagonal(logits, -np.inf)
        near = np.exp(logits - logits.max(1, keepdims=True)) * shares[some]
        right = (near * (labels[some][:, None] == labels[some])).sum(1) / near.sum(1)
        return float(np.average(-np.log(right.clip(np.finfo(np.float64).eps)), weights=shares[some]))

    times = np.geomspace(0.2, 5, 60)
    assert loss(model.temperature_) <= min(loss(model.temperature_ * by) for by in times) + 1e-4
    assert abs(model.temperature_ / plain - 1) > 0.01
    for learnt in (SoftKNeighborsClassifier(), SoftKNeighborsRegressor(5), NadarayaWatsonRegressor(),
                   KernelDensity(bandwidth="leave_one_out")):  # fmt: skip
        kept, left_out = (
            clone(learnt).fit(few[chosen], labels[chosen], sample_weight=shares[chosen]) for chosen in (..., some)
        )
        scores = [getattr(one, "temperature_", None) or one.bandwidth_ for one in (kept, left_out)]
        assert scores[0] == scores[1]
        assert kept.n_samples_fit_ == some.sum()


def test_weighted_samples_are_added() -> None:
    shares = np.random.default_rng(6).uniform(0, 2, len(X))
    for whole, targets in ((SoftKNeighborsClassifier(temperature=0.5), LABELS), (SoftKNeighborsRegressor(), TARGETS)):
        whole = clone(whole).set_params(temperature=0.5).fit(X, targets, sample_weight=shares)
        first: dict[str, Any] = {"classes": [0, 1, 2]} if targets is LABELS else {}
        parts = clone(whole).partial_fit(X[:70], targets[:70], sample_weight=shares[:70], **first)
        parts.partial_fit(X[70:], targets[70:], sample_weight=shares[70:])
        np.testing.assert_allclose(predicted(parts), predicted(whole), rtol=1e-12)
        parts.partial_fit(X[:9], targets[:9])  # with weights of 1
        twice = clone(whole).fit([*X, *X[:9]], [*targets, *targets[:9]], sample_weight=[*shares, *np.ones(9)])
        np.testing.assert_allclose(predicted(parts), predicted(twice), rtol=1e-12)
        plain = clone(whole).fit(X, targets)
        before = predicted(plain)
        with pytest.raises(BadInput, match="first call had no sample_weight"):
            plain.partial_fit(X, targets, sample_weight=shares)
        with pytest.raises(BadInput, match="n_neighbors is 900"):
            plain.set_params(n_neighbors=900).fit(X, targets, sample_weight=shares)
        np.testing.assert_array_equal(predicted(plain.set_params(n_neighbors=None)), before)


def test_learnt_bandwidths_and_densities_estimated_to_a_tolerance() -> None:
    points = np.random.default_rng(4).standard_normal((5000, 2))
    rules = {rule: KernelDensity(bandwidth=rule).fit(points[:1000]) for rule in ("leave_one_out", 0.02, 5.0)}
    scores = {rule: model.score(points[1000:2000]) for rule, model in rules.items()}
    assert max(scores, key=lambda rule: scores[rule]) == "leave_one_out"
    exact = KernelDensity(bandwidth=0.3).fit(points)
    near = KernelDensity(bandwidth=0.3, rtol=0.1).fit(points)
    assert near.db_.stats().index is not None
    for model in (near, pickle.loads(pickle.dumps(near))):
        apart = model.score_samples(points[:100]) - exact.score_samples(points[:100])
        assert (np.abs(np.expm1(apart)) <= 0.1).mean() > 0.9


def test_the_temperature_has_the_least_loss_and_calibrates() -> None:
    digits, labels = load_digits(return_X_y=True)
    train, test, actual, true = train_test_split(digits, labels, test_size=0.5, random_state=0)
    for k in (None, 20):
        model = SoftKNeighborsClassifier(k).fit(train, actual)
        loss = log_loss(true, model.predict_proba(test))
        for times in (0.5, 2.0):
            other = clone(model).set_params(temperature=model.temperature_ * times).fit(train, actual)
            assert loss < log_loss(true, other.predict_proba(test))
        peers = [theirs.KNeighborsClassifier(j, weights=w) for j in (1, 5, 20) for w in ("uniform", "distance")]
        assert loss < min(log_loss(true, peer.fit(train, actual).predict_proba(test)) for peer in peers) / 2
    fast = SoftKNeighborsClassifier(temperature=model.temperature_).fit(train, actual).predict_proba(test.astype("f4"))
    np.testing.assert_allclose(
        fast,
        clone(model)
        .set_params(n_neighbors=None, temperature=model.temperature_)
        .fit(train, actual)
        .predict_proba(test),
        atol=1e-5,
    )


def test_a_bandwidth_for_each_coordinate_ignores_constant_ones() -> None:
    random = np.random.default_rng(5)
    points = random.uniform(-2, 2, (200, 2))
    targets = np.sin(2 * points[:, 0]) + random.normal(0, 0.1, 200)
    one = NadarayaWatsonRegressor().fit(points, targets)
    each = NadarayaWatsonRegressor(per_coordinate=True, steps=40, random_state=0).fit(points, targets)
    first, second = np.asarray(each.bandwidth_)
    assert second > 3 * first
    fresh = random.uniform(-2, 2, (200, 2))
    assert each.score(fresh, np.sin(2 * fresh[:, 0])) > one.score(fresh, np.sin(2 * fresh[:, 0])) > 0.7


def test_the_bandwidth_of_a_sample_shrinks_to_that_of_all() -> None:
    points = np.random.default_rng(6).uniform(-2, 2, (8192, 1)).astype(np.float32).astype(np.float64)
    chosen = np.unique(np.linspace(0, 8191, 2048, dtype=np.int64))
    targets = np.sin(3 * points[:, 0])
    alone = leave_one_out(torch.from_numpy(points[chosen]), torch.from_numpy(targets[chosen]), Boxcar)
    actual = NadarayaWatsonRegressor("tophat").fit(points, targets).bandwidth_
    assert actual == pytest.approx(alone * 4 ** (-1 / 5))


@pytest.mark.parametrize("kernel", ["gaussian", "tophat", "epanechnikov", "exponential", "linear"])
def test_kernel_regression_is_the_mean_weighted_by_scikit_learns_densities(kernel: str) -> None:
    actual = NadarayaWatsonRegressor(kernel, bandwidth=1.5).fit(X, TARGETS).predict(QUERIES[:6])
    each = [theirs.KernelDensity(kernel=kernel, bandwidth=1.5).fit(X[i : i + 1]) for i in range(len(X))]
    weights = np.exp([one.score_samples(QUERIES[:6]) for one in each])
    np.testing.assert_allclose(actual, (weights / weights.sum(axis=0)).T @ TARGETS, rtol=1e-9)
    told = NadarayaWatsonRegressor(kernel).fit(X, TARGETS[:, 1]).predict(QUERIES + 1e5)
    assert np.isnan(told).all() if kernel in ("tophat", "epanechnikov", "linear") else np.isfinite(told).all()


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_copies_predict_the_same(on_disk: bool, path: Path) -> None:
    where = path if on_disk else None
    models = [
        SoftKNeighborsClassifier(3, path=where and path / "a").fit(X, np.array(["s", "t", "u"])[LABELS]),
        SoftKNeighborsRegressor(path=where and path / "b").fit(X, TARGETS),
        NadarayaWatsonRegressor(path=where and path / "c").fit(X, TARGETS[:, 0]),
    ]
    path.mkdir(exist_ok=True)
    for model in models:
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert (other.predict(QUERIES) == model.predict(QUERIES)).all()
            assert other.db_ is not model.db_
    if on_disk:
        with pytest.raises(ReadOnly, match="insert"):
            pickle.loads(pickle.dumps(models[0])).partial_fit(X[:1], ["s"])
        with pytest.raises(BadInput, match="not empty, but fit creates a new database"):
            clone(models[0]).fit(X, LABELS)
        with pytest.raises(NotADatabase, match=r"catalog\.sqlite is a file"):
            clone(models[0]).set_params(path=path / "a" / "catalog.sqlite").fit(X, LABELS)
    models[0].db_.close()
    with pytest.raises(Closed):
        models[0].predict(X)


def test_models_are_chosen_and_chained() -> None:
    steps = make_pipeline(StandardScaler(), SoftKNeighborsClassifier())
    grid = {"softkneighborsclassifier__n_neighbors": [None, *np.arange(1, 4)]}
    actual = GridSearchCV(steps, grid, scoring="neg_log_loss", cv=3).fit(X, LABELS)
    assert actual.best_score_ > -0.2
    data, targets = load_diabetes(return_X_y=True)
    for model in (SoftKNeighborsRegressor(), NadarayaWatsonRegressor()):
        assert cross_val_score(make_pipeline(StandardScaler(), model), data[:200], targets[:200], cv=3).mean() > 0.3


def test_samples_are_added() -> None:
    model = SoftKNeighborsClassifier(3, temperature=0.5)
    for part in np.array_split(np.random.default_rng(6).permutation(len(X)), 4):
        model.partial_fit(X[part], LABELS[part], classes=[0, 1, 2])
    assert model.n_samples_fit_ == len(X)
    whole = SoftKNeighborsClassifier(3, temperature=0.5).fit(X, LABELS)
    np.testing.assert_allclose(model.predict_proba(QUERIES), whole.predict_proba(QUERIES), atol=1e-12)
    numbers = (
        SoftKNeighborsRegressor(temperature=1.0).partial_fit(X[:50], TARGETS[:50]).partial_fit(X[50:], TARGETS[50:])
    )
    expected = SoftKNeighborsRegressor(temperature=1.0).fit(X, TARGETS).predict(QUERIES)
    np.testing.assert_allclose(numbers.predict(QUERIES), expected, rtol=1e-12)
    with pytest.raises(BadInput, match=r"y has \[7\], not among the classes"):
        model.partial_fit(X[:2], [1, 7])
    with pytest.raises(BadInput, match="the first call has to name all classes"):
        SoftKNeighborsClassifier().partial_fit(X, LABELS)
    with pytest.raises(BadInput, match="values"):
        numbers.partial_fit(X, TARGETS[:, 0])
    assert model.n_samples_fit_ == numbers.n_samples_fit_ == len(X)


@pytest.mark.parametrize("shares", [None, np.linspace(0.5, 2, 150)], ids=["plain", "weighted"])
def test_the_first_batch_with_two_classes_learns_the_temperature(shares: Any) -> None:
    order = np.argsort(LABELS, kind="stable")
    samples, labels = X[order], LABELS[order]
    whole = SoftKNeighborsClassifier().fit(samples, labels, sample_weight=shares)
    model, temperatures = SoftKNeighborsClassifier(), []
    for part in (slice(0, 20), slice(20, 40), slice(40, 150)):
        weights = None if shares is None else shares[part]
        model.partial_fit(samples[part], labels[part], classes=[0, 1, 2], sample_weight=weights)
        temperatures.append(model.temperature_)
    assert temperatures == [1.0, 1.0, pytest.approx(whole.temperature_, rel=1e-3)]
    np.testing.assert_allclose(model.predict_proba(QUERIES), whole.predict_proba(QUERIES), atol=1e-3)
    later = model.partial_fit(X[:20] + 3, LABELS[:20])
    assert later.temperature_ == temperatures[-1]  # learnt once
    constant = SoftKNeighborsRegressor().partial_fit(X[:50], np.ones(50))
    assert constant.temperature_ == 1.0
    assert constant.partial_fit(X[50:], TARGETS[50:, 0]).temperature_ != 1.0


def test_an_index_answers_alike() -> None:
    points = np.random.default_rng(7).standard_normal((20_000, 8)).astype(np.float32)
    exact, near = (KNeighborsTransformer(recall=recall).fit(points) for recall in (None, 0.9))
    same = (exact.transform(points[:200]) != 0).multiply(near.transform(points[:200]) != 0).sum()
    assert near.db_.stats().index is not None
    assert same >= 0.85 * 200 * 5


def test_a_few_samples_and_one_class_are_fitted() -> None:
    assert SoftKNeighborsClassifier().fit([[1.0]], ["only"]).predict([[9.0]]) == ["only"]
    assert SoftKNeighborsClassifier().fit(X, np.ones(len(X))).predict_proba(X[:2]).tolist() == [[1.0], [1.0]]
    assert SoftKNeighborsRegressor().fit([[1.0]], [5.0]).predict([[9.0]]) == [5.0]
    assert SoftKNeighborsClassifier().fit(np.ones((4, 2)), [0, 1, 1, 1]).predict_proba([[1, 1]]).tolist() == [
        [0.25, 0.75]
    ]


K, D = SoftKNeighborsClassifier, KernelDensity
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "k beyond n": (K(6), (X[:5], LABELS[:5]), "n_neighbors is 6 but n_samples = 5"),
    "k of 0": (K(0), (X, LABELS), "n_neighbors is 0"),
    "k of 2.5": (K(2.5), (X, LABELS), "n_neighbors is 2.5"),  # type: ignore[arg-type]
    "temperature": (K(temperature=-1), (X, LABELS), "temperature is -1"),
    "weights": (K(weights="near"), (X, LABELS), "weights is 'near'; choose one of 'softmax'"),
    "weights of scikit-learn": (K(weights="distance"), (X, LABELS), "weights is 'distance'; choose 'softmax', whose"),
    "metric": (K(metric="manhattan"), (X, LABELS), "metric is 'manhattan'; choose one of 'euclidean'"),
    "one sample": (NadarayaWatsonRegressor(), ([[1.0]], [1.0]), "1 sample"),
    "equal samples": (NadarayaWatsonRegressor(), (np.ones((5, 2)), np.arange(5)), "all 5 keys are equal"),
    "bandwidths": (NadarayaWatsonRegressor(bandwidth=[1, 2]), (X, LABELS), "bandwidth has 2 numbers, X 4 features"),
    "no gradient": (NadarayaWatsonRegressor("tophat", per_coordinate=True), (X, LABELS), "no gradient"),
    "kernel": (NadarayaWatsonRegressor("cosine"), (X, LABELS), "kernel is 'cosine'; choose one of 'gaussian'"),
    "rule": (D(bandwidth="sheather"), (X,), "bandwidth is 'sheather'; expected"),
    "rtol": (D(kernel="linear", rtol=0.1), (X,), "rtol is for the gaussian kernel"),
    "NaN": (K(), ([[np.nan], [1.0]], [0, 1]), "NaN"),
    "sparse": (K(), (csr_matrix(X), LABELS), "[Ss]parse"),
    "huge": (K(), (X * 1e300, LABELS), "keys are float32"),
    "no product": (
        K(weights="sparsemax"),
        (X, LABELS, np.ones(150)),
        "weights is 'sparsemax'; choose one of 'softmax'",
    ),
    "weights of 0": (
        K(),
        (X, LABELS, np.zeros(150)),
        "sum 0; expected no negative number, and a finite sum above zero",
    ),
    "weights of NaN": (K(), (X, LABELS, np.full(150, np.nan)), "sample_weight hold NaN or infinity in 150 of 150"),
    "a negative weight": (SoftKNeighborsRegressor(), (X, LABELS, np.arange(-1, 149)), "the least number is -1"),
    "tiny weights": (K(), (X, LABELS, np.full(150, 1e-50)), "sample_weight is at most 1e-50, and values are float32"),
    "other weights": (NadarayaWatsonRegressor(), (X, LABELS, np.ones(3)), r"shape \(3,\); expected \(150,\)"),
    "one present": (NadarayaWatsonRegressor(), (X, LABELS, np.eye(150)[0]), "1 keys determine no bandwidth"),
    "weighted steps": (
        NadarayaWatsonRegressor(per_coordinate=True),
        (X, LABELS, np.ones(150)),
        "learns no bandwidths with sample_weight",
    ),
    "huge targets": (SoftKNeighborsRegressor(), (X, LABELS * 1e300), "values are float32"),
}


@pytest.mark.parametrize(("model", "given", "match"), REFUSED.values(), ids=REFUSED)
def test_senseless_arguments_are_refused_by_fit(model: Any, given: tuple[Any, ...], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        model.fit(*given)
    assert not hasattr(model, "db_") or not model.db_


def test_senseless_arguments_are_refused_by_predictions() -> None:
    model = SoftKNeighborsClassifier(temperature=1.0).fit(X, LABELS)
    for ask, match in (
        (lambda: model.predict(X[:, :3]), "X has 3 features, but SoftKNeighborsClassifier is expecting 4"),
        (lambda: model.predict([[1e300] * 4]), "keys are float32"),
        (lambda: model.kneighbors(X, 151), "n_neighbors is 151 but there are n_samples = 150"),
        (lambda: model.kneighbors(n_neighbors=150), "each without itself"),
        (lambda: model.kneighbors_graph(X, 3, mode="weights"), "mode is 'weights'"),
        (lambda: KernelDensity(kernel="linear").fit(X).sample(), "no sampling for the kernel 'linear'"),
        (lambda: KernelDensity().fit(X, sample_weight=[1, 2]), "sample_weight has shape"),
        (lambda: KernelDensity().fit(X, sample_weight=-np.ones(150)), "[Nn]egative"),
    ):
        with pytest.raises(ValueError, match=match):
            ask()
