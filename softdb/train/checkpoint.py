"""Checkpoints of a training run: written whole, read back only into the run that they are of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from softdb import check
from softdb.check import Id
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.store.files import write_whole
from softdb.train.projection import packed, unpacked

__all__ = ["identity", "may_write", "read", "write"]

FORMAT = "softdb checkpoint 1"


def identity(
    db: SoftDB,
    queries: Tensor,  # (m, d)
    positives: list[list[Id]],  # m
    settings: dict[str, Any],
) -> dict[str, Any]:
    """All that decides how a run goes on: its settings, the database's state, a digest of the pairs."""
    digest = hashlib.sha256(queries.detach().cpu().contiguous().numpy().tobytes())
    digest.update(json.dumps(positives).encode())
    stats = db.stats()
    return {**settings, **{name: stats[name] for name in ("metric", "generation")}, "pairs": digest.hexdigest()}


def may_write(path: Path | None, resume: bool) -> None:
    """BadInput where a checkpoint would be lost, or there is none to go on from."""
    if path is None:
        if resume:
            raise BadInput("resume goes on from a checkpoint, but no checkpoint is named; give its file")
        return
    if not path.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {path.parent} to write {path.name} into; make it first")
    if resume and not path.is_file():
        raise BadInput(f"there is no checkpoint {path} to resume; leave resume out to begin")
    if not resume and path.exists():
        raise BadInput(f"{path} is there already; go on from it with resume, or remove it")


def write(path: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the state of a run in place of the one before; at any moment one of the two is there, whole."""
    write_whole(path, packed({"format": FORMAT, "run": run, "state": state}))


def read(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The state of a run. Raises BadInput where the file is of another run, naming what differs."""
    found = unpacked(path, "checkpoint")
    if found.get("format") != FORMAT:
        raise BadInput(f"{path} is not a checkpoint that softdb train wrote; give such a file")
    theirs, state = found["run"], found["state"]
    for name, mine in run.items():
        if theirs.get(name) != mine:
            there, here = ("others", "these") if name == "pairs" else (check.shown(theirs.get(name)), check.shown(mine))
            raise BadInput(
                f"{path} is the checkpoint of another run: {name} {there} there, {here} here; give what it was begun "
                "with, or begin anew with another checkpoint"
            )
    return dict(state)
