"""Reading records back: pages of `get` and `scan`, pandas frames of records, and databases as tables in notebooks."""

from __future__ import annotations

import builtins
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_answer_tables import EVIL, page
from worlds import filled, holding, indexed, labelled

import softdb
from softdb import BadInput, Closed, MissingDependency, SoftDB, UnknownId
from softdb.nn import GradientReport
from softdb.reports import (
    CompactReport,
    DeviceReport,
    IndexReport,
    MemoryReport,
    ReembedReport,
    ReindexReport,
    Report,
    ShardReport,
    SnapshotReport,
    Stats,
    ViewReport,
)
from softdb.train import Fitted


@pytest.fixture
def db() -> SoftDB:
    """Open a database of 30 records in two kinds; 4, 5 and 20 were deleted, 2 was replaced, 9 has no key."""
    db = holding(np.arange(60).reshape(30, 2), payloads=[{"odd": i % 2 == 1} for i in range(30)])
    db.delete([4, 5, 20])
    db.upsert([2], [[2, 2]], payloads=[{"odd": False, "new": True}])
    db.insert([100], [None], payloads=[{"odd": True}], texts=["without a key"])
    return db


ORDER = [*(i for i in range(30) if i not in (2, 4, 5, 20)), 2, 100]


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, {}, {"odd": True}, {"new": True}, {"odd": 5}])
def test_every_page_is_a_slice_of_the_scan(db: SoftDB, where: Any) -> None:
    tests = {"odd": lambda i: i % 2 == 1 or i == 100, "new": lambda i: i == 2}
    keep = next(iter(where)) if where else None
    ids = [i for i in ORDER if keep is None or (where[keep] is True and tests[keep](i))]
    for limit, offset in itertools.product((None, 0, 1, 7, 10**20), (0, 3, 26, 27, 28, 10**20)):
        part = slice(offset, None if limit is None else offset + limit)
        records = db.get(where=where, limit=limit, offset=offset)
        assert records.ids == ids[part]
        scanned = list(db.scan(4, where, limit=limit, offset=offset))
        assert [i for batch in scanned for i in batch.ids] == ids[part]
        assert all(len(batch) == 4 for batch in scanned[:-1])
        if offset == 0:
            assert db.to_pandas(["id"], where, limit=limit)["id"].tolist() == ids[part]
        for record in records:
            same = db[record.id]
            assert (same.payload, same.text) == (record.payload, record.text)
            assert (same.key is None and record.key is None) or torch.equal(same.key, record.key)


def test_get_with_ids_and_a_filter_keeps_the_order_of_the_ids(db: SoftDB) -> None:
    assert db.get([7, 100, 2, 3, 7], {"odd": True}).ids == [7, 100, 3, 7]
    assert db.get([7, 100, 2, 3, 7], {"odd": True}, limit=2, offset=1).ids == [100, 3]
    assert db.get([7, 2, 3], limit=1, offset=1).ids == [2]
    assert db.get([7, 2, 3], offset=3).ids == db.get([], {"odd": True}).ids == []
    assert db.get([2], {"new": True})[0].key.tolist() == [2, 2]
    with pytest.raises(UnknownId, match="get: id 4 is not stored"):
        db.get([7, 4], {"odd": True}, limit=1)
    with pytest.raises(UnknownId, match="get: id 4 is not stored"):
        db.get([7, 4], limit=1)


