"""Declared fields and cached filters are faster and never change an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_filters import meets, parts_of, spelled
from worlds import holding

import softdb
from softdb.filters import fieldorder, masks, matching, parse
from softdb.filters.conditions import statement
from softdb.store import format, paths

FILTERS: list[dict[str, Any]] = [
    {"year": 3},
    {"year": {"$gte": 2, "$lt": 6}},
    {"year": {"$ne": 3}},
    {"year": {"$in": [1, "1", True, None]}},
    {"year": {"$nin": [1, 2]}},
    {"year": {"$exists": False}},
    {"year": {"$gt": 1}, "note": "even"},
    {"year": 4, "tags": {"$contains": "x"}},
    {"$or": [{"lang": "de"}, {"year": {"$lt": 2}}]},
    {"$or": [{"lang": "de"}, {"note": "odd"}]},
    {"$not": {"year": {"$lt": 5}, "note": "odd"}},
    {"tags": {"$contains": "x"}},
    {},
]


class Trace:
    """The SQL that a handle runs on the records' payloads."""

    def __init__(self, db: softdb.SoftDB) -> None:
        self._connection = db._store.catalog.connection

    def __enter__(self) -> list[str]:
        self.statements: list[str] = []
        self._connection.exec_trace = self._keep
        return self.statements

    def _keep(self, cursor: Any, sql: str, bindings: Any) -> bool:
        if "payload" in sql and sql.startswith("SELECT group_concat"):
            self.statements.append(sql)
        return True

    def __exit__(self, *_: object) -> None:
        self._connection.exec_trace = None


def plan(db: softdb.SoftDB, where: dict[str, Any]) -> str:
    condition, bindings = statement(parse(where))
    sql = f"EXPLAIN QUERY PLAN SELECT group_concat(row) FROM records WHERE {condition}"
    return " | ".join(row[3] for row in db._store.catalog.all(sql, bindings))


def payload(rng: np.random.Generator) -> Any:
    """A random one: most are objects, their fields of mixed types or missing."""
    if rng.random() < 0.1:
        return [None, 5, "year", [3]][rng.integers(4)]
    years: list[Any] = [*range(8), *range(8), 2.5, "3", "1", True, False, None, [3], {"year": 3}]
    found: dict[str, Any] = {"note": ["odd", "even"][rng.integers(2)]}
    if rng.random() < 0.9:
        found["year"] = years[rng.integers(len(years))]
    if rng.random() < 0.8:
        found["lang"] = ["de", "fr", "", 1][rng.integers(4)]
    if rng.random() < 0.5:
        found["tags"] = [["x"], "xyz", "abc", ["y", 1], []][rng.integers(5)]
    return found


def agrees(db: softdb.SoftDB, truth: dict[int, Any]) -> None:
    """Every filter gives what brute force gives."""
    for where in FILTERS:
        found = sorted(int(one) for batch in db.scan(where=where) for one in batch.ids)
        assert found == sorted(one for one, stored in truth.items() if meets(stored, where)), where
        assert db.count(where) == len(found)


# -- the index of a field ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [
        {"year": 2020},
        {"year": "2020"},
        {"year": True},
        {"year": None},
        {"year": {"$gt": 2020}},
        {"year": {"$gte": 2020, "$lt": 2024}},
        {"year": {"$in": [2020, 2021]}},
        {"year": {"$exists": False}},
        {"year": 2020, "note": "odd"},
        {"$or": [{"year": 2020}, {"year": {"$lt": 1990}}]},
        {"year": {"$startswith": "20"}},
        {"year": {"$startswith": ""}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["year", "author.year", "tags.0", r"a\.b", "n.0.x.1"])
def test_sqlite_answers_from_the_index(where: dict[str, Any], name: str) -> None:
    where = json.loads(json.dumps(where).replace('"year"', json.dumps(name)))
    with softdb.open(None, dim=1) as db:
        assert "INDEX field_" not in plan(db, where)
        db.index_field(name)
        assert "INDEX field_" in plan(db, where)
        assert "SCAN records" not in plan(db, where)


def test_a_prefix_bounds_one_search_on_both_sides() -> None:
    with softdb.open(None, dim=1, fields=["name.last"]) as db:
        assert plan(db, {"name.last": {"$startswith": "Sch"}}).count("<expr>>? AND <expr><?") == 1


