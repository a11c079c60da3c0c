r"""Names of payload fields, and the SQL of a field's type and value.

A dot leads into an object, or by a number into a list: "author.name", "tags.0". A dot that belongs to a name is written
with a backslash before it (`r"a\.b"`), and a backslash before a dot or another backslash is doubled. So a name means
one place in every payload. Numbers lead into lists from the second part on: the first part, as in "0", is a field.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from softdb.check import MAX_DEPTH, encodable, shown
from softdb.errors import BadFilter, BadInput

_MAX_NUMBERS = 4  # numbers in a path, at most: each may mean a list's index or a field, so 4 give 16 paths
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")  # longer ones overflow in SQLite below 3.54, and name another element


def parts_of(name: str) -> tuple[str, ...]:
    """Split a field's name into the names of its path, outermost first. Raises BadFilter."""
    parts: list[list[str]] = [[]]
    for piece in re.split(r"(\\[.\\]|\.)", encodable(name, "a field's name", BadFilter)):
        if piece == ".":
            parts.append([])
        else:
            parts[-1].append(piece[1:] if piece in ("\\.", "\\\\") else piece)
    names = tuple("".join(pieces) for pieces in parts)
    if len(names) > MAX_DEPTH:
        raise BadFilter(f"field {shown(name)} is {len(names):,} names deep; payloads nest to {MAX_DEPTH}")
    if len(names) > 1 and not all(names):
        raise BadFilter(
            f"field {shown(name)} has a dot with no name beside it; a dot leads into a field, "
            r"write '\.' for a dot that is part of a name"
        )
    if any("\0" in key for key in names[:-1]):
        raise BadFilter(f"field {shown(name)} leads through a name with NUL, which SQLite cannot follow")
    if sum(_NUMBER.fullmatch(key) is not None for key in names[1:]) > _MAX_NUMBERS:
        raise BadFilter(f"field {shown(name)} has more than {_MAX_NUMBERS} numbers; flatten the payload")
    return names


def spelled(parts: Iterable[str]) -> str:
    """Join the names of a path to a field's name, in its one canonical spelling."""
    return ".".join(re.sub(r"\\(?=[.\\]|$)|\.", r"\\\g<0>", name) for name in parts)


def field_sql(parts: Sequence[str], of: str = "payload") -> tuple[str, str]:
    """Return two SQL expressions: a field's JSON type (NULL if absent) and its value; `of`: SQL of the JSON object."""
    steps = [[_step(parts[0])]]
    steps += [[f"[{key}]", _step(key)] if _NUMBER.fullmatch(key) else [_step(key)] for key in parts[1:]]
    if "\0" in parts[-1]:  # a JSON path ends at NUL
        name = "(" + _literal('["' + _escaped(parts[-1]).replace("\0", r"\u0000") + '"]') + " ->> 0)"
        paths = [_literal("$" + "".join(path)) for path in itertools.product(*steps[:-1])]
        types, values = (
            [f"(SELECT {column} FROM json_each({of}, {path}) WHERE key = {name})" for path in paths]
            for column in ("type", "value")
        )
    else:
        paths = [_literal("$" + "".join(path)) for path in itertools.product(*steps)]
        types, values = ([f"{function}({of}, {path})" for path in paths] for function in ("json_type", "json_extract"))
    return _first(types), _first(values)  # at most one path exists: a list has no fields, an object no indices


def field_names(fields: object) -> tuple[str, ...]:
    """Return the names of fields to be declared, checked and in canonical spelling. Raises BadInput."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise BadInput(f'fields are {shown(fields)}; expected a list of field names such as ["year", "author.name"]')
    try:
        listed = list(fields)
    except (TypeError, RuntimeError):  # an array without dimensions raises these
        raise BadInput(f"fields are {shown(fields)}; expected a list of field names") from None
    names = []
    for name in listed:
        if not isinstance(name, str):
            raise BadInput(f"fields hold {shown(name)}; field names are str")
        if "\0" in name:
            raise BadInput(
                f"field {shown(name)} has NUL in its name and can have no index; "
                "filter on it without an index, or store it under another name"
            )
        names.append(spelled(parts_of(name)))
    return tuple(names)


def _step(name: str) -> str:
    return f'."{_escaped(name)}"'


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"coalesce({', '.join(alternatives)})"
