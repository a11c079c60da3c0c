"""The cached order of a declared field equals SQLite's, whatever was committed since."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import apsw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_filters import meets
from test_filter_fields import Trace
from worlds import holding

import softdb
from softdb.filters import fieldorder, masks, parse
from softdb.filters.conditions import statement
from softdb.store.paths import field_sql

NUMBERS = [0, 1, 2, -1, 2**53, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63), 0.5, 2.0**53, -0.0, 1e308, 5e-324]
TEXTS = ["", "a", "ab", "b", "é", "2024-02-29", "1", "nul\0", "\U0010ffff"]
VALUES = [*NUMBERS, 10**30, -(10**30), *TEXTS, True, False, None, [1], {"x": 1}]
PAYLOADS = st.one_of(
    st.sampled_from(VALUES).map(lambda one: {"x": one, "y": 1}),
    st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES)).map(lambda two: {"x": two[0], "y": two[1]}),
    st.sampled_from([None, 7, {}, {"y": "a"}]),
)
RANGES = st.one_of(
    st.dictionaries(
        st.sampled_from(["$gt", "$gte", "$lt", "$lte", "$eq", "$ne"]),
        st.sampled_from([*NUMBERS, *TEXTS]),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([True, False, None, {"$exists": True}, {"$exists": False}, {"$in": [1, "a", None]}]),
    st.sampled_from(TEXTS).map(lambda text: {"$startswith": text}),
)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from(["x", "y", "z"]), RANGES, min_size=1, max_size=2),
    lambda inner: (
        st.dictionaries(st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3), min_size=1)
        | st.dictionaries(st.just("$not"), inner, min_size=1)
    ),
    max_leaves=4,
)
ALWAYS: list[dict[str, Any]] = [
    {"x": {"$gt": 0}},
    {"x": {"$lt": 1}},
    {"y": {"$lte": 2**53}},
    {"x": {"$gte": 1, "$lt": "b"}},
]
SOME = st.lists(st.integers(0, 30), unique=True, max_size=6)  # ids
CHANGES = st.one_of(
    st.tuples(st.just("put"), SOME, st.lists(PAYLOADS, min_size=6, max_size=6), st.booleans()),
    st.tuples(st.just("delete"), SOME),
    st.tuples(st.just("replace"), SOME, PAYLOADS),
    st.tuples(st.just("move"), SOME),
    st.tuples(st.just("compact")),
)


@contextlib.contextmanager
def small(runs: int = 1) -> Iterator[None]:
    """Thresholds for many records, of which few were appended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "LARGE", 0)
        patch.setattr(fieldorder, "MAX_APPENDED", 20)
        patch.setattr(fieldorder, "MAX_RUNS", runs)
        yield


def change(db: softdb.SoftDB, what: tuple[Any, ...]) -> None:
    """One commit."""
    if what[0] == "compact":
        db.compact()
        return
    ids = what[1]
    stored = [one for one in ids if one in db]
    if what[0] == "put" and ids:
        payloads = what[2][: len(ids)]
        if what[3]:
            db.upsert(ids, np.ones((len(ids), 1)), payloads=payloads)
        else:  # every other one without a key
            keys = [None if i % 2 else [1.0] for i in range(len(ids))]
            db.upsert(ids, keys, payloads=payloads, texts=["text"] * len(ids))
    elif what[0] == "delete":
        db.delete(stored)
    elif what[0] == "replace" and stored:
        db.update(stored, payloads=[what[2]] * len(stored))
    elif what[0] == "move":
        keyed = [one for one in stored if db[one].key is not None]
        if keyed:
            db.update(keyed, keys=np.zeros((len(keyed), 1)))


def by_sqlite(db: softdb.SoftDB, where: dict[str, Any]) -> list[int]:
    rows: list[int] = np.sort(db._store.catalog.matching(*statement(parse(where)))).tolist()
    return rows


def agrees(db: softdb.SoftDB, where: dict[str, Any]) -> None:
    """The filter matches what SQLite lists, by the orders of its fields; so do some more."""
    db._store.order_fields()
    for one in [where, *ALWAYS]:
        db._store.matches._cached.clear()  # so that the filter is evaluated again
        assert db._store.matching_rows(one)[1].tolist() == by_sqlite(db, one), one
    for known in db._store.matches.orders._cached.values():
        if known.generation == db.generation:
            assert np.sort(np.concatenate(known.runs)).tolist() == db._store.snapshot.all_rows.tolist()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CHANGES, st.booleans(), FILTERS), min_size=1, max_size=12), st.integers(1, 3))
