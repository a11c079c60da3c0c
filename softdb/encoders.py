"""Make text encoders from names. A database stores the name of the encoder that made its keys."""

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
    """Return the encoder's attribute `name` if it is a str, else None. A database stores this name."""
    name = attribute(encoder, "name")
    return require_name(name) if isinstance(name, str) else None


def require_same(stored: str | None, encoder: Encoder) -> None:
    """Raise BadInput if the encoder's name differs from the stored name of the encoder that made the keys."""
    name = name_of(encoder)
    if None not in (stored, name) and name != stored:
        raise BadInput(
            f"the keys of this database were made by the encoder {shown(stored)}, not by {shown(name)}; open it with "
            "that encoder, or open it without an encoder and compute its keys again with reembed"
        )


def ngrams(name: str, dim: int | None = None) -> HashedNGrams | None:
    """Return the n-gram encoder for a name like "ngrams" or "ngrams(2, 5)"; None for any other name."""
    match = _NGRAMS.fullmatch(name)
    if match is None:
        return None
    sizes = SIZES if match[1] is None else tuple(int(size) for size in match[1].split(", "))
    return HashedNGrams(WIDTH if dim is None else dim, sizes)


def of_name(name: str, dim: int) -> Encoder:
    """Return the encoder of texts for a database whose keys were made by the encoder of that name.

    For a model return an `Unloaded` placeholder: a model runs code, and a stranger may have chosen its name.
    """
    try:
        return ngrams(name, dim) or Unloaded(name)
    except BadInput:
        return Unloaded(name)


class Unloaded:
    """Placeholder for a model that is known by its name and not loaded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Raise BadInput; its message tells how to load the model."""
        raise BadInput(
            f"this database's texts need the encoder {shown(self.name)}, and softdb loads no model by itself; if you "
            f"trust it, pass it: softdb.open(path, encoder=softdb.text.SentenceEncoder({self.name!r})), or your own "
            "encoder of that name"
        )
