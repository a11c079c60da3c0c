"""Answers as HTML tables and pandas frames: escaped, short and equal to the lists."""

from __future__ import annotations

import builtins
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding, labelled

import softdb
from softdb import BadInput, MissingDependency, SoftDB, StaleRead

EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' style='x' onmouseover='alert(1)",
    "</td></table></div><iframe src=javascript:alert(1)>",
    "<!-- --><style>*{display:none}</style>&lt;b&gt;",
    "a\u202egnp.exe\u2066\x1b[2J\x9b\x00\u2028",
]


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: set[tuple[str, str | None]] = set()
        self.cells: list[list[str]] = []
        self.caption = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "table", "thead", "tbody", "tr", "th", "td", "small"}
        self.attributes |= set(attrs)
        self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "small":
            self.caption += data
        else:
            assert self.open[-1] in ("th", "td")
            self.cells[-1][-1] += data

    def unknown_decl(self, data: str) -> None:
        pytest.fail(data)

    handle_comment = handle_decl = handle_pi = unknown_decl  # type: ignore[assignment]


def page(answer: Any) -> Page:
    return Page(answer._repr_html_())


@pytest.fixture
def db() -> SoftDB:
    return labelled()


def test_tables_show_the_same_as_lists(db: SoftDB) -> None:
    actual = page(db.search([[1, 0], [-1, 0]], k=2))
    assert actual.cells == [
        ["query", "rank", "id", "score", "payload"],
        ["0", "1", "'a'", "3", '{"x":1}'],
        ["0", "2", "7", "2", ""],
        ["1", "1", "'c'", "-1", '"' + 158 * "p" + "…"],
        ["1", "2", "7", "-2", ""],
    ]
    assert actual.caption == "hits 4, queries 2"
    assert page(db.search([[1, 0], [-1, 0]], k=1)[1]).cells[1:] == [["1", "1", "'c'", "-1", '"' + 158 * "p" + "…"]]
    assert page(db.get(["a", 7])).cells[1:] == [["'a'", "[3, 0]", "0", '{"x":1}'], ["7", "[2, 0]", "1", ""]]
    assert page(db["a"]).cells[1:] == page(db.get(["a"])).cells[1:] == page(next(db.scan())).cells[1:2]
    soft = db.attend([[1.0, 0]], k=3, temperature=0.1)
    assert page(soft).cells[1:] == [["0", "[1, 4.54e-05, 2.061e-09]", "30", "exact", "3", "['a' 3, 7 2, 'c' 1]"]]
    assert page(soft.explain(2)[0]).cells[1:] == [["100.00%", "'a'", "3", '{"x":1}'], ["0.00%", "7", "2", ""]]


def test_missed_mass_stands_in_the_table() -> None:
    with holding(torch.eye(4)[:, :2], torch.arange(20.0).reshape(4, 5)) as db:
        soft = page(db.attend([[1.0, 0]], k=1))
        assert soft.cells[1][1:5] == ["[0, 1, 2, …]", "1", "52.46% missed", "1"]
        assert soft.caption == "queries 1, output (1, 5) float32, finder 'flat'"
        assert page(db.attend([[1.0, 0]])).cells[1][3:] == ["exact", "4"]


def test_short_cells_do_not_wrap_and_unused_columns_are_left_out() -> None:
    with holding([[1, 0]], ids=["value-1"], payloads=[{"a": "b" * 90}]) as db:
        answer = page(db.get(["value-1"]))
        assert answer.cells[0] == ["id", "key", "payload"]
        html = db.get(["value-1"])._repr_html_()
        assert (html.count("nowrap"), html.count("anywhere")) == (5, 1)  # all but the payload


@pytest.mark.parametrize("evil", EVIL)
def test_a_hostile_payload_is_text(evil: str) -> None:
    with holding([[1, 0], [0, 1]], payloads=[{evil: [evil]}, evil], ids=[evil, "b"]) as db:
        soft = db.attend([[1.0, 0]], k=2)
        answers = [db.search([[1, 0]]), db.search([[1, 0]])[0], db.get([evil, "b"]), db[evil], soft, soft.explain()[0]]
        for answer in answers:
            actual = page(answer)
            assert {name for name, _ in actual.attributes} == {"style"}
            assert not any(value and ("url" in value or "expression" in value) for _, value in actual.attributes)
            shown = "".join(map("".join, actual.cells))
            assert not [one for one in shown if not one.isprintable()]
            if evil.isprintable():
                assert repr(evil)[1:-1] in shown
        assert str(soft.explain()[0]).replace("\n", "").isprintable()


