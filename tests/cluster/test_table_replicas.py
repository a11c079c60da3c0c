"""A second directory of the same records takes over between and within questions, and before a gradient."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from contracts.cluster import near
from lance_tables import DIM, batch, made

import softdb
from softdb import errors
from softdb.cluster import table_core
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import LocalTable
from softdb.cluster.shard import (
    NEWEST,
    Backward,
    CallVerb,
    Draw,
    Gather,
    Locate,
    Message,
    Nearest,
    PassOver,
    Refresh,
    ResolveRows,
    Sample,
    ScanRows,
    ShardReplies,
    of_records,
)
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.table_core import TableCore
from softdb.lance_table.truth import Truth

N, SHARDS = 3000, 2  # an index needs 1,000 a shard


class Replicas:
    """Two directories of each shard; `first` answers. `at` is a kind of message before which the other takes over."""

    collective = False

    def __init__(self, copies: list[LocalTable]) -> None:
        self.copies, self.shards, self.first = copies, copies[0].shards, 0
        self.at: type[Message] | None = None
        self.asked: list[type[Message]] = []

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        kinds = {type(ask) for ask in asks.values()}
        self.asked += kinds
        if self.at in kinds:
            self.first, self.at = 1 - self.first, None
        return self.copies[self.first].ask(asks, timeout)

    def anyone(self, more: bool) -> bool:
        return more

    def close(self) -> None:
        for copy in self.copies:
            copy.close()


class World(NamedTuple):
    """A handle whose shards lie in two directories each, and the same records in one database."""

    db: TableCluster
    replicas: Replicas
    one: softdb.SoftDB
    queries: torch.Tensor


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """The second directory was made later, and numbers its rows differently."""
    truth, random = made(str(tmp_path / "t.lance"), SHARDS, value_dim=3), np.random.default_rng(1)
    names, values = [f"r{i}" for i in range(N)], random.normal(size=(N, 3)).astype(np.float32)
    truth.write(truth.table(batch(truth, names, values=values)), upsert=False)

    def connect(table: Truth) -> Replicas:
        early = Hydrated(table, tmp_path / "early", range(SHARDS), table.newest())
        table.delete(list[int | str](names[: N // 4]))
        early.follow(table.newest())
        late = Hydrated(table, tmp_path / "late", range(SHARDS), table.newest())
        return Replicas([LocalTable(early), LocalTable(late)])

    with (
        TableCluster(TableCore(connect, truth, 30.0, False, "rw", None)) as db,
        softdb.open(None, **truth.schema.described) as one,
    ):
        for part in db.scan():
            one.insert(part.ids, part.keys, part.values, part.payloads)
        replicas: Any = db.caller.transport
        early, late = (here.hydrated.databases[0] for here in replicas.copies)
        some = [name for name in one.search(np.ones(DIM), N).ids[0] if (early.core.stored([name]))[0]]
        assert (early.core.located(some) != late.core.located(some)).any()
        yield World(db, replicas, one, torch.from_numpy(random.standard_normal((4, DIM))))


def same(world: World, ask: Callable[[Any, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    """Numbers and gradients are those of one database."""
    found = []
    for db in (world.db, world.one):
        leaf = world.queries.clone().requires_grad_()
        numbers = ask(db, leaf)
        found.append((*numbers, torch.autograd.grad(torch.stack([number.sum() for number in numbers]).sum(), leaf)[0]))
    for mine, true in zip(*found, strict=True):
        near(mine, true, 1e-9)


def exactly(db: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pooled = db.attend(x, temperature=0.7)
    return pooled.output.square(), pooled.lse


def truncated(db: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pooled = db.attend(x, k=7)
    return pooled.output.square(), pooled.lse


def nearest(db: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (db.search(x, 5).scores,)


def compared(db: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (softdb.nn.retrieval_loss(db, x, [f"r{i}" for i in range(2000, 2004)], temperature=0.5),)


def indexed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws need an index, and else more records; the replica that answers stays."""
    for module in ("softdb.attend.rounds", "softdb.index.finder"):
        monkeypatch.setattr(sys.modules[module], "FEWEST", 100)
    for _ in world.replicas.copies:
        world.db.build_index("ivf", recall=0.9)
        world.replicas.first = 1 - world.replicas.first


