"""Shards in this process: the contract, versions, mismatched shards and slow shards."""

from __future__ import annotations

import contextlib
import pickle
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.cluster import ClusterContract, Counted, D, subset

import softdb
from softdb.cluster import Cluster, DatabaseShard, Local
from softdb.cluster.shard import (
    NEWEST,
    CallVerb,
    Describe,
    Gather,
    Locate,
    Nearest,
    PassOver,
    Sample,
    ShardQuery,
    Transport,
)
from softdb.errors import BadInput, Closed, ShardUnavailable, StaleRead


class Absent:
    """A score by its name alone."""


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


def test_a_shard_at_a_newer_version_raises_stale_read() -> None:
    left, right = subset(None, np.arange(0, 40), "dot"), subset(None, np.arange(40, 80), "dot")
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


def test_a_shard_that_changes_while_answering_raises_stale_read() -> None:
    db = subset(None, np.arange(40), "dot")
    versions = iter([1, 1, 2])
    shard = DatabaseShard(db, 0, 1, version=lambda: next(versions))
    assert shard.answer(Describe(NEWEST)).version == 1
    with pytest.raises(StaleRead, match="at version 2 but was asked for 1"):
        shard.answer(PassOver(1, ShardQuery(np.ones((1, D), np.float32), softdb.check.Metric.DOT)))


@pytest.mark.parametrize("other", [{"dim": D + 1}, {"metric": "l2"}, {"dtype": "float16"}, {"value_dim": 3}])
def test_shards_of_another_kind_are_refused(other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"dim": D, "value_dim": 4}
    with pytest.raises(BadInput, match="expected equal schemas"):
        Cluster(shards(softdb.open(None, **plain), softdb.open(None, **{**plain, **other})))
    with pytest.raises(BadInput, match="says that it is 1 of 2"):
        Cluster(Local([DatabaseShard(softdb.open(None, **plain), 1, 2)] * 2))


class Clock:
    """A clock that jumps an hour after a given number of readings."""

    turns = -1

    def monotonic(self) -> float:
        self.turns -= 1
        return 3600.0 if self.turns == -1 else 0.0


def test_slow_and_broken_shards_are_missing_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    class Slow(DatabaseShard):
        def answer(self, ask: Any) -> Any:
            if isinstance(ask, PassOver):
                assert let_go.wait(60)
            return super().answer(ask)

    class Broken(DatabaseShard):
        def answer(self, ask: Any) -> Any:
            if isinstance(ask, PassOver):
                raise OSError("the disk is gone")
            return super().answer(ask)

    dbs = [subset(None, np.arange(low, low + 40), "dot") for low in (0, 40, 80)]
    parts = [kind(db, i, 3) for i, (kind, db) in enumerate(zip((DatabaseShard, Broken, Slow), dbs, strict=True))]
    transport = Local(parts)
    plain, clock = transport.ask, Clock()

    def ask(asks: Any, timeout: float) -> Any:
        clock.turns = 3 if any(isinstance(ask, PassOver) for ask in asks.values()) else -1
        return plain(asks, timeout)

    monkeypatch.setattr(transport, "ask", ask)
    monkeypatch.setattr("softdb.cluster.local.time", clock)
    with pytest.raises(ShardUnavailable, match="shard 1: OSError: the disk is gone; shard 2: it is too slow"):
        Cluster(transport, timeout=60.0).attend(torch.ones(1, D))
    let_go.set()  # only now the slow one is done


@pytest.mark.parametrize(("seconds", "advice"), [(0.02, "ask again, or"), (40.0, r"give more time \(timeout=\), or")])
def test_an_error_states_the_time_that_passed(seconds: float, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lossy := Counted(shards(subset(None, np.arange(40), "dot"))), timeout=40)
    lossy.lost = {0}
    clock = iter([1.0, 1.0 + seconds])
    monkeypatch.setattr(import_module("softdb.cluster.caller"), "time", SimpleNamespace(monotonic=lambda: next(clock)))
    match = rf"1 of 1 shards did not answer \(waited {seconds:g} s of at most 40 s; shard 0: lost\); .*{advice} open"
    with pytest.raises(ShardUnavailable, match=match):
        cluster.attend(torch.ones(1, D))


