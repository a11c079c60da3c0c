"""The worked examples of learning reach the results that their docstrings state."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_examples import ROOT, run


@pytest.mark.slow
def test_attention_finds_the_nines_in_bags_of_digits(tmp_path: Path) -> None:
    shown = run(ROOT / "examples" / "digit_bags.py", tmp_path)
    lines = shown.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("pooling"))
    assert [line.split(",")[0] for line in lines[:first:4]] == [
        f"training {name}" for name in ("attention", "gated attention", "mean", "max")
    ]
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in lines[first + 1 :]}
    assert list(rows) == ["attention", "gated attention", "mean", "max", "by chance"]
    mean = rows["mean"][0]
    for name in ("attention", "gated attention"):
        auc, pointed = rows[name]
        assert auc >= 0.97
        assert auc > mean + 0.05
        assert pointed >= 0.9
    assert rows["by chance"][0] < 0.3


@pytest.mark.exhaustive
def test_a_decoder_finds_the_alignment(tmp_path: Path) -> None:
    shown = run(ROOT / "examples" / "alignment.py", tmp_path, "mine.png")
    assert shown.startswith("step   1 of ")
    lines = {line[:23].strip(): line[23:].split() for line in shown.splitlines()}
    read, _, written = lines["an answer"]
    assert written == ".".join(reversed(read.split("-")))
    assert float(lines["dates right"][0]) >= 0.95
    assert float(lines["digits aligned"][0]) >= 0.95
    assert lines["picture"] == ["mine.png"]
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_learned_bandwidth_is_nearest_to_the_curve(tmp_path: Path) -> None:
    shown = run(ROOT / "examples" / "kernel_regression.py", tmp_path)
    lines = shown.splitlines()
    rows = {name: (float(h), float(error)) for name, h, error in (line.split() for line in lines[1:5])}
    h, error = rows.pop("learned")
    assert list(rows) == ["narrow", "silverman", "wide"]
    assert error < 0.6 * min(other for _, other in rows.values())
    assert rows["narrow"][0] < h < rows["wide"][0]
    words = lines[-1].replace(",", "").split()
    counts, idle = float(words[words.index("h") + 1]), float(words[words.index("h") + 3])
    assert idle > 20 * counts
    assert float(words[-1]) < 0.6 * min(other for _, other in rows.values())
