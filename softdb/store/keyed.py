"""Origin of a database's keys: their schema, the name of their encoder, and the generation of the last re-embedding.

The format, as MUSTs: the setting `encoder` is the name of the encoder of texts, NULL or absent if none is known. The
setting `reembedded` is the generation that last re-embedded all keys, absent if none has; such a commit MUST give
every segment a new number, as must every commit that changes the content of a segment's used slots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from softdb.check import Schema, schema, shown
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
    return _parse(*(settings[name] for name in _SCHEMA), settings.get("encoder"), settings.get("reembedded", 0))


@lru_cache(64, typed=True)  # cached: every refresh calls this
def _parse(*values: Any) -> Keyed:
    dim, value_dim, num_classes, dtype, metric, encoder, since = values
    try:
        stored = schema(dim, value_dim, num_classes, dtype, metric, None)
    except BadInput as error:
        raise damaged_catalog(f"has damaged settings ({error})") from None
    if not (encoder is None or (isinstance(encoder, str) and 0 < len(encoder) <= LONGEST)):
        raise damaged_catalog("has a damaged setting 'encoder'")
    if type(since) is not int or since < 0:
        raise damaged_catalog("has a damaged setting 'reembedded'")
    return Keyed(stored, encoder, since)


def note(catalog: Catalog, name: str | None) -> None:
    """Write the encoder's name to the settings, in the open transaction. Raises BadInput."""
    catalog.put_setting("encoder", name if name is None else require_name(name))
