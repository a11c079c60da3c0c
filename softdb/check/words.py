"""Arguments of searches by text: the texts, the mode, and how the scores of text and vector become one."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from softdb.check.ids import encodable
from softdb.check.plain import dense, is_tensor, number, one_of, shown
from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fusion", "Mode", "Words", "words"]

LONGEST = 100_000  # characters of a text that is searched for


class Mode(Enum):
    """Mode of a search: vectors, words or both."""

    HYBRID = "hybrid"
    TEXT = "text"
    VECTOR = "vector"


class Fusion(NamedTuple):
    """Fusion of the scores of text and vector."""

    ranks: bool  # by reciprocal ranks, else by a sum
    weight: float | Tensor | None  # of the text's score in that sum; None: of scores scaled to 0 … 1


class Words(NamedTuple):
    """Queries and texts of a search."""

    queries: Any  # as they came; texts to be encoded, where there are no others; None where none are compared
    texts: list[str]
    mode: Mode
    fusion: Fusion

    def require_none(self, **others: object) -> None:
        """BadInput where something is given that goes with vectors alone."""
        for name, value in others.items():
            if value is not None:
                raise BadInput(f"{name} is {shown(value)}, but a search in mode {self.mode.value!r} takes none")


def words(queries: object, texts: object, mode: object, fusion: object, encodes: Callable[[], bool]) -> Words:
    """Return the checked arguments of a search by text.

    Mode None: hybrid where there is something to compare with vectors, else text.
    """
    if queries is None and texts is None:
        raise BadInput("neither queries nor texts are given; give one of them, or both")
    chosen = None if mode is None else Mode(one_of(mode, "mode", [one.value for one in Mode]))
    if texts is None and chosen in (None, Mode.VECTOR):
        chosen, names = Mode.VECTOR, list[str]()
    else:
        names = _texts(queries if texts is None else texts)
        if chosen is None:
            chosen = Mode.HYBRID if queries is not None or encodes() else Mode.TEXT
        if (texts is None or queries is None) and chosen is Mode.HYBRID and not encodes():
            raise BadInput(
                "mode is 'hybrid' but there are texts alone, and no encoder; give queries=, too, or an encoder"
            )
        if texts is not None and queries is not None and chosen is not Mode.HYBRID:
            raise BadInput(f"queries and texts are both given, but mode is {chosen.value!r}; give the one it compares")
    if fusion is not None and chosen is not Mode.HYBRID:
        raise BadInput(f"fusion is {shown(fusion)}, but mode is {chosen.value!r}, which has one score; leave it out")
    return Words(names if queries is None else queries, names, chosen, _fusion(fusion))


def _fusion(value: object) -> Fusion:
    if value is None or (isinstance(value, str) and value in ("scores", "ranks")):
        return Fusion(value == "ranks", None)
    expected = "'scores', 'ranks', or the weight of the text's score, a finite number of at least 0"
    value = dense(value, "fusion") if is_tensor(value) else value
    found = number(value.detach() if is_tensor(value) else value, "fusion", expected, lambda one: one >= 0)
    return Fusion(False, value.reshape(()) if is_tensor(value) else found)


def _texts(value: object) -> list[str]:
    """Texts to search for; one alone is a batch of one."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise BadInput(f"texts are {shown(value)}; expected a str or a list of str")
    for i, one in enumerate(found):
        encodable(one, f"text {i}")
        if len(one) > LONGEST:
            raise BadInput(f"text {i} has {len(one):,} characters; search for one of at most {LONGEST:,}")
    return [str(one) for one in found]
