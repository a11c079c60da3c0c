"""Tables on terminals of several widths: numbers and ids are never cut, texts end after a word."""

from __future__ import annotations

import functools
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from typed import answer, lines, run

import softdb
from softdb.terminal import Excerpt, brief, fact, print_facts, print_table, progress, shortened

pytest_plugins = ["command_world"]

WIDTHS = (40, 80, 200)
SENTENCE = "a thief and cop meet in space where no one can hear their lighthouse-keeper's extraordinarily long story"
WORDS = SENTENCE.split()


@pytest.fixture(params=WIDTHS)
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of a terminal that the commands write to."""
    console = functools.partial(Console, width=request.param, color_system=None)
    monkeypatch.setattr(
        "softdb.terminal.Console", lambda force_terminal=None, **words: console(force_terminal=True, **words)
    )
    return int(request.param)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Records with long payloads and texts, and ids of 12 letters."""
    choose = random.Random(0)
    rows = [
        {
            "id": f"film-{i:07d}", "text": " ".join(choose.choices(WORDS, k=60)), "year": 1900 + i,
            "plot": " ".join(choose.choices(WORDS, k=40)), "cast": choose.sample(WORDS, 5), "more": {"pages": i * 1000},
        }
        for i in range(12)
    ]  # fmt: skip
    run("import", tmp_path / "library", lines(tmp_path / "rows.jsonl", rows), "--text", "text")
    return tmp_path / "library"


def printed(columns: int, *arguments: object) -> str:
    """The lines that a command prints, without those of its progress bar; they fit the terminal."""
    shown = re.sub(r"\x1b\[\??[\d;]*[A-Za-z]|\r", "\n", run(*arguments).stdout)
    assert max(map(cell_len, shown.splitlines())) <= columns
    return "\n".join(line for line in shown.splitlines() if not re.search(r"0:00:\d\d$", line.rstrip()))


def test_hits_and_records_keep_their_numbers_and_ids(columns: int, library: Path) -> None:
    (hits,) = answer("search", library, "a thief in space", "-k", 4)
    shown = printed(columns, "search", library, "a thief in space", "-k", 4).split()
    assert {hit["id"] for hit in hits} | {f"{hit['score']:.4f}" for hit in hits} <= set(shown)
    (soft,) = answer("attend", library, "a thief in space", "--temperature", 0.1, "-k", 3)
    shown = printed(columns, "attend", library, "a thief in space", "--temperature", 0.1, "-k", 3).split()
    assert {f"{hit['weight']:.4f}" for hit in soft["hits"]} <= set(shown)
    assert {f"{number:.4f}" for number in soft["output"][:8]} <= {word.strip(",") for word in shown}
    ids = [hit["id"] for hit in hits]
    records = answer("get", library, *ids)
    shown = printed(columns, "get", library, *ids).split()
    numbers = {f"{number:.4g}" for record in records for number in record["key"][:4]}
    assert numbers <= {word.strip(",") for word in shown}
    assert set(ids) <= set(shown)
    for word in shown:
        if word.endswith("…") and word.strip("…,{}[]"):  # the beginning of a text, which ends with a whole word
            assert word.rstrip("…") in {known.strip(" ,;:.") for known in WORDS}, word


def test_reports_are_tables_of_names_and_values(columns: int, vectors: Path) -> None:
    with softdb.open(vectors) as db:
        db.build_index("ivf", recall=0.5)
    for command, prefix in (("tune", ""), ("info", "index ")):
        shown, facts = printed(columns, command, vectors), answer("info", vectors)["index"]
        for name in ("kind", "recall", "target", "records", "bytes", "lists"):
            (line,) = [line for line in shown.splitlines() if line.startswith(f"{prefix}{name}  ")]
            assert line.removeprefix(prefix + name).split() == [fact(facts[name])]
        assert set(fact(facts["recall_by_norm"]).split()) <= set(shown.split())
    assert "met yes" in " ".join(printed(columns, "index", vectors, "--kind", "flat").split())


def test_lost_records_and_benchmarks_fit(columns: int, vectors: Path, tmp_path: Path) -> None:
    with (vectors / "keys-00000000.npy").open("r+b") as file:
        file.seek(200)
        file.write(b"damaged")
    assert "1,999 records saved" in printed(columns, "verify", vectors, "--repair", tmp_path / "saved")
    words = ("--engines", "softdb-flat", "--rounds", 1)
    shown = " ".join(printed(columns, "bench", tmp_path / "k.npy", *words).split())
    assert "k.npy: 1,800 keys of width 16, 200 held-out queries, compared by dot" in shown
    assert "softdb-flat" in shown
    assert "1.000" in shown


