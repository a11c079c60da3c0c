"""Bringing a Lance table in a local folder to disk: Lance itself syncs nothing.

A commit of Lance writes data and deletions, then a manifest, whose name is the commit. Synced after that, and before a
verb returns, is every file that this handle has not synced before, whoever wrote it: a version holds what all before it
have written. If the power fails before, the newest version may be torn, which nobody was told of: the one before it is
whole, and `lance.dataset(url, version=…).restore()` goes back to it.
"""

from __future__ import annotations

import os
from pathlib import Path

from softdb.errors import WriteFailed
from softdb.store import files

__all__ = ["Synced"]

_FOLDERS = ("data", "_deletions", "_indices", "_transactions", "_versions")


class Synced:
    """What of a folder is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: set[str] = set()
        files.sync_directory(path)

    def sync(self) -> None:
        """Bring what is new to disk. Raises WriteFailed. Cost: a look at each file's name, one sync a new file."""
        try:
            for name in _FOLDERS:
                self._sync(self.path / name)
        except OSError as error:
            raise WriteFailed(
                f"{self.path} could not be synced ({error}); what was written may not outlive a crash of the machine"
            ) from error

    def _sync(self, folder: Path) -> None:
        fresh = False
        for entry in list(os.scandir(folder)) if folder.is_dir() else ():
            if entry.is_dir(follow_symlinks=False):
                self._sync(Path(entry.path))
            elif entry.path not in self._known and not entry.name.startswith(".") and "#" not in entry.name:
                files.sync(Path(entry.path))
                self._known.add(entry.path)
                fresh = True
        if fresh:
            files.sync_directory(folder)
