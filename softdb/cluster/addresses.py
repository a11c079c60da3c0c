"""Check a table's address, and find the folder of its shards' directories."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from softdb import check
from softdb.errors import BadInput


def address(url: str | os.PathLike[str]) -> str:
    """Return a table's address as text; a folder's path becomes absolute. Raises BadInput for an invalid address."""
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise BadInput(f"url is {check.shown(url)}; expected a folder, or an address such as s3://bucket/records.lance")
    text = os.fspath(url)
    return text if "://" in text else str(check.folder(text, "url", "a folder").absolute())


def folder_of(url: str, cache: str | os.PathLike[str] | None) -> Path:
    """Return the folder for a table's shards on this machine: below `cache`, or below ~/.cache/softdb if it is None."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softdb" if cache is None else Path(cache)
    return base / blake2b(url.encode(), digest_size=8).hexdigest()
