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


class Synced:
    """What of a folder is on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: set[str] = set()

    def sync(self) -> None:
        """Bring what is new to disk. Raises WriteFailed. Cost: a look at each file's name, one sync a new file."""
        try:
            self._sync(self.path)
        except OSError as error:
            raise WriteFailed(
                f"{self.path} could not be synced ({error}); what was written may not outlive a crash of the machine"
            ) from error

    def _sync(self, folder: Path) -> None:
        fresh = False
        for entry in list(os.scandir(folder)):
            unknown = entry.path not in self._known
            if entry.is_dir(follow_symlinks=False):
                self._sync(Path(entry.path))
            elif unknown and not entry.name.startswith(".") and "#" not in entry.name:  # else on its way to its name
                files.sync(Path(entry.path))
            else:
                continue
            self._known.add(entry.path)
            fresh |= unknown
        if fresh:
            files.sync_directory(folder)
