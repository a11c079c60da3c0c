"""Full-text search: BM25 over the text index, with the scores of FTS5's `bm25()`.

    score(text, record) = Σ over the words w of the text: idf(w) · f (k1 + 1) / (f + k1 (1 - b + b · length / average))
    idf(w) = log((N - n + 0.5) / (n + 0.5)), at least 1e-6

f: occurrences of w in the record, length: its number of words; n: records that contain w, N: records with a text;
k1 = 1.2, b = 0.75 (Robertson and Zaragoza 2009, eq. 3.15). FTS5 would read these counts again for every query. Here
the records that contain a word are read once and cached; after a commit only the new records are read.
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
from softdb.store.snapshot import Live, Rows

K1, B = 1.2, 0.75  # FTS5's defaults
LEAST_IDF = 1e-6
MAX_CACHED = 1 << 24  # largest number of (word, record) pairs in the cache: 128 MB

Floats = NDArray[np.float64]


class _Documents(NamedTuple):
    """Rows and lengths of all texts in one generation."""

    generation: int
    rows: Rows  # (m,) ascending rows of the records with a text, including deleted records
    lengths: Rows  # (m,) number of words in each text
    live: Live  # (m,) False for deleted records


class _Word(NamedTuple):
    """The records whose text contains a word, up to the row `last`."""

    last: int  # records in later rows have not been searched for the word
    places: NDArray[np.int32]  # (p,) ascending indices into `_Documents.rows`
    counts: NDArray[np.int32]  # (p,) number of occurrences of the word in each text


class TextScores(NamedTuple):
    """Query texts, prepared to score every record in one generation; immutable."""

    rows: Rows  # (m,) ascending rows of the records with a text
    live: Live  # (m,) False for deleted records
    norms: Floats  # (m,) k1 (1 - b + b · length / average)
    words: list[list[tuple[float, _Word]]]  # for each query its words: occurrences in the query · idf, and the records

    def scores(self, i: int) -> Floats:  # (m,)
        """Score all m records for query i, 0 for a record without its words. Cost: number of records with its words."""
        total = np.zeros(len(self.rows))
        for weight, (_, places, counts) in self.words[i]:
            total[places] += weight * (K1 + 1) * counts / (counts + self.norms[places])
        total[~self.live] = 0
        return total


_NONE = _Word(-1, np.empty(0, np.int32), np.empty(0, np.int32))


class FullText:
    """Cache of the records that contain each word. Call it on the store's thread, in a transaction of the catalogue."""

    def __init__(self) -> None:
        self._connection: apsw.Connection | None = None  # the one with the SQL function `occurrences`
        self._documents: _Documents | None = None
        self._words: OrderedDict[str, _Word] = OrderedDict()  # keys: quoted phrases, the last used at the end
        self._size = 0  # number of (word, record) pairs in `_words`

    def scorer(self, texts: list[str], catalog: Catalog, snapshot: Snapshot) -> TextScores:
        """Prepare query texts to score records by BM25. Raises BadInput if there is no text index.

        Cost: about 1 µs for each record with a word that is not cached; after a commit only for appended records.
        """
        if textindex.tokenizer(catalog.connection) is None:
            raise BadInput(textindex.NONE)
        if self._connection is not catalog.connection:  # a fork or a writer opens another connection
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
        """Return the records whose text contains a word, reading those that are not cached."""
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
        """Return the rows and lengths of all texts in this generation, reading only texts that are not cached."""
        cached = self._documents
        if cached is not None and cached.generation == snapshot.generation:
            return cached
        if cached is None or not catalog.payloads_replaced() <= cached.generation < snapshot.generation:
            cached = _Documents(-1, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
            self._words.clear()
            self._size = 0
        last = int(cached.rows[-1]) if len(cached.rows) else -1
        sql = "SELECT group_concat(id), group_concat(hex(sz), '') FROM texts_docsize WHERE id > ?"
        ids, sizes = catalog.one(sql, (last,))  # SQLite returns both in the order of ids
        new = np.fromstring(ids or "", np.int64, sep=",")
        rows = np.concatenate([cached.rows, new])
        lengths = np.concatenate([cached.lengths, _decode_varints(bytes.fromhex(sizes or ""), len(new))])
        live = np.concatenate([cached.live, np.ones(len(new), np.bool_)])
        if catalog.one("SELECT count(*) FROM texts_docsize")[0] != np.count_nonzero(live):
            live = np.isin(rows, catalog.rows("SELECT id AS row FROM texts_docsize"))
        if not snapshot.holds(rows[live]).all():
            raise damaged_text_index("names rows without a record")
        return _Documents(snapshot.generation, rows, lengths, live)


def _occurrences(api: Any, *_: object) -> int:
    """Return the number of times that a phrase occurs in a text, as `bm25()` counts; FTS5 calls this function."""
    return int(api.inst_count)


def _idf(count: int, containing: int) -> float:
    idf = math.log((count - containing + 0.5) / (containing + 0.5))
    return idf if idf > 0 else LEAST_IDF


def _decode_varints(blobs: bytes, count: int) -> Rows:
    """Decode SQLite's varints: 7 bits a byte, highest first; the top bit is set in all bytes but a number's last."""
    data = np.frombuffer(blobs, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != count or len(data) != (ends[-1] + 1 if count else 0):
        raise damaged_text_index("has texts of impossible lengths")
    if not count:
        return np.empty(0, np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    after = np.repeat(ends, ends - starts + 1) - np.arange(len(data))  # number of later bytes of the same varint
    return np.add.reduceat((data & 0x7F).astype(np.int64) << np.minimum(7 * after, 56), starts)
