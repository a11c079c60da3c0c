"""Encoders by name: what a database remembers of the one that made its keys, and what becomes of that name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from softdb.check import Encoder, attribute, shown
from softdb.errors import BadInput
from softdb.store.keyed import require_name
from softdb.text import SIZES, WIDTH, HashedNGrams, Vectors

__all__ = ["Unloaded", "name_of", "ngrams", "of_name", "require_same"]

_NGRAMS = re.compile(r"ngrams(?:\((\d\d?(?:, \d\d?){0,15})\))?")


def name_of(encoder: object) -> str | None:
    """The attribute `name` of an encoder, where that is a text; None: nothing is remembered of it."""
    name = attribute(encoder, "name")
    return require_name(name) if isinstance(name, str) else None


def require_same(noted: str | None, encoder: Encoder) -> None:
    """BadInput where an encoder is surely another than the one that made the keys."""
    name = name_of(encoder)
    if None not in (noted, name) and name != noted:
        raise BadInput(
            f"the keys of this database were made by the encoder {shown(noted)}, not by {shown(name)}; open it with "
            "that one, or without an encoder and make its keys anew with reembed"
        )


def ngrams(name: str, dim: int | None = None) -> HashedNGrams | None:
    """The encoder of a name such as "ngrams" or "ngrams(2, 5)"; None of any other."""
    match = _NGRAMS.fullmatch(name)
    if match is None:
        return None
    sizes = SIZES if match[1] is None else tuple(int(size) for size in match[1].split(", "))
    return HashedNGrams(WIDTH if dim is None else dim, sizes)


def of_name(name: str, dim: int) -> Encoder:
    """The encoder of texts for a database whose keys were made by the encoder of that name.

    Hashed n-grams are made again. A model is not loaded: models run code, and the name may be a stranger's choice.
    """
    try:
        return ngrams(name, dim) or Unloaded(name)
    except BadInput:
        return Unloaded(name)


class Unloaded:
    """In the place of an encoder that is known by name alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Raises BadInput that says what to write."""
        raise BadInput(
            f"texts are encoded by {shown(self.name)}, as this database's keys were, and models are not loaded by "
            "themselves; if you trust it, give it: "
            f"softdb.open(path, encoder=softdb.text.SentenceEncoder({self.name!r})), or the encoder of that name which "
            "is yours"
        )
