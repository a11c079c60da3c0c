"""What operators see of a table's shards: statistics, Ray's metrics, and lines in the log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from softdb import cluster
from softdb.cluster import metrics
from softdb.cluster.local import LocalTable
from softdb.cluster.table_cluster import TableCluster

KEYS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[TableCluster]:
    with cluster.create(tmp_path / "t.lance", dim=4, shards=2, cache=tmp_path / "cache") as db:
        db.insert([f"r{i}" for i in range(50)], KEYS)
        yield db


def test_statistics_tell_of_each_shard(db: TableCluster) -> None:
    for _ in range(7):
        db.search(KEYS[:1])
    shards = db.stats().shards
    assert [report.shard for report in shards] == [0, 1]
    assert sum(report.records for report in shards) == 50
    assert sum(report.bytes for report in shards) == db.stats().bytes > 0
    assert {report.version for report in shards} == {db.version}
    assert {(report.lag, report.index, report.live_recall) for report in shards} == {(0, None, None)}
    assert all(report.answered >= 8 and 0 < report.p50 <= report.p99 < 60 for report in shards)
    db.table.delete(["r1"])
    assert {report.lag for report in db.stats().shards} == {1}
    db.refresh()
    assert {report.lag for report in db.stats().shards} == {0}
    assert "shards" in db.stats().asdict()
    lines = dict(db.stats().lines())
    assert lines["shards.1"].startswith(f"shard 1, node {shards[1].node}, version {db.version}, lag 0, served ")


class Metric:
    """Stand-in for a metric of Ray."""

    every: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, *_: Any) -> None:
        self.values: list[tuple[float, tuple[str, ...]]] = []
        Metric.every[name] = self

    def note(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tuple(tags.values())))

    inc = observe = set = note


def test_an_actor_exports_metrics(db: TableCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = ModuleType("ray")
    ray.is_initialized = lambda: True
    ray.get_runtime_context = lambda: SimpleNamespace(get_actor_id=lambda: "actor")
    ray.util = ModuleType("ray.util")
    ray.util.metrics = SimpleNamespace(Counter=Metric, Histogram=Metric, Gauge=Metric)
    for name, module in (("ray", ray), ("ray.util", ray.util), ("ray.util.metrics", ray.util.metrics)):
        monkeypatch.setitem(sys.modules, name, module)
    metrics._exported.cache_clear()
    try:
        db.search(KEYS[:1])
        db.stats()
    finally:
        metrics._exported.cache_clear()
    every, url = Metric.every, db.url
    assert {tags for _, tags in every["softdb_queries"].values} >= {(url, "0", "Nearest"), (url, "1", "Nearest")}
    assert all(value > 0 for value, _ in every["softdb_seconds"].values)
    assert sorted(every["softdb_version"].values) == [(db.version, (url, "0")), (db.version, (url, "1"))]
    assert sorted(every["softdb_lag"].values) == [(0, (url, "0")), (0, (url, "1"))]
    assert every["softdb_recall"].values == [], "there is no index"


def test_a_rebuilt_shard_is_logged(db: TableCluster, caplog: pytest.LogCaptureFixture) -> None:
    transport = db.caller.transport
    assert isinstance(transport, LocalTable)
    transport.hydrated.remake(1)
    assert f"shard 1 of {db.url} was rebuilt at version {db.version}" in caplog.text
