"""Pictures of `benchmarks/learn.py`: one colour a method, and only measured points."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("name", ["learn-wordnet", "learn-1m"])
def test_a_way_has_its_colour_and_its_measured_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plots, colors = pytest.importorskip("softdb.plots"), pytest.importorskip("matplotlib.colors")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    drawn = list[Any]()
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    splits = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["splits"]
    importlib.import_module("learn").draw(splits, Path("unused.png"))
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    own = {"torch": "blue", "exact": "orange", "drawn": "green", "truncated": "red"}
    for way, line in splits[0].items():
        assert colors.same_color(lines[way].get_color(), f"tab:{own[way]}")
        assert list(lines[way].get_xdata()) == [point["seconds"] for point in line["curve"] if point["seconds"]]
        assert set(lines["untrained"].get_ydata()) == {line["before"]["recall_10"]}
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {*splits[0], "untrained"}
