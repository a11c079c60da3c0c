"""The first calls of a newcomer in Python: each mistake is answered with the remedy, and nothing is lost silently."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas
import pytest

import softdb
from softdb import BadFilter, BadInput, EmptyDatabase, UnknownField, UnknownId
from softdb.formats import import_records

KEYS = [[1.0, 0.0], [0.0, 1.0]]


@pytest.fixture
def db() -> Any:
    with softdb.open(None, metric="cosine") as database:
        database.insert([0, "a"], KEYS, payloads=[{"year": 1979}, {"year": 1995}])
        yield database


def test_an_upsert_of_payloads_alone_keeps_the_key(db: Any) -> None:
    with pytest.raises(BadInput, match=r"^upsert: keys are missing; .* stored payloads: update\(…, merge"):
        db.upsert(["a"], payloads=[{"year": 2000}])
    assert db["a"].key.tolist() == [0, 1]
    db.upsert(["new"], payloads=[{"year": 2000}])  # as insert does
    db.upsert(["a"], keys=[None], payloads=[{"year": 2000}])
    assert db["a"].key is None


@pytest.mark.parametrize("as_frame", [False, True])
def test_values_of_width_one_may_be_plain_numbers(as_frame: bool) -> None:
    rows: Any = [{"id": i, "vector": KEYS[i], "value": i + 0.5} for i in range(2)]
    with softdb.open(None, value_dim=1) as db:
        db.insert(pandas.DataFrame(rows) if as_frame else rows)
        db.insert([2, 3], KEYS, [1.5, 2.5])
        assert db.get().values.tolist() == [[0.5], [1.5], [1.5], [2.5]]  # type: ignore[union-attr]
    with softdb.open(None, value_dim=2) as db, pytest.raises(BadInput, match="values are 3 wide"):
        db.insert([2, 3, 4], [*KEYS, KEYS[0]], [1.5, 2.5, 3.5])


def test_arrow_values_of_width_one_may_be_plain_numbers() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with softdb.open(None, value_dim=1) as db:
        db.insert(pyarrow.table({"id": [1, 2], "key": KEYS, "value": [1.5, 2.5]}))
        assert db.get().values.tolist() == [[1.5], [2.5]]  # type: ignore[union-attr]


def test_the_first_query_to_a_database_that_open_created_warns(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "typo") as db:
        with pytest.warns(EmptyDatabase, match="search: .*typo holds no records, and is new; check the path") as shown:
            assert db.search([1.0, 0.0]).ids == [[]]
        assert shown[0].filename == __file__
        _search_without_a_warning(db)  # once
    with softdb.open(tmp_path / "typo") as db:
        _search_without_a_warning(db)  # it existed before
    with softdb.open(tmp_path / "new") as db:
        db.insert([1], [[1.0, 0.0]])
        db.delete([1])
        _search_without_a_warning(db)


def _search_without_a_warning(db: softdb.SoftDB) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        db.search([1.0, 0.0])


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with softdb.open("~/films") as db:
        assert db.path == tmp_path / "films"


def test_an_id_of_the_other_type_is_named(db: Any) -> None:
    with pytest.raises(UnknownId, match=r"^get: id '0' is not stored; 0 is, and differs: ids are str or int$"):
        db["0"]
    with pytest.raises(UnknownId, match=r"^get: id 'b' is not stored$"):
        db["b"]
    db.insert(["7"], KEYS[:1])
    with pytest.raises(UnknownId, match=r"^get: id 7 is not stored; '7' is, and differs"):
        db[7]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("just a text", r"texts alone: insert\(texts=…\)"),
        (pandas.Series(["one text", "another"]), r"texts alone: insert\(texts=…\)"),
        ({"id": {0: "a"}, "text": {0: "b"}}, "a dict is one row, but its id or text is a list or dict"),
        ([("a", [1.0, 0.0])], "rows are dicts, or a frame"),
        ([{"id": 9, "vec": [1.0, 0.0]}], r"other columns are \['vec'\]"),
    ],
)
def test_what_is_no_row_is_answered_with_the_form(db: Any, rows: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        db.insert(rows)
    assert len(db) == 2


def test_a_slice_and_swapped_arguments(db: Any) -> None:
    with pytest.raises(BadInput, match=r"a page is get\(limit=…, offset=…\)"):
        db[0:2]
    with pytest.raises(BadInput, match=r"db is 'rows\.jsonl'; expected an open softdb database, and then the source"):
        import_records("rows.jsonl", db)  # type: ignore[arg-type]


@pytest.mark.parametrize(("operator", "right"), [("gt", r"\$gt"), (">=", r"\$gte"), ("!=", r"\$ne"), ("x", "'year.x'")])
def test_an_operator_of_another_language_is_answered_with_the_right_one(db: Any, operator: str, right: str) -> None:
    with pytest.raises(BadFilter, match=rf"which is no operator; write .*{right}$"):
        db.search(KEYS, where={"year": {operator: 1}})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["id", "text"])
def test_a_filter_on_the_id_or_text_names_its_field(db: Any, name: str) -> None:
    with pytest.warns(UnknownField, match=rf"the record's {name} is \${name}"):
        db.count({name: "a"})


def test_hits_have_their_own_columns_in_a_frame(db: Any) -> None:
    with pytest.raises(BadInput, match="each field of the payload once; query, rank, id and score are always columns"):
        db.search(KEYS, k=1).to_pandas(["year", "id"])
