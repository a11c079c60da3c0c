"""Requirements of a picture: labels, title, legend, and text that a reader can read on a page.

A page shows a picture about 700 pixels wide. tests/checked/sitecustomize.py checks each picture that an example draws.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from matplotlib.colors import same_color, to_rgb
from matplotlib.text import Text

from softdb.plots import COLORS, style

PAGE = 700  # pixels
SMALLEST = 8  # points, of which a page has 96 / 72 pixels each


@style()
def assert_readable(figure: Any) -> None:
    """Fail if a reader of the picture would lack a label, a title or a legend, or could not read a text."""
    figure.canvas.draw()  # places everything
    assert same_color(figure.get_facecolor(), "white"), "the background is not opaque white, for dark pages"
    assert any(text.get_text() for text in _titles(figure)), "no title"
    assert figure.axes
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if any(label.get_text()[0] in "0123456789−$" for label in _ticks(axis)):  # names need no label
                assert axis.get_label().get_text(), f"the {axis.axis_name} axis of {_name(ax)} has no label"
        series = {_look(artist) for artist in (*ax.lines, *ax.collections, *ax.containers)}
        if len(series) > 1 and ax.get_label() != "<colorbar>":
            names = {artist.get_label() for artist in (*ax.lines, *ax.collections, *ax.containers)}
            elsewhere = names and names <= _in_legends(figure)  # the axes beside it name the same series
            assert ax.get_legend() or figure.legends or elsewhere, f"{len(series)} series and no legend"
        for line in ax.lines:
            color = to_rgb(line.get_color())
            assert len(set(color)) == 1 or any(same_color(color, own) for own in COLORS), f"a line in {color}"
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            size = text.get_fontsize() / 72 * PAGE / figure.get_figwidth()
            assert size >= SMALLEST * 96 / 72, f"{text.get_text()!r} is {size * 72 / 96:.1f} points"
    boxes = list(_boxes(figure))
    for name, box in boxes:
        assert figure.bbox.padded(1).containsx(box.x0), f"{name} begins outside the picture"
        assert figure.bbox.padded(1).containsx(box.x1), f"{name} ends outside the picture"
        assert figure.bbox.padded(1).containsy(box.y0), f"{name} is below the picture"
        assert figure.bbox.padded(1).containsy(box.y1), f"{name} is above the picture"
    for (name, box), (other, second) in itertools.combinations(boxes, 2):
        assert not box.padded(-1).overlaps(second.padded(-1)), f"{name} and {other} overlap"


def _name(ax: Any) -> str:
    return repr(ax.get_title() or ax.get_title(loc="left"))


def _titles(figure: Any) -> Iterator[Text]:
    for ax in figure.axes:
        yield from (ax.title, ax._left_title)
    if figure._suptitle is not None:
        yield figure._suptitle


def _in_legends(figure: Any) -> set[str]:
    legends = (ax.get_legend() for ax in figure.axes)
    return {text.get_text() for legend in legends if legend for text in legend.get_texts()}


def _ticks(axis: Any) -> list[Text]:
    """Return the labels of the ticks in view."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    ticks = [tick for tick in axis.get_major_ticks() if low - slack <= tick.get_loc() <= high + slack]
    return [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]


def _look(artist: Any) -> Any:
    """Return what tells a series from another of the same axes."""
    if hasattr(artist, "get_marker"):
        return to_rgb(artist.get_color()), artist.get_linestyle(), artist.get_marker()
    return id(artist)  # points, areas and bars are drawn at once


def _boxes(figure: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and place of each title, label and legend that must not cover another."""
    for text in (
        *_titles(figure),
        *(axis.get_label() for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)),
        *(label for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for label in _ticks(axis)),
    ):
        if text.get_text() and text.get_visible() and text.get_rotation() in (0, 90):
            yield repr(text.get_text()), text.get_window_extent()
    for legend in figure.legends:
        yield "the figure's legend", legend.get_window_extent()
