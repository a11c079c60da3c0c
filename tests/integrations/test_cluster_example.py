"""examples/cluster.py, where Lance is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("on", ["here", "ray"])
def test_the_cluster_answers_as_one_database(tmp_path: Path, on: str) -> None:
    if on == "ray":
        pytest.importorskip("ray", reason="actors are Ray's")
    command = [sys.executable, str(ROOT / "examples" / "cluster.py"), on, "--quick", "--plot", "drawn.png"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'checked'}:{ROOT}"}  # checks the picture
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env)
    if "timed out during startup" in done.stderr:
        pytest.skip("Ray does not start here in the 30 s that it gives itself")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [
        "written",
        "queried",
        "made",
        *(["grown"] if on == "here" else []),
        "refreshed",
    ]
    assert lines[-1][-2:] == ["->", "['r0']"]
