"""Search by radius, with exclusions, with diverse hits, and with filters that correlate with the keys."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from worlds import awkward, holding, snapshot

import softdb
from softdb import BadInput, SoftDB
from softdb.attend import hits as hits_file
from softdb.check import Metric
from softdb.index import planner, search
from softdb.index.flat import nearest, radius_search
from softdb.index.query import Query

Array = np.ndarray[Any, Any]
METRICS = ["dot", "cosine", "l2"]


def scored(metric: str, queries: Array, keys: Array) -> Array:
    """Scores (q, n) by the equations, in float64."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    out = np.zeros((len(queries), len(keys)))
    for i, q in enumerate(queries):
        for j, k in enumerate(keys):
            if metric == "l2":
                out[i, j] = -((q - k) ** 2).sum()
            elif metric == "dot":
                out[i, j] = q @ k
            elif q.any() and k.any():
                out[i, j] = q @ k / np.sqrt((q @ q) * (k @ k))
    return out


def chosen(metric: str, query: Array, keys: Array, k: int, diversity: float) -> list[int]:
    """Carbonell and Goldstein 1998, equation 1, by loops, over candidates (c, d), nearest first."""
    query, keys = np.asarray(query, np.float64), np.asarray(keys, np.float64)
    alike = scored("l2" if metric == "l2" else "cosine", keys, keys)
    near = scored(metric, query[None], keys)[0]
    if metric == "dot":
        near = near / (np.linalg.norm(query) * np.linalg.norm(keys, axis=1).max())
    taken = [int(near.argmax())]
    while len(taken) < k:
        rest = [i for i in range(len(keys)) if i not in taken]
        gain = [(1 - diversity) * near[i] - diversity * max(alike[i, j] for j in taken) for i in rest]
        taken.append(rest[int(np.argmax(gain))])
    return taken


