"""Search through the database: exact answers against loops in float64, filters, deletes, gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb


def reference(metric: str, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Scores (q, n) by the equations, in float64."""
    queries, keys = queries.astype(np.float64), keys.astype(np.float64)
    if metric == "l2":
        return np.asarray(-((queries[:, None] - keys[None]) ** 2).sum(-1))
    scores = queries @ keys.T
    if metric == "cosine":
        lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(keys, axis=1)[None]
        scores = np.divide(scores, lengths, out=np.zeros_like(scores), where=lengths > 0)
    return np.asarray(scores)


def world(n: int, d: int, seed: int = 0) -> np.ndarray:
    """Records with duplicates, near duplicates far from the origin, and a zero vector."""
    random = np.random.default_rng(seed)
    keys = random.standard_normal((n, d)).astype(np.float32)
    keys[n // 2] = 0
    keys[n // 3] = keys[n // 4]
    keys[-3:] = 30 + random.standard_normal((3, d)) * 1e-3
    return keys


def check(hits: softdb.Hits, scores: np.ndarray, k: int, scale: np.ndarray) -> None:
    """Hits are a best-k of the scores (q, n; -inf = not allowed): ties may fall either way, real swaps may not."""
    allowed = np.isfinite(scores)
    assert hits.rows.shape == hits.scores.shape == (len(scores), k)
    for i in range(len(scores)):
        m = min(k, int(allowed[i].sum()))
        rows = hits.rows[i].numpy()
        assert (rows[m:] == -1).all()
        assert np.isneginf(hits.scores[i, m:].detach().numpy()).all()
        assert len(set(rows[:m].tolist())) == m
        found = hits.scores[i, :m].detach().numpy().astype(np.float64)
        slack = 1e-5 * scale[i].max()
        assert allowed[i, rows[:m]].all()
        np.testing.assert_allclose(found, scores[i, rows[:m]], atol=slack, rtol=0)
        np.testing.assert_allclose(found, np.sort(scores[i])[::-1][:m], atol=2 * slack, rtol=0)


def lengths(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(keys, axis=1)[None] + 1e-6)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("k", [1, 10, 600])
def test_exact_search_agrees_with_the_reference(metric: Any, dtype: Any, k: int, rng: np.random.Generator) -> None:
    keys = world(500, 8).astype(dtype)
    queries = np.concatenate([rng.standard_normal((6, 8)), keys[-3:].astype(np.float64)]).astype(np.float32)
    with holding(keys, metric=metric, dtype=dtype) as db:
        db.delete(list(range(0, 500, 7)))
        scores = reference(metric, queries, keys)
        scores[:, ::7] = -np.inf
        width = min(k, len(db))
        check(db.search(queries, k=k, exact=True), scores, width, lengths(queries, keys))
        check(db.search(queries, k=k), scores, width, lengths(queries, keys))


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 3), ("float16", 65), ("float32", 130), ("float32", 1024)])
def test_a_batch_of_any_size_gives_the_answers_of_single_queries(metric: Any, dtype: Any, dim: int) -> None:
    """Kernels compare 16 queries at once; the last ones of a batch are compared in fours, or alone."""
    keys = (world(203, dim) * np.exp(np.random.default_rng(3).normal(0, 1.5, (203, 1)))).astype(dtype)
    queries = np.concatenate([world(30, dim, 1), keys[-3:].astype(np.float32)])
    with holding(keys, metric=metric, dtype=dtype) as db:
        db.delete(list(range(0, 203, 7)))
        single = torch.cat([db.search(query, k=9, exact=True).rows for query in queries])
        scores = reference(metric, queries, keys)
        scale = lengths(queries, keys.astype(np.float32)) + np.abs(scores)
        scores[:, ::7] = -np.inf
        check(db.search(queries, k=9, exact=True), scores, 9, scale)
        for count in (7, 8, 15, 16, 17, 23, 24, 33):
            assert db.search(queries[:count], k=9, exact=True).rows.tolist() == single[:count].tolist(), count


def test_a_score_too_large_for_float32_does_not_disturb_other_queries_of_the_batch() -> None:
    keys = np.eye(40, 8, dtype=np.float32)
    keys[17], keys[29] = 1e37, 2e37
    queries = np.ones((16, 8), np.float32)
    queries[11] = 1e3  # both scores are infinite
    with holding(keys) as db:
        rows = db.search(queries, k=2, exact=True).rows.tolist()
        assert rows == [[29, 17]] * 11 + [[17, 29]] + [[29, 17]] * 4


def test_the_checker_accepts_ties_and_refuses_swaps() -> None:
    scores = np.array([[3.0, 2.0, 2.0, 1.0]])
    scale = np.ones((1, 4))

    def hits(rows: list[int], found: list[float]) -> softdb.Hits:
        return softdb.Hits(torch.tensor([rows]), torch.tensor([found]), lambda rows, payloads=True, texts=False: {})

    check(hits([0, 1], [3, 2]), scores, 2, scale)
    check(hits([0, 2], [3, 2]), scores, 2, scale)
    wrong: list[tuple[list[int], list[float]]]
    wrong = [([0, 3], [3, 1]), ([1, 0], [2, 3]), ([0, 0], [3, 3]), ([0, -1], [3, float("-inf")])]
    for rows, found in wrong:
        with pytest.raises(AssertionError):
            check(hits(rows, found), scores, 2, scale)


