"""Search by text and vector together against the written-out sums, with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb

N, D = 60, 6
WORDS = np.array(["red", "green", "blue", "cyan", "grey", "pink", "gold", "teal"])


@pytest.fixture(scope="module", params=["cosine", "l2"])
def db(request: pytest.FixtureRequest) -> Iterator[softdb.SoftDB]:
    """60 records with a key and a text, one with a text alone, one with a key alone."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(N)]
    keys, payloads = random.standard_normal((N, D)), [{"x": i % 3} for i in range(N)]
    with holding(keys, payloads=payloads, texts=texts, metric=request.param) as db:
        db.insert(["text alone"], texts=["gold gold gold"], payloads=[{"x": 0}])
        db.insert(["key alone"], np.ones((1, D)), payloads=[{"x": 0}])
        db.index_text()
        yield db


QUERIES = np.random.default_rng(1).standard_normal((4, D)).astype(np.float32)
TEXTS = ["red gold", "blue blue teal", "nothing of these", ""]


def halves(db: softdb.SoftDB, i: int, depth: int, **how: Any) -> tuple[dict[Any, float], dict[Any, float], set[Any]]:
    """All scores by vector, all by text, and the candidates of one query."""
    vectors = {hit.id: hit.score for hit in db.search(QUERIES[i], k=100, exact=True, **how)[0]}
    texts = {hit.id: hit.score for hit in db.search(TEXTS[i], mode="text", k=100, **how)[0]}
    return vectors, texts, {*list(vectors)[:depth], *list(texts)[:depth]}


def expected(fusion: Any, vectors: dict[Any, float], texts: dict[Any, float], candidates: set[Any]) -> dict[Any, float]:
    low = min(score for one, score in vectors.items() if one in candidates)
    high = max(score for one, score in vectors.items() if one in candidates)
    most = max((texts.get(candidate, 0) for candidate in candidates), default=0) or 1
    found = {}
    for one in candidates:
        vector, text = vectors.get(one, low), texts.get(one, 0)
        if isinstance(fusion, float):
            found[one] = vector + fusion * text
        else:
            share = fusion[1] if isinstance(fusion, tuple) else 0.2
            found[one] = (1 - share) * (vector - low) / (high - low) + share * text / most
    return found


@pytest.mark.parametrize("how", [{}, {"where": {"x": 0}}, {"exclude_ids": [0, 3, "text alone"]}], ids=str)
@pytest.mark.parametrize("fusion", [None, "scores", ("scores", 0.5), ("scores", 1), ("scores", 0), 0.3, 0.0])
def test_scores_are_the_sum_of_both(db: softdb.SoftDB, fusion: Any, how: dict[str, Any]) -> None:
    hits = db.search(QUERIES, texts=TEXTS, k=5, fusion=fusion, **how)
    for i in range(len(QUERIES)):
        want = expected(fusion, *halves(db, i, 20, **how))
        best = sorted(want.values(), reverse=True)[:5]
        assert [hit.score for hit in hits[i]] == pytest.approx(best, abs=1e-5)
        assert [want[hit.id] for hit in hits[i]] == pytest.approx(best, abs=1e-5)


def test_ranks_are_summed_as_their_reciprocals(db: softdb.SoftDB) -> None:
    hits = db.search(QUERIES, texts=TEXTS, k=5, fusion="ranks", fetch_k=7)
    for i in range(len(QUERIES)):
        vectors, texts, candidates = halves(db, i, 7)
        lists = [list(vectors)[:7], list(texts)[:7]]
        want = {
            candidate: sum(1 / (61 + own.index(candidate)) for own in lists if candidate in own)
            for candidate in candidates
        }
        best = sorted(want.values(), reverse=True)[:5]
        assert [hit.score for hit in hits[i]] == pytest.approx(best, abs=1e-7)
        assert [want[hit.id] for hit in hits[i]] == pytest.approx(best, abs=1e-7)


def test_the_weight_and_the_queries_learn(db: softdb.SoftDB) -> None:
    queries = torch.from_numpy(QUERIES).double().requires_grad_()
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def scores(queries: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return db.search(queries, texts=TEXTS, k=4, fusion=weight).scores

    assert torch.autograd.gradcheck(scores, (queries, weight))
    hits = db.search(queries, texts=TEXTS, k=4, fusion=weight)
    (of_weight,) = torch.autograd.grad(hits.scores.sum(), weight)
    texts = [{hit.id: hit.score for hit in db.search(text, mode="text", k=100)[0]} for text in TEXTS]
    assert of_weight.item() == pytest.approx(sum(texts[i].get(hit.id, 0) for i in range(4) for hit in hits[i]))
    assert torch.autograd.grad(db.search(queries, texts=TEXTS).scores.sum(), queries)[0].abs().sum() > 0
    assert not db.search(queries, texts=TEXTS, fusion="ranks").scores.requires_grad


def test_pages_are_those_of_one_long_answer(db: softdb.SoftDB) -> None:
    for how in ({"mode": "text"}, {"queries": QUERIES, "texts": TEXTS, "fetch_k": 30}):
        asked: dict[str, Any] = {"queries": TEXTS, **how}
        whole, page = db.search(k=9, **asked), db.search(k=4, offset=5, **asked)
        assert torch.equal(whole.rows[:, 5:], page.rows)
    with pytest.raises(softdb.BadInput, match="group_by is 'x', but a search in mode 'text' takes none"):
        db.search("red", mode="text", group_by="x")


def test_the_mode_follows_from_the_arguments() -> None:
    def encode(texts: list[str]) -> np.ndarray[Any, Any]:
        return np.array([[len(text), 1.0] for text in texts], np.float32)

    with softdb.open(None, dim=2, encoder=encode) as db:
        db.insert(["a", "b"], texts=["red", "green green"])
        db.index_text()
        for asked in ({"texts": "green"}, {"queries": "green", "mode": "hybrid"}):
            assert torch.equal(db.search(**asked).scores, db.search([[5, 1]], texts="green").scores)  # type: ignore[arg-type]
        vector = db.search("green").scores
        assert torch.equal(db.search(texts="green", mode="vector").scores, vector)
        assert torch.equal(db.search("green", mode="vector").scores, vector)
        assert db.search("green", mode="text").ids == [["b"]]
    with softdb.open(None, dim=2) as db:
        db.insert(["a", "b"], texts=["red", "green green"])
        db.index_text()
        assert db.search(texts="green").ids == db.search("green", mode="text").ids == [["b"]]
        assert db.search(texts=[]).scores.shape == (0, 2)
        assert db.search([[1, 0]], texts="green").ids == [["b"]]
        db.delete(where={})
        assert db.search([[1, 0]], texts="green").scores.shape == db.search(texts="green").scores.shape == (1, 0)