def test_a_score_that_a_shard_cannot_load_is_named() -> None:
    """A class of a notebook, which the process of the shard lacks."""
    shard = DatabaseShard(subset(None, np.arange(40), "dot"), 0, 1)
    sent = pickle.dumps(Absent()).replace(b"Absent", b"Gone99")
    question = ShardQuery(np.ones((1, D), np.float32), None, score=sent)
    match = "cannot load the score .AttributeError: .*Gone99.*define it in a module that the shards can import"
    with pytest.raises(BadInput, match=match):
        shard.answer(PassOver(shard.version(), question))


def all_alike(cluster: Cluster, one: softdb.SoftDB, queries: torch.Tensor) -> None:
    """Assert that every question is answered as by one database."""
    within: list[dict[str, Any]] = [{"k": 3}, {"k": 3, "offset": 1}, {"radius": 1.0}]
    for words in within:
        for others in ({}, {"where": {"third": 1}}, {"exact": True}):
            for left_out in (None, [4], [[4], [7, 8]]):
                found, true = (db.search(queries, **words, **others, exclude_ids=left_out) for db in (cluster, one))
                assert found.ids == true.ids, (words, others, left_out)
                assert found.payloads == true.payloads
    for words in ({}, {"k": 4}, {"where": {"third": 1}}, {"weights": "sparsemax"}, {"rtol": 0.1}):
        pooled, whole = (db.attend(queries, **words) for db in (cluster, one))
        torch.testing.assert_close(pooled.lse, whole.lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pooled.output, whole.output, rtol=1e-5, atol=1e-5)
    explained = zip(cluster.attend(queries).explain(3), one.attend(queries).explain(3), strict=True)
    assert all(mine.ids == own.ids for mine, own in explained)
    assert cluster.count_within(queries, 1.0).value.tolist() == one.count_within(queries, 1.0).value.tolist()
    for db in (cluster, one):
        assert {name for names in db.sample(queries, 2).hits.ids for name in names} <= set(range(24))
    assert [len(cluster), cluster.count({"third": 1})] == [len(one), one.count({"third": 1})]
    assert {name for part in cluster.scan() for name in part.ids} == {name for part in one.scan() for name in part.ids}


@pytest.mark.parametrize("empty", ["new", "emptied", "without a key"])
def test_a_shard_without_a_key_answers_as_any(empty: str) -> None:
    """One that was never written to, one whose records were all deleted, and one whose records have no key yet."""
    n = 24
    kinds = {"new": np.arange(0), "emptied": np.arange(100, 110), "without a key": np.arange(0)}
    parts, one = (
        [subset(None, np.arange(0, n), "dot"), subset(None, kinds[empty], "dot", n=200)],
        subset(None, np.arange(n), "dot"),
    )
    if empty == "emptied":
        parts[1].delete(list(range(100, 110)))
    if empty == "without a key":
        for db in (parts[1], one):
            db.insert(["bare"], payloads=[{"third": 1}])
    all_alike(Cluster(shards(*parts)), one, torch.randn(2, D, generator=torch.Generator().manual_seed(1)))


def test_a_shard_refuses_messages_that_it_cannot_answer() -> None:
    db = subset(None, np.arange(40), "dot")
    shard = DatabaseShard(db, 1, 2)
    with pytest.raises(BadInput, match="was asked to compact"):
        shard.answer(CallVerb(db.generation, "compact", {}))
    with pytest.raises(BadInput, match="rows of another"):
        shard.answer(Gather(db.generation, np.array([4])))
    with pytest.raises(StaleRead, match="deleted or replaced"):
        shard.answer(Gather(db.generation, np.array([1001])))
    rows = shard.answer(Locate(db.generation, [3, 4]))
    db.delete([3])
    with pytest.raises(StaleRead, match="deleted or replaced"):
        shard.answer(Gather(db.generation, rows))
    db.compact()
    with pytest.raises(StaleRead, match="deleted or replaced"):
        shard.answer(Gather(db.generation, rows))


