"""Exports come back through imports; a bad line is named, and records before it stay."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import holding

import softdb
from softdb.formats import Fields, Header, Rows, export_records, import_records, read_header, read_records
from softdb.text import HashedNGrams


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def rows(name: str, *keys: float, **more: Any) -> dict[str, Any]:
    return {"id": name, "key": list(keys), **more}


def only_batch(path: Path, **arguments: Any) -> Rows:
    (found,) = read_records(path, **arguments)
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def test_json_lines_become_records(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows("a", 1, 2.5, year=1990), "", {"key": [3, 4], "id": 7})
    actual = only_batch(path)
    assert (actual.ids, actual.keys, actual.lines) == (["a", 7], [[1, 2.5], [3, 4]], [1, 3])
    assert actual.payloads == [{"year": 1990}, None]
    assert actual.values is None
    assert actual.share == 1


def test_fields_can_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"name": "a", "vector": [1], "label": 3, "id": "kept"})
    actual = only_batch(path, fields=Fields(id="name", key="vector", value="label"))
    assert (actual.ids, actual.keys, actual.values, actual.payloads) == (["a"], [[1]], [3], [{"id": "kept"}])


def test_a_text_is_the_key_and_the_text_of_the_record(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"id": 1, "name": "Schulz", "first": "Lisa"})
    actual = only_batch(path, fields=Fields(text="name"))
    assert (actual.keys, actual.texts, actual.payloads) == (["Schulz"], ["Schulz"], [{"first": "Lisa"}])


def test_a_field_called_payload_alone_is_the_payload(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows("a", 1, payload=[1, None]), rows("b", 1, payload=2, more=3))
    assert only_batch(path).payloads == [[1, None], {"payload": 2, "more": 3}]


def test_batches_have_the_requested_size(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *(rows(str(i), i) for i in range(7)))
    batches = list(read_records(path, batch_size=3))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [name for batch in batches for name in batch.ids] == [str(i) for i in range(7)]


def test_gzip_is_detected_and_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(rows("a", 1)).encode()))
    assert only_batch(path).ids == ["a"]


def test_csv_cells_are_typed_and_ids_are_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.csv",
        "id,key,year,zip,draft,note,big",
        '1,"[1, 2]",1990,00123,true,"two\nlines, quoted",1e400',
        '002,"[3, 4e0]",-1.5,7,no,,',
    )
    actual = only_batch(path)
    assert (actual.ids, actual.keys, actual.lines) == (["1", "002"], [[1, 2], [3, 4.0]], [3, 4])
    expected = {"year": 1990, "zip": "00123", "draft": True, "note": "two\nlines, quoted", "big": "1e400"}
    assert actual.payloads == [expected, {"year": -1.5, "zip": 7, "draft": "no"}]


def test_csv_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_bytes(b"\xef\xbb\xbfid,name\r\na,Schulz\r\n")
    assert only_batch(tmp_path / "r.csv", fields=Fields(text="name")).ids == ["a"]


@pytest.mark.parametrize("kind", ["npy", "npz", "named"])
def test_keys_may_lie_beside_the_lines(tmp_path: Path, kind: str) -> None:
    vectors = np.arange(6, dtype=np.float16).reshape(3, 2)
    keys = tmp_path / f"keys.{'npy' if kind == 'npy' else 'npz'}"
    if kind == "npy":
        np.save(keys, vectors)
    elif kind == "npz":
        np.savez(keys, anything=vectors)
    else:
        np.savez(keys, keys=vectors, other=vectors[:1])
    path = write(tmp_path / "r.jsonl", {"id": "a", "key": "of the door"}, "", {"id": "b"}, {"id": "c"})
    batches = list(read_records(path, keys=keys, batch_size=2))
    np.testing.assert_array_equal(np.concatenate([batch.keys for batch in batches]), vectors)
    assert batches[0].payloads[0] == {"key": "of the door"}


def test_keys_alone_are_numbered(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.eye(5))
    first, second = read_records(tmp_path / "k.npy", batch_size=3)
    assert (first.ids, second.ids) == ([0, 1, 2], [3, 4])
    np.testing.assert_array_equal(second.keys, np.eye(5)[3:])
    assert second.share == 1


# -- unreadable files --------------------------------------------------------------------------------------------------

BAD = [
    ("{", r"r.jsonl line 3: not JSON \(Expecting property name"),
    ('{"id": "x", "key": [NaN]}', "r.jsonl line 3: not JSON .NaN is not a JSON number"),
    ("[" * 100_000, "r.jsonl line 3: not JSON"),
    ("[1, 2]", r"r.jsonl line 3: \[1, 2\]; expected an object"),
    ('{"key": [1]}', r"r.jsonl line 3: no field 'id' for the id; its fields are \['key'\]"),
    ('{"id": "x"}', r"r.jsonl line 3: no field 'key' for the key; its fields are \[\]"),
    ('{"id": true, "key": [1]}', "r.jsonl line 3: id True is of type bool"),
    ('{"id": 1e3, "key": [1]}', r"r.jsonl line 3: id 1000\.0 is of type float"),
    ('{"id": 9223372036854775808, "key": [1]}', "r.jsonl line 3: id 9223372036854775808 needs more than 64 bits"),
    ('{"id": "\\ud800", "key": [1]}', "r.jsonl line 3: an id holds the lone surrogate"),
    ('{"id": "x", "key": "1"}', "r.jsonl line 3: field 'key' is '1'; expected a list of numbers"),
    ('{"id": "x", "key": []}', r"r.jsonl line 3: field 'key' is \[\]; expected a list of numbers"),
    ('{"id": "x", "key": ["1"]}', r"r.jsonl line 3: field 'key' is \['1'\]; expected a list of numbers"),
    ('{"id": "x", "key": [true]}', r"r.jsonl line 3: field 'key' is \[True\]; expected a list of numbers"),
    ('{"id": "x", "key": [1e999]}', r"r.jsonl line 3: field 'key' is \[inf\]; expected a list of numbers"),
    ('{"id": "x", "key": [1, 2]}', "r.jsonl line 3: field 'key' has 2 numbers, 1 in the lines before"),
    ('{"id": "x", "key": [1], "p": ' + "[" * 80 + "]" * 80 + "}", "r.jsonl line 3: the payload nests deeper than 64"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line[:28] for line, _ in BAD])
def test_a_bad_line_is_named_and_earlier_records_stay(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "r.jsonl", rows("a", 1), rows("b", 2), line, rows("c", 3))
    with softdb.open(None, dim=1) as db:
        with pytest.raises(softdb.BadInput, match=message + ".*; the 2 records before are in the database"):
            import_records(db, read_records(path))
        assert db.get(["a", "b"]).keys.tolist() == [[1], [2]]
        assert len(db) == 2


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"id": "a", "key": [1]}\n{"id": "\xff", "key": [1]}\n')
    batches = read_records(tmp_path / "r.jsonl")
    assert next(batches).ids == ["a"]
    with pytest.raises(softdb.BadInput, match=r"r.jsonl line 2: not UTF-8"):
        next(batches)


@pytest.mark.parametrize("cut", [5, 60, -4])
def test_a_cut_gzip_file_is_named(tmp_path: Path, cut: int) -> None:
    lines = "".join(json.dumps(rows(str(i), i)) + "\n" for i in range(100))
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(lines.encode())[:cut])
    with pytest.raises(softdb.BadInput, match=r"r.jsonl.gz line \d+: cannot be decompressed"):
        list(read_records(tmp_path / "r.jsonl.gz"))


def test_a_false_gzip_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl.gz").write_text("{}\n")
    with pytest.raises(softdb.BadInput, match=r"r.jsonl.gz line 1: cannot be decompressed"):
        list(read_records(tmp_path / "r.jsonl.gz"))


def test_malformed_csv_is_named(tmp_path: Path) -> None:
    short = write(tmp_path / "short.csv", "id,key,name", '1,"[1]",a', '2,"[1]"')
    with pytest.raises(softdb.BadInput, match=r"short.csv line 3: 2 cells, 3 in the header"):
        list(read_records(short))
    quote = write(tmp_path / "quote.csv", "id,key", '1,"[1]"x')
    with pytest.raises(softdb.BadInput, match=r"quote.csv line 2: not CSV"):
        list(read_records(quote))
    key = write(tmp_path / "key.csv", "id,key", '1,"[1"')
    with pytest.raises(softdb.BadInput, match=r"key.csv line 2: field 'key' is '\[1'; expected a list of numbers"):
        list(read_records(key))


def test_a_text_field_must_hold_text(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"id": 1, "nam": "Schulz"})
    with pytest.raises(
        softdb.BadInput, match=r"line 1: field 'name' is None, not a text; its fields are \['id', 'nam'\]"
    ):
        list(read_records(path, fields=Fields(text="name")))


def test_files_that_cannot_serve_are_named(tmp_path: Path) -> None:
    with pytest.raises(softdb.BadInput, match=r"nothing.jsonl does not exist"):
        read_records(tmp_path / "nothing.jsonl")
    with pytest.raises(softdb.BadInput, match=r"is not a file"):
        read_records(tmp_path)
    with pytest.raises(softdb.BadInput, match=r"r.txt has a name of no known kind; expected .jsonl"):
        read_records(write(tmp_path / "r.txt", "{}"))
    with pytest.raises(softdb.BadInput, match=r"batch_size is 0; expected a whole number"):
        read_records(write(tmp_path / "r.jsonl", "{}"), batch_size=0)


def test_keys_that_cannot_serve_are_named(tmp_path: Path) -> None:
    path, keys = write(tmp_path / "r.jsonl", {"id": "a"}, {"id": "b"}), tmp_path / "k.npy"
    with pytest.raises(softdb.BadInput, match=r"k.npy cannot be read as an array of numbers \(no such file\)"):
        read_records(path, keys=keys)
    np.save(keys, np.eye(3))
    with pytest.raises(softdb.BadInput, match=r"k.npy has 3 keys but r.jsonl has 2 records"):
        read_records(path, keys=keys)
    with pytest.raises(softdb.BadInput, match=r"k.npy holds keys itself"):
        read_records(keys, keys=keys)
    np.save(keys, np.arange(3))
    with pytest.raises(softdb.BadInput, match=r"k.npy has shape \(3,\) and type int64; expected \(n, d\) numbers"):
        read_records(path, keys=keys)
    np.save(keys, np.array([[{}]]), allow_pickle=True)
    with pytest.raises(softdb.BadInput, match=r"k.npy cannot be read as an array of numbers"):
        read_records(path, keys=keys)
    keys.write_text("no array")
    with pytest.raises(softdb.BadInput, match=r"k.npy cannot be read as an array of numbers"):
        read_records(path, keys=keys)
    np.savez(tmp_path / "k.npz", a=np.eye(2), b=np.eye(2))
    with pytest.raises(softdb.BadInput, match=r"k.npz holds \['a', 'b'\]; expected one array, or one called keys"):
        read_records(path, keys=tmp_path / "k.npz")
    (tmp_path / "k.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(softdb.BadInput, match=r"k.npz cannot be read as an array of numbers"):
        read_records(path, keys=tmp_path / "k.npz")


# -- into a database and out again -------------------------------------------------------------------------------------


def test_an_import_reports_its_progress_and_its_texts_are_encoded(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl", *({"id": i, "name": name} for i, name in enumerate(["Schulz", "Weber", "Schuler"]))
    )
    seen: list[int] = []
    with softdb.open(None, encoder=HashedNGrams()) as db:
        batches = read_records(path, fields=Fields(text="name"), batch_size=2)
        assert import_records(db, batches, progress=lambda batch: seen.append(len(batch))) == 3
        assert seen == [2, 1]
        assert db.search("Schulz", k=2).ids == [[0, 2]]


def test_an_id_that_is_stored_stops_an_import_between_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows("a", 1), rows("b", 2), rows("a", 3), rows("c", 4))
    with softdb.open(None, dim=1) as db:
        message = r"r.jsonl line 3: insert: id 'a' is stored already.*; the 2 records before are in the database"
        with pytest.raises(softdb.DuplicateId, match=message):
            import_records(db, read_records(path, batch_size=2))
        assert len(db) == 2
        assert import_records(db, read_records(path, batch_size=2), upsert=True) == 4
        assert db.get(["a", "b", "c"]).keys.tolist() == [[3], [2], [4]]


def test_a_key_of_the_wrong_width_stops_an_import(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", rows("a", 1, 2))
    with softdb.open(None, dim=3) as db, pytest.raises(softdb.BadInput, match=r"r.jsonl line 1: insert: keys are 2"):
        import_records(db, read_records(path))


PAYLOADS: list[Any] = [None, {}, {"payload": 1}, [], "text", 0, False, {"ü": "日本\n", "deep": [{"a": [1.5, None]}]}]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("value", ["none", "vector", "label"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_exported_records_come_back_unchanged(tmp_path: Path, dtype: Any, value: str, name: str) -> None:
    rng, n = np.random.default_rng(0), len(PAYLOADS)
    ids: list[int | str] = ["a", 1, "1", -(2**63), "ü", "", 'quote"', "last"]
    values = {"none": None, "vector": rng.normal(size=(n, 2)), "label": rng.integers(0, 5, n)}[value]
    shape: dict[str, Any] = {"none": {}, "vector": {"value_dim": 2}, "label": {"num_classes": 5}}[value]
    with softdb.open(None, dim=3, dtype=dtype, **shape) as db, softdb.open(None, dim=3, dtype=dtype, **shape) as copy:
        db.insert(ids, rng.normal(size=(n, 3)), values, PAYLOADS)
        assert export_records(db, tmp_path / name, batch_size=3) == n
        fields = Fields(value=None if value == "none" else "value")
        assert import_records(copy, read_records(tmp_path / name, fields=fields, batch_size=5)) == n
        before, after = db.get(ids), copy.get(ids)
        assert before.keys.equal(after.keys)
        assert before.payloads == after.payloads == PAYLOADS
        assert [type(payload) for payload in after.payloads] == [type(payload) for payload in PAYLOADS]
        assert before.values is after.values is None or before.values.equal(after.values)  # type: ignore[union-attr, arg-type]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_export_may_be_filtered_and_must_be_json_lines(tmp_path: Path) -> None:
    with holding([[1], [2]], payloads=[{"year": 1}, {"year": 2}], ids=["a", "b"]) as db:
        assert export_records(db, tmp_path / "r.jsonl", where={"year": 2}) == 1
        header, line = (tmp_path / "r.jsonl").read_text().splitlines()
        assert json.loads(header).keys() == {"softdb"}
        assert json.loads(line) == {"id": "b", "key": [2.0], "payload": {"year": 2}}
        with pytest.raises(softdb.BadInput, match=r"r.txt has a name of no known kind; end it in .jsonl"):
            export_records(db, tmp_path / "r.txt")


def test_an_export_has_the_schema_in_its_header(tmp_path: Path) -> None:
    with holding([[1, 2]], [[3]], [{"softdb": {}}], ids=["a"], dtype="float16", metric="cosine") as db:
        db.index_field("year")
        db.core.store.note_encoder("ngrams")
        export_records(db, tmp_path / "r.jsonl.gz")
    header = read_header(tmp_path / "r.jsonl.gz")
    assert header == Header(2, 1, None, "float16", "cosine", ("year",), "ngrams")
    assert header is not None
    with softdb.open(None, **header.schema) as copy:
        assert import_records(copy, read_records(tmp_path / "r.jsonl.gz")) == 1  # the values, too
        assert copy.get(["a"]).values.tolist() == [[3.0]]  # type: ignore[union-attr]
        assert copy.get(["a"]).payloads == [{"softdb": {}}]


def test_an_export_of_another_metric_is_refused(tmp_path: Path) -> None:
    with holding([[1, 2]], ids=["a"], metric="cosine") as db:
        export_records(db, tmp_path / "r.jsonl")
    with softdb.open(None, dim=2, metric="l2") as other:
        with pytest.raises(softdb.BadInput, match="a database with the metric cosine, but this one has l2"):
            import_records(other, read_records(tmp_path / "r.jsonl"))
        assert len(other) == 0


def test_keys_beside_an_export_go_with_its_records(tmp_path: Path) -> None:
    with holding([[1, 2], [3, 4]], ids=["a", "b"]) as db:
        export_records(db, tmp_path / "r.jsonl")
        np.save(tmp_path / "k.npy", np.array([[5, 6], [7, 8]], np.float32))
        rows = next(read_records(tmp_path / "r.jsonl", keys=tmp_path / "k.npy"))
    assert rows.ids == ["a", "b"]
    assert np.array(rows.keys).tolist() == [[5, 6], [7, 8]]


GOOD: dict[str, Any] = {
    "dim": 2, "value_dim": None, "num_classes": None, "dtype": "float32", "metric": "dot", "fields": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "said", [5, [], {}, {"dim": 2}, {**GOOD, "dtype": "int8"}, {**GOOD, "fields": [1]}, {**GOOD, "more": 1}]
)
def test_a_malformed_header_is_named(tmp_path: Path, said: object) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps({"softdb": said}) + '\n{"id": 1, "key": [1, 2]}\n')
    with pytest.raises(softdb.BadInput, match=r"r\.jsonl line 1: not the header of an export"):
        next(read_records(tmp_path / "r.jsonl"))


def test_a_record_with_a_field_of_that_name_is_a_record(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"id": 1, "key": [1, 2], "softdb": 1}\n')
    assert read_header(tmp_path / "r.jsonl") is None
    assert next(read_records(tmp_path / "r.jsonl")).payloads == [{"softdb": 1}]


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_an_export_follows_no_link_that_lies_in_its_way(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"{name}.tmp").symlink_to(tmp_path / "mine")
    with holding([[1]], ids=["a"]) as db:
        export_records(db, tmp_path / name)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / name).is_symlink()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow", "a.npz", "a.npy"])
def test_a_failed_export_raises_a_softdb_error_and_leaves_no_file(tmp_path: Path, name: str) -> None:
    with holding(np.random.default_rng(1).normal(size=(500, 64))) as db:
        (tmp_path / name).write_bytes(b"what was there")
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # a full disk, as a write sees it
        try:
            with pytest.raises(softdb.WriteFailed, match=f"{name} cannot be written .*nothing has changed"):
                export_records(db, tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        assert export_records(db, tmp_path / name) == 500
