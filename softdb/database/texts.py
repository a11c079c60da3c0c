"""Search by text, and by text and vector together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.answers import Hits
from softdb.attend import Stored, TextQuery, fused_hits, text_hits
from softdb.check import Id
from softdb.database.core import SearchArguments, with_one_encoder
from softdb.errors import BadInput
from softdb.filters import ByText, FilteredStore
from softdb.index.query import Query
from softdb.store import Snapshot
from softdb.typing import Vectors


def search_by_text(
    store: FilteredStore,
    source_of: Callable[[Snapshot, torch.device], Stored],
    as_queries: Callable[[Vectors], Tensor],
    words: check.Words,
    search: SearchArguments,
) -> Hits:
    """Search by text or, if `words.mode` is hybrid, by text and vector. Raises BadInput."""
    k, where, exclude_ids, fetch_k, offset = search.k, search.where, search.exclude_ids, search.fetch_k, search.offset
    start = check.integer(offset, "offset", 0)
    count = start + check.integer(check.DEFAULT_K if k is None else k, "k")
    left_out = check.excluded(exclude_ids, len(words.texts))
    find = functools.partial(store.by_text, words.texts, where, [name for names in left_out for name in names])
    if words.mode is check.Mode.TEXT:
        words.require_none(fetch_k=fetch_k)
        matches = find()
        width = min(count, matches.snapshot.records)
        rows, scores = text_hits(TextQuery(matches.scores, width, matches.keep, _excluded(matches, left_out)))
        return Hits(rows[:, start:], scores[:, start:], store.read)
    depth = 4 * count if fetch_k is None else check.integer(fetch_k, "fetch_k", count)
    queries, matches = with_one_encoder(store, lambda: (as_queries(words.queries), find()))
    if len(queries) != len(words.texts):
        raise BadInput(f"{len(queries)} queries for {len(words.texts)} texts; give one text for each query")
    snapshot, metric, excluded_rows = matches.snapshot, store.schema.metric, _excluded(matches, left_out)
    depth = min(depth, snapshot.records)
    excluded = None if excluded_rows is None else snapshot.positions(excluded_rows)
    query = Query(queries, depth, metric, matches.allowed, excluded=excluded, exact=search.exact)
    source = source_of(snapshot, queries.device)
    nearest = source.hits(replace(query, queries=queries.detach())).rows.cpu().numpy()
    nearest = np.pad(nearest, ((0, 0), (0, depth - nearest.shape[1])), constant_values=-1)
    by_text = TextQuery(matches.scores, min(count, depth), matches.keep, excluded_rows)
    rows, scores = fused_hits(words.fusion, by_text, query, nearest, source.columns)
    return Hits(rows[:, start:], scores[:, start:], store.read)


def _excluded(matches: ByText, left_out: list[list[Id]]) -> NDArray[np.int64] | None:
    """Return the rows (q, e), or (1, e) for all queries, that `left_out` excludes; None: no rows are excluded."""
    return check.padded(matches.left_out, [len(names) for names in left_out]) if left_out else None
