"""Tables as Lance opens them; its errors, and those of the storage below it, as errors of softdb."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from softdb.errors import BadInput, CorruptionError, NotADatabase, SoftDBError, StorageUnavailable
from softdb.formats.tables import needed

__all__ = ["LANCE", "cause", "dataset_at", "failure", "lance_errors", "missing_file", "require_storage"]

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
    """What Lance raises meanwhile becomes an error of softdb: see `failure`."""
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
