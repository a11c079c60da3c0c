"""Every source under the contract of sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contracts.source import GONE, Array, D, LocalContract, N, SourceContract, T, World, close, database
from worlds import holding

import softdb
from softdb.attend import Columns, Request, Source
from softdb.cluster.caller import Caller
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.local import Local
from softdb.cluster.sharded import Sharded
from softdb.errors import BadInput
from softdb.index.query import Query
from softdb.nn import Memory, View
from softdb.scores import Dot
from softdb.weights import Softmax, Sparsemax


class TestStored(LocalContract):
    def make(self, keys: Array, values: Array) -> Source:
        db = database(keys, values)
        return db.core.source(db.core.view()[0])


class TestColumns(LocalContract):
    def make(self, keys: Array, values: Array) -> Source:
        live = np.arange(N) != GONE
        return Columns(torch.from_numpy(keys[live]), torch.from_numpy(values[live]))

    def ids(self) -> list[int]:
        return list(range(N - 1))


class TestEncoded(LocalContract):
    def make(self, keys: Array, values: Array) -> Source:
        encoder = torch.nn.Linear(D, D, bias=False)
        torch.nn.init.eye_(encoder.weight)
        return View(database(keys, values), encoder).request(torch.zeros(1, D), k=1)[1]

    def test_sparse_weights_are_proven_from_the_nearest(self, world: World, request_of_all: Request) -> None:
        """A pass over blocks that carry a graph knows softmax alone."""
        queries, (source, keys, values, _) = request_of_all.queries, world
        request = Request(queries, Dot(), Sparsemax(), T)
        plain = softdb.attention(
            queries, torch.from_numpy(keys), torch.from_numpy(values), score=Dot(), weights="sparsemax", temperature=T
        )
        close(source.exact(request).output, plain.numpy())
        with pytest.raises(BadInput, match="the weighting is sparsemax"):
            source.stream(request)


class TestParameters(LocalContract):
    def make(self, keys: Array, values: Array) -> Source:
        return Memory(database(keys, values)).source()


def sharded(keys: Array, values: Array) -> Sharded:
    """Two databases, each of every second record."""
    shards = []
    for shard in range(2):
        names = [name for name in range(N) if name != GONE and name % 2 == shard]
        db = holding(keys[names], values[names], ids=names)
        shards.append(DatabaseShard(db, shard, 2))
    return Sharded(Caller(Local(shards), 30.0, False), None)


class TestSharded(SourceContract):
    def make(self, keys: Array, values: Array) -> Source:
        return sharded(keys, values)

    def test_records_that_lie_elsewhere_are_not_listed(self, world: World) -> None:
        for ask in (lambda: world.source.live, lambda: world.source.blocks(1)):
            with pytest.raises(BadInput, match="are on a cluster's shards"):
                ask()


@pytest.mark.parametrize("where", ["database", "cluster"])
def test_hits_are_the_nearest_and_those_within_a_radius(where: str, rng: np.random.Generator) -> None:
    keys, values = (rng.standard_normal((N, width)).astype(np.float32) for width in (D, 3))
    queries = torch.from_numpy(rng.standard_normal((4, D)).astype(np.float32))
    metric, ids = softdb.check.Metric.DOT, np.array([name for name in range(N) if name != GONE])
    db = database(keys, values)
    source = db.core.source(db.core.view()[0]) if where == "database" else sharded(keys, values)
    scores = queries.numpy() @ keys[ids].T
    best = np.argsort(-scores, axis=1)
    actual = source.hits(Query(queries, 3, metric, offset=1, exact=True))
    assert actual.ids == ids[best[:, 1:4]].tolist()
    close(actual.scores, np.take_along_axis(scores, best[:, 1:4], 1))
    near = source.hits(Query(queries, 0, metric, least=0.5))
    assert near.ids == [ids[line][score[line] >= 0.5].tolist() for line, score in zip(best, scores, strict=True)]


def test_no_records() -> None:
    queries = torch.ones(2, D)
    request = Request(queries, Dot(), Softmax(), T)
    nothing = Columns(torch.zeros(0, D), torch.zeros(0, 2))
    assert nothing.exact(request).lse.isneginf().all()
    assert nothing.count_within(request, 0.0).value.tolist() == [0.0] * len(queries)
