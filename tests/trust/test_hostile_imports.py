"""Hostile files and folders for import are refused by name without a crash, hang or read outside."""

from __future__ import annotations

import json
import os
import pickle
import resource
import sqlite3
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hostile_files import npy, npz, refused

from softdb.formats import read_records, sandbox

KEYS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
SECRET = np.full((40, 4), 7, np.float32)


def lists_elsewhere(folder: Path) -> Path:
    """An index as FAISS itself writes it, whose lists lie in another file."""
    from faiss.contrib.ondisk import merge_ondisk

    with_lists, trained = (faiss.index_factory(4, "IVF1,Flat") for _ in range(2))
    with_lists.train(KEYS)
    trained.train(KEYS)
    with_lists.add(KEYS)
    faiss.write_index(with_lists, str(folder / "block"))
    merge_ondisk(trained, [str(folder / "block")], str(folder / "lists"))
    faiss.write_index(trained, str(folder / "x.faiss"))
    return folder / "x.faiss"


def test_lists_of_faiss_in_another_file(tmp_path: Path) -> None:
    path = lists_elsewhere(tmp_path)
    refused(path, r"x\.faiss keeps its lists in another file, which is not read; import the indexes")
    data = path.read_bytes()
    (tmp_path / "secret").write_bytes(SECRET.tobytes() * 10)
    place = str(tmp_path / "lists").encode()
    path.write_bytes(data.replace(place, str(tmp_path / "secret").encode().ljust(len(place), b"\0")))
    refused(path, r"x\.faiss (keeps its lists in another file|cannot be read)")


def test_a_count_of_faiss_that_the_file_does_not_hold(tmp_path: Path) -> None:
    index = faiss.IndexFlatL2(4)
    index.add(KEYS)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    data = (tmp_path / "x.faiss").read_bytes()
    for at, count in ((8, 1 << 40), (8, 80), (37, 1 << 36)):  # vectors, and numbers of the array
        changed = bytearray(data)
        changed[at : at + 8] = count.to_bytes(8, "little")
        (tmp_path / "x.faiss").write_bytes(changed)
        refused(tmp_path / "x.faiss", r"x\.faiss cannot be read \(")