def test_a_verb_at_another_version_changes_nothing() -> None:
    db = subset(None, np.arange(1200), "dot")
    shard, before = DatabaseShard(db, 0, 1), db.generation
    db.delete([3])
    with pytest.raises(StaleRead, match="but was asked for"):
        shard.answer(CallVerb(before, "build_index", {"kind": "ivf", "recall": 0.9}))
    assert db.stats().index is None


def test_a_hit_deleted_before_its_lookup_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    db = subset(None, np.arange(40), "dot")
    shard, question = DatabaseShard(db, 0, 1), ShardQuery(np.ones((1, D), np.float32), softdb.check.Metric.DOT)
    monkeypatch.setattr(db.core.store, "read", lambda *_, **__: {})
    with pytest.raises(StaleRead, match="deleted or replaced"):
        shard.answer(Nearest(db.generation, question, 3))


def test_shards_of_equal_records_sample_independently() -> None:
    """The generator determines the draws."""
    keys = np.random.default_rng(0).standard_normal((50, D)).astype(np.float32)
    parts = [softdb.open(None, dim=D) for _ in range(2)]
    for shard, part in enumerate(parts):
        part.insert([100 * shard + i for i in range(50)], keys)
    asks = [
        Sample(part.generation, ShardQuery(np.zeros((1, D), np.float32), softdb.check.Metric.DOT), np.array([40]), seed)
        for part, seed in zip(parts, (7, 7), strict=True)
    ]
    first, other = (
        [name % 100 for name in DatabaseShard(part, shard, 2).answer(ask).ids[0]]
        for shard, (part, ask) in enumerate(zip(parts, asks, strict=True))
    )
    assert first != other
    again, later = (DatabaseShard(parts[0], 0, 2).answer(replace(asks[0], seed=seed)).ids[0] for seed in (7, 8))
    assert [name % 100 for name in again] == first, "the same message, the same answer"
    assert again != later
    transport, asked = shards(*parts), list[int]()
    plain = transport.ask

    def ask(asks: Any, timeout: float) -> Any:
        asked.extend(ask.seed for ask in asks.values() if isinstance(ask, Sample))
        return plain(asks, timeout)

    transport.ask = ask  # type: ignore[method-assign]
    cluster, queries = Cluster(transport), torch.zeros(1, D)
    drawn = [cluster.sample(queries, 40, generator=torch.Generator().manual_seed(seed)).hits.ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert asked[0] == asked[1] == asked[2] != asked[4], "the draws within a shard are the generator's, too"


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
def test_messages_do_not_grow_with_the_records(n: int) -> None:
    half = n // 2
    counted = Counted(shards(subset(None, np.arange(half), "dot", n), subset(None, np.arange(half, n), "dot", n)))
    cluster, queries = Cluster(counted), torch.ones(3, D, requires_grad=True)
    counted.up = counted.down = 0
    cluster.attend(queries).output.sum().backward()  # type: ignore[no-untyped-call]
    cluster.search(queries.detach(), 5)
    assert (counted.up, counted.down) == (2 * 4 * 3 * (D + D + 4 + 1 + D), 2 * (4 * 3 * (4 + 1 + D) + 3 * 5 * 12))


def test_a_field_missing_in_one_shard_does_not_warn() -> None:
    parts = [softdb.open(None, dim=D) for _ in range(2)]
    for shard, part in enumerate(parts):
        part.insert([shard], np.ones((1, D)), payloads=[{"only": 1} if shard else {}])
    cluster = Cluster(Local([DatabaseShard(part, shard, 2) for shard, part in enumerate(parts)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cluster.search(np.ones((1, D)), 2, where={"only": 1}).ids == [[1]]
        assert cluster.count({"only": 1}) == 1
        assert parts[0].count({"only": 1}) == 0  # a part of the records, by its own handle, too
    with pytest.warns(softdb.UnknownField, match="only"):  # a database that is no shard warns
        subset(None, np.arange(40), "dot").count({"only": 1, "$not": {"only": 2}})


def lossy(**how: Any) -> tuple[Counted, Cluster]:
    """Two shards of which one can be lost, and a handle that accepts partial answers."""
    counted = Counted(shards(subset(None, np.arange(40), "dot"), subset(None, np.arange(40, 80), "dot")))
    counted.lost = how.pop("lost", set())
    return counted, Cluster(counted, partial=True, **how)


def test_a_gradient_wants_every_shard_that_answered() -> None:
    """Also where a part of an answer will do: a part of its gradient is wrong."""
    transport, cluster = lossy()
    leaf = torch.ones(2, D, requires_grad=True)
    whole = cluster.attend(leaf)
    transport.lost = {1}
    part = cluster.attend(leaf)
    assert (whole.missing, part.missing) == ((), (1,))
    with pytest.raises(ShardUnavailable, match="shard 1: lost"):
        torch.autograd.grad(whole.output.sum(), leaf)
    left = subset(None, np.arange(40), "dot")
    for actual, true in zip(
        *(torch.autograd.grad(one.output.square().sum(), leaf) for one in (part, left.attend(leaf))), strict=True
    ):
        torch.testing.assert_close(actual, true)


def test_a_loss_wants_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is lost after its records were found."""
    transport, cluster = lossy()
    plain = transport.ask

    def ask(asks: Any, timeout: float) -> Any:
        transport.lost = {1} if any(isinstance(ask, PassOver) for ask in asks.values()) else set()
        return plain(asks, timeout)

    monkeypatch.setattr(transport, "ask", ask)
    with pytest.raises(ShardUnavailable, match="shard 1: lost"):
        softdb.nn.retrieval_loss(cluster, torch.ones(2, D), [1, 50])
    assert cluster.attend(torch.ones(2, D)).missing == (1,)


def test_an_absent_shard_is_missing_until_it_is_looked_for() -> None:
    transport, cluster = lossy(lost={1})
    transport.lost = set()
    assert cluster.attend(torch.ones(1, D)).missing == (1,)
    with pytest.raises(ShardUnavailable, match="shard 1: it did not answer when the cluster was opened"):
        cluster.count()
    cluster.refresh()
    assert (cluster.attend(torch.ones(1, D)).missing, cluster.count()) == ((), 80)


def test_an_index_may_take_longer_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, allowed = shards(subset(None, np.arange(1200), "dot")), list[tuple[str, float]]()
    plain = transport.ask

    def ask(asks: Any, timeout: float) -> Any:
        allowed.extend((getattr(ask, "verb", type(ask).__name__), timeout) for ask in asks.values())
        return plain(asks, timeout)

    monkeypatch.setattr(transport, "ask", ask)
    cluster = Cluster(transport, timeout=50.0)
    cluster.build_index("ivf", recall=0.9)
    cluster.count()
    assert allowed == [("Describe", 50.0), ("build_index", 3600.0), ("Describe", 50.0), ("count", 50.0)]


def test_a_closed_cluster_raises_closed_and_closes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, count = shards(subset(None, np.arange(40), "dot")), list[int]()
    real = transport.close

    def counted() -> None:
        count.append(1)
        real()

    monkeypatch.setattr(transport, "close", counted)
    cluster = Cluster(transport)
    asked = cluster.attend(torch.ones(1, D, requires_grad=True))
    for _ in range(2):
        cluster.close()
    assert count == [1]
    for ask in (cluster.count, cluster.refresh, asked.output.sum().backward):
        with pytest.raises(Closed, match="the cluster was closed; open it again"):
            ask()
