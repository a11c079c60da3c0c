"""Answers: nearest records, soft queries, samples, densities and counts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from softdb import check
from softdb.answers import Hits
from softdb.attend import Request, Stored, grouped, hits
from softdb.check import Id
from softdb.database.handle import verb
from softdb.database.soft import SoftVerbs
from softdb.database.texts import Fuse, SearchMode, TextVerbs
from softdb.errors import BadInput, StaleRead
from softdb.scoring import Score, ScoreFunction, Weighting, query_width, score_of
from softdb.store import Snapshot
from softdb.store.groups import Grouping
from softdb.typing import IdsPerQuery, Vectors

__all__ = ["AskingVerbs"]


class AskingVerbs(TextVerbs, SoftVerbs):
    """What is asked of a database by vector."""

    @verb
    def search(
        self,
        queries: Vectors | None = None,
        k: int | None = None,
        *,
        texts: str | Sequence[str] | None = None,
        mode: SearchMode | None = None,
        fusion: Fuse | None = None,
        where: dict[str, Any] | None = None,
        exact: bool = False,
        radius: float | None = None,
        exclude_ids: IdsPerQuery | None = None,
        diversity: float | None = None,
        fetch_k: int | None = None,
        offset: int = 0,
        group_by: str | None = None,
        group_size: int | None = None,
    ) -> Hits:
        """The k nearest records of each query, best first, as an answer min(k, n) wide, n the records with a key.

        Where fewer records take part, a line ends in row -1, score -inf.

        Args:
            queries: (q, d) numbers, or q texts where the database has an encoder. A tensor keeps its graph:
                `hits.scores` carry the gradient. Answers are in the queries' precision; a list is float32.
            k: how many; 10 where nothing else is asked for.
            texts, mode, fusion: search by words, or by words and vectors together; see `index_text`.
                Texts are q str. "text": those with the best BM25 score, as FTS5's `bm25()` gives it, float64; records
                without a key, too. "hybrid": of the `fetch_k` (4 k) best of each kind. "vector": texts through the
                encoder alone. None: by vector for queries alone; for texts hybrid, where there are queries or an
                encoder, else text. With mode "text" or "hybrid" queries may be those texts.
            fusion: of "hybrid". "scores" (the default): 0.8 times the vector's score plus 0.2 times the text's, each
                scaled to 0 … 1 among the candidates; "ranks": the sum of 1 / (60 + rank), without a gradient; or a
                weight w, a number or a tensor to learn: score + w BM25.
            where: a filter on the payload; see `softdb.store.filters`.
            exact: pass the index by.
            radius: in place of k, every record that is near enough, always exact: for "l2" a largest distance,
                ‖q - k‖ ≤ radius, though scores are -‖q - k‖²; for "dot" and "cosine" a least score, s ≥ radius. The
                answer is as wide as the query with the most hits.
            exclude_ids: ids to leave out, one list for all queries or one for each of them; unknown ids are fine.
            diversity: from 0 (the nearest) to 1 (the most unlike each other): the k are chosen one by one among the
                nearest `fetch_k` (4 k where not given) by maximal marginal relevance, and come in the order of
                choosing, with the scores of the query. See `softdb.index.diverse`.
            offset: the best so many are passed over: the next page. An index looks farther for a later page, so it may
                find there what it missed before; with `exact` pages are those of one long answer.
            group_by: a field of the payload, whose value says which group a record is in: the best record of each of
                the k best groups; `offset` counts groups. Records where it is missing, null, a list or an object are
                in none and are not found. See `softdb.attend.grouped` for the cost.
            group_size: the best so many of each group in place of one, group after group; the answer is as wide as the
                query with the most hits.

        Cost: q n d without an index (or few matches); with one, its probes and the exact scores of some 100 candidates.

            db.search(queries, radius=0.8)                              # every record with cosine ≥ 0.8
            db.search(db.get(ids).keys, exclude_ids=[[i] for i in ids])  # neighbours of stored records
            db.search(queries, k=5, diversity=0.3)
            db.search(queries, k=10, group_by="doc")                     # the best passage of each of 10 documents
        """
        if texts is not None or mode is not None or fusion is not None or queries is None:
            words = check.words(queries, texts, mode, fusion, lambda: self._encoder() is not None)
            if words.mode is not check.Mode.VECTOR:
                words.require_none(radius=radius, diversity=diversity, group_by=group_by, group_size=group_size)
                return self._search_by_text(words, k, where, exclude_ids, fetch_k, offset, exact)
            queries = words.queries
        if (where is None and radius is None and exclude_ids is None and diversity is None and fetch_k is None) and (
            group_by is None and group_size is None and type(offset) is int and offset == 0
        ):
            plain = None if exact else self._found_plainly(queries, k)
            if plain is not None:
                return plain
        loader = self._store.loader
        metric = loader.loaded.keyed.schema.metric
        ask = check.asked(k, radius, diversity, fetch_k, metric, offset, group_by, group_size)
        made = None
        while loader.loaded.keyed is not made:  # else all keys were made anew between queries and generation
            made = loader.loaded.keyed
            tensor = self.as_queries(queries)
            left_out = check.excluded(exclude_ids, len(tensor))
            view = self._view_of(where, left_out, ask.group_by)
        snapshot, allowed, excluded, groups = view
        find = functools.partial(self._finder.find, snapshot, exact=exact)
        snapshot = self._finder.columns(snapshot, tensor.device) or snapshot
        if groups is None:
            return Hits(*hits(ask, tensor, snapshot, metric, find, allowed, excluded), self._store.read)
        return Hits(*grouped(ask, tensor, snapshot, metric, find, allowed, excluded, groups), self._store.read)

    def _found_plainly(self, queries: Vectors, k: int | None) -> Hits | None:
        """A search that asks for nothing but k, in the few steps that one query needs; None: it has to take them all.

        What is wrong with an argument is for those to say.
        """
        snapshot, keyed = self._store.loader.loaded
        vectors = check.vectors(queries, keyed.schema.dim) if self._device is None else None
        count = check.DEFAULT_K if k is None else k
        if vectors is None or type(count) is not int or count < 1 or not check.all_finite(vectors):
            return None
        found = self._finder.find_among_all(snapshot, vectors, count)
        if found is None or found.scores is None:
            return None
        return Hits(torch.from_numpy(snapshot.rows(found.positions)), torch.from_numpy(found.scores), self._store.read)

    def located(self, ids: list[Id], where: dict[str, Any] | None = None) -> NDArray[np.int64]:
        """Rows (n,) of ids; -1 for those not stored, without a key, or that the filter does not match."""
        snapshot, rows = self.locate(ids)
        allowed = self.view(where)[1]
        if allowed is None:
            return rows
        positions = snapshot.positions(rows)
        return np.where((positions >= 0) & allowed[positions], rows, -1)

    def values_at(self, rows: NDArray[np.int64]) -> torch.Tensor:  # (q, k), -1 = none
        """Values (q, k, v), or labels (q, k), of rows; zeros where there is none. Raises StaleRead for one gone."""
        snapshot, schema = self._store.snapshot, self._store.schema
        if not snapshot.size:
            return torch.zeros(*rows.shape, schema.pooled_dim)
        found = snapshot.positions(rows)
        if ((found < 0) & (rows >= 0)).any():
            raise StaleRead("a record was deleted while the query was answered; attend again")
        return snapshot.values_at(found)

    def sample_keys(self, count: int) -> torch.Tensor:
        """Up to so many of the keys, spread evenly, by which one database is told from another."""
        snapshot = self._store.snapshot
        live = np.flatnonzero(snapshot.live)
        if not len(live):
            return torch.zeros(0, self._store.schema.dim)
        return snapshot.keys_at(live[np.linspace(0, len(live) - 1, min(count, len(live))).astype(np.int64)])

    def source(self, snapshot: Snapshot, device: torch.device | None = None) -> Stored:
        """The records of a generation, as every answer to queries on a device reads them; None: the CPU."""
        there = None if device is None else self._finder.columns(snapshot, device)
        return Stored(snapshot, self._store.schema, self._finder, self._store.read, there)

    def request(
        self,
        queries: Any,
        temperature: float = 1.0,
        score: Score | ScoreFunction | None = None,
        weights: str | Weighting | None = None,
        where: dict[str, Any] | None = None,
        mask: Any = None,
        *,
        k: int | None = None,
        tolerance: check.Tolerance | None = None,
        generator: torch.Generator | None = None,
        need_weights: bool = False,
    ) -> tuple[Request, Stored]:
        """What a soft verb asks, checked, and the records it asks; arguments as `attend`. Raises BadInput."""
        if score is not None and not callable(score):
            raise BadInput(f"score is {check.shown(score)}; expected an object of softdb.scores or a callable")
        by = score_of(self._store.schema.metric) if score is None else score
        temperature = check.temperature(temperature)

        def asked() -> tuple[torch.Tensor, NDArray[np.bool_] | None, Stored]:
            tensor = self.as_queries(queries, query_width(by, self._store.schema.dim))
            snapshot, allowed = self.view(where)
            return tensor, allowed, self.source(snapshot, tensor.device)

        tensor, allowed, source = self._as_made(asked)
        if mask is not None:
            mask = check.mask(mask, (len(tensor), source.snapshot.count)).to(tensor.device)
        generator = check.generator(generator)
        seed = 0 if generator is None else int(torch.randint(1 << 40, (), generator=generator))
        request = Request.of(
            tensor, by, weights, temperature, allowed, mask, k, tolerance, seed, need_weights=need_weights
        )
        return request, source

    def _view_of(
        self, where: dict[str, Any] | None, left_out: list[list[Id]], group_by: str | None
    ) -> tuple[Snapshot, NDArray[np.bool_] | None, NDArray[np.int64] | None, Grouping | None]:
        """As `view`; the positions (q, e) of records to leave out, -1 = none; the groups. All of one generation."""
        if not left_out and group_by is None:
            return *self.view(where), None, None

        def found() -> tuple[Snapshot, NDArray[np.bool_] | None, NDArray[np.int64], Grouping | None]:
            with self._store.read_transaction():
                groups = None if group_by is None else self._store.groups(group_by)[1]
                return *self.view(where), self._store.locate([one for names in left_out for one in names])[1], groups

        snapshot, allowed, rows, groups = self._store.run(found)
        if not left_out:
            return snapshot, allowed, None, groups
        padded = check.padded(rows, [len(names) for names in left_out])
        return snapshot, allowed, snapshot.positions(padded), groups
