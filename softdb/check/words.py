"""Check arguments of searches by text: the texts, the mode, and the fusion of text and vector scores."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from softdb.check.ids import encodable
from softdb.check.plain import dense, is_tensor, number, one_of, share, shown
from softdb.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Fusion", "Mode", "Words", "words"]

LONGEST = 100_000  # maximum characters of a text to search for


class Mode(Enum):
    """Mode of a search: vectors, words or both."""

    HYBRID = "hybrid"
    TEXT = "text"
    VECTOR = "vector"


class Fusion(NamedTuple):
    """Rule that makes one score of the text score and the vector score."""

    ranks: bool  # True: by reciprocal ranks; False: by a weighted sum
    weight: float | Tensor | None  # weight of the text score in the sum; None: scale both to 0 … 1, then add
    share: float = 0.2  # weight of the text score in the sum of both, scaled


class Words(NamedTuple):
    """Queries and texts of a search."""

    queries: Any  # unchecked; the texts, to be encoded, if no queries are given
    texts: list[str]
    mode: Mode
    fusion: Fusion

    def require_none(self, **others: object) -> None:
        """Raise BadInput if an argument is given that only vector searches take."""
        for name, value in others.items():
            if value is not None:
                raise BadInput(f"{name} is {shown(value)}, but a search in mode {self.mode.value!r} takes none")


def words(queries: object, texts: object, mode: object, fusion: object, encodes: Callable[[], bool]) -> Words:
    """Return the checked arguments of a search by text; `encodes`: True if the database has an encoder.

    Mode None: hybrid if queries are given or texts can be encoded, else text. Raises BadInput.
    """
    if queries is None and texts is None:
        raise BadInput("neither queries nor texts are given; give one of them, or both")
    chosen = None if mode is None else Mode(one_of(mode, "mode", [member.value for member in Mode]))
    if texts is None and chosen in (None, Mode.VECTOR):
        chosen, given_texts = Mode.VECTOR, list[str]()
    else:
        given_texts = _texts(queries if texts is None else texts)
        if chosen is None:
            chosen = Mode.HYBRID if queries is not None or encodes() else Mode.TEXT
        if (texts is None or queries is None) and chosen is Mode.HYBRID and not encodes():
            raise BadInput(
                "mode is 'hybrid' but there are texts alone, and no encoder; give queries=, too, or an encoder"
            )
        if texts is not None and queries is not None and chosen is not Mode.HYBRID:
            raise BadInput(f"queries and texts are both given, but mode is {chosen.value!r}; only 'hybrid' takes both")
    if fusion is not None and chosen is not Mode.HYBRID:
        raise BadInput(f"fusion is {shown(fusion)}, but mode is {chosen.value!r}, which has one score; omit fusion")
    return Words(given_texts if queries is None else queries, given_texts, chosen, _fusion(fusion))


def _fusion(value: object) -> Fusion:
    if value is None or (isinstance(value, str) and value in ("scores", "ranks")):
        return Fusion(value == "ranks", None)
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "scores":
        return Fusion(False, None, share(value[1], "the text's share in fusion"))
    expected = "'scores', 'ranks', ('scores', the text's share), or the weight of the text's score, at least 0"
    value = dense(value, "fusion") if is_tensor(value) else value
    weight = number(value.detach() if is_tensor(value) else value, "fusion", expected, lambda x: x >= 0)
    return Fusion(False, value.reshape(()) if is_tensor(value) else weight)


def _texts(value: object) -> list[str]:
    """Return the texts to search for; a single text is a batch of one. Raises BadInput."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    batch = [value] if isinstance(value, str) else value
    if not isinstance(batch, list | tuple) or not all(isinstance(text, str) for text in batch):
        raise BadInput(f"texts are {shown(value)}; expected a str or a list of str")
    for i, text in enumerate(batch):
        encodable(text, f"text {i}")
        if len(text) > LONGEST:
            raise BadInput(f"text {i} has {len(text):,} characters; search for one of at most {LONGEST:,}")
    return [str(text) for text in batch]
