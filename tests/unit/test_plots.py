"""Plots are drawn without a display, and show weights that sum to 1."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

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


def test_a_heatmap_shows_every_weight() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], requires_grad=True)
    ax = plots.attention_heatmap(None, weights, ["a", "b"], ["near", "far", "farther"])
    (image,) = ax.get_images()
    np.testing.assert_allclose(image.get_array(), weights.detach())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["near", "far", "farther"]
    assert plots.attention_heatmap(ax, weights) is ax


def test_a_heatmap_of_a_database(tmp_path: Path) -> None:
    db = holding([[1, 0], [0, 1]], ids=["east", "north"])
    pooled = db.attend([[3.0, 0], [0, 3.0], [1, 1]], k=2)
    ax = plots.attention_heatmap(None, pooled, ["e", "n", "ne"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["east", "north"]
    near, far = 1 / (1 + np.exp([-3, 3]))
    np.testing.assert_allclose(ax.get_images()[0].get_array(), [[near, far], [far, near], [0.5, 0.5]], rtol=1e-5)
    plots.save(ax.figure, tmp_path / "map.svg")
    assert b"<svg" in (tmp_path / "map.svg").read_bytes()


def test_a_heatmap_has_a_column_for_each_record_that_was_weighed(rng: np.random.Generator) -> None:
    db = softdb.open(None, dim=3)
    keys, queries = rng.standard_normal((60, 3)), rng.standard_normal((50, 3))
    db.insert([f"r{i}" for i in range(60)], keys)
    pooled = db.attend(queries[:4], k=5)
    assert pooled.hits is not None
    assert pooled.weights is not None
    ax = plots.attention_heatmap(None, pooled)
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == [f"r{i}" for i in np.unique(pooled.hits.rows)]
    shares = ax.get_images()[0].get_array()
    for i, mine in enumerate(pooled.hits):
        for hit, weight in zip(mine, pooled.weights[i].tolist(), strict=True):
            assert shares[i, names.index(str(hit.id))] == weight
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    many = plots.attention_heatmap(None, db.attend(queries, k=60))
    assert many.get_images()[0].get_array().shape == (50, 60)
    assert "r0" not in [label.get_text() for label in many.get_xticklabels()]
    with pytest.raises(softdb.BadInput, match=r"no weights by record; query with k="):
        plots.attention_heatmap(None, db.attend(queries))


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
    with pytest.raises(softdb.BadInput, match=r"1 queries for weights of shape \(3, 2\); give 3"):
        plots.attention_heatmap(None, WEIGHTS, ["one"])
    with pytest.raises(softdb.BadInput, match=r"weights have shape \(2,\); expected \(q, n\)"):
        plots.attention_heatmap(None, [1.0, 2.0])
    with pytest.raises(softdb.BadInput, match=r"smallest weight is -1.0; .*not scores"):
        plots.attention_heatmap(None, [[-1.0, 2.0]])
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


# Machado, Oliveira and Fernandes 2009: linear RGB as eyes see it that lack one kind of cones
SIGHT = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(color: str, sight: Any) -> Any:
    """CIELAB of a colour #rrggbb."""
    srgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    xyz = to_xyz @ np.clip(np.array(sight) @ linear, 0, 1) / to_xyz.sum(1)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), (903.3 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def least_distance(colors: Sequence[str], sight: Any) -> float:
    places = [lab(color, sight) for color in colors]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(places, 2))


@pytest.mark.parametrize("sight", SIGHT.values(), ids=list(SIGHT))
def test_any_two_colours_differ_to_all_eyes(sight: Any) -> None:
    assert least_distance(plots.COLORS, sight) > 20


def test_the_distance_of_colours_sees_a_confusion() -> None:
    assert lab("#ffffff", SIGHT["all cones"]) == pytest.approx([100, 0, 0], abs=0.1)
    assert lab("#ff0000", SIGHT["all cones"]) == pytest.approx([53.2, 80.1, 67.2], abs=0.3)
    orange_and_green = ("#ff7f0e", "#2ca02c")  # of matplotlib
    assert least_distance(orange_and_green, SIGHT["all cones"]) > 100
    assert least_distance(orange_and_green, SIGHT["protanopia"]) < 10


@pytest.mark.parametrize("name", ["map.png", "map.svg", "map.pdf"])
def test_a_picture_has_the_same_bytes_each_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, time in (("first", "1"), ("second", "2000000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", time)  # matplotlib writes this date instead of today's
        (tmp_path / folder).mkdir()
        plots.save(plots.temperature_sweep(None, HEATS, WEIGHTS, ["near", "far"]).figure, tmp_path / folder / name)
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_the_style_holds_in_its_block_alone() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    drawn, axes = plots.figure(2, 3, height=5, sharex=True)
    with plots.style():
        assert matplotlib.rcParams["axes.prop_cycle"].by_key()["color"] == list(plots.COLORS)
    assert dict(matplotlib.rcParams) == before
    assert (tuple(drawn.get_size_inches()), len(axes)) == ((7, 5), 6)
    (line,) = axes[0].plot([1, 2])
    assert line.get_color() == plots.COLORS[0]
