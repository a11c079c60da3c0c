"""Each bad input raises a typed error that says what came and what to do, and changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb
from softdb import BadInput, SoftDB

ONE = np.ones((1, 3), np.float32)
TWO = np.ones((2, 3), np.float32)


@pytest.fixture(params=["memory", "disk"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> SoftDB:
    path = None if request.param == "memory" else tmp_path / "db"
    return holding(np.eye(2, 3), np.ones((2, 2)), [{"x": 1}, None], ids=["a", 1], path=path)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


V = np.ones((1, 2))

WRITES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "wrong width": (lambda db: db.insert(["b"], [[1, 2]], V), BadInput, "keys are 2 wide but this database is 3 wide"),
    "value width": (lambda db: db.insert(["b"], ONE, [[1, 2, 3]]), BadInput, "values are 3 wide"),
    "nan": (
        lambda db: db.insert(["b"], [[1, float("nan"), 0]], V),
        BadInput,
        "NaN or infinity in 1 of 1 rows, first in row 0",
    ),
    "infinity": (lambda db: db.insert(["b", "c"], [[1, 1, 0], [0, 0, np.inf]], TWO[:, :2]), BadInput, "first in row 1"),
    "nan value": (lambda db: db.insert(["b"], ONE, [[np.nan, 0]]), BadInput, "values hold NaN"),
    "opposite infinities": (lambda db: db.insert(["b"], [[np.inf, -np.inf, 0]], V), BadInput, "NaN or infinity"),
    "float64 beyond float32": (lambda db: db.insert(["b"], [[1e300, 0, 0]], V), BadInput, "cast to float32"),
    "ragged": (lambda db: db.insert(["b", "c"], [[1, 2, 3], [1, 2]], TWO[:, :2]), BadInput, "ragged"),
    "empty batch": (lambda db: db.insert([], np.zeros((0, 3)), np.zeros((0, 2))), BadInput, "empty batch"),
    "empty keys": (lambda db: db.insert(["b"], [], V), BadInput, "empty batch"),
    "three dimensions": (lambda db: db.insert(["b"], [[[1, 2, 3]]], V), BadInput, "3 dimensions"),
    "complex": (lambda db: db.insert(["b"], [[1j, 0, 0]], V), BadInput, "complex128"),
    "text numbers": (lambda db: db.insert(["b"], [["1", "2", "3"]], V), BadInput, "expected real numbers"),
    "objects": (lambda db: db.insert(["b"], [[object()] * 3], V), BadInput, "expected real numbers"),
    "none": (lambda db: db.insert(["b"], None, V), BadInput, "keys are missing; give keys, or texts"),
    "text without encoder": (lambda db: db.insert(["b"], ["text"], V), BadInput, "pass encoder="),
    "duplicate in batch": (lambda db: db.insert(["b", "b"], TWO, TWO[:, :2]), softdb.DuplicateId, "'b' comes twice"),
    "existing id": (
        lambda db: db.insert(["b", "a"], TWO, TWO[:, :2]),
        softdb.DuplicateId,
        r"'a' is stored already \(1 of 2 ids\)",
    ),
    "unknown id": (lambda db: db.update(["a", "b"], payloads=[1, 2]), softdb.UnknownId, "'b' is not stored"),
    "update nothing": (lambda db: db.update(["a"]), BadInput, "nothing to change"),
    "bool id": (lambda db: db.insert([True], ONE, V), BadInput, "type bool"),
    "float id": (lambda db: db.insert([1.0], ONE, V), BadInput, "type float"),
    "bytes id": (lambda db: db.insert([b"b"], ONE, V), BadInput, "type bytes"),
    "none id": (lambda db: db.insert([None], ONE, V), BadInput, "type NoneType"),
    "ids of another type": (lambda db: db.insert(object(), ONE, V), BadInput, "expected a list of str or int"),
    "id beyond 64 bits": (lambda db: db.insert([2**63], ONE, V), BadInput, "more than 64 bits"),
    "surrogate id": (lambda db: db.insert(["\ud800"], ONE, V), BadInput, "lone surrogate"),
    "too few keys": (lambda db: db.insert(["b", "c"], ONE, V), BadInput, "1 keys for 2 ids"),
    "too many values": (lambda db: db.insert(["b"], ONE, TWO[:, :2]), BadInput, "2 values for 1 ids"),
    "missing values": (lambda db: db.insert(["b"], ONE), BadInput, "values are missing"),
    "too few payloads": (lambda db: db.insert(["b", "c"], TWO, TWO[:, :2], [1]), BadInput, "1 payloads for 2 ids"),
    "one payload for two": (lambda db: db.insert(["b", "c"], TWO, TWO[:, :2], {"x": 1}), BadInput, "expected a list"),
    "set payload": (lambda db: db.insert(["b"], ONE, V, [{1, 2}]), BadInput, "payload 0 holds a set"),
    "bytes payload": (lambda db: db.insert(["b"], ONE, V, [{"x": b"1"}]), BadInput, "holds a bytes"),
    "infinite payload": (lambda db: db.insert(["b"], ONE, V, [{"x": [float("inf")]}]), BadInput, "holds inf"),
    "int key in payload": (lambda db: db.insert(["b"], ONE, V, [{1: 2}]), BadInput, "which is no str"),
    "deep payload": (lambda db: db.insert(["b"], ONE, V, [deep(1000)]), BadInput, "deeper than 64"),
    "cyclic payload": (lambda db: db.insert(["b"], ONE, V, [cyclic()]), BadInput, "deeper than 64"),
    "surrogate payload": (lambda db: db.insert(["b"], ONE, V, [{"x": "\udfff"}]), BadInput, "lone surrogate"),
    "decimal in payload": (lambda db: db.insert(["b"], ONE, V, [{"x": Decimal(1)}]), BadInput, "holds a Decimal"),
    "delete nothing named": (lambda db: db.delete(), BadInput, "give ids or where"),
    "delete both": (lambda db: db.delete("a", where={}), BadInput, "give ids or where"),
    "upsert twice": (lambda db: db.upsert(["b", "b"], TWO, TWO[:, :2]), softdb.DuplicateId, "comes twice"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_refused_write_changes_nothing(db: SoftDB, name: str) -> None:
    write, error, message = WRITES[name]
    before = db.stats().generation, [(r.ids, r.keys.tolist(), r.payloads) for r in db.scan()]
    with pytest.raises(error, match=message):
        write(db)
    assert (db.stats().generation, [(r.ids, r.keys.tolist(), r.payloads) for r in db.scan()]) == before
    db.insert(["next"], ONE, V)
    assert db.verify() == 3


READS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "query width": (lambda db: db.search([1, 2]), BadInput, "queries are 2 wide but this database's keys are 3 wide"),
    "query nan": (lambda db: db.search([[0, 0, 0], [0, np.nan, 0]]), BadInput, "first in query 1"),
    "query number": (lambda db: db.search(3.0), BadInput, r"queries are of shape \(\) but"),
    "query dimensions": (lambda db: db.search(np.ones((2, 1, 2))), BadInput, r"of shape \(2, 1, 2\) but"),
    "query bool": (lambda db: db.search(torch.ones(1, 3, dtype=torch.bool)), BadInput, "expected real numbers"),
    "query text": (lambda db: db.search("text"), BadInput, "pass encoder="),
    "query mixed": (lambda db: db.search(["text", 1]), BadInput, "mix text and numbers"),
    "k zero": (lambda db: db.search(ONE, k=0), BadInput, "k is 0; expected a whole number at least 1"),
    "k float": (lambda db: db.search(ONE, k=2.0), BadInput, "k is 2.0"),
    "k bool": (lambda db: db.search(ONE, k=True), BadInput, "k is True"),
    "attend k": (lambda db: db.attend(ONE, k=-1), BadInput, "k is -1"),
    "temperature zero": (lambda db: db.attend(ONE, temperature=0), BadInput, "temperature is 0"),
    "temperature negative": (lambda db: db.attend(ONE, temperature=-1), BadInput, "temperature is -1"),
    "temperature nan": (lambda db: db.attend(ONE, temperature=np.nan), BadInput, "temperature is nan"),
    "temperature text": (lambda db: db.attend(ONE, temperature="1"), BadInput, "temperature is '1'"),
    "temperature with gradient": (
        lambda db: db.attend(ONE, temperature=torch.zeros((), requires_grad=True)),
        BadInput,
        "to keep a learnt one above 0, learn its logarithm",
    ),
    "mask shape": (
        lambda db: db.attend(ONE, mask=np.ones((1, 3), bool)),
        BadInput,
        r"mask has shape \(1, 3\); expected \(1, 2\)",
    ),
    "mask dtype": (lambda db: db.attend(ONE, mask=np.ones((1, 2))), BadInput, "expected bool"),
    "score": (lambda db: db.attend(ONE, score="dot"), BadInput, "score is 'dot'"),
    "score NaN": (lambda db: db.attend(ONE, score=lambda q, k: q @ k.T * np.nan), BadInput, "score returned NaN"),
    "score width": (
        lambda db: db.attend(ONE, score=softdb.scores.General(5, 3)),
        BadInput,
        "queries are 3 wide but this score takes queries 5 wide",
    ),
    "key width": (
        lambda db: db.attend(np.ones((1, 5)), score=softdb.scores.General(5, 2)),
        BadInput,
        "keys are 3 wide.*made for 2",
    ),
    "weights": (lambda db: db.attend(ONE, weights="hardmax"), BadInput, "hardmax.*'softmax'"),
    "normalised temperature": (
        lambda db: db.attend(ONE, weights="normalised", temperature=2),
        BadInput,
        "normalised weights have none",
    ),
    "negative kernel": (
        lambda db: db.attend(ONE, weights="normalised", score=lambda q, k: -1 - 0 * (q @ k.T)),
        BadInput,
        "at least 0",
    ),
    "score shape": (lambda db: db.attend(ONE, score=lambda q, k: q), BadInput, "score returned shape"),
    "filter operator": (lambda db: db.search(ONE, where={"x": {"$like": "a"}}), softdb.BadFilter, "unknown operator"),
    "filter type": (lambda db: db.attend(ONE, where={"x": {"$gt": [1]}}), softdb.BadFilter, "list"),
    "get unknown": (lambda db: db.get(["a", "zzz"]), softdb.UnknownId, r"'zzz' is not stored \(1 of 2 ids"),
    "item unknown": (lambda db: db["zzz"], KeyError, "'zzz' is not stored"),
    "get float": (lambda db: db.get([1.0]), BadInput, "type float"),
    "in bool": (lambda db: True in db, BadInput, "type bool"),
    "scan size": (lambda db: db.scan(0), BadInput, "batch_size is 0"),
    "index kind": (lambda db: db.build_index("annoy"), BadInput, "annoy"),
    "index kind list": (lambda db: db.build_index(["ivf"]), BadInput, "kind is .*ivf"),
    "generator": (lambda db: db.attend(ONE, rtol=0.1, generator=3), BadInput, "generator is 3"),
    "generator to sample": (lambda db: db.sample(ONE, generator=3), BadInput, "generator is 3"),
    "samples": (lambda db: db.sample(ONE, 2**62), BadInput, "n is 4611686018427387904; expected .* from 1 to"),
    "window": (lambda db: db.watch(0.1, 2**70), BadInput, "window is .* from 1 to 1000000"),
    "index recall": (lambda db: db.build_index(recall=1.5), BadInput, "recall"),
    "index queries": (lambda db: db.build_index(queries=[[1, 2]]), BadInput, "queries are 2 wide"),
}


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(1, 3, device="meta"), "'meta', which holds no numbers"),
    "sparse": (lambda: torch.ones(1, 3).to_sparse(), "sparse"),
    "float8": (lambda: torch.ones(1, 3).to(torch.float8_e4m3fn), "float8"),
    "complex": (lambda: torch.ones(1, 3, dtype=torch.complex64), "complex64"),
}
TAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "search": lambda db, tensor: db.search(tensor),
    "attend": lambda db, tensor: db.attend(tensor),
    "insert": lambda db, tensor: db.insert(["b"], tensor, V),
    "insert a list": lambda db, tensor: db.insert(["b"], [tensor[0]], V),
    "get": lambda db, tensor: db.get(tensor),
    "exclude_ids": lambda db, tensor: db.search(ONE, exclude_ids=tensor),
    "mask": lambda db, tensor: db.attend(ONE, mask=tensor),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("taker", TAKERS)
def test_tensors_whose_numbers_cannot_be_read_are_refused(db: SoftDB, kind: str, taker: str) -> None:
    tensor, message = TENSORS[kind]
    with pytest.raises(BadInput, match=message):
        TAKERS[taker](db, tensor())
    assert len(db) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8], ids=str)
def test_a_list_of_tensors_is_taken_as_one_tensor_is(dtype: torch.dtype) -> None:
    rows = list(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype))
    with holding(rows, ids=["a", "b"]) as db:
        assert db.get(["a", "b"]).keys.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert db.search(rows, k=1).scores.tolist() == [[32], [77]]


def test_no_queries_have_empty_answers() -> None:
    with holding(np.eye(4, 3), metric="l2") as db:
        none = np.zeros((0, 3), np.float32)
        for actual in (db.log_partition(none), db.log_density(none, softdb.scores.Gaussian(1.0))):
            assert actual.value.shape == actual.bar.shape == actual.met.shape == actual.exact.shape == (0,)
        assert db.count_within(none, 1.0).value.shape == (0,)
        assert db.attend(none, rtol=0.1).output.shape == db.attend(none, k=2).output.shape == (0, 3)


def test_a_radius_whose_square_is_not_finite_is_refused() -> None:
    with holding(ONE, ids=["a"], metric="l2") as db:
        for ask in (lambda: db.search(ONE, radius=1e200), lambda: db.count_within(ONE, 1e200)):
            with pytest.raises(BadInput, match="radius is 1e\\+200, whose square is not finite"):
                ask()
        assert len(db.search(ONE, radius=1e150).ids[0]) == 1


def test_k_beyond_the_records_asks_for_all(db: SoftDB) -> None:
    everything = db.attend(ONE, k=2)
    for k in (3, 10**9, 2**62, 2**70):
        assert torch.equal(db.attend(ONE, k=k).output, everything.output)
        assert torch.equal(db.search(ONE, k=k).scores, db.search(ONE, k=2).scores)
        for asked in (db.attend(ONE), db.attend(ONE, k=k)):
            assert asked.explain(k)[0].ids == asked.explain(2)[0].ids
    assert [records.ids for records in db.scan(2**70)] == [["a", 1]]


def test_a_filter_on_an_absent_field_warns_once(db: SoftDB) -> None:
    db.insert(["b", "c"], TWO, TWO[:, :2], [{"year": 2020, "lang": "de"}, [1]])
    with pytest.warns(softdb.UnknownField, match="no record has the field 'yaer'; did you mean 'year'?") as caught:
        assert db.count({"$or": [{"yaer": 2020}, {"$not": {"lang": {"$exists": False}}, "x": 1}]}) == 0
    assert len(caught) == 1
    with pytest.warns(softdb.UnknownField, match="no record has the field 'nothing like it'$"):
        assert db.delete(where={"nothing like it": 1}) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert db.count({"yaer": {"$contains": 2021}}) == 0
        assert db.count({"year": 1999}) == db.count({"lang": {"$in": []}}) == 0
        assert db.count({"year": {"$exists": False}}) == 4 - 1
    with softdb.open(None, dim=3) as empty, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert empty.count({"year": 1999}) == 0


@pytest.mark.parametrize("name", READS)
def test_a_refused_read(db: SoftDB, name: str) -> None:
    read, error, message = READS[name]
    with pytest.raises(error, match=message):
        read(db)


OPENS: dict[str, tuple[dict[str, Any], str]] = {
    "dim zero": ({"dim": 0}, "dim is 0"),
    "dim text": ({"dim": "3"}, "dim is '3'"),
    "dim enormous": ({"dim": 2**40}, "dim is 1099511627776"),
    "two kinds of values": ({"dim": 2, "value_dim": 1, "num_classes": 2}, "give one"),
    "dtype": ({"dim": 2, "dtype": "float64"}, "'float32' or 'float16'"),
    "metric": ({"dim": 2, "metric": "euclid"}, "choose one of 'dot', 'cosine', 'l2'"),
    "mode": ({"dim": 2, "mode": "w"}, "choose one of 'rw', 'r'"),
    "device": ({"dim": 2, "device": "moon"}, "device is 'moon'"),
    "device beyond 64 bits": ({"dim": 2, "device": 2**70}, "device is 1180591620717411303424"),
    "mode array": ({"dim": 2, "mode": np.array(["r", "rw"])}, "mode is array"),
    "durability array": ({"dim": 2, "durability": np.array(["full"])}, "durability is array"),
    "metric array": ({"dim": 2, "metric": np.array(["dot", "l2"])}, "metric is array"),
    "encoder": ({"dim": 2, "encoder": 3}, "expected 'ngrams', the name .* or a callable"),
}


@pytest.mark.parametrize("name", OPENS)
def test_a_refused_open(name: str, tmp_path: Path) -> None:
    arguments, message = OPENS[name]
    with pytest.raises(BadInput, match=message):
        softdb.open(None, **arguments)
    with pytest.raises(BadInput, match=message):
        softdb.open(tmp_path / "db", **arguments)
    assert not (tmp_path / "db").exists()


def test_reopening_with_other_words_is_refused(tmp_path: Path) -> None:
    softdb.open(tmp_path / "db", dim=3, metric="cosine").close()
    for words, message in [
        ({"dim": 4}, "dim=4 was asked for but this database has 3"),
        ({"metric": "l2"}, "metric=l2 was asked for but this database has cosine"),
        ({"dtype": "float16"}, "dtype=float16"),
        ({"value_dim": 3}, "value_dim=3 was asked for but this database has None"),
    ]:
        with pytest.raises(BadInput, match=message):
            softdb.open(tmp_path / "db", **words)  # type: ignore[arg-type]
    with softdb.open(tmp_path / "db", dim=3, metric="cosine", dtype="float32") as db:
        assert len(db) == 0


def test_a_closed_handle_refuses_every_verb(db: SoftDB) -> None:
    db.close()
    db.close()
    verbs: list[Callable[[], Any]] = [
        lambda: db.insert(["b"], ONE, V),
        lambda: db.get("a"),
        lambda: db.search(ONE),
        lambda: db.attend(ONE),
        lambda: len(db),
        lambda: "a" in db,
        lambda: db.stats(),
        lambda: db.refresh(),
        lambda: db.count(),
        lambda: db.scan(),
        lambda: db.verify(),
    ]
    for verb in verbs:
        with pytest.raises(softdb.Closed, match="this handle is closed"):
            verb()
    assert "closed" in repr(db)


def test_hits_of_a_closed_database_say_where_to_read_them(db: SoftDB) -> None:
    hits = db.search(ONE, k=1)
    db.close()
    with pytest.raises(softdb.Closed, match="read ids, payloads and texts of hits inside its with block"):
        _ = hits.ids


def test_columns_of_answers_are_attributes(db: SoftDB) -> None:
    answers: list[Any] = [db.get(), db.search(ONE)]
    for answer in answers:
        with pytest.raises(BadInput, match=r"\['ids'\] is no position; the columns are attributes, \.ids, \.payloads"):
            answer["ids"]


def test_filters_and_frames_are_no_ids(db: SoftDB) -> None:
    pandas = pytest.importorskip("pandas")
    for ids in ({"a": 1}, {"x": {"$gt": 0}}, pandas.DataFrame({"a": [1]}), pandas.DataFrame({"id": ["a"]}), {}):
        for verb in (db.delete, db.get, lambda ids: db.search(ONE, exclude_ids=ids)):
            with pytest.raises(BadInput, match="pass a filter as where="):
                verb(ids)
    assert len(db) == 2
    assert db.delete(pandas.DataFrame({"id": ["a"]})["id"]) == 1


def test_a_condition_is_no_id(db: SoftDB) -> None:
    for condition in ("price > 50", "price>50 and year = 3", "x != 1", "year <= 3"):
        with pytest.raises(BadInput, match=r"no id is .*; pass a condition as where="):
            db.delete(condition)
    assert db.delete("nobody") == db.delete(["x > 1"]) == db.delete([]) == 0
    db.insert(["a > b"], ONE, V)
    assert db.delete("a > b") == 1


def test_a_reading_handle_refuses_to_write(tmp_path: Path) -> None:
    softdb.open(tmp_path / "db", dim=3).close()
    with softdb.open(tmp_path / "db", mode="r") as db:
        verbs: list[Callable[[], Any]] = [
            lambda: db.insert(["b"], ONE),
            lambda: db.upsert(["b"], ONE),
            lambda: db.update(["b"], ONE),
            lambda: db.delete(["b"]),
            lambda: db.delete(where={}),
            lambda: db.build_index(),
        ]
        for verb in verbs:
            with pytest.raises(softdb.ReadOnly, match="read-only"):
                verb()


def test_labels_out_of_range(tmp_path: Path) -> None:
    with softdb.open(None, dim=3, num_classes=4) as db:
        for label, message in [
            (4, "label 4 in row 0 is out of range; expected 0 to 3"),
            (-1, "label -1"),
            (1.0, "integer class"),
        ]:
            with pytest.raises(BadInput, match=message):
                db.insert(["a"], ONE, [label])
        with pytest.raises(BadInput, match="num_classes=4"):
            db.insert(["a"], ONE)
        assert len(db) == 0
    with softdb.open(None, dim=3) as db, pytest.raises(BadInput, match="no value column"):
        db.insert(["a"], ONE, [1])


def test_a_float16_column_refuses_what_it_cannot_hold() -> None:
    with softdb.open(None, dim=3, dtype="float16") as db:
        with pytest.raises(BadInput, match="65504"):
            db.insert(["a"], [[1e5, 0, 0]])
        db.insert(["a"], [[65504, 0, 0]])
        assert len(db) == 1


def test_an_encoder_that_misbehaves_is_caught() -> None:
    for encoder, message in [
        (lambda texts: np.ones((len(texts), 2)), "keys are 2 wide"),
        (lambda texts: np.ones((1, 3)), "1 vectors for 2 texts"),
        (lambda texts: np.full((len(texts), 3), np.nan), "NaN"),
        (lambda texts: [0.5] * len(texts), "the encoder gave 2 numbers for 2 texts; it must give one vector for each"),
    ]:
        with softdb.open(None, dim=3, encoder=encoder) as db, pytest.raises(BadInput, match=message):
            db.insert(["a", "b"], ["x", "y"])


def test_errors_name_the_verb_once(db: SoftDB) -> None:
    with pytest.raises(BadInput, match=r"^insert: keys are 2 wide") as caught:
        db.insert(["b"], [[1, 2]], V)
    assert str(caught.value).count("insert:") == 1
    with pytest.raises(softdb.UnknownId, match=r"^get: id"):
        _ = db["nobody"]
