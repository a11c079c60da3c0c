"""Shards on the ranks of a torch.distributed job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from softdb.cluster.distributed import Ranks
from softdb.errors import BadInput

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks(tmp_path: Path, ranks: int) -> None:
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    results = []
    for rank in range(ranks):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONPATH": paths}
        command = [sys.executable, "-W", "error", str(HERE / "rank.py"), str(tmp_path / "meeting")]
        results.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        actual = [result.communicate(timeout=300)[0] for result in results]
    finally:
        for one in results:
            one.kill()
    for text in actual:
        assert text.strip().endswith("all is well"), "\n\n".join(actual)


def test_without_a_job() -> None:
    with pytest.raises(BadInput, match="not initialised"):
        Ranks({})
