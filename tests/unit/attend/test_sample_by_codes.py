"""Samples drawn by codes or in a pass have the probabilities of the weights, also of some records only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from worlds import clusters, holding, indexed

import softdb

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

Array = NDArray[Any]
N, D, DRAWS = 12_000, 16, 400


@pytest.fixture(autouse=True)
def few_records_are_worth_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over so few costs less."""
    monkeypatch.setattr("softdb.attend.sample.pass_cost", lambda *given: 1e18)
    monkeypatch.setattr("softdb.attend.sample.PROPOSED", 1)
    for module in ("attend.rounds", "index.finder"):
        monkeypatch.setattr(f"softdb.{module}.FEWEST", 0)


def clustered(seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    return clusters(random, N, D, 30, 0.5).astype(np.float32)


def halves(metric: Any, **schema: Any) -> softdb.SoftDB:
    """Open a database with an index, of whose records every second is even."""
    return indexed(clustered(), payloads=[{"even": i % 2 == 0} for i in range(N)], metric=metric, **schema)


def temperature_of(db: softdb.SoftDB) -> float:
    """A third of the deviation of the scores, so that a few hundred records hold most of the weight."""
    return float(db.search(clustered()[:3], k=N, exact=True).scores.std()) / 3


def drawn(db: softdb.SoftDB, query: Array, temperature: float, **how: Any) -> tuple[Array, float]:
    """Rows of many samples, and the share of the queries for which all records were looked at."""
    generator = torch.Generator().manual_seed(0)
    samples = [db.sample(query, DRAWS // 4, temperature=temperature, generator=generator, **how) for _ in range(40)]
    rows = np.concatenate([sample.hits.rows.numpy().ravel() for sample in samples])
    return rows, float(torch.stack([sample.scanned for sample in samples]).float().mean())


def p_value(rows: Array, probabilities: Array) -> float:
    """Of the chi-square test over groups of records of about equal probability, each expected often enough."""
    order = np.argsort(-probabilities)
    groups = np.minimum((np.cumsum(probabilities[order]) * 25).astype(int), 24)
    group_of = np.empty(len(order), int)
    group_of[order] = groups
    expected = np.bincount(groups, probabilities[order], 25) * len(rows)
    counts = np.bincount(group_of[rows], minlength=25)
    assert (counts[expected == 0] == 0).all()
    some = expected > 0
    return float(stats.chisquare(counts[some], expected[some]).pvalue)


def weights(db: softdb.SoftDB, query: Array, temperature: float, **how: Any) -> Array:
    """Probability of each row, from exact scores."""
    hits = db.search(query, k=N, exact=True, **how)
    rows, scores = hits.rows[0].numpy(), hits.scores[0].double().numpy()
    probabilities = np.zeros(int(db._store.snapshot.rows(np.arange(db._store.snapshot.size)).max()) + 1)
    live = rows >= 0
    probabilities[rows[live]] = np.exp((scores[live] - scores[live].max()) / temperature)
    found: Array = probabilities / probabilities.sum()
    return found


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_samples_are_as_likely_as_their_weights(metric: str, dtype: str) -> None:
    db = halves(metric, dtype=dtype)
    temperature, query = temperature_of(db), clustered(1)[:1]
    rows, scanned = drawn(db, query, temperature)
    assert scanned == 0
    assert p_value(rows, weights(db, query, temperature)) > 1e-4


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_lists_of_few_candidates_are_not_scanned(monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    """Their candidates, too, have the probabilities of the weights, and are independent."""
    db, shares = halves(metric), []
    temperature, query = 4 * temperature_of(db), clustered(1)[:1]
    monkeypatch.setattr("softdb.index.sampler.Sampler.read", lambda self, kind, share: shares.append(share))
    rows, scanned = drawn(db, query, temperature)
    assert scanned == 0
    assert max(shares) < 0.5
    assert p_value(rows, weights(db, query, temperature)) > 1e-4
    by_batch = np.array([len(set(batch)) for batch in rows.reshape(40, -1).tolist()])
    equal = 1 - (1 - weights(db, query, temperature)) ** (DRAWS // 4)  # of records that occur
    assert abs(by_batch.mean() - equal.sum()) < 5 * np.sqrt(equal.sum() / 40)


def test_queries_with_too_few_points_have_another_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.sample.POINTS", 0.5)
    monkeypatch.setattr("softdb.attend.sample.SURE", 0.0)
    db = halves("dot")
    temperature, query = temperature_of(db), clustered(1)[:1]
    rows, scanned = drawn(db, query, temperature)
    assert scanned == 0
    assert p_value(rows, weights(db, query, temperature)) > 1e-4
    monkeypatch.setattr("softdb.attend.sample.TURNS", 1)
    assert db.sample(query, DRAWS // 4, temperature=temperature).scanned.all()


def test_samples_of_filtered_deleted_and_young_records() -> None:
    db = halves("dot")
    db.delete(range(0, 3000))
    extra = clustered(5)[:300]
    db.insert(range(N, N + 300), extra, payloads=[{"even": True}] * 300)
    temperature, query, where = temperature_of(db), clustered(1)[:1], {"even": True}
    rows, scanned = drawn(db, query, temperature, where=where)
    assert scanned == 0
    assert (rows >= N).any()  # young records
    assert not (rows < 3000).any()
    assert p_value(rows, weights(db, query, temperature, where=where)) > 1e-4


def test_a_dominant_record_is_drawn_repeatedly() -> None:
    db = halves("l2")
    query = clustered()[7:8]
    samples = db.sample(query, 50, temperature=1e-3 * temperature_of(db))
    assert (samples.hits.rows == 7).all()


def test_equal_queries_have_independent_samples() -> None:
    db = halves("dot")
    temperature, query = temperature_of(db), clustered(1)[:1]
    rows = db.sample(np.repeat(query, 24, axis=0), 5, temperature=temperature).hits.rows.numpy()
    assert len({tuple(line) for line in rows.tolist()}) == 24
    assert (db.sample(np.zeros((2, D)), 20).hits.rows[0] != db.sample(np.zeros((2, D)), 20).hits.rows[1]).any()


def test_threads_that_share_a_batch_draw_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    db = halves("dot")
    temperature, queries = temperature_of(db), np.repeat(clustered(1)[:3], 4, axis=0)
    rows = []
    for threads in (1, 2, 3):
        monkeypatch.setattr("softdb.kernels.threads.workers", lambda products, threads=threads: threads)
        generator = torch.Generator().manual_seed(0)
        rows.append(db.sample(queries, 8, temperature=temperature, generator=generator).hits.rows)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_a_generator_decides_the_samples() -> None:
    db = halves("dot")
    temperature, query = temperature_of(db), clustered(1)[:2]
    first, again, other = (
        db.sample(query, 9, temperature=temperature, generator=torch.Generator().manual_seed(seed)).hits.rows
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_log_probabilities_are_exact_and_carry_the_gradient() -> None:
    db = halves("dot")
    temperature = temperature_of(db)
    query = torch.from_numpy(clustered(1)[:2]).requires_grad_()
    samples = db.sample(query, 6, temperature=temperature)
    assert not samples.scanned.any()
    exact = db.attend(query, temperature=temperature).lse.detach()
    torch.testing.assert_close(
        samples.log_prob.detach(), samples.hits.scores.detach() / temperature - exact[:, None], rtol=1e-4, atol=1e-4
    )
    (gradient,) = torch.autograd.grad(samples.log_prob.sum(), query)
    keys = torch.from_numpy(np.stack([db[i].key for i in samples.hits.ids[0]]))
    mean = db.attend(query.detach(), temperature=temperature).output[0]
    torch.testing.assert_close(gradient[0], ((keys - mean) / temperature).sum(0), rtol=1e-3, atol=1e-3)


def test_loose_codes_send_a_query_to_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.sample.PROPOSED", 1000)
    db = halves("dot")
    samples = db.sample(clustered(1)[:2], 200, temperature=temperature_of(db))
    assert samples.scanned.all()
    assert (samples.hits.rows >= 0).all()


def passed(monkeypatch: pytest.MonkeyPatch, by_kernels: bool, metric: Any = "dot") -> softdb.SoftDB:
    """Open a database without an index that a pass samples, in many runs of a few records each."""
    monkeypatch.setattr("softdb.attend.sample.RUN", 70)
    monkeypatch.setattr("softdb.attend.sample.PAIRS", 7)
    if not by_kernels:
        monkeypatch.setattr("softdb.attend.sample.run_masses", lambda request, source, most: None)
    return holding(clustered(), payloads=[{"even": i % 2 == 0} for i in range(N)], metric=metric)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_samples_of_a_pass_are_as_likely_as_their_weights(
    monkeypatch: pytest.MonkeyPatch, by_kernels: bool, metric: str
) -> None:
    db = passed(monkeypatch, by_kernels, metric)
    db.delete(range(0, 3000))
    temperature, query, where = temperature_of(db), clustered(1)[:1], {"even": True}
    rows, scanned = drawn(db, query, temperature, where=where)
    assert scanned == 1
    assert p_value(rows, weights(db, query, temperature, where=where)) > 1e-4
    per_query = torch.tensor([1e4, temperature], dtype=torch.float32)
    other = db.sample(np.repeat(query, 2, axis=0), 4000, temperature=per_query, where=where).hits.rows[1].numpy()
    assert p_value(other, weights(db, query, temperature, where=where)) > 1e-4


@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_pass_samples_what_a_mask_leaves(monkeypatch: pytest.MonkeyPatch, by_kernels: bool) -> None:
    db = passed(monkeypatch, by_kernels)
    db.delete(range(0, 3000))
    mask = torch.zeros(3, N - 3000, dtype=torch.bool)
    mask[0, 40:43], mask[1, -1] = True, True
    samples = db.sample(clustered(1)[:3], 500, temperature=1e4, mask=mask)
    assert set(samples.hits.rows[0].tolist()) == {3040, 3041, 3042}
    assert set(samples.hits.rows[1].tolist()) == {N - 1}
    assert set(samples.hits.rows[2].tolist()) == {-1}
    assert samples.log_prob[0].exp().mean().item() == pytest.approx(1 / 3, abs=1e-3)
    assert (samples.log_prob[2] == -torch.inf).all()


def test_samples_of_a_pass_are_independent_and_the_same_for_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    db = passed(monkeypatch, True)
    temperature, query, rows = temperature_of(db), clustered(1)[:1], []
    for threads in (1, 2, 3):
        monkeypatch.setattr("softdb.attend.fused.workers", lambda products, threads=threads: threads)
        generator = torch.Generator().manual_seed(0)
        rows.append(db.sample(np.repeat(query, 9, axis=0), 8, temperature=temperature, generator=generator).hits.rows)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert len({tuple(line) for line in rows[0].tolist()}) == 9


def test_log_probabilities_of_a_pass_are_exact_and_scores_that_overflow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    db, temperature = passed(monkeypatch, True), 1e-4
    query = torch.from_numpy(clustered(1)[:2])
    samples = db.sample(query, 6, temperature=temperature)
    exact = db.attend(query.double(), temperature=temperature).lse
    expected = samples.hits.scores.double() / temperature - exact[:, None]
    assert (samples.log_prob - expected).abs().max() < 1e-5 * (exact.abs().max() + 1)
    with pytest.raises(softdb.BadInput, match="NaN"):
        db.sample(query * 1e38, 6, temperature=1e38)


def test_the_last_run_of_a_pass_may_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    db = passed(monkeypatch, True)
    monkeypatch.setattr("softdb.attend.sample.RUN", 7000)
    rows = db.sample(clustered(1)[:1], 20_000, temperature=1e6).hits.rows.numpy().ravel()
    assert p_value(rows, np.full(N, 1 / N)) > 1e-4
