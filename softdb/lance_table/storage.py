"""Open tables with Lance, convert Lance's errors to softdb's, and sync local tables to disk."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from softdb.check import Id
from softdb.errors import BadInput, CorruptionError, NotADatabase, SoftDBError, StorageUnavailable, WriteFailed
from softdb.store import files
from softdb.tables.arrow_tables import needed

_log = logging.getLogger("softdb")
LANCE = (OSError, ValueError, RuntimeError)  # types of exceptions that Lance raises
LEVELS, MANY = (1 << 10, 1 << 13), 32  # MANY files with fewer rows than a level are merged to files of that level
_NOISE = r",? /\S+\.rs:\d+:\d+|External error: |LanceError\(\w+\): |Generic \S+ error: "
_UNREACHABLE = r"Error performing|error sending request|Failed to resolve|[Tt]imed out|Permission denied|os error 5\)"


def dataset_at(url: str, options: dict[str, str] | None) -> Any:
    """Open the newest version of the table at `url`. Raises the errors that `failure` returns."""
    lance = needed("lance", "cluster", "a cluster")
    with lance_errors(url):
        return lance.dataset(url, storage_options=options)


@contextlib.contextmanager
def lance_errors(url: str) -> Iterator[None]:
    """Convert errors of Lance in a `with` block to errors of softdb, by `failure`."""
    try:
        yield
    except SoftDBError:
        raise
    except LANCE as error:
        raise failure(url, error) from error


def failure(url: str, error: Exception) -> SoftDBError:
    """Convert an error that Lance raised while reading a table to an error of softdb."""
    text, missing = cause(error), missing_file(error)
    if "No object store provider" in text:
        return BadInput(f"url {url!r} cannot be opened by Lance ({text}); give a folder, or s3://, gs:// or az://")
    if missing is None and re.search(_UNREACHABLE, text):
        return StorageUnavailable(
            f"{url} cannot be reached ({text}); try again later, or check the address, and the keys, region and "
            "endpoint in storage_options="
        )
    if "Dataset at path" in text or ("://" not in url and not Path(url, "_versions").is_dir()):
        return NotADatabase(f"{url} holds no table that can be read ({text}); create() makes a table")
    damage = f"cannot be read ({text})" if missing is None else f"lacks its file {missing}"
    return CorruptionError(
        f"{url} {damage}; bring the file back, or return to a version without it by "
        "lance.dataset(url, version=…).restore()"
    )


def require_storage(url: str, error: Exception) -> None:
    """Raise an error of softdb if Lance could not reach the storage or a file is missing; else do nothing."""
    problem = failure(url, error)
    if isinstance(problem, StorageUnavailable) or missing_file(error):
        raise problem from error


def missing_file(error: Exception) -> str | None:
    """Return the name of the file that Lance did not find; None for other errors, such as a missing version."""
    missing = re.search(r"(?:Not found: |Object at location )([^\s,]+)", str(error))
    return None if missing is None or "Dataset at path" in str(error) else missing[1]


def cause(error: Exception) -> str:
    """Return the first line of Lance's message without source locations, and the object store's error code if any."""
    text = re.sub(_NOISE, "", str(error).split("\n")[0])[:400]
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return text if code is None else f"{text} {code[1]}"


class Synced:
    """Syncs the files of a local table to disk, since Lance itself syncs nothing.

    A commit of Lance writes files of data and deletions, then a manifest; creating the manifest commits. Before a verb
    returns, `sync` syncs every file that this handle has not synced yet, including files of other writers, because a
    version needs all earlier files. A power failure before the sync may damage the newest version, which no verb has
    returned. The version before is intact: `lance.dataset(url, version=…).restore()` goes back to that version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[Path, set[str]] = {}  # folder -> names in it when it was synced last

    def sync(self) -> None:
        """Sync files that are not synced yet. Raises WriteFailed. Cost: lists all names, and syncs each new file."""
        try:
            self._sync(self.path)
        except OSError as error:
            raise WriteFailed(
                f"{self.path} could not be synced ({error}); a crash of the machine may lose the last write"
            ) from error

    def _sync(self, folder: Path) -> None:
        names = set(os.listdir(folder))
        new = names - self._known.get(folder, set())
        for name in new:
            if (folder / name).is_dir():
                self._known.setdefault(folder / name, set())
            elif not name.startswith(".") and "#" not in name:  # not a temporary file
                files.sync(folder / name)
        for inner in [path for path in list(self._known) if path.parent == folder]:  # other threads add folders
            try:
                self._sync(inner)
            except FileNotFoundError:  # another process cleans up old versions
                self._known.pop(inner, None)
        if new:
            files.sync_directory(folder)
        self._known[folder] = names


def literal(id: Id) -> str:
    """Write an id as a literal for a filter expression of Lance."""
    return str(id) if type(id) is int else "'" + str(id).replace("'", "''") + "'"


def occupied(dataset: Any) -> tuple[int, int, int, int]:
    """Count the records, the rows of deleted and replaced records, the files and the bytes of a table's version."""
    parts = dataset.get_fragments()
    sizes = [file.file_size_bytes or 0 for fragment in parts for file in fragment.data_files()]
    dead = sum(fragment.num_deletions for fragment in parts)
    return dataset.count_rows(), dead, len(sizes), sum(sizes)


def merge_small_files(dataset: Any) -> None:
    """Merge small files of a table if it has MANY, so that commits stay fast. Dead rows stay until `Truth.compact`.

    Each row is rewritten once per level. A failure, for example because another handle merges, too, changes nothing.
    """
    sizes = [fragment.physical_rows for fragment in dataset.get_fragments()]
    for level in LEVELS:
        if sum(size < level for size in sizes) >= MANY:
            try:
                dataset.optimize.compact_files(target_rows_per_fragment=level, materialize_deletions=False)
            except LANCE as error:
                _log.info("small files of %s are merged later: %s", dataset.uri, cause(error))
