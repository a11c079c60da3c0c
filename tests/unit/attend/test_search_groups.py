"""Pages and groups: `offset`, `group_by` and `group_size` against loops over every record."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb
from softdb import BadInput, SoftDB, UnknownField
from softdb.attend import grouped

Array = np.ndarray[Any, Any]
WORDS = ["a", "b", "1", 1, 2, True, False, 1.5, 2.0]  # 2 and 2.0 are one, "1", 1 and True are three


def kind(value: object) -> object:
    """Group of a value, as documented."""
    return (type(value) is bool, value) if isinstance(value, bool | int | float | str) else None


def world(seed: int, n: int = 300, groups: int = 9) -> tuple[list[Any], Array]:
    """Payloads, whose groups are of very different size, and keys that lie near those of their group."""
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    names: list[Any] = (WORDS + [f"g{i}" for i in range(groups)])[:groups]
    shares = [0.7**i for i in range(groups)]
    values = [*draw.choices(names, shares, k=n - 30), *draw.choices([None, ["a"], {"a": 1}], k=30)]
    draw.shuffle(values)
    payloads = [{"doc": value, "n": i} if draw.random() < 0.95 else draw.choice([None, {"n": i}, "doc"])
                for i, value in enumerate(values)]  # fmt: skip
    centres = {repr(kind(name)): 3 * rng.standard_normal(6) for name in names}
    keys = [centres.get(repr(kind(value)), np.zeros(6)) + rng.standard_normal(6) / 3 for value in values]
    return payloads, np.array(keys, np.float32)


def best(payloads: list[Any], scores: Array, k: int, size: int, offset: int, left_out: set[int]) -> list[int]:
    """The rows of one query, by a walk down all records."""
    groups: dict[object, list[int]] = {}
    for row in np.argsort(-scores, kind="stable").tolist():
        payload = payloads[row]
        group = kind(payload.get("doc")) if isinstance(payload, dict) else None
        if group is not None and row not in left_out:
            groups.setdefault(group, []).append(row)
    return [row for group in list(groups.values())[offset : offset + k] for row in group[:size]]


def lines(hits: softdb.Hits) -> list[list[int]]:
    return [[hit.row for hit in mine] for mine in hits]


@pytest.mark.parametrize("seed", range(8))
def test_groups_equal_a_loop_over_all_records(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed >= 4:  # look at few records, so that every query has to look again and again
        monkeypatch.setattr(grouped, "FETCHED", (1,))
    monkeypatch.setattr(grouped, "GATHERED", 600)
    payloads, keys = world(seed, groups=[1, 2, 9, 60][seed % 4])
    queries = np.random.default_rng(seed).standard_normal((5, 6)).astype(np.float32)
    scores = queries @ keys.T
    with holding(keys[:200], payloads=payloads[:200]) as db:
        if seed % 2:
            db.search(queries, group_by="doc")  # the cache grows
        db.insert(range(200, 300), keys[200:], payloads=payloads[200:])
        dead = set(range(0, 300, 7))
        db.delete(sorted(dead))
        below = {row for row, payload in enumerate(payloads) if not isinstance(payload, dict) or payload["n"] >= 250}
        shared, own = [1, 2, 3], np.argsort(-scores)[:, :40:3].tolist()
        for k, size, offset in itertools.product((1, 4, 50), (1, 3, 400), (0, 2)):
            ask = {"k": k, "group_by": "doc", "group_size": size, "offset": offset}
            every: list[tuple[dict[str, Any], list[set[int]]]] = [
                ({}, [dead] * 5),
                ({"where": {"n": {"$lt": 250}}}, [dead | below] * 5),
                ({"exclude_ids": shared}, [dead | set(shared)] * 5),
                ({"exclude_ids": own}, [dead | set(one) for one in own]),
            ]
            for more, left_out in every:
                actual = db.search(queries, **ask, **more)  # type: ignore[arg-type]
                want = [best(payloads, *one, left) for one, left in
                        zip(((line, k, size, offset) for line in scores), left_out, strict=True)]  # fmt: skip
                assert lines(actual) == want
                assert actual.rows.shape[1] == max(map(len, want))
                for line, rows, score in zip(actual.scores, want, scores, strict=True):
                    np.testing.assert_allclose(line[: len(rows)], score[rows], atol=1e-5)
                    assert torch.isneginf(line[len(rows) :]).all()


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_an_index_finds_every_group(kind: str) -> None:
    rng = np.random.default_rng(3)
    centres = rng.standard_normal((400, 16)).astype(np.float32)
    groups = np.minimum(rng.geometric(0.02, 6000) - 1, 399)
    keys = (centres[groups] + rng.standard_normal((6000, 16)) / 4).astype(np.float32)
    queries = centres[:20]
    with holding(keys, payloads=[{"doc": int(group)} for group in groups], metric="l2") as db:
        exact = db.search(queries, k=30, group_by="doc", group_size=2)
        db.build_index(kind, recall=0.99)
        actual = db.search(queries, k=30, group_by="doc", group_size=2)
        for mine, truth in zip(actual, exact, strict=True):
            docs = [hit.payload["doc"] for hit in mine]
            assert len(set(docs)) == 30
            assert max(map(docs.count, docs)) == 2
            assert len({hit.row for hit in mine} & {hit.row for hit in truth}) >= 0.9 * len(truth)
            assert [hit.id for hit in mine] == [hit.row for hit in mine]
        every = db.search(queries, k=1000, group_by="doc")
        assert every.rows.shape == (20, len(set(groups.tolist())))
        assert every.live.all()


def test_groups_follow_every_write(tmp_path: Any) -> None:
    def found(db: SoftDB) -> list[list[Any]]:
        return db.search([[1, 0]], group_by="doc").ids

    with softdb.open(tmp_path / "db", dim=2) as db:
        assert found(db) == [[]]
        db.insert(range(4), [[4, 0], [3, 0], [2, 0], [1, 0]], payloads=[{"doc": i % 2} for i in range(4)])
        assert found(db) == [[0, 1]]
        reader = softdb.open(tmp_path / "db", mode="r")
        assert found(reader) == [[0, 1]]
        db.update([1], payloads=[{"doc": 0}])
        assert found(db) == [[0, 3]]
        db.upsert([2], [[9, 0]], payloads=[{"doc": 5}])
        assert found(db) == [[2, 0, 3]]
        db.delete([0])
        assert found(db) == [[2, 1, 3]]
        db.compact()
        db.insert([7], [[8, 0]], payloads=[{"doc": 1}])
        assert found(db) == [[2, 7, 1]] == found(reader)
        db.index_field("doc")
        assert found(db) == [[2, 7, 1]]
        reader.close()


def test_groups_keep_the_gradient_and_the_precision() -> None:
    with holding([[4, 0], [3, 1], [2, 2], [1, 3]], payloads=[{"doc": i % 2} for i in range(4)]) as db:
        queries = torch.tensor([[1.0, 0], [0, 1.0]], dtype=torch.float64, requires_grad=True)
        for size, rows in ((1, [[0, 1], [3, 2]]), (2, [[0, 2, 1, 3], [3, 1, 2, 0]])):
            hits = db.search(queries, k=2, group_by="doc", group_size=size)
            assert hits.rows.tolist() == rows
            (gradient,) = torch.autograd.grad(hits.scores[0].sum(), queries)
            assert gradient[0].tolist() == db.get(rows[0]).keys.sum(0).tolist()
            assert hits.scores.dtype == torch.float64


@pytest.mark.parametrize("more", [{}, {"diversity": 0.5, "fetch_k": 70}, {"exclude_ids": [0, 1]}, {"exact": True}])
def test_pages_are_those_of_one_long_answer(more: dict[str, Any], rng: np.random.Generator) -> None:
    with holding(rng.standard_normal((57, 4))) as db:
        queries = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        whole = db.search(queries, k=57, **{**more, "fetch_k": 57} if "fetch_k" in more else more)
        pages = [db.search(queries, k=10, offset=start, **more) for start in range(0, 70, 10)]
        if "diversity" in more:  # chosen one by one among the same 57
            pages = pages[:5]
        rows = torch.cat([page.rows for page in pages], 1)
        assert torch.equal(rows, whole.rows[:, : rows.shape[1]])
        assert torch.equal(torch.cat([page.scores for page in pages], 1), whole.scores[:, : rows.shape[1]])
        assert pages[1].scores.requires_grad
        assert db.search(queries, offset=57, **more).rows.shape == (3, 0)
        assert db.search(queries[:0], offset=3, **more).rows.shape[0] == 0


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"offset": -1}, "offset is -1; expected a whole number at least 0"),
        ({"offset": True}, "offset is True"),
        ({"offset": None}, "offset is None"),
        ({"offset": 3, "radius": 1.0}, "radius and offset are both given"),
        ({"group_by": "doc", "radius": 1.0}, "radius and group_by are both given"),
        ({"group_by": "doc", "diversity": 0.5}, "group_by and diversity are both given"),
        ({"group_by": 5}, "group_by is 5; expected the name of a field"),
        ({"group_by": "\ud800"}, "not Unicode"),
        ({"group_size": 2}, "group_size is 2 without group_by"),
        ({"group_by": "doc", "group_size": 0}, "group_size is 0"),
        ({"offset": 30, "diversity": 0.5, "fetch_k": 35}, "fetch_k is 35 but k is 10 and offset 30"),
    ],
)
def test_senseless_arguments_are_refused(ask: dict[str, Any], message: str) -> None:
    with holding([[1, 0]], ids=[1]) as db, pytest.raises(BadInput, match=message):
        db.search([[1, 0]], **ask)


def test_a_field_that_no_record_has_warns() -> None:
    warned = pytest.warns(UnknownField, match="did you mean 'document'")
    with holding([[1, 0]], payloads=[{"document": 1}]) as db, warned:
        assert db.search([[1, 0]], group_by="documnt").ids == [[]]


def test_a_group_may_lie_deep() -> None:
    with softdb.open(None, dim=1) as db:
        payloads = [{"a": {"b": [{"c": i % 2}]}, "a.b": 7, "0": 'x"'} for i in range(4)]
        db.insert(range(4), [[4], [3], [2], [1]], payloads=payloads)
        for field, ids in (("a.b.0.c", [0, 1]), ("a\\.b", [0]), ("0", [0]), ("a.b", [])):
            assert db.search([[1.0]], group_by=field).ids == [ids]
