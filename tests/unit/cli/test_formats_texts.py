"""Texts of an import become the texts of the records in every format: stored once, embedded, searchable."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typed import answer, fails, lines, run

import softdb
from softdb.formats import Fields, export_records, import_records, read_records
from softdb.text import HashedNGrams

D = 16
TEXTS = ["Der Fuchs läuft", "a red fox, running", "two\nlines", 'quoted "words"', "the end"]
NUMBERED: list[dict[str, Any]] = [{"id": f"r{i}", "text": text, "n": i} for i, text in enumerate(TEXTS)]
VECTORS = np.arange(5 * D, dtype=np.float32).reshape(5, D)


def table() -> Any:
    pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")
    return pa.table({name: [row[name] for row in NUMBERED] for name in ("id", "text", "n")})


def with_vectors() -> Any:
    return table().append_column("vector", [VECTORS.tolist()])


def of_lines(folder: Path) -> Path:
    return lines(folder / "docs.jsonl", NUMBERED)


def of_packed_lines(folder: Path) -> Path:
    (folder / "docs.jsonl.gz").write_bytes(gzip.compress(of_lines(folder).read_bytes()))
    return folder / "docs.jsonl.gz"


def of_cells(folder: Path, name: str = "docs.csv", delimiter: str = ",") -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", "text", "n"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(NUMBERED)
    return folder / name


def of_tabs(folder: Path) -> Path:
    return of_cells(folder, "docs.tsv", "\t")


def of_parquet(folder: Path) -> Path:
    docs = table()
    import pyarrow.parquet

    pyarrow.parquet.write_table(docs, folder / "docs.parquet")
    return folder / "docs.parquet"


def of_arrow(folder: Path) -> Path:
    docs = table()
    import pyarrow

    with pyarrow.ipc.new_file(folder / "docs.arrow", docs.schema) as writer:
        writer.write_table(docs)
    return folder / "docs.arrow"


def of_lance(folder: Path) -> Path:
    lance = pytest.importorskip("lance", reason="Lance tables need pylance")
    lance.write_dataset(table(), str(folder / "docs.lance"))
    return folder / "docs.lance"


def of_lancedb(folder: Path) -> Path:
    lance = pytest.importorskip("lance", reason="Lance tables need pylance")
    lance.write_dataset(with_vectors(), str(folder / "lancedb" / "docs.lance"))
    return folder / "lancedb"


def of_pandas(folder: Path) -> Any:
    pytest.importorskip("pandas", reason="frames need pandas")
    return table().to_pandas()


def of_polars(folder: Path) -> Any:
    return pytest.importorskip("polars", reason="frames need polars").from_arrow(table())


def of_datasets(folder: Path) -> Any:
    return pytest.importorskip("datasets", reason="Hugging Face datasets").Dataset(table())


def of_saved_datasets(folder: Path) -> Path:
    of_datasets(folder).save_to_disk(str(folder / "docs"))
    return folder / "docs"


def of_chroma(folder: Path) -> Path:
    chroma = pytest.importorskip("chromadb", reason="to write a collection")
    made = chroma.PersistentClient(str(folder / "chroma")).create_collection("docs", metadata={"hnsw:space": "ip"})
    rows = [(row["id"], row["text"], {"n": row["n"]}) for row in NUMBERED]
    ids, texts, payloads = map(list, zip(*rows, strict=True))
    made.add(ids=ids, embeddings=VECTORS, documents=texts, metadatas=payloads)
    return folder / "chroma"


class PointStruct:
    """A point of Qdrant's client, pickled as that pickles it."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__ = parts

    def __getstate__(self) -> dict[str, Any]:
        return {"__dict__": self.__dict__}


def of_qdrant(folder: Path) -> Path:
    """A folder as Qdrant's local mode writes it, without the client."""
    place = folder / "qdrant" / "collection" / "docs"
    place.mkdir(parents=True)
    said = {"collections": {"docs": {"vectors": {"size": D, "distance": "Dot"}}}}
    (folder / "qdrant" / "meta.json").write_text(json.dumps(said))
    client = ModuleType("qdrant_client.models")
    with pytest.MonkeyPatch.context() as patched, sqlite3.connect(place / "storage.sqlite") as file:
        patched.setitem(sys.modules, client.__name__, client)
        patched.setitem(sys.modules, "qdrant_client", client)
        patched.setattr(client, "PointStruct", PointStruct, raising=False)
        patched.setattr(PointStruct, "__module__", client.__name__)
        file.execute("CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)")
        for row, vector in zip(NUMBERED, VECTORS.tolist(), strict=True):
            point = PointStruct(id=row["id"], vector=vector, payload={"text": row["text"], "n": row["n"]})
            file.execute("INSERT INTO points VALUES (?, ?)", (row["id"], pickle.dumps(point)))
    file.close()
    return folder / "qdrant"


WITH_VECTORS = [
    (of_lancedb, Fields(key="vector", text="text")),
    (of_chroma, Fields()),
    (of_qdrant, Fields(text="text")),
]
EMBEDDED = [
    of_lines, of_packed_lines, of_cells, of_tabs, of_parquet, of_arrow, of_lance, of_pandas, of_polars, of_datasets,
    of_saved_datasets,
]  # fmt: skip
SOURCES = [
    *((make, Fields(text="text"), False) for make in EMBEDDED),
    *((*with_vector, True) for with_vector in WITH_VECTORS),
]


