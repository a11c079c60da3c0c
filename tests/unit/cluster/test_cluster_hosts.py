"""Several shards on one host send one reply with the answers and gradients of each."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.cluster import ClusterContract, D, N, V, differentiated, near, subset
from contracts.cluster_hosts import Hosts

import softdb
from softdb import scores
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.hosts import Host
from softdb.cluster.merge import together
from softdb.cluster.shard import Backward, Nearest, PassOver, ShardQuery, Transport
from softdb.errors import StaleRead


class TestHosts(ClusterContract):
    """The contract, with the shards on three hosts at most."""

    @contextlib.contextmanager
    def transport(self, folders: list[Path]) -> Iterator[Transport]:
        dbs = [softdb.open(folder, mode="r") for folder in folders]
        yield Hosts([DatabaseShard(db, shard, len(dbs)) for shard, db in enumerate(dbs)], min(3, len(dbs)))
        for db in dbs:
            db.close()


def hosts(count: int, shards: int = 4, n: int = N) -> Hosts:
    parts = [subset(None, np.arange(shard, n, shards), "dot", n) for shard in range(shards)]
    return Hosts([DatabaseShard(part, shard, shards) for shard, part in enumerate(parts)], count)


@pytest.mark.parametrize("words", [{}, {"where": {"third": 1}}, {"temperature": 0.05}, {"score": scores.Gaussian(0.9)}])
def test_the_gradient_of_a_merged_state_is_shared_out_rightly(words: dict[str, Any]) -> None:
    """One key weighs almost all at a low temperature; a share e^(lse - L) that is wrong shows there."""
    queries = torch.from_numpy(np.random.default_rng(1).standard_normal((6, D)))
    one, merged, apart = subset(None, np.arange(N), "dot"), Cluster(hosts(1)), Cluster(hosts(4))
    true = differentiated(one, queries, **words)
    for cluster in (merged, apart):
        for actual, own in zip(differentiated(cluster, queries, **words), true, strict=True):
            near(actual, own, 1e-9)


def test_a_shard_without_matches_has_no_gradient() -> None:
    left, right = subset(None, np.arange(0, N, 3), "dot"), subset(None, np.arange(1, N, 3), "dot")
    cluster = Cluster(Hosts([DatabaseShard(left, 0, 2), DatabaseShard(right, 1, 2)], 1))
    queries = torch.ones(2, D, dtype=torch.float64)
    for third, own in ((0, left), (1, right)):
        for actual, true in zip(
            *(differentiated(db, queries, where={"third": third}) for db in (cluster, own)), strict=True
        ):
            near(actual, true, 1e-9)
    grads = differentiated(cluster, queries, where={"third": 2})[2:]
    assert [float(grad.abs().sum()) for grad in grads] == [0.0]


def test_a_host_sends_one_reply_for_all_its_shards() -> None:
    q, k, down = 3, 5, {}
    for shards in (2, 8):
        transport = hosts(1, shards)
        cluster, leaf = Cluster(transport), torch.ones(q, D, requires_grad=True)
        transport.cleared()
        cluster.attend(leaf).output.sum().backward()  # type: ignore[no-untyped-call]
        cluster.search(leaf.detach(), k)
        cluster.count_within(leaf.detach(), 1.0)
        down[shards] = transport.numbers[1]
    assert down == dict.fromkeys(down, 4 * q * (V + 1 + D) + 12 * q * k + 8 * q)


def test_the_gradient_of_a_host_travels_once() -> None:
    wide, sent = 512, []
    for shards in (2, 8):
        transport = hosts(1, shards)
        leaf = torch.ones(wide, D, requires_grad=True)
        loss = Cluster(transport).attend(leaf).output.sum()
        transport.cleared()
        loss.backward()  # type: ignore[no-untyped-call]
        sent.append(transport.wire[0])
    assert sent[1] < sent[0] + 6 * 500, "what each shard adds does not grow with the queries"


def test_only_mergeable_replies_are_merged_on_the_host() -> None:
    question = ShardQuery(np.ones((1, D), np.float32), softdb.check.Metric.DOT)
    shards = hosts(1).own
    passes = {shard: PassOver(own.db.generation, question) for shard, own in enumerate(shards)}  # type: ignore[attr-defined]

    def owners(asks: dict[int, Any], replies: dict[int, Any] | None = None) -> set[tuple[int, ...]]:
        return set(together(asks, replies or {shard: shards[shard].answer(ask) for shard, ask in asks.items()}))

    assert owners(passes) == {(0, 1, 2, 3)}
    assert owners({2: passes[2]}) == {(2,)}
    assert owners({s: PassOver(ask.version, question, True, apart=True) for s, ask in passes.items()}) == {
        (0,), (1,), (2,), (3,)
    }  # fmt: skip
    replies: dict[int, Any] = {shard: shards[shard].answer(ask) for shard, ask in passes.items()} | {1: StaleRead("no")}
    assert owners(passes, replies) == {(0, 2, 3), (1,)}
    mixed: dict[int, Any] = {
        0: passes[0],
        1: passes[1],
        2: Nearest(passes[2].version, question, 3),
        3: Nearest(passes[3].version, question, 3),
    }
    assert owners(mixed) == {(0, 1), (2, 3)}
    grads = {
        shard: Backward(ask.version, ask, np.ones((1, V), np.float32), np.ones(1, np.float32))
        for shard, ask in passes.items()
    }
    assert owners(grads) == {(0, 1, 2, 3)}


class Held(Host):
    """A host whose shards are there already."""

    held: Any

    def _opened(self, shards: Any) -> Any:
        return self.held


@pytest.mark.parametrize("work", [0, math.inf], ids=["in turn", "in threads"])
def test_an_actor_answers_all_of_its_shards_at_once(work: float) -> None:
    held: Any = Held(None, "", range(3))  # type: ignore[arg-type]
    held.held = dict(enumerate(hosts(1, 3).own))
    for shard in held.held.values():
        shard.work = lambda _: work
    version, question = held.held[0].db.generation, ShardQuery(np.ones((2, D), np.float32), softdb.check.Metric.DOT)
    asks = {shard: PassOver(held.held[shard].db.generation, question) for shard in range(3)}
    (whole, reply), *others = pickle.loads(held.answer(pickle.dumps(asks))).items()
    assert (whole, others) == ((0, 1, 2), [])
    true = subset(None, np.arange(N), "dot").attend(torch.ones(2, D))
    near(torch.from_numpy(reply.output), true.output, 1e-5)
    near(torch.from_numpy(reply.lse), true.lse, 1e-5)
    assert reply.output.flags.writeable, "else torch warns of it"
    stale = pickle.loads(held.answer(pickle.dumps({1: PassOver(version + 7, question)})))
    assert list(stale) == [(1,)]
    assert isinstance(stale[1,], StaleRead)
    held.held = StaleRead("its version is gone")
    actual = pickle.loads(held.tend(pickle.dumps(asks)))
    assert {mine: type(one) for mine, one in actual.items()} == dict.fromkeys([(0,), (1,), (2,)], StaleRead)
