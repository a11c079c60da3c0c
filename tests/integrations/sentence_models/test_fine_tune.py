"""The example runs, on the packaged data and on a folder like WordNet's."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]


def recalls(*words: str) -> list[float]:
    """recall@10 before and after."""
    paths = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'checked'}:{ROOT}"}  # checks the picture
    command = [sys.executable, str(ROOT / "examples" / "fine_tune.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=paths)
    assert done.returncode == 0, done.stderr
    return [float(one) for one in re.findall(r"'recall_10': ([0-9.]+)", done.stdout)]


def test_the_packaged_words_are_learnt(tmp_path: Path) -> None:
    before, after = recalls("--quick", "--plot", str(tmp_path / "drawn.png"))
    assert after > before
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_definitions_is_read(tmp_path: Path) -> None:
    def lines(name: str, found: list[Any]) -> None:
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(one) + "\n" for one in found)

    lines("records", [{"id": f"r{i}", "gloss": f"number {i}"} for i in range(40)])
    asked = [{"word": f"w{i % 20}", "definition": f"the number {i}", "answers": [f"r{i}"] * 2} for i in range(40)]
    lines("queries", asked)
    np.save(tmp_path / "keys.npy", np.random.default_rng(0).standard_normal((40, 384)).astype(np.float16))
    assert len(recalls("--data", str(tmp_path), "--steps", "2")) == 2
