"""Check the texts of records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from softdb.check.ids import encodable
from softdb.check.payload import is_missing
from softdb.check.plain import filled, shown
from softdb.errors import BadInput

__all__ = ["MAX_TEXT", "texts"]

MAX_TEXT = 1 << 24  # maximum bytes of a text, in UTF-8


def texts(value: object, count: int) -> list[str | None] | None:
    """Return the texts of a batch, one for each id, None for a record without one; None if no texts are given.

    Raises BadInput for another type, a lone surrogate, or more than 16 MiB of UTF-8.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    elif isinstance(value, np.ndarray) or hasattr(value, "to_numpy"):  # to_numpy: a column of a frame
        value = [None if is_missing(text) else text for text in np.asarray(value).reshape(-1).tolist()]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise BadInput(f"texts are {shown(value)}; expected a list with one str or None for each id")
    filled(value, "texts", count)
    return [text if text is None else _text(text, i) for i, text in enumerate(value)]


def _text(value: object, i: int) -> str:
    if not isinstance(value, str):
        raise BadInput(f"text {i} is {shown(value)}; expected str, or None for a record that has no text")
    if not value.isascii():
        encodable(value, f"text {i}")
    if 4 * len(value) > MAX_TEXT and (size := len(value.encode())) > MAX_TEXT:
        raise BadInput(f"text {i} has {size:,} bytes; expected at most {MAX_TEXT:,}; cut it into several records")
    return str(value)
