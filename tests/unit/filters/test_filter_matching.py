"""`where` against an oracle in plain Python."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_filters import MISSING, meets
from worlds import holding

import softdb
from softdb.filters import fieldorder, masks

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
    {
        "do": {"t": 10},
        "do.t": 11,
        "a": {"b.c": [1, {"d": 12}], "0": {"": 13}},
        "n": [[1, 2], {"0": 14}],
        "back\\.slash": 15,
    },
    {"0": 16, "a": [{"b": "Ann", "c": 1}, {"b": "Bob", "c": 2}, "Ann", None, [17, 18]], "n": {"0": {"1": 19}}},
    {"day": "2024-02-29", "at": "2024-02-29T10:00:00+00:00", "a": {"b": "\ud7ffx", "c": "\U0010ffffy", "nul\0": 20}},
]


@pytest.fixture(scope="module")
def db() -> Iterator[softdb.SoftDB]:
    with holding(np.ones((len(PAYLOADS), 2)), payloads=PAYLOADS) as db:
        yield db


def indexed() -> softdb.SoftDB:
    """A database of these records with an index on every field that can have one."""
    db = holding(np.ones((len(PAYLOADS), 2)), payloads=PAYLOADS, fields=["year", "lang", "draft", "tags"])
    db.index_field("nested", "absent", "do.t", r"do\.t", "é", "", "new\nline", "[0]", 'q"uote', "back\\slash", "0")
    db.index_field("day", "at", "a.b", "a.0.b", "n.0", "n.0.1", r"a.b\.c.1.d", "a.0", r"back\\\.slash")
    return db


@pytest.fixture(scope="module")
def declared() -> Iterator[softdb.SoftDB]:
    with indexed() as db:
        yield db


@pytest.fixture(scope="module")
def of_others() -> Iterator[softdb.SoftDB]:
    """Indexed filters that list the records that do not match."""
    with indexed() as db:
        yield db


@pytest.fixture(scope="module")
def ordered() -> Iterator[softdb.SoftDB]:
    """Indexed filters with the order of fields cached."""
    with indexed() as db:
        yield db


@contextlib.contextmanager
def asked_by_order(db: softdb.SoftDB) -> Iterator[None]:
    """Thresholds for many records with all fields ordered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "LARGE", 0)
        patch.setattr(fieldorder, "MAX_FIELDS", 100)
        db._store.order_fields()
        yield


