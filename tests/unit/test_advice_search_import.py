"""Following the advice of an error gives the answer: searching, indexing, importing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advice import Steps, advice, three
from worlds import holding

import softdb
from softdb.formats import Fields, export_records, import_records, read_records
from softdb.text import HashedNGrams

EYE = np.eye(3, 2, dtype=np.float32)
RANDOM = np.random.default_rng(0).normal(size=(1200, 8)).astype(np.float32)


def many() -> softdb.SoftDB:
    return holding(RANDOM)


@advice("give queries=, too, or an encoder")
def test_hybrid_needs_vectors(folder: Path) -> Steps:
    with holding(HashedNGrams(8)(["a fox"]), ids=["a"], texts=["a fox"], path=folder / "db") as db:
        db.index_text()
        yield lambda: db.search(texts="fox", mode="hybrid")
        assert db.search(queries=HashedNGrams(8)(["fox"]), texts="fox", mode="hybrid").ids == [["a"]]
    with softdb.open(folder / "db", encoder=HashedNGrams(8)) as db:
        assert db.search(texts="fox", mode="hybrid").ids == [["a"]]


@advice("pass a filter as where=")
def test_a_filter_is_no_list_of_ids(folder: Path) -> Steps:
    with holding(payloads=[{"year": 1979}, {"year": 1995}]) as db:
        yield lambda: db.get({"year": 1995})
        assert db.get(where={"year": 1995}).ids == [1]


@advice("the writer's db.index_text(), or on a shell softdb fields PATH --text words, makes one")
def test_words_need_an_index(folder: Path) -> Steps:
    from typer.testing import CliRunner

    from softdb.tools.cli.commands import app

    with three(folder / "db") as db:
        db.update(["a"], texts=["a fox"])
        yield lambda: db.search("fox", mode="text")
        db.index_text()
        assert db.search("fox", mode="text").ids == [["a"]]
        db.drop_text_index()
    assert CliRunner().invoke(app, ["fields", str(folder / "db"), "--text", "words"]).exit_code == 0
    with softdb.open(folder / "db", mode="r") as db:
        assert db.search("fox", mode="text").ids == [["a"]]
        assert db.count({"$text": {"$match": "fox"}}) == 1


@advice("k truncates, a tolerance estimates what truncation would miss: give one of them")
def test_a_tolerance_or_k(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.attend([[1, 1]], k=2, rtol=0.1)
        assert db.attend([[1, 1]], k=2).n_pooled.tolist() == [2]
        assert db.attend([[1, 1]], rtol=0.1).met.all()


@advice("no tolerance is asked for; give rtol or atol, too")
def test_draws_are_of_an_estimate(folder: Path) -> Steps:
    with three(value_dim=None) as db:
        yield lambda: db.attend([[1, 1]], max_draws=9)
        exact = db.attend([[1, 1]]).lse
        torch.testing.assert_close(db.attend([[1, 1]], max_draws=9, rtol=0.1).lse, exact)
        torch.testing.assert_close(db.attend([[1, 1]], max_draws=9, atol=0.1).lse, exact)


@advice("a radius finds every record that is near enough: give one of them")
def test_a_radius_or_k(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.search([[1, 0]], k=2, radius=0.5)
        assert db.search([[1, 0]], radius=0.5).ids == [["a"]]
        assert db.search([[1, 0]], k=1).ids == [["a"]]


@advice("without diversity; give both, or leave fetch_k out")
def test_fetching_is_for_diversity(folder: Path) -> Steps:
    with three() as db:
        yield lambda: db.search([[1, 0]], k=1, fetch_k=3)
        assert db.search([[1, 0]], k=1, fetch_k=3, diversity=0.0).ids == [["a"]]
        assert db.search([[1, 0]], k=1).ids == [["a"]]


@advice("without group_by; give both, or leave group_size out")
def test_groups_have_a_field(folder: Path) -> Steps:
    with three() as db:
        db.update(["a", "b", "c"], payloads=[{"doc": 1}, {"doc": 1}, {"doc": 2}])
        yield lambda: db.search([[1, 0]], group_size=1)
        assert sorted(db.search([[1, 0]], group_size=1, group_by="doc").ids[0]) == ["a", "c"]
        assert len(db.search([[1, 0]]).ids[0]) == 3


@advice("expected a torch.Generator, such as torch.Generator().manual_seed(3)")
def test_draws_need_a_generator(folder: Path) -> Steps:
    with three() as db:
        seed: Any = 3
        yield lambda: db.sample([[1, 0]], 2, generator=seed)
        first = db.sample([[1, 0]], 2, generator=torch.Generator().manual_seed(3))
        assert first.hits.ids == db.sample([[1, 0]], 2, generator=torch.Generator().manual_seed(3)).hits.ids


@advice("has no key; give it one with update()")
def test_a_record_gets_a_key(folder: Path) -> Steps:
    with three() as db:
        db.insert(["d"], keys=[None])
        yield lambda: db.core.locate(["d"], required=True)
        db.update(["d"], keys=[[3, 3]])
        assert db.search([[1, 1]], k=1).ids == [["d"]]


@advice("build one: build_index(), or on a shell softdb index PATH")
def test_tuning_needs_an_index(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    with many() as db:
        yield lambda: db.tune()
        db.build_index("ivf")
        assert db.tune(recall=0.9) is not None


@advice("are too few to train an index on; insert ")
def test_few_records_are_searched_exactly(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    with three() as db:
        yield lambda: db.build_index("ivf")
        db.build_index(kind="flat")
        assert db.search([[1, 0]], k=1).ids == [["a"]]


@advice("give that memory, or use kind flat, which takes none")
def test_an_index_takes_memory(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    with many() as db:
        yield lambda: db.build_index("ivf", memory=100)
        with pytest.raises(softdb.BadInput, match=r"takes about \d+; give that") as error:
            db.build_index("ivf", memory=100)
        db.build_index("ivf", memory=int(str(error.value).partition("takes about ")[2].partition(";")[0]))
        db.build_index(kind="flat", memory=100)
        assert db.search(RANDOM[:1], k=1).ids[0]


@advice("wait for it with build.result(), or stop it with build.cancel()")
def test_one_index_is_built_at_once(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    begun, go = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        go.wait(60)

    with many() as db:
        build = db.build_index("ivf", background=True, progress=hold)
        assert begun.wait(60)
        yield lambda: db.build_index("ivf")
        go.set()
        build.result()
        begun.clear()
        go.clear()
        build = db.build_index("ivf", background=True, progress=hold)
        assert begun.wait(60)
        build.cancel()
        go.set()
        with pytest.raises(softdb.Cancelled, match="cancel"):
            build.result()


@advice("wait again or cancel()", TimeoutError)
def test_a_build_may_take_longer(folder: Path) -> Steps:
    pytest.importorskip("faiss", reason="an approximate index needs FAISS")
    go = threading.Event()

    def hold(*_: object) -> None:
        go.wait(60)

    with many() as db:
        build = db.build_index("ivf", background=True, progress=hold)
        yield lambda: build.result(timeout=0)
        go.set()
        assert build.result(timeout=60) is not None


@advice("holds keys itself; give keys= beside a .jsonl or .csv file")
def test_keys_lie_beside_lines(folder: Path) -> Steps:
    np.save(folder / "keys.npy", EYE)
    (folder / "r.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "c"}\n')
    (folder / "r.csv").write_text("id\na\nb\nc\n")
    yield lambda: read_records(folder / "keys.npy", keys=folder / "keys.npy")
    for name in ("r.jsonl", "r.csv"):
        with softdb.open(None, dim=2) as db:
            import_records(db, read_records(folder / name, keys=folder / "keys.npy"))
            assert db.search([[1, 0]], k=1).ids == [["a"]]


@advice("embed its texts anew: Fields(text='text'), or on a shell --text text")
def test_keys_of_another_encoder_are_reembedded(folder: Path) -> Steps:
    old, new = HashedNGrams(8), HashedNGrams(9, sizes=(2, 3))
    with softdb.open(None, encoder=old) as db:
        db.insert(["a"], texts=["a fox"])
        export_records(db, folder / "r.jsonl")
    with softdb.open(None, encoder=new) as db:
        yield lambda: import_records(db, folder / "r.jsonl")
        import_records(db, read_records(folder / "r.jsonl", fields=Fields(text="text")))
        assert db["a"].text == "a fox"
        np.testing.assert_array_equal(db.get(["a"]).keys, new(["a fox"]))


@advice("import into a database with metric=")
def test_another_metric_needs_another_database(folder: Path) -> Steps:
    with three(metric="l2") as db:
        export_records(db, folder / "r.jsonl")
    with softdb.open(None, dim=2, metric="cosine") as db:
        yield lambda: import_records(db, folder / "r.jsonl")
    with softdb.open(None, dim=2, metric="l2") as db:
        assert import_records(db, folder / "r.jsonl") == 3


@advice("name the right one")
def test_fields_are_named(folder: Path) -> Steps:
    (folder / "r.jsonl").write_text('{"id": "a", "vec": [1, 0]}\n')
    with softdb.open(None, dim=2) as db:
        yield lambda: import_records(db, folder / "r.jsonl")
        assert import_records(db, read_records(folder / "r.jsonl", fields=Fields(key="vec"))) == 1
