"""Training a projection: files of pairs and projections, and the command."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding
from worlds.trainings import SMALL, D, M, N, keys_of, run, world

import softdb
import softdb.train.projection
from softdb.errors import BadInput
from softdb.text import HashedNGrams
from softdb.train import Pairs, QueryProjection, fit, load, read_pairs, save

# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_pairs_of_json_lines(name: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / name, {"query": [1, 2.5], "positives": [7, "7", 7]}, "", {"positives": "a", "query": [0, 1]}
    )
    actual = read_pairs(path)
    assert (actual.queries, actual.positives, actual.lines) == ([[1, 2.5], [0, 1]], [[7, "7"], ["a"]], [1, 3])
    assert not actual.is_text


@pytest.mark.parametrize(("name", "mark"), [("p.csv", ","), ("p.tsv", "\t"), ("p.csv.gz", ",")])
def test_pairs_of_tables(name: str, mark: str, tmp_path: Path) -> None:
    rows = [("asked", "more", "found"), ("1984", "x", "7"), ("a horse", "", '"[7, ""b""]"'), ("c", "1", "a")]
    actual = read_pairs(write(tmp_path / name, *(mark.join(row) for row in rows)), query="asked", positives="found")
    assert (actual.queries, actual.positives) == (["1984", "a horse", "c"], [["7"], [7, "b"], ["a"]])
    assert actual.is_text
    assert actual.lines == [2, 3, 4]


def test_numbers_in_tables_and_queries_from_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "query,positives", '"[1, 2]",a', '"[3, 4]",b')
    assert read_pairs(path).queries == [[1, 2], [3, 4]]
    array = np.ones((2, 5))
    only = write(tmp_path / "p.jsonl", {"positives": 1}, {"positives": [2]})
    assert read_pairs(only, queries=array).queries is array
    assert read_pairs(only, queries=array).positives == [[1], [2]]
    with pytest.raises(BadInput, match=r"p\.csv line 2: field 'query' is a query, but queries are given, too"):
        read_pairs(path, queries=array)
    for bad in (np.ones(()), np.ones(2), np.ones((2, 1, 1))):
        with pytest.raises(BadInput, match=r"queries have shape \(.*\); expected \(m, d\) numbers"):
            read_pairs(only, queries=bad)
    wide = write(tmp_path / "wide.csv", "query,positives", f'"{[1.25] * 40_000}"," [""r1""]"')
    actual = read_pairs(wide)
    assert (len(actual.queries[0]), actual.positives) == (40_000, [["r1"]])
    with pytest.raises(BadInput, match=r"5 queries but p\.jsonl has 2 lines"):
        read_pairs(only, queries=np.ones((5, 2)))


def test_ids_of_a_table_become_ids_of_the_database(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "query,positives", "x,7", "x,8", 'x,"[8, ""8""]"')
    with holding([[1], [2], [3], [4]], ids=["7", 7, 8, "8"]) as db:
        pairs = read_pairs(path)
        pairs.resolve(db)
        assert pairs.positives == [["7"], ["8"], [8, "8"]]
        db.delete(["7", "8"])
        pairs = read_pairs(write(path, "query,positives", "x,7", "x,8"))
        pairs.resolve(db)
        assert pairs.positives == [[7], [8]]
        pairs = read_pairs(write(tmp_path / "p.jsonl", {"query": "x", "positives": "7"}))
        with pytest.raises(BadInput, match=r"'7' \(p\.jsonl line 1\)"):  # typed: 7 and "7" differ
            pairs.resolve(db)
        pairs = read_pairs(write(path, "query\tpositives".replace("\t", ","), 'x,"r1, r2"'))
        with pytest.raises(BadInput, match=r"'r1, r2' \(p\.csv line 2\); insert .*; write several ids as a JSON list"):
            pairs.resolve(db)
        pairs = read_pairs(write(tmp_path / "p.jsonl", "", {"query": [1, 2], "positives": 8}))
        with pytest.raises(BadInput, match=r"p\.jsonl line 2: the query has 2 numbers but this database is 1 wide"):
            pairs.resolve(db)
        huge = Pairs(["x"], [["9" * 19]], [5], "p.csv", False)
        with pytest.raises(BadInput, match=r"'9999999999999999999' \(p\.csv line 5\)"):
            huge.resolve(db)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("p.jsonl", ['{"query": "a", "positives": 1}', "{"], r"p\.jsonl line 2: not JSON"),
        ("p.jsonl", ["[1]"], r"p\.jsonl line 1: \[1\]; expected an object"),
        ("p.jsonl", ['{"positives": 1}'], r"p\.jsonl line 1: no field 'query'; its fields are \['positives'\]"),
        ("p.jsonl", ['{"query": "a"}'], "line 1: no field 'positives'"),
        ("p.jsonl", ['{"query": "a", "positives": []}'], r"line 1: field 'positives' is \[\]; expected an id"),
        ("p.jsonl", ['{"query": "a", "positives": 1.5}'], "line 1: field 'positives' is 1.5"),
        ("p.jsonl", ['{"query": "a", "positives": [true]}'], "line 1: id True is of type bool"),
        ("p.jsonl", ['{"query": " ", "positives": 1}'], "line 1: field 'query' is ' '; expected a text or a list"),
        ("p.jsonl", ['{"query": [], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1, "a"], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1' + "0" * 400 + '], "positives": 1}'], "line 1: field 'query'"),
        ("p.jsonl", ['{"query": [1], "positives": 1}', '{"query": "a", "positives": 1}'], "line 2: texts and lists"),
        ("p.jsonl", ['{"query": [1], "positives": 1}', '{"query": [1, 2], "positives": 1}'], "2: .* 2 numbers but"),
        ("p.jsonl", [], "holds no pairs"),
        ("p.csv", ["query,positives"], "holds no pairs"),
        ("p.csv", ["query,positives", "a,[1"], r"line 2: '\[1' begins with \[ but is not a JSON list"),
        ("p.csv", ["query,positives", "a,b,c"], "line 2: 3 cells, 2 in the header"),
        ("p.csv", ["query,positives", "a,"], "line 2: field 'positives': the cell is empty"),
        ("p.txt", ["x"], "has a name of no known kind"),
        ("none.jsonl", None, "none.jsonl does not exist"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(name: str, lines: list[str] | None, message: str, tmp_path: Path) -> None:
    if lines is not None:
        write(tmp_path / name, *lines)
    with pytest.raises(BadInput, match=message):
        read_pairs(tmp_path / name)


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_survives_its_file(bias: bool, tmp_path: Path) -> None:
    projection = QueryProjection(3, bias)
    assert torch.equal(projection(torch.eye(3)), torch.eye(3))
    torch.manual_seed(0)
    for parameter in projection.parameters():
        torch.nn.init.normal_(parameter)
    save(tmp_path / "p.pt", projection, {"seed": 7})
    back = load(tmp_path / "p.pt")
    assert torch.equal(back(torch.ones(2, 3)), projection(torch.ones(2, 3)))
    assert back.metadata == {"seed": 7}
    content = torch.load(tmp_path / "p.pt", weights_only=True)
    plain = torch.nn.Linear(3, 3, bias)
    plain.load_state_dict(content["state_dict"])
    assert torch.equal(plain(torch.ones(2, 3)), projection(torch.ones(2, 3)))


def test_files_that_hold_no_projection(tmp_path: Path) -> None:
    states = {
        "flat": {"weight": torch.ones(2, 3)},
        "nan": {"weight": torch.eye(2) / 0},
        "x": {"weight": torch.eye(2), "x": torch.eye(2)},
    }
    for name, state in states.items():
        torch.save({"format": "softdb projection 1", "state_dict": state}, tmp_path / f"{name}.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "linear.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    parts: list[dict[str, Any]] = [
        {"weight": torch.eye(2, dtype=torch.int64)}, {"weight": torch.zeros(0, 0)}, {"weight": torch.eye(2), "bias": 1},
        {"weight": torch.eye(2), "bias": torch.ones(3)}, {"weight": torch.ones(2)}, {"weight": torch.tensor(1.0)}, {},
    ]  # fmt: skip
    for part in parts:
        torch.save({"format": "softdb projection 1", "state_dict": part}, tmp_path / "part.pt")
        with pytest.raises(BadInput, match=r"part\.pt is not a projection that softdb train wrote"):
            load(tmp_path / "part.pt")
    for facts in ({"path": tmp_path}, {"loss": math.nan}):
        with pytest.raises(BadInput, match="metadata holds"):
            save(tmp_path / "meta.pt", QueryProjection(2), facts)
    assert not (tmp_path / "meta.pt").exists()
    for name, message in {
        "none": "is not there", "flat": "is not a projection", "nan": "holds NaN or infinity",
        "x": "is not a projection", "linear": "is not a projection", "empty": "cannot be read as a projection",
    }.items():  # fmt: skip
        with pytest.raises(BadInput, match=message):
            load(tmp_path / f"{name}.pt")
    with (
        softdb.open(None, dim=2) as db,
        pytest.raises(BadInput, match="expects queries of width 3, but the database has 2"),
    ):
        QueryProjection(3).of(db, [[1, 2]])


# -- the command -------------------------------------------------------------------------------------------------------


def fails(*arguments: object) -> str:
    (line,) = run(*arguments, code=1).stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Path]:
    """A database on disk and its pairs."""
    _, queries, positives = world()
    holding(keys_of(), ids=[f"r{i}" if i % 3 == 0 else i for i in range(N)], path=tmp_path / "db").close()
    rows = [
        {"query": query.tolist(), "positives": positive} for query, positive in zip(queries, positives, strict=True)
    ]
    return tmp_path / "db", write(tmp_path / "pairs.jsonl", *rows)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))  # SQLite's own, also for readers
    }


def test_the_command_trains_a_projection_that_others_use(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    before, out = digests(path), tmp_path / "p.pt"
    words = ("--lr", 0.02, "--batch-size", 64, "--epochs", 6, "--patience", 0)
    shown = run("train", path, pairs, "--out", out, *words).stdout
    assert digests(path) == before
    db, queries, positives = world()
    done = fit(db, queries, positives, **SMALL)
    projection = load(out)
    torch.testing.assert_close(projection.weight, done.projection.weight)
    table = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith(("recall", "MRR"))}
    assert table == {
        label: [f"{getattr(one, name):.3f}" for one in (done.before, done.after)] + ["fell"] * (name in done.fell)
        for name, label in (("recall_1", "recall@1"), ("recall_10", "recall@10"), ("mrr_100", "MRR@100"))
    }
    assert projection.metadata["pairs"] == M
    assert projection.metadata["after"] == done.after._asdict()
    query = json.dumps(queries[5].tolist())
    (hits,) = json.loads(run("search", path, query, "--projection", out, "--json").stdout)
    assert [hit["id"] for hit in hits] == db.search(projection(queries[5:6]), 10).ids[0]
    assert hits != json.loads(run("search", path, query, "--json").stdout)[0]
    (pooled,) = json.loads(run("attend", path, query, "--projection", out, "--json").stdout)
    torch.testing.assert_close(torch.tensor(pooled["lse"]), db.attend(projection(queries[5:6])).lse[0].detach())


def test_the_command_learns_the_temperature(stored: tuple[Path, Path], tmp_path: Path) -> None:
    (path, pairs), out = stored, tmp_path / "p.pt"
    words = ("--out", out, "--lr", 0.02, "--batch-size", 64, "--epochs", 6, "--patience", 0, "--temperature", "learn")
    done = fit(*world(), temperature="learn", **SMALL)
    report = json.loads(run("train", path, pairs, *words, "--json").stdout)
    assert report["temperature"] == pytest.approx(done.temperature)
    assert report["history"][-1]["temperature"] == pytest.approx(done.temperature)
    assert load(out).metadata["temperature"] == pytest.approx(done.temperature)
    shown = run("train", path, pairs, *words).stdout
    assert ["temperature", f"{done.temperature:.3f}"] in [line.split() for line in shown.splitlines()]
    refused = run("train", path, pairs, *words[:-1], "warm", code=1)
    assert "temperature is 'warm'; expected a finite number above 0, or \"learn\"" in " ".join(refused.output.split())


def test_the_command_resumes_and_speaks_json(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    words = ("--lr", 0.02, "--batch-size", 64, "--json", "--out")
    whole = json.loads(run("train", path, pairs, *words, tmp_path / "a.pt", "--epochs", 4).stdout)
    file = tmp_path / "run.ckpt"
    run("train", path, pairs, *words, tmp_path / "b.pt", "--epochs", 2, "--checkpoint", file)
    more = ("--epochs", 4, "--checkpoint", file, "--resume")
    again = json.loads(run("train", path, pairs, *words, tmp_path / "b.pt", *more).stdout)
    assert {**again, "projection": ""} == {**whole, "projection": ""}
    assert len(whole["history"]) == 4
    assert torch.equal(load(tmp_path / "a.pt").weight, load(tmp_path / "b.pt").weight)
    other = run("train", path, pairs, *words, tmp_path / "b.pt", *more, "--seed", 1, code=1)
    assert "another run: seed was 0 and is now 1" in json.loads(other.stderr)["error"]["message"]


def test_the_command_takes_texts_and_arrays(tmp_path: Path) -> None:
    words = ["Schumacher", "Weber", "Schuler", "Fischer", "Schneider", "Meyer", "Becker", "Wagner"]
    book = write(tmp_path / "book.jsonl", *({"id": i, "name": word} for i, word in enumerate(words)))
    run("import", tmp_path / "book", book, "--text", "name", "--encoder", "ngrams")
    asked = [(f"{word}{'x' * j}", i) for i, word in enumerate(words) for j in range(3)]
    table = write(tmp_path / "pairs.tsv", "query\tpositives", *(f"{text}\t{i}" for text, i in asked))
    common = ("--epochs", 1, "--patience", 0, "--json")
    one = json.loads(run("train", tmp_path / "book", table, "--out", tmp_path / "a.pt", *common).stdout)
    np.save(tmp_path / "q.npy", HashedNGrams()([text for text, _ in asked]))
    only = write(tmp_path / "p.jsonl", *({"right": i} for _, i in asked))
    more = ("--queries", tmp_path / "q.npy", "--positives", "right")
    two = json.loads(run("train", tmp_path / "book", only, "--out", tmp_path / "b.pt", *common, *more).stdout)
    assert {**one, "projection": ""} == {**two, "projection": ""}
    assert torch.equal(load(tmp_path / "a.pt").weight, load(tmp_path / "b.pt").weight)
    (hits,) = json.loads(run("search", tmp_path / "book", "Weberx", "--projection", tmp_path / "a.pt", "--json").stdout)
    assert hits[0]["id"] == 1


def test_the_command_refuses_bad_files(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    out = ("--out", tmp_path / "p.pt")
    bad = write(
        tmp_path / "bad.jsonl", {"query": [1] * D, "positives": "r0"}, {"query": [1] * D, "positives": ["r0", "?"]}
    )
    assert "not in the database: '?' (bad.jsonl line 2)" in fails("train", path, bad, *out)
    narrow = write(tmp_path / "narrow.jsonl", *({"query": [i], "positives": i} for i in (1, 2, 4, 5)))
    assert "narrow.jsonl line 1: the query has 1 numbers but this database is 8 wide" in fails(
        "train", path, narrow, *out
    )
    assert "k and a tolerance are both given (k 3, rtol 0.1" in fails(
        "train", path, pairs, *out, "-k", 3, "--rtol", 0.1
    )
    assert "holdout is 1;" in fails("train", path, pairs, *out, "--holdout", 1)
    assert "expected a file in an existing folder" in fails("train", path, pairs, "--out", tmp_path / "no" / "p.pt")
    texts = write(tmp_path / "texts.jsonl", {"query": "a", "positives": "r0"})
    assert "stores no name of an encoder; add --encoder" in fails("train", path, texts, *out)
    assert "none.pt is not there" in fails("search", path, json.dumps([1] * D), "--projection", tmp_path / "none.pt")
    assert "give its file with --checkpoint" in fails("train", path, pairs, *out, "--resume")
    np.save(tmp_path / "one.npy", np.float32(1))
    assert "queries have shape ()" in fails("train", path, pairs, *out, "--queries", tmp_path / "one.npy")
    assert not (tmp_path / "p.pt").exists()


def test_the_command_refuses_to_overwrite_its_own_files(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, pairs = stored
    array, file, out = tmp_path / "q.npy", tmp_path / "run.ckpt", tmp_path / "p.pt"
    np.save(array, np.ones((M, D), np.float32))
    before = digests(tmp_path)
    catalogue = next(one for one in path.iterdir() if one.is_file())
    ours = "would overwrite a file of this training"
    for words, message in (
        (("--out", pairs), f"--out {pairs} {ours}"),
        (("--out", tmp_path / "db" / ".." / "pairs.jsonl"), ours),
        (("--out", array, "--queries", array), f"--out {array} {ours}"),
        (("--out", file, "--checkpoint", file), f"--out {file} {ours}"),
        (("--out", catalogue), "is inside the database"),
        (("--out", out, "--checkpoint", path / "run.ckpt"), "--checkpoint"),
        (("--out", out, "--checkpoint", pairs, "--resume"), f"--checkpoint {pairs} {ours}"),
    ):
        assert message in fails("train", path, pairs, "--epochs", 1, *words)
    assert digests(tmp_path) == before


def test_a_training_without_gain_is_reported(stored: tuple[Path, Path], tmp_path: Path) -> None:
    path, _ = stored
    rows = [{"query": key.tolist(), "positives": f"r{i}" if i % 3 == 0 else i} for i, key in enumerate(keys_of())]
    actual = write(tmp_path / "found.jsonl", *rows[3:])
    shown = run("train", path, actual, "--out", tmp_path / "p.pt", "--lr", 5.0, "--epochs", 2).stdout
    assert "this projection changes nothing" in " ".join(shown.split())
