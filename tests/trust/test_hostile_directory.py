"""Hostile files in a directory cannot lead outside, hang, exhaust memory or run code."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_child import Nursery
from hostile_files import FLOATS, PUTS, Put, arrays, contents, npy, npz

import softdb
from softdb import check
from softdb.formats import numbers_in, read_records
from softdb.index import cache
from softdb.store import disk, files

pytest_plugins = ["hostile_world"]

# -- irregular files ---------------------------------------------------------------------------------------------------

NAMES = (
    "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.sqlite-journal", "lock", "committed",
    "keys-00000000.npy", "keys-00000009.npy", "index",
    "index/ivf-0123456789abcdef.faiss", "committed.tmp",
)  # fmt: skip
PLACES = [
    pytest.param(
        name, put, mode, id=f"{put.__name__}-{name}-{mode[0]}", marks=[] if i % 4 == 0 else pytest.mark.exhaustive
    )
    for i, (put, name, mode) in enumerate(itertools.product(PUTS, NAMES, [("rw", True), ("r", False)]))
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("name", "put", "mode"), PLACES)
def test_links_and_devices_in_place_of_files_lead_nowhere(
    asked: Nursery,
    goods: dict[str, Path],
    tmp_path: Path,
    name: str,
    put: Put,
    mode: tuple[str, bool],
    tally: Counter[str],
) -> None:
    path, outside = tmp_path / "db", tmp_path / "outside"
    shutil.copytree(goods["good"], path)
    (path / "index").mkdir()
    outside.mkdir()
    put(path / name, outside)
    before = contents(outside)
    ended = asked.run("hostile_child:explore", path, *mode)
    tally["hostile: files tried"] += 1
    assert ended.decent, ended
    assert contents(outside) == before, "something outside was written, made or removed"


@pytest.mark.parametrize(
    "opened",
    [lambda path: files.open_regular(path).close(), lambda path: os.close(disk.open(path, os.O_RDWR | os.O_CREAT))],
    ids=["to read", "to write"],
)
def test_no_function_that_opens_a_file_follows_a_link(tmp_path: Path, opened: Callable[[Path], None]) -> None:
    (tmp_path / "outside").write_text("precious")
    for target in ("outside", "made through a link"):
        (tmp_path / "link").symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"):
            opened(tmp_path / "link")
        (tmp_path / "link").unlink()
    assert os.listdir(tmp_path) == ["outside"]


@pytest.mark.parametrize("folder", [None, "by its descriptor"])
def test_irregular_files_are_neither_waited_for_nor_read(tmp_path: Path, folder: str | None) -> None:
    os.mkfifo(tmp_path / "pipe")
    opened, raised = os.open(tmp_path, os.O_RDONLY), list[OSError]()

    def read() -> None:
        try:
            files.open_regular(tmp_path / "pipe", opened if folder else None)
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    os.close(opened)
    assert [str(error) for error in raised] == ["pipe is not a regular file"]


@pytest.mark.parametrize("packed", [False, True], ids=["npy", "npz"])
@pytest.mark.parametrize("name", arrays(Path("mark")))
def test_an_array_file_is_numbers_or_is_refused(
    tmp_path: Path, name: str, packed: bool, asked: Nursery, tally: Counter[str]
) -> None:
    mark = tmp_path / "mark"
    data = arrays(mark)[name]
    file = tmp_path / ("keys.npz" if packed else "keys.npy")
    file.write_bytes(npz(keys=data) if packed else data)
    ended = asked.run("hostile_child:imported", file, tmp_path / "db")
    tally["hostile: files tried"] += 1
    tally["hostile: code runs"] += mark.exists()
    assert ended.how == "BadInput", ended
    assert file.name in str(ended.told)
    with pytest.raises(softdb.BadInput, match=rf"{file.name} cannot be read as an array of numbers"):
        numbers_in(file)  # not only what comes after it refuses
    assert not mark.exists()


def test_an_archive_holds_as_many_bytes_as_its_array_says(tmp_path: Path) -> None:
    (tmp_path / "k.npz").write_bytes(npz(keys=npy(FLOATS, bytes(25))))
    with pytest.raises(softdb.BadInput, match=r"keys has \d+ bytes, \d+ expected"):
        numbers_in(tmp_path / "k.npz")


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f8", "<f2", "|i1", ">i8", "<u2"])
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_way_to_write_numbers_is_read(tmp_path: Path, kind: str, version: int, order: Any) -> None:
    array = np.asarray(np.arange(6).reshape(2, 3), kind, order=order)
    header = FLOATS.replace("<f4", kind).replace("False", str(order == "F"))
    for text in (header, header.replace("'", '"') if version == 1 else header, header.replace(", }", "}") + " \n"):
        (tmp_path / "k.npy").write_bytes(npy(text.replace('"', "'"), array.tobytes(order), version))
        (tmp_path / "k.npz").write_bytes(npz(keys=npy(text.replace('"', "'"), array.tobytes(order), version)))
        for name in ("k.npy", "k.npz"):
            np.testing.assert_array_equal(numbers_in(tmp_path / name), array)
            (rows,) = read_records(tmp_path / name)
            np.testing.assert_array_equal(rows.keys, array)


def test_files_that_are_no_column_of_this_shape_are_refused(
    asked: Nursery, goods: dict[str, Path], tmp_path: Path, tally: Counter[str]
) -> None:
    mark = tmp_path / "mark"
    for name, data in arrays(mark).items():
        path = tmp_path / "db"
        shutil.copytree(goods["good"], path)
        size = (path / "keys-00000000.npy").stat().st_size
        (path / "keys-00000000.npy").write_bytes(data.ljust(size, b"\0")[:size])  # no size tells it
        ended = asked.run("hostile_child:explore", path, "r")
        tally["hostile: files tried"] += 1
        assert ended.how == "CorruptionError", (name, ended)
        assert "keys-00000000.npy" in ended.told
        shutil.rmtree(path)
    assert not mark.exists()


def test_a_line_that_unpacks_to_more_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    import gzip

    from softdb.formats import lines

    monkeypatch.setattr(lines, "_LINE", 1 << 20)
    for name in ("r.jsonl.gz", "r.csv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"id": 1, "key": [1]}\n' + b"[" * (1 << 22)))
        tally["hostile: files tried"] += 1
        with pytest.raises(softdb.BadInput, match=r"line 2: longer than 1,048,576 bytes"):
            list(read_records(tmp_path / name))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "name", ["../catalog.sqlite", "/etc/passwd", "ivf-0123456789abcdef.faiss/../../x", "", ".", "..", None, 7]
)
def test_the_name_of_an_index_does_not_lead_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: Any, signed: bool
) -> None:
    """Its form is checked; the number of a segment is, too: see the catalogues."""
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(tmp_path / "key"))
    entry = dict.fromkeys(("kind", "metric", "bytes", "sha256", *cache._ATTRIBUTES), 0) | {"file": name}
    if signed:
        entry["hmac"] = cache._signature(entry)
    monkeypatch.setattr(files, "open_regular", lambda path, *_: pytest.fail(f"{path} is opened"))
    assert cache.load(tmp_path, entry, check.Metric.L2) is None
    assert "its entry is not one that softdb writes" in caplog.text
