"""Jobs on Ray: bulk ingest in one commit or none, doubling of shards, training."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")
pytest.importorskip("ray", reason="workers are Ray's")

import lance
import pyarrow as pa
import ray
import torch

import softdb
from softdb import cluster, errors, train
from softdb.cluster.placement import shard_of

job = import_module("softdb.cluster.ingest")  # the name is the function's, too

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray has warnings of its own, also in threads

N, DIM = 200, 8
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def connected() -> Iterator[None]:
    for again in (True, False):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
            break
        except Exception as error:
            ray.shutdown()
            if not again:
                pytest.skip(f"Ray does not start here: {error}")
    yield
    ray.shutdown()


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cluster.TableCluster]:
    monkeypatch.setattr(job, "_rows", lambda _: 50)
    words: dict[str, Any] = {"dim": DIM, "shards": 4, "ids": "int", "cache": tmp_path / "cache"}
    with cluster.create(tmp_path / "t.lance", **words) as db:
        yield db


def rows(ids: range | list[int], title: str = "title") -> Any:
    return ray.data.from_items([{"id": i, "key": KEYS[i % N].tolist(), "title": f"{title} {i}"} for i in ids])


def test_workers_write_and_one_commit_shows_it(db: cluster.TableCluster) -> None:
    db.insert([N], KEYS[:1])
    version = db.version
    assert cluster.ingest(db.url, rows(range(N))) == version + 1 == db.refresh()
    assert (len(db), db[7].payload) == (N + 1, {"title": "title 7"})
    np.testing.assert_array_equal(db.get(list(range(N))).keys, KEYS)
    fragments = lance.dataset(db.url).get_fragments()
    assert len(fragments) == 1 + N // 50
    for fragment in fragments:  # the rows of a shard lie side by side, of as many shards as there may be
        ids = fragment.to_table(columns=["id"])["id"].to_pylist()
        for shards in (2, 4, 8):
            assert (np.diff(shard_of(ids, shards)) != 0).sum() < shards
    with pytest.raises(errors.DuplicateId, match="id 3 is stored already"):
        db.insert([3], KEYS[:1])  # later writers are checked against the ingested ids
    assert cluster.ingest(db.url, rows([7, N + 7], "new"), upsert=True) == version + 2 == db.refresh()
    assert (len(db), db[7].payload, db[8].payload) == (N + 2, {"title": "new 7"}, {"title": "title 8"})


@pytest.mark.parametrize("upsert", [False, True])
@pytest.mark.parametrize(("count", "blocks"), [(3, 8), (0, 1), (N, 3)])
def test_the_driver_gets_neither_rows_nor_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upsert: bool, count: int, blocks: int
) -> None:
    """Whether there are more blocks than rows, or no row."""
    monkeypatch.setattr(job, "_BUCKET", 10)
    ids, fetched, get, batches = (
        [f"needle {i}" for i in range(count)],
        list[bytes](),
        ray.get,
        ray.data.Dataset.iter_batches,
    )

    def recorded(*args: Any, **words: Any) -> Any:
        results = get(*args, **words)
        fetched.append(pickle.dumps(results))
        return results

    def recorded_batches(*args: Any, **words: Any) -> Any:
        for table in batches(*args, **words):
            fetched.append(pickle.dumps(table))
            yield table

    schema = pa.schema({"id": pa.string(), "key": pa.list_(pa.float32())})
    table = pa.table([ids, KEYS[:count].tolist()], schema=schema)
    with cluster.create(tmp_path / "t.lance", dim=DIM, shards=2, cache=tmp_path / "cache") as db:
        db.insert(["first"], KEYS[:1])
        data = ray.data.from_arrow(
            [table.slice(i * count // blocks, (i + 1) * count // blocks - i * count // blocks) for i in range(blocks)]
        )
        with monkeypatch.context() as patch:
            patch.setattr(ray, "get", recorded)
            patch.setattr(ray.data.Dataset, "iter_batches", recorded_batches)
            assert cluster.ingest(db.url, data, upsert=upsert) >= db.version
        assert fetched
        assert not any(b"needle" in each for each in fetched)
        db.refresh()
        assert (len(db), all(name in db for name in ids)) == (count + 1, True)


def test_ids_are_compared_in_buckets_again_after_another_write(
    db: cluster.TableCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another handle inserts an id of the job between the comparison and the commit."""
    monkeypatch.setattr(job, "_BUCKET", 10)
    commit, others = lance.LanceDataset.commit, iter([[500], [7]])

    def overtaken(*args: Any, **words: Any) -> Any:
        monkeypatch.setattr(lance.LanceDataset, "commit", commit)
        db.insert(next(others), KEYS[:1])
        return commit(*args, **words)

    monkeypatch.setattr(lance.LanceDataset, "commit", overtaken)
    cluster.ingest(db.url, rows(range(100, N)))
    assert db.refresh() == db.table.newest()
    assert len(db) == N - 100 + 1
    monkeypatch.setattr(lance.LanceDataset, "commit", overtaken)
    with pytest.raises(errors.DuplicateId, match="ingest: id 7 is stored already"):
        cluster.ingest(db.url, rows(range(100)))
    db.refresh()
    assert len(db) == N - 100 + 2


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([*range(N), 7], errors.DuplicateId, "ingest: id 7 comes twice"),
        ([7, 7, *range(50, 60)], errors.DuplicateId, "ingest: id 7 comes twice.*nothing was written"),
        ([*range(50), 500], errors.DuplicateId, "ingest: id 500 is stored already"),
        ([*range(50), -1], errors.BadInput, "ingest: .*keys hold NaN.*nothing was written"),
        ([*range(25), -2, *range(25, 50)], errors.BadInput, "ingest: the row with id -2: .*nothing was written"),
    ],
)
def test_a_refused_job_leaves_the_table_unchanged(
    db: cluster.TableCluster, ids: list[int], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.insert([500], KEYS[:1])
    version = db.version
    data = rows(ids)
    wrong = {-1: [float("nan")] * DIM, -2: [1.0, 2.0]}
    if wrong.keys() & {*ids}:
        data = data.map(lambda row: {**row, "key": list(wrong.get(row["id"], row["key"]))})
    for upsert in (False, True) if error is errors.BadInput else (False,):
        with pytest.raises(error, match=match):
            cluster.ingest(db.url, data, upsert=upsert)
    assert (db.refresh(), len(db)) == (version, 1)


def test_a_job_killed_before_its_commit_leaves_the_table_unchanged(
    db: cluster.TableCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> int:
        raise InterruptedError

    version = db.version
    with monkeypatch.context() as patch:
        patch.setattr(job, "append", dies)
        with pytest.raises(InterruptedError):
            cluster.ingest(db.url, rows(range(N)))
    assert (db.refresh(), len(db)) == (version, 0)
    cluster.ingest(db.url, rows(range(N)))
    db.refresh()
    assert len(db) == N


def test_actors_double_their_shards_and_train(tmp_path: Path) -> None:
    """On Ray: twice as many shards, with the indexes of the old ones; a projection as one database brings it."""
    n = 2400
    words: dict[str, Any] = {"on": "ray", "timeout": 60.0, "cache": tmp_path / "cache"}
    keys = np.random.default_rng(1).normal(size=(n, DIM)).astype(np.float32)
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(DIM, DIM)))[0]  # which a projection can turn back
    queries = torch.tensor(keys[:200] @ turn).float()
    url = str(tmp_path / "t.lance")
    with softdb.open(None, dim=DIM) as one, cluster.create(url, dim=DIM, shards=1, ids="int", **words) as db:
        for each in (one, db):
            each.insert(range(n), keys)
        db.build_index("ivf", recall=0.9)
        assert db.grow() == 2
        index = db.stats().index
        assert index is not None
        assert (index.kind, db.shards, len(db), db.version) == ("ivf", 2, n, db.table.newest())
        db.delete([n - 1])
        one.delete([n - 1])
        assert db.search(keys[:5], k=4, exact=True).ids == one.search(keys[:5], k=4, exact=True).ids
        words = {"epochs": 6, "patience": None, "lr": 0.03, "temperature": 1.0, "batch_size": 32}
        fitted = [train.fit(each, queries, list(range(200)), **words) for each in (one, db)]
        trained_alike(*fitted)
    cluster.stop(url)


