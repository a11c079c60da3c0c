"""mteb's mock tasks give the same scores, to 1e-6, as with its own FAISS backend."""

from __future__ import annotations

from typing import Any

import mteb
import numpy as np
import pytest
import torch
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.models.model_meta import ScoringFunction
from mteb.models.search_encoder_index import FaissSearchIndex
from mteb.models.search_wrappers import SearchEncoderWrapper

from softdb.errors import BadInput
from softdb.integrations.mteb import SoftDBSearchIndex

TASKS = [
    task
    for task in ALL_MOCK_TASK_TEST_GRID
    if ("Retriev" in task.metadata.type or "Rerank" in task.metadata.type) and task.metadata.modalities == ["text"]
]


def model(similarity: ScoringFunction = ScoringFunction.COSINE) -> Any:
    made = mteb.get_model("mteb/baseline-random-encoder")
    made.mteb_model_meta = made.mteb_model_meta.model_copy(update={"similarity_fn_name": similarity})
    return made


def scores(backend: Any, similarity: ScoringFunction, task: Any) -> Any:
    one = model(similarity)
    result = mteb.evaluate(SearchEncoderWrapper(one, index_backend=backend(one)), task, cache=None)
    return [
        {name: value for name, value in split.items() if isinstance(value, float)}
        for splits in result.task_results[0].scores.values()
        for split in splits
    ]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.metadata.name)
def test_mock_tasks_score_as_with_faiss(task: Any, similarity: str) -> None:
    by = ScoringFunction(similarity)
    ours, theirs = (scores(backend, by, task) for backend in (SoftDBSearchIndex, FaissSearchIndex))
    assert len(ours) == len(theirs) > 0
    for actual, expected in zip(ours, theirs, strict=True):
        assert len(actual) > 10
        assert actual == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_mock_tasks_cover_retrieval_and_reranking() -> None:
    assert len(TASKS) >= 6
    assert {"Retrieval", "Reranking"} <= {task.metadata.type for task in TASKS}


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_answers_are_those_of_faiss(similarity: str) -> None:
    documents, queries = np.split(np.random.default_rng(0).standard_normal((1020, 32)).astype(np.float32), [1000])
    ids = [f"d{i}" for i in range(1000)]
    ranked = {f"q{i}": [f"d{j}" for j in range(i, 1000, 7)] for i in range(20)}
    backends: list[Any] = [
        backend(model(ScoringFunction(similarity))) for backend in (SoftDBSearchIndex, FaissSearchIndex)
    ]
    for backend in backends:
        backend.add_documents(torch.from_numpy(documents[:600]), ids[:600])
        backend.add_documents(documents[600:], ids[600:])
    for how in ({}, {"top_ranked": ranked, "query_idx_to_id": {i: f"q{i}" for i in range(20)}}):
        (ours, places), (theirs, expected) = (backend.search(queries, 50, None, **how) for backend in backends)
        assert places == expected
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    backends[0].clear()
    with pytest.raises(BadInput, match="call add_documents first"):
        backends[0].search(queries, 3)


def test_an_index_finds_nearly_all() -> None:
    drawn = np.random.default_rng(1).standard_normal((20_050, 16)).astype(np.float32)
    exact, near = SoftDBSearchIndex(model()), SoftDBSearchIndex(model(), recall=0.9)
    results = []
    for backend in (exact, near):
        for half in range(0, 20_000, 10_000):
            backend.add_documents(drawn[half : half + 10_000], [str(half + i) for i in range(10_000)])
            rows = backend.search(drawn[20_000:], 10)[1]
        results.append(rows)
    assert near.db is not None
    index = near.db.stats().index
    assert index is not None
    assert index.unindexed == 0  # made anew
    assert np.mean([len(set(a) & set(b)) for a, b in zip(*results, strict=True)]) >= 8.5


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(BadInput, match="the model compares by"):
        SoftDBSearchIndex(model(ScoringFunction.MAX_SIM))
    with pytest.raises(BadInput, match="'MiniLM'; expected a model of mteb"):
        SoftDBSearchIndex("MiniLM")
    with pytest.raises(BadInput, match="recall is 2"):
        SoftDBSearchIndex(model(), recall=2)
    backend = SoftDBSearchIndex(model())
    backend.add_documents(np.eye(3), ["a", "b", "c"])
    for match, given, how in (
        ("4 wide", np.ones((1, 4)), {}),
        ("NaN", np.full((1, 3), np.nan), {}),
        ("in query_idx_to_id", np.ones((1, 3)), {"top_ranked": {"q": ["a"]}}),
        ("give every query's", np.ones((2, 3)), {"top_ranked": {"q": ["a"]}, "query_idx_to_id": {0: "q"}}),
        ("'z' of top_ranked", np.ones((1, 3)), {"top_ranked": {"q": ["z"]}, "query_idx_to_id": {0: "q"}}),
    ):
        with pytest.raises(BadInput, match=match):
            backend.search(given, 2, **how)
    with pytest.raises(BadInput, match="2 wide"):
        backend.add_documents(np.ones((1, 2)), ["d"])
    with pytest.raises(BadInput, match="for 2 ids"):
        backend.add_documents(np.ones((1, 3)), ["d", "e"])
    assert backend.search(np.eye(3), 5)[1][1][0] == 1
