"""Pictures of `benchmarks/pictures.py`: each is drawn from its committed result, and is readable."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from figures import assert_readable

from softdb.plots import COLORS
from softdb.tools.bench import report

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RESULTS = BENCHMARKS / "results"


def drawn_from(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pictures, drawn = importlib.import_module("pictures"), list[Any]()
    for module in (pictures, report):
        monkeypatch.setattr(module, "save", lambda figure, path: drawn.append(figure))
    pictures.main([RESULTS / f"{name}.json"])
    return drawn[0]


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.png")))
def test_a_picture_is_readable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_readable(drawn_from(name, monkeypatch))
    assert (RESULTS / f"{name}.png").stat().st_size < 100_000


def test_the_model_of_clusters_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    model, drawn = importlib.import_module("scaling_model"), list[Any]()
    monkeypatch.setattr(model, "save", lambda figure, path: drawn.append(figure))
    model.draw(Path("unused.png"), model.fitted(json.loads(model.RESULTS.read_text())))
    assert_readable(drawn[0])


@pytest.mark.parametrize("name", ["learn-wordnet", "learn-1m"])
def test_a_way_of_learning_has_its_colour_and_its_measured_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = drawn_from(name, monkeypatch).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    ways = importlib.import_module("pictures").WAYS
    split = json.loads((RESULTS / f"{name}.json").read_text())["splits"][0]
    for way, curve in split.items():
        line = lines[ways[way]]
        assert line.get_color() == COLORS[list(ways).index(way)]
        assert list(line.get_xdata()) == [point["seconds"] for point in curve["curve"] if point["seconds"]]
        assert set(lines["before the training"].get_ydata()) == {curve["before"]["recall_10"]}


def test_peers_never_have_the_colour_of_softdb(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn_from("find-wordnet", monkeypatch).axes[0].get_lines()
    assert [line.get_label() for line in lines if line.get_color() == COLORS[0]] == ["softdb-ivf"]
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == len(lines) == 9
