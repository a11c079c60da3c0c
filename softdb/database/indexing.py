"""The index's file, which the disk may refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from softdb.errors import WriteFailed


@contextlib.contextmanager
def index_kept() -> Iterator[None]:
    """Raise WriteFailed where an index is in use, but its file could not be written."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            f"the index serves this handle, but the disk refused its file ({error}); the records are safe: make room, "
            "then build it again"
        ) from error
