"""Hard negatives from stored keys: the library's `mine_hard_negatives` without embedding the corpus."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, util
from torch import Tensor

from softdb.check import shown
from softdb.database import SoftDB
from softdb.database.reembedding import TextOf, require_field, texts_at
from softdb.errors import BadInput, StaleRead
from softdb.integrations.sentence_transformers.loss import require_model
from softdb.scoring import unit

if TYPE_CHECKING:
    from datasets import Dataset

TEXT_BATCH = 4096  # number of records whose texts are read together
CHUNK = 1024  # number of queries compared at once: CHUNK · n scores are in memory
ROUNDING = 1e-6  # largest rounding error of the length of a float32 vector
_KNOWN = inspect.signature(util.mine_hard_negatives).parameters


def mine_hard_negatives(
    dataset: Dataset,
    model: SentenceTransformer,
    db: SoftDB,
    *,
    corpus: Sequence[str] | None = None,
    where: dict[str, Any] | None = None,
    field: TextOf = None,
    use_faiss: bool = False,
    faiss_batch_size: int = CHUNK,
    **options: Any,
) -> Dataset:
    """Run `sentence_transformers.util.mine_hard_negatives` with a database as its corpus, without embedding it again.

    The library's own function chooses the negatives, so its arguments have the same meaning. Rows, columns and scores
    equal those of `use_faiss=False`, if the stored keys are the model's vectors of the texts. Only the queries are
    embedded; records without a key take no part. Arguments that differ from the library's:

    Args:
        dataset: pairs of a query and the text of its right record; the text must be a record's.
        model: encodes the queries; its vectors have the keys' width.
        db: the records.
        corpus: texts of records that may be negatives, beside the dataset's right texts. None: every record's (the
            library's None: only the dataset's right texts).
        where: a filter on the payload, which limits the records.
        field: field of the records' texts, as in `db.reembed`.
        use_faiss: True: find candidates by the database's index, which may miss some; their scores are exact. False:
            compare every record.
        faiss_batch_size: number of queries compared at once; memory is that many times n numbers.
        options: the library's other arguments (range_min, relative_margin, output_format …), except use_multi_process
            and cache_folder, which concern the embedding of the corpus.

    Cost: q queries through the model, and q n d. Raises BadInput for arguments that the library does not know or
    refuses, an empty dataset, texts that no record has, and a model of another width; Closed.
    """
    require_model(model, db, "dim")
    if unknown := sorted(set(options) - set(_KNOWN)):
        raise BadInput(f"{', '.join(unknown)}: the library's mine_hard_negatives takes no such argument")
    if options.get("use_multi_process") or options.get("cache_folder"):
        raise BadInput("use_multi_process and cache_folder embed the corpus, which is stored already; omit them")
    columns = list(getattr(dataset, "column_names", None) or [])
    if len(columns) < 2 or not len(dataset):
        raise BadInput(f"the dataset has columns {columns} and {len(dataset)} rows; expected pairs of query and text")
    right = options.get("positive_column_name")
    wanted = list(dict.fromkeys(dataset[right if right in columns else columns[1]]))
    if use_faiss and corpus is not None:
        raise BadInput("the index searches all records; omit corpus=, give where= in its place, or omit use_faiss")
    texts, rows = _corpus(db, where, field)
    row_of = dict(zip(reversed(texts), reversed(rows), strict=True))  # the first of records with equal texts
    needed = wanted if corpus is None else [*dict.fromkeys([*corpus, *wanted])]
    if missing := [text for text in needed if text not in row_of]:
        raise BadInput(
            f"{len(missing)} texts, such as {shown(missing[0])}, belong to no record with a key; insert such records, "
            "or name the field that holds the texts by field="
        )
    stored = _StoredCorpus(model, db, row_of, _depth(dataset, options) if use_faiss else None, where)
    try:
        return util.mine_hard_negatives(
            dataset, stored, corpus=list(dict.fromkeys(texts)) if corpus is None else list(corpus), use_faiss=False,
            faiss_batch_size=faiss_batch_size, **options,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(f"mine_hard_negatives: {error}") from error


def _corpus(db: SoftDB, where: dict[str, Any] | None, field: TextOf) -> tuple[list[str], list[int]]:
    """Return texts and rows of every record with a key that a filter allows, in the order of the rows."""
    require_field(field)
    snapshot, allowed = db.core.view(where)
    rows = snapshot.rows(np.flatnonzero(snapshot.live if allowed is None else snapshot.live & allowed))
    batches = [texts_at(db.core, rows[low : low + TEXT_BATCH], field) for low in range(0, len(rows), TEXT_BATCH)]
    return [text for batch in batches for text in batch], rows.tolist()


def _depth(dataset: Dataset, options: dict[str, Any]) -> int:
    """Return an upper bound of the number of candidates that the library's function reads for a query."""
    columns = dataset.column_names
    name = options.get("anchor_column_name")
    positives = max(Counter(dataset[name if name in columns else columns[0]]).values())
    least, most = (options.get(name) or _KNOWN[name].default or 0 for name in ("range_min", "range_max"))
    negatives = options.get("num_negatives", _KNOWN["num_negatives"].default)
    return int(most or least + 10 * negatives + positives) + positives


class _StoredCorpus:
    """A model for the library's function; for documents it returns their stored keys in place of encoding them."""

    def __init__(
        self, model: SentenceTransformer, db: SoftDB, row_of: dict[str, int], depth: int | None, where: Any
    ) -> None:
        self._model, self._db, self._row_of, self._depth, self._where = model, db, row_of, depth, where
        self._order = self._rows = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_document(self, texts: list[str], **options: Any) -> NDArray[np.float32]:
        """Return the stored keys of texts, scaled to length 1."""
        rows = np.array([self._row_of[text] for text in texts], np.int64)
        snapshot = self._db.core.view()[0]
        positions = snapshot.positions(rows)
        if (gone := (positions < 0) | ~snapshot.live[positions]).any():
            raise StaleRead(f"{int(gone.sum())} records were deleted or replaced during the call; call again")
        self._order = np.argsort(rows)
        self._rows = rows[self._order]
        keys = snapshot.keys_at(positions).float().numpy()
        other = abs(np.linalg.norm(keys, axis=1) - 1) > ROUNDING  # keys of length 1 stay equal to the model's vectors
        keys[other] = unit(keys[other])
        return keys

    def similarity(self, queries: Any, keys: Tensor) -> Tensor:  # (q, d), (n, d) -> (q, n)
        """Return the model's similarities; if an index is used, -inf for documents that the index does not find."""
        if self._depth is None:
            return self._model.similarity(queries, keys)  # type: ignore[no-any-return]
        queries = torch.as_tensor(queries)
        rows = self._db.search(queries, min(self._depth, len(keys)), where=self._where).rows.numpy()  # (q, k)
        places = np.searchsorted(self._rows, rows).clip(max=len(keys) - 1)
        i, j = np.nonzero(self._rows[places] == rows)  # omits records with the same text as an earlier one
        columns = self._order[places[i, j]]
        scores = torch.full((len(queries), len(keys)), -torch.inf)
        scores[i, columns] = self._model.similarity_pairwise(queries[i], keys[columns]).cpu()
        return scores