class PointStruct:
    """A point as Qdrant's client pickles it."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __getstate__(self) -> dict[str, Any]:
        return {"__dict__": self.fields, "__pydantic_fields_set__": set(self.fields)}


@pytest.fixture
def qdrant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, sqlite3.Connection]:
    """A folder of Qdrant with its database, which has no table yet."""
    module = types.ModuleType("qdrant_client.models")
    module.PointStruct = PointStruct  # type: ignore[attr-defined]
    monkeypatch.setattr(PointStruct, "__module__", "qdrant_client.models")
    for name in ("qdrant_client", "qdrant_client.models"):
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "q" / "collection" / "a").mkdir(parents=True)
    said = {"collections": {"a": {"vectors": {"size": 4, "distance": "Dot"}}}}
    (tmp_path / "q" / "meta.json").write_text(json.dumps(said))
    return tmp_path / "q", sqlite3.connect(tmp_path / "q" / "collection" / "a" / "storage.sqlite", isolation_level=None)


PLAIN = "CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, x'00' AS point FROM n"


def points(file: sqlite3.Connection, *points: Any) -> None:
    file.execute(PLAIN)
    file.executemany(
        "INSERT INTO points VALUES (?, ?)", ((str(i), pickle.dumps(point)) for i, point in enumerate(points))
    )
    file.close()


def test_points_of_qdrant(qdrant: tuple[Path, sqlite3.Connection]) -> None:
    made = [PointStruct(id=i, vector=key, payload={"n": i, "é": None}) for i, key in enumerate(KEYS.tolist())]
    points(qdrant[1], *made)
    batches = list(read_records(qdrant[0], batch_size=15))
    assert [name for rows in batches for name in rows.ids] == list(range(40))
    assert [payload for rows in batches for payload in rows.payloads] == [{"n": i, "é": None} for i in range(40)]
    np.testing.assert_array_equal(np.concatenate([rows.keys for rows in batches]), KEYS)
    assert batches[-1].share == 1


def test_points_of_qdrant_without_a_vector_are_named(qdrant: tuple[Path, sqlite3.Connection]) -> None:
    points(qdrant[1], PointStruct(id=5, vector=[1, 2, 3, 4], payload=None), PointStruct(id=6, vector=None, payload={}))
    bad: list[str] = []
    (rows,) = read_records(qdrant[0], on_error=lambda error: bad.append(str(error)))
    assert rows.ids == [5]
    assert bad == ["q row 1: record 6 has no vector"]


@pytest.mark.parametrize(
    "schema",
    [
        [f"CREATE VIEW points AS {ENDLESS}"],
        ["CREATE VIRTUAL TABLE points USING fts5(id, point)"],
        ["CREATE TABLE points (id, point BLOB AS (zeroblob(1000000000)))", "INSERT INTO points (id) VALUES (1)"],
        ["CREATE TABLE points (id, point BLOB AS (id || 'x') STORED)", "INSERT INTO points (id) VALUES (1)"],
        [],
    ],
)
def test_points_of_qdrant_that_are_no_plain_table(qdrant: tuple[Path, sqlite3.Connection], schema: list[str]) -> None:
    for statement in schema:
        qdrant[1].execute(statement)
    qdrant[1].close()
    refused(qdrant[0], r"storage\.sqlite has no plain table points; give a folder that Qdrant has written")


@pytest.mark.parametrize("memory", ["memo", "doubled"])
def test_a_pickle_of_qdrant_that_would_take_all_memory(
    qdrant: tuple[Path, sqlite3.Connection], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    if memory == "memo":  # a place in a table that the unpickler would make as long
        blob = b"\x80\x02]r" + (0xFFFFFFF0).to_bytes(4, "little") + b"."
        qdrant[1].execute(PLAIN)
        qdrant[1].execute("INSERT INTO points VALUES ('1', ?)", (blob,))
        qdrant[1].close()
    else:  # 60 levels, each of them twice the one below
        nested: list[Any] = [0]
        for _ in range(60):
            nested = [nested, nested]
        points(qdrant[1], PointStruct(id=5, vector=[1, 2, 3, 4], payload={"x": nested}))
    refused(qdrant[0], r"storage\.sqlite cannot be read \((it would take more memory than|its reader did not)")


def test_a_collection_of_qdrant_outside_of_its_folder(qdrant: tuple[Path, sqlite3.Connection]) -> None:
    qdrant[1].close()
    said = {"collections": {"../../out": {"vectors": {"size": 4, "distance": "Dot"}}}}
    (qdrant[0] / "meta.json").write_text(json.dumps(said))
    refused(qdrant[0], "outside of the folder")


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("put", [link, os.mkfifo])
@pytest.mark.parametrize("folder", ["q", "x.lance", "c", "d", "l"])
def test_irregular_files_in_a_folder_are_refused(tmp_path: Path, folder: str, put: Callable[[Path], None]) -> None:
    marks = {"q": "meta.json", "x.lance": "x", "c": "chroma.sqlite3", "d": "state.json", "l": "x.lance"}
    deep = tmp_path / folder / "deep"
    deep.mkdir(parents=True)
    (tmp_path / folder / marks[folder]).write_text("{}")
    put(deep / "data.bin")
    refused(tmp_path / folder, rf"{folder} holds 'data.bin', no regular file; replace it by a regular file")


def test_files_of_hugging_face_outside_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="to read a folder")
    (tmp_path / "d").mkdir()
    state = {"_data_files": [{"filename": "../secret.arrow"}]}
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    refused(tmp_path / "d", r"d names '\.\./secret\.arrow', outside of the folder; save the dataset again")


def test_a_lance_table_with_files_elsewhere(tmp_path: Path) -> None:
    lance = pytest.importorskip("lance", reason="to write a table")
    pa = pytest.importorskip("pyarrow", reason="as above")
    table = pa.table({"id": [1], "key": [[1.0, 2.0]]})
    lance.write_dataset(table, str(tmp_path / "a.lance")).shallow_clone(str(tmp_path / "b.lance"), reference=1)
    refused(tmp_path / "b.lance", r"b\.lance has files outside of its folder, which are not read; import a deep copy")


@pytest.mark.parametrize(
    "sql", [f"CREATE VIEW collections AS {ENDLESS}", "CREATE TRIGGER t INSERT ON x BEGIN SELECT 1; END"]
)
def test_a_folder_of_chroma_in_which_something_runs(tmp_path: Path, sql: str) -> None:
    pytest.importorskip("chromadb", reason="to read a collection")
    (tmp_path / "c").mkdir()
    with sqlite3.connect(tmp_path / "c" / "chroma.sqlite3") as file:
        file.execute("CREATE TABLE x (i)")
        file.execute(sql)
    file.close()
    refused(tmp_path / "c", r"chroma\.sqlite3 holds the (view|trigger) '\w+', which Chroma does not write")


def safetensors(shape: list[int], end: int, data: bytes) -> bytes:
    header = json.dumps({"keys": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def floats(shape: str) -> str:
    return f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.npy", npy(floats(f"({1 << 40}, 4)"), bytes(64))),
        ("x.npy", npy(floats(f"({1 << 40}, 0)"))),
        ("x.npy", npy(floats(f"(0, {1 << 40})"))),
        ("x.npz", npz(keys=npy(floats(f"({1 << 40}, 0)")))),
        ("x.npz", npz(keys=npy(floats(f"({1 << 24}, 4)"), bytes(64)))),
        ("x.fbin", np.array([2**31 - 1, 2**20], "<i4").tobytes() + bytes(64)),
        ("x.u8bin", np.array([2**31 - 1, 1], "<i4").tobytes() + bytes(64)),
        ("x.fvecs", np.array([2**31 - 1], "<i4").tobytes() + bytes(64)),
        ("x.fvecs", np.array([0], "<i4").tobytes() + bytes(64)),
        ("x.safetensors", safetensors([1 << 40, 4], 1 << 44, bytes(64))),
        ("x.safetensors", safetensors([1 << 60, 0], 0, b"")),
        ("x.safetensors", safetensors([-4, -4], 64, bytes(64))),
        ("x.safetensors", (1 << 62).to_bytes(8, "little") + bytes(64)),
    ],
)
def test_a_shape_that_the_file_does_not_hold(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name, name.replace(".", r"\."))


def test_an_archive_that_unpacks_to_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from softdb.formats import arrays

    monkeypatch.setattr(arrays, "_UNPACKED", 1 << 20)
    (tmp_path / "x.npz").write_bytes(npz(keys=npy(floats("(1000000, 4)"), bytes(16_000_000))))
    refused(tmp_path / "x.npz", "it would unpack to 16,000,[0-9]+ bytes; save it as .npy")


def test_wide_vectors_come_in_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from softdb.formats import importing

    monkeypatch.setattr(importing, "_BATCH", 160)
    np.save(tmp_path / "x.npy", KEYS)
    assert [len(rows) for rows in read_records(tmp_path / "x.npy")] == [10] * 4


def test_a_sparse_file_is_read_batch_by_batch(tmp_path: Path) -> None:
    header = npy(floats(f"({1 << 36}, 4)"))
    with (tmp_path / "x.npy").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + (1 << 40))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(next(read_records(tmp_path / "x.npy"))) == 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 17)
