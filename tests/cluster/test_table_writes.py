"""Promises of the table's verbs beside other writers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from lance_tables import DIM, batch, made, told

from softdb import cluster, errors
from softdb.cluster.ingest import _require_new, append
from softdb.formats import import_records, read_records
from softdb.lance_table import changes as held
from softdb.lance_table import storage
from softdb.lance_table.truth import Truth, stored
from softdb.store import files


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return made(str(tmp_path / "t.lance"))


@pytest.mark.parametrize(("words", "column"), [({"value_dim": 2}, np.ones((3, 2))), ({"num_classes": 3}, [0, 1, 2])])
def test_the_table_reads_as_an_export_of_softdb(tmp_path: Path, words: dict[str, Any], column: Any) -> None:
    import softdb

    truth = made(str(tmp_path / "t.lance"), ids="int", dtype="float16", metric="l2", **words)
    truth.write(truth.table(batch(truth, [1, 2, 3], values=column)), upsert=False)
    truth.write(truth.table(batch(truth, [4], keyed=False)), upsert=False)
    db = softdb.open(None, dim=DIM, dtype="float16", metric="l2", **words)
    assert import_records(db, read_records(tmp_path / "t.lance")) == 4
    assert [db[2].payload, db[2].text, db[4].text] == [{"seed": 0, "id": 2}, "text 2", "text 4"]
    assert stored(truth.url, None) == truth


def test_a_batch_is_inserted_completely_or_not_at_all(truth: Truth) -> None:
    truth.write(truth.table(batch(truth, ["a", "it's"])), upsert=False)
    with pytest.raises(errors.DuplicateId, match=r'id "it\'s" is stored already; upsert replaces'):
        truth.write(truth.table(batch(truth, ["b", "it's"], seed=1)), upsert=False)
    before = told(truth)
    assert set(before) == {"a", "it's"}
    assert truth.write(truth.table(batch(truth, ["a", "b"], seed=1)), upsert=True) == truth.newest()
    assert told(truth)["it's"] == before["it's"]
    assert told(truth)["a"][2] == {"seed": 1, "id": "a"}
    assert truth.delete(["a", "a", "none"])[0] == 1
    assert set(told(truth)) == {"it's", "b"}


def test_an_update_replaces_columns_and_refuses_unknown_ids(tmp_path: Path) -> None:
    truth = made(str(tmp_path / "t.lance"), value_dim=1)
    truth.write(truth.table(batch(truth, ["a", "b"], values=np.ones((2, 1)))), upsert=False)
    truth.write(truth.table(batch(truth, ["bare"], keyed=False)), upsert=False)
    truth.update(["b"], {"payload": ["7"], "text": [None]})
    truth.update(["bare"], {"key": np.ones((1, DIM)), "value": np.full((1, 1), 2.0)})
    actual = told(truth)
    assert (actual["b"][1:], actual["bare"][:2]) == (([1.0], 7, None), ([1.0] * DIM, [2.0]))
    truth.write(truth.table(batch(truth, ["bare2"], keyed=False)), upsert=False)
    wrong: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
        (["a", "c"], {"payload": ["1", "2"]}, errors.UnknownId, "id 'c' is not stored; upsert adds it"),
        (["a", "bare2"], {"key": np.ones((2, DIM))}, errors.BadInput, "'bare2' has neither key nor value"),
    ]
    for ids, columns, error, match in wrong:
        version = truth.newest()
        with pytest.raises(error, match=match):
            truth.update(ids, columns)
        assert truth.newest() == version


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Result or error of each of several threads."""
    found: list[Any] = [None] * count

    def run(i: int) -> None:
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_of_two_that_insert_one_id_at_once_exactly_one_is_refused(truth: Truth) -> None:
    for turn in range(4):
        writers = [stored(truth.url, None) for _ in range(3)]
        batches = [batch(truth, [f"{turn} own {i}", f"{turn}"], seed=i) for i in range(3)]
        actual = at_once(3, lambda i: writers[i].write(writers[i].table(batches[i]), upsert=False))  # noqa: B023
        assert [type(one) for one in actual if not isinstance(one, int)] == [errors.DuplicateId] * 2, actual
    rows = truth.now().to_table(columns=["id"])["id"].to_pylist()
    assert len(rows) == len(set(rows)) == 8


