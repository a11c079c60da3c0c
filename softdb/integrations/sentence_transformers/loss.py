"""A loss for SentenceTransformerTrainer that compares a batch's queries with every record of a database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from softdb import check
from softdb.check import Id, shown
from softdb.database import SoftDB
from softdb.database.reembedding import TextOf
from softdb.errors import BadInput, StaleRead
from softdb.nn import View, info_nce, retrieval_loss
from softdb.nn.handle import SharedHandle
from softdb.nn.reindexed import Policy
from softdb.nn.targets import database, listed
from softdb.train.pairs import require_known

if TYPE_CHECKING:
    from datasets import Dataset

TEMPERATURE = 0.05  # the library's default: its losses multiply cosines by 20
MARK = -(1 << 62)  # first number of a label from `labelled`, whose other numbers are rows in place of ids
MODEL_BATCH = 32  # number of texts that go through the model together
BLOCK = 512  # number of records that a view encodes at once


class DatabaseLoss(torch.nn.Module):
    """The negative log-likelihood of the right records among all records of a database; it encodes only the queries.

        loss = log Σ_i exp(s(f(x), k_i) / T) - log Σ_{i right} exp(s(f(x), k_i) / T)

    It is `softdb.nn.retrieval_loss` of the vectors f(x) that the model f computes from a batch of texts x. The sum Σ_i
    is over the database, not the batch, so the loss does not depend on the batch's size, and no text of a record is
    encoded or tokenised. Give it to `SentenceTransformerTrainer(loss=…)` with a dataset of a column of texts and a
    column "label", or call it in your own loop. The stored keys and their index do not change. Cost of a step: q texts
    forward and backward through the model, and 3 q n d for the database; memory does not grow with n.

    Scores use the database's metric; the library's own losses use the cosine. Labels are ids: a tensor (q,) of int ids;
    labels from `labelled` for str ids or several ids for a query; or, in your own loop, a list of ids or lists of ids.

    `encode_keys` also trains the model on the records' texts: they go through it in a `softdb.nn.View` (`loss.view`),
    and the stored keys are not read. With k the loss is InfoNCE against the k nearest of each query and the right
    records of the other queries in the batch. Without k, rtol and max_draws each step encodes every
    record, for databases of some hundred records. A `RefreshCallback` steps the view; after training
    `db.reembed(ModelEncoder(model))` writes the keys.

    Args:
        model: the SentenceTransformer to train.
        db: the database; without encode_keys its keys must have the width of the model's vectors.
        temperature: divides the scores.
        k: truncate the first sum to the k nearest and the right records; see above for encode_keys.
        rtol: estimate the first sum to this relative error.
        max_draws: number of draws, with rtol; for encode_keys also without, see `View.attend`.
        where: a filter on the payload, which every right record must match.
        encode_keys: train the model on the records' texts, too.
        field: field of the records' texts, as in `db.reembed`.
        reindex: policy of `softdb.nn` for reindexing the view, or a number of steps.
        overfetch: the view encodes `overfetch` times k candidates to choose the k nearest.

    Raises BadInput for a model of another width, labels that are not ids, and missing texts; UnknownId for an id that
    is not stored; StaleRead if a right record, or all keys, were replaced since; Closed.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        db: SoftDB,
        *,
        temperature: float = TEMPERATURE,
        k: int | None = None,
        rtol: float | None = None,
        max_draws: int | None = None,
        where: dict[str, Any] | None = None,
        encode_keys: bool = False,
        field: TextOf = None,
        reindex: Policy | int | None = None,
        overfetch: int = 1,
    ) -> None:
        super().__init__()
        require_model(model, db, None if encode_keys else "dim")
        self.temperature = check.positive(temperature, "temperature")
        self.k = None if k is None else check.integer(k, "k")
        check.draws(rtol, 0.0, max_draws, k) if encode_keys else check.tolerance(rtol, 0.0, 0.95, max_draws, k)
        if not encode_keys and (field is not None or reindex is not None or overfetch != 1):
            raise BadInput("field, reindex and overfetch need encode_keys=True; give all, or none of them")
        self.rtol, self.max_draws, self.where = rtol, max_draws, where
        self.model, self._handle, self._reembedded = model, SharedHandle(db), db.core.reembedded
        self.view: View | None = None
        if encode_keys:
            settings: Any = {"field": field, "reindex": reindex, "overfetch": overfetch}
            self.view = View(db, _TrainedModel(model), texts=True, batch_size=BLOCK, **settings)
        self._draws = torch.Generator().manual_seed(0)

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._handle.db

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Any = None) -> Tensor:  # ()
        """Return the mean loss of a batch of tokenised texts, whose labels are ids."""
        self.db.core.require_open()
        features = list(sentence_features)
        if len(features) != 1:
            raise BadInput(
                f"the dataset has {len(features)} columns of texts; give one, of queries, and the ids of their right "
                "records as the column 'label': texts of records are in the database"
            )
        if self.view is None and self.db.core.reembedded != self._reembedded:
            raise StaleRead("the database was re-embedded since this loss was made; make another")
        positives = self._ids(labels)
        queries = self.model(features[0])["sentence_embedding"]
        temperature, where = self.temperature, self.where
        if self.view is not None and self.k is not None:
            return info_nce(self.view, queries, positives, negatives=self.k, temperature=temperature, where=where)
        return retrieval_loss(
            self.db if self.view is None else self.view, queries, positives, temperature=temperature, k=self.k,
            rtol=self.rtol, max_draws=self.max_draws, generator=None if self.k else self._draws, where=where,
        )  # fmt: skip

    def _ids(self, labels: Any) -> Any:
        """Convert labels to ids, one or several for each query. Raises BadInput."""
        if labels is None:
            raise BadInput("there are no labels; give the ids of the right records as the dataset's column 'label'")
        if not isinstance(labels, Tensor):
            return labels
        if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool or labels.ndim not in (1, 2):
            raise BadInput(f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; expected (q,) int ids")
        if labels.ndim == 1:
            return labels.tolist()
        if labels.shape[1] < 2 or not bool((labels[:, 0] == MARK).all()):
            raise BadInput(
                f"labels have shape {tuple(labels.shape)}; expected (q,) int ids, or, for str ids or several ids for a "
                "query, labels from labelled(dataset, db, column)"
            )
        rows = labels[:, 1:].cpu().numpy()
        known = self.db.core.store.read(np.unique(rows[rows >= 0]), payloads=False)
        if gone := {row for row in rows[rows >= 0].tolist() if row not in known}:
            raise StaleRead(
                f"{len(gone)} right records of the batch were deleted or replaced since labelled() was called; call it "
                "again"
            )
        return [[known[row].id for row in query_rows if row >= 0] for query_rows in rows.tolist()]

    def get_config_dict(self) -> dict[str, Any]:
        """Return the entries of a model card."""
        names = ("temperature", "k", "rtol", "max_draws", "where")
        return {name: getattr(self, name) for name in names} | {"encode_keys": self.view is not None}


class ModelEncoder:
    """A SentenceTransformer as a database's encoder: n texts -> (n, d), without gradient.

    Give it to `db.reembed` after training, or to `softdb.open(encoder=…)`. Texts get the model's prompt for documents.

    Args:
        model: the SentenceTransformer.
        name: the encoder's name in the database; without one an interrupted `reembed` starts again.
        batch_size: number of texts that go through the model together.
    """

    def __init__(self, model: SentenceTransformer, name: str | None = None, batch_size: int = MODEL_BATCH) -> None:
        if not isinstance(model, SentenceTransformer):
            raise BadInput(f"model is {shown(model)}; expected a SentenceTransformer")
        self.model, self.name, self.batch_size = model, name, check.integer(batch_size, "batch_size")

    def __call__(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:  # n texts -> (n, d)
        """Return the vectors of texts."""
        vectors = self.model.encode_document(list(texts), batch_size=self.batch_size, show_progress_bar=False)
        return np.asarray(vectors, np.float32)


class _TrainedModel(torch.nn.Module):
    """The model as a View's encoder: m texts -> (m, d), with gradient, in the model's own mode (training or not)."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model  # the trainer replaces a child of this name by its wrapped model
        prompts = model.prompts or {}
        self.prompt = next((prompts[name] for name in ("document", "passage", "corpus") if name in prompts), None)

    def forward(self, texts: Sequence[str]) -> Tensor:  # m texts -> (m, d)
        """Encode batches of texts of similar length, which need less padding."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        batches = [order[start : start + MODEL_BATCH] for start in range(0, len(order), MODEL_BATCH)]
        vectors = torch.cat([self._encode([texts[i] for i in batch]) for batch in batches])
        return vectors[np.argsort(order, kind="stable")]

    def _encode(self, texts: list[str]) -> Tensor:
        device = next(self.model.parameters()).device
        features = self.model.preprocess(texts, prompt=self.prompt, task="document")
        features = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in features.items()}
        vectors: Tensor = self.model(features, task="document")["sentence_embedding"]
        return vectors


def labelled(dataset: Dataset, db: SoftDB, column: str) -> Dataset:
    """Return the dataset with its column of ids replaced by labels for `DatabaseLoss`.

    The ids may be str or int, one or a list for each query. As a tensor cannot hold str, this call looks up the rows of
    the records: a label is the number `MARK`, followed by rows.

    Raises BadInput for an empty dataset, a missing column, a query without an id, and ids that are not stored.
    """
    db = database(db)
    names = list(getattr(dataset, "column_names", None) or [])
    if column not in names:
        raise BadInput(f"the dataset has no column {shown(column)}; it has {', '.join(map(repr, names)) or 'none'}")
    if not len(dataset):
        raise BadInput("the dataset is empty; give queries with the ids of their right records")
    ids: list[list[Id]] = listed(list(dataset[column]), len(dataset))
    require_known(db, ids)
    rows = db.core.locate([name for query_ids in ids for name in query_ids])[1]
    padded = check.padded(rows, [len(query_ids) for query_ids in ids])
    labels = np.concatenate([np.full((len(ids), 1), MARK), padded], 1)
    return dataset.remove_columns({column, "label"} & set(names)).add_column("label", list(labels))


def require_model(model: object, db: object, width: str | None = None) -> None:
    """Raise BadInput for another class of `model` or `db` or, if `width` is given, for vectors of different widths."""
    if not isinstance(db, SoftDB):
        raise BadInput(f"db is {shown(db)}; expected an open softdb database")
    db.core.require_open()
    if not isinstance(model, SentenceTransformer):
        raise BadInput(f"model is {shown(model)}; expected a SentenceTransformer")
    dim = (getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension)()
    if width and dim != db.dim:
        raise BadInput(
            f"the model's vectors are {dim} wide but the keys of this database {db.dim}; append "
            f"sentence_transformers.models.Dense with {db.dim} outputs to the model, or replace the keys by "
            "db.reembed(ModelEncoder(model))"
        )
