"""Pictures: drawn without a display, of weights that are weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import softdb
from softdb import plots

HEATS = [0.1, 1.0, 10.0]
WEIGHTS = [[1.0, 0.0], [0.7, 0.3], [0.5, 0.5]]


def test_a_sweep_draws_a_curve_for_each_record() -> None:
    ax = plots.temperature_sweep(None, HEATS, torch.tensor(WEIGHTS, requires_grad=True), ["near", "far"])
    curves = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    assert list(curves) == ["near", "far"]
    np.testing.assert_allclose(curves["near"].get_ydata(), [1, 0.7, 0.5])
    np.testing.assert_allclose(curves["far"].get_xdata(), HEATS)
    assert curves["near"].get_linewidth() > curves["far"].get_linewidth()  # the nearest stands out
    assert ax.get_xscale() == "log"


def test_bars_are_stacked_to_one() -> None:
    ax = plots.weight_bars(None, [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], ["near", "far", "farther"], ["a", "b"])
    bottoms = [bar.get_y() for bar in ax.patches]
    np.testing.assert_allclose(bottoms, [0, 0, 0.5, 0.1, 0.8, 0.2])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in ax.patches[4:]], 1)


def test_given_axes_are_used_and_a_picture_is_saved(tmp_path: Path) -> None:
    drawn, (left, right) = plots.figure(columns=2)
    assert plots.temperature_sweep(left, HEATS, WEIGHTS, ["near", "far"]) is left
    assert plots.weight_bars(right, WEIGHTS, ["near", "far"], ["a", "b", "c"]) is right
    plots.save(drawn, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or drawn.number is None  # nothing for a caller to close


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        softdb.BadInput, match=r"weights have shape \(3, 2\); expected \(2, 2\): temperatures by labels"
    ):
        plots.temperature_sweep(None, HEATS[:2], WEIGHTS, ["near", "far"])
    with pytest.raises(softdb.BadInput, match=r"weights have shape \(0,\); expected \(0, 0\)"):
        plots.temperature_sweep(None, [], [], [])
    with pytest.raises(softdb.BadInput, match=r"temperatures are .*; expected finite numbers above 0"):
        plots.temperature_sweep(None, [0.0, 1.0, 2.0], WEIGHTS, ["near", "far"])
    with pytest.raises(softdb.BadInput, match="weights hold NaN or infinity"):
        plots.temperature_sweep(None, [1.0], [[float("nan"), 1.0]], ["near", "far"])
    with pytest.raises(softdb.BadInput, match=r"cannot be written to .*picture.bmpx"):
        plots.save(plots.figure()[0], tmp_path / "picture.bmpx")
    with pytest.raises(softdb.BadInput, match=r"cannot be written to .*nowhere"):
        plots.save(plots.figure()[0], tmp_path / "nowhere" / "picture.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(softdb.MissingDependency, match=r"pip install 'softdb\[plot\]'"):
        plots.figure()
