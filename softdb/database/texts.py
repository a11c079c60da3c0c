"""Full text: its index, and searches by text, by vector and text together."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits
from softdb.attend import fused_hits, hits, text_hits
from softdb.check import Id
from softdb.database.handle import Handle, verb
from softdb.errors import BadInput
from softdb.store import ByText
from softdb.typing import IdsPerQuery

__all__ = ["Fuse", "SearchMode", "TextVerbs"]

SearchMode: TypeAlias = Literal["hybrid", "text", "vector"]
Fuse: TypeAlias = Literal["scores", "ranks"] | float | Tensor


class TextVerbs(Handle):
    """What concerns the words of the records' texts."""

    @verb
    def index_text(self, tokenizer: Literal["words", "trigram"] = "words") -> None:
        """Index the texts of all records for full-text search; kept with the database and with every write.

        Args:
            tokenizer: "words": runs of letters and digits of any script, without case and diacritics. "trigram": every
                three characters, so that a word is found within longer ones, and languages that put no blanks between
                words are searched; words of fewer than three characters find nothing.

        An index of that tokenizer stays, another one is made anew. Cost: 3 µs a record of ten words now and with every
        insert (60 µs by trigrams), and about as many bytes as the texts have.
        """
        self._store.index_text(check.one_of(tokenizer, "tokenizer", ("words", "trigram")))

    @verb
    def drop_text_index(self) -> None:
        """Drop the index of the texts, if there is one; the texts stay."""
        self._store.index_text(None)

    @property
    def text_index(self) -> str | None:
        """The tokenizer of the index of the texts, "words" or "trigram"; None where there is none."""
        self._store.require_open()
        return self._store.text_index()

    def _search_by_text(
        self,
        words: check.Words,
        k: int | None,
        where: dict[str, Any] | None,
        exclude_ids: IdsPerQuery | None,
        fetch_k: int | None,
        offset: int,
        exact: bool,
    ) -> Hits:
        """A search by text, or by text and vector."""
        start = check.integer(offset, "offset", 0)
        count = start + check.integer(check.DEFAULT_K if k is None else k, "k")
        left_out = check.excluded(exclude_ids, len(words.texts))
        find = functools.partial(self._store.by_text, words.texts, where, [one for names in left_out for one in names])
        if words.mode is check.Mode.TEXT:
            words.require_none(fetch_k=fetch_k)
            found = find()
            width = min(count, found.snapshot.records)
            own, scores = text_hits(found.scores, width, found.keep, _rows(found, left_out))
            return Hits(own[:, start:], scores[:, start:], self._store.read)
        depth = 4 * count if fetch_k is None else check.integer(fetch_k, "fetch_k", count)
        queries, found = self._as_made(lambda: (self.as_queries(words.queries), find()))
        if len(queries) != len(words.texts):
            raise BadInput(f"{len(queries)} queries for {len(words.texts)} texts; give one text for each query")
        snapshot, metric, rows = found.snapshot, self._store.schema.metric, _rows(found, left_out)
        depth = min(depth, snapshot.records)
        ask, excluded = check.Asked(depth, None, 0.0, depth), None if rows is None else snapshot.positions(rows)
        near = functools.partial(self._finder.find, snapshot, exact=exact)
        snapshot = self._finder.columns(snapshot, queries.device) or snapshot
        nearest = hits(ask, queries.detach(), snapshot, metric, near, found.allowed, excluded)[0].cpu().numpy()
        nearest = np.pad(nearest, ((0, 0), (0, depth - nearest.shape[1])), constant_values=-1)
        own, scores = fused_hits(
            words.fusion, found.scores, min(count, depth), found.keep, rows, queries, nearest, snapshot, metric
        )
        return Hits(own[:, start:], scores[:, start:], self._store.read)


def _rows(found: ByText, left_out: list[list[Id]]) -> NDArray[np.int64] | None:
    """The rows that each query leaves out, (q, e) or (1, e)."""
    return check.padded(found.left_out, [len(names) for names in left_out]) if left_out else None
