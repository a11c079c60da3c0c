"""`create`, `open` and `serve`: a table behind SoftDB's verbs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa

import softdb
from softdb import cluster, errors
from softdb.cluster.placement import RowWindow
from softdb.cluster.shard import ROW_BITS

N, DIM = 300, 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "t.lance")


def records(n: int = N) -> dict[str, Any]:
    keys = np.random.default_rng(0).normal(size=(n, DIM)).astype(np.float32)
    return {"ids": [f"r{i}" for i in range(n)], "keys": keys, "payloads": [{"n": i} for i in range(n)]}


def test_progress_is_reported_while_opening_builds_the_shards(url: str, tmp_path: Path) -> None:
    with cluster.create(url, dim=DIM, shards=2) as db:
        db.insert(**records())
    reports = list[tuple[str, int, int]]()
    with cluster.open(url, cache=tmp_path / "fresh", progress=lambda *what: reports.append(what)) as db:
        assert reports[0] == ("shards", 0, N)
        assert reports[-1] == ("shards", N, N)
        reports.clear()
        db.insert(["new"], np.zeros((1, DIM)))
        db.grow()
    with cluster.serve(url, keys="key", ids="id", progress=lambda *what: reports.append(what)):
        assert reports[-1] == ("shards", N + 1, N + 1)
    wrong: Any = 3
    with pytest.raises(errors.BadInput, match="expected a callable, or True for a bar"):
        cluster.open(url, progress=wrong)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_table_answers_the_verbs_of_a_database(url: str, shards: int) -> None:
    one = softdb.open(None, dim=DIM)
    with cluster.create(url, dim=DIM, shards=shards) as db:
        each: Any
        for each in (one, db):
            each.insert(**records())
            each.upsert(["r0", "new"], np.eye(2, DIM))
            each.update(["r1"], payloads=["changed"], texts=["a text"])
            assert each.delete(["r2", "none"]) == 1
            assert each.delete(where={"n": {"$lt": 6}}) == 3
        assert len(db) == len(one) == N - 3
        assert (db["r1"].payload, db["r1"].text, "r2" in db, "r4" in db) == ("changed", "a text", False, False)
        queries = torch.tensor(records()["keys"][:5], dtype=torch.float64, requires_grad=True)  # sums in any order
        assert db.search(queries, k=4).ids == one.search(queries, k=4).ids
        grads = []
        for each in (one, db):
            (grad,) = torch.autograd.grad(each.attend(queries, temperature=0.5).output.square().sum(), queries)
            grads.append(grad)
        assert (grads[1] - grads[0]).norm() <= 1e-10 * grads[0].norm()
    with pytest.raises(errors.Closed):
        db.count()


def test_a_refresh_shows_writes_of_another_handle(url: str) -> None:
    with cluster.create(url, dim=DIM, shards=2) as db, cluster.open(url, "r") as other:
        version = other.version
        db.insert(**records())
        assert (len(other), other.version) == (0, version)
        assert (db.stats().mode, other.stats().mode) == ("rw", "r")
        assert db.stats().durability == "full"
        assert other.refresh() == db.version == db.refresh()
        assert len(other) == N
        with pytest.raises(errors.ReadOnly, match=r"insert: this handle of .* only reads; open it with mode='rw'"):
            other.insert("x", np.ones((1, DIM)))
    shutil.rmtree(Path(url).parent / "cache")
    with cluster.open(url) as db:
        assert len(db) == N


def test_shards_double_while_others_read(url: str) -> None:
    with cluster.create(url, dim=DIM, shards=2) as db, cluster.open(url, "r") as other:
        db.insert(**records())
        other.refresh()
        answer = db.attend(records()["keys"][:3]).output
        assert db.grow() == db.shards == 4
        torch.testing.assert_close(db.attend(records()["keys"][:3]).output, answer)
        assert (other.shards, len(other)) == (2, N)  # it answers on
        db.insert("new", np.ones((1, DIM)))
        other.refresh()
        assert (other.shards, len(other)) == (4, N + 1)
    with cluster.open(url) as db:
        assert db.shards == 4


def lancedb_table(folder: Path) -> str:
    """A table as LanceDB writes it."""
    lancedb = pytest.importorskip("lancedb", reason="to write a table as LanceDB does")
    n = 40
    vectors = np.random.default_rng(1).normal(size=(n, DIM)).astype(np.float32)
    rows = [
        {"id": i, "vector": vectors[i].tolist(), "label": i % 3, "title": f"title {i}"}
        for i in range(n)
    ]  # fmt: skip
    table = lancedb.connect(folder).create_table("t", data=rows)
    table.delete("id = 7")
    return str(folder / "t.lance")


def test_a_lancedb_table_is_served_unchanged(tmp_path: Path) -> None:
    import lancedb

    url = lancedb_table(tmp_path)
    with cluster.serve(url, keys="vector", values="label", metric="l2", shards=2) as db:
        assert (len(db), db.num_classes, db[3].payload) == (39, 3, {"title": "title 3"})
        vector = np.array(lancedb.connect(tmp_path).open_table("t").to_arrow()["vector"][3].as_py())
        theirs = lancedb.connect(tmp_path).open_table("t").search(vector).limit(5).to_list()
        assert db.search(vector, k=5).ids[0] == [their["id"] for their in theirs]
        lancedb.connect(tmp_path).open_table("t").delete("id = 3")
        lancedb.connect(tmp_path).open_table("t").add(
            [{"id": 99, "vector": vector.tolist(), "label": 0, "title": "late"}]
        )
        db.refresh()
        assert (3 in db, db[99].payload) == (False, {"title": "late"})
        with pytest.raises(errors.ReadOnly, match="only reads; write with the program that made it"):
            db.insert(1, vector)
    with pytest.raises(errors.NotADatabase, match="softdb has not made; open it"):
        cluster.open(url)


@pytest.mark.parametrize(("given", "classes"), [(None, 2), (5, 5)])
def test_labels_may_name_classes_without_records(url: str, given: int | None, classes: int) -> None:
    lance.write_dataset(table(label=pa.array([1, 0])), url)
    with cluster.serve(url, values="label", num_classes=given) as db:
        assert db.num_classes == classes
        near = db.attend([[50.0, 0.0]]).output
        assert near.argmax(1).tolist() == [0]
        assert near.shape == (1, classes)


def test_half_precision_is_preserved(url: str) -> None:
    halves = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4, dtype=np.float16)), 2)
    lance.write_dataset(table(vector=halves), url)
    with cluster.serve(url) as db:
        assert (db.dtype, db["b"].key.tolist()) == ("float16", [2, 3])


def test_a_repaired_table_is_served_again(url: str) -> None:
    """A row that names another's id is left out; when both are gone, so is the record."""
    vectors = pa.array([[float(i), 1.0] for i in range(40)])
    lance.write_dataset(pa.table({"id": list(range(40)), "vector": vectors}), url)
    with cluster.serve(url, shards=2) as db:
        lance.write_dataset(pa.table({"id": [6], "vector": pa.array([[0.0, 0.0]])}), url, mode="append")
        db.refresh()
        assert (len(db), [name for name, _ in db.left_out]) == (40, [6])
        lance.dataset(url).delete("id = 6")
        db.refresh()
        assert (len(db), 6 in db, 7 in db, db.left_out) == (39, False, True, ())


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_columns_that_are_not_named_are_never_read(
    url: str, monkeypatch: pytest.MonkeyPatch, stable: bool, taken: bool
) -> None:
    """Those of other columns lie in files of their own here, which are gone."""
    monkeypatch.setattr(RowWindow, "taken", lambda *_: taken)

    def rows(low: int, high: int) -> pa.Table:
        names = [f"title {i}" for i in range(low, high)]
        vectors = pa.array([[float(i), 1.0] for i in range(low, high)])
        return pa.table({"id": list(range(low, high)), "vector": vectors, "title": names, "year": [7] * (high - low)})

    def without(name: str) -> None:
        before = set(Path(url, "data").iterdir())
        lance.dataset(url).add_columns({name: "id * 2"})
        for file in set(Path(url, "data").iterdir()) - before:
            file.unlink()

    lance.write_dataset(rows(0, 40), url, enable_stable_row_ids=stable)
    without("pages")
    with cluster.serve(url, shards=2, payload=["title"]) as db, cluster.serve(url, payload=[]) as bare:
        assert (len(db), db[7].payload, bare[7].payload) == (40, {"title": "title 7"}, None)
        directory = db.core.located([5]) >> ROW_BITS
        lance.dataset(url).delete("id = 7")
        lance.write_dataset(rows(40, 50).append_column("pages", pa.array([0] * 10)), url, mode="append")
        without("prices")
        each: list[tuple[Any, Any]] = [(db, {"title": "title 45"}), (bare, None)]
        for one, payload in each:
            one.refresh()
            assert (len(one), 7 in one, one[45].payload) == (49, False, payload)
        assert db.search([[45.0, 1.0]], k=1, where={"title": "title 45"}).ids == [[45]]
        assert db.core.located([5]) >> ROW_BITS == directory, "the changes are applied"
    with pytest.raises(errors.CorruptionError, match="lacks its file"):
        cluster.serve(url, shards=2)


