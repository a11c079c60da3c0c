"""The check of pictures accepts a readable one, and refuses one that lacks a label, a title, a legend or room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="pictures need matplotlib")

from figures import assert_readable

from softdb import plots


def readable() -> tuple[Any, Any]:
    drawn, (ax,) = plots.figure()
    ax.plot([1, 2], label="a")
    ax.plot([2, 1], label="b")
    ax.set(xlabel="step", ylabel="loss", title="Losses")
    ax.legend()
    return drawn, ax


def test_a_readable_picture_is_accepted() -> None:
    assert_readable(readable()[0])


REFUSED: list[tuple[str, Callable[[Any, Any], object]]] = [
    ("no title", lambda drawn, ax: ax.set_title("")),
    ("the x axis of 'Losses' has no label", lambda drawn, ax: ax.set_xlabel("")),
    ("the y axis of 'Losses' has no label", lambda drawn, ax: ax.set_ylabel("")),
    ("2 series and no legend", lambda drawn, ax: ax.get_legend().remove()),
    ("a line in", lambda drawn, ax: ax.lines[0].set_color("tab:green")),
    ("'step' is 5.8 points", lambda drawn, ax: ax.xaxis.label.set_fontsize(5.6)),
    ("'Losses.*' begins outside the picture", lambda drawn, ax: ax.set_title("Losses" * 30)),
    ("'Losses' and 'another' overlap", lambda drawn, ax: ax.set_title("another", loc="left", x=0.49)),
    ("'1' and '1' overlap", lambda drawn, ax: ax.set_xticks([0, 0.001], ["1", "1"])),
    ("the background is not opaque", lambda drawn, ax: drawn.set_facecolor("none")),
]


@pytest.mark.parametrize(("message", "spoil"), REFUSED)
def test_an_unreadable_picture_is_refused(message: str, spoil: Callable[[Any, Any], object]) -> None:
    drawn, ax = readable()
    spoil(drawn, ax)
    with pytest.raises(AssertionError, match=message):
        assert_readable(drawn)
