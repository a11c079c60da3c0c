"""Files of others at every path that softdb writes are never removed or replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import softdb
from softdb.formats import export_records
from softdb.salvaging import run as salvaging
from softdb.store import backup, disk, files
from softdb.store.ours import entries, remove_database, require_ours
from softdb.text import HashedNGrams
from softdb.tools.cli import transfer
from softdb.train import QueryProjection, checkpoint, save

Put = Callable[[Path, Path], None]
State = dict[str, object]


def file(path: Path, outside: Path) -> None:
    path.write_bytes(b"a stranger's")


def folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "deep").mkdir()
    (path / "deep" / "notes.txt").write_bytes(b"a stranger's")


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


PUTS = pytest.mark.parametrize("put", [file, folder, link])


def state(*paths: Path) -> State:
    """Everything that lies at some paths: names, links, bytes and inodes."""
    found: State = {}
    for path in [below for root in paths for below in ([root, *root.rglob("*")] if root.is_dir() else [root])]:
        what = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = what, path.lstat().st_ino
    return found


class Stranger:
    """Puts something at names of a directory, and knows how it was."""

    def __init__(self, root: Path, put: Put) -> None:
        self.outside, self.put, self.before = root / "outside", put, State()
        folder(self.outside, root)
        self.paths = [self.outside]

    def take(self, directory: Path, *names: str) -> None:
        for name in names:
            self.put(directory / name, self.outside)
            self.paths.append(directory / name)
        self.before = state(*self.paths)

    def is_untouched(self) -> None:
        assert state(*self.paths) == self.before


@pytest.fixture
def db(tmp_path: Path) -> softdb.SoftDB:
    with softdb.open(tmp_path / "db", dim=64, encoder=HashedNGrams(dim=64)) as db:
        db.insert(["a", "b"], texts=["one", "two"])
        return db


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def exported(suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with softdb.open(path.parent.parent / "db", mode="r") as db:
            assert export_records(db, path.with_name(f"out{suffix}")) == 2

    return write


def projection(path: Path) -> None:
    save(path.with_name("out.pt"), QueryProjection(2))


def run_of_training(path: Path) -> None:
    checkpoint.require_writable(path.with_name("out.pt"))
    checkpoint.write(path.with_name("out.pt"), {}, {})


WRITERS = {
    ".jsonl": exported(".jsonl"), ".csv.gz": exported(".csv.gz"), ".npy": exported(".npy"),
    ".pt": projection, ".checkpoint": run_of_training,
}  # fmt: skip


@PUTS
@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("refused", [False, True])
def test_a_file_that_is_written_leaves_its_neighbours(
    db: softdb.SoftDB,
    place: Path,
    tmp_path: Path,
    put: Put,
    suffix: str,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "out.pt" if suffix in (".pt", ".checkpoint") else f"out{suffix}"
    stranger = Stranger(tmp_path, put)
    stranger.take(place, f"{name}.tmp")
    if refused:
        monkeypatch.setattr(Path, "replace", _refuse)
        monkeypatch.setattr(disk, "rename", _refuse)
        with pytest.raises((OSError, softdb.WriteFailed), match="no room"):
            WRITERS[suffix](place / name)
    else:
        WRITERS[suffix](place / name)
    assert {path.name for path in place.iterdir()} == {f"{name}.tmp"} | (set() if refused else {name})
    stranger.is_untouched()


def _refuse(*_: object) -> None:
    raise OSError("no room")


COPIED = ("unfinished.sqlite", "unfinished", "scratch.sqlite", "notes.txt")  # names that a copy does not have
TAKEN = ("keys-00000000.npy", "catalog.sqlite", "lock")  # and some that one has


@PUTS
@pytest.mark.parametrize("kind", ["snapshot", "salvage"])
@pytest.mark.parametrize("names", [COPIED, *((name,) for name in TAKEN)], ids=lambda names: names[0])
@pytest.mark.parametrize("there", [True, False])
def test_a_copy_leaves_files_that_appear_at_its_place(
    db: softdb.SoftDB,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    put: Put,
    kind: str,
    names: tuple[str, ...],
    there: bool,
) -> None:
    stranger, target = Stranger(tmp_path, put), tmp_path / "copy"
    if there:
        target.mkdir()
    module, function = (backup, "_copy") if kind == "snapshot" else (salvaging._Salvage, "run")
    real = getattr(module, function)

    def meanwhile(*arguments: object) -> object:
        stranger.take(target, *names)
        return real(*arguments)

    monkeypatch.setattr(module, function, meanwhile)
    copies = names == COPIED or (kind == "snapshot" and names == ("lock",))
    if copies:
        _copy(kind, tmp_path / "db", target)
        with softdb.open(target, mode="r") as copy:
            assert copy.verify() == 2
    else:
        with pytest.raises(softdb.WriteFailed, match="cannot be written"):
            _copy(kind, tmp_path / "db", target)
        assert {path.name for path in target.iterdir()} == set(names)
    assert not [path for path in target.iterdir() if path.name.startswith(".softdb-")]
    stranger.is_untouched()


def _copy(kind: str, path: Path, target: Path) -> None:
    if kind == "salvage":
        softdb.salvage(path, target)
        return
    with softdb.open(path, mode="r") as db:
        db.snapshot(target)


@pytest.mark.parametrize("depth", [0, 1])
def test_all_that_a_killed_copy_leaves_is_removed(tmp_path: Path, depth: int) -> None:
    folder = tmp_path / ".softdb-0123456789abcdef"
    inner = folder / Path(*depth * [".softdb-fedcba9876543210"])
    inner.mkdir(parents=True)
    for end in ("", "-journal", "-wal", "-shm"):
        (inner / f"unfinished.sqlite{end}").write_bytes(b"half a copy")
    (inner / "keys-00000000.npy").write_bytes(b"half a copy")
    assert entries(folder)[1] == []
    remove_database(folder)
    assert not folder.exists()


@PUTS
def test_a_failed_copy_leaves_files_that_appear_at_its_place(
    db: softdb.SoftDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Put
) -> None:
    stranger, target = Stranger(tmp_path, put), tmp_path / "copy"

    def fail(*_: object) -> None:
        stranger.take(target, "notes.txt", "keys-00000000.npy")
        _refuse()

    monkeypatch.setattr(backup, "_copy", fail)
    with pytest.raises(softdb.WriteFailed, match="no room"):
        _copy("snapshot", tmp_path / "db", target)
    stranger.is_untouched()
    assert {path.name for path in target.iterdir()} == {"notes.txt", "keys-00000000.npy"}


@PUTS
def test_reembed_refuses_a_folder_that_is_not_its_own(db: softdb.SoftDB, tmp_path: Path, put: Put) -> None:
    stranger = Stranger(tmp_path, put)
    stranger.take(tmp_path / "db", "reembed-0")
    with softdb.open(tmp_path / "db") as again:
        with pytest.raises(softdb.BadInput, match="was not created by softdb"):
            again.reembed(HashedNGrams(dim=32))
        assert again.verify() == 2
    stranger.is_untouched()


@PUTS
def test_a_folder_of_reembed_that_is_another_s_outlasts_a_writer(db: softdb.SoftDB, tmp_path: Path, put: Put) -> None:
    stranger = Stranger(tmp_path, put)
    stranger.take(tmp_path / "db", "reembed-7")
    with softdb.open(tmp_path / "db") as again:
        again.insert(["c"], texts=["three"])
    stranger.is_untouched()


@PUTS
@pytest.mark.parametrize("there", [True, False])
def test_a_failed_import_leaves_files_that_appeared_meanwhile(tmp_path: Path, put: Put, there: bool) -> None:
    stranger, path = Stranger(tmp_path, put), tmp_path / "new"
    db = softdb.open(path, dim=2)
    stranger.take(path, "notes.txt", "unfinished")
    with pytest.raises(softdb.BadInput, match="bad"), transfer._cleanup(db, path, True, there):
        raise softdb.BadInput("bad")
    assert {one.name for one in path.iterdir()} == {"notes.txt", "unfinished"}
    stranger.is_untouched()


@PUTS
@pytest.mark.parametrize("name", ["notes.txt", "reembed-x", "index/notes.txt", "keys-1.npy"])
def test_only_files_of_softdb_are_removed(db: softdb.SoftDB, tmp_path: Path, put: Put, name: str) -> None:
    stranger, path = Stranger(tmp_path, put), tmp_path / "db"
    (path / "index").mkdir(exist_ok=True)
    stranger.take(path, name)
    with pytest.raises(softdb.BadInput, match="was not created by softdb"):
        require_ours(path)
    assert softdb.open(path, mode="r").verify() == 2
    remove_database(path)
    stranger.is_untouched()
    assert {str(one.relative_to(path)) for one in path.rglob("*")} >= {name}
    assert entries(path)[0] == ([path / "index"] if name.startswith("index") else [])


def test_a_database_is_removed_completely(db: softdb.SoftDB, tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db") as again:
        again.insert(range(2000), np.random.default_rng(0).normal(size=(2000, 64)))
        again.build_index("ivf")
    (tmp_path / "db" / ".softdb-0123456789abcdef").write_bytes(b"of a run that was killed")
    require_ours(tmp_path / "db")
    remove_database(tmp_path / "db")
    assert not (tmp_path / "db").exists()


@PUTS
def test_the_lock_of_another_program_keeps_its_bytes(tmp_path: Path, put: Put) -> None:
    stranger = Stranger(tmp_path, put)
    stranger.take(tmp_path, "lock")
    if put is file:
        lock = files.acquire(tmp_path / "lock")
        assert lock is not None
        lock.release()
    else:
        with pytest.raises(OSError, match="lock"):
            files.acquire(tmp_path / "lock")
    stranger.is_untouched()
