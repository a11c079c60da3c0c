"""Full-text search: BM25 over the text index, as FTS5's `bm25()` gives it.

    score(text, record) = Σ over the words w of the text: idf(w) · f (k1 + 1) / (f + k1 (1 - b + b · length / average))
    idf(w) = log((N - n + 0.5) / (n + 0.5)), at least 1e-6

f: occurrences of w in the record, n: records that have it, N: records with a text; k1 = 1.2, b = 0.75 (Robertson and
Zaragoza 2009, eq. 3.15). FTS5 reads all of that anew for every query; here the records of a word are read once and
remembered, carried from one commit to the next as in `softdb.filters.matching`, and a query is a few sums of arrays.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.errors import BadInput
from softdb.store import Snapshot, textindex
from softdb.store.catalog import Catalog
from softdb.store.connect import damaged_text_index

K1, B = 1.2, 0.75  # FTS5's own
LEAST_IDF = 1e-6
KEPT = 1 << 24  # records of words that are remembered, all words together: 128 MB

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]
Live = NDArray[np.bool_]


class _Documents(NamedTuple):
    """The texts of one generation."""

    generation: int
    rows: Rows  # (m,) ascending, those since deleted included
    lengths: Rows  # (m,) words
    live: Live  # (m,)


class _Word(NamedTuple):
    """The texts that have a word, up to some row."""

    last: int  # row
    places: NDArray[np.int32]  # (p,) ascending, in `_Documents.rows`
    counts: NDArray[np.int32]  # (p,) how often


class TextScores(NamedTuple):
    """The words of texts, by which every record is scored; immutable, of one generation."""

    rows: Rows  # (m,) ascending: the records with a text
    live: Live  # (m,)
    norms: Floats  # (m,) k1 (1 - b + b · length / average)
    words: list[list[tuple[float, _Word]]]  # for each text: how often it has a word times the word's idf, its records

    def among(self, rows: Rows) -> Live:  # (r,) -> (m,)
        """Mask of the records that are among some rows."""
        return np.isin(self.rows, rows)

    def scores(self, i: int) -> Floats:  # (m,)
        """The scores of all records for the i-th text, 0 where none of its words is. Cost: the records of its words."""
        total = np.zeros(len(self.rows))
        for weight, (_, places, counts) in self.words[i]:
            total[places] += weight * (K1 + 1) * counts / (counts + self.norms[places])
        total[~self.live] = 0
        return total


_NONE = _Word(-1, np.empty(0, np.int32), np.empty(0, np.int32))


class FullText:
    """The text index, remembered by word. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self._connection: apsw.Connection | None = None  # that can count
        self._documents: _Documents | None = None
        self._words: OrderedDict[str, _Word] = OrderedDict()  # by the phrase that asks for it, the latest last
        self._kept = 0  # records of all words together

    def scorer(self, texts: list[str], catalog: Catalog, snapshot: Snapshot) -> TextScores:
        """BM25 scores of the records for each text. Raises BadInput where there is no text index.

        Cost: a microsecond a record of every word that was not asked for before; after a commit its rows alone.
        """
        if textindex.tokenizer(catalog.connection) is None:
            raise BadInput(textindex.NONE)
        if self._connection is not catalog.connection:  # after a fork it is another
            self._connection = catalog.connection
            self._connection.register_fts5_function("occurrences", _occurrences)
        documents = self._documents = self._loaded(catalog, snapshot)
        count = int(np.count_nonzero(documents.live))
        mean = int(documents.lengths[documents.live].sum()) / max(1, count) or 1.0
        norms: Floats = K1 * (1 - B + B * documents.lengths.astype(np.float64) / mean)
        words = [
            [
                (times * _idf(count, int(np.count_nonzero(documents.live[word.places]))), word)
                for phrase, times in Counter(textindex.phrases(text)).items()
                if len((word := self._word(phrase, documents, catalog)).places)
            ]
            for text in texts
        ]
        return TextScores(documents.rows, documents.live, norms, words)

    def _word(self, phrase: str, documents: _Documents, catalog: Catalog) -> _Word:
        """The texts that have a word."""
        known = self._words.pop(phrase, _NONE)
        self._kept -= len(known.places)
        last = int(documents.rows[-1]) if len(documents.rows) else -1
        if known.last < last:
            sql = "SELECT rowid, occurrences(texts) FROM texts WHERE texts MATCH ? AND rowid > ? ORDER BY rowid"
            rows, counts = np.array(catalog.all(sql, (phrase, known.last)), np.int64).reshape(-1, 2).T
            places = documents.rows.searchsorted(rows)
            if len(rows) and (places[-1] == len(documents.rows) or (documents.rows[places] != rows).any()):
                raise damaged_text_index("names rows without a text")
            known = _Word(
                last,
                np.concatenate([known.places, places.astype(np.int32)]),
                np.concatenate([known.counts, counts.astype(np.int32)]),
            )
        self._words[phrase] = known
        self._kept += len(known.places)
        while self._kept > KEPT and len(self._words) > 1:
            self._kept -= len(self._words.popitem(last=False)[1].places)
        return known

    def _loaded(self, catalog: Catalog, snapshot: Snapshot) -> _Documents:
        """The texts of this generation, those of an earlier one carried on."""
        known = self._documents
        if known is not None and known.generation == snapshot.generation:
            return known
        if known is None or not catalog.payloads_replaced() <= known.generation < snapshot.generation:
            known = _Documents(-1, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
            self._words.clear()
            self._kept = 0
        last = int(known.rows[-1]) if len(known.rows) else -1
        sql = "SELECT group_concat(id), group_concat(hex(sz), '') FROM texts_docsize WHERE id > ?"
        ids, sizes = catalog.one(sql, (last,))  # in the order of ids
        new = _integers(ids)
        rows = np.concatenate([known.rows, new])
        lengths = np.concatenate([known.lengths, _varints(bytes.fromhex(sizes or ""), len(new))])
        live = np.concatenate([known.live, np.ones(len(new), np.bool_)])
        if catalog.one("SELECT count(*) FROM texts_docsize")[0] != np.count_nonzero(live):
            live = np.isin(rows, _integers(catalog.one("SELECT group_concat(id) FROM texts_docsize")[0]))
        if not snapshot.holds(rows[live]).all():
            raise damaged_text_index("names rows without a record")
        return _Documents(snapshot.generation, rows, lengths, live)


def _occurrences(api: Any, *_: object) -> int:
    """Number of times that a phrase is in a text, as `bm25()` counts."""
    return int(api.inst_count)


def _idf(count: int, having: int) -> float:
    idf = math.log((count - having + 0.5) / (having + 0.5))
    return idf if idf > 0 else LEAST_IDF


def _integers(listed: str | None) -> Rows:
    return np.fromstring(listed or "", np.int64, sep=",")


def _varints(blobs: bytes, count: int) -> Rows:
    """So many numbers as SQLite writes them: seven bits a byte, the highest first; the eighth says that more follow."""
    data = np.frombuffer(blobs, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != count or len(data) != (ends[-1] + 1 if count else 0):
        raise damaged_text_index("has texts of impossible lengths")
    if not count:
        return np.empty(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    after = np.repeat(ends, ends - starts + 1) - np.arange(len(data))  # bytes of the same number
    return np.add.reduceat((data & 0x7F).astype(np.int64) << np.minimum(7 * after, 56), starts)
