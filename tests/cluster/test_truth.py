"""The table itself: what a verb promises, whoever else writes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

from lance_tables import DIM, batch, made, told

from softdb import errors
from softdb.cluster.truth import Truth, stored
from softdb.formats import import_records, read_records
from softdb.store import files


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return made(str(tmp_path / "t.lance"))


@pytest.mark.parametrize(("words", "column"), [({"value_dim": 2}, np.ones((3, 2))), ({"num_classes": 3}, [0, 1, 2])])
def test_it_reads_as_an_export_of_softdb(tmp_path: Path, words: dict[str, Any], column: Any) -> None:
    import softdb

    truth = made(str(tmp_path / "t.lance"), ids="int", dtype="float16", metric="l2", **words)
    truth.insert(batch(truth, [1, 2, 3], values=column))
    truth.insert(batch(truth, [4], keyed=False))
    db = softdb.open(None, dim=DIM, dtype="float16", metric="l2", **words)
    assert import_records(db, read_records(tmp_path / "t.lance")) == 4
    assert [db[2].payload, db[2].text, db[4].text] == [{"seed": 0, "id": 2}, "text 2", "text 4"]
    assert stored(truth.url, None) == truth


def test_a_batch_goes_in_whole_or_not_at_all(truth: Truth) -> None:
    truth.insert(batch(truth, ["a", "it's"]))
    with pytest.raises(errors.DuplicateId, match=r'id "it\'s" is stored already; upsert replaces'):
        truth.insert(batch(truth, ["b", "it's"], seed=1))
    before = told(truth)
    assert set(before) == {"a", "it's"}
    assert truth.upsert(batch(truth, ["a", "b"], seed=1)) == truth.newest()
    assert told(truth)["it's"] == before["it's"]
    assert told(truth)["a"][2] == {"seed": 1, "id": "a"}
    assert truth.delete(["a", "a", "none"])[0] == 1
    assert set(told(truth)) == {"it's", "b"}


def test_an_update_replaces_parts_and_refuses_what_it_does_not_find(tmp_path: Path) -> None:
    truth = made(str(tmp_path / "t.lance"), value_dim=1)
    truth.insert(batch(truth, ["a", "b"], values=np.ones((2, 1))))
    truth.insert(batch(truth, ["bare"], keyed=False))
    truth.update(["b"], {"payload": ["7"], "text": [None]})
    truth.update(["bare"], {"key": np.ones((1, DIM)), "value": np.full((1, 1), 2.0)})
    found = told(truth)
    assert (found["b"][1:], found["bare"][:2]) == (([1.0], 7, None), ([1.0] * DIM, [2.0]))
    truth.insert(batch(truth, ["bare2"], keyed=False))
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
    """What each of several threads came to: a result or an error."""
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
    assert not any(one.is_alive() for one in threads)
    return found


def test_of_two_that_insert_one_id_at_once_exactly_one_is_refused(truth: Truth) -> None:
    for turn in range(4):
        writers = [stored(truth.url, None) for _ in range(3)]
        batches = [batch(truth, [f"{turn} own {i}", f"{turn}"], seed=i) for i in range(3)]
        found = at_once(3, lambda i: writers[i].insert(batches[i]))  # noqa: B023
        assert [type(one) for one in found if not isinstance(one, int)] == [errors.DuplicateId] * 2, found
    rows = truth.now().to_table(columns=["id"])["id"].to_pylist()
    assert len(rows) == len(set(rows)) == 8


def test_updates_at_once_are_all_there(truth: Truth) -> None:
    truth.insert(batch(truth, ["a"]))
    writers = [stored(truth.url, None) for _ in range(3)]
    columns: list[dict[str, Any]] = [{"payload": ['"p"']}, {"text": ["t"]}, {"key": np.zeros((1, DIM))}]
    assert all(isinstance(one, int) for one in at_once(3, lambda i: writers[i].update(["a"], columns[i])))
    assert told(truth)["a"] == ([0.0] * DIM, None, "p", "t")


def test_what_a_verb_has_written_is_synced_before_it_returns(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of the version, the data first and the manifest's directory last."""
    seen: list[str] = []
    for name in ("sync", "sync_directory"):
        real = getattr(files, name)

        def told_of(path: Path, real: Callable[[Path], None] = real) -> None:
            seen.append(str(path))
            real(path)

        monkeypatch.setattr(files, name, told_of)
    truth.insert(batch(truth, ["first"]))
    assert {truth.url, f"{truth.url}/data"} <= set(seen)  # the folder itself has a name, too
    other = stored(truth.url, None)
    for writer, write in ((truth, truth.insert), (truth, truth.upsert), (other, other.insert)):
        before = set(os.listdir(f"{truth.url}/data")) | set(os.listdir(f"{truth.url}/_versions"))
        seen.clear()
        write(batch(writer, [f"{len(before)}"]))
        for name in ("data", "_versions"):
            fresh = {one for one in set(os.listdir(f"{truth.url}/{name}")) - before if "#" not in one}
            assert fresh
            assert {f"{truth.url}/{name}/{one}" for one in fresh} <= set(seen)
            assert f"{truth.url}/{name}" in seen  # their names
    fragments = truth.now().get_fragments()
    assert {f"{truth.url}/data/{file.path}" for one in fragments for file in one.data_files()} <= set(seen)


def test_versions_are_kept_until_they_are_cleaned_up(truth: Truth) -> None:
    from datetime import timedelta

    version = truth.insert(batch(truth, ["a"]))
    truth.delete(["a"])
    assert (truth.at(version).count_rows(), truth.now().count_rows()) == (1, 0)
    truth.now().cleanup_old_versions(older_than=timedelta(0))
    with pytest.raises(errors.StaleRead, match=rf"version {version} of .* was cleaned up.*refresh\(\) shows"):
        truth.at(version)
    assert truth.changes(version, truth.now()) is None


def test_a_write_to_a_table_that_cannot_be_written_says_so(truth: Truth, tmp_path: Path) -> None:
    with pytest.raises(errors.BadInput, match=r"id 7 is of type int; this table's ids are str"):
        truth.insert(batch(truth, [7]))
    with pytest.raises(errors.BadInput, match="holds a table already"):
        made(truth.url)
    with pytest.raises(errors.NotADatabase, match="holds no table that can be read"):
        stored(str(tmp_path / "none"), None)
    (tmp_path / "t.lance" / "data").write_text("in the way")
    with pytest.raises(errors.WriteFailed, match=r"could not be written .*look at what is there"):
        truth.insert(batch(truth, ["a"]))


def test_few_files_are_made_of_many(truth: Truth) -> None:
    for i in range(5):
        truth.insert(batch(truth, [f"{i}"]))
    since, before = truth.newest(), told(truth)
    truth.compact()
    assert (len(truth.now().get_fragments()), told(truth)) == (1, before)
    changes = truth.changes(since, truth.now())
    assert changes is not None
    assert (changes.removed, len(changes.added)) == ([], 0)
    with pytest.raises(errors.DuplicateId, match='id "3" is stored already'):
        truth.insert(batch(truth, ["3"]))
