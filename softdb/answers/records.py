"""Records, and hits of queries: one entry a query, ids and payloads read when asked.

Arrays are rectangular, padded with row -1 and score -inf; lists, `len`, iteration and `[i]` give what is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers.brief import LINES, SHOWN, json_cell, listed, numbers, part_of, shape, table
from softdb.check import Id, shown
from softdb.errors import BadInput, CorruptionError, MissingDependency, StaleRead
from softdb.lazy import cached_property
from softdb.store.entry import RecordEntry

__all__ = ["Hit", "Hits", "QueryHits", "Record", "Records", "Resolve", "parsed"]


class Resolve(Protocol):
    """Looks records up by their rows; those that are gone are absent."""

    def __call__(
        self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False
    ) -> Mapping[int, RecordEntry]:
        """Ids, and payloads and texts where asked for."""
        ...


def parsed(texts: list[str | None]) -> list[Any]:
    """JSON values of payload texts, each read alone: one that is damaged must not shift the others.

    Raises CorruptionError where a text is not JSON.
    """
    try:
        return [None if text is None else _decode(text) for text in texts]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptionError(f"a stored payload is not JSON ({error}); verify() names its row") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is none of its values")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


@dataclass(frozen=True, repr=False)
class Record:
    """One stored record, copied out."""

    id: Id
    key: Any  # a Tensor (d,); None: it has none
    value: Tensor | int | None  # (v,), a class label, or None where the key serves
    payload: Any
    text: str | None = None

    def __repr__(self) -> str:
        key, value = (shape(part) if isinstance(part, Tensor) else part for part in (self.key, self.value))
        text = "" if self.text is None else f", text {shown(self.text)}"
        return f"Record({self.id!r}, key {key}, value {value}, payload {shown(self.payload)}{text})"

    def _repr_html_(self) -> str:
        values = None if self.value is None else torch.as_tensor(self.value)[None]
        keyed = torch.tensor([self.key is not None])
        keys = torch.zeros(1, 0) if self.key is None else self.key[None]
        return Records([self.id], keys, values, [json_cell(self.payload)], [self.text], keyed)._repr_html_()


@dataclass(frozen=True, repr=False)
class Records(Sequence[Record]):
    """Stored records, copied out, in the order asked for: a sequence of `Record`, and one column a field."""

    ids: list[Id]  # n
    keys: Tensor  # (n, d) in the database's dtype; zeros where a record has none
    values: Tensor | None  # (n, v), (n,) int64 labels, or None where the key serves
    payload_texts: list[str | None]  # n JSON texts
    texts: list[str | None]  # n
    keyed: Tensor  # (n,) bool: which have a key

    @cached_property
    def payloads(self) -> list[Any]:
        """The n payloads."""
        return parsed(self.payload_texts)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, i: int) -> Record: ...
    @overload
    def __getitem__(self, i: slice) -> Records: ...
    def __getitem__(self, i: int | slice) -> Record | Records:
        value: Any = None if self.values is None else self.values[i]
        if isinstance(i, slice):
            return Records(self.ids[i], self.keys[i], value, self.payload_texts[i], self.texts[i], self.keyed[i])
        if isinstance(value, Tensor) and value.ndim == 0:
            value = int(value)
        own = bool(self.keyed[i])
        return Record(
            self.ids[i], self.keys[i] if own else None, value if own else None, self.payloads[i], self.texts[i]
        )

    def __repr__(self) -> str:
        values = "none" if self.values is None else shape(self.values)
        ids = listed(map(repr, self.ids), len(self))
        return f"<{len(self)} Records: {ids}; keys {shape(self.keys)}, values {values}>"

    def _repr_html_(self) -> str:
        most, values = LINES, () if self.values is None else self.values[:LINES]
        keys = (key if own else None for key, own in zip(self.keys[:most], self.keyed, strict=False))
        columns = zip_longest(self.ids[:most], keys, values, self.payload_texts[:most], self.texts[:most])
        lines = [[repr(one), numbers(key), numbers(value), *rest] for one, key, value, *rest in columns]
        caption = f"records {part_of(len(lines), len(self))}, keys {shape(self.keys)}"
        return _with_texts(["id", "key", "value", "payload", "text"], lines, caption)


class Hit(NamedTuple):
    """One record that a query found."""

    id: Id
    score: float
    row: int
    payload: Any
    text: str | None = None

    def __repr__(self) -> str:
        text = "" if self.text is None else f", text={shown(self.text)}"
        return f"Hit(id={self.id!r}, score={self.score:.6g}, row={self.row}, payload={shown(self.payload)}{text})"


@dataclass(frozen=True, repr=False)
class Hits(Sequence["QueryHits"]):
    """The k best records of each query, best first: q sequences of `Hit`, and arrays.

    Arrays have row -1 and score -inf at the end where there are fewer than k records; lists and `hits[i]` end there. Of
    a search with a radius, k is the most that one of the queries has; with diversity, hits stand in the order in which
    they were chosen.

        for id, score, row, payload, text in hits[0]: ...
    """

    rows: Tensor  # (q, k) int64 permanent row numbers, -1 = none
    scores: Tensor  # (q, k) larger is closer, with gradient to the queries
    resolve: Resolve
    missing: tuple[int, ...] = ()  # shards of a cluster that did not answer

    def __len__(self) -> int:
        """q, the number of queries."""
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> QueryHits: ...
    @overload
    def __getitem__(self, i: slice) -> Hits: ...
    def __getitem__(self, i: int | slice) -> QueryHits | Hits:
        if isinstance(i, slice):
            return Hits(self.rows[i], self.scores[i], self.resolve, self.missing)
        return QueryHits(self, range(len(self))[i])

    @property
    def live(self) -> Tensor:
        """Mask of hits, (q, k) bool, False where there is none."""
        return self.rows >= 0

    @cached_property
    def _found(self) -> Mapping[int, RecordEntry]:
        return self._looked_up()

    @cached_property
    def _text_of(self) -> Mapping[int, RecordEntry]:
        return self._looked_up(payloads=False, texts=True)

    def _looked_up(self, **what: bool) -> Mapping[int, RecordEntry]:
        wanted = np.unique(self.rows[self.rows >= 0].cpu().numpy())
        found = self.resolve(wanted, **what)
        if len(found) < len(wanted):
            raise StaleRead(
                f"{len(wanted) - len(found)} of {len(wanted)} hits are gone or replaced since the search; search again"
            )
        return found

    @cached_property
    def _payload_of(self) -> dict[int, Any]:
        return dict(zip(self._found, parsed([one.payload for one in self._found.values()]), strict=True))

    @cached_property
    def ids(self) -> list[list[Id]]:
        """For each query the ids of its hits. Raises StaleRead when one was deleted or replaced since the search."""
        return [[self._found[row].id for row in rows if row >= 0] for rows in self.rows.tolist()]

    @cached_property
    def payloads(self) -> list[list[Any]]:
        """For each query the payloads of its hits. Raises StaleRead as `ids` does."""
        return [[self._payload_of[row] for row in rows if row >= 0] for rows in self.rows.tolist()]

    @cached_property
    def texts(self) -> list[list[str | None]]:
        """For each query the texts of its hits, None where one has none. Raises StaleRead as `ids` does."""
        return [[self._text_of[row].text for row in rows if row >= 0] for rows in self.rows.tolist()]

    def to_pandas(self, fields: Sequence[str] | None = None) -> Any:
        """A pandas DataFrame with one line a hit: query (from 0), rank (from 1), id, score, payload, and any texts.

        fields: names of fields, each a column in place of both; None where a payload has no such field. "$text" is the
        text. Scores are plain numbers. Raises MissingDependency without pandas, StaleRead as `ids` does.
        """
        try:
            import pandas
        except ImportError:
            raise MissingDependency("to_pandas needs pandas; pip install pandas") from None
        places, payloads = self.live.cpu().nonzero(), [one for mine in self.payloads for one in mine]
        columns: dict[str, Any] = {
            "query": places[:, 0].numpy(),
            "rank": np.array([i for mine in self.ids for i in range(1, len(mine) + 1)], np.int64),
            "id": pandas.Series([one for mine in self.ids for one in mine], dtype=object),
            "score": self.scores.detach().cpu()[self.live.cpu()].numpy(),
        }
        texts = pandas.Series([one for mine in self.texts for one in mine], dtype=object)
        if fields is None:
            columns["payload"] = pandas.Series(payloads, dtype=object)
            return pandas.DataFrame(columns | ({"text": texts} if texts.notna().any() else {}))
        if isinstance(fields, str) or not isinstance(fields, Iterable):
            raise BadInput(f'to_pandas: fields are {shown(fields)}; expected a list of names such as ["year", "lang"]')
        for name in fields:
            if not isinstance(name, str) or name in columns:
                raise BadInput(f"to_pandas: fields hold {shown(name)}; expected names other than {', '.join(columns)}")
            own = [payload.get(name) if isinstance(payload, dict) else None for payload in payloads]
            columns[name] = texts if name == "$text" else own
        return pandas.DataFrame(columns)

    def _named(self, rows: list[int], texts: bool = False) -> Mapping[int, RecordEntry]:
        """Some rows, to be shown, without those that are gone."""
        try:
            return self.resolve(np.unique(np.array(rows, np.int64)), texts=texts)
        except Exception:  # the database is closed or damaged: rows say which records these were
            return {}

    def __repr__(self) -> str:
        return f"<Hits of {len(self)} {'query' if len(self) == 1 else 'queries'}: {listed(map(repr, self), len(self))}>"

    def _repr_html_(self) -> str:
        return _hits_table(self, range(len(self)))


def _hits_table(hits: Hits, queries: range) -> str:
    """A table of the hits of some queries. Looks up those that it shows."""
    each = max(SHOWN, LINES // max(1, len(queries)))
    mine = {i: QueryHits(hits, i) for i in queries[: LINES // each]}
    names = hits._named([row for one in mine.values() for row in one._rows[:each]], texts=True)
    lines: list[list[str | None]] = []
    for i, one in mine.items():
        for rank, (row, score) in enumerate(zip(one._rows[:each], one._scores, strict=False), 1):
            name, *rest = (repr(names[row].id), *names[row][2:]) if row in names else (f"row {row}", None, None)
            lines.append([str(i), str(rank), name, f"{score:.4g}", *rest])
    found = int(hits.live[queries.start : queries.stop].sum())
    caption = f"hits {part_of(len(lines), found)}, queries {part_of(len(mine), len(queries))}"
    return _with_texts(["query", "rank", "id", "score", "payload", "text"], lines, caption)


def _with_texts(heads: list[str], lines: list[list[str | None]], caption: str) -> str:
    """A table whose last column, of texts, is there where one of them is."""
    width = len(heads) if any(line[-1] for line in lines) else -1
    return table(heads[:width], [[cell or "" for cell in line[:width]] for line in lines], caption)


class QueryHits(Sequence[Hit]):
    """The hits of one query, best first; what these are is read with those of the other queries."""

    def __init__(self, hits: Hits, query: int) -> None:
        self._hits, self._query = hits, query
        self._places = hits.live[query].nonzero()[:, 0].tolist()
        self._rows: list[int] = hits.rows[query, self._places].tolist()
        self._scores: list[float] = hits.scores[query, self._places].tolist()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, i: int) -> Hit: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hit]: ...
    def __getitem__(self, i: int | slice) -> Hit | list[Hit]:
        if isinstance(i, slice):
            return [self[j] for j in range(len(self))[i]]
        row = self._rows[i]
        hits = self._hits
        return Hit(hits._found[row].id, self._scores[i], row, hits._payload_of[row], hits._text_of[row].text)

    def __repr__(self) -> str:
        names = self._hits._named(self._rows[:SHOWN])
        hits = zip(self._rows, self._scores, strict=True)
        each = (f"{names[row].id!r} {score:.4g}" if row in names else f"row {row} {score:.4g}" for row, score in hits)
        return f"[{listed(each, len(self))}]"

    def _repr_html_(self) -> str:
        return _hits_table(self._hits, range(self._query, self._query + 1))
