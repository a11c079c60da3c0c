"""The demo runs every step, learns, and never touches a directory that is no demo."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.clock import Clock
from rich.console import Console
from typer.testing import CliRunner
from worlds import holding

import softdb
from softdb.data import DemoData, load_wordnet
from softdb.text import HashedNGrams
from softdb.tools.cli.commands import app
from softdb.tools.cli.places import named_encoder
from softdb.tools.demo import DemoReport, run_demo
from softdb.train import QueryProjection, load, save


@pytest.fixture(scope="module")
def small() -> DemoData:
    """The first 600 records that a query asks for, and the queries whose answers all lie among them."""
    data = load_wordnet()
    wanted = sorted({i for answer in data.answers for i in answer})[:600]
    place = {old: new for new, old in enumerate(wanted)}
    kept = [j for j, answer in enumerate(data.answers) if all(i in place for i in answer)]
    return replace(
        data,
        ids=[data.ids[i] for i in wanted],
        keys=data.keys[wanted],
        payloads=[data.payloads[i] for i in wanted],
        query_texts=[data.query_texts[j] for j in kept],
        query_keys=data.query_keys[kept],
        answers=[[place[i] for i in data.answers[j]] for j in kept],
        held_out=data.held_out[kept],
    )


def run(path: Path, data: DemoData, fresh: bool = False, epochs: int = 2) -> tuple[DemoReport, str]:
    output = io.StringIO()
    console = Console(file=output, width=80, highlight=False)
    return run_demo(path, fresh=fresh, data=data, console=console, epochs=epochs), output.getvalue()


def recalls(data: DemoData, weight: Any) -> tuple[float, float]:
    """Recall@1 and recall@10 of the held-out queries, projected as weight @ query."""
    held = np.flatnonzero(data.held_out)
    nearest = np.argsort(-data.query_keys[held] @ weight.T @ data.keys.T, axis=1)[:, :10]
    right = [np.isin(row, data.answers[query]) for row, query in zip(nearest, held, strict=True)]
    return float(np.mean([one[0] for one in right])), float(np.mean([one.any() for one in right]))


def test_a_small_demo_runs_every_step(tmp_path: Path, small: DemoData) -> None:
    report, shown = run(tmp_path / "demo", small, epochs=8)
    assert report.records == 600
    assert 0 < report.before[0] <= report.before[1] <= 1
    assert report.after[1] >= report.before[1]
    for heading in ("1 Store", "2 Query", "by id", "nearest", "soft", "3 Train", "4 Reopen", "nothing lost", "Done"):
        assert heading in shown
    assert f"{report.before[1]:.1%}" in shown
    assert f"{report.after[1]:.1%}" in shown
    assert all(len(line) <= 80 for line in shown.split("Done")[0].splitlines())
    closing = re.findall(r"^  softdb (.+)$", shown, re.MULTILINE)
    assert [line.split()[0] for line in closing] == ["info", "search", "attend", "explore"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sentence_transformers", None)  # they need no model
        for line in closing[:3]:
            assert CliRunner().invoke(app, shlex.split(line)).exit_code == 0
    weight = load(tmp_path / "demo" / "projection.pt").weight.detach().numpy()
    assert report.before == pytest.approx(recalls(small, np.eye(96)))
    assert report.after == pytest.approx(recalls(small, weight))
    assert report.after != pytest.approx(recalls(small, weight.T))
    with softdb.open(tmp_path / "demo", mode="r") as db:
        assert db.verify() == 600
        assert db[small.ids[5]].payload | {"gloss": db[small.ids[5]].text} == small.payloads[5]
        assert (db.metric, db.fields, db.text_index) == ("cosine", ("pos",), "words")


def test_training_is_the_same_for_the_same_seed_and_falls_with_the_loss(tmp_path: Path, small: DemoData) -> None:
    def trained(name: str, seed: int, epochs: int) -> torch.Tensor:
        run_demo(tmp_path / name, data=small, console=Console(quiet=True), seed=seed, epochs=epochs)
        return load(tmp_path / name / "projection.pt").weight.detach()

    first, again = (trained(name, seed=3, epochs=1) for name in ("first", "again"))
    assert first.equal(again)
    assert not first.equal(trained("other", seed=4, epochs=1))
    learnt = np.flatnonzero(~small.held_out)

    def loss(weight: torch.Tensor) -> float:
        asked = torch.from_numpy(small.query_keys[learnt]) @ weight.T
        scores = asked @ torch.from_numpy(small.keys).T / 0.05
        right = torch.zeros_like(scores, dtype=torch.bool)
        for i, query in enumerate(learnt):
            right[i, small.answers[query]] = True
        return float((scores.logsumexp(1) - scores.masked_fill(~right, -torch.inf).logsumexp(1)).mean())

    assert loss(first) < loss(torch.eye(96)) - 0.1
    assert loss(trained("longer", seed=3, epochs=2)) < loss(first) - 0.05


def test_the_first_search_is_not_timed(tmp_path: Path, small: DemoData, monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls, clock = softdb.SoftDB.search, [], Clock(tick=0.001)

    def compiling(self: softdb.SoftDB, *args: Any, **words: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            clock.spend(1)
        return search(self, *args, **words)

    monkeypatch.setattr(softdb.SoftDB, "search", compiling)
    monkeypatch.setattr("softdb.tools.demo.time", clock.module)
    shown = run(tmp_path / "demo", small, epochs=1)[1]
    actual = re.search(r"nearest +in ([\d.]+) ms.*\n +\(the first search of the process took ([\d.]+) ms\)", shown)
    assert actual is not None
    assert actual.groups() == ("1.0", "1001.0")


def test_directories_without_a_demo_are_untouched(tmp_path: Path, small: DemoData) -> None:
    holding(np.ones((1, 96)), ids=["precious"], path=tmp_path / "mine").close()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").touch()
    for name in ("mine", "file", "folder"):
        for fresh in (False, True):
            with pytest.raises(softdb.BadInput, match=rf"{name} exists and is not a demo database"):
                run(tmp_path / name, small, fresh)
    with softdb.open(tmp_path / "mine", mode="r") as db:
        assert "precious" in db
    assert (tmp_path / "file").read_text() == "precious"
    assert (tmp_path / "folder" / "precious").exists()


def test_a_demo_is_rebuilt_only_on_request(tmp_path: Path, small: DemoData) -> None:
    path = tmp_path / "demo"
    path.mkdir()  # an empty directory will do
    run(path, small, epochs=1)
    with pytest.raises(softdb.BadInput, match=r"holds the demo database already; .* --fresh"):
        run(path, small, epochs=1)
    (path / "notes.txt").write_text("precious")
    with pytest.raises(softdb.BadInput, match=r"notes.txt was not created by softdb; .*move it away"):
        run(path, small, True, epochs=1)
    assert (path / "notes.txt").read_text() == "precious"
    (path / "notes.txt").unlink()
    with softdb.open(path), pytest.raises(softdb.DatabaseLocked, match="is being written by process"):
        run(path, small, True, epochs=1)
    with softdb.open(path) as db:
        db.delete(where={})
    assert run(path, small, True, epochs=1)[0].records == 600
    (path / "catalog.sqlite").write_bytes(b"damaged")
    assert run(path, small, True, epochs=1)[0].records == 600


def test_without_faiss_the_demo_reports_exact_answers(
    tmp_path: Path, small: DemoData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise softdb.MissingDependency("no FAISS")

    monkeypatch.setattr(softdb.SoftDB, "build_index", missing)
    assert "ms, all records compared; an index needs softdb[cpu]" in run(tmp_path / "demo", small, epochs=1)[1]


def test_encoders_have_names(tmp_path: Path) -> None:
    assert named_encoder("ngrams") == HashedNGrams()
    assert named_encoder("ngrams", 64) == HashedNGrams(64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sentence_transformers", None)
        for name in ("demo", "some-model"):
            with pytest.raises(softdb.MissingDependency, match=r"pip install 'softdb\[text\]'"):
                named_encoder(name)(["a"])


def test_a_typed_query_goes_through_the_trained_projection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(self: object, texts: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.eye(len(texts), 96, dtype=np.float32)

    monkeypatch.setattr("softdb.text.SentenceEncoder.__call__", encoded)
    weight = np.random.default_rng(0).normal(size=(96, 96)).astype(np.float32)
    np.testing.assert_array_equal(named_encoder("demo", path=tmp_path)(["a"]), np.eye(1, 96))
    projection = QueryProjection(96)
    projection.weight.data = torch.from_numpy(weight)
    save(tmp_path / "projection.pt", projection)
    np.testing.assert_allclose(named_encoder("demo", path=tmp_path)(["a", "b"]), weight.T[:2], rtol=1e-6)
    np.testing.assert_array_equal(named_encoder("demo")(["a"]), np.eye(1, 96))  # keys are never projected


@pytest.mark.parametrize("damage", ["text", "shape", "nan", "pickle"])
def test_a_damaged_projection_is_named(tmp_path: Path, damage: str) -> None:
    path, projection = tmp_path / "projection.pt", QueryProjection(3 if damage == "shape" else 96)
    if damage == "nan":
        projection.weight.data[0, 0] = torch.nan
    save(path, projection)
    if damage == "text":
        path.write_text("no array")
    elif damage == "pickle":
        torch.save(object, path)
    with pytest.raises(softdb.BadInput, match=r"projection.pt was not saved by the demo"):
        named_encoder("demo", path=tmp_path)


@pytest.mark.exhaustive
def test_training_in_the_demo_improves_recall(tmp_path: Path) -> None:
    root = Path(softdb.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-W", "error", "-m", "softdb", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split("(")[0].strip(): line.split()[-2:] for line in done.stdout.splitlines() if "(recall@" in line}
    recalls = {name: [float(cell.rstrip("%")) / 100 for cell in cells] for name, cells in rows.items()}
    assert recalls["first"][0] == pytest.approx(0.1575, abs=0.01)
    assert recalls["first"][1] > recalls["first"][0] + 0.03
    assert recalls["among ten"][1] > recalls["among ten"][0] + 0.08
    assert json.loads((tmp_path / "softdb-demo" / "demo.json").read_text()) == {"records": 19_988, "seed": 0}
