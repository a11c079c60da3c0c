"""Write checkpoints of a training run atomically, and read them back only into the same run."""

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
SAMPLE = 1024  # number of stored keys that the digest of the database includes
COUNTERS = ("unindexed", "live_recall", "live_checked", "building", "device")  # may change though the index does not
DIGESTS = {"pairs": "the pairs differ", "keys": "the keys differ", "index": "the index differs"}  # messages of `read`


def identity(
    db: Verbs,
    queries: Tensor,  # (m, d)
    positives: list[list[Id]],  # m
    sides: Split,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return the facts that a resumed run must match: settings, pairs, database and, with k or rtol, the index.

    The stored keys are represented by a digest of up to 1,024 keys, spread evenly, and of the rows of the right
    records. So a difference in other keys alone, at the same generation, is not noticed.
    """
    digest = hashlib.sha256(queries.detach().cpu().contiguous().numpy().tobytes())
    digest.update(json.dumps(positives).encode())
    if settings["holdout"] is None:  # None: the caller chose the held-out queries
        digest.update(sides.train.numpy().tobytes())
    stats = db.stats()
    facts = {name: getattr(stats, name) for name in ("dim", "dtype", "metric", "generation", "records")}
    run = {**settings, **facts, "pairs": digest.hexdigest(), "keys": _keys(db, positives)}
    if settings.get("k") is not None or settings.get("rtol") is not None:  # other runs do not use the index
        report = {} if stats.index is None else stats.index.asdict()
        index = {name: fact for name, fact in report.items() if name not in COUNTERS}
        run["index"] = json.dumps(index, sort_keys=True, default=str)
    return run


def _keys(db: Verbs, positives: list[list[Id]]) -> str:
    """Return a digest of a sample of the stored keys and of the rows of the right records."""
    digest = hashlib.blake2b(db.core.sample_keys(SAMPLE).cpu().numpy().tobytes(), digest_size=16)
    rows = db.core.located([name for ids in positives for name in ids])
    digest.update((rows if isinstance(db, SoftDB) else rows >= 0).tobytes())  # rows of a cluster's shards may change
    return digest.hexdigest()


def require_writable(path: Path) -> None:
    """Raise BadInput if the file could not be written. Call this before the work whose result will be written."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder; give a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be written ({error}); give a file in a folder that can") from None


def may_write(path: Path | None, resume: bool, database: Path | None) -> None:
    """Raise BadInput if a checkpoint would be overwritten, cannot be written, or is missing with `resume`."""
    if path is None:
        if resume:
            raise BadInput("resume is True, but no checkpoint is named; pass the path of its file")
        return
    if not path.absolute().parent.is_dir():
        raise BadInput(f"there is no folder {path.parent} to write {path.name} into; make it first")
    if resume and not path.is_file():
        raise BadInput(f"there is no checkpoint {path} to resume; leave resume out to begin")
    if not resume and path.exists():
        raise BadInput(f"{path} exists already; continue from it with resume, or remove it")
    if database is not None and database.resolve() in path.resolve().parents:
        raise BadInput(f"checkpoint {path} is inside the database {database}; give a file elsewhere")
    require_writable(path)


def write(path: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    """Replace the checkpoint file by the state of a run. After a crash the file is the old or the new one, complete."""
    write_whole(path, packed({"format": FORMAT, "run": run, "state": state}))


def read(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Read the state of a run. Raises BadInput, naming the first difference, if the file belongs to another run."""
    content = unpacked(path, "checkpoint")
    saved, state = content.get("run"), content.get("state")
    if content.get("format") != FORMAT or not isinstance(saved, dict) or not isinstance(state, dict):
        raise BadInput(f"{path} is not a checkpoint that softdb train wrote; give such a file")
    for name, fact in run.items():
        if saved.get(name) != fact:
            change = f"{name} was {check.shown(saved.get(name))} and is now {check.shown(fact)}"
            raise BadInput(
                f"{path} is the checkpoint of another run: {DIGESTS.get(name, change)}; resume with its own "
                "arguments and data, or begin anew with another checkpoint"
            )
    return dict(state)
