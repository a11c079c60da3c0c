"""Answers as sequences without padding, and as short text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worlds import holding, labelled

import softdb
from softdb import Hit, Record


@pytest.fixture
def db() -> softdb.SoftDB:
    return labelled()


def test_hits_hold_no_padding(db: softdb.SoftDB) -> None:
    hits = db.search([[1, 0], [-1, 0]], k=5)
    assert hits.rows.shape == hits.scores.shape == (2, 3)
    assert len(hits) == 2
    assert [len(hit) for hit in hits] == [3, 3]
    assert list(hits[0]) == [Hit("a", 3.0, 0, {"x": 1}), Hit(7, 2.0, 1, None), Hit("c", 1.0, 2, "p" * 500)]
    assert [hit.id for hit in hits[-1]] == hits.ids[1] == ["c", 7, "a"]
    assert [[hit.payload for hit in mine] for mine in hits] == hits.payloads
    assert hits[0][-1] == hits[0][1:][1]
    assert hits[1:].ids == hits.ids[1:]
    name, score, row, payload, text = hits[0][0]
    assert (name, score, row, payload, text) == ("a", 3.0, 0, {"x": 1}, None)
    with pytest.raises(IndexError):
        hits[2]
    with pytest.raises(IndexError):
        hits[0][3]


def test_a_query_without_hits_is_empty(db: softdb.SoftDB) -> None:
    hits = db.search([[1, 0], [-1, 0]], radius=2.5)
    assert [len(hit) for hit in hits] == [1, 0]
    assert hits.ids == [["a"], []]
    assert (hits.rows.tolist(), hits.live.tolist()) == ([[0], [-1]], [[True], [False]])  # arrays are rectangular
    assert not list(db.search([[1, 0]], where={"x": 2})[0])


@pytest.mark.parametrize("shape", [{}, {"value_dim": 4}, {"num_classes": 3}], ids=str)
@pytest.mark.parametrize("stored", [0, 1])
def test_no_records_have_the_shapes_and_types_of_some(shape: dict[str, int], stored: int) -> None:
    with softdb.open(None, dim=2, dtype="float16", **shape) as db:  # type: ignore[arg-type]
        values: Any = {"value_dim": torch.zeros(1, 4), "num_classes": [2]}.get(next(iter(shape), ""))
        none = db.get([])
        db.insert(["a"], [[1, 0]], values)
        one = db.get(["a"])
        none = db.get([]) if stored else none
    assert (none.ids, none.payloads, none.keys.shape, none.keys.dtype) == ([], [], (0, 2), one.keys.dtype)
    if one.values is None or none.values is None:
        assert one.values is none.values is None
    else:
        assert (none.values.shape, none.values.dtype) == ((0, *one.values.shape[1:]), one.values.dtype)


def test_counting_hits_does_not_read_the_catalogue(db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = db.search([[1, 0]], k=5)
    monkeypatch.setattr(type(db._store), "read", lambda *_: pytest.fail("read"))
    assert len(hits[0]) == 3


def test_hits_that_are_gone_are_refused_and_still_printed(db: softdb.SoftDB) -> None:
    hits = db.search([[1, 0]], k=5)
    db.delete(["a"])
    with pytest.raises(softdb.StaleRead, match="1 of 3 hits"):
        hits[0][1]
    assert repr(hits) == "<Hits of 1 query: [row 0 3, 7 2, 'c' 1]>"
    db.close()
    assert repr(hits) == "<Hits of 1 query: [row 0 3, row 1 2, row 2 1]>"


def test_records_are_a_sequence(db: softdb.SoftDB) -> None:
    records = db.get(["a", 7, "c"])
    assert len(records) == 3
    assert [record.id for record in records] == ["a", 7, "c"]
    assert records[-1].value == 2
    part = records[1:]
    assert (part.ids, part.payloads, part.keys.tolist()) == ([7, "c"], [None, "p" * 500], [[2, 0], [1, 0]])
    assert part.values is not None
    assert part.values.tolist() == [1, 2]
    with pytest.raises(IndexError):
        records[3]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda db: db.search([[1, 0], [0, 1]], k=5), "<Hits of 2 queries: ['a' 3, 7 2, 'c' 1], ['a' 0, 7 0, 'c' 0]>"),
        (lambda db: db.search([[1, 0]] * 9, k=1), "<Hits of 9 queries: ['a' 3], ['a' 3], ['a' 3], …>"),
        (lambda db: db.search([[1, 0]], k=2)[0], "['a' 3, 7 2]"),
        (lambda db: db.search([[1, 0]], k=2)[0][0], "Hit(id='a', score=3, row=0, payload={'x': 1})"),
        (lambda db: db[7], "Record(7, key (2,) float32, value 1, payload None)"),
        (lambda db: db.get([7, "a"]), "<2 Records: 7, 'a'; keys (2, 2) float32, values (2,) int64>"),
        (
            lambda db: db.attend([[1.0, 0]], temperature=0.1),
            "<Pooled: output (1, 3) float32, 1 of 1 exact, finder 'all'>",
        ),
        (
            lambda db: db.attend([[1.0, 0]], temperature=0.1, k=2),
            "<Pooled: output (1, 3) float32, 0 of 1 exact, finder 'flat', hits [['a' 3, 7 2]]>",
        ),
        (
            lambda db: db.attend([[1.0, 0]], temperature=0.1).explain(2)[0],
            "<Explanation: 'a' 100.00%, 7 0.00%; 100.00% in 2 records>",
        ),
        (lambda db: db.sample([[9.0, 0]], n=2), "<Samples (1, 2) float32: <Hits of 1 query: ['a' 27, 'a' 27]>>"),
        (lambda db: db.count_within([[1.0, 0]], 2.0), "<Estimate: 2 ± 0>"),
    ],
)
def test_answers_print_briefly(db: softdb.SoftDB, answer: Any, text: str) -> None:
    assert repr(answer(db)) == text


def test_long_answers_stay_short() -> None:
    record = Record("a", torch.zeros(384), torch.zeros(100), {"text": "long " * 1000})
    assert len(repr(record)) < 250
    with holding(torch.randn(5000, 384), payloads=["long " * 100] * 5000) as db:
        hits, read = db.search(torch.randn(1000, 384), k=100), list[int]()

        def watched(rows: Any, payloads: bool = True, texts: bool = False) -> Any:
            read.append(len(rows))
            return hits.resolve(rows)

        assert len(repr(softdb.Hits(hits.rows, hits.scores, watched))) < 300
        assert 0 < sum(read) <= 9
        assert len(repr(db.get(range(5000)))) < 150
        assert len(repr(db.attend(torch.randn(1000, 384)))) < 150


def test_reports_and_statistics_have_a_repr(db: softdb.SoftDB) -> None:
    stats = db.stats()
    assert (stats.records, stats.index, stats.asdict()["num_classes"]) == (3, None, 3)
    assert "records=3, keyless=0, dead=0, dim=2, value_dim=None, num_classes=3" in repr(stats)
    report = db.build_index()
    assert repr(report) == (
        "IndexReport(kind='flat', recall=1.0, met=True, reason='3 records are searched exactly in a moment')"
    )
    assert report.asdict()["nprobe"] == 0
    with pytest.raises(AttributeError):
        report.kind = "ivf"  # type: ignore[misc]


def test_a_database_has_a_short_text(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with softdb.open(tmp_path / "db", dim=3, value_dim=2, dtype="float16", metric="l2", fields=["b", "a"]) as db:
        monkeypatch.setattr("softdb.store.files.occupied", lambda *_: pytest.fail("a walk over the directory"))
        assert (db.dim, db.value_dim, db.num_classes) == (3, 2, None)
        assert (db.dtype, db.metric, db.mode, db.path) == ("float16", "l2", "rw", tmp_path / "db")
        assert db.fields == ("a", "b")
        assert db.device == torch.device("cpu")
        before = db.generation
        db.insert([0], [[1, 2, 3]], [[1, 2]])
        assert db.generation == before + 1
        assert db.count() == 1
        with softdb.open(tmp_path / "db", mode="r") as reader:
            assert (reader.mode, reader.generation) == ("r", db.generation)
    assert (db.dim, db.metric) == (3, "l2")
    with pytest.raises(softdb.Closed):
        _ = db.generation
    with pytest.raises(softdb.Closed):
        _ = db.fields