def require_texts(db: softdb.SoftDB) -> None:
    """Each text is the record's, and nowhere else in it; words find it once they are indexed."""
    for row in NUMBERED:
        record = db[row["id"]]
        assert (record.text, record.payload) == (row["text"], {"n": row["n"]})
    db.index_text()
    assert db.search(texts="fox", mode="text", k=9).ids == [["r1"]]


def everything(db: softdb.SoftDB) -> list[tuple[Any, ...]]:
    return [(one.id, bytes(one.key.numpy()), one.payload, one.text) for some in db.scan() for one in some]


@pytest.mark.parametrize(("make", "fields", "keyed"), SOURCES, ids=[make.__name__ for make, *_ in SOURCES])
def test_the_texts_of_an_import_are_the_records_texts(
    tmp_path: Path, make: Callable[[Path], Any], fields: Fields, keyed: bool
) -> None:
    source = make(tmp_path)
    with softdb.open(None, encoder=HashedNGrams(D)) as db, softdb.open(None, encoder=HashedNGrams(D)) as again:
        assert import_records(db, read_records(source, fields=fields, batch_size=2)) == 5
        require_texts(db)
        expected = VECTORS if keyed else HashedNGrams(D)(TEXTS)
        np.testing.assert_allclose(db.get([row["id"] for row in NUMBERED]).keys, expected, rtol=1e-6)
        before = everything(db)
        assert import_records(db, read_records(source, fields=fields), resume=True) == 5
        db.delete(["r3"])
        assert import_records(db, read_records(source, fields=fields), resume=True) == 5
        assert sorted(everything(db)) == sorted(before)
        export_records(db, tmp_path / "back.jsonl")
        assert import_records(again, tmp_path / "back.jsonl") == 5
        require_texts(again)
        assert sorted(everything(again)) == sorted(before)


@pytest.mark.parametrize("make", [of_lines, of_cells, None], ids=["jsonl", "csv", "stdin"])
def test_imported_texts_are_found_by_their_words(tmp_path: Path, make: Callable[[Path], Path] | None) -> None:
    source, piped = (make(tmp_path), None) if make else ("-", of_lines(tmp_path).read_text())
    run("import", tmp_path / "db", source, "--text", "text", "--dim", D, stdin=piped)
    error = fails("search", tmp_path / "db", "fox", "--mode", "text")
    assert error.endswith("there is no text index; softdb fields PATH --text words makes one")
    run("fields", tmp_path / "db", "--text", "words")
    (actual,) = answer("search", tmp_path / "db", "fox", "--mode", "text")
    assert [(hit["id"], hit["text"], hit["payload"]) for hit in actual] == [("r1", TEXTS[1], {"n": 1})]


def test_vectors_beside_the_lines_have_their_texts_too(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", VECTORS)
    run("import", tmp_path / "db", of_lines(tmp_path), "--text", "text", "--keys", tmp_path / "keys.npy")
    with softdb.open(tmp_path / "db") as db:
        require_texts(db)
        assert db["r2"].key is not None
        assert db["r2"].key.tolist() == VECTORS[2].tolist()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_the_texts_of_an_export_are_embedded_again(tmp_path: Path, suffix: str) -> None:
    """The way from one encoder to another: the vectors stay behind, and nothing else."""
    file = tmp_path / f"out{suffix}"
    with softdb.open(None, encoder=HashedNGrams(7)) as db, softdb.open(None, encoder=HashedNGrams(D)) as new:
        db.core.store.note_encoder("a model")
        new.core.store.note_encoder("another")
        db.insert(["r0", "r1"], texts=TEXTS[:2], payloads=[{"n": 0}, {"n": 1}])
        export_records(db, file, note=lambda text: None)
        if suffix != ".csv":  # which does not say what made its keys
            with pytest.raises(softdb.BadInput, match=r"Fields\(text='text'\), or on a shell --text text"):
                import_records(new, file)
        assert import_records(new, read_records(file, fields=Fields(text="text"))) == 2
        assert new.get(["r0", "r1"]).texts == TEXTS[:2]
        assert new.get(["r0", "r1"]).payloads == [{"n": 0}, {"n": 1}]
        np.testing.assert_array_equal(new.get(["r0", "r1"]).keys, HashedNGrams(D)(TEXTS[:2]))
    run("import", tmp_path / "db", file, "--text", "text", "--dim", D)
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert (db.dim, db["r1"].text, db["r1"].payload) == (D, TEXTS[1], {"n": 1})


def test_a_text_may_be_the_id_and_only_null_means_none(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", [{"name": "a", "key": [1]}, {"name": "b", "key": [2], "note": None}])
    (rows,) = read_records(path, fields=Fields(id="name", text="name"))
    assert (rows.ids, rows.keys, rows.texts) == (["a", "b"], ["a", "b"], ["a", "b"])
    bad = list[str]()
    (rows,) = read_records(path, fields=Fields("name", "key", "note"), on_error=lambda error: bad.append(str(error)))
    assert (rows.ids, rows.texts) == (["b"], [None])
    assert bad == ["r.jsonl line 1: field 'note' is None, not a text; its fields are ['name', 'key']"]


def test_a_source_without_texts_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "keys.npy", VECTORS)
    with pytest.raises(softdb.BadInput, match=r"keys.npy holds no texts; do not name a text \('text'\)"):
        read_records(tmp_path / "keys.npy", fields=Fields(text="text"))
    with pytest.raises(softdb.BadInput, match=r"record 'r0': field 'no' is None, not a text; its fields are \['text'"):
        list(read_records(of_qdrant(tmp_path), fields=Fields(text="no")))