def test_a_table_too_wide_for_its_terminal_gives_each_cell_a_line() -> None:
    console = Console(file=io.StringIO(), width=24, force_terminal=True, color_system=None)
    rows = [("film-0000001", "1,234,567", Excerpt("no one can hear you scream in space, alas"))] * 2
    print_table(("id", "number", "text"), rows, console=console)
    output = console.file
    assert isinstance(output, io.StringIO)
    first, second = output.getvalue().split("\n\n")
    assert [line.split() for line in first.splitlines()] == [
        ["id", "film-0000001"], ["number", "1,234,567"], ["text", "no", "one", "can", "hear"],
        ["you", "scream", "in"], ["space,", "alas"],
    ]  # fmt: skip
    assert second.split() == first.split()
    console.file = output = io.StringIO()
    print_facts({"path": "x" * 50, "none": ""}, console)
    assert output.getvalue().replace(" ", "").replace("\n", "") == "path" + "x" * 50


def test_texts_are_cut_after_a_word() -> None:
    choose = random.Random(1)
    for _ in range(300):
        text, width = " ".join(choose.choices([*WORDS, "日本語", "é"], k=choose.randint(0, 30))), choose.randint(2, 90)
        short = shortened(text, width)
        assert cell_len(short) <= width
        if short == text:
            continue
        start = short.removesuffix("…")
        assert text.startswith(start)
        whole = text[len(start)] in " ,;:." or " " not in text[width // 2 : width]
        assert whole or any(letter in "日本語" for letter in text[: width + 1]), (text, width, short)
    assert shortened("x" * 30, 10) == "x" * 9 + "…"


def test_payloads_keep_their_numbers_and_whole_structures() -> None:
    payload: dict[str, Any] = {"name": "a thief and a cop", "year": 1995, "cast": ["Pacino", "De Niro"], "at": {"x": 1}}
    whole = 'name: a thief and a cop, year: 1995, cast: ["Pacino", "De Niro"], at: {"x": 1}'
    assert brief(payload, 200) == whole
    for width in range(5, len(whole)):
        short = brief(payload, width)
        assert len(short) <= width
        for field in short.split(", "):
            name, _, value = field.partition(": ")
            assert field in ("…", "{…}") or name in payload or field == '"De Niro"]', short
            assert name != "year" or value == "1995"
            assert name != "cast" or value in ("[…]", '["Pacino"')
            assert name != "at" or value in ("{…}", '{"x": 1}')
    assert brief(payload, 40) == "name: a thief and a cop, year: 1995, …"
    assert brief({"body": "no " * 1000, "year": 1995}, 60).endswith(", year: 1995")
    assert brief([1, 2, 3], 5) == "[…]"
    assert brief(None, 5) == ""
    assert brief(123456789, 3) == "123456789"


def test_json_is_whole_whatever_the_width(columns: int, library: Path) -> None:
    with softdb.open(library, mode="r") as db:
        record = db["film-0000003"]
    assert json.loads(run("get", library, "film-0000003", "--json").stdout)[0]["payload"] == record.payload
    (hits,) = json.loads(run("search", library, record.text, "-k", 1, "--json").stdout)
    assert (hits[0]["payload"], hits[0]["text"]) == (record.payload, record.text)


def test_the_bar_has_no_total_until_one_is_known() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with progress("opening", console) as show:
        pass
    with progress("opening", console) as show:
        show("measuring [x]", 0, 1)
    with progress("opening", console) as show:
        show("adding", 2_000, 9_000)
    output = console.file
    assert isinstance(output, io.StringIO)
    assert "/?" not in output.getvalue()
    assert "0/1" not in output.getvalue()
    assert "measuring [x]" in output.getvalue()
    assert "2,000/9,000" in output.getvalue()
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    with progress("opening", console, rate=True) as show:
        show("a stage whose name is long, with 12,345 threads", 20_000, 20_001)
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"  a stage…  *━+╸* 20,000/20,001 0:00:00", console.file.getvalue())
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    with progress("opening", console, quiet=True) as show:  # with --json
        show("adding", 2_000, 9_000)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_short_arrays_may_be_looked_at_in_a_terminal(columns: int, tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", np.full((3, 5), 1.23456789, np.float32))
    run("import", tmp_path / "db", tmp_path / "k.npy")
    shown = " ".join(printed(columns, "get", tmp_path / "db", 0, 2).split())
    assert shown.count("1.235, 1.235, 1.235, 1.235, … (5 numbers)") == 2
    assert "payload" not in shown
