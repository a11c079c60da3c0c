"""Records, and hits of queries, with one entry for each query; ids and payloads are read at first use.

Tensors are rectangular: a query with fewer hits is padded with row -1 and score -inf. Lists have no padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import frames
from softdb.answers.brief import LINES, SHOWN, json_cell, listed, numbers, part_of, shape
from softdb.answers.shaped import nested
from softdb.check import Id, no_constant, shown
from softdb.errors import BadInput, Closed, CorruptionError, StaleRead
from softdb.lazy import cached_property
from softdb.misnomers import OwnNames, known_arguments
from softdb.store.entry import RecordEntry
from softdb.visible import table

__all__ = ["Hit", "Hits", "QueryHits", "Record", "Records", "Resolve", "parsed"]


class Resolve(Protocol):
    """A function that looks up records by their rows and omits deleted records."""

    def __call__(
        self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False
    ) -> Mapping[int, RecordEntry]:
        """Return a mapping from row to record: its id, and its payload and text if requested."""
        ...


def parsed(texts: list[str | None]) -> list[Any]:
    """Parse the JSON texts of payloads; None stays None. Raises CorruptionError if a text is not JSON.

    Each text is parsed alone: if all were joined into one JSON array, a damaged text could shift the other payloads.
    """
    try:
        return [None if text is None else _decode(text) for text in texts]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptionError(f"a stored payload is not JSON ({error}); verify() names its row") from None


_decode = json.JSONDecoder(parse_constant=no_constant).decode
_NO_COLUMN = "[{!r}] is no position; the columns are attributes, .ids, .payloads and .texts, and [0] is the first {}"


@dataclass(frozen=True, repr=False)
class Record(OwnNames):
    """A copy of one stored record."""

    id: Id
    key: Any  # a Tensor (d,), or None if the record has no key
    value: Tensor | int | None  # (v,), a class label, or None if the key is the value
    payload: Any
    text: str | None = None

    def __repr__(self) -> str:
        key, value = (shape(field) if isinstance(field, Tensor) else field for field in (self.key, self.value))
        text = "" if self.text is None else f", text {shown(self.text)}"
        return f"Record({self.id!r}, key {key}, value {value}, payload {shown(self.payload)}{text})"

    def _repr_html_(self) -> str:
        values = None if self.value is None else torch.as_tensor(self.value)[None]
        keyed = torch.tensor([self.key is not None])
        keys = torch.zeros(1, 0) if self.key is None else self.key[None]
        return Records([self.id], keys, values, [json_cell(self.payload)], [self.text], keyed)._repr_html_()


@dataclass(frozen=True, repr=False)
class Records(OwnNames, Sequence[Record]):
    """Copies of stored records, in the order of the request: a sequence of `Record`, and a column for each field."""

    ids: list[Id]  # n
    keys: Tensor  # (n, d) in the database's dtype; zeros for a record without a key
    values: Tensor | None  # (n, v), (n,) int64 labels, or None if the keys are the values
    payload_texts: list[str | None]  # n JSON texts
    texts: list[str | None]  # n
    keyed: Tensor  # (n,) bool: True for records with a key

    @cached_property
    def payloads(self) -> list[Any]:
        """The payloads of the n records, parsed from `payload_texts`."""
        return parsed(self.payload_texts)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, i: int) -> Record: ...
    @overload
    def __getitem__(self, i: slice) -> Records: ...
    def __getitem__(self, i: int | slice | str) -> Record | Records:
        if isinstance(i, str):
            raise BadInput(_NO_COLUMN.format(i, "record"))
        value: Any = None if self.values is None else self.values[i]
        if isinstance(i, slice):
            return Records(self.ids[i], self.keys[i], value, self.payload_texts[i], self.texts[i], self.keyed[i])
        if isinstance(value, Tensor) and value.ndim == 0:
            value = int(value)
        key, value = (self.keys[i], value) if self.keyed[i] else (None, None)
        return Record(self.ids[i], key, value, self.payloads[i], self.texts[i])

    def to_pandas(self, columns: Sequence[str] | None = None) -> Any:
        """Return a pandas DataFrame with a row for each record, and columns as those of `SoftDB.to_pandas`."""
        return frames.frame([self], columns)

    def __repr__(self) -> str:
        values = "none" if self.values is None else shape(self.values)
        ids = listed(map(repr, self.ids), len(self))
        return f"<{len(self)} Records: {ids}; keys {shape(self.keys)}, values {values}>"

    def _repr_html_(self) -> str:
        values = () if self.values is None else self.values[:LINES]
        keys = (key if keyed else None for key, keyed in zip(self.keys[:LINES], self.keyed, strict=False))
        columns = zip_longest(self.ids[:LINES], keys, values, self.payload_texts[:LINES], self.texts[:LINES])
        lines = [[repr(name), numbers(key), numbers(value), *texts] for name, key, value, *texts in columns]
        caption = f"records {part_of(len(lines), len(self))}, keys {shape(self.keys)}"
        return table(["id", "key", "value", "payload", "text"], lines, caption)


class Hit(NamedTuple):
    """One hit of a query: a record and its score."""

    id: Id
    score: float
    row: int
    payload: Any
    text: str | None = None

    def __repr__(self) -> str:
        text = "" if self.text is None else f", text={shown(self.text)}"
        return f"Hit(id={self.id!r}, score={self.score:.6g}, row={self.row}, payload={shown(self.payload)}{text})"


if not TYPE_CHECKING:  # a NamedTuple has no other base
    Hit.__getattr__ = OwnNames.__getattr__


@dataclass(frozen=True, repr=False)
class Hits(OwnNames, Sequence["QueryHits"]):
    """The k best records of each query, best first: a sequence of q `QueryHits`, and arrays.

    If a query has fewer than k hits, arrays are padded with row -1 and score -inf; lists and `hits[i]` are shorter.
    After a radius search k is the largest number of hits of a query. With diversity, hits are in the order in which
    MMR chose them. For queries (…, d) arrays are (…, k) and lists nested: `hits[i]` are the `Hits` of queries[i].

        for id, score, row, payload, text in hits[0]: ...
    """

    rows: Tensor  # (q, k) int64 permanent row numbers, -1 = none
    scores: Tensor  # (q, k) larger is closer, with gradient to the queries
    resolve: Resolve
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer

    def __len__(self) -> int:
        """q, the number of queries; for queries (…, d) their first dimension."""
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> QueryHits: ...
    @overload
    def __getitem__(self, i: slice) -> Hits: ...
    def __getitem__(self, i: int | slice | str) -> QueryHits | Hits:
        if isinstance(i, str):
            raise BadInput(_NO_COLUMN.format(i, "query's hits"))
        if isinstance(i, slice) or self.rows.ndim > 2:
            return Hits(self.rows[i], self.scores[i], self.resolve, self.missing)
        return QueryHits(self, range(len(self))[i])

    @property
    def flat(self) -> Hits:
        """The same hits with one leading dimension: of queries (…, d) as of queries (q, d), in row-major order."""
        return Hits(self.rows.flatten(0, -2), self.scores.flatten(0, -2), self.resolve, self.missing)

    @property
    def live(self) -> Tensor:
        """Mask of hits, (q, k) bool; False for padding."""
        return self.rows >= 0

    @cached_property
    def _entries(self) -> Mapping[int, RecordEntry]:
        return self._resolved()

    @cached_property
    def _text_entries(self) -> Mapping[int, RecordEntry]:
        return self._resolved(payloads=False, texts=True)

    def _resolved(self, **columns: bool) -> Mapping[int, RecordEntry]:
        rows = np.unique(self.rows[self.rows >= 0].cpu().numpy())
        try:
            entries = self.resolve(rows, **columns) if len(rows) else {}
        except Closed as error:
            raise Closed(f"{error}; read ids, payloads and texts of hits inside its with block") from None
        if len(entries) < len(rows):
            raise StaleRead(
                f"{len(rows) - len(entries)} of {len(rows)} hits are gone or replaced since the search; search again"
            )
        return entries

    @cached_property
    def _payload_by_row(self) -> dict[int, Any]:
        return dict(zip(self._entries, parsed([entry.payload for entry in self._entries.values()]), strict=True))

    @cached_property
    def ids(self) -> list[list[Id]]:
        """Ids of each query's hits. Raises StaleRead if a hit was deleted or replaced since the search."""
        return self._by_query({row: entry.id for row, entry in self._entries.items()})

    @cached_property
    def payloads(self) -> list[list[Any]]:
        """Payloads of each query's hits. Raises StaleRead if a hit was deleted or replaced since the search."""
        return self._by_query(self._payload_by_row)

    @cached_property
    def texts(self) -> list[list[str | None]]:
        """Texts of each query's hits, None where there is no text. Raises StaleRead for a hit that has changed."""
        return self._by_query({row: entry.text for row, entry in self._text_entries.items()})

    def _by_query(self, column: Mapping[int, Any]) -> list[Any]:
        lists = [[column[row] for row in rows if row >= 0] for rows in self.rows.flatten(0, -2).tolist()]
        return nested(lists, self.rows.shape[:-1])

    @known_arguments
    def to_pandas(self, fields: Sequence[str] | None = None) -> Any:
        """Return a pandas DataFrame with a row for each hit.

        Its columns are query (from 0), rank (from 1), id, score (no gradient), text if a hit has a text, and one for
        each field of the payloads, None where a payload lacks it; or payload, if they cannot be columns. With `fields`,
        only the named fields follow the score; "$text" is the text. Raises MissingDependency without pandas, StaleRead
        as `ids` does.
        """
        if self.rows.ndim > 2:
            return self.flat.to_pandas(fields)
        pandas = frames.pandas()
        live, payloads = self.live.cpu(), list(chain.from_iterable(self.payloads))
        columns: dict[str, Any] = {
            "query": live.nonzero()[:, 0].numpy(),
            "rank": np.array([rank for ids in self.ids for rank in range(1, len(ids) + 1)], np.int64),
            "id": pandas.Series(list(chain.from_iterable(self.ids)), dtype=object),
            "score": self.scores.detach().cpu()[live].numpy(),
        }
        texts = pandas.Series(list(chain.from_iterable(self.texts)), dtype=object)
        if fields is None:
            columns |= {"text": texts} if texts.notna().any() else {}
            names = frames._fields(payloads)
            if names == ["payload"] or columns.keys() & names:
                return pandas.DataFrame(columns | {"payload": pandas.Series(payloads, dtype=object)})
            fields = names
        if isinstance(fields, str) or not isinstance(fields, Iterable):
            raise BadInput(f'to_pandas: fields are {shown(fields)}; expected a list of names such as ["year", "lang"]')
        for name in fields:
            if not isinstance(name, str) or name in columns:
                expected = "each field of the payload once; query, rank, id and score are always columns"
                raise BadInput(f"to_pandas: fields hold {shown(name)}; expected {expected}")
            columns[name] = texts if name == "$text" else frames.field_cells(payloads, name)
        return pandas.DataFrame(columns)

    def _shown_entries(self, rows: list[int], texts: bool = False) -> Mapping[int, RecordEntry]:
        """Look up the records to show in a repr by their rows; empty if they cannot be read."""
        try:
            return self.resolve(np.unique(np.array(rows, np.int64)), texts=texts)
        except Exception:  # the database is closed or damaged; the repr then shows row numbers in place of ids
            return {}

    def __repr__(self) -> str:
        flat, count = self.flat, " × ".join(map(str, self.rows.shape[:-1]))
        return f"<Hits of {count} {'query' if len(flat) == 1 else 'queries'}: {listed(map(repr, flat), len(flat))}>"

    def _repr_html_(self) -> str:
        flat = self.flat
        return _hits_table(flat, range(len(flat)))


