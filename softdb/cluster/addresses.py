"""Check a table's address, find the folder of its shards' directories, and prefix errors with a function's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from pathlib import Path
from typing import ParamSpec, TypeVar

from softdb import check
from softdb.errors import BadInput, SoftDBError

P = ParamSpec("P")
R = TypeVar("R")


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that its errors begin with its name."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SoftDBError as error:
            if not hasattr(error, "verb"):
                error.verb = function.__name__  # type: ignore[attr-defined]
                error.args = (f"{function.__name__}: {error.args[0]}", *error.args[1:])
            raise

    return call


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
