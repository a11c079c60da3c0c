"""Difficult ids, payloads and filters come back exactly or are refused before a change."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import json_drawn
import numpy as np
import pytest
from json_drawn import NAMES, NUMBERS, TEXTS, VAST
from reference_filters import MISSING, OPERATORS, as_filtered, meets, spelled
from worlds import holding

import softdb
from softdb.formats import Fields, export_records, import_records, read_records

TEXT_IDS = list(dict.fromkeys([*TEXTS, *NAMES, "1", "-1", "1.0", "i" * 1_000_000, "\N{GRINNING FACE}" * 250_000]))
INT_IDS = [0, 1, -1, 2**63 - 1, -(2**63)]
PAYLOADS: list[Any] = [
    *TEXTS, *NUMBERS, *VAST[:-1], None, True, [], {}, [None], [[[]]], {"": {"": {"": ""}}}, "p" * 1_000_000,
    {name: name for name in NAMES}, {"$or": [{"x": 1}]}, {"$gt": 1, "$": 2, ".": 3, "a": {"b.c": [1, {"": None}]}},
    {"id": 1, "key": 2, "value": 3, "payload": 4}, {"row": 1, "payload": "x"}, 10**4000, -0.0, 1e-400,
]  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, and zero of the same sign."""
    return repr(one) == repr(other)


def difficult(path: Path | None) -> softdb.SoftDB:
    db = softdb.open(path, dim=2)
    ids: list[Any] = [*TEXT_IDS, *INT_IDS]
    payloads = [PAYLOADS[i % len(PAYLOADS)] for i in range(max(len(ids), len(PAYLOADS)))]
    ids += [f"more {i}" for i in range(len(payloads) - len(ids))]
    db.insert(ids, np.arange(2 * len(ids)).reshape(-1, 2) / 8, payloads=payloads)
    return db


def expected() -> dict[Any, Any]:
    with difficult(None) as db:
        count = len(db)
    ids = [*TEXT_IDS, *INT_IDS]
    return {(ids[i] if i < len(ids) else f"more {i - len(ids)}"): PAYLOADS[i % len(PAYLOADS)] for i in range(count)}


def test_any_text_and_number_comes_back_exactly(tmp_path: Path) -> None:
    truth = expected()
    difficult(tmp_path / "db").close()
    with softdb.open(tmp_path / "db", mode="r", verify=True) as db:
        for one, payload in truth.items():
            assert same(db.get([one]).ids, [one])
            assert same(db.get([one]).payloads, [payload]), repr(one)[:80]
            assert one in db
        results = {one: p for records in db.scan(7) for one, p in zip(records.ids, records.payloads, strict=True)}
        assert same(results, truth)
        hits = db.search([[1.0, 1.0]], k=len(truth))
        assert all(same(truth[one], p) for one, p in zip(hits.ids[0], hits.payloads[0], strict=True))
        assert "absent" not in db
        assert "more" not in db
        db.snapshot(tmp_path / "copy")
    with softdb.open(tmp_path / "copy") as copy:
        assert copy.delete(list(truth)) == len(truth)
        assert len(copy) == 0


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_an_export_and_its_import_are_exact(tmp_path: Path, name: str) -> None:
    truth = expected()
    with difficult(None) as db:
        export_records(db, tmp_path / name)
    with softdb.open(tmp_path / "db", dim=2) as again:
        import_records(again, read_records(tmp_path / name, fields=Fields()))
        results = {one: p for records in again.scan() for one, p in zip(records.ids, records.payloads, strict=True)}
    assert same(results, truth)


def test_the_command_line_shows_them_exactly_as_json(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from softdb.tools.cli.commands import app

    truth = expected()
    difficult(tmp_path / "db").close()
    result = CliRunner().invoke(app, ["search", str(tmp_path / "db"), "[1, 1]", "-k", "1000", "--json"])
    (hits,) = json.loads(result.stdout)
    assert same({hit["id"]: hit["payload"] for hit in hits}, {hit["id"]: truth[hit["id"]] for hit in hits})
    assert len(hits) == len(truth)
    for name in NAMES:
        if name.startswith(("$", "-")):
            continue
        where = json.dumps({spelled([name]): name})
        result = CliRunner().invoke(app, ["search", str(tmp_path / "db"), "[1, 1]", "--where", where, "--json"])
        (hits,) = json.loads(result.stdout)
        assert len(hits) == sum(meets(payload, {spelled([name]): name}) for payload in truth.values()), repr(name)


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]


