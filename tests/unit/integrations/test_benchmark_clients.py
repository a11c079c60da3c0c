"""The clients for ann-benchmarks and VectorDBBench, driven in the order of these tools."""

from __future__ import annotations

import importlib
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import interfaces
import numpy as np
import pytest

from softdb.errors import BadInput, DuplicateId

DRAWN = np.random.default_rng(0).standard_normal((3000, 16)).astype(np.float32)
KEYS, QUERIES = DRAWN[:2900], DRAWN[2900:]


def imported(monkeypatch: pytest.MonkeyPatch, name: str, modules: tuple[str, ...]) -> Any:
    """A module of softdb.integrations; the package it is made for is the real one where that is installed."""
    if find_spec(modules[0].split(".")[0]) is None:
        for module in modules:
            parts = module.split(".")
            for i in range(1, len(parts)):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        for module in modules:
            monkeypatch.setitem(sys.modules, module, interfaces)
    monkeypatch.delitem(sys.modules, f"softdb.integrations.{name}", raising=False)
    return importlib.import_module(f"softdb.integrations.{name}")


@pytest.fixture
def ann(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(monkeypatch, "ann_benchmarks", ("ann_benchmarks.algorithms.base.module",))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = "vectordb_bench.backend.clients.api", "vectordb_bench.backend.filter"
    return imported(monkeypatch, "vectordbbench", modules)


def nearest(metric: str, queries: Any, keys: Any = KEYS, k: int = 10) -> Any:
    if metric == "l2":
        return np.square(queries[:, None] - keys[None]).sum(-1).argsort(axis=1)[:, :k]
    return (-(queries @ (keys / np.linalg.norm(keys, axis=1)[:, None]).T)).argsort(axis=1)[:, :k]


def recall_of(rows: Any, true: Any) -> float:
    return float(np.mean([len(set(ours) & set(theirs)) for ours, theirs in zip(rows, true, strict=True)])) / 10


@pytest.mark.parametrize(("metric", "kind"), [("angular", "flat"), ("euclidean", "flat"), ("angular", "ivf")])
def test_ann_benchmarks_runs(ann: Any, metric: str, kind: str) -> None:
    algorithm = ann.SoftDBAlgorithm(metric, kind)
    algorithm.fit(KEYS)
    true = nearest("l2" if metric == "euclidean" else "cosine", QUERIES)
    recalls, efforts = [], []
    for recall in (0.6, 0.98):
        algorithm.set_query_arguments(recall)
        rows = np.stack([algorithm.query(query, 10) for query in QUERIES])
        algorithm.batch_query(QUERIES, 10)
        np.testing.assert_array_equal(np.sort(rows), np.sort(algorithm.get_batch_results()))
        assert str(algorithm) == f"softdb ({kind}, recall {recall})"
        recalls.append(recall_of(rows, true))
        efforts.append(algorithm.get_additional().get("index_records_per_match", 0))
    assert recalls[1] >= 0.95
    assert recalls == [1, 1] if kind == "flat" else efforts[0] < efforts[1]
    algorithm.done()
    assert algorithm.db.closed


def test_unsupported_settings_of_ann_benchmarks_are_refused(ann: Any) -> None:
    with pytest.raises(BadInput, match="metric is 'jaccard'; choose one of 'angular', 'euclidean'"):
        ann.SoftDBAlgorithm("jaccard")
    algorithm = ann.SoftDBAlgorithm("angular", "trees")
    with pytest.raises(BadInput, match="trees"):
        algorithm.fit(KEYS)


def test_vectordbbench_loads_optimises_and_searches_by_copies(bench: Any, path: Path) -> None:
    config = bench.SoftDBConfig(path=str(path)).to_dict()
    case = bench.SoftDBCaseConfig(metric_type="COSINE", kind="ivf", recall=0.95, k=10)
    client = bench.SoftDBClient(16, config, case, drop_old=True)
    ids = list(range(len(KEYS)))
    with client.init():
        for part in np.array_split(ids, 3):
            labels = [f"label_{i % 2}" for i in part]
            assert client.insert_embeddings(KEYS[part].tolist(), part.tolist(), labels_data=labels) == (len(part), None)
        count, error = client.insert_embeddings(KEYS[:2].tolist(), [5, 99_999])  # all or nothing, so it may be retried
        assert count == 0
        assert isinstance(error, DuplicateId)
        client.optimize(len(KEYS))
    other = pickle.loads(pickle.dumps(client))
    with other.init(), client.init():
        answers = [other.search_embedding(query.tolist(), 10) for query in QUERIES]
        assert recall_of(answers, nearest("cosine", QUERIES)) > 0.9
        assert other.search_embedding(QUERIES[0].tolist(), k=10) == client.search_embedding(QUERIES[0].tolist(), k=10)
        for kind, given, allowed in (
            ("NumGE", {"int_value": 2800}, range(2800, 2900)),
            ("Label", {"label_value": "label_1"}, range(1, 2900, 2)),
            ("NonFilter", {}, range(2900)),
        ):
            wanted = next(
                supported_filter_type
                for supported_filter_type in client.supported_filter_types
                if supported_filter_type.value == kind
            )
            filters = interfaces.Filter(type=wanted, **given)
            assert client.filter_supported(filters)
            other.prepare_filter(filters)
            assert other.search_embedding(KEYS[allowed[0]].tolist(), 1) == [allowed[0]]
            true = np.array(allowed)[nearest("cosine", QUERIES, KEYS[list(allowed)])]
            assert recall_of([other.search_embedding(query.tolist(), 10) for query in QUERIES], true) > 0.9
        client.insert_embeddings([(QUERIES[0] * 2).tolist()], [777_777])  # a reader sees later commits
        assert other.search_embedding(QUERIES[0].tolist(), 1) == [777_777]
    again = bench.SoftDBClient(16, config, case)
    with again.init():
        assert len(again.search_embedding(QUERIES[0].tolist(), 5)) == 5
    emptied = bench.SoftDBClient(16, config, case, drop_old=True)
    with emptied.init():
        assert emptied.search_embedding(QUERIES[0].tolist(), 5) == []


def test_unsupported_settings_of_vectordbbench_are_refused(bench: Any, path: Path) -> None:
    with pytest.raises(BadInput, match="metric_type is"):
        bench.SoftDBClient(16, {"path": str(path)}, bench.SoftDBCaseConfig(metric_type="HAMMING"))
    (path / "vector_bench").mkdir(parents=True)
    (path / "vector_bench" / "letters").write_text("not a database: drop_old must leave it")
    with pytest.raises(Exception, match="vector_bench"):
        bench.SoftDBClient(16, {"path": str(path)}, None, drop_old=True)
    assert (path / "vector_bench" / "letters").exists()