def test_any_commits_and_filters_agree_with_sqlite(steps: list[tuple[Any, bool, dict[str, Any]]], runs: int) -> None:
    payloads = [{"x": value, "y": i} for i, value in enumerate(VALUES[:12])]
    with small(runs), holding(payloads=payloads, fields=["x", "y"]) as db:
        db._store.order_fields()
        for what, caught_up, where in steps:
            change(db, what)
            if caught_up:  # else several commits at once
                agrees(db, where)
        agrees(db, steps[-1][2])


class Listed(Trace):
    """The SQL that lists rows of a field's index, or puts all in order; not what compares some records."""

    def _keep(self, cursor: Any, sql: str, bindings: Any) -> bool:
        if sql.startswith("SELECT group_concat(row)") and "payload" in sql and "row IN (SELECT value" not in sql:
            self.statements.append("order" if "ORDER BY" in sql else "list")
        return True


def two_fields(**more: Any) -> softdb.SoftDB:
    return holding(payloads=[{"x": i % 100, "y": i} for i in range(400)], fields=["x", "y"], **more)


@pytest.mark.parametrize(
    ("wheres", "listed"),
    [
        ([{"x": {"$lt": 40}}], ["list"]),  # a single question does not pay for an order
        ([{"x": {"$lt": 40}}, {"x": {"$lt": 39}}, {"x": {"$gte": 3, "$lt": 70}}], ["list", "order"]),
        ([{"x": {"$lt": one}} for one in (12, 13, 14, 15)], ["list", "list", "order"]),
        ([{"x": {"$lt": 40}}, {"x": 7}, {"x": {"$ne": 7}}], ["list", "list", "list"]),
        ([{"x": {"$lt": 40}}, {"y": {"$lt": 160}}], ["list", "list"]),
        ([{"x": {"$lt": 40}}, {"x": {"$lt": 39}}, {"x": 7}, {"x": {"$in": [1, 2]}}], ["list", "order", "list"]),
    ],
    ids=range(6),
)
def test_an_order_is_built_once_much_of_an_index_was_listed(wheres: list[dict[str, Any]], listed: list[str]) -> None:
    with small(), two_fields() as db, Listed(db) as asked:
        for where in wheres:
            assert db.count(where) == sum(meets({"x": i % 100, "y": i}, where) for i in range(400))
        assert asked == listed


def test_after_a_commit_a_filter_of_few_does_not_look_through_all_rows() -> None:
    with small(), two_fields() as db:
        db._store.order_fields()
        db.insert([1000], [[1.0]], payloads=[{"x": 7}])
        with Listed(db) as asked:
            assert db.count({"x": 7}) == 5
            assert asked == ["list"]
            assert db.count({"x": {"$lt": 40}}) == 161
            assert db.count({"x": {"$in": []}}) == 0
            assert db.count({"x": {"$gte": 7, "$lt": 8}}) == 5
            assert asked == ["list", "order"], "the order is caught up with what was appended, and used"


def test_the_index_gives_its_order_without_sorting() -> None:
    with small(), two_fields() as db:
        ordered = f"SELECT row FROM records ORDER BY {', '.join(field_sql(('x',)))}, row"
        plan = [row[3] for row in db._store.catalog.all(f"EXPLAIN QUERY PLAN {ordered}")]
        assert plan == ["SCAN records USING COVERING INDEX field_78"]


def test_the_orders_of_recent_fields_are_cached() -> None:
    with small(), holding(payloads=[dict.fromkeys("abcdef", i) for i in range(10)], fields=[*"abcdef"]) as db:
        db.order_fields()
        known = db._store.matches.orders._cached
        assert list(known) == [*"abcd"]
        db.count({"a": {"$lt": 5}})
        for stop in (4, 5):
            db.count({"f": {"$lt": stop}})
        assert list(known) == [*"cdaf"]
        assert all(run.itemsize == 4 for one in known.values() for run in one.runs)


def test_an_order_longer_than_one_statement_is_split() -> None:
    with small(), two_fields() as db:
        db._store.catalog.connection.limit(apsw.SQLITE_LIMIT_LENGTH, 1500)
        db.order_fields()
        with Listed(db) as asked:
            assert db.count({"y": {"$lt": 390}}) == 390
        assert asked == []
