"""`benchmarks/negatives.py`: its points are chosen without the reported definitions, and the page quotes its file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def negatives(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("negatives")


def point(step: int, choose: float, test: float, seconds: float = 1.0) -> dict[str, Any]:
    return {"seconds": seconds, "step": step, "choose": {"mrr_100": choose},
            "test": {"recall_1": test, "recall_10": test + 0.1, "mrr_100": test}}  # fmt: skip


def test_the_definitions_that_choose_choose_the_point(negatives: Any) -> None:
    curve = [point(0, 0.1, 0.1), point(5, 0.3, 0.2), point(9, 0.2, 0.9, 2.0)]
    assert negatives.chosen_point(curve) is curve[1]
    curves = dict.fromkeys(negatives.CHOSEN, curve) | {"corpus": [point(0, 0.1, 0.1), point(4, 0.5, 0.3)]}
    rows = {row["way"]: row for row in negatives.summary([{"batch": 64, "curves": curves}] * 2)}
    assert {way: row["recall_1"] for way, row in rows.items()} == {
        "untrained": 0.1, "corpus": 0.3, negatives.STEPS: 0.2, negatives.TIME: 0.2,
    }  # fmt: skip
    assert rows[negatives.TIME]["last"] == {"steps": [9, 9], "recall_1": 0.9, "recall_10": 1.0, "mrr_100": 0.9}
    assert rows[negatives.TIME]["ms_a_step"] == pytest.approx(2000 / 9)


def test_sides_share_no_word_and_validation_leaves_the_reported_words_out(negatives: Any) -> None:
    class World:
        groups = np.arange(1000) // 3

    words = {}
    for validate in (False, True):
        sides = negatives.Sides(World(), 0, validate, 60)
        parts = [set(World.groups[part.numpy()].tolist()) for part in (sides.train, sides.choose, sides.test)]
        assert len(set().union(*parts)) == sum(map(len, parts))
        assert len(sides.choose) == len(sides.test) == 60
        words[validate] = parts
    assert not (words[True][0] | words[True][1] | words[True][2]) & (words[False][1] | words[False][2])


def test_the_summary_is_that_of_the_runs(negatives: Any) -> None:
    result = json.loads((BENCHMARKS / "results" / "negatives.json").read_text())
    assert result["summary"] == negatives.summary(result["runs"])
    assert len({run["seed"] for run in result["runs"]}) >= 2
