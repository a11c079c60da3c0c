"""Read queries and their right records from a file, and check them against a database."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from softdb import check
from softdb.check import Id
from softdb.database import Verbs
from softdb.errors import BadInput
from softdb.formats import Fields, Line, is_vector, read_rows

NAMED = 3  # largest number of unknown ids that a message names
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass
class Pairs:
    """m queries and the ids of their right records."""

    queries: Any  # (m, d) numbers, or m texts
    positives: list[list[Id]]  # m lists of at least one
    lines: list[int]  # m line numbers in the file
    name: str  # of the file
    typed: bool  # False: all ids came as text, because CSV has no types
    weights: list[float] | None = None  # m weights of the queries

    @property
    def is_text(self) -> bool:
        """True if the queries are texts."""
        return isinstance(self.queries, list) and isinstance(self.queries[0], str)

    def resolve(self, db: Verbs) -> None:
        """Convert text ids to integers where the database stores only the integer; check that all ids are stored.

        Raises BadInput naming the first unknown ids and their lines, or the first line if queries and keys differ in
        width.
        """
        dim = db.core.schema.dim
        if isinstance(self.queries, list) and not self.is_text and len(self.queries[0]) != dim:
            raise BadInput(
                f"{self.name} line {self.lines[0]}: the query has {len(self.queries[0])} numbers but this database is "
                f"{dim} wide; embed queries with the encoder of its keys"
            )
        if not self.typed:
            texts = sorted({name for ids in self.positives for name in ids if isinstance(name, str)})
            rows = db.core.located(list(texts))
            missing = [text for text, row in zip(texts, rows, strict=True) if row < 0 and _INTEGER.fullmatch(text)]
            integers: dict[Id, Id] = {text: int(text) for text in missing if -(2**63) <= int(text) < 2**63}
            self.positives = [[integers.get(name, name) for name in ids] for ids in self.positives]
        require_known(db, self.positives, [f"{self.name} line {line}" for line in self.lines])


def require_known(db: Verbs, positives: list[list[Id]], places: list[str] | None = None) -> None:
    """Raise BadInput naming the first ids that are not stored, with `places[i]` (None: "query i") for query i's ids."""
    flat = [(name, i) for i, ids in enumerate(positives) for name in ids]
    missing = np.flatnonzero(db.core.located([name for name, _ in flat]) < 0)
    if len(missing):
        first = [flat[i] for i in missing[:NAMED]]
        named = ", ".join(f"{check.shown(name)} ({f'query {i}' if places is None else places[i]})" for name, i in first)
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        hint = "; write several ids as a JSON list" if "," in str(first[0][0]) else ""
        raise BadInput(f"these ids are not in the database: {named}{more}; insert them, or leave those pairs out{hint}")


def read_pairs(
    path: str | os.PathLike[str],
    *,
    query: str = "query",
    positives: str = "positives",
    weight: str | None = None,
    queries: Any = None,
) -> Pairs:
    """Read training pairs, one query a line, from a JSON lines, CSV or TSV file, also with `.gz`.

        {"query": "a cold-blooded vertebrate", "positives": ["noun.01655785", 7]}
        {"query": "a horse", "positives": "noun.02374451"}

    Args:
        path: `.jsonl`, `.csv` or `.tsv`. In the latter two a cell with several ids or with numbers is a JSON list, and
            an id is text: `Pairs.resolve` converts it to an integer if the database stores only the integer.
        query: the field with the query: a text, or a list of numbers.
        positives: the field with the right records: an id, or a list of ids.
        weight: the field with the query's weight in the loss, a number of at least 0; None: there are no weights.
        queries: (m, d) numbers, the queries in the order of the lines, whose field `query` must then be absent.

    Give all right records of a query in one line: in another line they would count as wrong records. Raises BadInput
    naming the file and the line.
    """
    path = Path(path)
    if isinstance(queries, np.ndarray | Tensor) and queries.ndim != 2:
        raise BadInput(f"queries have shape {tuple(queries.shape)}; expected (m, d) numbers, one row for each line")
    typed = not path.name.removesuffix(".gz").endswith((".csv", ".tsv"))
    values: list[Any] = []
    ids: list[list[Id]] = []
    lines: list[int] = []
    weights: list[float] | None = None if weight is None else []
    for line in read_rows(path, Fields(id=positives, text=query)):
        try:
            ids.append(_ids(line, positives, typed))
            if queries is not None and query in line.row:
                raise BadInput(f"field {query!r} is a query, but queries are given, too; leave one of them out")
            if queries is None:
                values.append(_query(line, query, typed, values[0] if values else None))
            if weights is not None and weight is not None:
                value = _field(line, weight, True)  # tables hold numbers, too
                weights.append(check.number(value, f"field {weight!r}", "a number of at least 0", lambda w: w >= 0))
        except BadInput as error:
            raise BadInput(f"{path.name} line {line.number}: {error}") from None
        lines.append(line.number)
    if not lines:
        raise BadInput(f"{path} holds no pairs; expected lines such as " + '{"query": …, "positives": [ids]}')
    if queries is not None and len(queries) != len(lines):
        raise BadInput(f"{len(queries)} queries but {path.name} has {len(lines)} lines; give one query for each line")
    return Pairs(values if queries is None else queries, ids, lines, path.name, typed, weights)


def _ids(line: Line, name: str, typed: bool) -> list[Id]:
    value = _field(line, name, typed)
    ids = list(dict.fromkeys(check.identifiers(value, unique=False))) if isinstance(value, list | str | int) else []
    if not ids:
        raise BadInput(f"field {name!r} is {check.shown(value)}; expected an id, or a list of at least one")
    return ids


def _query(line: Line, name: str, typed: bool, first: Any) -> Any:
    """Return the query of a line, a text or a list of numbers. Raises BadInput if it differs from the first in kind."""
    value = _field(line, name, typed)
    if not (is_vector(value) if isinstance(value, list) else isinstance(value, str) and value.strip()):
        raise BadInput(f"field {name!r} is {check.shown(value)}; expected a text or a list of numbers")
    if first is not None and isinstance(value, str) != isinstance(first, str):
        raise BadInput("texts and lists of numbers are mixed; give queries of one kind")
    if first is not None and not isinstance(value, str) and len(value) != len(first):
        raise BadInput(f"the query has {len(value)} numbers but earlier lines have {len(first)}; correct the line")
    return value


def _field(line: Line, name: str, typed: bool) -> Any:
    """Return a field of a line; a cell of CSV that begins with [ is parsed as a JSON list, any other is a text."""
    if name in line.empty:
        raise BadInput(f"field {name!r}: the cell is empty; fill it, or leave the line out")
    if name not in line.row:
        raise BadInput(f"no field {name!r}; its fields are {check.shown(list(line.row))}, name the right one")
    value = line.row[name]
    if typed or not value.strip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadInput(f"{check.shown(value)} begins with [ but is not a JSON list; correct it") from None