@pytest.mark.parametrize(
    "where",
    [{"year": {"$ne": 3}}, {"year": {"$nin": [3, 4]}}, {"year": {"$exists": True}}, {"$not": {"year": {"$lt": 3}}}],
    ids=repr,
)
def test_negations_look_up_the_excluded_rows(where: dict[str, Any]) -> None:
    with holding(payloads=[{"year": i % 7} for i in range(50)], fields=["year"]) as db:
        with Trace(db) as asked:
            db.count(where)
        assert len(asked) >= 1
        for sql in asked:
            bound = [0] * sql.count("?") if "json_each" not in sql else [*["[]"] * sql.count("?")]
            assert "SEARCH" in db._store.catalog.all(f"EXPLAIN QUERY PLAN {sql}", bound)[0][3]


@pytest.mark.parametrize(
    ("where", "comparisons"),
    [
        ({"year": {"$lt": 90}}, [">= ?"]),
        ({"year": {"$gte": 5, "$lte": 95}}, ["< ?", "> ?"]),
        ({"$and": [{"year": {"$ne": 200}}, {"year": {"$gt": 9}}]}, ["<= ?", "= ?"]),
        ({"lang": "de"}, ["< ?", "> ?"]),
        ({"new": True}, []),
        ({"year": {"$lt": 40}}, None),
        ({"year": {"$in": [*range(90)]}}, None),
    ],
    ids=repr,
)
def test_where_most_records_match_the_index_lists_the_others(
    where: dict[str, Any], comparisons: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "LARGE", 100)
    odd: list[Any] = [None, {"year": "5", "lang": 5, "new": None}]
    payloads = [{"year": i, "lang": "fr" if i == 7 else "de", "new": i != 3} for i in range(98)] + odd
    with holding(payloads=payloads, fields=["year", "lang", "new"]) as db:
        with Trace(db) as asked:
            results = [one for batch in db.scan(where=where) for one in batch.ids]
        assert results == [i for i, payload in enumerate(payloads) if meets(payload, where)]
        listed = [sql for sql in asked if "row IN (SELECT value FROM json_each" not in sql]
        if comparisons is None:
            assert [sql.count("FROM records WHERE") for sql in listed] == [1]
            return
        assert [sql for sql in listed if "IS NULL" in sql]
        for sql in listed:
            steps = [row[3] for row in db._store.catalog.all(f"EXPLAIN QUERY PLAN {sql}", [0] * sql.count("?"))]
            assert steps[0].startswith("SEARCH records USING")
        pairs = re.findall(r"\) ([<>=]+ \?) AND", " ".join(listed))
        assert sorted(pairs) == sorted(comparisons)


def test_unindexed_conditions_read_only_rows_that_match_the_index() -> None:
    with holding(payloads=[{"year": i, "note": "a"} for i in range(100)], fields=["year"]) as db:
        with Trace(db) as asked:
            assert db.count({"note": "a", "year": {"$gte": 95}}) == 5
        assert len(asked) == 2
        assert "row IN (SELECT value" in asked[1]
        with Trace(db) as asked:
            assert db.count({"note": "a", "year": {"$gte": 5}}) == 95  # too many for one lookup each
        assert "row IN (SELECT value" not in asked[1]


def test_both_ends_of_a_range_bound_one_search_and_the_last_few_are_read() -> None:
    with holding(payloads=[{"year": i, "lang": "de"} for i in range(600)], fields=["year", "lang"]) as db:
        with Trace(db) as asked:
            assert db.count({"$and": [{"year": {"$gte": 50}}, {"year": {"$lt": 52}}]}) == 2
        assert len(asked) == 1
        with Trace(db) as asked:
            assert db.count({"year": {"$gte": 50, "$lt": 52}, "lang": "de"}) == 2
        assert ["row IN (SELECT value" in sql for sql in asked] == [False, True]
        with Trace(db) as asked:
            assert db.count({"year": {"$gte": 50, "$lt": 90}, "lang": {"$ne": "fr"}}) == 40
        assert not any("row IN (SELECT value" in sql for sql in asked)


