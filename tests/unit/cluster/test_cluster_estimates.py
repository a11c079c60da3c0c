"""Estimates over shards are as good as those of one database, wherever equal records lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from contracts.cluster import Counted, near
from torch import Tensor
from worlds import holding

import softdb
from softdb.attend.error import ErrorEstimate
from softdb.attend.rounds import Estimator
from softdb.check import Metric
from softdb.cluster import Cluster, DatabaseShard, Local, database_shard, estimates
from softdb.cluster.shard import Draw, ShardQuery

N, D, V, P, CENTRES = 42_000, 8, 4, 4, 32
DRAWS = 400
SIGNED = ErrorEstimate._fields.index("signed")


class Parted(NamedTuple):
    """Clustered records in one database, and shared out."""

    one: softdb.SoftDB
    cluster: Cluster
    queries: Tensor
    temperature: float = 1.0

    def errors(self, db: Any, repeats: int = 2) -> tuple[Tensor, Tensor]:
        """‖ô - o‖ and bars over repeated draws, of queries that want gradients."""
        leaf, found = self.queries.clone().requires_grad_(), list[tuple[Tensor, Tensor]]()
        true = self.one.attend(self.queries, temperature=self.temperature).output
        for seed in range(repeats):
            generator = torch.Generator().manual_seed(seed)
            pooled = db.attend(leaf, temperature=self.temperature, rtol=0.01, max_draws=DRAWS, generator=generator)
            assert not pooled.exact.any()
            found.append(((pooled.output.detach() - true).norm(dim=1), pooled.bar))
        error, bar = (torch.cat(column) for column in zip(*found, strict=True))
        return error, bar


def parted(kind: str, shards: int = P, metric: Any = "dot") -> Parted:
    random = np.random.default_rng(0)
    centres, lab = random.standard_normal((CENTRES, D)), random.integers(0, CENTRES, N)
    keys = (centres[lab] + 0.5 * random.standard_normal((N, D))).astype(np.float32)
    values = (keys @ random.standard_normal((D, V)) + 0.5 * random.standard_normal((N, V))).astype(np.float32)
    home = {"hash": random.integers(0, shards, N), "clusters": lab * shards // CENTRES, "four times": np.arange(N) % 4}[
        kind
    ]
    if kind == "four times":
        keys, values = keys[: N // 4].repeat(4, 0), values[: N // 4].repeat(4, 0)
    parts = [softdb.open(None, dim=D, value_dim=V, metric=metric) for _ in range(shards)]
    for shard, part in enumerate(parts):
        mine = np.flatnonzero(home == shard)
        part.insert(mine.tolist(), keys[mine], values[mine])
    cluster = Cluster(Local([DatabaseShard(part, shard, shards) for shard, part in enumerate(parts)]))
    one = holding(keys, values, metric=metric)
    for db in (one, cluster):
        db.build_index("ivf", recall=0.9)
    asked = centres[random.integers(0, CENTRES, 150)] + 0.6 * random.standard_normal((150, D))
    return Parted(one, cluster, torch.from_numpy(asked.astype(np.float32)))


@pytest.fixture(scope="module")
def hashed() -> Parted:
    return parted("hash")


def rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_one_shard_is_one_database(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_shard, "salted", lambda seed, _: seed)
    world, results = parted("hash", 1, metric), []
    heat: Any = 1.0 if metric == "dot" else torch.linspace(0.5, 2, 20).requires_grad_()
    for db in (world.cluster, world.one):
        leaf = world.queries[:20].clone().requires_grad_()
        draws = torch.Generator().manual_seed(1)
        pooled = db.attend(leaf, temperature=heat, rtol=0.2, max_draws=DRAWS, generator=draws)
        learnt = [leaf] if metric == "dot" else [leaf, heat]
        grads = torch.autograd.grad(pooled.output.square().sum() + pooled.lse.sum(), learnt)
        assert pooled.n_pooled.float().mean() > DRAWS / 2
        results.append((pooled.output, pooled.lse, *grads, pooled.stderr, pooled.lse_stderr, pooled.bar))
    for result, own in zip(*results, strict=True):
        near(result, own, 2e-5)


def test_errors_and_bars_on_hash_shards(hashed: Parted) -> None:
    (error, bar), (own, _) = (hashed.errors(db, 8) for db in (hashed.cluster, hashed.one))
    assert rms(error) <= 1.15 * rms(own)
    assert float((error <= bar).float().mean()) >= 0.93


def test_the_rest_of_a_budget_is_drawn(hashed: Parted) -> None:
    """Later rounds draw numbers on a grid, rounded down; the remainder goes to the shards, a step each.

    Of a shard a twentieth of the draws goes to all records alike, which comes on top.
    """
    pooled = hashed.cluster.attend(hashed.queries, rtol=0.01, max_draws=DRAWS)
    assert not pooled.exact.any()
    assert 1.06 * DRAWS > float(pooled.n_pooled.double().mean()) > 0.96 * DRAWS


def test_a_tolerance_is_met_and_too_costly_draws_are_skipped(hashed: Parted) -> None:
    queries = hashed.queries[:20]
    pooled = hashed.cluster.attend(queries, rtol=0.1)
    true = hashed.one.attend(queries).output
    assert bool(pooled.met.all())
    assert bool(((pooled.output - true).norm(dim=1) <= pooled.bar + 1e-5).float().mean() > 0.8)
    log_z = hashed.cluster.log_partition(queries, rtol=0.05)
    assert bool(log_z.met.all())
    near(log_z.value, hashed.one.log_partition(queries, rtol=1e-6).value, 0.02)
    again = hashed.cluster.attend(queries, rtol=0.1)
    assert torch.equal(pooled.output, again.output)


def test_a_generator_determines_the_draws(hashed: Parted) -> None:
    results = [
        hashed.cluster.attend(
            hashed.queries[:5], rtol=0.01, max_draws=DRAWS, generator=torch.Generator().manual_seed(seed)
        ).output
        for seed in (1, 1, 2)
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.isclose(results[0], results[2]).all(1).any()


def test_gradients_are_of_the_draws_that_answered(hashed: Parted) -> None:
    """Rounds of several sizes: backward draws alike again, and gives each query the gradient of its own round."""
    leaf = hashed.queries[:30].clone().requires_grad_()
    pooled = hashed.cluster.attend(leaf, rtol=0.1, max_draws=3000)
    assert len(set(pooled.n_pooled.tolist())) > 1
    (estimated,) = torch.autograd.grad(pooled.output.sum(), leaf)
    (true,) = torch.autograd.grad(hashed.one.attend(leaf).output.sum(), leaf)
    off = (estimated - true).norm(dim=1) / true.norm(dim=1)
    assert float(off.median()) < 0.2, "the gradients of the wrong draws would be off by about 1"


def test_the_gradient_repeats_the_choice_of_an_exact_pass(hashed: Parted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of an exact pass is timed, and the times may differ when the gradient is computed."""
    leaf, dear = hashed.queries[:5].clone().requires_grad_(), [True]
    monkeypatch.setattr(Estimator, "too_dear", lambda *_: dear[0])
    pooled = hashed.cluster.attend(leaf, rtol=0.5)
    assert bool(pooled.exact.all())
    dear[0] = False
    (grad,) = torch.autograd.grad(pooled.output.sum(), leaf)
    near(grad, torch.autograd.grad(hashed.one.attend(leaf).output.sum(), leaf)[0], 1e-4)


