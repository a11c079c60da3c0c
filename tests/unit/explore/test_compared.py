"""Records compared once for search and weights: the same records in the same order as `search`, whatever the world."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import awkward

import softdb
from softdb.attend import Stored
from softdb.kernels import available
from softdb.tools.cli.served import Served
from softdb.tools.explore.answers import Answers
from softdb.tools.explore.asked import Question, Weighing
from softdb.tools.explore.command import _listening
from softdb.tools.explore.compared import Compared
from softdb.tools.explore.told import named_id

pytestmark = pytest.mark.skipif(not available(), reason="without kernels records are compared by search itself")

FILTERS: list[dict[str, Any] | None] = [None, {"x": {"$lt": 900}}, {"x": {"$lt": 3}}, {"x": 1}, {"x": -1}]


def asked(**given: Any) -> tuple[Question, Weighing]:
    words = {name: str(value) for name, value in given.items()}
    return Question.of(words), Weighing.of(words)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_the_nearest_are_those_of_search(metric: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    keys = np.concatenate([awkward(rng, 1500, 6), rng.normal(size=(2500, 6))])
    with softdb.open(tmp_path / "db", dim=6, metric=metric, fields=["x"]) as db:
        db.insert(range(len(keys)), keys, payloads=[{"x": i % 1000} for i in range(len(keys))])
        db.delete(range(0, len(keys), 7))
    served = Served(tmp_path / "db")
    with served, softdb.open(tmp_path / "db", mode="r") as db:
        compared, kept, plainly = Compared(), 0, 0
        for query in [*rng.normal(size=(8, 6)), keys[1], keys[1501], np.zeros(6)]:
            vector = " ".join(str(one) for one in query.astype(np.float32))
            for where in FILTERS:
                for shown in (1, 10, 50):
                    question, _ = asked(vector=vector, shown=shown, **({"where": json.dumps(where)} if where else {}))
                    tensor = db.as_queries([list(question.vector or ())])
                    hits = compared.nearest(db, question, tensor)
                    plainly += hits is None
                    if hits is not None:
                        kept += 1
                        right = db.search(tensor, shown, where=where)
                        assert hits.ids == right.ids
                        names = len(hits.ids[0])
                        np.testing.assert_allclose(
                            hits.scores[0, :names], right.scores[0, :names], rtol=1e-5, atol=1e-6
                        )
        assert kept > 10 * plainly  # of a query of zeros all products are 0: only the order of rows tells
        assert plainly > 0 or metric == "l2"


def test_ties_at_the_end_of_the_list_are_left_to_search(rng: np.random.Generator) -> None:
    with softdb.open(None, dim=3, metric="cosine") as db:
        db.insert(range(3000), np.tile(rng.normal(size=(3, 3)), (1000, 1)))
        question, weighing = asked(vector="1 2 3", shown=5)
        query = db.as_queries([list(question.vector or ())])
        assert Compared().nearest(db, question, query) is None
        answer = Answers(Served(None, db=db)).ask(question, weighing, lambda: None)
        assert [one["id"] for one in answer["hits"]] == [named_id(one) for one in db.search(query, 5).ids[0]]


def test_a_question_is_compared_once_whatever_filter_and_temperature(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    scored = Stored.scored

    def counting(self: Stored, request: Any, positions: Any) -> Any:
        counted.append(positions.size)
        return scored(self, request, positions)

    monkeypatch.setattr(Stored, "scored", counting)
    with softdb.open(None, dim=4, metric="cosine", fields=["x"]) as db:
        db.insert(range(2000), rng.normal(size=(2000, 4)), payloads=[{"x": i} for i in range(2000)])
        answers = Answers(Served(None, db=db))
        for where in ({}, {"where": '{"x": {"$lt": 500}}'}, {"where": '{"x": {"$gte": 500}}'}):
            for t in (0.1, 1):
                answers.ask(*asked(vector="1 2 3 4", temperature=t, **where), lambda: None)
        assert counted.count(2000) == 1
        assert max(one for one in counted if one < 2000) <= 10
        answers.ask(*asked(vector="1 2 3 5"), lambda: None)
        assert counted.count(2000) == 2
        db.insert([5000], rng.normal(size=(1, 4)), payloads=[{"x": 5000}])  # another generation
        answers.ask(*asked(vector="1 2 3 5"), lambda: None)
        assert counted.count(2001) == 1


def test_the_effective_number_is_that_of_the_weights(rng: np.random.Generator) -> None:
    keys = rng.normal(size=(3000, 4)).astype(np.float32)
    with softdb.open(None, dim=4, metric="l2", fields=["x"]) as db:
        db.insert(range(3000), keys, payloads=[{"x": i} for i in range(3000)])
        answers = Answers(Served(None, db=db))
        for where, least in (({}, 0), ({"where": '{"x": {"$gte": 500}}'}, 500)):
            for t in (0.01, 0.5, 20):
                soft = answers.ask(*asked(vector="1 0 0 1", temperature=t, **where), lambda: None)["soft"]
                scores = -((keys[least:].astype(np.float64) - [1, 0, 0, 1]) ** 2).sum(1)
                weights = np.exp((scores - scores.max()) / t)
                assert soft["effective"] == pytest.approx(weights.sum() ** 2 / np.square(weights).sum(), rel=1e-4)


def test_where_an_index_is_asked_it_is_asked(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("faiss")
    with softdb.open(tmp_path / "db", dim=8, metric="cosine") as db:
        db.insert(range(6000), rng.normal(size=(6000, 8)))
        question, _ = asked(vector="1 2 3 4 5 6 7 8")
        query = db.as_queries([list(question.vector or ())])
        assert Compared().nearest(db, question, query) is not None
        db.build_index("ivf")
        assert Compared().nearest(db, question, query) is None


def test_the_end_of_an_answer_does_not_wait_for_the_browser() -> None:
    """asyncio switches Nagle's algorithm off where a socket says that it is TCP; else an answer may take 40 ms more."""
    with _listening(0) as listener, contextlib.closing(socket.create_connection(listener.getsockname())):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_map_comes_with_the_order_of_declared_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.store.matches.LARGE", 0)
    with softdb.open(None, dim=2, fields=["x"]) as db:
        db.insert(range(40), np.ones((40, 2)), payloads=[{"x": i} for i in range(40)])
        answers = Answers(Served(None, db=db))
        asked = list[str]()

        def trace(_: object, sql: str, __: object) -> bool:
            asked.append(sql)
            return True

        answers.map()
        db._store.catalog.connection.exec_trace = trace
        assert db.count({"x": {"$lt": 20}}) == 20
        listed = [sql for sql in asked if "payload" in sql and "row IN (SELECT value" not in sql]
        assert listed == []
        assert len(asked) > 1
