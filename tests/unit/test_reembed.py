"""Reembedding equals a new database of the other encoder, in one commit or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softdb
from softdb.encoders import FIXED_TEXTS
from softdb.nn import Memory, View, retrieval_loss
from softdb.store import switching
from softdb.text import HashedNGrams
from softdb.train import QueryProjection

SCHEMAS: list[dict[str, Any]] = [
    {"metric": "cosine"}, {"metric": "l2", "value_dim": 3}, {"metric": "dot", "num_classes": 4},
    {"metric": "dot", "value_dim": 2, "dtype": "float16"},
]  # fmt: skip
N = 300


class Model:
    """An encoder with a name and a width, that counts its texts and may fail."""

    def __init__(self, name: str | None = "a", dim: int = 8, fail_at: int | None = None) -> None:
        if name is not None:
            self.name = name
        self.dim, self.seen, self.fail_at = dim, list[str](), fail_at
        self.weight = np.random.default_rng(len(name or "") + dim).standard_normal((64, dim))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if self.fail_at is not None and len(self.seen) + len(texts) > self.fail_at:
            raise RuntimeError("the model is out of memory")
        self.seen += [text for text in texts if text not in FIXED_TEXTS]
        vectors: np.ndarray = HashedNGrams(64)(list(texts)) @ self.weight
        return vectors


def text(i: int | str) -> str:
    assert isinstance(i, int)
    return f"record {i} of {i * i % 97}"


def values(schema: dict[str, Any], rows: Sequence[int]) -> Any:
    if "value_dim" in schema:
        return np.array([np.arange(schema["value_dim"]) + i for i in rows], np.float32)
    return [i % 4 for i in rows] if "num_classes" in schema else None


def payload(i: int) -> dict[str, Any]:
    return {"text": text(i), "n": i, "group": i % 5}


def embedded(path: Path | None, encoder: Any, schema: dict[str, Any], ids: Sequence[Any] = range(N)) -> softdb.SoftDB:
    db = softdb.open(path, encoder=encoder, fields=["group"], **schema)
    for low in range(0, len(ids), 100):
        some = list(ids[low : low + 100])
        db.insert(some, list(map(text, some)), values(schema, some), list(map(payload, some)))
    return db


def worn(path: Path | None, encoder: Any, schema: dict[str, Any]) -> softdb.SoftDB:
    """A database that has lived: replaced, deleted, compacted, and deleted again."""
    db = embedded(path, encoder, schema)
    db.delete(list(range(0, N, 7)))
    db.compact()
    db.delete(list(range(0, N, 11)))
    some = list(range(1, 60, 2))
    db.upsert(some, list(map(text, some)), values(schema, some), list(map(payload, some)))
    return db


def same(db: softdb.SoftDB, fresh: softdb.SoftDB, queries: list[str]) -> None:
    """Two databases hold and answer the same, whatever their rows are."""
    ids = sorted(record.id for records in fresh.scan() for record in records)
    assert sorted(record.id for records in db.scan() for record in records) == ids
    assert (db.dim, db.metric, db.dtype, db.fields, db.encoder_name) == (
        fresh.dim, fresh.metric, fresh.dtype, fresh.fields, fresh.encoder_name,
    )  # fmt: skip
    if not ids:
        return
    one, other = db.get(ids), fresh.get(ids)
    assert torch.equal(one.keys, other.keys)
    assert one.payloads == other.payloads
    assert (one.values is None) == (other.values is None)
    assert one.values is None or other.values is None or torch.equal(one.values, other.values)
    for where in (None, {"group": {"$in": [1, 3]}}):
        ours, theirs = (x.search(queries, k=7, exact=True, where=where) for x in (db, fresh))
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-6, atol=1e-6)
        mine_soft, their_soft = (x.attend(queries, temperature=0.3, where=where) for x in (db, fresh))
        torch.testing.assert_close(mine_soft.output, their_soft.output, rtol=1e-4, atol=1e-5)
    assert db.verify() == len(ids)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
@pytest.mark.parametrize("dim", [8, 13, 2])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_reembedding_equals_a_new_database_of_that_encoder(
    tmp_path: Path, schema: dict[str, Any], dim: int, where: str
) -> None:
    path = tmp_path / "db" if where == "disk" else None
    model = Model("b", dim)
    with worn(path, Model(), schema) as db:
        ids = sorted(record.id for records in db.scan() for record in records)
        rows = {record.id: row for record, row in zip(db.get(ids), db.core.locate(ids)[1].tolist(), strict=True)}
        report = db.reembed(model, batch_size=64)
        assert (report.records, report.embedded, report.dim, report.encoder) == (len(ids), len(ids), dim, "b")
        assert sorted(model.seen) == sorted(map(text, ids))
        assert dict(zip(ids, db.core.locate(ids)[1].tolist(), strict=True)) == rows  # permanent
        with embedded(None, model, schema, ids) as fresh:
            same(db, fresh, ["record 5", "of 96"])
        for one in (db, db if path is None else softdb.open(path, mode="r", verify=True, encoder=model)):
            assert one.search(text(ids[5]), k=3).ids == db.search(text(ids[5]), k=3).ids
        db.insert([9000, 9001], [text(9000), text(9001)], values(schema, [0, 1]), [payload(9000), payload(9001)])
        db.delete(ids[:20])
        db.compact()
        db.update([ids[30]], keys=[text(3)])
        db.update([ids[31]], payloads=[payload(77)])
        assert db.verify() == len(ids) - 18
    if path is not None:
        assert not list(path.glob("reembed*"))
        assert len(list(path.glob("keys-*.npy"))) == len(list(path.glob("values-*.npy"))) or "metric" in schema
        with softdb.open(path, verify=True, encoder=model) as db:
            assert db.count({"group": 2}) == db.count({"$and": [{"group": 2}, {"n": {"$gte": 0}}]})
            db.snapshot(tmp_path / "copy")
        softdb.salvage(path, tmp_path / "saved")
        for name in ("copy", "saved"):
            with softdb.open(tmp_path / name, verify=True) as db:
                assert (len(db), db.dim, db.encoder_name) == (len(ids) - 18, dim, "b")


def test_a_complete_reembedding_leaves_no_gaps(tmp_path: Path) -> None:
    with embedded(tmp_path / "db", Model(), {}) as db:
        db.reembed(Model("b", 3))
        assert db.stats().segments == 1
        assert not list((tmp_path / "db").glob("rows-*"))
        db.reembed(HashedNGrams(32))
        assert (db.dim, db.encoder_name) == (32, "ngrams")
    with softdb.open(tmp_path / "db") as db:
        assert db.search(text(8), k=1).ids == [[8]]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_of_no_records_the_width_and_the_name_change(tmp_path: Path, where: str) -> None:
    with softdb.open(tmp_path / "db" if where == "disk" else None, encoder=Model()) as db:
        for dead in (False, True):
            model = Model(f"b{dead}", 5 + dead)
            if dead:
                db.insert(["x"], ["y"])
                db.delete(["x"])
            report = db.reembed(model)
            assert (report.records, report.embedded, db.dim, db.encoder_name) == (0, 0, model.dim, model.name)
            db.insert(["a"], ["b"])
            assert db.search("b", k=1).ids == [["a"]]
            db.delete(["a"])


def test_an_encoder_without_a_width_is_vectors_of(tmp_path: Path) -> None:
    model = Model("b", 6)
    with embedded(None, Model(), {"metric": "cosine"}) as db:
        db.reembed(lambda texts: torch.from_numpy(model(texts)))
        assert (db.dim, db.encoder_name) == (6, None)
        assert db.search(text(8), k=1).ids == [[8]]  # this handle has it


# -- the texts ---------------------------------------------------------------------------------------------------------


def test_a_callable_gives_the_text_of_a_record() -> None:
    model = Model("b", 6)
    with embedded(None, Model(), {"num_classes": 4}, range(20)) as db:
        db.reembed(model, field=lambda record: f"{record.id} {record.value} {record.payload['n']} {len(record.key)}")
    assert sorted(model.seen)[:2] == ["0 0 0 8", "1 1 1 8"]


def test_a_record_without_text_is_named_before_anything_is_embedded(tmp_path: Path) -> None:
    model = Model("b", 6)
    with embedded(tmp_path / "db", Model(), {}) as db:
        for i, bad in enumerate([{"n": 1}, None, "plain", {"text": 7}, {"text": None}]):
            db.upsert([170], [text(1)], payloads=[bad])
            with pytest.raises(softdb.BadInput, match=r"reembed: record 170 has no text: its field 'text' is"):
                db.reembed(model)
            assert not model.seen
            if i != 3:
                db.reembed(model, missing=f"nothing {i}")
                assert f"nothing {i}" in model.seen
                model = Model(f"b{i}", 6)
        with pytest.raises(softdb.BadInput, match=r"record .* has no text: its field 'title' is None; name the field"):
            db.reembed(model, field="title")
        with pytest.raises(softdb.BadInput, match=r"record .* has no text: the callable gave 7"):
            db.reembed(model, field=lambda record: 7)  # type: ignore[arg-type, return-value]
        assert not model.seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"field": 3}, "field is 3; expected a field's name, or a callable"),
        ({"missing": 3}, "missing is 3; expected a text"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"encoder": 3}, "encoder is 3; expected 'ngrams'"),
        ({"encoder": Model("", 3)}, "the encoder's name is ''"),
        ({"encoder": Model("b", 0)}, "the encoder's dim is 0"),
    ],
)
def test_bad_arguments_are_refused(words: dict[str, Any], message: str) -> None:
    with embedded(None, Model(), {}, range(3)) as db:
        with pytest.raises(softdb.BadInput, match=f"reembed: {message}"):
            db.reembed(**{"encoder": Model("b"), **words})
        assert db.encoder_name == "a"


def test_a_reader_and_a_closed_handle_refuse(tmp_path: Path) -> None:
    db = embedded(tmp_path / "db", Model(), {}, range(3))
    with softdb.open(tmp_path / "db", mode="r") as reader, pytest.raises(softdb.ReadOnly, match="reembed"):
        reader.reembed(Model("b"))
    db.close()
    with pytest.raises(softdb.Closed, match="reembed"):
        db.reembed(Model("b"))


# -- cut short ---------------------------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, bytes]:
    """Files of a database without temporary files, lock and shared memory."""
    names = [one for one in path.iterdir() if one.is_file() and one.name not in ("lock", "catalog.sqlite-shm")]
    return {name.name: name.read_bytes() for name in names}


def test_a_run_whose_encoder_failed_resumes(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with embedded(path, Model(), {"value_dim": 3}) as db:
        before, expected = contents(path), db.search(text(3), k=5).scores
        with pytest.raises(RuntimeError, match="out of memory"):
            db.reembed(Model("b", 6, fail_at=150), batch_size=40)
        assert contents(path) == before
        assert torch.equal(db.search(text(3), k=5).scores, expected)
        assert (db.dim, db.encoder_name) == (8, "a")
    with softdb.open(path, encoder=Model()) as db:
        db.insert([5000], [text(5000)], values({"value_dim": 3}, [0]), [payload(5000)])
        db.update([3], payloads=[payload(4000)])
        db.upsert([4], [text(4)], values({"value_dim": 3}, [4]), [payload(4)])
        db.delete([7])
        model = Model("b", 6)
        report = db.reembed(model)
        assert report.embedded == len(model.seen) == N - 120 + 3  # one came, one changed, one was replaced; one left
        assert {text(5000), text(4000), text(4)} <= set(model.seen)
        ids = sorted(record.id for records in db.scan() for record in records)
        keys = db.get(ids).keys.numpy()
        texts = [text(4000) if i == 3 else text(i) for i in ids]
        np.testing.assert_array_equal(keys, model(texts).astype(np.float32))
    assert not list(path.glob("reembed*"))


@pytest.mark.parametrize("other", [Model("c", 6), Model("b", 7), Model(None, 6)], ids=["name", "dim", "unnamed"])
def test_another_encoder_starts_over(tmp_path: Path, other: Model) -> None:
    with embedded(tmp_path / "db", Model(), {}, range(100)) as db:
        with pytest.raises(RuntimeError):
            db.reembed(Model("b", 6, fail_at=50), batch_size=10)
        assert db.reembed(other).embedded == 100


def test_an_encoder_without_a_name_never_resumes(tmp_path: Path) -> None:
    with embedded(tmp_path / "db", Model(), {}, range(100)) as db:
        with pytest.raises(RuntimeError):
            db.reembed(Model(None, 6, fail_at=50), batch_size=10)
        assert db.reembed(Model(None, 6)).embedded == 100


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_damaged_leftovers_are_not_used(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "db"
    with embedded(path, Model(), {}, range(100)) as db, pytest.raises(RuntimeError):
        db.reembed(Model("b", 6, fail_at=50), batch_size=10)
    left = path / "reembed-0"
    keys = left / "keys-00000000.npy"
    if damage == "flip":
        data = bytearray(keys.read_bytes())
        data[200] ^= 1
        keys.write_bytes(data)
    elif damage == "cut":
        keys.write_bytes(b"")
    else:
        shutil.rmtree(left)
        left.mkdir()
    with softdb.open(path) as db:
        assert db.reembed(Model("b", 6)).embedded == 100
        db.verify()
    assert not left.exists()


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with embedded(tmp_path / "db", Model(), {}, range(50)) as db:
        inner = list[Exception]()

        def again(what: str, done: int, whole: int) -> None:
            if not inner:
                with pytest.raises(softdb.DatabaseLocked) as caught:
                    db.reembed(Model("b", 6))
                inner.append(caught.value)

        assert db.reembed(Model("c", 6), progress=again).embedded == 50
        assert inner
        assert db.encoder_name == "c"


@pytest.mark.parametrize("bad", ["nan", "width", "ragged", "few", "text", "infinite"])
@pytest.mark.parametrize("first", [True, False])
def test_invalid_vectors_change_nothing(tmp_path: Path, bad: str, first: bool) -> None:
    path, good, calls = tmp_path / "db", Model("b", 6), [0]

    class Bad:
        name = "b"
        dim = 6

        def __call__(self, texts: Sequence[str]) -> Any:
            calls[0] += 1
            vectors = good(texts)
            if not first and calls[0] < 3:
                return vectors
            if bad == "nan":
                vectors[-1, 2] = np.nan
            return {
                "width": vectors[:, :5], "ragged": [[1.0], [1.0, 2.0]] * (len(texts) // 2), "few": vectors[1:],
                "text": [["x"] * 6] * len(texts), "infinite": vectors * 1e300,
            }.get(bad, vectors)  # fmt: skip

    with embedded(path, Model(), {}, range(100)) as db:
        before = contents(path)
        with pytest.raises(softdb.BadInput, match=r"reembed: .*encoder.*new keys, the database is as it was"):
            db.reembed(Bad(), batch_size=20)
        assert contents(path) == before
        assert db.reembed(Model("b", 6)).embedded == (100 if first else 60)


@pytest.mark.parametrize("column", ["keys", "values"])
def test_damaged_values_stop_a_reembedding_and_damaged_keys_are_replaced(tmp_path: Path, column: str) -> None:
    path = tmp_path / "db"
    embedded(path, Model(), {"value_dim": 3}, range(50)).close()
    file = path / f"{column}-00000000.npy"
    data = bytearray(file.read_bytes())
    data[128 + 40] ^= 4
    file.write_bytes(data)
    with softdb.open(path) as db:
        with pytest.raises(softdb.CorruptionError, match=rf"{file.name}: row \d differs"):
            db.verify()
        if column == "keys":
            db.reembed(Model("b", 8))
            assert db.verify() == 50
            return
        model = Model("b", 6)
        with pytest.raises(softdb.CorruptionError, match=r"values-\d+.npy: row 3 differs .* then reembed"):
            db.reembed(model)
        assert not model.seen
        assert (db.dim, db.encoder_name) == (8, "a")


# -- concurrent changes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tries", [5, 0])
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("schema", SCHEMAS[1:3], ids=str)
def test_records_written_at_the_last_moment_are_embedded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int, where: str, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr(switching, "TRIES", tries)
    model, happened = Model("b", 6), list[str]()
    db = worn(tmp_path / "db" if where == "disk" else None, Model(), schema)

    def change(name: str) -> None:
        happened.append(name)
        first = 1000 * len(happened)
        db.insert([first, first + 1], [text(1), text(2)], values(schema, [1, 2]), [payload(first), payload(first + 1)])
        db.update([3, first], payloads=[payload(first + 2), payload(first + 3)])
        db.delete([5, 40 + len(happened)])
        db.upsert([9, 10], [text(9), text(10)], values(schema, [9, 8]), [payload(9), payload(first + 4)])

    original = switching.Switch.write_aside

    def write_aside(self: Any) -> None:
        original(self)
        change("aside")

    monkeypatch.setattr(switching.Switch, "write_aside", write_aside)
    with db:
        db.reembed(model, progress=lambda what, done, whole: change(what) if what not in happened else None)
        assert happened == (["embed", "switch", "aside"] if where == "disk" else ["embed", "switch"])
        with softdb.open(None, encoder=model, fields=["group"], **schema) as fresh:
            for records in db.scan():
                texts = [one["text"] for one in records.payloads]
                fresh.insert(records.ids, texts, records.values, records.payloads)
            same(db, fresh, ["record 1000", text(1004)])


def until(stop: threading.Event, do: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        while not stop.is_set():
            do()
    except BaseException as error:
        failures.append(error)


def made_by(db: softdb.SoftDB, model: Model) -> None:
    """Every key is what the encoder makes of its record's text."""
    assert db.verify() == len(db)
    for records in db.scan():
        made = [model([one["text"]]) for one in records.payloads]
        np.testing.assert_array_equal(records.keys.numpy(), np.concatenate(made).astype(np.float32))


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_threads_write_and_search_during_a_reembedding(tmp_path: Path, durability: Any) -> None:
    model, path = Model("b", 6), tmp_path / "db"
    embedded(path, Model(), {"value_dim": 3}).close()
    with softdb.open(path, encoder=Model(), durability=durability) as db:
        stop, last, failures, count = threading.Event(), threading.Event(), list[BaseException](), [N]

        def write() -> None:
            i = count[0]
            db.insert([i], [text(i)], values({"value_dim": 3}, [i]), [payload(i)])
            if i % 5 == 0:  # with a key of its own, where none is made anew afterwards
                db.update([i - 3], keys=[text(i + 7)] if last.is_set() else None, payloads=[payload(i + 7)])
            if i % 7 == 0:
                db.delete([i - 5])
            count[0] += 1

        def ask() -> None:
            assert db.search(text(9), k=1, exact=True).live.all()  # reading `ids` may be too late
            db.attend([text(1), text(2)], temperature=0.5)
            db.count_within(text(1), 0.5)
            db.search(text(9), k=2, where={"group": 3})

        threads = [threading.Thread(target=until, args=(stop, do, failures)) for do in (write, ask, ask)]
        for thread in threads:
            thread.start()
        for dim in (6, 9, 6):
            db.reembed(Model(f"m{dim}", dim), batch_size=32)
        last.set()
        db.reembed(model)
        db.compact()
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures, failures
        made_by(db, model)