def test_signs_and_draws_are_salted_with_the_shard(hashed: Parted) -> None:
    """Two shards of equal records must not draw alike, nor sign alike."""
    part = hashed.cluster.caller.transport._shards[0].db  # type: ignore[attr-defined]
    question = ShardQuery(hashed.queries[:5].numpy(), Metric.DOT)
    ask = Draw(part.generation, question, True, np.full(5, 100), seed=7, confidence=0.95, bounded=True)
    first, again, other = (DatabaseShard(part, shard, 4).answer(ask).estimate for shard in (0, 0, 1))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[SIGNED], again[SIGNED])
    assert not np.isclose(first[0], other[0]).all(1).any(), "drawn alike"


def test_signs_are_salted_where_draws_are_alike(hashed: Parted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_shard, "salted", lambda seed, _: seed)
    part = hashed.cluster.caller.transport._shards[0].db  # type: ignore[attr-defined]
    question = ShardQuery(hashed.queries[:5].numpy(), Metric.DOT)
    ask = Draw(part.generation, question, True, np.full(5, 100), 7, 0.95, True)
    first, other = (DatabaseShard(part, shard, 4).answer(ask).estimate for shard in (0, 1))
    assert np.array_equal(first[0], other[0])
    assert not np.allclose(first[SIGNED], other[SIGNED]), "signed alike"


def test_a_round_sends_little() -> None:
    parts = [softdb.open(None, dim=128) for _ in range(2)]
    for shard, part in enumerate(parts):
        part.insert(range(shard, 40, 2), np.random.default_rng(shard).standard_normal((20, 128)))
    counted = Counted(Local([DatabaseShard(part, shard, 2) for shard, part in enumerate(parts)]))
    cluster, counted.up, counted.down = Cluster(counted), 0, 0
    cluster.attend(torch.ones(3, 128), rtol=0.1)
    assert 9000 < (counted.up + counted.down) / (2 * 3) < 12_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clusters", "four times"])
def test_bars_hold_however_records_are_shared_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = parted(kind)
    (error, bar), (own, _) = (world.errors(db, 4) for db in (world.cluster, world.one))
    assert float(bar.median()) <= 3.5 * rms(error)
    assert float((error <= bar).float().mean()) >= 0.93
    if kind == "clusters":
        assert rms(error) <= 1.15 * rms(own)
        monkeypatch.setattr(estimates, "BETTER", 0.0)  # no sharing out anew
        assert rms(error) < 0.85 * rms(world.errors(world.cluster, 4)[0])
    else:
        monkeypatch.setattr(database_shard, "salted", lambda seed, _: seed)
        assert rms(error) < 0.8 * rms(world.errors(world.cluster, 4)[0]), "without salts equal records err alike"