def trained_alike(one: train.Fitted, other: train.Fitted) -> None:
    """Assert that they learned something, and the same but for rounding."""
    assert one.after.mrr_100 > one.before.mrr_100 + 0.1
    assert other.after == pytest.approx(one.after, abs=0.03)
    assert (other.projection.weight - one.projection.weight).norm() <= 1e-3 * one.projection.weight.norm()


NOTEBOOK = """
import sys, numpy as np, ray, torch
import softdb
from softdb import cluster

class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
    def forward(self, queries, keys):
        return (queries @ keys.mT).tanh() * self.scale

ray.init(address=sys.argv[1], log_to_driver=False)
keys = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
words = {"dim": 4, "shards": 2, "ids": "int", "on": "ray", "timeout": 120}
with softdb.open(None, dim=4) as alone, cluster.create(sys.argv[2], **words) as db:
    for each in (alone, db):
        each.insert(range(40), keys)
    for score in (Half(), lambda queries, keys: (queries @ keys.mT).tanh()):
        answers = [each.attend(torch.ones(1, 4), score=score).output for each in (alone, db)]
        torch.testing.assert_close(*answers)
cluster.stop(sys.argv[2])
print("equal")
"""


def test_stop_starts_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cluster(address: str, **_: Any) -> None:
        raise ConnectionError(address)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", no_cluster)
    assert cluster.stop(tmp_path / "t.lance") == 0


def test_scores_of_a_notebook_travel_with_their_code(tmp_path: Path) -> None:
    """Stand in for a notebook: a script, whose classes no actor can import."""
    address = ray.get_runtime_context().gcs_address
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", NOTEBOOK, address, str(tmp_path / "t.lance")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