@pytest.mark.parametrize(
    ("ask", "at"),
    [
        (exactly, PassOver), (exactly, Backward), (truncated, Nearest), (truncated, Gather),
        (nearest, Nearest), (nearest, Gather), (compared, PassOver), (compared, Backward),
    ],
)  # fmt: skip
def test_another_directory_answers_on(world: World, ask: Any, at: type[Message]) -> None:
    """A directory lost within a question, or before its gradient, is replaced without a new question."""
    world.replicas.at, world.replicas.asked = at, []
    same(world, ask)
    assert world.replicas.first == 1
    assert Refresh not in world.replicas.asked


def test_records_come_by_their_ids(world: World) -> None:
    hits, true = (db.search(world.queries, 5) for db in (world.db, world.one))
    world.replicas.at = ResolveRows
    assert hits.payloads == true.payloads
    assert world.replicas.first == 1
    assert world.db.search(world.queries, 5).payloads == true.payloads
    assert hits[0][0].payload == true[0][0].payload
    world.replicas.at = CallVerb
    assert world.db.get(["r990", "r2000"]).payloads == world.one.get(["r990", "r2000"]).payloads
    assert world.replicas.first == 0
    assert len(world.db) == len(world.one)


def test_hits_name_the_records_of_their_version(world: World) -> None:
    """A replica must not answer for them with what took their place."""
    hits, name = world.db.search(world.queries, 1), world.one.search(world.queries, 1).ids[0][0]
    true = world.one.search(world.queries, 1)
    world.db.upsert([name], np.zeros((1, DIM)), np.zeros((1, 3)), ["another"])
    for first in (1, 0):
        world.replicas.first = first
        world.db.refresh()
        assert world.db.search(world.queries, 1, where={"$id": name}).payloads[0] == ["another"]
        world.replicas.first = first
        assert hits.payloads == true.payloads
    world.replicas.first = 1
    with pytest.raises(errors.StaleRead, match="have new numbers"):
        world.db.core.values_at(hits.rows.numpy())
    world.replicas.first = 0
    with pytest.raises(errors.StaleRead, match="deleted or replaced"):
        world.db.core.values_at(hits.rows.numpy())


def test_draws_are_of_the_directory_that_drew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate is repeated; its gradient needs the same draws and raises."""
    indexed(world, monkeypatch)
    world.replicas.at = Draw
    leaf = world.queries.clone().requires_grad_()
    estimate = world.db.attend(leaf, rtol=1e-9, max_draws=20)
    assert world.replicas.first == 1
    assert not estimate.exact.any()
    world.replicas.first = 0
    with pytest.raises(errors.StaleRead, match="rebuilt, or a replica answers"):
        torch.autograd.grad(estimate.output.sum(), leaf, retain_graph=True)
    world.replicas.first = 1
    assert torch.autograd.grad(estimate.output.sum(), leaf)[0].norm() > 0


def test_samples_are_drawn_in_one_directory(world: World) -> None:
    for at in (PassOver, Sample, Gather):
        world.replicas.at = at
        drawn = world.db.sample(world.queries[:1], 50, generator=torch.Generator().manual_seed(0))
        keys = world.one.get(drawn.hits.ids[0]).keys.double()
        lse = world.one.attend(world.queries[:1]).lse
        near(drawn.log_prob[0], keys @ world.queries[0] - lse, 1e-9)


@pytest.mark.parametrize("at", [ScanRows, Locate, Draw, PassOver])
def test_a_replica_that_is_behind_catches_up(world: World, at: type[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refreshes go to the replica that answers; the other lacks the later writes."""
    world.db.insert(["new"], np.full((1, DIM), 3), np.ones((1, 3)))
    assert len({here.hydrated.version(0) for here in world.replicas.copies}) == 2
    world.replicas.first = 1
    if at is ScanRows:
        assert len(next(world.db.scan())) > 1
    elif at is Locate:
        assert (world.db.core.located(["new"]) >= 0).all()
    elif at is Draw:
        indexed(world, monkeypatch)
        assert not world.db.attend(world.queries, rtol=1e-9, max_draws=20).exact.any()
    else:
        assert world.db.attend(world.queries).n_pooled.tolist() == [len(world.one) + 1] * len(world.queries)
    assert "new" in world.db
    assert {here.hydrated.version(0) for here in world.replicas.copies} == {world.db.version}


