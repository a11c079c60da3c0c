"""Files and folders that records come from: their kinds, and their errors as BadInput that names them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from softdb.check import shown
from softdb.errors import BadInput, MissingDependency

__all__ = ["kind_of", "readable", "reason", "require_plain"]


def kind_of(path: Path, expected: str, *kinds: str) -> str:
    """The suffix before `.gz` of a file that is there, one of `kinds`."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file; give one of {expected}")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in kinds:
        raise BadInput(f"{path.name} has a name of no known kind; expected {expected}")
    return kind


def require_plain(folder: Path) -> None:
    """BadInput where a folder holds a link, a pipe or a device, which may lead anywhere or never end."""
    for place, folders, files in os.walk(folder):
        for part in (Path(place, name) for name in (*folders, *files)):
            if not stat.S_ISREG(mode := part.lstat().st_mode) and not stat.S_ISDIR(mode):
                raise BadInput(f"{folder.name} holds {shown(part.name)}, a link or no file; put a copy there")


@contextlib.contextmanager
def readable(path: Path, what: str = "", advice: str = "") -> Iterator[None]:
    """Raise BadInput for the errors of other packages, which are of every kind for a file that is damaged."""
    try:
        yield
    except (BadInput, MissingDependency):
        raise
    except Exception as error:
        raise BadInput(f"{path.name} cannot be read{what} ({reason(error)}){advice}") from None


def reason(error: Exception) -> str:
    """An error in one line."""
    return shown(" ".join(str(error).split()) or type(error).__name__)
