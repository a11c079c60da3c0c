"""The oracle of the model test: the records in a dict, every answer in plain numpy, float64, without any index."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from model_world import Array, Id, Kind
from reference import bm25
from reference_filters import MISSING, as_filtered, meets

import softdb

TOLERANCE = 1e-5  # of a score, for vectors of length 1


class Stored(NamedTuple):
    """One record as it must come back."""

    row: int
    key: Array | None  # (d,) as stored
    value: Array | None  # (v,) or (), as stored
    payload: Any
    text: str | None = None

    @property
    def json(self) -> str:
        """The payload, so that 1, 1.0, True and -0.0 differ."""
        return json.dumps(self.payload)


class Records:
    """Records of a database by id, in the order of their last insertion."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.records: dict[Id, Stored] = {}
        self.next_row = 0
        self.tokenizer: str | None = None  # of the text index

    def copy(self) -> Records:
        """Copy of the state, which stays while this one changes."""
        other = Records(self.kind)
        other.records, other.next_row, other.tokenizer = dict(self.records), self.next_row, self.tokenizer
        return other

    def __len__(self) -> int:
        return len(self.records)

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def put(
        self,
        ids: Sequence[Id],
        keys: Array,
        values: Array | None,
        payloads: Sequence[Any],
        texts: Sequence[str | None] | None = None,
        keyed: Array | None = None,  # (n,) which have a key; None: all
    ) -> None:
        """Insert, or replace whole."""
        keys = np.asarray(keys).astype(self.kind.dtype)
        if values is not None:
            values = np.asarray(values).astype(np.int64 if self.kind.num_classes else self.kind.dtype)
        for i, one in enumerate(ids):
            self.records.pop(one, None)
            own = keyed is None or keyed[i]
            value = values[i] if own and values is not None else None
            text = texts[i] if texts else None
            self.records[one] = Stored(self.next_row, keys[i] if own else None, value, payloads[i], text)
            self.next_row += 1

    def change(
        self,
        ids: Sequence[Id],
        keys: Array | None,
        values: Array | None,
        payloads: list[Any] | None,
        texts: list[str | None] | None = None,
    ) -> None:
        """Update the given parts."""
        old = [self.records[one] for one in ids]
        payloads = [one.payload for one in old] if payloads is None else payloads
        texts = [one.text for one in old] if texts is None else texts
        if keys is None and values is None:  # in place: the rows stay
            for one, before, payload, text in zip(ids, old, payloads, texts, strict=True):
                self.records[one] = before._replace(payload=payload, text=text)
            return
        if values is None and self.kind.has_values:
            values = np.stack([np.asarray(one.value) for one in old])
        keys = np.stack([np.asarray(one.key) for one in old]) if keys is None else keys
        self.put(ids, keys, values, payloads, texts)

    def remove(self, ids: Iterable[Id]) -> int:
        return sum(self.records.pop(one, None) is not None for one in ids)

    def matching(self, where: dict[str, Any] | None) -> list[Id]:
        if where is None:
            return list(self.records)
        words = where.get("$text", {}).get("$match")
        if words is not None:
            where = {name: operand for name, operand in where.items() if name != "$text"}
        return [
            one
            for one, (_, _, _, payload, text) in self.records.items()
            if meets(as_filtered(payload), where, MISSING if text is None else text)
            and (words is None or self._has_all(text, words))
        ]

    def compared(self, where: dict[str, Any] | None) -> list[Id]:
        """Those that match and have a key: vector and soft queries meet no others."""
        return [one for one in self.matching(where) if self.records[one].key is not None]

    # -- words ---------------------------------------------------------------------------------------------------------

    def _tokens(self, text: str) -> list[str]:
        text = text.lower().replace("ü", "u")
        if self.tokenizer == "trigram":
            return [text[i : i + 3] for i in range(len(text) - 2)]
        return re.findall(r"[^\W_]+", text)

    def _phrases(self, words: str) -> list[list[str]]:
        return [tokens for word in words.split() if (tokens := self._tokens(word))]

    def _has_all(self, text: str | None, words: str) -> bool:
        phrases = self._phrases(words)
        return text is not None and bool(phrases) and all(bm25([phrase], {0: self._tokens(text)}) for phrase in phrases)

    def best_texts(self, hits: softdb.Hits, words: str, k: int, ids: Sequence[Id]) -> None:
        """Hits are the k of those ids with the best BM25 score, of all texts; no text and no score comes back wrong."""
        texts = {one: self._tokens(text) for one, (*_, text) in self.records.items() if text is not None}
        every = bm25(self._phrases(words), texts)
        best = sorted((score for one, score in every.items() if one in ids), reverse=True)[:k]
        found = list(hits[0])
        assert len({hit.id for hit in found}) == len(found) == len(best), f"{len(found)} hits, not {len(best)}"
        assert np.allclose([hit.score for hit in found], best, rtol=1e-9), f"a better record for {words!r} is not found"
        for hit in found:
            assert hit.id in ids
            assert np.isclose(hit.score, every[hit.id], rtol=1e-9)
            assert hit.text == self.records[hit.id].text

    # -- numbers -------------------------------------------------------------------------------------------------------

    def rows(self, ids: Sequence[Id]) -> Array:
        return np.array([self.records[one].row for one in ids], np.int64)

    def keys(self, ids: Sequence[Id]) -> Array:
        """(m, d) float64."""
        found = [np.asarray(self.records[one].key) for one in ids]
        return np.stack(found).astype(np.float64) if found else np.zeros((0, self.kind.dim))

    def values(self, ids: Sequence[Id]) -> Array:
        """(m, v) float64 as a soft query averages them: labels as one-hot vectors."""
        if not self.kind.has_values:
            return self.keys(ids)
        if self.kind.num_classes is not None:
            labels = [int(np.asarray(self.records[one].value)) for one in ids]
            return np.eye(self.kind.num_classes)[np.array(labels, np.int64)]
        found = [np.asarray(self.records[one].value) for one in ids]
        return np.stack(found).astype(np.float64) if found else np.zeros((0, self.kind.value_dim or 0))

    def scores(self, queries: Array, ids: Sequence[Id]) -> tuple[Array, Array]:
        """(q, m) scores, and how far from them an answer may be."""
        asked, keys = queries.astype(np.float64), self.keys(ids)
        lengths = np.linalg.norm(asked, axis=1)[:, None], np.linalg.norm(keys, axis=1)[None]
        product = asked @ keys.T
        if self.kind.metric == "dot":
            return product, TOLERANCE * lengths[0] * lengths[1] + 1e-30
        if self.kind.metric == "cosine":
            both = lengths[0] * lengths[1]
            return np.divide(product, both, out=np.zeros_like(product), where=both > 0), np.full(both.shape, TOLERANCE)
        scores = -np.square(asked[:, None] - keys[None]).sum(2)
        return scores, TOLERANCE * (lengths[0] + lengths[1]) ** 2 + 1e-30

    # -- comparisons ---------------------------------------------------------------------------------------------------

    def same(self, found: softdb.Records, ids: Sequence[Id]) -> None:
        """These records, in this order, to the last bit."""
        assert found.ids == list(ids), f"ids {found.ids} where {list(ids)} were expected"
        assert [type(one) for one in found.ids] == [type(one) for one in ids]
        stored = [self.records[one] for one in ids]
        if not stored:
            return
        keyed = np.array([one.key is not None for one in stored])
        assert found.keyed.tolist() == keyed.tolist(), "another record has a key"
        for column, name in ((found.keys, "key"), (found.values, "value")):
            if column is None:
                assert not self.kind.has_values
                continue
            expected = b"".join(getattr(one, name).tobytes() for one in stored if one.key is not None)
            assert np.asarray(column)[keyed].tobytes() == expected, f"{name}s differ"
        for one, payload in zip(stored, found.payloads, strict=True):
            assert json.dumps(payload) == one.json, f"payload {payload!r} where {one.payload!r} was stored"
        assert found.texts == [one.text for one in stored]

    def holds(self, db: softdb.SoftDB, batch: int = 1000) -> None:
        """Assert that the database holds exactly these records, by every kind of question."""
        assert db.verify() == len(db) == db.count() == db.count({}) == len(self)
        assert db.text_index == self.tokenizer
        parts, ids = list(db.scan(batch)), list(self.records)
        assert sum(len(part) for part in parts) == len(ids), "scan gives more or fewer records than there are"
        for i, part in enumerate(parts):
            self.same(part, ids[i * batch : i * batch + len(part)])
        if ids:
            self.same(db.get(ids[::-1]), ids[::-1])

    def best(self, hits: softdb.Hits, queries: Array, k: int, ids: Sequence[Id], exact: bool = True) -> None:
        """Hits are the k best of those ids, up to ties; their rows, scores and order are right.

        Not `exact`: as many, but perhaps others than the best.
        """
        scores, slack = self.scores(queries, ids)
        rows, found, given = self.rows(ids), np.asarray(hits.rows), hits.scores.detach().double().numpy()
        expected = min(k, len(ids))
        for i in range(len(queries)):
            live = found[i] >= 0
            assert live.sum() == expected, f"query {i} has {live.sum()} hits, {expected} were expected"
            assert live[:expected].all(), "hits stand behind missing ones"
            assert len(set(found[i][live])) == expected, "a record is found twice"
            places = np.searchsorted(rows, found[i][live])
            assert (rows[np.minimum(places, len(rows) - 1)] == found[i][live]).all(), "a hit is no live record"
            near = np.abs(given[i][live] - scores[i][places]) <= slack[i][places]
            assert near.all(), f"scores {given[i][live][~near]} where {scores[i][places][~near]} were expected"
            assert (np.diff(given[i][live]) <= 0).all(), "hits are not in order"
            wanted = np.sort(scores[i] - slack[i])[::-1][:expected]  # each of them is beaten by nothing but rounding
            reached = scores[i][places] + slack[i][places] >= wanted
            assert not exact or reached.all(), f"a nearer record than hit {np.flatnonzero(~reached)} is not found"
            assert hits.ids[i] == [ids[place] for place in places]
