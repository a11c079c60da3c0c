"""Figures that pages quote from benchmarks/results: each is computed from its file, and no page quotes another."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTED = ("cluster", "cluster-soak", "mutants", "trust")  # files whose parts are measured in runs of their own
NAMED = ("machine", "date", "commit", "command")


class Figure(NamedTuple):
    """One quoted figure: what the page says once the numbers of the file are filled in."""

    text: str  # a format string: its precision is the rounding rule
    file: str
    numbers: Callable[[Any], list[Any]]  # from the file's content


def best(result: Any, engines: str) -> Any:
    """Return the fastest row in batches of the engines whose name matches, at recall 0.95."""
    rows = [row for row in result["rows"] if row["goal"] == "recall 0.95" and row["met"]]
    return max(
        (row for row in rows if re.fullmatch(engines, row["engine"])), key=lambda row: row["batch_queries_s"]["median"]
    )


def over(result: Any, engines: str) -> float:
    """Return softdb's queries a second in batches over those of the best of these engines."""
    rates = [best(result, name)["batch_queries_s"]["median"] for name in ("softdb-ivf", engines)]
    return float(rates[0] / rates[1])


def row(result: Any, batch: int, way: str) -> Any:
    """Return the row of a way of negatives.py."""
    return next(row for row in result["summary"] if (row["batch"], row["way"]) == (batch, way))


def last(result: Any, batch: int, way: str) -> Any:
    """Return the last points of a way of negatives.py."""
    return row(result, batch, way)["last"]


def negatives(batch: int, way: str, result: Any) -> list[Any]:
    """Return the cells of a row of negatives.py: percents, and the milliseconds of a step."""
    line = row(result, batch, way)
    percents = [100 * line[name] for name in ("recall_1", "recall_10", "mrr_100")]
    return [f"{batch}, {NAMES[way]}", *percents, *([line["ms_a_step"]] if "ms_a_step" in line else [])]


NAMES = {
    "untrained": "untrained", "corpus": "the corpus", "in-batch, equal steps": "the batch, equal steps",
    "in-batch, equal time": "the batch, equal time",
}  # fmt: skip
NEGATIVES = {way: " |" if way == "untrained" else " {:,.0f} ms |" for way in NAMES}  # ends of the rows
PEER = "(?!softdb).*"
SIZED = "softdb-ivf", PEER, "hnswlib|faiss-hnsw"
WORDS = {8: "eight"}

