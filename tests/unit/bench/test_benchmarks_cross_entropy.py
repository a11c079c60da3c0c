"""`benchmarks/cross_entropy.py` on a small case: every way is measured, and a wrong answer stops the run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"),
    reason="torch's own operator, a peer of the benchmark, is missing",
)
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cross_entropy")


def test_a_small_case(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    threads = str(torch.get_num_threads())
    arguments = ["--cases", "8x3000x16", "--rounds", "1", "--threads", threads, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["cross_entropy.py", *arguments])
    benchmark.main()
    (case,) = json.loads(out.read_text())["cases"]
    assert set(case["ways"]) == set(benchmark.ways(3000))
    ways = case["ways"]
    assert all(way["step_ms"]["min"] > 0 for way in ways.values())
    assert ways["softdb k=64, max_draws=1000"]["gradient_error"] < ways["softdb max_draws=1000"]["gradient_error"]


def test_a_wrong_loss_is_not_timed(benchmark: Any) -> None:
    wrong = benchmark.ways(300) | {"softdb exact": lambda *world: 1.001 * benchmark.plain(*world)}
    with pytest.raises(ValueError, match="softdb exact differs from float64"):
        benchmark.require_right(benchmark.made(4, 300, 8), wrong)
