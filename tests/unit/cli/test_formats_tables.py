"""Tables come back from an export to the bit; formats that cannot carry a column say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typed import answer, fails, run
from worlds import holding

import softdb
from softdb.formats import Fields, export_records, import_records, read_records

pa = pytest.importorskip("pyarrow", reason="tables need pyarrow")

WHOLE = [".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".feather"]
DEEP = {"ü": "日本\n", "deep": [{"a": [1.5, None]}], "n": 3}
PAYLOADS: list[Any] = [None, {}, {"payload": 1}, [], "text", 0, False, DEEP]
IDS: dict[str, list[Any]] = {
    "texts": ["a", "b", "1", "ü", "", 'quote"', "7", "last"],
    "ints": [1, -(2**63), 2**63 - 1, 0, 5, 6, 7, 8],
    "mixed": ["a", 1, "1", -(2**63), "ü", "", 'quote"', 2**63 - 1],
}
SHAPES: dict[str, dict[str, Any]] = {"none": {}, "vector": {"value_dim": 2}, "label": {"num_classes": 5}}


def complete(path: Path | None, ids: str, value: str, dtype: Any = "float32") -> softdb.SoftDB:
    """A database with everything that a record can have, and records that lack it."""
    random = np.random.default_rng(0)
    db = softdb.open(path, dim=3, dtype=dtype, metric="cosine", fields=["n"], **SHAPES[value])
    db.core.store.note_encoder("some model")
    keys: list[Any] = [None if i in (2, 5) else key for i, key in enumerate(random.normal(size=(8, 3)))]
    own: list[Any] = list(random.normal(size=(8, 2)) if value == "vector" else random.integers(0, 5, 8))
    values = None if value == "none" else [None if key is None else one for key, one in zip(keys, own, strict=True)]
    texts = [None if i % 3 == 1 else f"text {i}\n ü" for i in range(8)]
    db.insert(IDS[ids], keys, values, PAYLOADS, texts=texts)
    return db


def everything(db: softdb.SoftDB) -> tuple[Any, ...]:
    """Schema of the database and every record in order, to the bit."""
    facts = (db.dim, db.value_dim, db.num_classes, db.metric, db.dtype, db.fields, db.encoder_name)
    records = [
        (one.id, one.key is None or one.key.numpy().tobytes(), str(one.value), json.dumps(one.payload), one.text)
        for some in db.scan()
        for one in some
    ]
    return facts, records


@pytest.mark.few(9)
@pytest.mark.parametrize("suffix", [*WHOLE, ".lance"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("value", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_export_makes_the_same_database_again(tmp_path: Path, suffix: str, ids: str, value: str, dtype: str) -> None:
    if suffix == ".lance":
        pytest.importorskip("lance", reason="Lance tables need pylance")
    with complete(tmp_path / "db", ids, value, dtype) as db:
        before = everything(db)
    assert run("export", tmp_path / "db", tmp_path / f"r{suffix}").stdout.startswith("8 records written")
    run("import", tmp_path / "new", tmp_path / f"r{suffix}", "--batch-size", 3)
    with softdb.open(tmp_path / "new", mode="r", verify=True) as new:
        assert everything(new) == before
    shown = run("import", tmp_path / "new", tmp_path / f"r{suffix}", "--resume").stdout
    assert shown.startswith("0 records imported, 8 already stored, 8 in")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "new", f"r{suffix}"]


@pytest.mark.parametrize("frame", ["arrow", "reader", "pandas", "polars", "datasets"])
def test_a_frame_is_a_source_and_gives_the_records_back(frame: str) -> None:
    with complete(None, "mixed", "vector") as db, softdb.open(None, dim=3, value_dim=2, metric="cosine") as new:
        table: Any = db.scan_arrow(3) if frame == "reader" else db.to_arrow()
        if frame == "pandas":
            table = table.to_pandas()
        elif frame in ("polars", "datasets"):
            module = pytest.importorskip(frame, reason=f"{frame} is not there")
            table = module.from_arrow(table) if frame == "polars" else module.Dataset(table)
        assert import_records(new, table) == 8
        assert everything(new)[1] == everything(db)[1]


def test_to_arrow_takes_columns_and_fields_and_a_filter() -> None:
    with softdb.open(None, dim=2) as db:
        assert db.to_arrow().num_rows == 0
        db.insert([1, 2, 3], np.eye(3, 2), payloads=[{"year": 1990}, {"year": 2000, "l": "de"}, [1]])
        assert db.to_arrow(["year", "id"]).to_pydict() == {"year": [1990, 2000, None], "id": [1, 2, 3]}
        assert db.to_arrow(["year"]).to_pydict() == {"year": [1990, 2000, None]}
        with pytest.warns(softdb.UnknownField, match="no record has the field 'yaer'; columns are id, key"):
            assert db.to_arrow(["id", "yaer"]).num_rows == 3
        assert db.to_arrow(["key"], where={"year": 2000}).to_pydict() == {"key": [[0.0, 1.0]]}
        assert db.to_arrow().schema.field("key").type == pa.list_(pa.float32(), 2)
        db.update([1], payloads=[{"year": "late"}])
        with pytest.raises(softdb.BadInput, match="to_arrow: field 'year' cannot become a column"):
            db.to_arrow(["year"])
        with pytest.raises(softdb.BadInput, match="to_arrow: columns are 'id'; expected a list of names"):
            db.to_arrow("id")


# -- tables of others --------------------------------------------------------------------------------------------------

N = 50


def table(**changed: Any) -> Any:
    """A table of somebody's."""
    columns = {
        "id": [f"r{i}" for i in range(N)],
        "key": [[float(i), 1.0] for i in range(N)],
        "when": pa.array(range(N), pa.timestamp("s")),
        "tags": [["a", "b"]] * N,
        "n": [None, *range(1, N)],
        "kind": pa.array(["x", "y"] * (N // 2)).dictionary_encode(),
    }
    return pa.table({name: one for name, one in (columns | changed).items() if one is not None})


def test_other_columns_become_the_payload_without_nulls() -> None:
    (rows,) = read_records(table())
    assert rows.ids[:2] == ["r0", "r1"]
    assert rows.keys.tolist()[1] == [1.0, 1.0]
    assert rows.payloads[:2] == [
        {"when": "1970-01-01T00:00:00", "tags": ["a", "b"], "kind": "x"},
        {"when": "1970-01-01T00:00:01", "tags": ["a", "b"], "n": 1, "kind": "y"},
    ]


@pytest.mark.parametrize("suffix", [None, ".parquet"])
def test_a_table_has_the_columns_that_insert_takes(suffix: str | None, tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas").DataFrame(
        {"id": ["a"], "vector": [[1.0, 2.0]], "text": ["an ant"], "value": [[7.0, 8.0]], "n": [3]}
    )
    source: Any = frame if suffix is None else tmp_path / f"frame{suffix}"
    if suffix is not None:
        frame.to_parquet(source)
    (rows,) = read_records(source, fields={"value": "value"})
    assert (rows.ids, rows.keys.tolist(), rows.texts) == (["a"], [[1.0, 2.0]], ["an ant"])
    assert (rows.values.tolist(), rows.payloads) == ([[7.0, 8.0]], [{"n": 3}])
    (rows,) = read_records(source, fields={"id": "text", "text": None})
    assert (rows.ids, rows.texts, rows.payloads[0]["id"]) == (["an ant"], [None], "a")
    (rows,) = read_records(source, fields=Fields(key="vector"))  # `Fields` name all columns
    assert (rows.texts, rows.payloads[0]["text"]) == ([None], "an ant")
    for fields, message in (
        ({"id": "nope"}, "no column 'nope' for the id"),
        ({"k": "x"}, "expected a dict from id"),
    ):
        with pytest.raises(softdb.BadInput, match=message):
            list(read_records(source, fields=fields))


def test_a_frame_of_a_database_gives_its_records_back() -> None:
    pytest.importorskip("pandas")
    with softdb.open(None, dim=2) as db, softdb.open(None, dim=2) as new:
        db.insert(["a", "b"], np.eye(2), payloads=[{"x": 1}, {"y": "z"}], texts=["an ant", None])
        assert import_records(new, db.to_pandas()) == 2
        assert everything(new)[1] == everything(db)[1]


def test_a_payload_may_be_a_struct_beside_a_text() -> None:
    payloads = [{"a": 1}, None]
    struct = pa.table({"id": [1, 2], "key": [[1.0, 2.0]] * 2, "text": ["t", "u"], "payload": payloads})
    with softdb.open(None) as db:
        db.insert(struct)
        assert db.get([1, 2]).payloads == payloads


KEYS = [[float(i), 1.0] for i in range(N)]
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("ragged", {"key": [*KEYS[:33], [1.0], *KEYS[34:]]}, "row 33: column 'key' has 1 numbers, 2 in the rows before"),
    ("null within", {"key": [*KEYS[:33], [1.0, None], *KEYS[34:]]}, "row 33: column 'key' holds null"),
    ("null", {"key": [*KEYS[:33], None, *KEYS[34:]]}, "row 33: column 'key' is null; expected numbers"),
    ("NaN", {"key": [*KEYS[:33], [1.0, np.nan], *KEYS[34:]]}, "row 33: insert: keys hold NaN or infinity"),
    ("no id", {"id": [*range(33), None, *range(34, N)]}, "row 33: column 'id' is None; an id is a str or an int"),
    (
        "large id",
        {"id": pa.array([*range(33), 2**63, *range(34, N)], "uint64")},
        "row 33: insert: id 9223372036854775808 needs more",
    ),
    ("id twice", {"id": [*range(33), 0, *range(34, N)]}, "row 33: insert: id 0 is stored already"),
    ("bytes", {"n": [*[None] * 33, b"x", *[None] * 16]}, "row 33: insert: field 'n' of payload 0 holds a bytes"),
]


@pytest.mark.parametrize(("changed", "message"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_a_bad_row_is_named_or_skipped(changed: dict[str, Any], message: str) -> None:
    with softdb.open(None, dim=2) as db, softdb.open(None, dim=2) as other:
        with pytest.raises(softdb.BadInput, match=f"the table {message}.*; the 33 records before are in the database"):
            import_records(db, read_records(table(**changed), batch_size=20))
        assert len(db) == 33
        reports = list[str]()
        source = read_records(table(**changed), batch_size=20, on_error=lambda error: reports.append(str(error)))
        assert import_records(other, source, on_error=lambda error: reports.append(str(error))) == N - 1 == len(other)
        assert len(reports) == 1
        assert message in reports[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": ["[1, 2]"] * N}, "the table: column 'key' is of type 'string'; expected lists of numbers"),
        ({"key": [["1"]] * N}, r"the table: column 'key' is of type .list<item: string>'; expected lists of num"),
        ({"key": None}, r"the table has no column 'key' for the key; its columns are \['id', 'when',"),
        ({"id": None}, r"the table has no column 'id' for the id; its columns are \['key', 'when',"),
    ],
)
def test_a_column_that_cannot_serve_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(softdb.BadInput, match=message):
        list(read_records(table(**changed)))


def test_broken_files_are_named_and_earlier_records_stay(tmp_path: Path) -> None:
    import pyarrow.parquet

    random = np.random.default_rng(0)
    keys = pa.FixedSizeListArray.from_arrays(pa.array(random.normal(size=16_000)), 8)
    whole, file = pa.table({"id": range(2000), "key": keys}), tmp_path / "r.parquet"
    pyarrow.parquet.write_table(whole, file, row_group_size=500, write_page_checksum=True)
    data = bytearray(file.read_bytes())
    data[len(data) * 6 // 10] ^= 0xFF
    file.write_bytes(data)
    error = fails("import", tmp_path / "db", file, "--batch-size", 200)
    assert "r.parquet cannot be read after row 999 (" in error
    assert "the 1000 records before are in the database" in error
    assert error.count("\n") <= 1
    file.write_bytes(data[: len(data) // 2])
    assert "r.parquet cannot be read as a table (" in fails("import", tmp_path / "new", file)
    (tmp_path / "r.arrow").write_bytes(b"ARROW1" + bytes(100))
    assert "r.arrow cannot be read as a table (" in fails("import", tmp_path / "new", tmp_path / "r.arrow")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_no_lance_table_is_named(tmp_path: Path) -> None:
    pytest.importorskip("lance", reason="Lance tables need pylance")
    (tmp_path / "r.lance").mkdir()
    assert "r.lance cannot be read as a table (" in fails("import", tmp_path / "new", tmp_path / "r.lance")
    assert not (tmp_path / "new").exists()


def test_rows_may_be_numbered_skipped_and_repeated_across_files(tmp_path: Path) -> None:
    import pyarrow.parquet

    for name, keys in (("a", KEYS), ("b", [*KEYS[:7], [1.0, np.inf], *KEYS[8:]])):
        pyarrow.parquet.write_table(table(key=keys), tmp_path / f"{name}.parquet")
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    assert "b.parquet row 0: insert: id 'r0' is stored already" in fails("import", tmp_path / "db", *files)
    done = run("import", tmp_path / "one", files[1], "--row-ids", "--on-error", "skip")
    assert done.stdout.startswith(f"{N - 1} records imported, 1 bad row skipped, {N - 1} in")
    assert "skipped: b.parquet row 7: insert: keys hold NaN" in done.stderr
    assert answer("info", tmp_path / "one")["records"] == N - 1
    actual = run("import", tmp_path / "db", files[0], "--on-error", "skip", code=1).stderr.splitlines()
    assert len(actual) == 21
    assert "no record of" in actual[-1]
    assert "50 bad rows skipped" in actual[-1]


# -- files of vectors, and CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".fvecs", ".fbin", ".hdf5"])
def test_vectors_go_out_and_come_back(tmp_path: Path, suffix: str) -> None:
    if suffix == ".hdf5":
        pytest.importorskip("h5py", reason="HDF5 needs h5py")
    keys = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    file, notes = tmp_path / f"k{suffix}", list[str]()
    with holding(keys, np.arange(40) % 9, ids=range(100, 140), num_classes=9, metric="l2") as db:
        assert export_records(db, file, batch_size=7, note=notes.append) == 40
        db.insert(["x"], texts=["no key"])
        with pytest.raises(softdb.BadInput, match=f"record 'x' has no key, which {suffix} cannot hold"):
            export_records(db, tmp_path / f"no{suffix}", note=notes.append)
    assert notes[0].startswith(f"{suffix} carries no payloads, texts")
    parts = list(read_records(file, batch_size=9))
    assert np.concatenate([part.keys for part in parts]).tobytes() == keys.tobytes()
    more = suffix in (".npz", ".safetensors")
    assert [name for part in parts for name in part.ids] == list(range(100, 140) if more else range(40))
    assert not more or [value for part in parts for value in part.values] == [i % 9 for i in range(40)]
    header = parts[0].header
    assert (None if header is None else header.metric) == ("l2" if suffix in (".safetensors", ".hdf5") else None)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_other_libraries_read_our_files_and_we_read_theirs(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="to compare with safetensors")
    import torch
    from safetensors.torch import save_file

    keys = torch.randn(20, 4).to(torch.bfloat16)
    save_file({"embeddings": keys, "bias": torch.zeros(3)}, tmp_path / "b.safetensors")
    (rows,) = read_records(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(rows.keys, keys.float().numpy())
    with softdb.open(None, dim=4, dtype="float16") as db:
        import_records(db, tmp_path / "b.safetensors")
        export_records(db, tmp_path / "k.safetensors", note=lambda text: None)
        np.testing.assert_array_equal(numpy.load_file(tmp_path / "k.safetensors")["keys"], db.get(range(20)).keys)
    for broken in (b"", bytes(8), b"\x10" + bytes(7) + b'{"keys":{"dtype"', b"\xff" * 99, b"\x02" + bytes(7) + b"[]"):
        (tmp_path / "b.safetensors").write_bytes(broken)
        with pytest.raises(softdb.BadInput, match=r"b.safetensors (cannot be read as safetensors|holds \[\])"):
            read_records(tmp_path / "b.safetensors")


def test_csv_reports_the_columns_it_cannot_carry(tmp_path: Path) -> None:
    with softdb.open(None, dim=2, value_dim=1) as db, softdb.open(None, dim=2, value_dim=1) as new:
        db.insert(["a", "b"], [[0.1, 2], None], [[3], None], [{"x": 'a "b", c'}, "7"], texts=["line\nline", None])
        notes = list[str]()
        assert export_records(db, tmp_path / "r.csv", note=notes.append) == 2
        assert notes == [".csv carries no metric, types of ids, declared fields or encoder; texts must not be empty"]
        import_records(new, tmp_path / "r.csv")
        assert everything(new) == everything(db)
        db.insert(["c"], [[1, 2]], [[3]], texts=[""])
        with pytest.raises(softdb.BadInput, match="record 'c' has an empty id or text"):
            export_records(db, tmp_path / "s.csv", note=notes.append)
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]


def test_a_packed_table_and_a_field_for_the_text(tmp_path: Path) -> None:
    (tmp_path / "r.parquet.gz").touch()
    with pytest.raises(softdb.BadInput, match=r"r.parquet.gz is a packed .parquet file; unpack it first"):
        read_records(tmp_path / "r.parquet.gz")
    (rows,) = read_records(table(), fields=Fields(text="kind"))
    assert rows.keys[:2] == rows.texts[:2] == ["x", "y"]
    assert "kind" not in rows.payloads[0]


LARGE = """
import re, sys
import softdb
from softdb.formats import export_records, import_records

def anonymous():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]) / 1024

grown = []
with softdb.open(sys.argv[1], dim=128) as db:
    import_records(db, sys.argv[2], progress=lambda rows: grown.append(anonymous()))
    export_records(db, sys.argv[3], progress=lambda done, whole: grown.append(anonymous()))
print(max(grown) - grown[0])
"""


@pytest.mark.slow
def test_a_file_of_one_row_group_is_read_and_written_in_constant_memory(tmp_path: Path) -> None:
    import subprocess
    import sys

    import pyarrow.parquet

    random, n = np.random.default_rng(0), 300_000
    keys = pa.FixedSizeListArray.from_arrays(pa.array(random.random(n * 128, dtype=np.float32)), 128)
    whole = pa.table({"id": pa.array(range(n)), "key": keys})
    pyarrow.parquet.write_table(whole, tmp_path / "r.parquet", row_group_size=n)
    words = [sys.executable, "-c", LARGE, *(str(tmp_path / name) for name in ("db", "r.parquet", "out.parquet"))]
    grown = float(subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert grown < 100  # MB, of 150 in the file
