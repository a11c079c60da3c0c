"""What a cluster must keep over every transport, written once: a transport's tests inherit these."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import softdb
from contracts.cluster_hosts import nbytes
from softdb import scores
from softdb.cluster.handle import Cluster
from softdb.cluster.shard import Message, ShardReplies, Transport
from softdb.database import Verbs
from softdb.errors import BadInput, Closed, ShardUnavailable, UnknownId

N, D, V, Q = 1200, 8, 4, 5
ASKED: list[dict[str, Any]] = [
    {"k": 10}, {"k": 3, "offset": 2}, {"k": 6, "where": {"third": 2}}, {"k": 9, "exclude_ids": [4, 9]},
]  # fmt: skip
DIAL = {torch.float32: (1e-5, 5e-6), torch.float64: (1e-9, 1e-9)}  # of output and lse, and of gradients


class World(NamedTuple):
    """One database and a cluster with equal records."""

    one: softdb.SoftDB
    folders: list[Path]
    queries: Tensor


def subset(
    path: Path | None, which: np.ndarray, metric: str, n: int = N, num_classes: int | None = None
) -> softdb.SoftDB:
    """Some of n records, every key four times; ids are numbers in the order of insertion."""
    random = np.random.default_rng(3)
    keys = random.standard_normal((-(-n // 4), D)).astype(np.float32).repeat(4, 0)[:n]
    values: Any = random.standard_normal((n, V)).astype(np.float32)
    width = {"value_dim": V}
    if num_classes:
        values, width = random.integers(0, num_classes, n), {"num_classes": num_classes}
    db = softdb.open(path, dim=D, metric=metric, **width)  # type: ignore[arg-type]
    if len(which):
        payloads = [{"third": int(i % 3)} for i in which]
        db.insert(which.tolist(), keys[which], values[which], payloads)
    return db


class Counted:
    """A transport that adds up what travels, and can lose shards."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.shards, self.collective = inner, inner.shards, inner.collective
        self.up, self.down, self.lost = 0, 0, set[int]()

    def ask(self, asks: Mapping[int, Message], timeout: float) -> ShardReplies:
        answers = self.inner.ask({shard: ask for shard, ask in asks.items() if shard not in self.lost}, timeout)
        self.up, self.down = self.up + nbytes(list(asks.values())), self.down + nbytes(list(answers.replies.values()))
        return answers._replace(missing=answers.missing | {shard: "lost" for shard in asks if shard in self.lost})

    def anyone(self, more: bool) -> bool:
        return self.inner.anyone(more)

    def close(self) -> None:
        self.inner.close()


def near(found: Tensor, true: Tensor, dial: float) -> None:
    """Equal, relative to the largest number."""
    off = float((found.detach() - true.detach()).abs().max() / true.detach().abs().max().clamp(min=1e-30))
    assert off <= dial, f"off by {off:.2g}, {dial:g} is allowed"


def differentiated(db: Verbs, queries: Tensor, **words: Any) -> tuple[Tensor, ...]:
    """Output, lse, and the gradients of queries and of the score's parameters."""
    leaf = queries.clone().requires_grad_()
    score = words.get("score")
    trained = list(score.parameters()) if isinstance(score, torch.nn.Module) else []
    pooled = db.attend(leaf, **words)
    loss = pooled.output.square().sum() + pooled.lse.sum()
    grads = torch.autograd.grad(loss, [leaf, *trained], allow_unused=True)
    return pooled.output, pooled.lse, *(grad for grad in grads if grad is not None)