def test_declared_fields_are_remembered(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1, fields=["year"]) as db:
        db.index_field("lang", "year")
        assert db.stats().fields == ["lang", "year"]
    with softdb.open(tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r", fields=["year"]) as reader:
        assert db.stats().fields == reader.stats().fields == ["lang", "year"]
        db.drop_field("lang")
        assert db.stats().fields == reader.stats().fields == ["year"]
        assert db.verify() == 0
    with softdb.open(tmp_path / "db", fields=["more"]) as db:
        assert db.stats().fields == ["more", "year"]


NAMES = [
    "Year", "year", "it's", "x' OR 1=1 --", "do.t", "two words", "new\nline", "[0]", "", "naïve 😀", "field_00", "?",
    'q"uote', "back\\slash", "two.names", r"dot\.ted", r"\.", "list.0.2.x", r"end\\",
]  # fmt: skip


def nested(name: str) -> Any:
    found: Any = 1
    for part in reversed(parts_of(name)):
        found = {part: found}
    return found


def test_fields_of_any_name(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1, fields=NAMES) as db:
        assert db.stats().fields == sorted(NAMES)
        db.insert(NAMES, np.ones((len(NAMES), 1)), payloads=[nested(name) for name in NAMES])
    with softdb.open(tmp_path / "db", verify=True) as db:  # the schema is looked through, to the letter
        assert db.stats().fields == sorted(NAMES)
        for name in NAMES:
            assert "INDEX field_" in plan(db, {name: 1})
            assert [one for batch in db.scan(where={name: 1}) for one in batch.ids] == [name]
            db.drop_field(name)
            assert [one for batch in db.scan(where={name: {"$gt": 0}}) for one in batch.ids] == [name]


def test_a_field_has_one_index_however_it_is_spelled() -> None:
    with softdb.open(None, dim=1, fields=[r"a\b", r"a\\b", r"c.d"]) as db:
        assert db.stats().fields == ["a\\b", "c.d"]
        db.drop_field(r"a\\b")
        assert db.stats().fields == ["c.d"]


def test_a_field_index_of_earlier_versions_keeps_a_name_with_a_dot() -> None:
    index = f"field_{b'do.t'.hex()}"
    assert format.indexed_field(index) == (r"do\.t",)
    path = """'$."do.t"'"""
    before = f"CREATE INDEX {index} ON records(json_type(payload, {path}), json_extract(payload, {path}))"
    assert format.field_index_sql(r"do\.t") == before


@given(st.lists(st.text("ab.\\0\"'", min_size=1, max_size=4), min_size=1, max_size=4))
def test_each_field_is_spelled_in_one_way(parts: list[str]) -> None:
    name = paths.spelled(parts)
    assert paths.parts_of(name) == tuple(parts) == tuple(parts_of(name)) == paths.parts_of(spelled(parts))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("year", "expected a list of field names"),
        (7, "expected a list of field names"),
        ([1], "field names are str"),
        (["a..b"], "a dot with no name beside it"),
        (["a.0.0.0.0.0"], "more than 4 numbers"),
        ([".".join("a" * 65)], "65 names deep"),
        (["nul\0"], "can have no index"),
        (["\ud800"], r"a field's name holds the lone surrogate '\\ud800', which is not Unicode"),
    ],
)
def test_invalid_field_names_are_refused(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(softdb.BadInput, match=f"open: .*{message}"):
        softdb.open(tmp_path / "db", dim=1, fields=fields)
    assert not (tmp_path / "db").exists()


def test_fields_are_declared_by_a_writer_and_dropped_once(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1) as db:
        with pytest.raises(softdb.BadInput, match="drop_field: field 'year' has no index; indexed fields: none"):
            db.drop_field("year")
        with pytest.raises(softdb.BadInput, match="index_field: fields hold 1"):
            db.index_field("lang", 1)  # type: ignore[arg-type]
        assert db.stats().fields == []
    with softdb.open(tmp_path / "db", mode="r") as reader, pytest.raises(softdb.ReadOnly, match="index_field: "):
        reader.index_field("year")
    with pytest.raises(softdb.BadInput, match="fields year have no index and mode is 'r'"):
        softdb.open(tmp_path / "db", mode="r", fields=["year"])


# -- caches ------------------------------------------------------------------------------------------------------------


def change(db: softdb.SoftDB, truth: dict[int, Any], fresh: Iterator[int], rng: np.random.Generator) -> None:
    """One random commit, and the same in the truth."""
    some = [int(one) for one in rng.permutation(list(truth))[:5]]
    new = [next(fresh) for _ in range(rng.integers(1, 25))]
    kind = ["insert", "upsert", "payloads", "keys", "delete", "delete"][rng.integers(6)] if some else "insert"
    ids = {"insert": new, "upsert": some + new, "payloads": some}.get(kind, [])
    payloads, keys = [payload(rng) for _ in ids], np.ones((len(ids), 2))
    if kind == "insert":
        db.insert(ids, keys, payloads=payloads)
    elif kind == "upsert":
        db.upsert(ids, keys, payloads=payloads)
    elif kind == "payloads":
        db.update(ids, payloads=payloads)
    elif kind == "keys":
        db.update(some, keys=np.zeros((len(some), 2)))
    else:
        db.delete(some)
        for one in some:
            del truth[one]
    truth.update(zip(ids, payloads, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [[], ["year"], ["year", "lang", "note"]], ids=len)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_changes_agrees_with_brute_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: list[str], seed: int
) -> None:
    rng, truth, fresh = np.random.default_rng(seed), dict[int, Any](), iter(range(10**6))
    monkeypatch.setattr(matching, "MAX_APPENDED", 15)  # so that both ways of catching up are taken
    monkeypatch.setattr(masks, "LARGE", 20)  # and both of asking an index
    monkeypatch.setattr(fieldorder, "MAX_APPENDED", 50)  # and all of keeping its order
    monkeypatch.setattr(fieldorder, "MAX_RUNS", 2)
    with softdb.open(tmp_path / "db", dim=2, fields=fields) as db, softdb.open(tmp_path / "db", mode="r") as reader:
        for step in range(40):
            change(db, truth, fresh, rng)
            if rng.random() < 0.1:
                db.compact()
            if step == 20:
                db.index_field("tags")
            if rng.random() < 0.7:  # else several commits are caught up with at once
                agrees(db, truth)
            if rng.random() < 0.5:
                agrees(reader, truth)
        agrees(db, truth)
        assert db.verify() == len(truth)


def test_after_a_commit_only_appended_rows_are_read() -> None:
    with holding(payloads=[{"x": i % 2} for i in range(20)]) as db:
        assert db.count({"x": 1}) == 10
        db.insert([20, 21], np.ones((2, 1)), payloads=[{"x": 1}, {"x": 0}])
        with Trace(db) as asked:
            assert db.count({"x": 1}) == 11
        assert len(asked) == 1
        assert "row >= ?" in asked[0]
        db.delete([1, 20])
        with Trace(db) as asked:
            assert db.count({"x": 1}) == 9
        assert asked == []
        db.insert([22], np.ones((1, 1)), payloads=[{"x": 1}])
        assert db.count({"x": 1}) == 10


@pytest.mark.parametrize(("fields", "anew"), [([], False), (["x"], True)])
def test_after_many_appended_rows_an_index_is_quicker(
    monkeypatch: pytest.MonkeyPatch, fields: list[str], anew: bool
) -> None:
    monkeypatch.setattr(matching, "MAX_APPENDED", 3)
    with holding(payloads=[{"x": 1}], ids=[9], fields=fields) as db:
        assert db.count({"x": 1}) == 1
        db.insert(range(4), np.ones((4, 1)), payloads=[{"x": 1}] * 4)
        with Trace(db) as asked:
            assert db.count({"x": 1}) == 5
        assert ["row >= ?" in sql for sql in asked] == [not anew]


def test_a_returned_mask_does_not_change() -> None:
    with holding(payloads=[{"x": 1}] * 4) as db:
        before = db._store.matching({"x": 1})[1]
        db.delete([0])
        after = db._store.matching({"x": 1})[1]
        assert before.tolist() == [True] * 4
        assert after.tolist() == [False, True, True, True]
        assert db._store.matching({"x": 1})[1] is after


@pytest.mark.parametrize("fields", [[], ["x"]])
def test_a_reader_hears_of_payloads_replaced_by_the_writer(tmp_path: Path, fields: list[str]) -> None:
    with softdb.open(tmp_path / "db", dim=1, fields=fields) as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.insert(["a", "b"], np.ones((2, 1)), payloads=[{"x": 1}, {"x": 2}])
        assert reader.count({"x": 1}) == 1
        db.update("b", payloads=[{"x": 1}])
        db.insert(["c"], np.ones((1, 1)), payloads=[{"x": 1}])  # a later commit does not hide the one before
        assert reader.count({"x": 1}) == db.count({"x": 1}) == 3


def test_compaction_moves_the_records_a_filter_matches() -> None:
    with holding(payloads=[{"x": i % 3} for i in range(40)]) as db:
        truth = {i: {"x": i % 3} for i in range(40)}
        assert db.count({"x": 1}) == 13
        db.delete(range(0, 40, 4))
        db.compact()
        db.insert([100, 101], np.ones((2, 1)), payloads=[{"x": 1}, {"x": 2}])
        truth = {i: p for i, p in truth.items() if i % 4} | {100: {"x": 1}, 101: {"x": 2}}
        results = [int(i) for batch in db.scan(where={"x": 1}) for i in batch.ids]
        assert results == [i for i, p in truth.items() if p["x"] == 1]


def test_row_lists_longer_than_one_statement_are_split() -> None:
    import apsw

    with holding(payloads=[{"x": i % 2} for i in range(1000)]) as db:
        db._store.catalog.connection.limit(apsw.SQLITE_LIMIT_LENGTH, 1500)
        assert db.count({"x": 1}) == 500
