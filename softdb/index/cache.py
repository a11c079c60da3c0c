"""Index files: a cache, never the truth. FAISS' reader is not hardened: it sees only what this user has signed.

An index file is the engine's bytes; its entry in the catalogue holds what else is to be known, and an HMAC-SHA256 over
both under a key that lies outside every database. A database from elsewhere has another signature, and its index is
left aside. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import Metric
from softdb.index.build import KINDS
from softdb.index.contract import Index, faiss_module
from softdb.store import files

__all__ = ["load", "save"]

_log = logging.getLogger("softdb")
_NAME = re.compile(r"(ivf|ivf-sq8|ivf-rabitq|hnsw)-[0-9a-f]{16}\.faiss")
_KEPT = ("covered", "effort", "candidates", "tuned_for", "report")  # of an index, beside its bytes
_KEY_BYTES = 32


def save(folder: Path, index: Index, generation: int) -> dict[str, Any]:
    """Write an index file, whole or not at all, and return its entry for the catalogue."""
    files.make_directory(folder)
    data = index.dump()
    name = f"{index.kind}-{secrets.token_hex(8)}.faiss"
    entry = {
        "file": name,
        "kind": index.kind,
        "metric": index.metric.value,
        "generation": generation,
        **{attribute: getattr(index, attribute) for attribute in _KEPT},
    }
    entry["hmac"] = _signature(entry, data.data)
    files.write_whole(folder / name, data.data)
    return entry


def load(folder: Path, entry: dict[str, Any], metric: Metric) -> Index | None:
    """The index of an entry, or None, with one line in the log, where it is not one that this user has signed."""
    name = entry.get("file")
    try:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or entry.get("metric") != metric.value:
            raise ValueError("its entry is not one that softdb writes")
        with files.reading(folder / name) as file:
            data = file.read()
        if not hmac.compare_digest(_signature(entry, data).encode(), str(entry.get("hmac")).encode()):
            raise ValueError("it does not carry this user's signature")
        if missing := {"kind", *_KEPT} - set(entry):
            raise ValueError(f"its entry, of another version of softdb, lacks {', '.join(sorted(missing))}")
        index = KINDS[entry["kind"]](metric, faiss_module().deserialize_index(np.frombuffer(data, np.uint8)))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        _log.warning("index left aside, search is exact: %s; build_index() makes a new one", error)
        return None
    for attribute in _KEPT:
        setattr(index, attribute, entry[attribute])
    return index


def clean(folder: Path, keep: str | None) -> None:
    """Remove index files that the catalogue does not name."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != keep and _NAME.fullmatch(path.name.removesuffix(".tmp")):
            files.remove(path)


def _signature(entry: dict[str, Any], data: bytes | memoryview) -> str:
    """HMAC-SHA256 over the entry and the file's bytes."""
    plain = json.dumps({name: value for name, value in entry.items() if name != "hmac"}, sort_keys=True).encode()
    code = hmac.new(_key(), len(plain).to_bytes(8, "little") + plain, hashlib.sha256)
    code.update(data)
    return code.hexdigest()


def _key() -> bytes:
    """This user's key, made when first needed."""
    path = _key_path()
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        files.make_once(path, secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ValueError(f"the signing key {path} is not {_KEY_BYTES} bytes; remove it")
    return key


def _key_path() -> Path:
    named = os.environ.get("SOFTDB_KEY_FILE")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "softdb" / "index.key"
