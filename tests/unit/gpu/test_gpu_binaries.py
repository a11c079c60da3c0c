"""Triton kernels compile for devices that are absent here, and fit them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_binaries")


def test_the_results_are_of_the_launched_kernels(binaries: Any) -> None:
    told = json.loads((BENCHMARKS / "results" / "gpu_binaries.json").read_text())["binaries"]
    launched = [
        {"target": target, "case": case.name, **launched.facts}
        for target, (_, processors, _) in binaries.TARGETS.items()
        for case in binaries.CASES
        for launched in binaries.recorded(case, processors)
    ]
    assert [{name: row[name] for name in launched[0]} for row in told] == launched
    assert {one["kernel"] for one in launched} == {name for names in binaries.KERNELS.values() for name in names}
    for row in told:
        assert row["shared"] <= binaries.TARGETS[row["target"]][2] << 10, row
        assert row["stack"] <= 256, row  # bytes of registers that are spilt
    assert not any(row["stack"] for row in told if "d=128 v=128" in row["case"])  # the shapes in the report


@pytest.mark.parametrize(
    "how", [["--few", "--target", "sm_90"], pytest.param([], marks=pytest.mark.slow, id="all")]
)  # fmt: skip
def test_kernels_compile_and_fit_the_device(how: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(BENCHMARKS / "gpu_binaries.py"), *how, "--output", str(tmp_path / "found.json")]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert made.returncode == 0, made.stdout + made.stderr
    assert len(json.loads((tmp_path / "found.json").read_text())["binaries"]) >= 5
