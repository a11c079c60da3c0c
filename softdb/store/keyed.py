"""Origin of a database's keys: their schema, the name of their encoder, and the generation of the last re-embedding.

The format, as MUSTs: the setting `dim` is NULL while the width of the keys is undecided; then no segment may exist, and
the commit of the first keys MUST set it. The setting `encoder` is the name of the encoder of texts, NULL or absent if
none is known. The setting `fingerprint` holds vectors of fixed texts by that encoder (see `softdb.encoders`), as ASCII
of at most `LONGEST_FINGERPRINT` characters, NULL or absent if there are none. The setting `reembedded` is the
generation that last re-embedded all keys, absent if none has; such a commit MUST give every segment a new number, as
must every commit that changes the content of a segment's used slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from softdb.check import Schema, shown, undecided
from softdb.errors import BadInput
from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_catalog

LONGEST = 1000  # maximum characters of an encoder's name
LONGEST_FINGERPRINT = 4000  # maximum characters of a fingerprint
_SCHEMA = ("dim", "value_dim", "num_classes", "dtype", "metric")


class Keyed(NamedTuple):
    """Origin of a generation's keys: schema, encoder, and the last re-embedding."""

    schema: Schema
    encoder: str | None  # name of the encoder; None: not known
    since: int  # the generation that last re-embedded all keys; 0: never
    fingerprint: str | None = None  # vectors of fixed texts by the encoder, see `softdb.encoders`; None: not known


class EncoderEntry(NamedTuple):
    """Name and fingerprint of the encoder of the keys, None where not known."""

    name: str | None
    fingerprint: str | None = None


def require_name(name: str) -> str:
    """Return the name of an encoder. Raises BadInput if the name cannot be stored."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise BadInput(f"the encoder's name is {shown(name)}, which is not Unicode text; choose another") from None
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
        stored = undecided(dim, value_dim, num_classes, dtype, metric)
    except BadInput as error:
        raise damaged_catalog(f"has damaged settings ({error})") from None
    if not (encoder is None or (isinstance(encoder, str) and 0 < len(encoder) <= LONGEST)):
        raise damaged_catalog("has a damaged setting 'encoder'")
    if type(since) is not int or since < 0:
        raise damaged_catalog("has a damaged setting 'reembedded'")
    if not _is_fingerprint(fingerprint):
        raise damaged_catalog("has a damaged setting 'fingerprint'")
    return Keyed(stored, encoder, since, fingerprint)


def _is_fingerprint(fingerprint: object) -> bool:
    return fingerprint is None or (
        isinstance(fingerprint, str) and fingerprint.isascii() and len(fingerprint) <= LONGEST_FINGERPRINT
    )


def note(catalog: Catalog, encoder: EncoderEntry) -> None:
    """Write the encoder's name and fingerprint to the settings, in the open transaction. Raises BadInput."""
    if not _is_fingerprint(encoder.fingerprint):
        limit = f"expected ASCII of at most {LONGEST_FINGERPRINT} characters"
        raise BadInput(f"the fingerprint is {shown(encoder.fingerprint)}; {limit}")
    catalog.put_setting("encoder", encoder.name if encoder.name is None else require_name(encoder.name))
    if encoder.fingerprint is not None or "fingerprint" in catalog.settings():
        catalog.put_setting("fingerprint", encoder.fingerprint)


def decide(catalog: Catalog, decided: Schema) -> None:
    """Write the widths that a database got with its first keys to the settings, in the open transaction."""
    for name in ("dim", "value_dim", "num_classes"):
        catalog.put_setting(name, decided.described[name])
