"""The benchmark tool checks answers before it times them, and reports losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doubles.clock import Clock
from numpy.typing import NDArray
from typer.testing import CliRunner

import softdb
from softdb.check import Metric
from softdb.index.tune import least_effort
from softdb.tools.bench import report
from softdb.tools.bench.datasets import Dataset, load
from softdb.tools.bench.engines import Engine, Progress
from softdb.tools.bench.exam import WrongAnswer, nearest
from softdb.tools.bench.grid import Grid, run
from softdb.tools.bench.peers import ENGINES
from softdb.tools.cli.commands import app

Array = NDArray[Any]
pytest.importorskip("faiss", reason="the index engines need FAISS")


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_the_least_effort_is_found() -> None:
    asked: list[int] = []

    def recall(effort: int) -> float:
        asked.append(effort)
        return min(1.0, effort / 100)

    assert least_effort(recall, 10, 8192, 0.53, 64)[0] == 53
    assert least_effort(recall, 60, 8192, 0.53, 64)[0] == 60
    assert len(asked) < 12
    assert least_effort(recall, 10, 40, 0.9, 64)[0] == 40
    asked.clear()
    assert least_effort(lambda effort: asked.append(effort) or 0.4, 10, 1 << 30, 0.9, 64)[0] == 160  # type: ignore[func-returns-value]
    assert least_effort(lambda effort: float(effort >= 5000), 10, 8192, 0.9, 64)[0] == 160  # no gain, no more effort


class Exact(Engine):
    """Brute force, with a fault to inject."""

    name = "exact"
    lies: str = ""
    searches = 0

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        return {"adding": 0.5}

    def search(self, queries: Array, effort: int) -> Array:
        type(self).searches += 1
        found = nearest(self.data, queries, self.setup.k)
        if self.lies == "alone" and len(queries) == 1:
            return found[:, ::-1] // 2 * 2 % 7 + np.arange(self.setup.k) * 7
        return found + 1_000_000 if self.lies == "range" else found

    def bytes(self) -> int:
        return 7


def engine(name: str, **words: Any) -> type[Engine]:
    return type(name, (Exact,), {"name": name, **words})


def test_a_small_grid(tmp_path: Path) -> None:
    data = load("clustered", n=3000, dim=8, most=40)
    notes: list[str] = []
    stages: set[str] = set()
    known = {**ENGINES, "absent": engine("absent", modules=("no_such_module",), packages=("nothing",))}
    known |= {"unfit": engine("unfit", unfit=classmethod(lambda cls, data: "it likes no clusters")), "exact": Exact}
    peers = tuple(name for name in ("faiss-hnsw", "hnswlib") if not ENGINES[name].missing())
    names = ("softdb", "softdb-ivf", "softdb-flat", *peers, "exact", "absent", "unfit")
    ask = Grid(names, (0.9,), k=5, threads=(1, 2), rounds=2, known=known)
    result = run(data, ask, notes.append, lambda what, done, whole: stages.add(what))
    rows = result["rows"]
    assert len(rows) == 2 * (3 + 2 * len(peers) + 1)
    for row in rows:
        assert row["met"]
        assert row["recall"] >= 0.8
        assert 0 < row["batch_queries_s"]["min"] <= row["batch_queries_s"]["median"] <= row["batch_queries_s"]["max"]
        assert row["single_ms"]["min"] > 0
    by_label = {row["label"]: row for row in rows}
    graphs = [by_label[f"faiss-hnsw M={links}"] for links in (16, 32)]
    assert all(row["effort"]["efSearch"] >= 10 for row in graphs)
    assert graphs[1]["beside_keys_bytes"] > graphs[0]["beside_keys_bytes"] > 0
    assert all(
        row["in_all_bytes"] == row["beside_keys_bytes"] + 3000 * 8 * 4 for row in [*graphs, by_label["softdb-ivf"]]
    )
    ivf = by_label["softdb-ivf"]
    assert {"training", "adding", "measuring"} <= set(ivf["build_s"])
    assert ivf["build_s"]["with_tuning"] > ivf["build_s"]["without_tuning"] > 0
    assert 0 < ivf["beside_keys_bytes"] < 3000 * 40
    assert by_label["exact"]["recall"] == by_label["softdb-flat"]["recall"] == 1
    assert by_label["exact"]["build_s"]["without_tuning"] == 0.5
    assert notes == [
        "absent is left out: no_such_module is not installed; pip install nothing",
        "unfit is left out: it likes no clusters",
    ]
    assert set(result["left_out"]) == {"absent", "unfit"}
    assert {"true neighbours", "timing at recall 0.9, 2 threads"} <= stages
    assert len(result["compared"]) == 2
    report.write_json(tmp_path / "result.json", result)
    assert json.loads((tmp_path / "result.json").read_text())["data"]["n"] == 3000


@pytest.mark.slow
def test_efforts_in_place_of_recalls() -> None:
    data = load("uniform", n=5000, dim=16, most=100)
    result = run(data, Grid(("softdb-ivf", "faiss-hnsw"), efforts=(1, 64), threads=(1,), rounds=1))
    for label in ("softdb-ivf", "faiss-hnsw M=16"):
        few, many = [row["recall"] for row in result["rows"] if row["label"] == label]
        assert few < many
    assert result["compared"] == []
    assert {row["goal"] for row in result["rows"]} == {"effort 1", "effort 64"}


@pytest.mark.parametrize(
    ("lie", "message"), [("range", "liar found rows from 1000000"), ("alone", "for the same queries alone")]
)
def test_a_liar_is_never_timed(lie: str, message: str) -> None:
    liar = engine("liar", lies=lie, searches=0)
    with pytest.raises(WrongAnswer, match=message):
        run(load("uniform", n=500, dim=6, most=20), Grid(("liar",), (0.9,), known={"liar": liar}))
    assert liar.__dict__["searches"] < 15  # tuning and checking, no rounds


class Crammer(Exact):
    """It knows the queries that it is tuned on, and no others; its first answer in the rounds takes long."""

    name = "crammer"
    calls, clock = 0, Clock(tick=0.001)

    def search(self, queries: Array, effort: int) -> Array:
        Crammer.calls += 1
        if Crammer.calls == 1 + 1 + 10 + 1:  # tuning, checking a batch and ten alone, then the rounds
            Crammer.clock.spend(0.2)
        found = super().search(queries, effort)
        known = (queries[:, None] == self.data.half(second=False).queries).all(axis=2).any(axis=1)
        return np.where(known[:, None], found, -1)


def test_recall_is_of_other_queries_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.tools.bench.report.time", Crammer.clock.module)
    data = load("uniform", n=500, dim=6, most=20)
    (one,) = run(data, Grid(("crammer",), (0.9,), rounds=1, threads=(1,), known={"crammer": Crammer}))["rows"]
    assert (one["recall_tuned_on"], one["recall"], one["met"]) == (1, 0, False)
    assert Crammer.calls == 12 + 2 * 11
    assert one["batch_queries_s"]["min"] > 10 / 0.2
    assert Crammer.clock.now > 0.2


def test_unmeasurable_settings_are_refused_by_name() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"engines": ("softdb", "milvus")}, "there is no engine 'milvus'; choose from softdb, softdb-ivf"),
        ({"engines": ()}, "there is no engine ''"),
        ({"recalls": (1.5,)}, "a recall is 1.5; expected a number from 0 to 1"),
        ({"recalls": (0.0,)}, "a recall is 0; expected a share above 0"),
        ({"recalls": ()}, "there is no recall or no number of threads"),
        ({"threads": (0,)}, "threads is 0; expected a whole number"),
        ({"rounds": 0}, "rounds is 0"),
        ({"efforts": (0,), "engines": ("softdb",)}, "an effort is 0"),
    ]
    for words, message in wrong:
        with pytest.raises(softdb.BadInput, match=message):
            Grid(**words).checked()


def test_every_installed_peer_finds_by_every_metric() -> None:
    names = ("faiss-hnsw", "faiss-ivf", "faiss-ivfpq", "hnswlib", "usearch", "voyager", "annoy", "svs", "vsag", "scann")
    here = [ENGINES[name] for name in names if not ENGINES[name].missing()]
    for metric in ("dot", "cosine", "l2"):
        data = load("clustered", n=400, dim=8, metric=metric, most=40)
        scaled = Dataset(
            "scaled", data.keys * np.linspace(1, 3, 400, dtype=np.float32)[:, None], data.queries, data.metric
        )
        result = run(scaled, Grid(tuple(kind.name for kind in here), (0.9,), k=3, threads=(1,), rounds=1))
        recalls = {row["label"]: row["recall"] for row in result["rows"]}
        assert min(recalls.values()) > 0.7, recalls
        assert all(row["beside_keys_bytes"] > 0 for row in result["rows"])


def test_pynndescent_leaves_unequal_lengths_alone() -> None:
    data = load("uniform", n=50, dim=4)
    fit = ENGINES["pynndescent"].unfit
    assert fit(data) == ""
    long = Dataset("long", data.keys * 2, data.queries, Metric.DOT)
    assert fit(long) == "its dot product needs keys of length 1"
    assert fit(Dataset("long", data.keys * 2, data.queries, Metric.L2)) == ""


# -- the report and the pictures ---------------------------------------------------------------------------------------


def row(label: str, recall: float, rate: float, latency: float, met: bool = True, **words: Any) -> dict[str, Any]:
    return {
        "engine": label.split()[0],
        "label": label,
        "goal": "recall 0.9",
        "target": 0.9,
        "threads": 2,
        "recall": recall,
        "met": met,
        "batch_queries_s": report.spread([rate]),
        "single_ms": report.spread([latency]),
        "build_s": {"choosing": 1.0, "measuring": 1.0, "without_tuning": 2.0, "with_tuning": 4.0},
        "beside_keys_bytes": 10,
        "in_all_bytes": 100,
        "facts": {},
        **words,
    }


ROWS = [
    row("softdb", 0.92, 300, 0.3, beside_keys_bytes=2),
    row("hnswlib M=16", 0.91, 100, 0.2, build_s={"without_tuning": 4.0, "with_tuning": 5.0}),
    row("hnswlib M=32", 0.93, 150, 0.4, build_s={"without_tuning": 8.0, "with_tuning": 9.0}, beside_keys_bytes=20),
    row("usearch", 0.5, 9000, 0.001, met=False),
]


def test_softdb_is_compared_with_the_best_that_reached_the_recall() -> None:
    (one,) = report.compared(ROWS)
    assert one["batch"] == {"softdb": "softdb", "peer": "hnswlib M=32", "ratio": 2.0}
    assert one["single"] == {"softdb": "softdb", "peer": "hnswlib M=16", "ratio": 1.5}  # a loss stays one
    assert report.leading(ROWS) == ROWS  # each hnswlib is the better one, alone or in batches
    assert report.compared(ROWS[1:]) == []
    short = [row("annoy trees=50", 0.8, 900, 1, met=False), row("annoy trees=100", 0.9, 90, 1)]
    assert report.leading(short) == short[1:]  # what misses the recall is no better for being fast


def test_the_fastest_of_softdb_are_compared_and_shown() -> None:
    rows = [*ROWS, row("softdb-ivf", 0.93, 600, 0.25), row("softdb-hnsw", 0.93, 50, 0.1)]
    (one,) = report.compared(rows)
    assert one["softdb"] == "softdb-ivf"
    assert one["batch"] == {"softdb": "softdb-ivf", "peer": "hnswlib M=32", "ratio": 4.0}
    assert one["single"] == {"softdb": "softdb-hnsw", "peer": "hnswlib M=16", "ratio": 0.5}
    shown = [row["label"] for row in report.leading([*rows, row("hnswlib M=8", 0.9, 5, 9)])]
    assert {one[measure][who] for measure in ("batch", "single") for who in ("softdb", "peer")} <= set(shown)
    assert "hnswlib M=8" not in shown


def test_the_frontier_holds_the_undominated_runs() -> None:
    points = [row("a", 0.9, 10, 1), row("a", 0.95, 5, 1), row("a", 0.94, 4, 1), row("a", 0.8, 9, 1)]
    assert report.frontier(points) == [(0.9, 10), (0.95, 5)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "begin"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_a_picture_is_drawn(name: str, begin: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    data = {"name": "made up", "n": 10, "dim": 2, "metric": "dot"}
    report.draw({"rows": ROWS, "data": data, "setup": {"threads": [2], "k": 10}}, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_the_recorded_command_has_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        ("/x/bin/softdb", "bench", "wordnet:/data/x/wordnet"): "softdb bench wordnet:wordnet",
        ("/x/softdb/__main__.py", "bench"): "python -m softdb bench",
        ("benchmarks/serve.py", "--out", "/data/x/serve.json"): "python benchmarks/serve.py --out serve.json",
    }
    monkeypatch.setattr("sys.executable", "/usr/bin/python")
    for words, expected in reports.items():
        monkeypatch.setattr("sys.argv", list(words))
        assert report.command() == expected


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_measures_writes_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    words = ["bench", "uniform", "--n", "3000", "--dim", "6", "--engines", "softdb,faiss-hnsw", "--recalls", "0.9"]
    words += ["--rounds", "1", "--threads", "1", "--out", f"{tmp_path}/r.json", "--plot", f"{tmp_path}/r.png"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "uniform: 3,000 keys of width 6, 2,000 queries" in done.stdout
    assert "faiss-hnsw M=" in done.stdout
    assert "times the queries/s of faiss-hnsw" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert [row["label"] for row in result["rows"]] == ["softdb", "faiss-hnsw M=16", "faiss-hnsw M=32"]
    assert (tmp_path / "r.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        (["--engines", "softdb,qdrant"], "there is no engine 'qdrant'"),
        (["--recalls", "high"], "--recalls is 'high'; expected numbers with commas"),
        (["--recalls", "2"], "a recall is 2.0"),
        (["--threads", "1.5"], "--threads is '1.5'"),
        (["--efforts", "8,x"], "--efforts is '8,x'"),
        (["--out", "no/folder/r.json"], "there is no folder no/folder to write r.json into"),
        (["--plot", "r.bmp"], "the picture's name ends in '.bmp'; expected one of .png"),
    ],
)
def test_wrong_arguments_end_in_one_line(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert message in line


def test_engines_without_their_package_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.tools.bench.engines.find_spec", lambda name: None)
    assert ENGINES["softdb-ivf"].missing() == ["faiss"]
    notes: list[str] = []
    result = run(load("uniform", n=100, dim=4, most=10), Grid(("softdb-ivf", "faiss-hnsw"), (0.9,)), notes.append)
    assert result["rows"] == []
    assert notes[0].startswith("softdb-ivf is left out: faiss is not installed")
