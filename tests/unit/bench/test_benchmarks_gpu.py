"""`benchmarks/gpu.py` at a tiny size without a GPU: every part checks and is timed, and wrong answers stop it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import softdb

# flex attention is imported where it is asked for, and torch's inductor with it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch itself, in another category on 3.14


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, imported as its command imports it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("gpu")


WORDS = ["--device", "cpu", "--records", "12000", "--dim", "16", "--rounds", "1"]


def test_every_part_of_the_run_checks_and_is_timed(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = bench.main([*WORDS, "--out", str(tmp_path / "gpu.json")])
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == actual["rows"]
    parts = {row["part"].split(",")[0] for row in actual["rows"]}
    assert {"database", "attention", "top-10", "step", "FAISS"} <= parts
    failed = {row["what"]: row["failed"] for row in actual["rows"] if "failed" in row}
    assert set(failed) <= {"torch Flex", "torch Flex, both ways"}  # which the report says
    assert all(row["ms"] > 0 for row in actual["rows"] if "failed" not in row)
    assert {row["goal"] for row in actual["rows"] if row.get("goal")} == {1.429, 2.2, 1.3, 1.05, 2.0}
    table = capsys.readouterr().out
    assert "the CPU" not in table
    assert "left out: LeftOut: is compiled for a GPU alone" in table


def test_a_wrong_answer_stops_the_run(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.gpu.pooled

    def wrong(*args: Any, **words: Any) -> Any:
        output, lse = right(*args, **words)
        return output * 1.01, lse

    monkeypatch.setattr(bench.gpu, "pooled", wrong)
    with pytest.raises(SystemExit, match=r"softdb's kernel, q = 1 is wrong by 1.0e-02; expected at most 1e-04"):
        bench.main(WORDS)


def test_skipped_parts_are_listed(bench: Any) -> None:
    actual = bench.main([*WORDS, "--seconds", "1"])
    assert {row["failed"] for row in actual["rows"][1:]} == {"the time is over"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(bench: Any) -> None:
    with pytest.raises(SystemExit, match="torch sees no CUDA device; --device cpu"):
        bench.main([])
    assert softdb.open(None, dim=2).stats().device is None
