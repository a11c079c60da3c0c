"""Parts of a write: the encoder of a batch, its entry for the database, and updates of an unchanged width."""

from __future__ import annotations

from typing import Any

from softdb.check import Array, Encoder, Id, are_texts
from softdb.database.core import Core
from softdb.database.incoming import UPDATES, Given, RecordParts, WriteKind
from softdb.encoders import DEFAULT, fingerprint_of, name_of, warn_default
from softdb.store.keyed import EncoderEntry, Keyed
from softdb.store.store import Store


def encoder_for(core: Core[Any], change: WriteKind, given: Given) -> Encoder | None:
    """Return the encoder of a batch; `DEFAULT` for the first texts without keys if the width is undecided."""
    encoder = core.encoder()
    if encoder is None and not core.schema.dim and given.keys is None and given.texts is not None:
        return None if change in UPDATES else DEFAULT
    return encoder


def entry_for(keyed: Keyed, encoder: Encoder | None, given: Given, keys: Array | None) -> EncoderEntry | None:
    """Return the entry of the encoder of a checked batch, to be stored with it; None if there is nothing to store.

    Warns before `DEFAULT` is stored.
    """
    texts = given.texts is not None if given.keys is None else are_texts(given.keys)
    if encoder is None or not texts or keys is None or keyed.fingerprint is not None:
        return None
    if encoder is DEFAULT:
        warn_default()
    name = name_of(encoder) if encoder is DEFAULT else keyed.encoder
    entry = EncoderEntry(name, fingerprint_of(encoder, keys.shape[1]))
    return None if entry == (keyed.encoder, keyed.fingerprint) else entry


def update_if(
    store: Store, keyed: Keyed, parts: RecordParts, merge: bool, entry: EncoderEntry | None
) -> list[Id] | None:
    """Update, and return the ids; None if the width changed since `keyed`. Call it on the store's thread."""
    if store.keyed is not keyed:
        return None
    store.update(*parts, merge, entry)
    return parts.ids


def write_if(store: Store, change: WriteKind, keyed: Keyed, records: Any, entry: Any) -> list[Id] | None:
    """Write checked records, and return their ids; None if the width changed since `keyed`."""
    if isinstance(records, RecordParts):
        return store.run(update_if, store, keyed, records, change is WriteKind.MERGE, entry)
    write = store.insert if change is WriteKind.INSERT else store.upsert
    return write(records, keyed, entry)
