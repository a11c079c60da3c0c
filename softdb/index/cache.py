"""Index files, a cache. FAISS' reader does not withstand forged files, so it reads only files that this user signed.

An index file holds three parts: the engine (`codes` bytes), the codes of a companion (`sketches` bytes, maybe 0), and
the statistics for estimates (module `reach`). An entry in the catalogue describes the file: its size and SHA-256, the
tuning, and an HMAC-SHA256 over the entry. The key of the HMAC is stored outside every database, so a database copied
from another user has an entry with another signature; its index file is not read. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Index
from softdb.index.hnsw import HNSW
from softdb.index.ivf import IVF, IVFSQ8
from softdb.index.lists import Lists
from softdb.index.reach import packed, unpacked
from softdb.index.sketches import Sketches
from softdb.store import files
from softdb.store.ours import entries

_log = logging.getLogger("softdb")
_ENGINES: dict[tuple[str, str], type[Index]] = {  # for each kind of index and suffix of its file
    ("ivf", "lists"): Lists, ("hnsw", "faiss"): HNSW, ("ivf", "faiss"): IVF, ("ivf-sq8", "faiss"): IVFSQ8,
    ("sketch", "lists"): Sketches,
}  # fmt: skip
_NAME = re.compile(r"[a-z0-9-]+-[0-9a-f]{16}\.(faiss|lists)")
_ATTRIBUTES = {  # name in an entry -> attribute of the index
    "covered": "covered", "effort": "effort", "candidates": "fetch_k", "tuned_for": "tuned_for", "report": "report",
}  # fmt: skip
_KEY_BYTES = 32


def save(folder: Path, index: Index, generation: int) -> dict[str, Any]:
    """Write an index file atomically and return its entry for the catalogue. Raises NoKey if it cannot be signed."""
    files.make_directory(folder)
    if folder.is_symlink():
        raise OSError(f"{folder} is a link; an index is written into the database's own directory only")
    codes, reach = index.dump().data, None if index.sketches is None else index.sketches.reach
    sketches = b"" if index.companion is None else index.companion.dump().data
    pieces = codes, sketches, b"" if reach is None else packed(reach)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    suffix = "lists" if isinstance(index, Sketches) else "faiss"
    name = f"{index.kind}-{secrets.token_hex(8)}.{suffix}"
    entry = {
        "file": name,
        "kind": index.kind,
        "metric": index.metric.value,
        "generation": generation,
        "bytes": sum(map(len, pieces)),
        "codes": len(codes),
        "sketches": len(sketches),
        "sha256": digest.hexdigest(),
        **{name: getattr(index, attribute) for name, attribute in _ATTRIBUTES.items()},
        "room": index.room,
        "longest": None if index.longest is None else index.longest.tolist(),
    }
    entry["hmac"] = _signature(entry)
    files.write_whole(folder / name, *pieces)
    return entry


def load(folder: Path, entry: dict[str, Any], metric: Metric, dim: int | None = None) -> Index | None:
    """Load the index that an entry describes. Return None and log a warning if this user did not sign the entry.

    `dim`: width of the database's keys. An index of another width is refused, as it would read beyond the keys.
    """
    try:
        data = memoryview(_signed(folder, entry))
        codes = data[: entry.get("codes")]  # entries of older versions lack `codes`: the file holds nothing else
        if entry["metric"] != metric.value:
            raise ValueError(f"the index has the metric {entry['metric']!r}; expected {metric.value!r}")
        engine = _ENGINES.get((entry["kind"], entry["file"].rpartition(".")[2]))
        if engine is None:
            raise ValueError(f"the index is of kind {entry['kind']!r}, which this version of softdb cannot read")
        index = engine.loaded(metric, np.frombuffer(codes, np.uint8), dim)
        longest = entry.get("longest")  # older versions stored neither `longest` nor `room`
        index.room, index.longest = entry.get("room"), None if longest is None else np.array(longest, np.int64)
    except (NoKey, OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        _log.warning("index ignored, search is exact: %s; build_index() makes a new one", error)
        return None
    for name, attribute in _ATTRIBUTES.items():
        setattr(index, attribute, entry[name])
    try:
        _load_drawing(index, data[len(codes) :], entry.get("sketches", 0), dim)
    except (ValueError, RuntimeError) as error:
        _log.warning("part of the index file is ignored: %s; softdb measures it again, or estimates are exact", error)
    return index


def _load_drawing(index: Index, data: memoryview, size: int, dim: int | None) -> None:
    """Read the companion from the first `size` bytes, and the statistics `reach`. Raises ValueError or RuntimeError."""
    if size:
        companion = Sketches.loaded(index.metric, np.frombuffer(data[:size], np.uint8), dim)
        companion.covered = index.covered
        index.companion = companion
    if size < len(data) and isinstance(index.sketches, Sketches):
        index.sketches.reach = unpacked(data[size:], index.sketches)


def _signed(folder: Path, entry: dict[str, Any]) -> bytes:
    """Return the bytes of an index file. Raises ValueError if this user did not sign entry and bytes; OSError."""
    name = entry.get("file")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("its entry is not one that softdb writes")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link")
    if not hmac.compare_digest(_signature(entry).encode(), str(entry.get("hmac")).encode("utf-8", "replace")):
        raise ValueError("the index file does not carry this user's signature")
    if missing := {"kind", "metric", "bytes", "sha256", *_ATTRIBUTES} - set(entry):
        raise ValueError(f"its entry, written by another version of softdb, lacks {', '.join(sorted(missing))}")
    with files.open_regular(folder / name) as file:
        data = file.read(entry["bytes"] + 1)
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise ValueError(f"{name} is not the file that this user has signed")
    return data


def clean(folder: Path, keep: str | None) -> None:
    """Remove index files that the catalogue does not name."""
    for path in entries(folder)[0] if folder.is_dir() and not folder.is_symlink() else ():
        if path.name != keep and not path.is_dir():
            files.remove(path)


def _signature(entry: dict[str, Any]) -> str:
    """Return the HMAC-SHA256 of an entry, as hexadecimal digits."""
    plain = json.dumps({name: value for name, value in entry.items() if name != "hmac"}, sort_keys=True).encode()
    return hmac.new(_key(), plain, hashlib.sha256).hexdigest()


class NoKey(Exception):
    """The key that signs index files cannot be read or created."""


def _key() -> bytes:
    """Return this user's signing key, created when first needed. Raises NoKey."""
    path = _key_path()
    try:
        if not path.exists():
            files.make_once(path, secrets.token_bytes(_KEY_BYTES))
        return _private(path)
    except (OSError, ValueError) as error:
        raise NoKey(f"the signing key {path} cannot be used: {error}; replace it or set SOFTDB_KEY_FILE") from error


def _private(path: Path) -> bytes:
    """Read the signing key. Raises ValueError unless it is a regular file that only this user can write; OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("the key file is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError("another user owns the key file or may write to it")
        key = os.read(descriptor, _KEY_BYTES + 1)
        if len(key) != _KEY_BYTES:
            raise ValueError(f"the key file does not hold {_KEY_BYTES} bytes")
        return key
    finally:
        os.close(descriptor)


def _key_path() -> Path:
    if named := os.environ.get("SOFTDB_KEY_FILE"):
        return Path(named)
    try:
        state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    except RuntimeError as error:
        raise NoKey(f"there is no directory for a signing key: {error}; set SOFTDB_KEY_FILE") from None
    return Path(state) / "softdb" / "index.key"