@contextlib.contextmanager
def asked_for_others() -> Iterator[None]:
    """Thresholds for many records of which most match."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "LARGE", 0)
        patch.setattr(masks.Evaluation, "share", lambda *_: 1.0)
        yield


def ids(db: softdb.SoftDB, where: dict[str, Any]) -> list[int]:
    return [int(i) for batch in db.scan(where=where) for i in batch.ids]


def oracle(where: dict[str, Any], payloads: list[Any] = PAYLOADS) -> list[int]:
    return [i for i, payload in enumerate(payloads) if meets(payload, where)]


FIELDS = st.sampled_from(
    [
        "year",
        "lang",
        "draft",
        "tags",
        "nested",
        "absent",
        'q"uote',
        "back\\slash",
        "do.t",
        r"do\.t",
        "é",
        "",
        "a.b",
        "n.0",
    ]
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


@settings(max_examples=200, deadline=None)
@given(FILTERS)
def test_a_filter_matches_the_same_as_the_oracle(where: dict[str, Any]) -> None:
    *others, of_others, ordered = _DATABASES
    for db in others:
        assert ids(db, where) == oracle(where)
        assert db.count(where) == len(oracle(where))
    with asked_for_others():
        assert ids(of_others, where) == oracle(where)
    with asked_by_order(ordered):
        assert ids(ordered, where) == oracle(where)


@pytest.fixture(autouse=True, scope="module")
def _module_databases(
    db: softdb.SoftDB, declared: softdb.SoftDB, of_others: softdb.SoftDB, ordered: softdb.SoftDB
) -> None:
    _DATABASES[:] = [db, declared, of_others, ordered]


_DATABASES: list[softdb.SoftDB] = []


@pytest.mark.parametrize(
    "where",
    [
        {"year": {"$gte": 2020}},
        {"year": {"$gte": 2020, "$lt": 2020.2}, "lang": "de"},
        {"$or": [{"lang": "fr"}, {"tags": {"$contains": "new"}}], "$not": {"draft": True}},
        {'q"uote': 1},
        {"back\\slash": {"$gt": 1}},
        {"do.t": 10},
        {"do.t": 11},
        {"do.t": 3},
        {r"do\.t": 3},
        {r"do\.t": {"$gt": 3}},
        {r"a.b\.c.1.d": 12},
        {r"a.b\.c.0": 1},
        {r"back\\\.slash": 15},
        {"a.nul\0": 20},
        {"0": 16},
        {"n.0": {"$exists": True}},
        {"n.0.1": 2},
        {"n.0.1": 19},
        {"n.1.0": 14},
        {"n.4294967296.0": {"$exists": True}},
        {"n.00": {"$exists": True}},
        {"a.0.b": "Ann"},
        {"a.b": "Ann"},
        {"a.b": {"$ne": "Ann"}},
        {"a.4.1": 18},
        {"a.1.b.c.d": {"$exists": False}},
        {"year.a.b": {"$exists": True}},
        {"a": {"$elemMatch": {"b": "Ann", "c": 1}}},
        {"a": {"$elemMatch": {"b": "Ann", "c": 2}}},
        {"a": {"$elemMatch": {"b": {"$ne": "Ann"}}}},
        {"a": {"$not": {"$elemMatch": {"b": "Ann"}}}},
        {"a": {"$elemMatch": {"$or": [{"b": "Zoe"}, {"$not": {"c": {"$lt": 2}}}]}}},
        {"a": {"$elemMatch": {"$eq": None}}},
        {"a": {"$elemMatch": {"$contains": 17}}},
        {"a": {"$elemMatch": {"$elemMatch": {"$gt": 17, "$lt": 19}}}},
        {"tags": {"$elemMatch": {"$startswith": "r"}}},
        {"tags": {"$elemMatch": {"$not": {"$startswith": "r"}}}},
        {"tags": {"$startswith": "re"}},
        {"lang": {"$startswith": ""}},
        {"lang": {"$not": {"$startswith": "d"}}},
        {"lang": {"$icontains": "NAÏVE"}},
        {"lang": {"$icontains": ""}},
        {"lang": {"$not": {"$icontains": "D"}}},
        {"tags": {"$icontains": "NEW"}},
        {"tags": {"$elemMatch": {"$icontains": "NEW"}}},
        {"year": {"$icontains": "2"}},
        {"at": {"$icontains": "t10"}},
        {"tags": {"$size": 0}},
        {"tags": {"$size": 4}},
        {"tags": {"$not": {"$size": 0}}},
        {"a": {"$elemMatch": {"$size": 2}}},
        {"a": {"$size": 2}},
        {"lang": {"$size": 0}},
        {"lang": {"$startswith": "naïve \U0001f600"}},
        {"a.b": {"$startswith": "\ud7ff"}},
        {"a.c": {"$startswith": "\U0010ffff"}},
        {"a.c": {"$startswith": "\U0010ffffz"}},
        {"day": {"$gte": "2024-02-28", "$lt": "2024-03-01"}},
        {"day": {"$startswith": "2024-02"}},
        {"at": {"$gt": "2024-02-29T09:59:59.999999+00:00"}},
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
def test_named_cases(
    db: softdb.SoftDB, declared: softdb.SoftDB, of_others: softdb.SoftDB, ordered: softdb.SoftDB, where: dict[str, Any]
) -> None:
    assert ids(db, where) == oracle(where)
    assert ids(declared, where) == oracle(where)
    with asked_for_others():
        assert ids(of_others, where) == oracle(where)
    with asked_by_order(ordered):
        assert ids(ordered, where) == oracle(where)


def test_text_is_never_a_number(db: softdb.SoftDB) -> None:
    assert ids(db, {"year": {"$gte": 1990}}) == [5, 7, 11]


def test_a_field_named_like_an_operator_can_be_stored_but_not_filtered(db: softdb.SoftDB) -> None:
    with pytest.raises(softdb.BadFilter, match=r"unknown operator '\$dollar'"):
        db.count({"$dollar": 4})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("year > 2020", "expected a dict"),
        ({"year": {"$near": 1}}, r"unknown operator '\$near'.*; there are \$eq \$ne"),
        ({"year": {"$gtee": 1}}, r"unknown operator '\$gtee' \(did you mean \$gte\?\)"),
        ({"year": {"$regex": "x"}}, r"unknown operator '\$regex'; there are"),
        ({"year": {"$not_contains": "x"}}, r"\(to negate an operator, write \{\"\$not\": \{\"\$contains\": …\}\}\)"),
        ({"year": {"$startsWith": "x"}}, r"did you mean \$startswith\?"),
        ({"$adn": []}, r"unknown operator '\$adn' \(did you mean \$and\?\)"),
        ({"$gte": 1}, r'\$gte without a field; write \{"field": \{"\$gte": …\}\}'),
        ({"author": {"name": "Ann"}}, "no operator; write a nested field as 'author.name'"),
        ({"a..b": 1}, r"'a\.\.b' has a dot with no name beside it; .*write '\\\.'"),
        ({".a": 1}, "a dot with no name beside it"),
        ({"a.": 1}, "a dot with no name beside it"),
        ({".".join("a" * 65): 1}, "is 65 names deep; payloads nest to 64"),
        ({"a." * 100_000 + "a": 1}, "100,001 names deep"),
        ({"a.0.0.0.0.0": 1}, "more than 4 numbers"),
        ({"nul\0.a": 1}, "leads through a name with NUL"),
        ({"year": {"$startswith": 2}}, r"\$startswith takes a text; got 2"),
        ({"year": {"$startswith": "\ud800"}}, "not Unicode"),
        ({"lang": {"$icontains": 2}}, r"\$icontains takes a text; got 2"),
        ({"lang": {"$icontains": "\ud800"}}, "not Unicode"),
        ({"tags": {"$size": -1}}, r"\$size takes a list's length; got -1"),
        ({"tags": {"$size": True}}, r"\$size takes a list's length; got True"),
        ({"tags": {"$size": 2**64}}, r"\$size takes a list's length"),
        ({"tags": {"$elemMatch": "new"}}, r"\$elemMatch takes a filter"),
        ({"tags": {"$elemMatch": {}}}, r"\$elemMatch takes a filter"),
        ({"tags": {"$elemMatch": {"$gte": 1, "by": "Ann"}}}, r"'tags\[\]' has 'by', which is no operator"),
        ({"day": np.datetime64("NaT")}, "datetime64"),
        ({"year": np.float32("nan")}, "nan"),
        ({"year": {"$in": np.array([1, np.nan])}}, "nan"),
        ({"year": np.array(np.nan)}, "nan"),
        ({"year": np.array([1])}, r"\$contains"),
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
def test_filters_outside_the_grammar_are_refused(db: softdb.SoftDB, where: Any, message: str) -> None:
    with pytest.raises(softdb.BadFilter, match=message):
        db.count(where)


def test_a_filter_nested_too_deep_is_refused(db: softdb.SoftDB) -> None:
    where: dict[str, Any] = {"year": 1}
    for _ in range(1000):
        where = {"$not": where}
    with pytest.raises(softdb.BadFilter, match="deeper than 64"):
        db.count(where)


TEXTS = [None, "", "the cat sleeps", "The cat", "100", "nul\0 cat", "naïve 😀", 'quo"te']


@pytest.mark.parametrize(
    "condition",
    [
        "the cat sleeps",
        "",
        None,
        100,
        "100",
        {"$exists": True},
        {"$exists": False},
        {"$contains": "cat"},
        {"$contains": 1},
        {"$not": {"$contains": "cat"}},
        {"$startswith": "the "},
        {"$startswith": ""},
        {"$ne": ""},
        {"$in": ["The cat", 'quo"te', 7]},
        {"$gte": "n", "$lt": "o"},
        {"$elemMatch": {"$eq": "cat"}},
    ],
    ids=repr,
)
def test_the_text_of_a_record_is_filtered_like_a_field(condition: Any) -> None:
    payloads = [None, {"$text": "cat", "x": 1}, {"x": 2}, ["cat"], {"x": 1}, {"text": "cat"}, 0, ""]
    with softdb.open(None, dim=1, fields=["x"]) as db:
        db.insert(range(len(TEXTS)), texts=TEXTS, payloads=payloads)
        asked: list[dict[str, Any]] = [
            {"$text": condition},
            {"$text": condition, "x": 1},
            {"$or": [{"$text": condition}, {"x": 2}]},
        ]
        for where in [*asked, {"$not": asked[0]}]:
            right = [i for i, text in enumerate(TEXTS) if meets(payloads[i], where, MISSING if text is None else text)]
            assert ids(db, where) == right
        db.update([2, 3], texts=["another", None])
        assert ids(db, {"$text": {"$contains": "cat"}}) == [5]


def test_a_text_is_of_records_not_of_a_list_s_elements(db: softdb.SoftDB) -> None:
    with pytest.raises(softdb.BadFilter, match=r"unknown operator '\$text'"):
        db.count({"a": {"$elemMatch": {"$text": "cat"}}})
    with pytest.raises(softdb.BadFilter, match=r"unknown operator '\$txt' \(did you mean \$text\?\)"):
        db.count({"$txt": "cat"})


@pytest.mark.parametrize(
    ("condition", "right"),
    [
        ("a", ["a"]),
        (7, [7]),
        ("7", ["7"]),
        ({"$ne": "a"}, ["7", 7, 8, "ab"]),
        ({"$in": ["ab", 7, "x", None, True]}, [7, "ab"]),
        ({"$nin": ["ab", 7]}, ["a", "7", 8]),
        ({"$gt": 7}, [8]),
        ({"$lte": "a"}, ["a", "7"]),
        ({"$startswith": "a"}, ["a", "ab"]),
        ({"$not": {"$contains": "a"}}, ["7", 7, 8]),
        ({"$exists": False}, []),
    ],
    ids=repr,
)
def test_the_id_of_a_record_is_filtered_like_a_field(condition: Any, right: list[Any]) -> None:
    with softdb.open(None, dim=1, fields=["x"]) as db:

        def named(where: dict[str, Any]) -> list[Any]:
            return [one for batch in db.scan(where=where) for one in batch.ids]

        db.insert(["a", "7", 7, 8, "ab"], [[1]] * 4 + [None], payloads=[{"x": 1, "$id": "b"}] * 5)
        assert named({"$id": condition}) == named({"$and": [{"x": 1}, {"$id": condition}]}) == right
        assert db.search([[1]], where={"$id": condition, "x": 1}).ids == [[one for one in right if one != "ab"]]
        assert named({"$not": {"$id": condition}}) == [one for one in named({}) if one not in right]
        db.upsert(["7"], [[2]])
        assert sorted(map(repr, named({"$id": condition}))) == sorted(map(repr, right))


@pytest.mark.parametrize("inner", [{"year": 1}, {"$gt": 1}], ids=["fields", "itself"])
def test_elements_within_elements_nest_as_filters_do(db: softdb.SoftDB, inner: dict[str, Any]) -> None:
    for levels in (20, 100):
        where = inner
        for _ in range(levels):
            where = {"$elemMatch": where} if "$gt" in inner else {"a": {"$elemMatch": where}}
        where = where if "a" in where else {"a": where}
        if levels == 20:
            assert ids(db, where) == []
            continue
        with pytest.raises(softdb.BadFilter, match="deeper than 64"):
            db.count(where)


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ({"yaer": 2020}, "'yaer'; did you mean 'year'?"),
        ({"nested.yaer": 2020}, "'nested.yaer'; did you mean 'nested.year'?"),
        ({"nestde.year": 2020}, "'nestde.year'; did you mean 'nested.year'?"),
        ({"$dollar.x": 1}, None),
        ({r"new\.line": 1}, r"'new\\.line'; did you mean 'new\nline'?"),
        ({"dot.ted": 1}, r"'dot.ted'; a dot in a name is written 'dot\\.ted'"),
        (
            {"by.name": "Ann"},
            '\'by.name\'; \'by\' is a list; to filter on its elements write {"by": {"$elemMatch": {"name": "…"}}}',
        ),
        ({"by.0.naem": "Ann"}, "'by.0.naem'; did you mean 'by.0.name'?"),
        ({"year.month": 1}, "'year.month'"),
        ({"qqqq": 1}, "'qqqq'"),
    ],
    ids=repr,
)
def test_a_name_that_no_record_has_is_met_with_the_nearest(where: dict[str, Any], hint: str | None) -> None:
    payload = {"year": 1, "nested": {"year": 2}, "dot.ted": 3, "new\nline": 4, "by": [{"name": "Ann"}]}
    with holding([[1], [1], [1]], payloads=[payload, None, [7]], ids=["a", "b", "c"]) as db:
        if hint is None:
            with pytest.raises(softdb.BadFilter, match="unknown operator"):
                db.count(where)
            return
        with pytest.warns(softdb.UnknownField) as warned:
            assert db.count(where) == 0
        assert [str(one.message) for one in warned] == [f"no record has the field {hint}"]


def test_a_remembered_filter_sees_the_next_commit() -> None:
    with holding([[1], [2]], payloads=[{"x": 1}, {"x": 2}], ids=["a", "b"]) as db:
        assert db.count({"x": 1}) == db.count({"x": 1}) == 1
        db.update("b", payloads=[{"x": 1}])
        assert db.count({"x": 1}) == 2
        db.delete("a")
        assert db.count({"x": 1}) == 1


def test_a_long_list_of_alternatives_is_no_deep_expression(db: softdb.SoftDB, declared: softdb.SoftDB) -> None:
    where = {"$or": [{"year": year} for year in range(3000)]}
    assert ids(db, where) == ids(declared, where) == oracle(where)


@pytest.mark.parametrize("where", [[], "", 0])
def test_an_invalid_filter_deletes_nothing(where: Any) -> None:
    with holding([[1]], payloads=[{"x": 1}], ids=["a"]) as db:
        with pytest.raises(softdb.BadFilter, match="expected a dict"):
            db.delete(where=where)
        assert len(db) == 1


def test_operands_are_normalised_as_payloads_are() -> None:
    pd = pytest.importorskip("pandas")
    day = datetime.date(2024, 2, 29)
    payloads = [{"n": i, "on": i == 1, "day": pd.Timestamp(f"2024-0{i + 1}-01"), "tags": [i]} for i in range(4)]
    with holding(np.eye(4), payloads=payloads, ids=list("abcd")) as db:
        cases: list[tuple[dict[str, Any], list[str]]] = [
            ({"n": np.int64(1)}, ["b"]),
            ({"n": {"$gte": np.float32(2)}}, ["c", "d"]),
            ({"n": np.array(3)}, ["d"]),
            ({"on": np.bool_(True)}, ["b"]),
            ({"on": True}, ["b"]),
            ({"n": {"$in": np.array([0, 3])}}, ["a", "d"]),
            ({"n": {"$nin": pd.Series([0, 3])}}, ["b", "c"]),
            ({"n": {"$in": [np.int32(0), np.uint8(3)]}}, ["a", "d"]),
            ({"$id": {"$in": np.array(["a", "b"])}}, ["a", "b"]),
            ({"tags": {"$contains": np.int16(2)}}, ["c"]),
            ({"tags": {"$size": np.int64(1)}}, list("abcd")),
            ({"day": {"$exists": np.bool_(False)}}, []),
            ({"day": pd.Timestamp("2024-02-01")}, ["b"]),
            ({"day": {"$gt": day}}, ["c", "d"]),
            ({"day": {"$lt": np.datetime64("2024-02-29")}}, ["a", "b"]),
        ]
        for where, expected in cases:
            assert db.get(where=where).ids == expected, where
