"""Hostile or foreign index files: FAISS reads only files that this user has signed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_catalog
import numpy as np
import pytest
from hostile_child import Nursery
from hostile_files import contents
from worlds import holding

import softdb
from softdb import check
from softdb.index import cache
from softdb.store import files

pytest_plugins = ["hostile_world"]

N, WIDE = 5000, 16


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `db` and `wider`, each with an index that this user has signed."""
    folder, rng = tmp_path_factory.mktemp("indexed"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTDB_KEY_FILE", str(tmp_path_factory.getbasetemp() / "index.key"))
        for name, wide, count in (("db", WIDE, N), ("wider", 4 * WIDE, N), ("longer", WIDE, 2 * N)):
            with softdb.open(folder / name, dim=wide, metric="l2") as db:
                parts = 5 if name == "db" else 1  # its generation is the greatest: no index is too new for it
                for part in np.array_split(np.arange(count), parts):
                    db.insert(part, rng.standard_normal((len(part), wide)))
                db.delete(list(range(N if count > N else 0)))  # as many as in `db` are left, in other rows
                db.build_index("ivf", recall=0.5)
        yield folder


def entry_of(path: Path) -> dict[str, Any]:
    with softdb.open(path, mode="r") as db:
        entry = db._store.index_entry()
    assert entry is not None
    return entry


def put_entry(path: Path, entry: Any) -> None:
    with hostile_catalog.opened(path) as connection:
        text = entry if isinstance(entry, str | bytes) or entry is None else json.dumps(entry)
        connection.execute("UPDATE indexes SET entry = ?", (text,))


WILD: dict[str, Any] = {
    "covered": 1 << 40, "effort": "many", "candidates": -1, "tuned_for": 0, "report": {"x": [1] * 1000},
    "generation": 0, "kind": "hnsw", "metric": "dot", "bytes": 1 << 60, "sha256": "", "hmac": "", "more": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", WILD)
def test_the_signature_covers_the_whole_entry(
    indexed: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = entry_of(indexed / "db")
    refuse_faiss(monkeypatch)
    assert cache.load(indexed / "db" / "index", {**entry, name: WILD[name]}, check.Metric.L2) is None
    assert "does not carry this user's signature" in caplog.text
    without = {field: value for field, value in entry.items() if field != name}
    assert name == "more" or cache.load(indexed / "db" / "index", without, check.Metric.L2) is None


def refuse_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which FAISS is given bytes."""
    import faiss

    for name in ("deserialize_index", "read_index", "read_index_binary", "deserialize_index_binary"):
        monkeypatch.setattr(faiss, name, lambda *arguments: pytest.fail("FAISS reads what nobody has signed"))


def test_an_index_that_this_user_has_not_signed_never_reaches_faiss(
    indexed: Path, tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    path = tmp_path / "db"
    shutil.copytree(indexed / "db", path)
    (file,) = (path / "index").iterdir()
    entry, data = entry_of(path), file.read_bytes()
    crafted = b"IwPf" + bytes(100)
    stranger = tmp_path / "stranger.key"
    stranger.write_bytes(bytes(32))
    refuse_faiss(monkeypatch)
    cases: list[tuple[dict[str, Any] | str | bytes | None, bytes]] = [
        ({**entry, "bytes": len(crafted), "sha256": hashlib.sha256(crafted).hexdigest()}, crafted),
        (entry, crafted),
        (entry, data[:-1]),
        (entry, data + b"\0"),
        ({**entry, "hmac": [[]]}, data),
        ({**entry, "hmac": "\ud800é"}, data),
        ("[" * 100_000, data),
        ('{"file": ' + "[" * 900 + "]" * 900 + "}", data),
        ("[]", data),
        ("null", data),
        ("nope", data),
    ]
    for changed, content in cases:
        put_entry(path, changed)
        file.write_bytes(content)
        tally["hostile: files tried"] += 1
        with softdb.open(path, mode="r") as db:
            assert len(db.search(np.zeros((1, WIDE)), k=3).ids[0]) == 3
            assert db.stats().index is None
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(stranger))
    signed = {**entry, "hmac": cache._signature(entry)}  # by a stranger's key
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(key_file))
    put_entry(path, signed)
    file.write_bytes(data)
    with softdb.open(path, mode="r") as db:
        assert db.stats().index is None


def test_an_unsigned_file_is_not_read(indexed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db"
    shutil.copytree(indexed / "db", path)
    entry = entry_of(path)
    put_entry(path, {**entry, "bytes": 8 << 40})
    with (path / "index" / entry["file"]).open("r+b") as file:
        file.truncate(8 << 40)  # holes: who reads it takes all memory there is
    changed = entry_of(path)
    monkeypatch.setattr(files, "open_regular", lambda path, *_: pytest.fail(f"{path} is opened"))
    assert cache.load(path / "index", changed, check.Metric.L2) is None


@pytest.mark.parametrize("other", ["wider", "longer"])
def test_a_signed_index_of_another_database_reads_no_memory_beyond(
    indexed: Path, tmp_path: Path, other: str, asked: Nursery
) -> None:
    """The key is the user's, not the database's: what he signed for one, a stranger may put into another."""
    path = tmp_path / "db"
    shutil.copytree(indexed / "db", path)
    shutil.rmtree(path / "index")
    shutil.copytree(indexed / other / "index", path / "index")
    put_entry(path, entry_of(indexed / other))
    ended = asked.run("hostile_child:replayed", path, N)
    assert ended.how == "fine", ended
    assert ended.told["last"] < N, "a row beyond the last"
    assert not ended.told["wrong"], "a score of no record"
    assert (ended.told["kind"] is None) == (other == "wider"), "an index of other keys is not searched"


def test_an_index_of_an_older_generation_revives_no_record(indexed: Path, tmp_path: Path) -> None:
    path = tmp_path / "db"
    shutil.copytree(indexed / "db", path)
    old, results = entry_of(path), list((path / "index").iterdir())
    kept = {file.name: file.read_bytes() for file in results}
    with softdb.open(path) as db:
        queries = db.get(list(range(100))).keys
        db.delete(list(range(100)))
        db.compact()
    for name, data in kept.items():
        (path / "index" / name).write_bytes(data)
    put_entry(path, old)
    with softdb.open(path, mode="r") as db:
        hits = {one for ids in db.search(queries, k=20).ids for one in ids}
    assert hits.isdisjoint(range(100)), "a deleted record is back"


def test_an_index_is_never_written_through_a_link(indexed: Path, tmp_path: Path) -> None:
    path, outside = tmp_path / "db", tmp_path / "outside"
    shutil.copytree(indexed / "db", path)
    shutil.copytree(indexed / "wider" / "index", outside)  # another database's: what `clean` would remove
    shutil.rmtree(path / "index")
    (path / "index").symlink_to(outside)
    before = contents(outside)
    with contextlib.suppress(softdb.SoftDBError, OSError), softdb.open(path) as db:
        db.build_index("ivf", recall=0.5)
    assert contents(outside) == before
    cache.clean(path / "index", None)
    assert contents(outside) == before


def _unusable(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key that may be used."""
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(path))
    if kind == "no home":
        for name in ("SOFTDB_KEY_FILE", "XDG_STATE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as without an entry in passwd
    elif kind == "short":
        path.write_bytes(b"short")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "writable by others":
        path.write_bytes(bytes(32))
        path.chmod(0o622)
    elif kind == "another's":
        path.write_bytes(bytes(32))
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif kind == "in a file":
        path.write_bytes(b"")
        monkeypatch.setenv("SOFTDB_KEY_FILE", str(path / "key"))


@pytest.mark.parametrize(
    "kind", ["no home", "short", "pipe", "device", "directory", "writable by others", "another's", "in a file"]
)
def test_without_a_key_the_index_serves_this_handle_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    keys = np.random.default_rng(0).standard_normal((3000, 8))
    _unusable(tmp_path / "key", kind, monkeypatch)
    with holding(keys, path=tmp_path / "db", metric="l2") as db:
        assert db.build_index("ivf").kind == "ivf"
        assert db.search(keys[:1], k=1).ids == [[0]]
    assert [record.message for record in caplog.records if "not kept" in record.message][1:] == []
    assert "signing key" in caplog.text
    with softdb.open(tmp_path / "db", verify=True) as db:
        assert db.stats().index is None
        assert db.search(keys[:1], k=1).ids == [[0]]
