"""Rows of all kinds make the same records as columns do; ids that are made; merged payloads."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import softdb
from softdb import BadInput, SoftDB, check
from softdb.formats import Fields, import_records, read_records
from softdb.text import HashedNGrams

KEYS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
ROWS: list[dict[str, Any]] = [
    {"id": "a", "key": KEYS[0], "text": "an ant", "year": 1979, "tags": ["x", "y"]},
    {"id": "b", "key": KEYS[1], "text": "a bee", "year": 1995},
    {"id": "c", "key": KEYS[2], "text": None, "tags": []},
]
PAYLOADS = [{"year": 1979, "tags": ["x", "y"]}, {"year": 1995}, {"tags": []}]


def contents(db: SoftDB) -> list[Any]:
    """All records, in the order of scan."""
    records = [records[i] for records in db.scan() for i in range(len(records))]
    columns = [[one.id, one.key, one.value, one.payload, one.text] for one in records]
    return [[part.tolist() if hasattr(part, "tolist") else part for part in parts] for parts in columns]


@pytest.fixture
def db() -> Iterator[SoftDB]:
    with softdb.open(None, dim=2) as db:
        yield db


def polars(rows: list[Any]) -> Any:
    return pytest.importorskip("polars", reason="needs polars").DataFrame(rows)


def pandas(rows: list[Any]) -> Any:
    return pytest.importorskip("pandas", reason="needs pandas").DataFrame(rows)


def arrow(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pyarrow", reason="needs softdb[arrow]").Table.from_pylist(rows)


def dataset(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("datasets", reason="needs softdb[datasets]").Dataset.from_list(rows)


def same_records(rows: list[Any]) -> Any:
    """The rows as records of another database."""
    with softdb.open(None, dim=2) as other:
        other.insert(rows)
        return other.get([row["id"] for row in rows])


KINDS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "dicts": list,
    "a tuple": tuple,
    "a generator": lambda rows: (row for row in rows),
    "pandas": pandas,
    "arrays in pandas": lambda rows: pandas([{**row, "key": np.array(row["key"])} for row in rows]),
    "an index named id": lambda rows: pandas(rows).set_index("id"),
    "an index without name": lambda rows: pandas(rows).set_index(np.array([7, 8, 9])),
    "polars": polars,
    "Arrow": arrow,
    "a reader": lambda rows: arrow(rows).to_reader(),
    "a batch": lambda rows: arrow(rows).to_batches()[0],
    "a dataset": dataset,
    "Records": same_records,
    "a list of Record": lambda rows: list(same_records(rows)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_records(db: SoftDB, kind: str) -> None:
    assert db.insert(KINDS[kind](ROWS)) == ["a", "b", "c"]
    assert contents(db) == [
        ["a", KEYS[0], None, PAYLOADS[0], "an ant"],
        ["b", KEYS[1], None, PAYLOADS[1], "a bee"],
        ["c", KEYS[2], None, PAYLOADS[2], None],
    ]


@pytest.mark.parametrize("kind", ["dicts", "pandas", "polars", "Arrow", "Records"])
def test_a_missing_key_makes_a_record_without_a_key(db: SoftDB, kind: str) -> None:
    rows: list[dict[str, Any]] = [{**ROWS[0]}, {**ROWS[1], "key": None}]
    db.insert(KINDS[kind](rows))
    assert db["a"].key.tolist() == KEYS[0]
    assert db["b"].key is None


@pytest.mark.parametrize("kind", ["dicts", "pandas", "polars", "Arrow", "a dataset"])
def test_fields_name_other_columns(db: SoftDB, kind: str) -> None:
    rows = [{"isbn": "x", "emb": [1, 2], "blurb": "a fox", "id": 5}, {"isbn": "y", "emb": [3, 4], "blurb": "", "id": 6}]
    expected = [["x", [1, 2], None, {"id": 5}, "a fox"], ["y", [3, 4], None, {"id": 6}, ""]]
    for fields in ({"id": "isbn", "key": "emb", "text": "blurb"}, Fields("isbn", "emb", "blurb")):
        assert db.upsert(KINDS[kind](rows), fields=fields) == ["x", "y"]
        assert contents(db) == expected
    assert db.insert(KINDS[kind](rows), fields={"id": None, "key": "emb"}) == [4, 5]
    assert db[5].payload == {"isbn": "y", "blurb": "", "id": 6}


@pytest.mark.parametrize("name", ["key", "vector", "embedding"])
def test_a_key_has_three_names(db: SoftDB, name: str) -> None:
    assert db.insert({"id": "a", name: (1, 2), "payload": [1]}) == ["a"]
    assert (db["a"].key.tolist(), db["a"].payload) == ([1, 2], [1])


def test_values_and_labels_come_from_rows_where_there_are_any(db: SoftDB) -> None:
    rows: list[dict[str, Any]] = [{"id": 1, "key": [1, 2], "value": 2}, {"id": 2, "key": None, "value": None}]
    for kind in (list, arrow, polars):
        with softdb.open(None, dim=2, num_classes=3) as labelled:
            labelled.insert(kind(rows))
            assert [labelled[1].value, labelled[2].value] == [2, None]
    db.insert(rows)
    assert [db[1].payload, db[2].payload] == [{"value": 2}, {}]


def test_texts_of_rows_are_embedded() -> None:
    with softdb.open(None, metric="cosine", encoder=HashedNGrams(64)) as db:
        assert db.insert([{"text": "a sly fox", "n": 1}, {"text": None, "n": 2}]) == [0, 1]
        assert db.search("fox", k=1).payloads == [[{"n": 1}]]
        assert db[1].key is None


def test_a_table_of_softdb_comes_back_equal(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs softdb[arrow]")
    with softdb.open(None, dim=2) as db, softdb.open(None, dim=2) as other:
        db.insert(["a", 7, "c"], [*KEYS[:2], None], payloads=[{"x": {"y": None}}, "text", None], texts=["t", None, "u"])
        assert other.insert(db.to_arrow()) == ["a", 7, "c"]
        assert contents(other) == contents(db)
        assert other.update(arrow([{"id": "a", "payload": 1, "z": 2}])) == ["a"]
        assert other["a"].payload == {"payload": 1, "z": 2}
        other.upsert(db.to_arrow(["id", "key", "text", "x"]))
        assert other.upsert(db[7]) == [7]
        assert other["a"].payload == {"x": {"y": None}}


names = st.text(string.ascii_letters, min_size=1, max_size=3).filter(
    lambda name: name not in ("id", "key", "text", "value", "payload")
)
cells = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.integers(-5, 10**9) | st.text(max_size=4),
        st.tuples(
            st.none() | st.tuples(st.integers(-9, 9), st.integers(-9, 9)),
            st.none() | st.text(max_size=5),
            st.dictionaries(names, cells, max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_in_are_columns_in(records: dict[Any, tuple[Any, Any, dict[str, Any]]]) -> None:
    keys, texts, payloads = (list(column) for column in zip(*records.values(), strict=True))
    rows = [{"id": name, "key": key, "text": text, **payload} for name, (key, text, payload) in records.items()]
    with softdb.open(None, dim=2) as by_columns, softdb.open(None, dim=2) as by_rows:
        has_fields = any(payloads)
        by_columns.insert(list(records), keys, payloads=payloads if has_fields else None, texts=texts)
        assert by_rows.insert(rows) == list(records)
        assert contents(by_rows) == contents(by_columns)


# -- cells -------------------------------------------------------------------------------------------------------------

ZONE = dt.timezone(dt.timedelta(hours=2))
CELLS: dict[str, tuple[Any, Any]] = {
    "float32": (np.float32(1.5), 1.5),
    "int64": (np.int64(7), 7),
    "bool_": (np.True_, True),
    "an array": (np.array([1.0, 2.0]), [1.0, 2.0]),
    "a datetime": (dt.datetime(2020, 1, 2, 3, 4, 5), "2020-01-02T03:04:05"),
    "a zone": (dt.datetime(2020, 1, 2, 3, tzinfo=ZONE), "2020-01-02T03:00:00+02:00"),
    "a date": (dt.date(2020, 1, 2), "2020-01-02"),
    "a time": (dt.time(3, 4), "03:04:00"),
    "datetime64[ns]": (np.datetime64("2020-01-02T03:04:05", "ns"), "2020-01-02T03:04:05"),
    "NaN": (float("nan"), None),
    "float32 NaN": (np.float32("nan"), None),
    "NaT": (np.datetime64("NaT"), None),
}
PANDAS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "Timestamp": (lambda pd: pd.Timestamp("2020-01-02"), "2020-01-02T00:00:00"),
    "nanoseconds": (lambda pd: pd.Timestamp("2020-01-02T00:00:00.000000007"), "2020-01-02T00:00:00.000000007"),
    "Timestamp of a zone": (lambda pd: pd.Timestamp("2020-07-02", tz="Europe/Berlin"), "2020-07-02T00:00:00+02:00"),
    "NaT of pandas": (lambda pd: pd.NaT, None),
    "NA": (lambda pd: pd.NA, None),
}


@pytest.mark.parametrize("kind", [*CELLS, *PANDAS])
def test_a_cell_becomes_the_same_json_everywhere(db: SoftDB, kind: str) -> None:
    pd = pytest.importorskip("pandas", reason="needs pandas")
    pytest.importorskip("pyarrow", reason="needs softdb[arrow]")
    cell, expected = CELLS[kind] if kind in CELLS else (PANDAS[kind][0](pd), PANDAS[kind][1])
    field = {} if expected is None else {"x": expected}
    frame = pd.DataFrame({"id": [1], "key": [[1.0, 2.0]], "y": [0], "x": pd.Series([cell])})
    (rows,) = read_records(frame)
    assert check.payloads(rows.payloads, 1) == [json.dumps({"y": 0} | field, separators=(",", ":"))]
    db.insert(frame)
    assert db[1].payload == {"y": 0} | field
    db.upsert([{"id": 1, "key": [1, 2], "y": 0, "x": cell}])
    assert db[1].payload == {"y": 0} | field
    db.upsert([1], KEYS[:1], payloads=[{"x": cell, "deep": [{"x": cell}, (cell,)]}])
    assert db[1].payload == {"x": expected, "deep": [{"x": expected}, [expected]]}
    db.update([1], payloads=[cell])
    assert db[1].payload == expected


def test_columns_of_pandas_keep_their_types(db: SoftDB) -> None:
    pd = pytest.importorskip("pandas", reason="needs pandas")
    columns = {
        "whole": pd.array([1, None], dtype="Int64"),
        "kind": pd.Categorical(["u", "v"]),
        "flag": [True, False],
        "when": pd.to_datetime(["2020-01-01", None]),
    }
    db.insert(pd.DataFrame({"id": ["a", "b"], "vector": KEYS[:2], **columns}))
    assert db["a"].payload == {"whole": 1, "kind": "u", "flag": True, "when": "2020-01-01T00:00:00"}
    assert db["b"].payload == {"kind": "v", "flag": False}


def test_arrays_of_times_and_nan_are_lists() -> None:
    days = np.array([["2020-01-01", "NaT"]], "M8[D]")
    texts = check.payloads([days, np.array([1.0, np.nan]), np.array(3), np.array("2020-01-01", "M8[ns]")], 4)
    assert texts == ['[["2020-01-01",null]]', "[1.0,null]", "3", '"2020-01-01T00:00:00"']


@pytest.mark.parametrize(
    "cell",
    [
        b"x",
        {1},
        1j,
        float("inf"),
        np.float32("-inf"),
        decimal.Decimal(1),
        dt.timedelta(1),
        {1: 2},
        np.array([b"x"]),
        object(),
    ],
    ids=lambda cell: type(cell).__name__,
)
def test_other_cells_are_refused_before_anything_changes(db: SoftDB, cell: Any) -> None:
    before = db.stats().generation
    for row in ({"id": 1, "key": [1, 2], "x": cell}, {"id": 1, "key": [1, 2], "payload": {"deep": [cell]}}):
        with pytest.raises(BadInput, match="payload 0 "):
            db.insert([row])
    assert db.stats().generation == before


# -- wrong rows --------------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {"id": 1, "key": [1, 2]}
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "two keys": (
        lambda db: db.insert({**ROW, "vector": [1, 2]}),
        r"\['key', 'vector'\] may each be the key; choose: fields=",
    ),
    "no key": (lambda db: db.insert([{"id": 1, "vec": [1, 2]}]), r"no column of keys or texts.*fields=\{'key': …\}"),
    "no column": (lambda db: db.insert([ROW], fields={"key": "v"}), r"no column 'v' for the key.*are \['id', 'key'\]"),
    "no part": (lambda db: db.insert([ROW], fields={"vector": "v"}), "expected a dict from id, key, text, value to"),
    "a number": (
        lambda db: db.insert([ROW], fields={"key": 5}),
        "5}; expected a dict from.* to the name of a",
    ),
    "no dict": (lambda db: db.insert([ROW], fields="key"), "fields are 'key'; expected a dict"),
    "fields and ids": (lambda db: db.insert([1], KEYS[:1], fields={"id": "x"}), "fields name the columns of rows"),
    "rows and keys": (lambda db: db.insert([ROW], KEYS[:1]), "rows and keys are given; put keys into the rows"),
    "rows and payloads": (lambda db: db.update([ROW], payloads=[1]), "rows and payloads are given"),
    "some ids": (lambda db: db.insert([ROW, {"key": [1, 2]}]), "row 1 has no 'id'; give every row an id, or no row"),
    "no row": (lambda db: db.insert([ROW, 5]), "row 1 is 5; expected a dict"),
    "columns": (
        lambda db: db.insert({"id": [1, 2], "key": KEYS[:2]}),
        "a dict is one row, but its id or text is a list",
    ),
    "nothing": (lambda db: db.insert(), "no ids, and keys, texts or payloads are None"),
    "no records": (lambda db: db.insert(keys=[]), r"no ids, and keys, texts or payloads are \[\]"),
    "ids without records": (lambda db: db.insert([], [[1, 2]]), "ids are an empty batch"),
    "a text as key": (
        lambda db: db.insert([{"id": 1, "text": "t", "vector": "[1.0, 2.0]"}]),
        r"column 'vector' holds texts, \['\[1.0, 2.0\]'\]; .*json.loads, or embed it by fields={'text': 'vector'}",
    ),
    "texts as keys of a frame": (lambda db: db.insert(pandas([{"id": 1, "key": "bye"}])), "column 'key' holds t"),
    "a file": (lambda db: db.insert("two.parquet"), "keys are missing; .*softdb.formats.import_records"),
    "a path": (lambda db: db.insert(Path("two.parquet")), "ids are .*two.parquet.*a file to import_records"),
    "keys in place of ids": (
        lambda db: db.insert(np.eye(2)),
        "is of type list; expected str or int; pass vectors as",
    ),
    "a frame of payloads": (
        lambda db: db.insert(["a", "b"], KEYS[:2], payloads=pandas([{"x": 1}, {"x": 2}])),
        r"a frame has \.to_dict\('records'\)",
    ),
    "a column of arrays": (
        lambda db: db.insert(["a", "b"], pandas([{"k": np.ones(2)}, {"k": np.ones(2)}])["k"]),
        r"keys are of type object; .*np\.stack\(column\)",
    ),
    "a field of a payload": (
        lambda db: db.insert([ROW, {**ROW, "id": 2, "cost": decimal.Decimal(1)}]),
        "field 'cost' of payload 1 holds a Decimal",
    ),
    "a ragged row": (lambda db: db.insert([ROW, {"id": 2, "key": [1.0]}]), "ragged: row 1 has 1 numbers, row 0 has 2"),
    "beyond float32": (lambda db: db.insert([1], [[1e300, 1]]), r"the largest float32 is 3.40282e\+38\): scale them$"),
    "numbers as columns": (
        lambda db: db.insert(pandas([{"key": [1, 2], 0: 1}])),
        "payload 0 has the key 0, which is no str",
    ),
    "a column of pandas twice": (
        lambda db: db.insert(pandas([{"key": [1, 2], "x": 1, "y": 1}]).set_axis(["key", "x", "x"], axis=1)),
        "the frame has several columns of the same name",
    ),
    "no id in a table": (lambda db: db.insert(arrow([ROW, {**ROW, "id": None}])), "row 1: column 'id' is None"),
    "ragged keys": (
        lambda db: db.insert(arrow([ROW, {"id": 2, "key": [1]}])),
        "row 1: column 'key' has 1 numbers, 2 in",
    ),
    "a width": (lambda db: db.insert([{"id": 1, "key": [1]}]), "keys are 1 wide but"),
    "text": (lambda db: db.insert([{**ROW, "text": 5}]), "text 0 is 5; expected str"),
    "bytes": (lambda db: db.insert([{**ROW, "key": b"12"}]), "expected real numbers"),
    "update without ids": (lambda db: db.update([{"year": 1}]), "ids are missing; name the stored records"),
    "update in part": (
        lambda db: db.update([{**ROW, "text": "x"}, {"id": 2, "key": [1, 2]}]),
        "row 1 lacks one of the t",
    ),
    "no Record": (lambda db: db.insert([same_records(ROWS)[0], 5]), "row 1 is 5; expected a dict"),
    "an unknown id": (lambda db: db.update([{"id": "none", "year": 1}]), "'none' is not stored"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rows_are_refused_before_anything_changes(db: SoftDB, wrong: str) -> None:
    call, message = WRONG[wrong]
    before = db.stats().generation
    with pytest.raises((BadInput, softdb.UnknownId), match=message):
        call(db)
    assert db.stats().generation == before


def test_payloads_alone_are_for_update() -> None:
    with softdb.open(None, encoder=HashedNGrams()) as db:
        db.insert(["a"], texts=["an ant"])
        with pytest.raises(BadInput, match=r"stored payloads: update\(…, merge=True\)"):
            db.upsert(ids=["a"], payloads=[{"x": 1}])


def test_no_rows_write_nothing(db: SoftDB) -> None:
    batches: list[Any] = [[], iter([]), pandas([ROW])[:0], arrow([ROW])[:0], pandas([])]
    for rows in batches:
        before = db.stats().generation
        assert db.insert(rows) == db.upsert(rows) == []
        assert db.stats().generation == before
    assert db.update([]) == []


def test_a_lazy_frame_is_collected_first(db: SoftDB) -> None:
    lazy = polars(ROWS[:2]).lazy()
    with pytest.raises(BadInput, match=r"a LazyFrame's collect\(\)"):
        db.insert(lazy)
    assert db.insert(lazy.collect()) == ["a", "b"]


@pytest.mark.parametrize("column", [np.array, lambda texts: pandas([{"t": text} for text in texts])["t"]])
def test_a_column_of_texts_is_texts(db: SoftDB, column: Callable[[list[str]], Any]) -> None:
    db.insert(["a", "b"], KEYS[:2], texts=column(["an ant", "a bee"]))
    db.insert(["c", "d"], KEYS[:2], texts=pandas([{"t": "a cat"}, {"t": None}])["t"])
    assert db.get(["a", "b", "c", "d"]).texts == ["an ant", "a bee", "a cat", None]


def test_dicts_and_pandas_need_no_pyarrow() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\nimport softdb, pandas\nrow = {'id': 1, 'key': [1, 2]}\n"
        "with softdb.open(None, dim=2) as db:\n    db.insert([row])\n    db.upsert(pandas.DataFrame([row]))\n"
        "    try:\n        db.insert(type('T', (), {'__arrow_c_stream__': 1, 'schema': 1})())\n"
        "    except softdb.MissingDependency as error:\n        print(error)\n"
    )
    pytest.importorskip("pandas", reason="needs pandas")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs pyarrow; pip install 'softdb[arrow]'" in done.stdout


# -- ids that are made -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["insert", "upsert"])
def test_ids_are_made_where_none_are_given(db: SoftDB, verb: str) -> None:
    write = getattr(db, verb)
    assert write(keys=np.eye(2)) == [0, 1]
    assert write(keys=[1.0, 2.0]) == [2]
    assert write(keys=np.ones(2)) == [3]
    assert write(keys=[[1, 2], None]) == [4, 5]
    assert write(texts=["x", "y"]) == [6, 7]
    assert write(texts="z", payloads={"a": 1}) == [8]
    assert write(payloads=[1, 2]) == [9, 10]
    assert write([{"key": [1, 2]}, {"vector": None, "key": [3, 4]}], fields={"key": "key"}) == [11, 12]
    assert write(["own"], KEYS[:1]) == ["own"]
    assert write("own2", KEYS[0]) == ["own2"]
    assert db.update(["own"], payloads=[1]) == ["own"]
    assert len(db) == 15
    assert db.get([0, 1]).keys.tolist() == [[1, 0], [0, 1]]


def test_ids_are_never_made_twice_nor_those_of_others(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1) as db:
        db.insert([0, 1, 2, "x"], np.ones((4, 1)))
        db.delete([2])
        assert db.insert(keys=[[1]]) == [4]
        db.delete([4])
        db.insert([9], [[1]])
        assert db.insert(keys=np.ones((2, 1))) == [6, 7]
        assert db.insert(keys=np.ones((3, 1))) == [10, 11, 12]  # 9 is taken, so they begin after the largest
        db.delete(where={})
        db.compact()
    with softdb.open(tmp_path / "db", durability="relaxed") as db:
        assert db.insert(keys=[[1]]) == [13]
        db.insert([-5, 10**6], np.ones((2, 1)))
        assert db.insert(keys=[[1]]) == [14]
    with softdb.open(tmp_path / "db") as db:
        db.insert(range(17, 20), np.ones((3, 1)))
        assert db.insert(keys=[[1]]) == [10**6 + 1]  # 18 rows were assigned, but 18 is taken
        assert db.verify() == 8


def test_a_failed_write_makes_no_id_known(db: SoftDB) -> None:
    with pytest.raises(BadInput, match="keys are 3 wide"):
        db.insert(keys=[[1, 2, 3]])
    assert db.insert(keys=KEYS) == [0, 1, 2]


def test_ids_beyond_the_largest_are_refused(db: SoftDB) -> None:
    db.insert([3, 2**63 - 1], KEYS[:2])
    with pytest.raises(BadInput, match="the next id would be 9223372036854775808, which is too large; give ids"):
        db.insert(keys=KEYS[:1] * 3)
    assert len(db) == 2


def test_threads_get_different_ids(tmp_path: Path) -> None:
    made: list[list[Any]] = []
    with softdb.open(tmp_path / "db", dim=1, durability="relaxed") as db:

        def write(i: int) -> None:
            for _ in range(20):
                made.append(db.insert(keys=np.full((3, 1), i), payloads=[i] * 3))

        threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for names in made for name in names) == list(range(240))
        for names in made:
            assert names == list(range(names[0], names[0] + 3))
            assert len(set(db.get(names).payloads)) == 1


# -- merge -------------------------------------------------------------------------------------------------------------


def test_merge_replaces_given_fields_and_keeps_the_others(db: SoftDB) -> None:
    db.index_field("year")
    db.insert(
        ["a", "b", "c"], KEYS, payloads=[{"year": 1979, "deep": {"x": 1, "y": 2}}, None, {"z": 1}], texts=["t"] * 3
    )
    assert db.update(["a", "b", "c"], payloads=[{"year": 1980, "deep": {"x": 3}}, {"n": 1}, None], merge=True) == [
        *"abc"
    ]
    assert db.get(["a", "b", "c"]).payloads == [{"year": 1980, "deep": {"x": 3}}, {"n": 1}, {"z": 1}]
    assert (db.count({"year": 1979}), db.count({"year": 1980})) == (0, 1)
    db.update([{"id": "a", "seen": True, "year": None}, {"id": "b", "n": 2}], merge=True)
    assert db.get(["a", "b"]).payloads == [{"year": 1980, "deep": {"x": 3}, "seen": True}, {"n": 2}]
    db.update("a", payloads={"year": None}, keys=[9, 9], merge=True)
    assert db["a"].payload == {"year": None, "deep": {"x": 3}, "seen": True}
    assert (db["a"].key.tolist(), db["a"].text, db["c"].text) == ([9, 9], "t", "t")
    db.update([{"id": "a", "seen": 1}])
    assert db["a"].payload == {"seen": 1}
    assert db.verify() == 3


def test_what_is_no_object_cannot_be_merged(db: SoftDB) -> None:
    db.insert(["a", "b"], KEYS[:2], payloads=[{"x": 1}, [1]])
    before = contents(db)
    for ids, payloads in ((["a", "b"], [{"y": 1}, {"y": 1}]), (["a"], [3])):
        with pytest.raises(BadInput, match="is no object and has no fields to merge; replace it whole"):
            db.update(ids, payloads=payloads, merge=True)
    with pytest.raises(softdb.UnknownId, match="'none' is not stored"):
        db.update(["a", "none"], payloads=[{"y": 1}, {"y": 1}], merge=True)
    assert contents(db) == before
    db.update(["b"], payloads=[None], merge=True)
    assert db["b"].payload == [1]


def test_merges_of_threads_lose_nothing(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=1, durability="relaxed") as db:
        db.insert(["a"], [[1]], payloads=[{}])

        def write(i: int) -> None:
            for j in range(20):
                db.update(["a"], payloads=[{f"{i} {j}": 1}], merge=True)

        threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(db["a"].payload) == 80


def test_imports_leave_out_nan_as_inserts_do(db: SoftDB) -> None:
    table = arrow([{"id": 1, "key": [1.0, 2.0], "x": float("nan"), "y": 2.0}])
    assert import_records(db, table) == 1
    assert db[1].payload == {"y": 2.0}


def test_an_import_of_texts_into_a_new_database_embeds_them_as_an_insert_does(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "a cat", "n": 1}\n{"id": "b", "text": "a dog", "n": 2}\n')
    with softdb.open(None) as db:
        with pytest.warns(softdb.EncoderWarning):
            import_records(db, read_records(tmp_path / "rows.jsonl", batch_size=1))
        assert (db.encoder_name, db.search("a cat", k=1).ids, db["b"].payload) == ("ngrams", [["a"]], {"n": 2})
    with (
        softdb.open(None, dim=2) as db,
        pytest.raises(softdb.BadInput, match="keys are text but this database was opened without an encoder"),
    ):
        import_records(db, tmp_path / "rows.jsonl")
