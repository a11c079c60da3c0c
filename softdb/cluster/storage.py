"""Tables as Lance opens them, errors of Lance as errors of softdb, and what of a local table is synced to disk."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from softdb.check import Id, Schema
from softdb.errors import BadInput, CorruptionError, NotADatabase, SoftDBError, StorageUnavailable, WriteFailed
from softdb.formats.rows import Fields
from softdb.formats.tables import needed
from softdb.store import files

LANCE = (OSError, ValueError, RuntimeError)  # types of what Lance raises
_NOISE = r",? /\S+\.rs:\d+:\d+|External error: |LanceError\(\w+\): |Generic \S+ error: "
_UNREACHABLE = r"Error performing|error sending request|Failed to resolve|[Tt]imed out|Permission denied|os error 5\)"


def dataset_at(url: str, options: dict[str, str] | None) -> Any:
    """The newest version of the table at an address. Raises as `failure` says."""
    lance = needed("lance", "cluster", "a cluster")
    with lance_errors(url):
        return lance.dataset(url, storage_options=options)


@contextlib.contextmanager
def lance_errors(url: str) -> Iterator[None]:
    """Turn errors of Lance into errors of softdb: see `failure`."""
    try:
        yield
    except SoftDBError:
        raise
    except LANCE as error:
        raise failure(url, error) from error


def failure(url: str, error: Exception) -> SoftDBError:
    """The error of softdb for one that Lance raised as it read a table; NotADatabase where there is none."""
    text, missing = cause(error), missing_file(error)
    if "No object store provider" in text:
        return BadInput(f"url {url!r} is of no kind that Lance opens ({text}); give a folder, or s3://, gs:// or az://")
    if missing is None and re.search(_UNREACHABLE, text):
        return StorageUnavailable(
            f"{url} cannot be reached ({text}); try again later, or look at the address, and at the keys, region and "
            "endpoint in storage_options="
        )
    if "Dataset at path" in text or ("://" not in url and not Path(url, "_versions").is_dir()):
        return NotADatabase(f"{url} holds no table that can be read ({text}); create() makes one")
    damage = f"cannot be read ({text})" if missing is None else f"lacks its file {missing}"
    return CorruptionError(
        f"{url} {damage}; bring the file back, or go back to a version without it: "
        "lance.dataset(url, version=…).restore()"
    )


def require_storage(url: str, error: Exception) -> None:
    """Raise the error of softdb where Lance could not reach the storage, or a file of a version was missing there."""
    problem = failure(url, error)
    if isinstance(problem, StorageUnavailable) or missing_file(error):
        raise problem from error


def missing_file(error: Exception) -> str | None:
    """The file of a version that Lance did not find; None for other errors, such as of a version that is gone."""
    missing = re.search(r"(?:Not found: |Object at location )([^\s,]+)", str(error))
    return None if missing is None or "Dataset at path" in str(error) else missing[1]


def cause(error: Exception) -> str:
    """The first line of an error of Lance, without places in its source, and the code that an object store gave."""
    text = re.sub(_NOISE, "", str(error).split("\n")[0])[:400]
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    return text if code is None else f"{text} {code[1]}"


class Synced:
    """The files of a local table that are on disk: Lance itself syncs nothing.

    A commit of Lance writes data and deletions, then a manifest, whose name is the commit. Synced after that, before a
    verb returns, is every file that this handle has not synced, whoever wrote it: a version holds what all before it
    have written. If the power fails before, the newest version may be torn, which nobody was told of: the one before it
    is whole, and `lance.dataset(url, version=…).restore()` goes back to it.
    """

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


def column(values: Any, kind: Any, there: Any = None) -> Any:
    """Numbers (n, …) as a column, null where there are none."""
    pa, array = needed("pyarrow", "cluster", "a cluster"), np.ascontiguousarray(values)
    mask = None if there is None or there.all() else ~there
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(array.tolist() if array.dtype == object else array, kind, mask=mask)
    flat = pa.array(array.reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=None if mask is None else pa.array(mask))


def require_columns(dataset: Any, fields: Fields, others: Sequence[str], schema: Schema) -> None:
    """Raise BadInput naming the first column that records need and that is gone, or of another width."""
    widths = {fields.key: schema.dim, fields.value: schema.value_dim}
    for name in filter(None, (fields.id, fields.key, fields.value, *others)):
        if name not in dataset.schema.names:
            raise BadInput(f"{dataset.uri} has no column {name!r} any more; add it, or restore() a version that has it")
        width, size = widths.get(name), getattr(dataset.schema.field(name).type, "list_size", None)
        if width is not None and size not in (None, width):
            wider = f"column {name!r} is {size} wide, but the records' are {width}"
            raise BadInput(f"{dataset.uri}: {wider}; mend it, or restore() a version before")


def literal(one: Id) -> str:
    """An id as a condition of Lance says it."""
    return str(one) if type(one) is int else "'" + str(one).replace("'", "''") + "'"


class Occupied(NamedTuple):
    """Files and rows of a version of a table."""

    records: int
    dead: int  # rows of deleted and replaced records
    files: int
    bytes: int


def occupied(dataset: Any) -> Occupied:
    """The files of a version, and the rows in them."""
    parts = dataset.get_fragments()
    sizes = [file.file_size_bytes or 0 for part in parts for file in part.data_files()]
    dead = sum(one.num_deletions for one in parts)
    return Occupied(dataset.count_rows(), dead, len(sizes), sum(sizes))
