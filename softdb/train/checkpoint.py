"""Checkpoints of a training run: written whole, read back only into the run that they are of."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from softdb import check
from softdb.check import Id
from softdb.database import SoftDB, Verbs
from softdb.errors import BadInput
from softdb.store.files import write_whole
from softdb.train.held_out import Split
from softdb.train.projection import packed, unpacked

FORMAT = "softdb checkpoint 1"
SAMPLE = 1024  # stored keys that tell one database from another
COUNTERS = ("unindexed", "live_recall", "live_checked", "building", "device")  # of an index that stays the same
UNNAMED = {"pairs": ("others", "these"), "keys": ("others", "these"), "index": ("another", "this one")}


def identity(
    db: Verbs,
    queries: Tensor,  # (m, d)
    positives: list[list[Id]],  # m
    parts: Split,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """All that decides how a run goes on: its settings, the pairs, the database's state, with k or rtol its index.

    Stored keys are told by a digest of up to 1,024 of them, spread evenly, and by where the right records stand: a
    database that differs in other keys alone, at the same generation, is not told apart.
    """
    digest = hashlib.sha256(queries.detach().cpu().contiguous().numpy().tobytes())
    digest.update(json.dumps(positives).encode())
    if settings["holdout"] is None:  # the caller said which are held out
        digest.update(parts.train.numpy().tobytes())
    stats = db.stats()
    facts = {name: getattr(stats, name) for name in ("dim", "dtype", "metric", "generation", "records")}
    found = {**settings, **facts, "pairs": digest.hexdigest(), "keys": _keys(db, positives)}
    if settings.get("k") is not None or settings.get("rtol") is not None:  # else every record takes part, exactly
        told = {} if stats.index is None else stats.index.asdict()
        index = {name: fact for name, fact in told.items() if name not in COUNTERS}
        found["index"] = json.dumps(index, sort_keys=True, default=str)
    return found


def _keys(db: Verbs, positives: list[list[Id]]) -> str:
    """A digest of some of the stored keys, and of the rows of the right records."""
    digest = hashlib.blake2b(db.core.sample_keys(SAMPLE).cpu().numpy().tobytes(), digest_size=16)
    rows = db.core.located([one for mine in positives for one in mine])
    digest.update((rows if isinstance(db, SoftDB) else rows >= 0).tobytes())  # a cluster's directories number anew
    return digest.hexdigest()


def require_writable(path: Path) -> None:
    """BadInput where `write_whole` could not write a file: found out before what is written takes long to make."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder; give a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be written ({error}); give a file in a folder that can") from None


def may_write(path: Path | None, resume: bool, database: Path | None) -> None:
    """BadInput where a checkpoint would be lost or cannot be written, or there is none to go on from."""
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
    if database is not None and database.resolve() in path.resolve().parents:
        raise BadInput(f"checkpoint {path} is inside the database {database}; give a file elsewhere")
    require_writable(path)


def write(path: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Write the state of a run in place of the one before; at any moment one of the two is there, whole."""
    write_whole(path, packed({"format": FORMAT, "run": run, "state": state}))


def read(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The state of a run. Raises BadInput where the file is of another run, naming what differs."""
    found = unpacked(path, "checkpoint")
    theirs, state = found.get("run"), found.get("state")
    if found.get("format") != FORMAT or not isinstance(theirs, dict) or not isinstance(state, dict):
        raise BadInput(f"{path} is not a checkpoint that softdb train wrote; give such a file")
    for name, mine in run.items():
        if theirs.get(name) != mine:
            there, here = UNNAMED.get(name, (check.shown(theirs.get(name)), check.shown(mine)))
            raise BadInput(
                f"{path} is the checkpoint of another run: {name} {there} there, {here} here; give what it was begun "
                "with, or begin anew with another checkpoint"
            )
    return dict(state)
