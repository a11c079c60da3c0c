"""Collections of other databases are imported as those packages write them; unreadable ones are one-line errors."""

from __future__ import annotations

import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from typed import fails, run

import softdb
from softdb.formats import Fields, read_records

N, D = 300, 6
KEYS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def read(path: Path, **words: Any) -> dict[Any, tuple[bytes, Any, Any]]:
    """Keys, payloads and texts by id."""
    found = dict[Any, tuple[bytes, Any, Any]]()
    for rows in read_records(path, batch_size=70, **words):
        columns = (rows.ids, rows.keys, rows.payloads, rows.texts)
        for name, key, payload, text in zip(*columns, strict=True):
            found[name] = np.asarray(key, np.float32).tobytes(), payload, text
    return found


@pytest.mark.parametrize("kind", ["Flat", "HNSW8,Flat", "IVF8,Flat", "IDMap2,Flat", "IDMap,IVF8,Flat"])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_a_faiss_index_that_keeps_vectors(tmp_path: Path, kind: str, metric: str) -> None:
    which = faiss.METRIC_INNER_PRODUCT if metric == "dot" else faiss.METRIC_L2
    index = faiss.index_factory(D, kind, which)
    index.train(KEYS)
    ids = np.arange(N) + (1000 if kind.startswith("IDMap") else 0)
    if kind.startswith("IDMap"):
        index.add_with_ids(KEYS, ids)
    else:
        index.add(KEYS)
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    assert read(tmp_path / "x.faiss") == {int(i): (key.tobytes(), None, None) for i, key in zip(ids, KEYS, strict=True)}
    run("import", tmp_path / "db", tmp_path / "x.faiss")
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert (len(db), db.metric) == (N, metric)


@pytest.mark.parametrize("kind", ["PQ3x4", "IVF8,SQ8", "HNSW8,SQ8", "LSH", None])
def test_a_faiss_index_that_keeps_none_is_refused(tmp_path: Path, kind: str | None) -> None:
    if kind is None:
        (tmp_path / "x.faiss").write_bytes(b"IxFI" + bytes(3))
    else:
        index = faiss.index_factory(D, kind)
        index.train(KEYS)
        index.add(KEYS)
        faiss.write_index(index, str(tmp_path / "x.faiss"))
    expected = "x.faiss cannot be read (" if kind is None else "of which no vectors can be read; expected flat,"
    assert expected in fails("import", tmp_path / "db", tmp_path / "x.faiss")
    assert not (tmp_path / "db").exists()


def test_qdrant(tmp_path: Path) -> None:
    qdrant = pytest.importorskip("qdrant_client", reason="to write a collection")
    models = qdrant.models
    client = qdrant.QdrantClient(path=str(tmp_path / "q"))
    names = [i if i % 2 else f"550e8400-e29b-41d4-a716-{i:012d}" for i in range(N)]
    client.create_collection("a", vectors_config=models.VectorParams(size=D, distance=models.Distance.EUCLID))
    rows = zip(names, KEYS.tolist(), strict=True)
    client.upsert("a", [models.PointStruct(id=name, vector=key, payload={"n": str(name)}) for name, key in rows])
    client.close()
    expected = {name: (key.tobytes(), {"n": str(name)}, None) for name, key in zip(names, KEYS, strict=True)}
    assert read(tmp_path / "q") == expected
    run("import", tmp_path / "db", tmp_path / "q", "--collection", "a")
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert (len(db), db.metric) == (N, "l2")
    assert "q holds no collection 'b'; name one of ['a']" in fails(
        "import", tmp_path / "db", tmp_path / "q", "--collection", "b"
    )


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_in_a_folder_of_qdrant_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q" / "collection" / "a").mkdir(parents=True)
    said = {"collections": {"a": {"vectors": {"size": 2, "distance": "Dot"}}}}
    (tmp_path / "q" / "meta.json").write_text(json.dumps(said))
    with sqlite3.connect(tmp_path / "q" / "collection" / "a" / "storage.sqlite") as file:
        file.execute("CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)")
        file.execute("INSERT INTO points VALUES ('x', ?)", (pickle.dumps(Evil()),))
    file.close()
    assert "which is not run" in fails("import", tmp_path / "db", tmp_path / "q")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "q" / "meta.json").write_text("{}")
    assert "another version of its program may have written it" in fails("import", tmp_path / "db", "q")


def test_chroma(tmp_path: Path) -> None:
    chroma = pytest.importorskip("chromadb", reason="to write a collection")
    made = chroma.PersistentClient(str(tmp_path / "c")).create_collection("abc", metadata={"hnsw:space": "cosine"})
    names, texts = [f"r{i}" for i in range(N)], [f"text {i}" for i in range(N)]
    made.add(ids=names, embeddings=KEYS, documents=texts, metadatas=[{"n": i} for i in range(N)])
    before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
    actual = read(tmp_path / "c")
    assert [one[1:] for one in actual.values()] == [({"n": i}, texts[i]) for i in range(N)]
    keys = np.frombuffer(b"".join(one[0] for one in actual.values()), np.float32).reshape(N, D)
    np.testing.assert_allclose(keys, KEYS, rtol=1e-6)  # Chroma keeps directions and lengths for cosines
    assert next(read_records(tmp_path / "c")).header.metric == "cosine"  # type: ignore[union-attr]
    assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()} == before
    (tmp_path / "old").mkdir()
    with sqlite3.connect(tmp_path / "old" / "chroma.sqlite3") as file:
        file.execute("CREATE TABLE collections (uuid TEXT)")
    file.close()
    assert "old cannot be read (" in fails("import", tmp_path / "db", tmp_path / "old")
    assert not (tmp_path / "db").exists()


def test_lancedb(tmp_path: Path) -> None:
    lancedb = pytest.importorskip("lancedb", reason="to write a table")
    pytest.importorskip("lance", reason="to read it")
    rows = [{"id": i, "vector": KEYS[i].tolist(), "n": f"n{i}"} for i in range(N)]
    lancedb.connect(tmp_path / "l").create_table("t", rows)
    expected = {i: (KEYS[i].tobytes(), {"n": f"n{i}"}, None) for i in range(N)}
    assert read(tmp_path / "l", fields=Fields(key="vector")) == expected
