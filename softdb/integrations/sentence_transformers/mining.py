"""Hard negatives for the library's own losses, found among stored keys: its function, without embedding the corpus."""

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

AT_ONCE = 4096  # records whose texts are read together
CHUNK = 1024  # queries compared at once: that many times n scores in memory
ROUNDING = 1e-6  # of a float32 vector's length
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
    """`sentence_transformers.util.mine_hard_negatives` where the corpus is a database: it is not embedded again.

    The library's own function does the choosing, so every argument of it means what it means there, and rows, columns
    and scores are the same as of `use_faiss=False`, if the stored keys are what the model makes of the texts. Only the
    queries are embedded; records without a key take no part. What differs:

    Args:
        dataset: pairs of a query and the text of its right record; each such text is one of a record.
        model: encodes the queries; as wide as the keys.
        db: the records.
        corpus: texts of records, among which negatives are looked for besides the right ones; None: every record's. The
            library's None stands for the dataset's own right texts alone.
        where: a filter on the payload: of which records.
        field: where the records' texts are, as `db.reembed` takes it.
        use_faiss: find candidates by the database's index, which may miss some; their scores stay exact. False:
            compare every record.
        faiss_batch_size: queries compared at once; memory is that many times n numbers.
        options: the library's other arguments (range_min, relative_margin, output_format …), but for
            use_multi_process and cache_folder, which are about the embedding of the corpus.

    Cost: q queries through the model, and q n d. Raises BadInput for arguments that the library does not know or
    refuses, an empty dataset, texts that are no record's, a model of another width; Closed.
    """
    require_model(model, db, "dim")
    if unknown := sorted(set(options) - set(_KNOWN)):
        raise BadInput(f"{', '.join(unknown)}: the library's mine_hard_negatives takes no such argument")
    if options.get("use_multi_process") or options.get("cache_folder"):
        raise BadInput("use_multi_process and cache_folder are about embedding the corpus, which is stored; omit them")
    columns = list(getattr(dataset, "column_names", None) or [])
    if len(columns) < 2 or not len(dataset):
        raise BadInput(f"the dataset has columns {columns} and {len(dataset)} rows; expected pairs of query and text")
    right = options.get("positive_column_name")
    wanted = list(dict.fromkeys(dataset[right if right in columns else columns[1]]))
    if use_faiss and corpus is not None:
        raise BadInput("the index searches all records; omit corpus=, say with where= of which, or omit use_faiss")
    texts, rows = _corpus(db, where, field)
    known = dict(zip(reversed(texts), reversed(rows), strict=True))  # of equal texts the first record's key
    asked = wanted if corpus is None else [*dict.fromkeys([*corpus, *wanted])]
    if missing := [text for text in asked if text not in known]:
        raise BadInput(
            f"{len(missing)} texts, such as {shown(missing[0])}, are of no record with a key; insert them, or say "
            "with field= where the records' texts are"
        )
    stored = _StoredCorpus(model, db, known, _depth(dataset, options) if use_faiss else None, where)
    try:
        return util.mine_hard_negatives(
            dataset, stored, corpus=list(dict.fromkeys(texts)) if corpus is None else list(corpus), use_faiss=False,
            faiss_batch_size=faiss_batch_size, **options,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(f"mine_hard_negatives: {error}") from error


def _corpus(db: SoftDB, where: dict[str, Any] | None, field: TextOf) -> tuple[list[str], list[int]]:
    """Texts and rows of every record with a key that a filter allows, in the order of the rows."""
    require_field(field)
    snapshot, allowed = db.core.view(where)
    rows = snapshot.rows(np.flatnonzero(snapshot.live if allowed is None else snapshot.live & allowed))
    parts = [texts_at(db.core, rows[low : low + AT_ONCE], field) for low in range(0, len(rows), AT_ONCE)]
    return [text for part in parts for text in part], rows.tolist()


def _depth(dataset: Dataset, options: dict[str, Any]) -> int:
    """At least as many candidates as the library's function looks at."""
    columns = dataset.column_names
    name = options.get("anchor_column_name")
    positives = max(Counter(dataset[name if name in columns else columns[0]]).values())
    given = {name: options.get(name) or _KNOWN[name].default or 0 for name in ("range_max", "range_min")}
    negatives = options.get("num_negatives", _KNOWN["num_negatives"].default)
    return int(given["range_max"] or given["range_min"] + 10 * negatives + positives) + positives


class _StoredCorpus:
    """The model as the library's function meets it: documents are looked up, and compared where they lie."""

    def __init__(
        self, model: SentenceTransformer, db: SoftDB, known: dict[str, int], depth: int | None, where: Any
    ) -> None:
        self._model, self._db, self._known, self._depth, self._where = model, db, known, depth, where
        self._order = self._rows = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_document(self, texts: list[str], **words: Any) -> NDArray[np.float32]:
        """The stored keys of texts, of length 1."""
        rows = np.array([self._known[text] for text in texts], np.int64)
        snapshot = self._db.core.view()[0]
        positions = snapshot.positions(rows)
        if (gone := (positions < 0) | ~snapshot.live[positions]).any():
            raise StaleRead(f"{int(gone.sum())} records were deleted or replaced during the call; call again")
        self._order = np.argsort(rows)
        self._rows = rows[self._order]
        keys = snapshot.keys_at(positions).float().numpy()
        short = abs(np.linalg.norm(keys, axis=1) - 1) > ROUNDING  # the others stay as the model made them, to the bit
        keys[short] = unit(keys[short])
        return keys

    def similarity(self, queries: Any, keys: Tensor) -> Tensor:  # (q, d), (n, d) -> (q, n)
        """The library's, -inf of what the index does not find."""
        if self._depth is None:
            return self._model.similarity(queries, keys)  # type: ignore[no-any-return]
        asked = torch.as_tensor(queries)
        found = self._db.search(asked, min(self._depth, len(keys)), where=self._where).rows.numpy()  # (q, k)
        places = np.searchsorted(self._rows, found).clip(max=len(keys) - 1)
        i, j = np.nonzero(self._rows[places] == found)  # not those of a text that another record has, too
        columns = self._order[places[i, j]]
        scores = torch.full((len(asked), len(keys)), -torch.inf)
        scores[i, columns] = self._model.similarity_pairwise(asked[i], keys[columns]).cpu()
        return scores