def _hits_table(hits: Hits, queries: range) -> str:
    """Return an HTML table of the first hits of some queries; only the records in the table are looked up."""
    hits_per_query = max(SHOWN, LINES // max(1, len(queries)))
    shown = {i: QueryHits(hits, i) for i in queries[: LINES // hits_per_query]}
    rows = [row for query_hits in shown.values() for row in query_hits._rows[:hits_per_query]]
    entries = hits._shown_entries(rows, texts=True)
    lines: list[list[str | None]] = []
    for i, query_hits in shown.items():
        pairs = zip(query_hits._rows[:hits_per_query], query_hits._scores, strict=False)
        for rank, (row, score) in enumerate(pairs, 1):
            name, *texts = (repr(entries[row].id), *entries[row][2:]) if row in entries else (f"row {row}", None, None)
            lines.append([str(i), str(rank), name, f"{score:.4g}", *texts])
    total = int(hits.live[queries.start : queries.stop].sum())
    caption = f"hits {part_of(len(lines), total)}, queries {part_of(len(shown), len(queries))}"
    return table(["query", "rank", "id", "score", "payload", "text"], lines, caption)


class QueryHits(OwnNames, Sequence[Hit]):
    """The hits of one query, best first. Ids and payloads are read together with those of the other queries."""

    def __init__(self, hits: Hits, query: int) -> None:
        self._hits, self._query = hits, query
        live = hits.live[query].nonzero()[:, 0].tolist()
        self._rows: list[int] = hits.rows[query, live].tolist()
        self._scores: list[float] = hits.scores[query, live].tolist()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, i: int) -> Hit: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hit]: ...
    def __getitem__(self, i: int | slice) -> Hit | list[Hit]:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row, hits = self._rows[i], self._hits
        payload, text = hits._payload_by_row[row], hits._text_entries[row].text
        return Hit(hits._entries[row].id, self._scores[i], row, payload, text)

    def __repr__(self) -> str:
        entries = self._hits._shown_entries(self._rows[:SHOWN])
        names = (repr(entries[row].id) if row in entries else f"row {row}" for row in self._rows)
        hits = (f"{name} {score:.4g}" for name, score in zip(names, self._scores, strict=True))
        return f"[{listed(hits, len(self))}]"

    def _repr_html_(self) -> str:
        return _hits_table(self._hits, range(self._query, self._query + 1))
