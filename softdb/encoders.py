"""Make text encoders from names. A database stores the name of the encoder that made its keys, and a fingerprint of it.

The fingerprint tells models of one name and width apart. It is the Base64 text of a sketch of the encoder's vector of
each of `FIXED_TEXTS`, in little-endian float32: number i of the vector is added, with a sign, to bucket b of `SKETCH`.
With h = (i + 1) * 0x9E3779B97F4A7C15 modulo 2^64, b is the six highest bits of h, and the sign is minus if the seventh
is set. A sketch keeps distances to within some ten percent (Charikar, Chen and Farach-Colton 2002, "Finding frequent
items in data streams").
"""

from __future__ import annotations

import base64
import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from softdb.check import Array, Encoder, attribute, encoded, matrix, shown
from softdb.errors import BadInput
from softdb.store.keyed import Keyed, require_name
from softdb.text import SIZES, WIDTH, HashedNGrams, SentenceEncoder, Vectors

EncoderLike: TypeAlias = "Encoder | str | os.PathLike[str]"  # a callable, or the name or folder of an encoder

DEFAULT = HashedNGrams()  # encoder of the texts of a database for which no encoder was chosen
FIXED_TEXTS = ["A ship sails out of the harbour at dawn.", "Zürich, 42 km", "if x: return y"]
SKETCH = 64  # buckets of a sketch
TOLERANCE = 0.05  # largest distance of an encoder's vectors in float32 and in bfloat16; MiniLM reaches 0.01
REMEDY = "open it with the encoder that made the keys, or without an encoder and compute its keys again with reembed"
_NGRAMS = re.compile(r" *ngrams *(?:\( *(\d\d?(?: *, *\d\d?){0,15}) *\) *)?")
_LIKE_NGRAMS = re.compile(r"\s*n[-_ ]?grams?[^a-z/]*", re.IGNORECASE)


def encoder_of(encoder: EncoderLike, dim: int | None = None) -> Encoder:
    """Return the encoder for a name, a folder or a callable; n-grams are `dim` wide (None: 256). Raises BadInput."""
    named = ngrams(encoder, dim) if isinstance(encoder, str) else None
    if named is None and isinstance(encoder, str) and _LIKE_NGRAMS.fullmatch(encoder):
        raise BadInput(f"encoder is {shown(encoder)}; did you mean 'ngrams', or with sizes 'ngrams(2, 5)'?")
    if isinstance(encoder, str | os.PathLike) and encoder:
        return named or SentenceEncoder(encoder)
    library = sys.modules.get("sentence_transformers")  # an object of it exists only if it is imported
    if library is not None and isinstance(encoder, library.SentenceTransformer):
        return importlib.import_module("softdb.integrations.sentence_transformers").ModelEncoder(encoder)  # type: ignore[no-any-return]
    if not callable(encoder):
        raise BadInput(
            f"encoder is {shown(encoder)}; expected 'ngrams', the name or the folder of a sentence-transformers model, "
            "or a callable, texts -> (n, d)"
        )
    return encoder


def name_of(encoder: object) -> str | None:
    """Return the encoder's attribute `name` if it is a str, else None. A database stores this name."""
    name = attribute(encoder, "name")
    return require_name(name) if isinstance(name, str) else None


def require_same(stored: str | None, encoder: Encoder, compared: bool = False) -> None:
    """Raise BadInput if the encoder's name differs from the stored one; `compared`: except that of a moved folder."""
    name, folder = name_of(encoder), str(encoder.model) if isinstance(encoder, SentenceEncoder) else ""
    moved = compared and os.path.isabs(folder) and str(name).startswith(folder)  # `require_like` compares the vectors
    if None not in (stored, name) and name != stored and not moved:
        raise BadInput(
            f"the keys of this database were made by the encoder {shown(stored)}, not by {shown(name)}; {REMEDY}"
            "; or, if it is the same model, give yours that name: softdb.text.SentenceEncoder(model, name=…)"
        )


def fingerprint_of(encoder: Encoder, dim: int) -> str | None:
    """Return the encoder's fingerprint; None if it cannot embed `FIXED_TEXTS` as finite vectors (3, dim)."""
    try:
        return base64.b64encode(_sketches(encoder, dim).astype("<f4").tobytes()).decode()
    except Exception:  # an encoder of molecules, or of known words alone: its keys are good, and have no fingerprint
        return None


def require_like(keyed: Keyed, encoder: Encoder) -> None:
    """Raise BadInput if the encoder's vectors differ from the fingerprint of the encoder that made the keys.

    The distance of two vectors a and b is |a - b| / max(|a|, |b|). Errors of the encoder are raised as they are.
    """
    try:
        numbers = base64.b64decode(keyed.fingerprint or "", validate=True)
        stored = np.frombuffer(numbers, "<f4").reshape(len(FIXED_TEXTS), SKETCH)
    except ValueError:
        return  # absent, or written by a stranger or a later softdb: nothing can be compared
    vectors = _sketches(encoder, keyed.schema.dim)
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), np.linalg.norm(stored, axis=1))
    distances = np.linalg.norm(vectors - stored, axis=1) / np.maximum(lengths, np.finfo(np.float32).tiny)
    if not distances.max() <= TOLERANCE:
        raise BadInput(
            f"this encoder is not the one that made the keys: for {FIXED_TEXTS[distances.argmax()]!r} their vectors "
            f"differ by {distances.max():.2g} of their length, one encoder's by at most {TOLERANCE}; {REMEDY}"
        )


def _sketches(encoder: Encoder, dim: int) -> Array:  # (3, SKETCH)
    """Return the sketches of the encoder's vectors of `FIXED_TEXTS`, in float64."""
    vectors: Any = encoded(FIXED_TEXTS, "fingerprint texts", lambda: encoder)
    vectors = matrix(vectors, "the encoder's vectors", dim, np.dtype(np.float32))
    hashed = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    buckets, minus = np.divmod((hashed >> np.uint64(57)).astype(np.int64), 2)
    return np.stack([np.bincount(buckets, (1 - 2 * minus) * vector, SKETCH) for vector in vectors])


def ngrams(name: str, dim: int | None = None) -> HashedNGrams | None:
    """Return the n-gram encoder for a name like "ngrams" or "ngrams(2, 5)"; None for any other name."""
    if (match := _NGRAMS.fullmatch(name)) is None:
        return None
    sizes = SIZES if match[1] is None else tuple(int(size) for size in match[1].split(","))
    return HashedNGrams(WIDTH if dim is None else dim, sizes)


def of_name(name: str, dim: int) -> Encoder:
    """Return the encoder of texts for a database whose keys were made by the encoder of that name.

    For a model return a function that raises BadInput: a model runs code, and a stranger may have chosen its name.
    """
    try:
        return ngrams(name, dim or None) or partial(_refuse, name)
    except BadInput:
        return partial(_refuse, name)


def _refuse(name: str, texts: Sequence[str]) -> Vectors:
    raise BadInput(
        f"this database's texts need the encoder {shown(name)}, and softdb loads no model by itself; if you trust it, "
        f"pass it: softdb.open(path, encoder={name!r}), or your own encoder of that name"
    )