def test_no_reader_goes_back_to_an_older_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that cannot catch up does not take back the version."""
    world.db.insert(["new"], np.full((1, DIM), 3), np.ones((1, 3)))
    version = world.db.version
    world.replicas.first = 1
    monkeypatch.setattr(Hydrated, "follow", lambda *_: None)
    for _ in range(2):
        with pytest.raises(errors.StaleRead):
            world.db.attend(world.queries)
        with pytest.raises(errors.StaleRead, match="this handle has seen"):
            world.db.refresh()
        assert world.db.version == version
    world.replicas.first = 0
    assert "new" in world.db


def test_a_question_is_asked_up_to_three_times_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas may take over one after the other, each without the version until it is told to build it."""
    plain = world.replicas.ask

    def losing(asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        if PassOver in {type(ask) for ask in asks.values()} and next(losses, None) is not None:
            raise errors.StaleRead("shard 1 no longer serves this version")
        return plain(asks, timeout)

    monkeypatch.setattr(world.replicas, "ask", losing)
    losses = iter(range(3))
    assert torch.equal(world.db.attend(world.queries).lse, world.db.attend(world.queries).lse)
    losses = iter(range(4))
    with pytest.raises(errors.StaleRead, match="no longer serves"):
        world.db.attend(world.queries)


def test_no_reader_moves_to_a_newer_version_by_itself(world: World) -> None:
    """Shards that another handle has brought on still answer this one at its version."""
    version, shards = world.db.version, world.replicas.copies[0].hydrated
    world.db.table.delete(["r2000"])
    shards.follow(world.db.table.newest())
    same(world, exactly)
    assert world.db.search(world.queries).ids == world.one.search(world.queries).ids
    assert "r2000" in world.db
    assert world.db.version == version
    assert world.db.refresh() == version + 1
    assert "r2000" not in world.db


def test_a_refresh_ends_with_every_shard_at_one_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another handle brings one of them on meanwhile."""
    plain, early, late = world.replicas.ask, *world.replicas.copies
    turns = iter(range(3))

    def overtaken(asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        if Refresh not in {type(ask) for ask in asks.values()} or next(turns, 3) > 2:
            return plain(asks, timeout)
        actual = early.ask({0: asks[0]}, timeout).replies
        world.db.table.write(world.db.table.table(batch(world.db.table, ["more"], values=np.ones((1, 3)))), upsert=True)
        actual |= late.ask({1: Refresh(NEWEST)}, timeout).replies
        return ShardReplies(actual, {})

    monkeypatch.setattr(world.replicas, "ask", overtaken)
    version = world.db.refresh()
    assert {of_records(one.version) for one in world.db.caller.known.values()} == {version}
    assert version == world.db.table.newest()
    monkeypatch.setattr(table_core, "_TRIES", 2)
    turns = iter(range(3))
    with pytest.raises(errors.StaleRead, match="changed 2 times"):
        world.db.refresh()


def test_a_table_replaced_by_another_is_reported(world: World) -> None:
    shutil.rmtree(world.db.url)
    made(world.db.url, SHARDS, value_dim=3)
    world.db.table._opened = None
    with pytest.raises(errors.StaleRead, match="another table has replaced"):
        world.db.refresh()