class ClusterContract(abc.ABC):
    """Inherit, and say how folders of databases become a transport."""

    SHARDS: tuple[int, ...] = (1, 2, 4, 8)

    @abc.abstractmethod
    @contextlib.contextmanager
    def transport(self, folders: list[Path]) -> Iterator[Transport]:
        """Shard s of len(folders) is the database in folders[s]; closed afterwards."""

    @pytest.fixture(scope="class")
    @classmethod
    def build(cls, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
        worlds = dict[Any, World]()

        def world(shards: int, metric: str = "dot", num_classes: int | None = None) -> World:
            if (shards, metric, num_classes) not in worlds:
                folder, random = tmp_path_factory.mktemp("cluster"), np.random.default_rng(5)
                home = random.integers(0, shards, N)
                for shard in range(shards):
                    subset(folder / str(shard), np.flatnonzero(home == shard), metric, num_classes=num_classes).close()
                one = subset(None, np.arange(N), metric, num_classes=num_classes)
                folders = [folder / str(shard) for shard in range(shards)]
                queries = torch.from_numpy(random.standard_normal((Q, D)))
                worlds[shards, metric, num_classes] = World(one, folders, queries)
            return worlds[shards, metric, num_classes]

        return world

    @pytest.fixture
    def joined(self) -> Iterator[Callable[..., Cluster]]:
        with contextlib.ExitStack() as stack:
            yield lambda world, **how: Cluster(stack.enter_context(self.transport(world.folders)), **how)

    @pytest.fixture
    def pair(self, build: Any, joined: Any) -> Callable[..., tuple[softdb.SoftDB, Cluster, Tensor]]:
        def made(shards: int, *what: Any, **how: Any) -> tuple[softdb.SoftDB, Cluster, Tensor]:
            world = build(shards, *what)
            return world.one, joined(world, **how), world.queries

        return made

    # -- equal to one database ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_answers_and_gradients_are_those_of_one_database(self, pair: Any, metric: str, dtype: torch.dtype) -> None:
        for shards in self.SHARDS:
            one, cluster, queries = pair(shards, metric)
            asked, dials = queries.to(dtype), (*[DIAL[dtype][0]] * 2, DIAL[dtype][1])
            for words in ({}, {"where": {"third": 1}, "temperature": 0.3}, {"weights": "uniform"}, {"k": 7}):
                both = (differentiated(db, asked, **words) for db in (cluster, one))
                for actual, true, dial in zip(*both, dials, strict=False):
                    near(actual, true, dial)

    @pytest.mark.parametrize(
        "score",
        [
            scores.Gaussian(0.9),
            scores.General(D, D).double(),
            scores.Additive(D, D, 4).double(),
            scores.Cosine(),
            scores.Laplacian(1.0),
        ],
        ids=lambda score: type(score).__name__,
    )
    def test_scores_that_learn(self, pair: Any, score: Any) -> None:
        one, cluster, queries = pair(self.SHARDS[-1], "l2")
        actual, true = (differentiated(db, queries, score=score) for db in (cluster, one))
        assert len(actual) == len(true)
        for mine, own in zip(actual, true, strict=True):
            near(mine, own, 1e-9)

    @pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
    @pytest.mark.parametrize("shape", [(), (Q,)], ids=["scalar", "queries"])
    def test_temperatures_that_learn(self, pair: Any, metric: str, shape: tuple[int, ...]) -> None:
        one, cluster, queries = pair(self.SHARDS[-1], metric)
        heat = (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0))).double().requires_grad_()
        for score, words in ((None, {}), (None, {"k": 7}), (scores.Laplacian(1.0), {"weights": "softmax"})):
            differing = []
            for db in (cluster, one):
                answers = differentiated(db, queries, temperature=heat, score=score, **words)
                pooled = db.attend(queries, temperature=heat, score=score, **words)
                loss = pooled.output.square().sum() + pooled.lse.sum()
                differing.append((*answers, torch.autograd.grad(loss, heat)[0]))
            for mine, own in zip(*differing, strict=True):
                near(mine, own, 1e-9)
        samples = cluster.sample(queries, 4, temperature=heat)
        log_z = one.log_partition(queries, temperature=heat).value
        scored = one.search(queries, N, exact=True)
        for i, own in enumerate(samples.hits.ids):
            places = [scored.ids[i].index(name) for name in own]
            logits = scored.scores[i, places] / heat.expand(Q)[i]
            near(samples.log_prob[i], logits - log_z[i], 1e-9)
        if metric != "l2":
            return
        (mine,), (own,) = (
            [e.scores for e in db.attend(queries[:1], temperature=heat.reshape(-1)[:1]).explain(3)]
            for db in (cluster, one)
        )
        assert mine == pytest.approx(own, rel=1e-9)

    @pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
    def test_the_nearest_are_those_of_one_database_ties_too(self, pair: Any, metric: str) -> None:
        for shards in self.SHARDS:
            one, cluster, queries = pair(shards, metric)
            for words in (
                {"k": 10},
                {"k": 3, "offset": 2},
                {"k": 6, "where": {"third": 2}},
                {"k": 9, "exclude_ids": [4, 9]},
            ):
                actual, true = (db.search(queries.float(), exact=True, **words) for db in (cluster, one))
                assert actual.ids == true.ids, (shards, words)
                assert actual.payloads == true.payloads
                near(actual.scores, true.scores, 1e-6)
        within = {"dot": 1.5, "cosine": 0.6, "l2": 2.0}[metric]
        actual, true = (db.search(queries.float(), radius=within) for db in (cluster, one))
        assert actual.ids == true.ids
        assert cluster.count_within(queries, within).value.tolist() == [len(mine) for mine in true.ids]
        leaf = queries.clone().requires_grad_()
        mine, own = (torch.autograd.grad(db.search(leaf, 5).scores.sum(), leaf)[0] for db in (cluster, one))
        near(mine, own, 1e-9)

    @pytest.mark.parametrize("weights", ["argmax", "entmax15", "sparsemax"])
    def test_sparse_weights(self, pair: Any, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
        one, cluster, queries = pair(self.SHARDS[-1])
        for actual, true in zip(*(differentiated(db, queries, weights=weights) for db in (cluster, one)), strict=True):
            near(actual, true, 1e-9)
        if weights != "argmax":
            monkeypatch.setattr(import_module("softdb.attend.exact"), "MOST", 64)
            with pytest.raises(BadInput, match=f"share the weight of {weights}"):
                cluster.attend(queries, weights=weights, temperature=1e6)

    def test_labels_densities_explanations(self, pair: Any) -> None:
        one, cluster, queries = pair(self.SHARDS[-1], "l2", 3)
        for actual, true in zip(*(differentiated(db, queries) for db in (cluster, one)), strict=True):
            near(actual, true, 1e-9)
        pooled, log_p = one.attend(queries, k=9).output, one.log_density(queries, scores.Gaussian(0.8)).value
        near(cluster.attend(queries, k=9).output, pooled, 1e-9)
        near(cluster.log_density(queries, scores.Gaussian(0.8)).value, log_p, 1e-6)
        for told, known in zip(*(db.attend(queries).explain(4) for db in (cluster, one)), strict=True):
            assert told.ids == known.ids
            assert told.payloads == known.payloads
            assert (told.mass, told.effective) == pytest.approx((known.mass, known.effective), rel=1e-6)

    def test_samples(self, pair: Any) -> None:
        one, cluster, queries = pair(self.SHARDS[-1])
        leaf = queries[:1].clone().requires_grad_()
        drawn = cluster.sample(leaf, 4000, temperature=0.5, generator=torch.Generator().manual_seed(0))
        names = np.array(drawn.hits.ids[0])
        whole, keys = one.attend(queries[:1], temperature=0.5, need_weights=True), one.get(names.tolist()).keys.double()
        logs = keys @ queries[0] / 0.5 - whole.lse
        near(drawn.log_prob[0], logs, 1e-9)
        assert torch.autograd.grad(drawn.log_prob.sum(), leaf)[0].isfinite().all()
        assert whole.weights is not None
        expected = whole.weights[0].numpy()  # in the order of rows, which is that of the ids
        assert whole.hits is not None
        order = np.argsort(whole.hits.rows[0].numpy())
        counts, expected = np.bincount(names, minlength=N), expected[order]
        often = expected > 0.005
        chi = float((((counts - 4000 * expected) ** 2) / (4000 * expected))[often].sum())
        assert chi < often.sum() + 5 * np.sqrt(2 * often.sum()), "a shard's share of the draws is not its share of Z"

    def test_records(self, pair: Any) -> None:
        one, cluster, _ = pair(self.SHARDS[-1])
        assert (len(cluster), cluster.count({"third": 1}), cluster.stats().records) == (N, one.count({"third": 1}), N)
        assert cluster.get([7, 3, 7]).ids == [7, 3, 7]
        assert torch.equal(cluster.get([7, 3]).keys, one.get([7, 3]).keys)
        assert (3 in cluster, N in cluster, cluster[5].payload) == (True, False, {"third": 2})
        assert len(cluster.get([])) == 0
        with pytest.raises(UnknownId, match=f"id {N} is not stored"):
            cluster.get([3, N])
        for where in (None, {"third": 0}):
            scanned = [name for batch in cluster.scan(100, where) for name in batch.ids]
            assert sorted(scanned) == [name for batch in one.scan(1000, where) for name in batch.ids]
            assert cluster.to_arrow(where=where).sort_by("id").equals(one.to_arrow(where=where).sort_by("id"))
            ids = [name for batch in cluster.scan(100, where) for name in batch.ids]
            for limit, offset in ((5, 0), (7, N // 3), (None, N - 1), (N, 3), (4, 2 * N), (0, 0)):
                page = slice(offset, None if limit is None else offset + limit)
                assert cluster.get(where=where, limit=limit, offset=offset).ids == ids[page]
                batches = cluster.scan(250, where, limit=limit, offset=offset)
                assert [name for batch in batches for name in batch.ids] == ids[page]
        assert sorted(record.id for record in cluster) == [record.id for record in one]
        assert torch.equal(cluster.get().keys, one.get(cluster.get().ids).keys)
        assert cluster.get([7, 3, 9, 6, 7], {"third": 0}).ids == [3, 9, 6]
        assert cluster.get([7, 3, 9, 6], {"third": 0}, limit=1, offset=1).ids == [9]
        assert cluster.get([7, 3, 9], offset=5).ids == []
        with pytest.raises(UnknownId, match=f"id {N} is not stored"):
            cluster.get([3, N], {"third": 0}, limit=1)
        frame = cluster.to_pandas(["third", "id"], {"third": {"$ne": 2}}, limit=4)
        assert frame["id"].tolist() == cluster.get(where={"third": {"$ne": 2}}, limit=4).ids
        assert f"{N:,}" in cluster._repr_html_()
        assert cluster.core.header | {"fingerprint": None} == one.core.header | {"fields": (), "fingerprint": None}

    def test_modules_take_it_as_they_take_a_database(self, pair: Any) -> None:
        one, cluster, queries = pair(self.SHARDS[-1])
        positives: list[Any] = [1, [2, 3], 4, 5, [6, 700]]
        losses: list[Callable[[Any, Tensor], Tensor]] = [
            lambda db, x: softdb.nn.retrieval_loss(db, x, positives, temperature=0.3),
            lambda db, x: softdb.nn.retrieval_loss(db, x, positives, rtol=0.1),
            lambda db, x: softdb.nn.retrieval_loss(db, x, positives, k=20),
            lambda db, x: softdb.nn.info_nce(db, x, positives, negatives=4),
            lambda db, x: softdb.nn.pooled_loss(db, x, torch.ones(Q, V)),
        ]
        for loss in losses:
            leaf = queries.clone().requires_grad_()
            (mine, own), grads = (loss(db, leaf) for db in (cluster, one)), []
            near(mine, own, 1e-9)
            for one_loss in (mine, own):
                grads.append(torch.autograd.grad(one_loss, leaf)[0])
            near(grads[0], grads[1], 1e-8)
        torch.manual_seed(0)
        attention = softdb.nn.Attention(cluster, 16, 2, batch_first=True)
        twin = softdb.nn.Attention(one, 16, 2, batch_first=True)
        twin.load_state_dict(attention.state_dict())
        x = torch.randn(2, 3, 16)
        near(attention(x)[0], twin(x)[0], 1e-5)
        with pytest.raises(UnknownId, match="id -1 is not stored"):
            softdb.nn.retrieval_loss(cluster, queries, [1, 2, 3, 4, -1])
        with pytest.raises(BadInput, match="outside the filter"):
            softdb.nn.retrieval_loss(cluster, queries, [1, 2, 3, 4, 5], where={"third": 1})
        with pytest.raises(BadInput, match="every record in one place"):
            softdb.nn.hard_attention(cluster, queries)

    # -- what travels ------------------------------------------------------------------------------------------------

    def test_a_pass_sends_a_query_and_gets_a_state(self, build: Any) -> None:
        world = build(2)
        with self.transport(world.folders) as inner:
            cluster = Cluster(counted := Counted(inner))
            for where in (None, {"third": 1}):
                counted.up = counted.down = 0
                pooled = cluster.attend(world.queries.float().requires_grad_(), where=where)
                assert counted.up + counted.down <= 2 * 4 * Q * (D + V + 1)
                counted.up = counted.down = 0
                pooled.output.sum().backward()  # type: ignore[no-untyped-call]
                assert counted.up + counted.down <= 2 * 4 * Q * (2 * D + V + 1)

    # -- versions and failures ---------------------------------------------------------------------------------------

    def test_lost_shards_are_reported(self, build: Any) -> None:
        world = build(4)
        with self.transport(world.folders) as inner:
            lossy = Counted(inner)
            whole, partial = Cluster(lossy, timeout=5), Cluster(lossy, timeout=5, partial=True)
            lossy.lost = {1, 3}
            with pytest.raises(ShardUnavailable, match=r"attend: 2 of 4 shards did not answer .*shard 1: lost"):
                whole.attend(world.queries)
            pooled = partial.attend(world.queries)
            assert pooled.missing == (1, 3)
            assert not pooled.met.any()
            assert not pooled.exact.any()
            assert bool((pooled.bar == torch.inf).all())
            with pytest.raises(ShardUnavailable):
                softdb.nn.retrieval_loss(partial, world.queries, [1, 2, 3, 4, 5])
            assert partial.search(world.queries, 5).missing == (1, 3)
            assert partial.count_within(world.queries, 1.0).missing == (1, 3)
            estimate = partial.log_partition(world.queries)
            assert estimate.missing == (1, 3)
            assert not estimate.met.any()
            lossy.lost = {0, 1, 2, 3}
            with pytest.raises(ShardUnavailable, match="4 of 4"):
                partial.attend(world.queries)
            lossy.lost = set()
            assert partial.attend(world.queries).missing == ()

    def test_bad_input_is_typed(self, pair: Any) -> None:
        _, cluster, queries = pair(2)
        lock: Any = threading.Lock()  # it cannot be pickled
        for words, match in (
            ({"mask": np.ones(N, bool)}, "mask needs an order of rows"),
            ({"need_weights": True}, "a cluster does not gather"),
            ({"score": functools.partial(torch.matmul, out=lock)}, "cannot be sent to shards"),
            ({"score": 3}, "expected an object of softdb.scores"),
            ({"temperature": 0}, "temperature"),
            ({"rtol": 0.1, "score": scores.Laplacian(1.0)}, "no index can estimate"),
        ):
            with pytest.raises(BadInput, match=match):
                cluster.attend(queries, **words)
        alone: dict[str, Any] = {"texts": "x", "mode": "text", "fusion": "rrf", "diversity": 0.5, "group_by": "third"}
        for word, given in alone.items():
            with pytest.raises(BadInput, match=f"search: {word}: a cluster does not"):
                cluster.search(queries, **{word: given})
        with pytest.raises(TypeError, match="unexpected keyword argument 'near'"):
            cluster.search(queries, near=3)
        with pytest.raises(BadInput, match="8"):
            cluster.attend(torch.zeros(2, D + 1))
        with pytest.raises(softdb.BadFilter):
            cluster.attend(queries, where={"third": {"$near": 1}})
        with pytest.raises(BadInput, match="timeout"):
            Cluster(cluster.caller.transport, timeout=0)
        assert cluster.attend(queries[:0]).output.shape == (0, V)
        assert cluster.attend(queries[:0], rtol=0.1).output.shape == (0, V)
        cluster.close()
        with pytest.raises(Closed):
            cluster.attend(queries)