class Unspeakable:
    def __repr__(self) -> str:
        raise KeyError("no words")


BAD_IDS: list[Any] = [
    "\ud800", "a\udfffb", 2**63, -(2**63) - 1, 10**5000, 1.5, math.nan, True, None, b"x", [], DEEP, Unspeakable(), (1,),
]  # fmt: skip
BAD_PAYLOADS: list[Any] = [
    "\ud800", {"\udc00": 1}, {"x": "\ud83d"}, -math.inf, math.inf, [1e400], {"x": -math.inf}, {1: 2}, {None: 1},
    {("a",): 1}, b"x", {"x": b""}, {1, 2}, object(), Unspeakable(), LOOP, DEEP, 10**5000, [Unspeakable()],
    np.float32(math.inf), 1j, {"x": np.array([b"x"])}, {"x": ...},
]  # fmt: skip


@pytest.mark.parametrize("verb", ["insert", "upsert"])
@pytest.mark.parametrize("i", range(len(BAD_IDS)))
def test_an_invalid_id_changes_nothing(tmp_path: Path, verb: str, i: int) -> None:
    with holding([[1]], ids=["a"]) as db:
        for ids in ([BAD_IDS[i]], ["b", BAD_IDS[i]]):
            with pytest.raises(softdb.BadInput, match="id"):
                getattr(db, verb)(ids, [[1]] * len(ids))
        assert db.get(["a"]).ids == ["a"]
        assert (len(db), db.refresh()) == (1, 1)


@pytest.mark.parametrize("i", range(len(BAD_PAYLOADS)))
def test_an_invalid_payload_changes_nothing(i: int) -> None:
    with holding([[1]], payloads=["kept"], ids=["a"]) as db:
        bad = BAD_PAYLOADS[i]
        for change, payloads in (
            (partial(db.insert, ["b", "c"], [[1], [1]]), [1, bad]),
            (partial(db.upsert, ["a"], [[1]]), [bad]),
            (partial(db.update, ["a"]), [bad]),
        ):
            with pytest.raises(softdb.BadInput, match="payload"):
                change(payloads=payloads)
        assert db.get(["a"]).payloads == ["kept"]
        assert (len(db), db.refresh()) == (1, 1)


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 600),
        *(pytest.param(seed, 2500, marks=pytest.mark.slow) for seed in range(2, 10)),
        *(pytest.param(seed, 10_000, marks=pytest.mark.exhaustive) for seed in range(10, 18)),
    ],
)
def test_random_filters_match_the_same_as_plain_python(seed: int, count: int, tally: Counter[str]) -> None:
    draw = random.Random(seed)
    names = [*draw.sample(NAMES, 8), "x"] if seed % 2 else NAMES  # few names are found in many records
    payloads = [json_drawn.payload(draw, names) for _ in range(200)]
    seen, texts = [as_filtered(payload) for payload in payloads], [draw.choice([None, *TEXTS]) for _ in payloads]
    fields = [spelled([name]) for name in names] + [json_drawn.field(draw, names, payloads) for _ in range(50)]
    plain = softdb.open(None, dim=1)
    declared = softdb.open(None, dim=1, fields=[name for name in fields if "\0" not in name])
    for db in (plain, declared):
        db.insert(list(range(len(payloads))), np.ones((len(payloads), 1)), payloads=payloads, texts=texts)
    for i in range(count):
        where = json_drawn.where(draw, names, payloads if i % 4 else [])
        if i % 8 == 0:
            text = {"$text": json_drawn.condition(draw, [text for text in texts if text is not None])}
            where = draw.choice([text | where, {"$or": [where, text]}, {"$not": text | where}])
        right = {j for j, one in enumerate(seen) if meets(one, where, MISSING if texts[j] is None else texts[j])}
        for db in (plain, declared):
            results = {one for records in db.scan(where=where) for one in records.ids}
            wrong = [payloads[j] for j in range(len(payloads)) if (j in results) != (j in right)]
            assert not wrong, f"seed {seed}, filter {i}: {where!r} over {wrong[0]!r}"
    tally["fuzz: inputs"] += count