def test_a_page_reads_no_other_payloads(db: SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = db.core.store, list[int]()
    usual = store.read

    def counted(rows: Any, *columns: Any, **words: Any) -> Any:
        read.append(len(rows))
        return usual(rows, *columns, **words)

    monkeypatch.setattr(store, "read", counted)
    assert len(db.get(limit=3, offset=10)) == len(db.get(where={"odd": True}, limit=3)) == 3
    assert [len(batch) for batch in db.scan(limit=3, offset=20)] == [3]
    assert read == [3, 3, 3]


def test_pages_shift_with_writes_as_documented(db: SoftDB) -> None:
    first = db.get(limit=3).ids
    db.upsert([0], [[0, 0]])  # replaced: moves to the end
    db.insert([200], [[0, 0]])
    assert first == [0, 1, 3]
    assert db.get(limit=3).ids == [1, 3, 6]
    assert db.get(offset=26).ids == [100, 0, 200]
    db.update([1], payloads=[{"odd": None}])  # a payload alone: the record keeps its place
    assert db.get(limit=1).ids == [1]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"limit": -1}, "get: limit is -1; expected a whole number at least 0"),
        ({"limit": 1.5}, "get: limit is 1.5; expected a whole number"),
        ({"limit": "3"}, "get: limit is '3'; expected a whole number"),
        ({"offset": -1}, "get: offset is -1; expected a whole number at least 0"),
        ({"offset": None}, "get: offset is None; expected a whole number"),
        ({"offset": True}, "get: offset is True; expected a whole number"),
        ({"ids": {"odd": True}}, "pass a filter as where="),
        ({"where": "odd"}, "get: "),
    ],
)
def test_bad_pages_are_refused(db: SoftDB, words: Any, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        db.get(**words)
    if "ids" not in words:
        with pytest.raises(BadInput, match=match.replace("get", "scan")):
            db.scan(**words)


def test_get_of_a_reader_sees_one_generation(tmp_path: Path) -> None:
    with holding([[1.0]] * 5, path=tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.delete([1, 2])
        db.insert([7], [[7.0]], payloads=["new"])
        records = reader.get()
        assert (records.ids, records.payloads) == ([0, 3, 4, 7], [None, None, None, "new"])
        assert len(reader) == 4


def test_an_empty_database_reads_as_nothing() -> None:
    with softdb.open(None, dim=3, value_dim=2) as db:
        assert (list(db), db.get().ids, list(db.scan(limit=3)), len(db.to_pandas())) == ([], [], [], 0)
        assert (db.get().keys.shape, db.get().values.shape) == ((0, 3), (0, 2))  # type: ignore[union-attr]
        assert list(db.to_pandas().columns) == list(db.get().to_pandas().columns)[:2] == ["id", "key"]


@pytest.mark.parametrize("columns", [{}, {"value_dim": None}, {"num_classes": 3}])
def test_records_iterate_as_they_index(columns: Any) -> None:
    with filled(**columns) as db:
        db.insert(["keyless"], [None], texts=["a text"])
        records = db.get()
        assert len(list(records)) == len(records)
        for i, record in enumerate(records):
            same = records[i]
            for part, other in ((record.key, same.key), (record.value, same.value)):
                assert type(part) is type(other)
                assert torch.equal(torch.as_tensor(part), torch.as_tensor(other)) if part is not None else other is None
            assert (record.id, record.payload, record.text) == (same.id, same.payload, same.text)


# -- frames ------------------------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_a_record_and_a_column_a_field() -> None:
    payloads = [{"year": 1979, "tags": ["a"]}, {"year": 1995, "by": "Mann"}, None]
    texts = ["In space", None, "text"]
    with holding([[1, 2], [3, 4], [5, 6]], [0, 1, 2], payloads, ids=["a", "b", "c"], texts=texts, num_classes=3) as db:
        db.insert(["none"], [None], payloads=[{"year": 2**60 + 1}])
        frame = db.to_pandas()
        assert list(frame.columns) == ["id", "key", "value", "text", "year", "tags", "by"]
        assert frame["id"].tolist() == ["a", "b", "c", "none"]
        assert [None if key is None else key.tolist() for key in frame["key"]] == [[1, 2], [3, 4], [5, 6], None]
        assert frame["key"][0].dtype == np.float32
        assert frame["value"].isna().tolist() == [False, False, False, True]
        assert frame["value"][:3].tolist() == [0, 1, 2]
        assert frame["text"].isna().tolist() == [False, True, False, True]
        assert (frame["year"].isna().tolist(), frame["year"][3]) == ([False, False, True, False], 2**60 + 1)
        assert frame[frame["year"] < 1990]["id"].tolist() == ["a"]
        assert frame["tags"][0] == ["a"]
        assert frame.equals(db.get().to_pandas())
        with pytest.warns(softdb.UnknownField, match="no record has the field 'absent'; columns are id, key") as caught:
            some = db.to_pandas(["year", "id", "payload", "absent"], {"year": {"$gt": 1980}}, limit=1)
        assert caught[0].filename == __file__
        assert list(some.columns) == ["year", "id", "payload", "absent"]
        assert some.iloc[0, :3].tolist() == [1995, "b", {"year": 1995, "by": "Mann"}]
        assert some["absent"].isna().all()
        assert list(db.get(["b"]).to_pandas().columns) == ["id", "key", "value", "year", "by"]
        assert list(db.get(["a"]).to_pandas(["by", "id"]).columns) == ["by", "id"]
        assert list(db.get(["a"]).to_pandas([]).columns) == []
        assert db.to_pandas(["text"])["text"].tolist()[0] == "In space"


@pytest.mark.parametrize("odd", ["a string", [1], {"key": 1}, {"vector": 1}, {"id": 1}, {"payload": {}}, {"text": 0}])
def test_payloads_that_cannot_be_columns_stay_whole(odd: Any) -> None:
    with holding(payloads=[{"x": 1}, odd]) as db:
        frame = db.to_pandas()
        assert list(frame.columns) == ["id", "key", "payload"]
        assert frame["payload"].tolist() == [{"x": 1}, odd]
        assert db.to_pandas(["x"])["x"][0] == 1


def test_numbers_of_a_frame_are_those_stored() -> None:
    payloads = [{"big": 2**70, "whole": 1, "part": 1, "flag": True}, {"big": None, "whole": 2, "part": 0.5}]
    with filled(0) as empty, holding(payloads=payloads, ids=["a", 1]) as db:
        frame = db.to_pandas()
        assert frame["id"].tolist() == ["a", 1]
        assert (frame["big"][0], frame["whole"].dtype, frame["part"].dtype) == (2**70, np.int64, np.float64)
        assert frame["flag"][0] is True
        assert frame["flag"].isna()[1]
        assert list(empty.to_pandas().columns) == ["id", "key"]


def test_an_impossible_frame_is_refused(db: SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("id", 5, [None], {"id"}):
        with pytest.raises(BadInput, match=r"to_pandas: columns are .* expected a list of names"):
            db.to_pandas(columns)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=r"columns are .* expected a list of names"):
            db.get().to_pandas(columns)  # type: ignore[arg-type]
    usual = builtins.__import__

    def without(name: str, *more: Any, **words: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return usual(name, *more, **words)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match="pip install pandas"):
        db.to_pandas()


# -- notebooks ---------------------------------------------------------------------------------------------------------


def test_a_database_is_a_table_in_a_notebook(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "films", dim=2, num_classes=3, metric="cosine", fields=["year"]) as db:
        assert dict(page(db).cells[1:])["records"] == "0"
        db.insert(range(9), np.ones((9, 2)), [1] * 9, [{"year": i} for i in range(9)])
        db.insert(["keyless"], [None])
        db.index_text()
        cells = page(db).cells
        assert cells[0][1].startswith("<SoftDB '")
        facts = dict(cells[1:13])
        assert (facts["records"], facts["keyless"], facts["dim"]) == ("10", "1", "2")
        assert (facts["dtype"], facts["metric"], facts["num_classes"]) == ("float32", "cosine", "3")
        assert (facts["fields"], facts["text_index"]) == ("['year']", "words")
        assert facts["index"] == facts["encoder"] == facts["value_dim"] == "None"
        assert cells[13:15] == [["id", "key", "value", "payload"], ["0", "[1, 1]", "1", '{"year":0}']]
        assert len(cells) == 19  # five records
        assert len(page(db).caption) < 60
        assert "\n" not in repr(db)
    closed = page(db)
    assert closed.cells == [[repr(db)]]
    assert closed.caption == "Closed: stats: this handle is closed; open the database again"
    with pytest.raises(Closed, match="to_pandas: this handle is closed"):
        db.to_pandas()


def test_the_table_of_a_database_names_its_index() -> None:
    with indexed(recall=0.9) as db:
        report = db.stats().index
        assert report is not None
        facts = dict(page(db).cells[1:14])
        assert (facts["index.kind"], facts["index.recall"]) == ("ivf", str(report.recall))


def test_a_notebook_does_not_refresh_a_reader_or_read_all_records(tmp_path: Path) -> None:
    with holding([[1.0]] * 50, path=tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r") as reader:
        db.insert(["new"], [[1.0]])
        usual, read = reader.core.store.read, list[int]()
        reader.core.store.read = lambda rows, **words: read.append(len(rows)) or usual(rows, **words)  # type: ignore
        assert dict(page(reader).cells[1:9])["records"] == "50"
        assert read == [5]


@pytest.mark.parametrize("evil", EVIL)
def test_hostile_names_and_records_are_text(evil: str, tmp_path: Path) -> None:
    with holding([[1, 0]], payloads=[{evil: evil}], ids=[evil], texts=[evil]) as db:
        stats = dataclasses.replace(db.stats(), path=evil)
        for answer in (db, stats, ReembedReport(1, 1, 2, evil, 1, 0.5), SnapshotReport(evil, 1, 1, 1)):
            actual = page(answer)
            assert {name for name, _ in actual.attributes} == {"style"}
            shown = "".join(map("".join, actual.cells)) + actual.caption
            assert all(map(str.isprintable, shown))
            if evil.isprintable():
                assert evil in shown or repr(evil)[1:-1] in shown


def test_every_report_is_a_table() -> None:
    with labelled() as db:
        stats = db.stats()
        queries = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
        gradients = softdb.nn.gradient_report(holding(torch.eye(2)), queries, k=1)
    report = IndexReport("ivf", 0.987, lists=1234, reason="<b>")
    index = page(dataclasses.replace(stats, index=report))
    facts = dict(index.cells[1:])
    assert (facts["records"], facts["index.kind"], facts["index.lists"], facts["index.recall"]) == (
        "3", "ivf", "1,234", "0.987",
    )  # fmt: skip
    examples: list[Report] = [
        stats,
        report,
        CompactReport(1, 2, 3, 4, 5, 6),
        DeviceReport(["cpu"], "", "", "", 0, ""),
        MemoryReport(1, 1, 0, None, False, 0, 0.0, 0.0),
        ReembedReport(1, 1, 2, None, 1, 0.5),
        ReindexReport(1, 1, 1, 0.5),
        ShardReport(0, "host", 7, 0, 1, 3, None, None, 5, 0.1, 0.2),
        SnapshotReport("a", 1, 1, 1),
        ViewReport(1, 1, 0, 0, None, False, 1, 0.1, 0.1),
    ]
    assert {type(example) for example in examples} == set(Report.__subclasses__()) >= {Stats}
    for example in examples:
        cells = page(example).cells
        assert cells[0][0] == type(example).__name__
        assert [name for name, _ in cells[1:]] == list(example.summary())
    assert [line[0] for line in page(gradients).cells[1:]] == list(GradientReport._fields)


def test_a_trained_projection_is_a_table() -> None:
    random = np.random.default_rng(0)
    with holding(random.standard_normal((40, 4))) as db:
        fitted = softdb.train.fit(db, random.standard_normal((20, 4)), list(range(20)), epochs=1)
        assert isinstance(fitted, Fitted)
        cells = page(fitted).cells
        assert [line[0] for line in cells] == ["", "recall@1", "recall@10", "MRR@100"]
        assert cells[1][1] == f"{fitted.before.recall_1:.3f}"
        assert cells[3][2] == f"{fitted.after.mrr_100:.3f}"
