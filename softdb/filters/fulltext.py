"""Full-text search: BM25 over the text index, with the scores of FTS5's `bm25()`.

    score(text, record) = Σ over the words w of the text: idf(w) · f (k1 + 1) / (f + k1 (1 - b + b · length / average))
    idf(w) = log((N - n + 0.5) / (n + 0.5)), at least 1e-6

f: occurrences of w in the record, n: records that have it, N: records with a text; k1 = 1.2, b = 0.75 (Robertson and
Zaragoza 2009, eq. 3.15). FTS5 would read all of that again for every query. Here the records of a word are read once
and cached, and updated after a commit as in `softdb.filters.matching`, so that a query is a few sums of arrays.
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

K1, B = 1.2, 0.75  # FTS5's defaults
LEAST_IDF = 1e-6
MAX_CACHED = 1 << 24  # cached (word, record) pairs: 128 MB

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]
Live = NDArray[np.bool_]


class _Documents(NamedTuple):
    """The texts of one generation."""

    generation: int
    rows: Rows  # (m,) ascending, with deleted ones
    lengths: Rows  # (m,) words of each text
    live: Live  # (m,)


class _Word(NamedTuple):
    """The texts that contain a word, up to some row."""

    last: int  # the last row
    places: NDArray[np.int32]  # (p,) ascending indices into `_Documents.rows`
    counts: NDArray[np.int32]  # (p,) occurrences of the word


class TextScores(NamedTuple):
    """Query texts, prepared to score every record; immutable, of one generation."""

    rows: Rows  # (m,) ascending: the records with a text
    live: Live  # (m,)
    norms: Floats  # (m,) k1 (1 - b + b · length / average)
    words: list[list[tuple[float, _Word]]]  # for each query: occurrences of a word times its idf, records of the word

    def among(self, rows: Rows) -> Live:  # (r,) -> (m,)
        """Mask of the records whose row is in `rows`."""
        return np.isin(self.rows, rows)

    def scores(self, i: int) -> Floats:  # (m,)
        """Score all records for the i-th query, 0 for records without its words. Cost: the records of its words."""
        total = np.zeros(len(self.rows))
        for weight, (_, places, counts) in self.words[i]:
            total[places] += weight * (K1 + 1) * counts / (counts + self.norms[places])
        total[~self.live] = 0
        return total


_NONE = _Word(-1, np.empty(0, np.int32), np.empty(0, np.int32))


class FullText:
    """Cache of the text index by word. The caller holds the store's thread and one generation of the catalogue."""

    def __init__(self) -> None:
        self._connection: apsw.Connection | None = None  # on which `occurrences` is registered
        self._documents: _Documents | None = None
        self._words: OrderedDict[str, _Word] = OrderedDict()  # by quoted phrase, the last used at the end
        self._size = 0  # (word, record) pairs in `_words`

    def scorer(self, texts: list[str], catalog: Catalog, snapshot: Snapshot) -> TextScores:
        """Prepare query texts to score records by BM25. Raises BadInput if there is no text index.

        Cost: a microsecond for each record of a word that is not cached; after a commit only for its new rows.
        """
        if textindex.tokenizer(catalog.connection) is None:
            raise BadInput(textindex.NONE)
        if self._connection is not catalog.connection:  # a fork or a writer changes it
            self._connection = catalog.connection
            self._connection.register_fts5_function("occurrences", _occurrences)
        documents = self._documents = self._load_documents(catalog, snapshot)
        count = int(np.count_nonzero(documents.live))
        mean = int(documents.lengths[documents.live].sum()) / max(1, count) or 1.0
        norms: Floats = K1 * (1 - B + B * documents.lengths.astype(np.float64) / mean)
        words = [
            [
                (times * _idf(count, int(np.count_nonzero(documents.live[word.places]))), word)
                for phrase, times in Counter(textindex.phrases(text)).items()
                if len((word := self._find_word(phrase, documents, catalog)).places)
            ]
            for text in texts
        ]
        return TextScores(documents.rows, documents.live, norms, words)

    def _find_word(self, phrase: str, documents: _Documents, catalog: Catalog) -> _Word:
        """Return the texts that contain a word."""
        word = self._words.pop(phrase, _NONE)
        self._size -= len(word.places)
        last = int(documents.rows[-1]) if len(documents.rows) else -1
        if word.last < last:
            sql = "SELECT rowid, occurrences(texts) FROM texts WHERE texts MATCH ? AND rowid > ? ORDER BY rowid"
            rows, counts = np.array(catalog.all(sql, (phrase, word.last)), np.int64).reshape(-1, 2).T
            places = documents.rows.searchsorted(rows)
            if len(rows) and (places[-1] == len(documents.rows) or (documents.rows[places] != rows).any()):
                raise damaged_text_index("names rows without a text")
            word = _Word(
                last,
                np.concatenate([word.places, places.astype(np.int32)]),
                np.concatenate([word.counts, counts.astype(np.int32)]),
            )
        self._words[phrase] = word
        self._size += len(word.places)
        while self._size > MAX_CACHED and len(self._words) > 1:
            self._size -= len(self._words.popitem(last=False)[1].places)
        return word

    def _load_documents(self, catalog: Catalog, snapshot: Snapshot) -> _Documents:
        """Return the texts of this generation, updating the cached ones of an earlier generation."""
        cached = self._documents
        if cached is not None and cached.generation == snapshot.generation:
            return cached
        if cached is None or not catalog.payloads_replaced() <= cached.generation < snapshot.generation:
            cached = _Documents(-1, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
            self._words.clear()
            self._size = 0
        last = int(cached.rows[-1]) if len(cached.rows) else -1
        sql = "SELECT group_concat(id), group_concat(hex(sz), '') FROM texts_docsize WHERE id > ?"
        ids, sizes = catalog.one(sql, (last,))  # in the order of ids
        new = _parse_integers(ids)
        rows = np.concatenate([cached.rows, new])
        lengths = np.concatenate([cached.lengths, _decode_varints(bytes.fromhex(sizes or ""), len(new))])
        live = np.concatenate([cached.live, np.ones(len(new), np.bool_)])
        if catalog.one("SELECT count(*) FROM texts_docsize")[0] != np.count_nonzero(live):
            live = np.isin(rows, _parse_integers(catalog.one("SELECT group_concat(id) FROM texts_docsize")[0]))
        if not snapshot.holds(rows[live]).all():
            raise damaged_text_index("names rows without a record")
        return _Documents(snapshot.generation, rows, lengths, live)


def _occurrences(api: Any, *_: object) -> int:
    """Count a phrase's occurrences in a text, as `bm25()` does; an auxiliary function of FTS5."""
    return int(api.inst_count)


def _idf(count: int, containing: int) -> float:
    idf = math.log((count - containing + 0.5) / (containing + 0.5))
    return idf if idf > 0 else LEAST_IDF


def _parse_integers(listed: str | None) -> Rows:
    return np.fromstring(listed or "", np.int64, sep=",")


def _decode_varints(blobs: bytes, count: int) -> Rows:
    """Decode SQLite's varints: seven bits a byte, the highest first; the top bit of all bytes but the last is set."""
    data = np.frombuffer(blobs, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != count or len(data) != (ends[-1] + 1 if count else 0):
        raise damaged_text_index("has texts of impossible lengths")
    if not count:
        return np.empty(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    after = np.repeat(ends, ends - starts + 1) - np.arange(len(data))  # bytes of the same number that follow
    return np.add.reduceat((data & 0x7F).astype(np.int64) << np.minimum(7 * after, 56), starts)
