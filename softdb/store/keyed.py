"""Origin of a database's keys: their schema, the name of their encoder, and the generation of the last re-embedding.

The format, as MUSTs: the setting `dim` is NULL while the width of the keys is undecided; then no segment may exist, and
the commit of the first keys MUST set it. The setting `encoder` is the name of the encoder of texts, NULL or absent if
none is known. The setting `fingerprint` is a text with vectors of fixed texts by that encoder (see `softdb.encoders`),
NULL or absent if there are none. The setting `reembedded` is the generation that last re-embedded all keys, absent if
none has; such a commit MUST give every segment a new number, as must every commit that changes the content of a
segment's used slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from softdb.check import Schema, encodable, schema, shown
from softdb.errors import BadInput
from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_catalog

LONGEST = 1000  # maximum characters of an encoder's name
_SCHEMA = ("dim", "value_dim", "num_classes", "dtype", "metric")


class Keyed(NamedTuple):
    """Origin of a generation's keys: schema, encoder, and the last re-embedding."""

    schema: Schema
    encoder: str | None  # name of the encoder; None: not known
    since: int  # the generation that last re-embedded all keys; 0: never
    fingerprint: str | None = None  # vectors of fixed texts by the encoder, see `softdb.encoders`; None: not known


def require_name(name: str) -> str:
    """Return the name of an encoder. Raises BadInput if the name cannot be stored."""
    encodable(name, "the encoder's name")
    if not 0 < len(name) <= LONGEST or "\0" in name:
        raise BadInput(f"the encoder's name is {shown(name)}; expected 1 to {LONGEST} characters, none of them NUL")
    return name


def read(catalog: Catalog) -> Keyed:
    """Return the origin of the keys of the generation that a connection reads. Raises CorruptionError."""
    settings = catalog.settings()
    missing = [name for name in _SCHEMA if name not in settings]
    if missing:
        raise damaged_catalog(f"has damaged settings ({missing[0]} is missing)")
    origin = (settings.get("encoder"), settings.get("reembedded", 0), settings.get("fingerprint"))
    return _parse(*(settings[name] for name in _SCHEMA), *origin)


@lru_cache(64, typed=True)  # cached: every refresh calls this
def _parse(*values: Any) -> Keyed:
    dim, value_dim, num_classes, dtype, metric, encoder, since, fingerprint = values
    try:
        stored = schema(dim, value_dim, num_classes, dtype, metric, None)
    except BadInput as error:
        raise damaged_catalog(f"has damaged settings ({error})") from None
    if not (encoder is None or (isinstance(encoder, str) and 0 < len(encoder) <= LONGEST)):
        raise damaged_catalog("has a damaged setting 'encoder'")
    if type(since) is not int or since < 0:
        raise damaged_catalog("has a damaged setting 'reembedded'")
    if not isinstance(fingerprint, str | None):
        raise damaged_catalog("has a damaged setting 'fingerprint'")
    return Keyed(stored, encoder, since, fingerprint)


def put(catalog: Catalog, origin: Keyed) -> None:
    """Write the settings of an origin that differ from the stored ones, in the open transaction. Raises BadInput."""
    new = origin.schema.described | {"encoder": origin.encoder, "fingerprint": origin.fingerprint}
    if origin.encoder is not None:
        require_name(origin.encoder)
    encodable(origin.fingerprint or "", "the encoder's fingerprint")
    stored = catalog.settings()
    for name, value in (*new.items(), ("reembedded", origin.since or None)):
        if stored.get(name) != value:
            catalog.put_setting(name, value)
