"""Ids: `int` and `str`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from softdb.check.plain import dense, is_tensor, shown
from softdb.errors import BadInput, DuplicateId

__all__ = ["Id", "encodable", "identifiers", "padded"]

Id: TypeAlias = int | str


def identifiers(value: object, unique: bool = True) -> list[Id]:
    """Ids as a list of `int` and `str`; one id alone is a batch of one.

    Raises BadInput for another type, an int beyond 64 bits or text that is not Unicode, DuplicateId for one that comes
    twice where `unique`.
    """
    if isinstance(value, str | int):
        value = [value]
    elif isinstance(value, np.ndarray):
        value = value.tolist()
    elif is_tensor(value):
        value = dense(value, "ids").tolist()
    if type(value) is not list and (not isinstance(value, Iterable) or isinstance(value, bytes)):
        raise BadInput(f"ids are {shown(value)}; expected a list of str or int")
    ids = [one if type(one) is str else _identifier(one) for one in value]
    text = "".join([one for one in ids if type(one) is str])
    if not text.isascii():
        encodable(text, "an id")
    if unique and len(set(ids)) < len(ids):
        seen: set[Id] = set()
        twice = next(one for one in ids if one in seen or seen.add(one))  # type: ignore[func-returns-value]
        raise DuplicateId(f"id {shown(twice)} comes twice in this batch; an id names one record, keep one of them")
    return ids


def padded(
    rows: NDArray[np.int64],  # (Σ counts,) list after list
    counts: Sequence[int],  # q, the length of each list
    missing: int = -1,
) -> NDArray[np.int64]:  # (q, the longest)
    """Lists of unequal length as one array, each filled up with `missing`."""
    lengths = np.asarray(counts, np.int64)
    found = np.full((len(lengths), lengths.max(initial=0)), missing, np.int64)
    found[np.arange(found.shape[1]) < lengths[:, None]] = rows
    return found


def _identifier(value: object) -> Id:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise BadInput(f"id {shown(value)} is of type {type(value).__name__}; expected str or int, convert it first")
    if not -(2**63) <= int(value) < 2**63:
        raise BadInput(f"id {shown(int(value))} needs more than 64 bits; store it as str")
    return int(value)


def encodable(text: str, what: str) -> None:
    """BadInput where a text holds a lone surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end]
        raise BadInput(
            f"{what} holds the lone surrogate {bad!a}, which is not Unicode text; decode the source correctly"
        ) from None