def test_tables_stay_small_and_look_up_only_shown_records() -> None:
    with holding(torch.randn(3000, 8), payloads=["&" * 10_000] * 3000) as db:
        hits, read = db.search(torch.randn(1000, 8), k=100), list[int]()

        def watched(rows: Any, payloads: bool = True, texts: bool = False) -> Any:
            read.append(len(rows))
            return hits.resolve(rows)

        actual = softdb.Hits(hits.rows, hits.scores, watched)
        assert page(actual).caption == "hits 18 of 100,000, queries 6 of 1,000"
        assert 0 < sum(read) <= 18
        assert page(hits[3]).caption == "hits 20 of 100, queries 1"
        assert page(db.get(range(3000))).caption == "records 20 of 3,000, keys (3000, 8) float32"
        soft = db.attend(torch.randn(1000, 8), k=100)
        assert page(soft).caption.startswith("queries 20 of 1,000, ")
        assert page(soft.explain(50)[0]).caption.startswith("records 20 of 50, ")
        for answer in (hits, hits[3], db.get(range(3000)), soft, soft.explain(50)[0]):
            assert len(answer._repr_html_()) < 40_000
        assert db.search(torch.randn(0, 8))._repr_html_()
        db.close()
        assert ["0", "1", f"row {hits.rows[0, 0]}"] == page(hits).cells[1][:3]


def test_a_frame_has_a_line_a_hit(db: SoftDB) -> None:
    queries = torch.tensor([[1.0, 0], [-1, 0]], requires_grad=True)
    frame = db.search(queries, radius=-1.5).to_pandas()
    assert list(frame.columns) == ["query", "rank", "id", "score", "payload"]
    assert frame["query"].tolist() == [0, 0, 0, 1]
    assert frame["rank"].tolist() == [1, 2, 3, 1]
    assert frame["id"].tolist() == ["a", 7, "c", "c"]
    assert frame["score"].tolist() == [3, 2, 1, -1]
    assert frame["payload"].tolist() == [{"x": 1}, None, "p" * 500, "p" * 500]
    assert (frame["query"].dtype, frame["rank"].dtype, frame["score"].dtype) == (np.int64, np.int64, np.float32)
    fields = db.search(queries, k=2).to_pandas(fields=["x", "y"])
    assert list(fields.columns) == ["query", "rank", "id", "score", "x", "y"]
    assert fields["x"].isna().tolist() == [False, True, True, True]
    assert fields["x"][0] == 1
    assert fields["y"].isna().all()
    empty = db.search(queries, where={"x": 2}).to_pandas(fields=["x"])
    assert (len(empty), list(empty.columns)) == (0, ["query", "rank", "id", "score", "x"])


def test_a_frame_has_texts_where_a_hit_has_one(db: SoftDB) -> None:
    db.update(["a"], texts=["<b>"])
    hits = db.search([[1, 0]], k=2)
    assert hits.to_pandas()["text"].tolist() == ["<b>", None]
    frame = hits.to_pandas(fields=["x", "$text"])
    assert list(frame.columns) == ["query", "rank", "id", "score", "x", "$text"]
    assert frame["$text"].tolist() == ["<b>", None]


def test_a_frame_spreads_the_fields_of_the_payloads() -> None:
    db = softdb.open(None, metric="l2")
    db.insert([{"id": "a", "vector": [0.0], "year": 1}, {"id": "b", "vector": [1.0], "text": "t", "by": "x"}])
    frame = db.search([0.0], k=2).to_pandas()
    assert list(frame.columns) == ["query", "rank", "id", "score", "text", "year", "by"]
    assert frame["by"].isna().tolist() == [True, False]
    assert db.search([0.0], k=2).to_pandas(["year"])["year"].tolist()[0] == 1
    db.update([{"id": "b", "score": 5}], merge=True)  # a field with the name of a column
    frame = db.search([0.0], k=2).to_pandas()
    assert list(frame.columns) == ["query", "rank", "id", "score", "text", "payload"]
    assert frame["payload"].tolist() == [{"year": 1}, {"by": "x", "score": 5}]


def test_an_impossible_frame_raises_with_the_reason(db: SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    hits: Any = db.search([[1, 0]])
    for fields in ("x", 5, ["score"], [None]):
        with pytest.raises(BadInput, match="to_pandas: fields"):
            hits.to_pandas(fields=fields)
    hits = db.search([[1, 0]])
    db.delete(["a"])
    with pytest.raises(StaleRead, match="1 of 3 hits"):
        hits.to_pandas()
    usual = builtins.__import__

    def without(name: str, *more: Any, **words: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return usual(name, *more, **words)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match="pip install pandas"):
        hits.to_pandas()