def test_rows_that_change_are_seen_by_the_named_columns(url: str) -> None:
    vectors = pa.array([[float(i), 1.0] for i in range(40)])
    columns = {"id": list(range(40)), "vector": vectors, "title": ["a"] * 40, "year": [7] * 40}
    lance.write_dataset(pa.table(columns), url, enable_stable_row_ids=True)
    with cluster.serve(url, shards=2, payload=["year"]) as db, cluster.serve(url) as whole:
        lance.dataset(url).update({"year": "8", "title": "'b'"}, where="id = 9")
        for one in (db, whole):
            one.refresh()
        assert (db[9].payload, db[8].payload) == ({"year": 8}, {"year": 7})
        assert whole[9].payload == {"year": 8, "title": "b"}


def table(**columns: Any) -> pa.Table:
    return pa.table({"id": ["a", "b"], "vector": pa.array([[1.0, 2.0], [3.0, 4.0]]), **columns})


@pytest.mark.parametrize(
    ("rows", "words", "match"),
    [
        (table(), {"keys": "key"}, "has no column 'key'; expected one of .* by keys="),
        (table(), {"values": "label"}, "has no column 'label'.* by values="),
        (table(), {"ids": "name"}, "has no column 'name'.* by ids="),
        (table(vector=pa.array([[1.0, 2.0], None])), {}, "column 'vector' is null in 1 of 2 rows"),
        (table(vector=pa.array([[1.0, 2.0], [3.0]])), {}, "column 'vector' has other than 2 numbers in 1 of 2 rows"),
        (table(vector=pa.array(["1", "2"])), {}, "column 'vector' is of type 'string'; expected lists of floats"),
        (table(vector=pa.array([[], []], pa.list_(pa.float32()))), {}, "holds no numbers; write vectors"),
        (table(vector=pa.array([[1, 2], [3, 4]])), {}, "is of type 'list<.*int64>'; expected lists of floats"),
        (table(id=pa.array(["a", None])), {}, "column 'id' is null in 1 of 2 rows"),
        (table(id=pa.array([1.5, 2.5])), {}, "column 'id' is of type 'double'; expected integers or texts as ids"),
        (table(label=pa.array([1, None])), {"values": "label"}, "column 'label' is null in 1 of 2"),
        (table(), {"payload": ["title"]}, "payload names 'title'; expected columns .* other than id"),
        (table(title=["x", "y"]), {"payload": ["id"]}, r"payload names 'id'; expected columns .*: \['title'\]"),
        (table(title=["x", "y"]), {"payload": "title"}, "payload is 'title'; expected a list"),
        (table(), {"shards": 3}, "shards is 3; expected a power of two"),
        (table(), {"metric": "cos"}, "metric"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_served_is_refused(url: str, rows: pa.Table, words: dict[str, Any], match: str) -> None:
    lance.write_dataset(rows, url)
    with pytest.raises(errors.BadInput, match=match):
        cluster.serve(url, **words)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({}, "dim is not given"),
        ({"dim": 3, "shards": 6}, "expected a power of two, such as 4 or 8"),
        ({"dim": 3, "ids": "uuid"}, "ids"),
        ({"dim": 3, "on": "spark"}, "on"),
        ({"dim": 3, "timeout": 0}, "timeout"),
        ({"dim": 3, "replicas": 0}, "replicas"),
        ({"dim": 3, "refresh": 0}, "refresh"),
        ({"dim": 3, "mode": "w"}, "mode"),
        ({"dim": 3, "cache": 5}, "cache"),
    ],
)
def test_impossible_settings_are_refused_by_name(url: str, words: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.BadInput, match=f"create: .*{match}"):
        cluster.create(url, **words)
    assert not Path(url).exists()


def test_mistyped_options_are_refused_by_name(url: str) -> None:
    with pytest.raises(TypeError, match=r"create\(\) got an unexpected .* 'replica'; did you mean replicas\?"):
        cluster.create(url, dim=DIM, replica=2)
    assert not Path(url).exists()
    db = cluster.create(url, dim=DIM, shards=2)
    with pytest.raises(TypeError, match=r"build_index\(\) got .* 'recal'; did you mean recall\?"):
        db.build_index(recal=0.9)
    db.close()


def test_an_unwritable_place_is_reported(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.WriteFailed, match=r"open: .* cannot be made .*give another folder for shards, cache="):
        cluster.create(url, dim=DIM, cache=tmp_path / "file")


def test_texts_are_embedded_by_the_encoder_that_is_remembered(url: str) -> None:
    from softdb.encoders import of_name

    encoder = of_name("ngrams", 64)
    with cluster.create(url, dim=64, metric="cosine", shards=2, encoder=encoder) as db:
        db.insert(["a", "b"], texts=["the quick brown fox", "a lazy dog"])
        assert db.search("quick fox", k=1).ids == [["a"]]
        db.update("b", texts="quick foxes")
        assert db.search("quick foxes", k=1).ids == [["b"]]
    with cluster.open(url) as db:
        assert db.encoder_name == "ngrams"
        assert db.search("quick foxes", k=1).ids == [["b"]]
