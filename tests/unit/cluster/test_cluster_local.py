"""Shards in this process: the contract, versions, shards that do not fit, slow ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_contract import ClusterContract, Counted, D, filled

import softdb
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.local import Local
from softdb.cluster.shard import NEWEST, CallVerb, Describe, Gather, PassOver, ShardQuery, Transport
from softdb.errors import BadInput, ShardUnavailable, StaleRead


class TestLocal(ClusterContract):
    """The contract, by threads."""

    @contextlib.contextmanager
    def transport(self, folders: list[Path]) -> Iterator[Transport]:
        dbs = [softdb.open(folder, mode="r") for folder in folders]
        local = Local([DatabaseShard(db, shard, len(dbs)) for shard, db in enumerate(dbs)])
        yield local
        local.close()
        for db in dbs:
            db.close()


def shards(*dbs: softdb.SoftDB) -> Local:
    return Local([DatabaseShard(db, shard, len(dbs)) for shard, db in enumerate(dbs)])


def test_a_shard_that_went_on_says_so() -> None:
    left, right = filled(None, np.arange(0, 40), "dot"), filled(None, np.arange(40, 80), "dot")
    cluster, queries = Cluster(shards(left, right)), torch.ones(2, D)
    hits, before = cluster.search(queries, 3), cluster.attend(queries)
    right.insert(["new"], np.full((1, D), 5, np.float32), np.ones((1, 4)))
    for ask in (
        cluster.attend,
        cluster.search,
        cluster.sample,
        lambda q: cluster.count_within(q, 1.0),
        lambda _: hits.payloads,
    ):
        with pytest.raises(StaleRead, match="shard 1 is at version"):
            ask(queries)
    assert cluster.refresh() == right.generation
    assert cluster.search(queries, 1).ids == [["new"]] * 2
    assert not torch.equal(cluster.attend(queries).lse, before.lse)


def test_a_shard_that_goes_on_while_it_answers_says_so() -> None:
    db = filled(None, np.arange(40), "dot")
    versions = iter([1, 1, 2])
    shard = DatabaseShard(db, 0, 1, version=lambda: next(versions))
    assert shard.answer(Describe(NEWEST)).version == 1
    with pytest.raises(StaleRead, match="at version 2 but was asked for 1"):
        shard.answer(PassOver(1, ShardQuery(np.ones((1, D), np.float32), softdb.check.Metric.DOT)))


@pytest.mark.parametrize("other", [{"dim": D + 1}, {"metric": "l2"}, {"dtype": "float16"}, {"value_dim": 3}])
def test_shards_of_another_kind_are_refused(other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"dim": D, "value_dim": 4}
    with pytest.raises(BadInput, match="shards are parts of one whole"):
        Cluster(shards(softdb.open(None, **plain), softdb.open(None, **{**plain, **other})))
    with pytest.raises(BadInput, match="says that it is 1 of 2"):
        Cluster(Local([DatabaseShard(softdb.open(None, **plain), 1, 2)] * 2))


def test_a_slow_shard_and_one_that_breaks_are_missing_in_time() -> None:
    class Slow(DatabaseShard):
        def answer(self, ask: Any) -> Any:
            if isinstance(ask, PassOver):
                time.sleep(1.0)
            return super().answer(ask)

    class Broken(DatabaseShard):
        def answer(self, ask: Any) -> Any:
            if isinstance(ask, PassOver):
                raise OSError("the disk is gone")
            return super().answer(ask)

    dbs = [filled(None, np.arange(low, low + 40), "dot") for low in (0, 40, 80)]
    parts = [kind(db, i, 3) for i, (kind, db) in enumerate(zip((DatabaseShard, Slow, Broken), dbs, strict=True))]
    cluster, start = Cluster(Local(parts), timeout=0.3), time.monotonic()
    with pytest.raises(ShardUnavailable, match="shard 1: it is too slow; shard 2: OSError: the disk is gone"):
        cluster.attend(torch.ones(1, D))
    assert time.monotonic() - start < 0.9


def test_a_shard_does_what_its_messages_say_and_no_more() -> None:
    db = filled(None, np.arange(40), "dot")
    shard = DatabaseShard(db, 1, 2)
    with pytest.raises(BadInput, match="was asked to compact"):
        shard.answer(CallVerb(db.generation, "compact", {}))
    with pytest.raises(BadInput, match="rows of another"):
        shard.answer(Gather(db.generation, np.array([4])))
    with pytest.raises(StaleRead, match="deleted or replaced"):
        shard.answer(Gather(db.generation, np.array([1001])))


def test_empty_shards_and_ids_of_both_kinds() -> None:
    keys = np.ones((4, D), np.float32)
    left, right, none = (softdb.open(None, dim=D) for _ in range(3))
    left.insert(["b", 7], keys[:2])
    right.insert(["a", 5], keys[:2])
    cluster = Cluster(shards(left, right, none))
    assert cluster.search(torch.ones(1, D), 4).ids == [[5, 7, "a", "b"]]  # ties: numbers, then strings
    assert cluster.search(torch.ones(1, D), 3).ids == [[5, 7, "a"]]
    assert cluster.attend(torch.ones(1, D)).n_pooled.tolist() == [4]
    nothing = Cluster(shards(none, softdb.open(None, dim=D)))
    pooled = nothing.attend(torch.ones(1, D, requires_grad=True))
    assert (pooled.lse.tolist(), pooled.output.abs().sum().item()) == ([-float("inf")], 0)
    assert nothing.search(torch.ones(1, D)).ids == [[]]
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("n", [400, 4000])
def test_what_travels_does_not_grow_with_the_records(n: int) -> None:
    half = n // 2
    counted = Counted(shards(filled(None, np.arange(half), "dot", n), filled(None, np.arange(half, n), "dot", n)))
    cluster, queries = Cluster(counted), torch.ones(3, D, requires_grad=True)
    counted.up = counted.down = 0
    cluster.attend(queries).output.sum().backward()  # type: ignore[no-untyped-call]
    cluster.search(queries.detach(), 5)
    assert (counted.up, counted.down) == (2 * 4 * 3 * (D + D + 4 + 1 + D), 2 * (4 * 3 * (4 + 1 + D) + 3 * 5 * 12))