def test_a_query_of_any_kind_gives_the_same_answer() -> None:
    keys = world(100, 4)
    with holding(keys) as db:
        expected = db.search(keys[:1], k=5).rows.tolist()
        for query in (
            keys[0],
            keys[0].tolist(),
            [keys[0].tolist()],
            torch.from_numpy(keys[0]),
            keys[0].astype(np.float64),
        ):
            assert db.search(query, k=5).rows.tolist() == expected
        assert db.search(torch.from_numpy(keys[:1]).to(torch.float64), k=5).scores.dtype is torch.float64
        assert db.search(torch.from_numpy(keys[:1]).to(torch.bfloat16), k=5).scores.dtype is torch.float32
        assert db.search([1, 0, 0, 0], k=5).scores.dtype is torch.float32


def test_shapes_never_depend_on_the_batch() -> None:
    with softdb.open(None, dim=4) as db:
        for n in (0, 3):
            for q in (0, 1, 2):
                hits = db.search(torch.ones(q, 4), k=5)
                assert hits.rows.shape == hits.scores.shape == hits.live.shape == (q, n)
                assert int(hits.live.sum()) == q * n
                assert [len(row) for row in hits.ids] == [len(row) for row in hits.payloads] == [n] * q
            if not n:
                db.insert([0, 1, 2], np.eye(3, 4))


@pytest.mark.parametrize("k", [10**6, 10**9, 2**62])
@pytest.mark.parametrize("more", [{}, {"where": {"n": 3}}, {"exclude_ids": [0, 1]}, {"diversity": 0.5}])
def test_k_beyond_the_records_is_cut_to_their_number(k: int, more: dict[str, Any]) -> None:
    with holding(world(32, 4), payloads=[{"n": i % 8} for i in range(32)]) as db:
        hits = db.search(np.ones((3, 4), np.float32), k=k, **more)
        actual = {"where": 4, "exclude_ids": 30}.get(next(iter(more), ""), 32)
        assert hits.rows.shape == hits.scores.shape == (3, 32)
        assert hits.live.sum(1).tolist() == [actual] * 3
        assert hits.live[:, :actual].all()


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_scores_carry_the_gradient_of_their_equation(metric: Any, rng: np.random.Generator) -> None:
    keys = torch.from_numpy(world(60, 5)).double()
    with holding(keys, metric=metric) as db:
        queries = torch.from_numpy(rng.standard_normal((3, 5))).requires_grad_()

        def top(queries: Tensor) -> Tensor:
            return db.search(queries, k=4).scores

        assert torch.autograd.gradcheck(top, (queries,))


@pytest.mark.parametrize("share", [0.5, 0.1, 0.02])
def test_a_filter_gives_every_match_up_to_k(share: float, rng: np.random.Generator) -> None:
    keys = world(400, 6)
    queries = rng.standard_normal((5, 6)).astype(np.float32)
    group = rng.random(400) < share
    with holding(keys, payloads=[{"in": bool(one)} for one in group]) as db:
        scores = np.where(group[None], reference("dot", queries, keys), -np.inf)
        check(db.search(queries, k=20, where={"in": True}), scores, 20, lengths(queries, keys))
        assert db.search(queries, k=3, where={"in": "never"}).rows.tolist() == [[-1] * 3] * 5


def test_ids_and_payloads_come_with_the_hits() -> None:
    with holding([[3, 0], [2, 0], [1, 0]], payloads=[{"x": 1}, None, [1]], ids=["a", 7, "c"]) as db:
        hits = db.search([[1, 0], [-1, 0]], k=4)
        assert hits.ids == [["a", 7, "c"], ["c", 7, "a"]]
        assert hits.payloads == [[{"x": 1}, None, [1]], [[1], None, {"x": 1}]]


def test_a_search_reads_the_catalogue_only_for_ids_and_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding([[1, 0]], ids=["a"]) as db:
        asked: list[Any] = []
        read = type(db._store).read

        def watched(store: Any, rows: Any) -> Any:
            asked.append(rows)
            return read(store, rows)

        monkeypatch.setattr(type(db._store), "read", watched)
        hits = db.search([1, 0], k=1)
        assert not asked
        assert hits.ids == [["a"]]
        assert hits.payloads == [[None]]
        assert len(asked) == 1


def test_text_goes_through_the_encoder() -> None:
    def encoder(texts: list[str]) -> np.ndarray:
        return np.array([[text.count("a"), text.count("b")] for text in texts], np.float32)

    with softdb.open(None, dim=2, encoder=encoder) as db:
        db.insert(["x", "y"], ["aaa", "bbb"])
        db.update("x", keys="aaab")
        assert db.search("b", k=1).ids == [["y"]]
        assert db.search(["b", "aa"], k=1).ids == [["y"], ["x"]]
        assert db.search(np.array(["b"]), k=1).ids == [["y"]]
        assert float(db.attend("a").lse) == pytest.approx(np.log(np.exp(3) + 1))


def test_search_and_attend_give_the_same_scores() -> None:
    keys = world(80, 4)
    with holding(keys, metric="l2") as db:
        queries = keys[:3] + 0.1
        hits, pooled = db.search(queries, k=6), db.attend(queries, k=6)
        assert pooled.hits is not None
        assert torch.equal(hits.rows, pooled.hits.rows)
        torch.testing.assert_close(hits.scores, pooled.hits.scores)
