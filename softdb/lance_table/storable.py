"""Separate the rows of a table that can be stored as records from those that cannot."""

from __future__ import annotations

from softdb.check import Id
from softdb.errors import BadInput, DuplicateId
from softdb.lance_table.truth import LeftOut, Truth
from softdb.store import Batch
from softdb.tables.rows import Rows


def storable(truth: Truth, records: Rows, left_out: list[LeftOut]) -> list[Batch]:
    """Check records, and return them in batches to store. Adds rows that cannot be stored to `left_out`."""
    try:
        return [truth.batch(records)]
    except DuplicateId:
        return storable(truth, first_rows(records, set(), left_out), left_out)
    except BadInput as error:
        if len(records) < 2:
            left_out += [LeftOut(id, str(error.args[0])) for id in records.ids]
            return []
        places, half = [*range(len(records))], len(records) // 2
        halves = records.some(places[:half]), records.some(places[half:])
        return [batch for half_records in halves for batch in storable(truth, half_records, left_out)]


def first_rows(records: Rows, stored: set[Id], left_out: list[LeftOut]) -> Rows:
    """Return the first row of each id that is not in `stored`; add all other rows to `left_out`."""
    first = dict[Id, int]()
    for i, id in enumerate(records.ids):
        if id in stored or first.setdefault(id, i) != i:
            left_out.append(LeftOut(id, "the id comes twice; keep one of the rows"))
    return records.some([*first.values()])
