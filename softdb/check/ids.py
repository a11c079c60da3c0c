"""Check ids, which are `int` or `str`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from softdb.check.plain import dense, is_tensor, shown
from softdb.errors import BadInput, DuplicateId

__all__ = ["Id", "encodable", "identifiers", "padded"]

Id: TypeAlias = int | str


def identifiers(value: object, unique: bool = True) -> list[Id]:
    """Return ids as a list of `int` and `str`; a single id is a batch of one.

    Raises BadInput for another type, an int beyond 64 bits or text that is not Unicode; with `unique`, DuplicateId for
    an id that comes twice.
    """
    if isinstance(value, str | int):
        value = [value]
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    elif is_tensor(value):
        value = dense(value, "ids").tolist()
    is_table = isinstance(value, Mapping) or hasattr(type(value), "columns")  # iterates over names of columns
    if is_table or (type(value) is not list and (not isinstance(value, Iterable) or isinstance(value, bytes))):
        advice = "pass a filter as where=, a frame's column of ids, a LazyFrame's collect(), a file to import_records"
        raise BadInput(f"ids are {shown(value)}; expected a list of str or int: {advice}")
    ids = [item if type(item) is str else _identifier(item) for item in value]
    text = "".join([name for name in ids if type(name) is str])
    if not text.isascii():
        encodable(text, "an id")
    if unique and len(set(ids)) < len(ids):
        seen: set[Id] = set()
        twice = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DuplicateId(f"id {shown(twice)} comes twice in this batch; an id names one record: keep one of the two")
    return ids


def padded(
    rows: NDArray[np.int64],  # (Σ counts,) lists of rows, concatenated
    counts: Sequence[int],  # q, the length of each list
    missing: int = -1,
) -> NDArray[np.int64]:  # (q, max counts)
    """Return lists of rows as one array, each list padded with `missing` at its end."""
    lengths = np.asarray(counts, np.int64)
    lists = np.full((len(lengths), lengths.max(initial=0)), missing, np.int64)
    lists[np.arange(lists.shape[1]) < lengths[:, None]] = rows
    return lists


def _identifier(value: object) -> Id:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        advice = {slice: "; a page is get(limit=…, offset=…)", tuple: "; rows are dicts, or a frame"}.get(
            type(value), "; pass vectors as keys=" if isinstance(value, list | np.ndarray) else ", convert it first"
        )
        raise BadInput(f"id {shown(value)} is of type {type(value).__name__}; expected str or int{advice}")
    if not -(2**63) <= int(value) < 2**63:
        raise BadInput(f"id {shown(int(value))} needs more than 64 bits; store it as str")
    return int(value)


def encodable(text: str, what: str, refusal: type[BadInput] = BadInput) -> str:
    """Return a text unchanged. Raises `refusal` if it holds a lone surrogate; `what` names the text in the message."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end]
        raise refusal(
            f"{what} holds the lone surrogate {bad!a}, which is not Unicode text; decode the source correctly"
        ) from None
    return text