QUERIES: list[Callable[[softdb.SoftDB], Any]] = [
    lambda db: db.attend([text(2)], temperature=0.5),
    lambda db: db.attend([text(2)], temperature=0.5, where={"text": {"$exists": True}}),
    lambda db: db.search([text(2)], k=1),
    lambda db: db.count_within([text(2)], 0.5),
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_text_that_meets_a_reembedding_to_another_width_is_encoded_again(query: Any) -> None:
    """Its vectors are as wide as the new keys, though the old width was read before."""
    later = Model("b", 6)

    class Switching(Model):
        def __call__(self, texts: Sequence[str]) -> np.ndarray:
            if text(2) not in texts or databases[0].dim == 6:
                return super().__call__(texts)
            databases[0].reembed(later)
            return later(texts)

    databases = [softdb.open(None, encoder=Switching())]
    databases[0].insert([0, 1, 3], [text(0), text(1), text(3)], payloads=[payload(i) for i in (0, 1, 3)])
    query(databases[0])
    assert databases[0].dim == 6


READER = """
import sys, softdb
db = softdb.open(sys.argv[1], mode="r")
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""


def test_a_reading_process_sees_the_old_keys_until_it_refreshes(tmp_path: Path) -> None:
    path = tmp_path / "db"
    db = embedded(path, HashedNGrams(32), {"metric": "cosine"})
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None

    def say(code: str) -> str:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(code + "\n")
        reader.stdin.flush()
        return reader.stdout.readline().strip()

    shown = "db.dim, db.encoder_name, h.ids, [round(x, 5) for x in h.scores[0].tolist()]"
    ask = f"h = db.search({text(7)!r}, k=2); print({shown})"
    try:
        before = say(ask)
        assert before.startswith("32 ngrams [[7, ")
        db.reembed(HashedNGrams(96, (3, 4)))
        assert say(ask) == before
        assert int(say("print(db.refresh())")) == db.generation
        hits = db.search(text(7), k=2)
        scores = [round(x, 5) for x in hits.scores[0].tolist()]
        assert say(ask) == f"96 ngrams(3, 4) {hits.ids} {scores}"
        db.reembed(Model("mine", 5))
        say("print(db.refresh())")
        assert say("print(db.dim, db.encoder_name, db.verify())") == f"5 mine {N}"
        caught = "try: db.search('x')\\nexcept softdb.BadInput as error: print(error)"
        assert "texts need the encoder 'mine'" in say(f"exec({json.dumps(caught.replace(chr(92) + 'n', chr(10)))})")
    finally:
        reader.communicate(timeout=120)
        db.close()


def test_a_filter_of_a_reader_refreshes_it_and_answers_rightly(tmp_path: Path) -> None:
    with embedded(tmp_path / "db", HashedNGrams(32), {"metric": "cosine"}) as db:
        with softdb.open(tmp_path / "db", mode="r") as reader:
            db.reembed(HashedNGrams(64))
            hits = reader.search(text(7), k=2, where={"group": 2})  # a filter needs the newest generation
            assert reader.dim == 64
            torch.testing.assert_close(hits.scores, db.search(text(7), k=2, where={"group": 2}).scores)
        with softdb.open(tmp_path / "db", mode="r") as reader:
            db.reembed(HashedNGrams(16))
            with pytest.raises(softdb.BadInput, match="queries are 64 wide but this database's keys are 16 wide"):
                reader.search(np.ones(64), where={"group": 2})


# -- models of the old keys --------------------------------------------------------------------------------------------


def found_by(db: softdb.SoftDB, query: Any) -> str:
    """Finder of a search, if an index is not dearer than comparing all."""
    assert db.search(query, k=3).rows.shape == (1, 3)
    index = db.stats().index
    return "flat" if index is None else index.kind


def test_the_index_is_dropped_and_rebuilt(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="an index needs FAISS")
    path, count = tmp_path / "db", 1500
    with embedded(path, Model(), {}, range(count)) as db:
        db.build_index("ivf", recall=0.5)
        assert found_by(db, text(4)) == "ivf"
        with softdb.open(path, mode="r", encoder=Model()) as reader, softdb.open(path, mode="r") as late:
            assert found_by(reader, text(4)) == "ivf"
            for dim in (8, 12):
                model = Model(f"b{dim}", dim)
                db.reembed(model)
                for one in (db, reader):
                    assert found_by(one, text(4) if one is db else np.ones((1, 8))) == "flat" or one is reader
                assert db.stats().index is None
                reader.refresh()
                assert found_by(reader, np.ones((1, dim))) == "flat"
                db.build_index("ivf", recall=0.5)
                assert found_by(db, text(4)) == "ivf"
                late.search(np.ones((1, late.dim)), k=3)
                reader.refresh()
                late.refresh()
                for one in (reader, late):
                    assert found_by(one, np.ones((1, dim))) == "ivf"
    with softdb.open(path, encoder=Model("b12", 12)) as db:
        assert found_by(db, text(4)) == "ivf"


def test_an_index_that_was_being_built_is_not_used(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="an index needs FAISS")
    with embedded(tmp_path / "db", Model(), {}, range(1500)) as db:
        gate = threading.Event()
        build = db.build_index("ivf", recall=0.5, background=True, progress=lambda *_: (gate.wait(60), None)[1])
        db.reembed(Model("b", 12))
        gate.set()
        with pytest.raises(softdb.BadInput, match="all keys were re-embedded while the index was built"):
            build.result(60)
        assert found_by(db, text(4)) == "flat"


@pytest.mark.parametrize("dim", [8, 12])
def test_models_of_the_old_keys_are_refused(dim: int) -> None:
    with embedded(None, Model(), {}, range(60)) as db:
        view, memory, projection = View(db, torch.nn.Linear(8, 8)), Memory(db), QueryProjection(8)
        retrieval_loss(view, torch.ones(1, 8), [[3]])
        db.reembed(Model("b", dim))
        for ask in (
            lambda: retrieval_loss(view, torch.ones(1, 8), [[3]]),
            lambda: view.search(torch.ones(1, 8), k=2),
            view.reindex,
            memory.commit,
            memory.reload,
        ):
            with pytest.raises(softdb.StaleRead, match="all keys of the database were made anew"):
                ask()
        if dim != 8:
            with pytest.raises(softdb.BadInput, match="expects queries of width 8, but the database has 12"):
                projection.of(db, [text(3)])
        with pytest.raises(softdb.SoftDBError, match=r"made anew|8 wide"):
            memory(torch.ones(1, 8))
        View(db, torch.nn.Linear(dim, 8)).search(torch.ones(1, 8), k=2)
        Memory(db)(torch.ones(1, dim))


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = list[tuple[str, int, int]]()
    with embedded(tmp_path / "db", Model(), {}, range(100)) as db:
        with pytest.raises(RuntimeError):
            db.reembed(Model("b", 6, fail_at=60), batch_size=30, progress=lambda *one: reports.append(one))
        db.reembed(Model("b", 6), batch_size=30, progress=lambda *one: reports.append(one))
        db.reembed(Model("c", 6), progress=True)
        db.reembed(Model("d", 6), progress=False)
    embed = [("embed", done, 100) for done in (0, 30, 60)]
    assert reports == [*embed, ("embed", 60, 100), ("embed", 90, 100), ("embed", 100, 100), ("switch", 100, 100)]