# -- a radius ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("q", [1, 7])
def test_a_radius_finds_every_record_within_it(
    metric: str, dtype: Any, q: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.candidates.GATHERED", 200)
    monkeypatch.setattr(hits_file, "RANGED", 3)
    monkeypatch.setattr("softdb.index.flat._block_for", lambda queries, dim: 64)
    keys = awkward(rng, 300, 6).astype(dtype)
    queries = rng.standard_normal((q, 6)).astype(np.float32)
    queries[-1] = 0
    db = holding(keys, metric=metric, dtype=dtype)
    db.delete([5, 17])
    truth = scored(metric, queries, keys)
    truth[:, [5, 17]] = -np.inf
    for radius in {"l2": [0.1, 1.5, 100], "dot": [-100, 0.7, 50], "cosine": [-1, 0.3, 1]}[metric]:
        least = -(radius**2) if metric == "l2" else radius
        hits = db.search(queries, radius=radius)
        longest = 0
        for i in range(q):
            surely = set(np.flatnonzero(truth[i] >= least + 1e-5).tolist())
            maybe = set(np.flatnonzero(truth[i] >= least - 1e-5).tolist())
            results = [one for one in hits.rows[i].tolist() if one >= 0]
            assert surely <= set(results) <= maybe
            assert len(results) == len(set(results))
            m, scores = len(results), hits.scores[i].tolist()
            longest = max(longest, m)
            np.testing.assert_allclose(scores[:m], truth[i, results], atol=1e-4)
            assert scores[:m] == sorted(scores[:m], reverse=True)
            assert all(score >= least for score in scores[:m])
            assert (hits.rows[i, m:] == -1).all()
            assert all(score == -np.inf for score in scores[m:])
        assert hits.rows.shape == hits.scores.shape == (q, longest)


def test_a_radius_search_has_gradients_and_finds_the_query_itself(rng: np.random.Generator) -> None:
    keys = awkward(rng, 60, 4)
    for metric, radius in (("l2", 0.0), ("cosine", 1.0)):
        db = holding(keys, metric=metric, dtype="float32")
        hits = db.search(torch.from_numpy(keys).double(), radius=0.0 if metric == "l2" else radius - 1e-9)
        assert hits.ids[0][:2] == [0, 1]  # duplicates
        assert {6, 7} <= set(hits.ids[6]) or metric == "l2"  # parallel
        db.close()
    db = holding(keys, metric="l2")
    queries = torch.from_numpy(rng.standard_normal((3, 4))).requires_grad_()
    assert torch.autograd.gradcheck(lambda asked: db.search(asked, radius=2.0).scores.clamp(min=-100), (queries,))


def test_a_score_as_shown_is_a_radius(rng: np.random.Generator) -> None:
    """The tenth score as the radius gives the ten nearest: shown and compared scores are equal."""
    keys, queries = rng.standard_normal((500, 32)), rng.standard_normal((20, 32)).astype(np.float32)
    db = holding(keys, metric="dot")
    ten = db.search(queries, k=10)
    for i in range(20):
        hits = db.search(queries[i], radius=float(ten.scores[i, 8]) - 1e-6)
        assert hits.rows[0].tolist()[:9] == ten.rows[i, :9].tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_rounding_hides_no_record_and_shows_none_too_many(metric: str, rng: np.random.Generator) -> None:
    """Scores that differ by less than a float32 product can tell."""
    keys = (rng.standard_normal(256) + 1e-6 * rng.standard_normal((500, 256))).astype(np.float32)
    queries = rng.standard_normal((20, 256)).astype(np.float32)
    db, truth = holding(keys, metric=metric), scored(metric, queries, keys)
    for i in range(20):
        least = float(truth[i, i])
        actual = radius_search(
            db._store.snapshot, Query(torch.from_numpy(queries[i : i + 1]), 0, Metric(metric), least=least)
        )
        assert set(np.flatnonzero(truth[i] >= least)) <= set(actual[0].tolist())
        radius = float(np.sqrt(-least)) if metric == "l2" else least
        scores = db.search(queries[i], radius=radius).scores
        assert bool((scores >= (-(radius**2) if metric == "l2" else radius)).all())


def test_far_from_the_origin_a_radius_is_exact(rng: np.random.Generator) -> None:
    """‖q‖² - 2 q·k + ‖k‖² would lose these distances."""
    keys = (1000 + rng.standard_normal((400, 8)) * 0.01).astype(np.float32)
    world = snapshot(keys)
    distances = np.linalg.norm(keys[:1].astype(np.float64) - keys.astype(np.float64), axis=1)
    radius = float(np.sort(distances)[20]) * (1 + 1e-9)
    actual = radius_search(
        world, Query(torch.from_numpy(np.concatenate([keys[:1], -keys[:1]])), 0, Metric.L2, least=-(radius**2))
    )
    assert set(np.flatnonzero(distances <= radius)) <= set(actual[0].tolist())
    assert (actual[0] >= 0).sum() <= 23
    assert (actual[1] == -1).all()


def test_a_radius_combines_with_filters_and_exclusions() -> None:
    with softdb.open(None, dim=1) as db:
        for q in (0, 2):
            assert db.search(torch.ones(q, 1), radius=0.0).rows.shape == (q, 0)
        assert db.search([1.0], radius=0.0).ids == [[]]
        db.insert(range(6), [[i] for i in range(6)], payloads=[{"odd": i % 2} for i in range(6)])
        assert db.search([1.0], radius=2.0, where={"odd": 1}).ids == [[5, 3]]
        assert db.search([[1.0], [2.0]], radius=2.0, exclude_ids=[[4, 5], [5]]).ids == [[3, 2], [4, 3, 2, 1]]
        assert db.search([1.0], radius=99.0).rows.shape == (1, 0)


# -- records left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 90])
@pytest.mark.parametrize("each", [False, True])
def test_excluded_records_never_appear_and_others_do(
    count: int, each: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hits_file, "GATHERED", 800)
    keys, queries = rng.standard_normal((200, 5)), rng.standard_normal((6, 5))
    db = holding(keys, metric="dot")
    truth = scored("dot", queries.astype(np.float32), keys.astype(np.float32))
    order = np.argsort(-truth, axis=1)
    out: Any = [order[i, : count + i].tolist() for i in range(6)] if each else order[0, :count].tolist()
    given = [[*one, "unknown"] for one in out] if each else [*out, 12345]
    hits = db.search(queries, k=7, exclude_ids=given)
    for i in range(6):
        mine = set(out[i] if each else out)
        assert hits.ids[i] == [one for one in order[i].tolist() if one not in mine][:7]
    where = {"no": {"$exists": False}}
    assert db.search(queries, k=7, exclude_ids=given, where=where).rows.tolist() == hits.rows.tolist()
    everything = db.search(queries[:1], k=250, exclude_ids=list(range(150)))
    assert set(everything.ids[0]) == {*range(150, 200)}


def test_a_stored_query_leaves_itself_out(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((50, 4))
    db = holding(keys, metric="cosine")
    names = [3, 4, 9]
    hits = db.search(db.get(names).keys, k=2, exclude_ids=np.array([[name] for name in names]))
    plain = db.search(db.get(names).keys, k=3)
    assert hits.ids == [one[1:] for one in plain.ids]
    assert db.search(keys[:2], k=1, exclude_ids=[]).ids == [[0], [1]]
    assert db.search(keys[:2], k=1, exclude_ids=[[], [1]]).ids[0] == [0]
    assert db.search(keys[:1], k=1, exclude_ids=0).ids != [[0]]
    assert db.search(keys[:0], k=1, exclude_ids=[0]).ids == []


def test_exclusion_through_an_index_and_across_a_commit(tmp_path: Any, rng: np.random.Generator) -> None:
    keys = rng.standard_normal((6000, 8)).astype(np.float32)
    with holding(keys, path=tmp_path / "db", metric="cosine") as db:
        db.build_index("ivf")
        hits = db.search(keys[:20], k=5, exclude_ids=[[i] for i in range(20)])
        assert all(i not in row and len(row) == hits.rows.shape[1] for i, row in enumerate(hits.ids))
        reader = softdb.open(tmp_path / "db", mode="r")
        assert reader.search(keys[:1], k=1).ids == [[0]]
        db.upsert([0], keys[:1] * 2)
        assert 0 not in reader.search(keys[:1], k=5, exclude_ids=[0]).ids[0]
        reader.close()


# -- diverse hits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("diversity", [0.2, 0.5, 0.9, 1.0])
def test_diverse_hits_agree_with_the_equation(metric: str, diversity: float, rng: np.random.Generator) -> None:
    keys, queries = rng.standard_normal((80, 5)).astype(np.float32), rng.standard_normal((4, 5)).astype(np.float32)
    keys[10:20] = keys[:10] * np.float32(1.001)
    db = holding(keys, metric=metric)
    truth = scored(metric, queries, keys)
    hits = db.search(torch.from_numpy(queries).double(), k=6, diversity=diversity, fetch_k=30)
    for i in range(4):
        near = np.argsort(-truth[i])[:30]
        assert hits.rows[i].tolist() == near[chosen(metric, queries[i], keys[near], 6, diversity)].tolist()
        np.testing.assert_allclose(hits.scores[i].numpy(), truth[i, hits.rows[i]], atol=1e-6)


def test_no_diversity_is_plain_search_and_much_of_it_drops_duplicates(rng: np.random.Generator) -> None:
    keys = np.repeat(rng.standard_normal((30, 6)), 5, axis=0)
    db = holding(keys, metric="cosine")
    queries = rng.standard_normal((3, 6))
    plain = db.search(queries, k=10)
    assert db.search(queries, k=10, diversity=0).rows.tolist() == plain.rows.tolist()
    groups = [len({one // 5 for one in row}) for row in plain.rows.tolist()]
    diverse = [len({one // 5 for one in row}) for row in db.search(queries, k=8, diversity=0.5).rows.tolist()]
    assert max(groups) == 2
    assert min(diverse) >= 4


def test_diverse_hits_have_gradients_and_reach_all_records(rng: np.random.Generator) -> None:
    keys = awkward(rng, 12, 4)
    for metric in METRICS:
        db = holding(keys, metric=metric)
        queries = torch.from_numpy(rng.standard_normal((2, 4))).requires_grad_()
        assert torch.autograd.gradcheck(lambda asked, db=db: db.search(asked, k=4, diversity=0.4).scores, (queries,))
        hits = db.search(np.zeros((2, 4)), k=15, diversity=0.7)
        assert [set(row) for row in hits.ids] == [{*range(12)}] * 2
        assert hits.rows.shape == (2, 12)
    assert holding(keys[:0], metric="dot").search([1, 0, 0, 0], k=3, diversity=0.5).rows.tolist() == [[]]


# -- filters that go with the keys -------------------------------------------------------------------------------------

N, D = 30_000, 32


@pytest.fixture(scope="module")
def world() -> tuple[SoftDB, Array]:
    """An index over records in clusters, tuned to a recall of 0.95."""
    random = np.random.default_rng(0)
    keys = (2 * random.standard_normal((200, D)))[random.integers(0, 200, N)] + random.standard_normal((N, D))
    keys = keys.astype(np.float32)
    db = holding(keys, metric="l2")
    assert db.build_index("ivf", recall=0.95).met
    return db, keys


def filtered(keys: Array, share: float, side: str, random: np.random.Generator) -> tuple[Array, Array]:
    """Queries (40, D), and matches (N,): anywhere, most of them where the queries are, or most of them opposite."""
    height = keys[:, 0] + keys[:, 1]
    allowed = random.random(N) < (share if side == "anywhere" else 0.03 * share)
    at = np.argsort(-height)
    if side != "anywhere":
        allowed[at[: int(0.97 * share * N)] if side == "near" else at[N - int(0.97 * share * N) :]] = True
    near = random.choice(N if side == "anywhere" else at[:600], 40)
    return (keys[near] + 0.3 * random.standard_normal((40, D))).astype(np.float32), allowed


@pytest.mark.slow
@pytest.mark.parametrize("side", ["anywhere", "near", "opposite"])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("few", [planner.FEW, 20])  # few matches are compared exactly; and as if they were many
def test_a_filter_keeps_the_recall_wherever_its_matches_lie(
    share: float, side: str, few: int, world: tuple[SoftDB, Array], rng: np.random.Generator, monkeypatch: Any
) -> None:
    for module in (planner, search):
        monkeypatch.setattr(module, "FEW", few)
    db, keys = world
    asked, allowed = filtered(keys, share, side, rng)
    snapshot, queries = db._store.snapshot, torch.from_numpy(asked)
    truth = nearest(snapshot, Query(queries, 10, Metric.L2, allowed))
    together = db._finder.find(snapshot, Query(queries, 10, Metric.L2, allowed)).positions
    alone = np.concatenate(
        [db._finder.find(snapshot, Query(one, 10, Metric.L2, allowed)).positions for one in torch.split(queries, 1)]
    )
    for actual in (together, alone):
        there = truth >= 0
        assert ((actual >= 0) == there).all()  # full k
        assert allowed[actual[there]].all()
        hit = (actual[:, :, None] == truth[:, None, :]).any(1) & there
        assert hit.sum() / there.sum() >= 0.95 - 0.03


def test_young_records_deletions_and_filters_together(rng: np.random.Generator) -> None:
    keys = (2 * rng.standard_normal((50, 8)))[rng.integers(0, 50, 9000)] + rng.standard_normal((9000, 8))
    db = holding(keys[:8500], metric="l2")
    db.build_index("ivf")
    db.insert(range(8500, 9000), keys[8500:])
    db.delete(range(0, 9000, 3))
    snapshot, queries = db._store.snapshot, torch.from_numpy(keys[:50]).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "FEW", 20)
        for share in (0.8, 0.1, 0.01):
            allowed = rng.random(9000) < share
            truth = nearest(snapshot, Query(queries, 10, Metric.L2, allowed))
            actual = db._finder.find(snapshot, Query(queries, 10, Metric.L2, allowed)).positions
            assert (allowed & snapshot.live)[actual].all()
            assert all(len(set(row)) == 10 for row in actual.tolist())
            assert (actual[:, :, None] == truth[:, None, :]).any(1).mean() >= 0.92


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"k": 5, "radius": 1.0}, "radius and k are both given (1.0, 5)"),
    "radius and diversity": ({"radius": 1.0, "diversity": 0.5}, "radius and diversity are both given"),
    "radius and fetch_k": ({"radius": 1.0, "fetch_k": 5}, "radius and fetch_k are both given"),
    "radius nan": ({"radius": float("nan")}, "radius is nan; expected a distance of at least 0"),
    "radius text": ({"radius": "1"}, "radius is '1'; expected a distance"),
    "radius bool": ({"radius": True}, "radius is True; expected a distance"),
    "radius below 0": ({"radius": -1}, "radius is -1; expected a distance of at least 0, for the metric 'l2'"),
    "radius list": ({"radius": [1, 2]}, "radius is [1, 2]; expected a distance"),
    "radius gradient": ({"radius": torch.ones((), requires_grad=True)}, "radius is a tensor that wants a gradient"),
    "k": ({"k": 0}, "k is 0; expected a whole number"),
    "k float": ({"k": 2.5}, "k is 2.5"),
    "diversity": ({"diversity": 1.5}, "diversity is 1.5; expected a number from 0 to 1"),
    "diversity text": ({"diversity": "much"}, "diversity is 'much'; expected a number from 0 to 1"),
    "fetch_k alone": ({"fetch_k": 20}, "fetch_k is 20 without diversity"),
    "fetch_k few": ({"k": 5, "diversity": 0.1, "fetch_k": 4}, "fetch_k is 4 but k is 5"),
    "fetch_k float": ({"diversity": 0.1, "fetch_k": 40.5}, "fetch_k is 40.5; expected a whole number"),
    "exclude lists": ({"exclude_ids": [[1], [2], [3]]}, "exclude_ids are 3 lists for 2 queries"),
    "exclude mixed": ({"exclude_ids": [[1], 2]}, "exclude_ids mix ids and lists of ids"),
    "exclude type": ({"exclude_ids": [1.5]}, "id 1.5 is of type float"),
    "exclude none": ({"exclude_ids": [None]}, "id None is of type NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_by_name(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(BadInput, match=f"search: {re.escape(message)}"):
        holding(np.eye(3), metric="l2").search(np.ones((2, 3)), **arguments)


def test_a_radius_is_in_the_units_of_the_metric() -> None:
    with pytest.raises(BadInput, match=r"radius is 1\.5; expected a similarity from -1 to 1, for the metric 'cosine'"):
        holding(np.eye(3), metric="cosine").search([1, 0, 0], radius=1.5)
    with pytest.raises(BadInput, match="radius is inf; expected the least score, a finite number"):
        holding(np.eye(3), metric="dot").search([1, 0, 0], radius=float("inf"))
    assert holding(np.eye(3), metric="dot").search([1, 0, 0], radius=-0.5).rows.tolist() == [[0, 1, 2]]