def test_concurrent_updates_are_all_applied(truth: Truth) -> None:
    truth.write(truth.table(batch(truth, ["a"])), upsert=False)
    writers = [stored(truth.url, None) for _ in range(3)]
    columns: list[dict[str, Any]] = [{"payload": ['"p"']}, {"text": ["t"]}, {"key": np.zeros((1, DIM))}]
    assert all(isinstance(one, int) for one in at_once(3, lambda i: writers[i].update(["a"], columns[i])))
    assert told(truth)["a"] == ([0.0] * DIM, None, "p", "t")


def test_a_verb_syncs_its_writes_before_it_returns(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of the version, the data first and the manifest's directory last."""
    seen: list[str] = []
    for name in ("sync", "sync_directory"):
        real = getattr(files, name)

        def told_of(path: Path, real: Callable[[Path], None] = real) -> None:
            seen.append(str(path))
            real(path)

        monkeypatch.setattr(files, name, told_of)
    truth.write(truth.table(batch(truth, ["first"])), upsert=False)
    assert {truth.url, f"{truth.url}/data"} <= set(seen)  # the folder itself has a name, too
    other = stored(truth.url, None)
    for writer, upsert in ((truth, False), (truth, True), (other, False)):
        before = set(os.listdir(f"{truth.url}/data")) | set(os.listdir(f"{truth.url}/_versions"))
        seen.clear()
        writer.write(writer.table(batch(writer, [f"{len(before)}"])), upsert)
        for name in ("data", "_versions"):
            fresh = {one for one in set(os.listdir(f"{truth.url}/{name}")) - before if "#" not in one}
            assert fresh
            assert {f"{truth.url}/{name}/{one}" for one in fresh} <= set(seen)
            assert f"{truth.url}/{name}" in seen  # their names
    fragments = truth.now().get_fragments()
    assert {f"{truth.url}/data/{file.path}" for fragment in fragments for file in fragment.data_files()} <= set(seen)


def test_versions_stay_until_they_are_cleaned_up(truth: Truth) -> None:
    from datetime import timedelta

    version = truth.write(truth.table(batch(truth, ["a"])), upsert=False)
    truth.delete(["a"])
    assert (truth.at(version).count_rows(), truth.now().count_rows()) == (1, 0)
    truth.now().cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(errors.StaleRead, match=rf"version {version} of .* was cleaned up.*refresh\(\) shows"):
        truth.at(version)


def test_a_write_to_an_unwritable_table_is_refused(truth: Truth, tmp_path: Path) -> None:
    with pytest.raises(errors.BadInput, match=r"id 7 is of type int, but this table's ids are str: .*ids='int'"):
        truth.write(truth.table(batch(truth, [7])), upsert=False)
    with pytest.raises(errors.BadInput, match="holds a table already"):
        made(truth.url)
    with pytest.raises(errors.NotADatabase, match="holds no table that can be read"):
        stored(str(tmp_path / "none"), None)
    (tmp_path / "t.lance" / "data").write_text("in the way")
    with pytest.raises(errors.WriteFailed, match=r"could not be written .*check what is stored"):
        truth.write(truth.table(batch(truth, ["a"])), upsert=False)


def test_many_files_are_merged_into_few(truth: Truth) -> None:
    for i in range(5):
        truth.write(truth.table(batch(truth, [f"{i}"])), upsert=False)
    since, before = truth.newest(), told(truth)
    truth.compact()
    assert (len(truth.now().get_fragments()), told(truth)) == (1, before)
    changes = truth.changes(truth.at(since), truth.now())
    assert changes is not None
    assert ([*changes.removed], [*changes.added]) == ([], [])
    with pytest.raises(errors.DuplicateId, match='id "3" is stored already'):
        truth.write(truth.table(batch(truth, ["3"])), upsert=False)


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge files as soon as there are four of fewer than 10 or 20 rows."""
    monkeypatch.setattr(storage, "LEVELS", (10, 20))
    monkeypatch.setattr(storage, "MANY", 4)


@pytest.mark.usefixtures("few_files")
def test_small_files_are_merged_as_writes_come(truth: Truth) -> None:
    expected = dict[str, Any]()
    for i in range(40):
        since = truth.newest()
        records = batch(truth, [f"{i}", f"{i // 2}"][: 1 + i % 2], seed=i)
        version = truth.write(truth.table(records), upsert=True)
        expected |= {str(name): i for name in records.ids}
        changes = truth.changes(truth.at(since), truth.at(version))
        assert changes is not None
        assert sorted(name for table in changes.added for name in table["id"].to_pylist()) == sorted(records.ids)
    assert {name: record[2]["seed"] for name, record in told(truth).items()} == expected
    sizes = [fragment.physical_rows for fragment in truth.now().get_fragments()]
    assert (len(sizes) < 10, sum(size < 10 for size in sizes) < 4) == (True, True)


@pytest.mark.usefixtures("few_files")
def test_a_write_is_kept_though_its_files_cannot_be_merged(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(truth.now().optimize), "compact_files", fails)
    with caplog.at_level("INFO", "softdb"):
        for i in range(6):
            truth.write(truth.table(batch(truth, [f"{i}"])), upsert=False)
    assert sorted(told(truth)) == [f"{i}" for i in range(6)]
    assert "are merged later: No space left on device" in caplog.text


def overtaken(patch: pytest.MonkeyPatch, truth: Truth, by: Callable[[Truth], Any], times: int = 1) -> None:
    """Let another handle write between the read of a table and the commit, so many times."""
    real, other, left = Truth._written, stored(truth.url, None), [times]

    def written(self: Truth, dataset: Any, work: Callable[[], object]) -> int:
        if self is truth and left[0]:
            left[0] -= 1
            by(other)
        return real(self, dataset, work)

    patch.setattr(Truth, "_written", written)


def test_an_overtaken_insert_is_checked_against_the_newer_records(
    truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken(
        monkeypatch, truth, lambda other: other.write(other.table(batch(other, ["a"], seed=1)), upsert=False), times=2
    )
    with pytest.raises(errors.DuplicateId, match='id "a" is stored already'):
        truth.write(truth.table(batch(truth, ["own", "a"])), upsert=False)
    assert {name: row[2]["seed"] for name, row in told(truth).items()} == {"a": 1}


def test_an_update_that_is_overtaken_looks_again(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    truth.write(truth.table(batch(truth, ["a", "b"])), upsert=False)
    with monkeypatch.context() as patch:
        overtaken(patch, truth, lambda other: other.update(["a"], {"text": ["theirs"]}))
        truth.update(["a"], {"payload": ['"own"']})
    assert told(truth)["a"][2:] == ("own", "theirs")
    with monkeypatch.context() as patch:
        overtaken(patch, truth, lambda other: other.delete(["b"]))
        with pytest.raises(errors.UnknownId, match="id 'b' is not stored"):
            truth.update(["a", "b"], {"payload": ["1", "2"]})
    assert told(truth)["a"][2] == "own"
    monkeypatch.setattr(import_module("softdb.lance_table.truth"), "_TRIES", 2)
    overtaken(monkeypatch, truth, lambda other: other.update(["a"], {"text": ["theirs"]}), times=2)
    with pytest.raises(errors.DatabaseLocked, match=r"too many processes write .* nothing was written, try again"):
        truth.update(["a"], {"payload": ["3"]})
    truth.update(["a"], {"payload": ["4"]})
    assert told(truth)["a"][2] == 4


def test_of_two_that_double_the_shards_one_is_refused(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    overtaken(monkeypatch, truth, lambda other: other.put_shards(8))
    with pytest.raises(errors.DatabaseLocked, match="nothing was written"):
        truth.put_shards(8)
    assert truth.stored_shards() == 8


def appended(truth: Truth, ids: list[str], workers: int = 1) -> int:
    """Write as a job does: files of each worker without a version, then one commit."""
    from lance.fragment import write_fragments

    rows = truth.table(batch(truth, ids))
    fragments = [one for _ in range(workers) for one in write_fragments(rows, truth.url, schema=rows.schema)]
    return append(truth, fragments, lambda version: _require_new(truth, version, *rows["id"].chunks * workers))


@pytest.mark.parametrize(("other", "twice"), [("other", False), ("a", True)])
def test_files_of_an_overtaken_job_are_checked_against_newer_records(
    truth: Truth, monkeypatch: pytest.MonkeyPatch, other: str, twice: bool
) -> None:
    """The other's commit comes between the job's look at the table and its own commit."""
    overtaken(monkeypatch, truth, lambda one: one.write(one.table(batch(one, [other], seed=1)), upsert=False))
    if twice:
        with pytest.raises(errors.DuplicateId, match='id "a" is stored already'):
            appended(truth, ["a", "b"])
    else:
        assert appended(truth, ["a", "b"]) == truth.newest()
    assert set(told(truth)) == ({"a"} if twice else {"a", "b", "other"})
    assert told(truth)[other][2]["seed"] == 1


def test_files_of_a_job_overtaken_too_often_are_given_up(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("softdb.cluster.ingest"), "_TRIES", 2)
    names = iter("xyz")
    overtaken(monkeypatch, truth, lambda one: one.write(one.table(batch(one, [next(names)])), upsert=False), times=2)
    with pytest.raises(errors.DatabaseLocked, match=r"too many processes write .* nothing was written"):
        appended(truth, ["a"])
    assert set(told(truth)) == {"x", "y"}
    with pytest.raises(errors.DuplicateId, match="id 'a' comes twice"):
        appended(truth, ["a"], workers=2)


def test_large_changes_are_read_batch_by_batch(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    truth.write(truth.table(batch(truth, ["a", "b", "c"])), upsert=False)
    since = truth.newest()
    truth.write(truth.table(batch(truth, ["a", "d"])), upsert=True)
    truth.delete(["b"])
    seen = []
    for largest in (held.LARGEST, 1):
        monkeypatch.setattr(held, "LARGEST", largest)
        changes = truth.changes(truth.at(since), truth.now())
        assert changes is not None
        removed = sorted(name for ids in changes.removed for name in ids)
        added = sorted(name for table in changes.added for name in table["id"].to_pylist())
        seen.append((changes.large, removed, added))
    assert seen == [(False, ["a", "b"], ["a", "d"]), (True, ["a", "b"], ["a", "d"])]


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["str", "int"])
def test_a_table_takes_rows_and_makes_ids(tmp_path: Path, ids: Any) -> None:
    polars = pytest.importorskip("polars", reason="needs polars")
    kind: type = {"str": str, "int": int}[ids]
    with cluster.create(tmp_path / "t.lance", dim=2, shards=2, ids=ids) as db:
        rows = [{"key": [i, 1], "text": f"text {i}", "n": i} for i in range(5)]
        made_ids = db.insert(rows) + db.upsert(iter(rows)) + db.insert(keys=[1, 2])
        assert len(set(made_ids)) == len(db) == 11
        assert {type(name) for name in made_ids} == {kind}
        records = db.get(made_ids)
        assert [(one.payload, one.text) for one in records[:10]] == [({"n": i}, f"text {i}") for i in range(5)] * 2
        own = kind(7)
        assert db.insert(
            polars.DataFrame({"isbn": [own], "emb": [[3.0, 4.0]]}), fields={"id": "isbn", "key": "emb"}
        ) == [own]
        assert db[own].key.tolist() == [3, 4]
        with pytest.raises(errors.BadInput, match="row 1 has no 'id'"):
            db.insert([{"id": own, "key": [1, 1]}, {"key": [1, 1]}])


def test_a_table_merges_payloads(tmp_path: Path) -> None:
    with cluster.create(tmp_path / "t.lance", dim=1, shards=2) as db:
        db.insert(["a", "b", "c"], [[1], [2], [3]], payloads=[{"x": 1, "y": {"z": 1}}, None, [1]], texts=["t"] * 3)
        assert db.update([{"id": "b", "n": 1}, {"id": "a", "y": 2}], merge=True) == ["b", "a"]
        assert db.update(["a"], payloads=[{"x": None}], keys=[[9]], merge=True) == ["a"]
        assert db.get(["a", "b", "c"]).payloads == [{"x": None, "y": 2}, {"n": 1}, [1]]
        assert (db["a"].text, db["a"].key.tolist(), db.count({"y": 2})) == ("t", [9], 1)
        with pytest.raises(errors.BadInput, match=r"id 'c': the payload .* is no object"):
            db.update(["a", "c"], payloads=[{"x": 3}] * 2, merge=True)
        with pytest.raises(errors.UnknownId, match="'none' is not stored"):
            db.update(["none"], payloads=[{"x": 3}], merge=True)
        assert db["a"].payload == {"x": None, "y": 2}


def test_concurrent_merges_are_all_applied(truth: Truth) -> None:
    truth.write(truth.table(batch(truth, ["a"], payloads=[{}])), upsert=False)
    writers = [stored(truth.url, None) for _ in range(3)]

    def merge(i: int) -> None:
        for j in range(3):
            writers[i].update(["a"], {"payload": [f'{{"{i} {j}":1}}']}, merge_payloads=True)

    assert at_once(3, merge) == [None] * 3
    assert len(told(truth)["a"][2]) == 9