def nested(word: str, depth: int) -> dict[str, Any]:
    where: dict[str, Any] = {"x": 1}
    for _ in range(depth):
        where = {word: where if word == "$not" else [where]}
    return where


@pytest.mark.few(7)
@pytest.mark.parametrize("word", ["$and", "$or", "$not"])
@pytest.mark.parametrize("depth", [1, 10, 63, 64, 65, 1000, 100_000])
def test_filters_nest_up_to_a_depth(word: str, depth: int) -> None:
    with holding([[1], [1]], payloads=[{"x": 1}, {"x": 2}], ids=[1, 2]) as db:
        if depth < 64:
            assert db.count(nested(word, depth)) == 1
            return
        with pytest.raises(softdb.BadFilter, match="where nests deeper than 64"):
            db.count(nested(word, depth))
        field: Any = 1
        for _ in range(depth):
            field = {"$not": field if isinstance(field, dict) else {"$eq": field}}
        with pytest.raises(softdb.BadFilter, match="where nests deeper than 64"):
            db.delete(where={"x": field})
        assert len(db) == 2


WIDE: dict[str, Any] = {
    "100,000 in $in": ({"x": {"$in": list(range(100_000))}}, 2),
    "100,000 in $nin": ({"x": {"$nin": list(range(1, 100_000))}}, 1),
    "100,000 texts in $in": ({"x": {"$in": ["y" * (i % 90) for i in range(100_000)]}}, 0),
    "100,000 of all kinds in $in": ({"x": {"$in": [1, "1", None, True, 0.5] * 20_000}}, 1),
    "a name of 1 MB": ({"n" * 1_000_000: 1}, 0),
    "a name of 1 MB of quotation marks": ({'"' * 1_000_000: 1}, 0),
    "a text of 10 MB": ({"x": "t" * 10_000_000}, 0),
    "20,000 comparisons with nothing": ({"$or": [{"x": None}] * 20_000}, 0),
    "64 levels of 400": ({"$or": [{"x": 5}] * 400}, 0),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_filters_are_answered(name: str) -> None:
    where, count = WIDE[name]
    if name == "64 levels of 400":
        for _ in range(61):
            where = {"$or": [where, *[{"x": None}] * 400]}
    with holding([[1], [1]], payloads=[{"x": 0}, {"x": 1}], ids=[0, 1]) as db:
        assert db.count(where) == count


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "where",
    [
        {"$or": [{"x": i} for i in range(33_000)]},
        {"$and": [{"x": {"$ne": i}} for i in range(33_000)]},
        {"$or": [{"x": None}] * 33_000},
        {f"f{i}": i for i in range(40_000)},
        {'"': {"$contains": "x", "$not": {"$in": ["x", 1, None]}}, "$or": [{'"': {"$contains": "x"}}] * 33_000},
    ],
    ids=["$or", "$and", "nothing", "fields", "marks"],
)
def test_more_conditions_than_sqlite_takes_are_refused(where: dict[str, Any]) -> None:
    with holding([[1]], payloads=[{"x": 0}], ids=[0], fields=["x"]) as db:
        for ask in (db.count, partial(db.delete, None), partial(db.search, [[1]], 1)):
            with pytest.raises(softdb.BadFilter, match=r"where has [\d,]+ conditions, too many"):
                ask(where=where)
        assert len(db) == 1


@pytest.mark.parametrize("operator", [*OPERATORS, "$not", "$and", "$nope"])
def test_every_operator_takes_or_refuses_every_value(operator: str) -> None:
    values = [None, True, 0, 0.5, "", "a", [], [1], {}, {"a": 1}, {"$eq": 1}, 2**63, 10**5000, math.nan, math.inf, DEEP,
              LOOP, "\ud800", ["\ud800"], b"", {1}, object(), Unspeakable(), [Unspeakable()], 1j, np.float64(1),
              np.int64(1), np.array([1]), (1, "a")]  # fmt: skip
    with holding([[1]] * 3, payloads=[{"x": 0}, {"x": "a"}, None], ids=[0, 1, 2]) as db:
        for value in values:
            for where in ({"x": {operator: value}}, {operator: value}, {"x": [value]}, {"x": {"$in": [value]}}):
                with contextlib.suppress(softdb.BadFilter):  # and nothing else
                    assert 0 <= db.count(where) <= 3
        assert len(db) == 3
