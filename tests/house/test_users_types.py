"""A user's program under strict type checkers: softdb's types are complete and right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import softdb

PROGRAM = """
from __future__ import annotations

from typing import Any

import numpy as np
import torch

import softdb
from softdb import BadInput, Hits, Pooled, SoftDB
from softdb.nn import Memory, View, retrieval_loss
from softdb.scores import Gaussian
from softdb.typing import Ids, Keys


def fill(db: SoftDB, ids: Ids, keys: Keys) -> int:
    db.insert(ids, keys, payloads=[{"n": 1}, None])
    return len(db)


def ask(db: SoftDB, query: torch.Tensor) -> tuple[list[int | str], torch.Tensor]:
    hits: Hits = db.search(query, k=3, where={"n": {"$gte": 1}})
    first = hits[0][0]
    score: float = first.score
    answer: Pooled = db.attend(query, temperature=0.1 + 0 * score)
    smooth = db.attend(query, score=Gaussian(0.3))
    return hits.ids[0], answer.output + smooth.output


def learn(db: SoftDB, batch: torch.Tensor, right: list[int]) -> torch.Tensor:
    view, memory = View(db, torch.nn.Linear(2, 2)), Memory(db)
    print(view, memory(batch).lse)
    loss = retrieval_loss(db, batch, right, temperature=0.05)
    return loss


def payload(db: SoftDB, name: int | str) -> Any:
    try:
        return db[name].payload
    except BadInput as error:
        return str(error)


with softdb.open(None, dim=2, metric="cosine") as db:
    print(fill(db, ["a", 7], np.eye(2)), ask(db, torch.ones(2)), payload(db, "a"), db.build_index().recall)
"""
WRONG = """
import softdb

with softdb.open("there", dim="two") as db:
    db.search([1.0], k="three")
    db.serch([1.0])
"""
PLACE = str(Path(softdb.__file__).parents[1])


def checked(folder: Path, program: str, checker: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    if checker == "mypy":
        pytest.importorskip("mypy", reason="needs softdb[dev]")
        (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {PLACE}\n[mypy-softdb.*]\nfollow_imports = silent\n")
        command = [sys.executable, "-m", "mypy", "--strict", "program.py"]
    else:
        found = shutil.which("basedpyright") or shutil.which("pyright")
        if found is None:
            pytest.skip("needs pyright or basedpyright")
        settings = {"typeCheckingMode": "strict", "extraPaths": [PLACE], "include": ["program.py"]}
        (folder / "pyrightconfig.json").write_text(json.dumps(settings))
        command = [found, "--pythonpath", sys.executable, "program.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_program_has_types_all_through(tmp_path: Path, checker: str) -> None:
    done = checked(tmp_path, PROGRAM, checker)
    assert done.returncode == 0, done.stdout
    exec(compile(PROGRAM, "program.py", "exec"), {"__name__": "program"})


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_reject_a_wrong_program(tmp_path: Path, checker: str) -> None:
    done = checked(tmp_path, WRONG, checker)
    assert done.returncode == 1
    assert all(name in done.stdout for name in ("dim", "k", "serch"))