FIGURES = {
    "README.md": [
        Figure("{:,} WordNet embeddings", "find-wordnet", lambda r: [r["data"]["n"]]),
        Figure("recall {:.2f}", "find-wordnet", lambda r: [r["setup"]["recalls"][0]]),
        Figure("{:.1f} times the queries", "find-wordnet", lambda r: [over(r, PEER)]),
        Figure("the best of {} peers", "find-wordnet", lambda r: [WORDS[len(r["setup"]["engines"]) - 1]]),
        Figure("({:.0f} times the best HNSW)", "find-wordnet", lambda r: [over(r, "hnswlib|faiss-hnsw")]),
        Figure("one query in {:.2f} ms", "find-wordnet", lambda r: [best(r, "softdb-ivf")["single_ms"]["median"]]),
        Figure(
            "its index takes {:.1f} MiB, that peer's {:.1f} and the best HNSW's {:.1f}; "
            "in all, {:.0f}, {:.0f} (float16) and {:.0f} MiB",
            "find-wordnet",
            lambda r: [best(r, e)[f"{part}_bytes"] / 2**20 for part in ("beside_keys", "in_all") for e in SIZED],
        ),
        Figure(
            "takes {:.2f} to {:.2f} of the time of torch's own attention",
            "estimate-1m",
            lambda r: extremes(times["exact_ms"] / times["sdpa_ms"] for times in timed(r)),
        ),
        Figure(
            "an estimate within {:.0f} % takes {:.2f} to {:.2f}",
            "estimate-1m",
            lambda r: [100 * r["tolerance"][0]["rtol"], *extremes(line["q=1"]["of_sdpa"] for line in r["tolerance"])],
        ),
    ],
    "docs/benchmarks.md": [],
    "docs/learning.md": [
        Figure("dictionary of {:,} records", "negatives", lambda r: [r["data"]["n"]]),
        Figure("{:.0f} s of CPU time", "negatives", lambda r: [r["seconds"]]),
        Figure("{:,} training steps", "negatives", lambda r: [sum(last(r, 64, "in-batch, equal time")["steps"]) // 2]),
        Figure(
            "falls from {:.1f} to {:.1f} %",
            "negatives",
            lambda r: [
                100 * each["recall_10"] for each in (row(r, 64, "untrained"), last(r, 64, "in-batch, equal time"))
            ],
        ),
        *(
            Figure("| {} |" + " {:.1f} |" * 3 + end, "negatives", functools.partial(negatives, batch, way))
            for batch in (64, 256)
            for way, end in NEGATIVES.items()
        ),
    ],
    "docs/results.md": [],
}
SECTION = {
    "README.md": "## How fast",
    "docs/learning.md": "## The negatives",
}  # the part of a page that quotes figures; of the others, all


def extremes(ratios: Iterable[float]) -> list[float]:
    """Return the least and the greatest."""
    in_order = sorted(ratios)
    return [in_order[0], in_order[-1]]


def timed(result: Any) -> list[Any]:
    """Return the times of every temperature and number of queries of estimate.py."""
    return [line[q] for line in result["tolerance"] for q in line if q.startswith("q=")]


def loaded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def expected(figure: Figure, result: Any) -> str:
    """Return the words that the page must have, with the numbers of the result."""
    return figure.text.format(*figure.numbers(result))


def prose(page: str) -> str:
    """Return the words that quote figures: without code and link targets, spaces made one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in SECTION:
        text = text.partition(SECTION[page] + "\n")[2].partition("\n## ")[0]
        assert text, f"{page} has no section {SECTION[page]!r}"
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    return " ".join(text.split())


@pytest.mark.parametrize("page", FIGURES)
def test_figures_are_those_of_the_results(page: str) -> None:
    text = prose(page)
    for figure in FIGURES[page]:
        words = expected(figure, loaded(figure.file))
        assert words in text, f"{page} does not say {words!r}, which results/{figure.file}.json gives"
        text = text.replace(words, " ", 1)
    left = re.findall(r"(?<![\w-])\d[\d.,]*.{,20}", text)
    assert not left, f"{page} quotes figures that no line of FIGURES finds in a result: {left}"


WORLDS = {"1m": "1M clustered × 128", "wordnet": "WordNet"}


def estimate_rows(name: str) -> list[str]:
    """Return the rows of the table of estimate.py in benchmarks/README.md."""
    world = WORLDS[name] + (" 117,659 × 384" if name == "wordnet" else "")
    return [
        f"| {world}, T = {line['temperature']}, {label} | {times['softdb_ms']:.2f} ms | {times['exact_ms']:.2f} ms | "
        f"{times['sdpa_ms']:.1f} ms | {times['of_exact']:.2f} | {times['of_sdpa']:.3f} | "
        f"{times['codes_read_once_ms']:.2f} ms | {100 * line['answered_exactly']:.0f} % |"
        for line in loaded(f"estimate-{name}")["tolerance"]
        for label, times in zip(("one query", "batch of 64", "batch of 256"), timed({"tolerance": [line]}), strict=True)
    ]


def sample_rows(name: str) -> list[str]:
    """Return the rows of the table of samples.py in benchmarks/README.md."""
    return [
        f"| {WORLDS[name]}, T = {line['temperature']}, {'1 query' if line['q'] == 1 else '16 queries'} | "
        f"{line['by_codes_ms']:.2f} ms | {100 * line['scanned']:.0f} % | {line['by_a_pass_ms']:.1f} ms | "
        f"{line['attend_exactly_ms']:.1f} ms |"
        for line in loaded(f"samples-{name}")["times"]
    ]


def lines_of_report() -> list[str]:
    return (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines()


def test_tables_of_estimates_and_samples_are_those_of_the_results() -> None:
    rows = [row for name in WORLDS for row in (*estimate_rows(name), *sample_rows(name))]
    assert [row for row in rows if row not in lines_of_report()] == []


def test_the_table_of_error_bars_is_that_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    report = importlib.import_module("error_bars_report").table([RESULTS / "error-bars.json"])
    quoted = (0, 2, 6, 7, 9, 11, 13, 14)  # columns: world, verb, inside, least, met, bar / error, pooled, ms
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if " | candidates | " in line]
    assert len(rows) == 102
    assert [
        row for row in (f"| {' | '.join(row[i] for i in quoted)} |" for row in rows) if row not in lines_of_report()
    ] == []


def test_the_tables_beside_published_figures_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    housing, adapters = (importlib.import_module(name) for name in ("housing", "adapters"))
    page = (ROOT / "docs" / "published.md").read_text(encoding="utf-8").replace("**", "")
    seeds = loaded("housing")["seeds"].values()
    names = ("squared distance", "... and labels", "... and corrections")
    distance, labels, corrections = zip(*([seed[name]["test"] for name in names] for seed in seeds), strict=True)
    assert all(map(operator.gt, distance, labels)), "labels help with every seed"
    assert sum(map(operator.gt, labels, corrections)) == 2, "as the page says"
    dot = loaded("housing-dot")
    assert (dot["settings"]["temperature"], dot["data"]) == (1, loaded("housing")["data"])
    assert "At temperature 1 it reaches {rmse:.3f} ± {deviation:.3f}".format(**dot["table"]["dot product"]) in page
    reports = [loaded(path.stem) for path in sorted(RESULTS.glob("adapters*.json"))]
    tables = [adapters.markdown(report["ways"]["every epoch"]["table"]) for report in reports]
    for report in reports:
        counts = next(iter(report["ways"]["every epoch"]["seeds"].values()))["before"]
        seen = counts["queries"] - counts["unseen_queries"]
        assert f"{seen} of the {counts['queries']} test claims" in page
        assert f"The other {counts['unseen_queries']} claims" in page
    ways = loaded("adapters-ngrams")["ways"]
    assert {run["epochs"] for run in ways["stopped early"]["seeds"].values()} == {0}, "it keeps the identity"
    runs = ways["every epoch"]["seeds"].values()
    assert (len(runs), sum("recall_1" in run["held_out"]["fell"] for run in runs)) == (3, 2), "as the page says"
    for rows in (housing.markdown(housing.table(loaded("housing")["seeds"])), *tables):
        assert "\n".join(rows) in page


def test_the_table_of_steps_over_trainable_rows_is_that_of_the_result() -> None:
    """Rows of a step's median, its share of torch's, and its memory, for both sizes."""
    cases, text = loaded("cross-entropy")["cases"], (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    ways = "torch plain", "torch linear_cross_entropy", "softdb exact", "softdb max_draws=4000", "BCE, negatives=256"
    for way in ways:
        runs = [case["ways"][way] for case in cases]
        cells = [
            f"{run['step_ms']['median']:.0f} | {run['of_torch_plain']:.2f} | {run['more_mib']:.0f}" for run in runs
        ]
        assert f" | {' | '.join(cells)} |\n" in text, way
    assert f"products ({cases[0]['ms_of_products_by_sgemm']['softdb']:.0f} ms)" in text
    assert cases[0]["ways"]["softdb exact"]["of_torch_plain"] > 0.37, "the page says that the goal is missed"


def test_the_table_of_sequences_is_that_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    result = loaded("sequences-beauty-0")
    rows = importlib.import_module("sequences").table(result["runs"])
    text = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    section = text.partition("](../benchmarks/results/sequences-beauty-0.png)\n")[2].splitlines()
    assert [line.replace("**", "") for line in section[3 : 3 + len(rows)]] == rows
    assert not section[3 + len(rows)]  # the table ends
    facts = "{users:,} users, {items:,} items, {interactions:,} choices".format(**result["data"])
    assert facts in " ".join(text.split())
    longer = loaded("sequences-beauty-0-longer")["runs"]["bce"]
    words = "after {:.0f} epochs (`--loss bce --steps {}`) it reaches {ndcg_10:.4f} and {recall_10:.4f}, as published"
    assert words.format(longer["epochs"], longer["settings"]["steps"], **longer["test"]) in text
    (length,) = {(run["settings"]["steps"], run["settings"]["batch"]) for run in result["runs"].values()}
    assert "{:,} steps of {} sequences".format(*length) in text


def agrees(quoted: str, value: float) -> bool:
    """Return whether the quoted number is the value, rounded to the digits that it shows."""
    digits = quoted.replace(",", "")
    decimals = len(digits.partition(".")[2])
    unit = 10.0**-decimals if decimals else 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(value - float(digits)) <= 0.5001 * unit


@pytest.mark.parametrize(("name", "rows"), [("find-wordnet", 17), ("find-clustered", 4)])
def test_rows_of_the_finding_tables_are_rows_of_the_results(name: str, rows: int) -> None:
    lines = lines_of_report()
    start = next(i for i, line in enumerate(lines) if line.endswith(f"](results/{name}.png)")) + 4  # after the header
    table = [line.replace("**", "").split(" | ") for line in lines[start : start + rows]]
    measured = [
        (row["recall"], row["batch_queries_s"]["median"], row["single_ms"]["median"]) for row in loaded(name)["rows"]
    ]
    for _, *cells in table:
        quoted = [cell.removesuffix(" ms") for cell in cells[:3]]
        assert any(all(map(agrees, quoted, figures)) for figures in measured), quoted


def test_a_changed_result_shows() -> None:
    result = loaded("find-wordnet")
    figure = FIGURES["README.md"][2]
    assert expected(figure, result) in prose("README.md")
    best(result, "softdb-ivf")["batch_queries_s"]["median"] *= 1.1
    assert expected(figure, result) not in prose("README.md")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_each_result_names_machine_date_commit_and_command(file: Path) -> None:
    result = loaded(file.stem)
    for part in result.values() if file.stem in PARTED else [result]:
        assert all(part.get(name) for name in NAMED), [name for name in NAMED if not part.get(name)]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", part["date"])
        assert part["machine"]["cpu"]
