r"""The field of a payload that a name means, and the SQL of its type and its value.

A dot leads into an object, or by a number into a list: "author.name", "tags.0". A field whose own name has a dot is
written with a backslash before it (`r"a\.b"`), and a backslash before a dot or another backslash with one more. So a
name means one place, whatever a record holds. Number and list meet from the second part on: "0" is a field.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from softdb.check import MAX_DEPTH, shown
from softdb.errors import BadFilter, BadInput

_MOST_NUMBERS = 4  # each may be a list's place or an object's field: 16 ways to look
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")  # a longer one overflows in SQLite below 3.54, and meets another place


def utf8(text: str, what: str = "where holds") -> str:
    """A text, if it is Unicode. Raises BadFilter; `what` begins the message."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadFilter(f"{what} {text!a}, which is not Unicode text; decode the source rightly") from None
    return text


def parts_of(name: str) -> tuple[str, ...]:
    """The names on the way to a field, outermost first. Raises BadFilter."""
    parts: list[list[str]] = [[]]
    for piece in re.split(r"(\\[.\\]|\.)", utf8(name, "a field is named")):
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
            r"one that is part of a name is written '\.'"
        )
    if any("\0" in part for part in names[:-1]):
        raise BadFilter(f"field {shown(name)} leads through a name with NUL, which SQLite cannot follow")
    if sum(_NUMBER.fullmatch(part) is not None for part in names[1:]) > _MOST_NUMBERS:
        raise BadFilter(f"field {shown(name)} has more than {_MOST_NUMBERS} numbers; flatten the payload")
    return names


def spelled(parts: Iterable[str]) -> str:
    """The name that stands for those parts; one for each place."""
    return ".".join(re.sub(r"\\(?=[.\\]|$)|\.", r"\\\g<0>", part) for part in parts)


def field_sql(parts: Sequence[str], of: str = "payload") -> tuple[str, str]:
    """SQL of a field's JSON type (NULL where there is none) and of its value, in the JSON object that `of` is."""
    steps = [[_step(parts[0])]]
    steps += [[f"[{part}]", _step(part)] if _NUMBER.fullmatch(part) else [_step(part)] for part in parts[1:]]
    if "\0" in parts[-1]:  # a path ends at it
        name = "(" + _literal('["' + _escaped(parts[-1]).replace("\0", r"\u0000") + '"]') + " ->> 0)"
        ways = [_literal("$" + "".join(way)) for way in itertools.product(*steps[:-1])]
        types, values = (
            [f"(SELECT {column} FROM json_each({of}, {way}) WHERE key = {name})" for way in ways]
            for column in ("type", "value")
        )
    else:
        ways = [_literal("$" + "".join(way)) for way in itertools.product(*steps)]
        types, values = ([f"{function}({of}, {way})" for way in ways] for function in ("json_type", "json_extract"))
    return _first(types), _first(values)  # a list has no fields and an object no places: one of them at most is there


def field_names(fields: object) -> tuple[str, ...]:
    """Fields to be declared, checked, each spelled in its one way. Raises BadInput."""
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        raise BadInput(f'fields are {shown(fields)}; expected a list of field names such as ["year", "author.name"]')
    try:
        given = list(fields)
    except (TypeError, RuntimeError):  # of an array without dimensions
        raise BadInput(f"fields are {shown(fields)}; expected a list of field names") from None
    names = []
    for name in given:
        if not isinstance(name, str):
            raise BadInput(f"fields hold {shown(name)}; field names are str")
        if "\0" in name:
            raise BadInput(
                f"field {shown(name)} has NUL in its name and can have no index; "
                "it can be filtered on without, or be stored under another name"
            )
        names.append(spelled(parts_of(name)))
    return tuple(names)


def _step(name: str) -> str:
    return f'."{_escaped(name)}"'


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"coalesce({', '.join(ways)})"
