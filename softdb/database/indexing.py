"""Conversion of operating system errors when the index's file is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from softdb.errors import WriteFailed


@contextlib.contextmanager
def index_write_errors() -> Iterator[None]:
    """Turn an OSError into WriteFailed: the index is in use, but its file could not be written."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            f"this handle uses the new index, but its file could not be written ({error}); the records are safe: make "
            "room, then build it again"
        ) from error
