"""The short examples end in assertions of their own and draw their pictures."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from test_examples import ELSEWHERE, EXAMPLES, QUICK, ROOT, assert_drawn, run

SHORT = (
    "kernels.py", "attention_pooling.py", "masked_scores.py", "image_memory.py", "self_attention.py", "kitchen.py",
    "local_bandwidth.py", "heat_map.py", "cross_modal.py",
)  # fmt: skip
LONGER = (
    "alignment.py", "digit_bags.py", "kernel_regression.py", "density.py", "trained_memory.py", "hard_attention.py",
    "soft_neighbours.py", "translation.py", "transformer_block.py", "next_item.py",
)  # fmt: skip


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_an_example_prints_what_it_claims(name: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / name
    assert "\n    assert " in example.read_text() or "\n        assert " in example.read_text()
    assert run(example, tmp_path, *QUICK)
    assert_drawn(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*LONGER, "train_projection.py", "torchrun.py"])
def test_an_example_in_full_prints_what_it_claims(name: str, tmp_path: Path) -> None:
    assert run(ROOT / "examples" / name, tmp_path)


CHANNELS = {"red": 0, "tomato": 0, "wooden": 0, "green": 1, "blue": 2, "water": 2}  # of a colour, the strongest


def test_the_kitchen_is_drawn_in_the_colours_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    colors, plots = pytest.importorskip("matplotlib.colors"), pytest.importorskip("softdb.plots")
    drawn = list[Any]()
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    monkeypatch.syspath_prepend(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples" / "kitchen.py"))["main"]("kitchen.png")
    (axes,) = drawn[0].axes
    handles, labels = axes.get_legend().legend_handles, [text.get_text() for text in axes.get_legend().get_texts()]
    shown = [(bars.get_label(), bar) for bars in axes.containers for bar in bars] + list(
        zip(labels, handles, strict=True)
    )
    assert len({label for label, _ in shown}) == 8 == len({bar.get_facecolor() for _, bar in shown})
    for label, bar in shown:
        color = colors.to_rgb(bar.get_facecolor())
        assert color.index(max(color)) == CHANNELS[label.split()[0]], label


def test_each_is_short() -> None:
    assert all(len(example.read_text().splitlines()) <= 80 for example in (ROOT / "examples").glob("*.py"))


def test_the_table_has_every_example_and_its_pictures() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\((\w+\.py)\): .+ \| !\[(.+?)\]\((\S+)\) \|$", table, re.MULTILINE)
    assert {name for name, _, _ in rows} == {example.name for example in EXAMPLES} | ELSEWHERE
    assert len(rows) == table.count("\n| [") == len({text for _, text, _ in rows})
    for _, _, picture in rows:
        assert (ROOT / "examples" / picture).stat().st_size < 200_000
