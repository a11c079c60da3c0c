"""`where` against an oracle in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_filters import meets

import softdb

PAYLOADS: list[Any] = [
    None,
    7,
    "text",
    [1, 2],
    {},
    {"year": 2020, "lang": "de", "tags": ["new", "red"]},
    {"year": "1999", "lang": "fr", "draft": True},
    {"year": 2020.5, "draft": False, "tags": []},
    {"year": None, "lang": "", "tags": "renewed"},
    {"year": -1, "lang": "de", "draft": 1, "tags": [1, True, None, "1"]},
    {'q"uote': 1, "back\\slash": 2, "do.t": 3, "$dollar": 4, "é": 5, "": 6, "new\nline": 7, "[0]": 8, "nul\0": 9},
    {"year": 2**62, "nested": {"year": 2020}},
    {"year": "x' OR 1=1 --", "lang": "naïve 😀"},
]


@pytest.fixture(scope="module")
def db() -> softdb.SoftDB:
    db = softdb.open(None, dim=2)
    db.insert(list(range(len(PAYLOADS))), np.ones((len(PAYLOADS), 2)), payloads=PAYLOADS)
    return db


@pytest.fixture(scope="module")
def declared() -> softdb.SoftDB:
    """The same records, with an index on every field that can have one."""
    db = softdb.open(None, dim=2, fields=["year", "lang", "draft", "tags"])
    db.insert(list(range(len(PAYLOADS))), np.ones((len(PAYLOADS), 2)), payloads=PAYLOADS)
    db.index_field("nested", "absent", "do.t", "é", "", "new\nline", "[0]")
    return db


def ids(db: softdb.SoftDB, where: dict[str, Any]) -> list[int]:
    return [int(i) for batch in db.scan(where=where) for i in batch.ids]


def oracle(where: dict[str, Any], payloads: list[Any] = PAYLOADS) -> list[int]:
    return [i for i, payload in enumerate(payloads) if meets(payload, where)]


FIELDS = st.sampled_from(
    ["year", "lang", "draft", "tags", "nested", "absent", 'q"uote', "back\\slash", "do.t", "é", ""]
)
ORDERED = st.sampled_from([2020, 2020.5, -1, 0, 2**62, "1999", "de", "", "x' OR 1=1 --", "naïve 😀", "new"])
SCALARS = ORDERED | st.sampled_from([True, False, None, 1, "1"])
CONDITIONS = st.recursive(
    SCALARS
    | st.dictionaries(st.sampled_from(["$eq", "$ne", "$contains"]), SCALARS, min_size=1)
    | st.dictionaries(st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), ORDERED, min_size=1)
    | st.dictionaries(st.sampled_from(["$in", "$nin"]), st.lists(SCALARS), min_size=1)
    | st.dictionaries(st.just("$exists"), st.booleans(), min_size=1),
    lambda inner: st.dictionaries(st.just("$not"), inner, min_size=1),
    max_leaves=3,
)
FILTERS = st.recursive(
    st.dictionaries(FIELDS, CONDITIONS, max_size=2),
    lambda inner: (
        st.dictionaries(st.sampled_from(["$and", "$or"]), st.lists(inner, max_size=3), min_size=1)
        | st.dictionaries(st.just("$not"), inner, min_size=1)
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(FILTERS)
def test_a_filter_matches_what_the_oracle_matches(where: dict[str, Any]) -> None:
    for db in _DATABASES:
        assert ids(db, where) == oracle(where)
        assert db.count(where) == len(oracle(where))


@pytest.fixture(autouse=True, scope="module")
def _module_databases(db: softdb.SoftDB, declared: softdb.SoftDB) -> None:
    _DATABASES[:] = [db, declared]


_DATABASES: list[softdb.SoftDB] = []


@pytest.mark.parametrize(
    "where",
    [
        {"year": {"$gte": 2020}},
        {"year": {"$gte": 2020, "$lt": 2020.2}, "lang": "de"},
        {"$or": [{"lang": "fr"}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}},
        {'q"uote': 1},
        {"back\\slash": {"$gt": 1}},
        {"do.t": 3},
        {"": 6},
        {"new\nline": 7},
        {"nul\0": 9},
        {"[0]": 8},
        {"lang": {"$nin": []}},
        {"lang": {"$in": []}},
        {},
        {"$and": []},
        {"$or": []},
    ],
    ids=repr,
)
def test_named_cases(db: softdb.SoftDB, declared: softdb.SoftDB, where: dict[str, Any]) -> None:
    assert ids(db, where) == oracle(where)
    assert ids(declared, where) == oracle(where)


def test_text_is_never_a_number(db: softdb.SoftDB) -> None:
    assert ids(db, {"year": {"$gte": 1990}}) == [5, 7, 11]


def test_a_field_named_like_an_operator_can_be_stored_but_not_asked(db: softdb.SoftDB) -> None:
    with pytest.raises(softdb.BadFilter, match=r"unknown operator '\$dollar'"):
        db.count({"$dollar": 4})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("year > 2020", "expected a dict"),
        ({"year": {"$near": 1}}, r"unknown operator '\$near'"),
        ({"$xor": []}, r"unknown operator '\$xor'"),
        ({"$and": {}}, "expected a list of filters"),
        ({"year": {}}, "empty dict"),
        ({"year": {"$gt": True}}, "only numbers and strings have an order"),
        ({"year": {"$gt": None}}, "only numbers and strings have an order"),
        ({"year": [1]}, r"\$contains"),
        ({"year": {"$in": 3}}, "take a list"),
        ({"year": {"$exists": 1}}, "True or False"),
        ({"year": float("nan")}, "nan"),
        ({"year": 2**64}, "at most 64 bits"),
        ({"year": b"x"}, "bytes"),
        ({1: 2}, "field names are str"),
        ({"year": "\ud800"}, "not Unicode"),
        ({"\ud800": 1}, "not Unicode"),
    ],
)
def test_what_is_not_of_the_grammar_is_refused(db: softdb.SoftDB, where: Any, message: str) -> None:
    with pytest.raises(softdb.BadFilter, match=message):
        db.count(where)


def test_a_filter_nested_too_deep_is_refused(db: softdb.SoftDB) -> None:
    where: dict[str, Any] = {"year": 1}
    for _ in range(1000):
        where = {"$not": where}
    with pytest.raises(softdb.BadFilter, match="deeper than 64"):
        db.count(where)


def test_a_remembered_filter_sees_the_next_commit() -> None:
    with softdb.open(None, dim=1) as db:
        db.insert(["a", "b"], [[1], [2]], payloads=[{"x": 1}, {"x": 2}])
        assert db.count({"x": 1}) == db.count({"x": 1}) == 1
        db.update("b", payloads=[{"x": 1}])
        assert db.count({"x": 1}) == 2
        db.delete("a")
        assert db.count({"x": 1}) == 1


def test_a_long_list_of_alternatives_is_no_deep_expression(db: softdb.SoftDB, declared: softdb.SoftDB) -> None:
    where = {"$or": [{"year": year} for year in range(3000)]}
    assert ids(db, where) == ids(declared, where) == oracle(where)


@pytest.mark.parametrize("where", [[], "", 0])
def test_nothing_is_deleted_by_what_is_no_filter(where: Any) -> None:
    with softdb.open(None, dim=1) as db:
        db.insert(["a"], [[1]], payloads=[{"x": 1}])
        with pytest.raises(softdb.BadFilter, match="expected a dict"):
            db.delete(where=where)
        assert len(db) == 1
