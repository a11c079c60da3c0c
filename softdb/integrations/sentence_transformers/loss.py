"""A loss for SentenceTransformerTrainer: the queries of a batch against every record of a database."""

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
from softdb.nn.targets import listed
from softdb.train.pairs import require_known

if TYPE_CHECKING:
    from datasets import Dataset

SHARP = 0.05  # the library's own: its losses multiply cosines by 20
MARK = -(1 << 62)  # stands first among labels that are rows
AT_ONCE = 32  # texts that go through the model together
BLOCK = 512  # records of a view that are encoded at once


class DatabaseLoss(torch.nn.Module):
    """The negative log-likelihood of the right records among all records of a database, of queries alone encoded.

        loss = log Σ_i exp(s(f(x), k_i) / T) - log Σ_{i right} exp(s(f(x), k_i) / T)

    `softdb.nn.retrieval_loss` of what the model f makes of a batch of texts x: the denominator is the whole database,
    not the batch, so it does not change with the batch's size, and no text of a record is encoded or tokenised. Give it
    to `SentenceTransformerTrainer(loss=…)` with a dataset of one column of texts and one named "label", or call it in a
    loop of your own. The stored keys stay as they are, and so does their index. Cost of a step: q texts through
    the model and back, and 3 q n d of the database; memory does not grow with n.

    Scores are of the database's metric; the library's own losses compare by cosine. Labels are ids: a tensor (q,) of
    int ids; what `labelled` makes of ids that are str, or several for a query; or, in a loop of your own, a list of ids
    or of lists of ids.

    With `encode_keys` the model is trained on the records' side, too: their texts go through it again, in a
    `softdb.nn.View` (`loss.view`), and the stored keys are not looked at. With k that is InfoNCE against the k nearest
    of each query and the right records of the others in the batch; without k every record is encoded at every step,
    for databases of some hundred records. A `RefreshCallback` steps the view; afterwards
    `db.reembed(ModelEncoder(model))` writes the keys.

    Args:
        model: the SentenceTransformer that is trained.
        db: the database; without encode_keys as wide as the model's vectors.
        temperature: divides the scores.
        k: truncate the denominator to the k nearest and the right ones; see above for encode_keys.
        rtol: estimate the denominator to that relative error; not with encode_keys.
        max_draws: as in `db.log_partition`, with rtol.
        where: a filter on the payload, which every right record must match.
        encode_keys: train the records' side.
        field: where their texts are, as `db.reembed` takes it.
        reindex: when the view is encoded and indexed anew, a policy of `softdb.nn`, or a number of steps.
        overfetch: how many times k candidates the view encodes to choose the k nearest.

    Raises BadInput for a model of another width, labels that are no ids, texts that are missing; UnknownId for an id
    that is not stored; StaleRead where a right record, or all keys, were replaced since; Closed.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        db: SoftDB,
        *,
        temperature: float = SHARP,
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
        check.tolerance(rtol, 0.0, 0.95, max_draws, k)
        if not encode_keys and (field is not None or reindex is not None or overfetch != 1):
            raise BadInput("field, reindex and overfetch are of encode_keys=True, which is not given; leave them out")
        if encode_keys and rtol is not None:
            raise BadInput("rtol estimates over stored keys, which encode_keys trains; give one of them")
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
        """The mean over a batch of texts, tokenised, whose labels are ids."""
        self.db.core.require_open()
        features = list(sentence_features)
        if len(features) != 1:
            raise BadInput(
                f"the dataset has {len(features)} columns of texts; give one, of queries, and the ids of their right "
                "records as the column 'label': texts of records are in the database"
            )
        if self.view is None and self.db.core.reembedded != self._reembedded:
            raise StaleRead("all keys of the database were made anew since this loss was made; make another")
        positives = self._ids(labels)
        queries = self.model(features[0])["sentence_embedding"]
        temperature, where = self.temperature, self.where
        if self.view is not None and self.k is not None:
            return info_nce(self.view, queries, positives, negatives=self.k, temperature=temperature, where=where)
        return retrieval_loss(
            self.db if self.view is None else self.view, queries, positives, temperature=temperature, k=self.k,
            rtol=self.rtol, max_draws=self.max_draws, generator=self._draws if self.rtol else None, where=where,
        )  # fmt: skip

    def _ids(self, labels: Any) -> Any:
        """The ids that labels stand for, one or several for each query."""
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
                f"labels have shape {tuple(labels.shape)}; expected (q,) int ids, or what labelled(dataset, db, "
                "column) makes of ids that are str, or several for a query"
            )
        rows = labels[:, 1:].cpu().numpy()
        known = self.db.core.store.read(np.unique(rows[rows >= 0]), payloads=False)
        if gone := {row for row in rows[rows >= 0].tolist() if row not in known}:
            raise StaleRead(
                f"{len(gone)} right records of the batch were deleted or replaced since labelled() was called; call it "
                "again"
            )
        return [[known[row].id for row in mine if row >= 0] for mine in rows.tolist()]

    def get_config_dict(self) -> dict[str, Any]:
        """Return the entries of a model card."""
        names = ("temperature", "k", "rtol", "max_draws", "where")
        return {name: getattr(self, name) for name in names} | {"encode_keys": self.view is not None}


class ModelEncoder:
    """A SentenceTransformer as it is, as an encoder of a database: n texts -> (n, d), without gradient.

    Give it to `db.reembed` after training, or to `softdb.open(encoder=…)`. Texts get the model's prompt for documents.

    Args:
        model: the SentenceTransformer.
        name: what a database remembers of it; None: nothing, so that a broken `reembed` begins anew.
        batch_size: texts that go through the model together.
    """

    def __init__(self, model: SentenceTransformer, name: str | None = None, batch_size: int = AT_ONCE) -> None:
        if not isinstance(model, SentenceTransformer):
            raise BadInput(f"model is {shown(model)}; expected a SentenceTransformer")
        self.model, self.name, self.batch_size = model, name, check.integer(batch_size, "batch_size")

    def __call__(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:  # n texts -> (n, d)
        """The vectors of texts."""
        found = self.model.encode_document(list(texts), batch_size=self.batch_size, show_progress_bar=False)
        return np.asarray(found, np.float32)


class _TrainedModel(torch.nn.Module):
    """The model as the encoder of a View: m texts -> (m, d), with gradient, in the mode that the model is in."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model  # the trainer puts its wrapped model in the place of a child of this name
        prompts = model.prompts or {}
        self.prompt = next((prompts[name] for name in ("document", "passage", "corpus") if name in prompts), None)

    def forward(self, texts: Sequence[str]) -> Tensor:  # m texts -> (m, d)
        """In the order of their length, some at a time: less is padded."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        parts = [order[low : low + AT_ONCE] for low in range(0, len(order), AT_ONCE)]
        found = torch.cat([self._some([texts[i] for i in part]) for part in parts])
        return found[np.argsort(order, kind="stable")]

    def _some(self, texts: list[str]) -> Tensor:
        device = next(self.model.parameters()).device
        given = self.model.preprocess(texts, prompt=self.prompt, task="document")
        there = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()}
        found: Tensor = self.model(there, task="document")["sentence_embedding"]
        return found


def labelled(dataset: Dataset, db: SoftDB, column: str) -> Dataset:
    """A dataset whose column of ids has become the labels that `DatabaseLoss` takes.

    The ids may be str or int, one or a list for each query; they are looked up once, here. A tensor holds no str, so
    what travels through the trainer are the records' permanent row numbers, marked as such.

    Raises BadInput for an empty dataset, a column that is missing, a query without an id, ids that are not stored.
    """
    _require(db)
    names = list(getattr(dataset, "column_names", None) or [])
    if column not in names:
        raise BadInput(f"the dataset has no column {shown(column)}; it has {', '.join(map(repr, names)) or 'none'}")
    if not len(dataset):
        raise BadInput("the dataset is empty; give queries with the ids of their right records")
    ids: list[list[Id]] = listed(list(dataset[column]), len(dataset))
    require_known(db, ids)
    rows = db.core.locate([one for mine in ids for one in mine])[1]
    padded = check.padded(rows, [len(mine) for mine in ids])
    labels = np.concatenate([np.full((len(ids), 1), MARK), padded], 1)
    return dataset.remove_columns({column, "label"} & set(names)).add_column("label", list(labels))


def require_model(model: object, db: object, width: str | None = None) -> None:
    """BadInput for what is no SentenceTransformer, no open database, or one whose keys have another width."""
    handle = _require(db)
    if not isinstance(model, SentenceTransformer):
        raise BadInput(f"model is {shown(model)}; expected a SentenceTransformer")
    found = (getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension)()
    if width and found != handle.dim:
        raise BadInput(
            f"the model's vectors are {found} wide but the keys of this database {handle.dim}; add a module to the "
            f"model that makes {handle.dim} of them (sentence_transformers.models.Dense), or make the keys anew with "
            "db.reembed(ModelEncoder(model))"
        )


def _require(db: object) -> SoftDB:
    if not isinstance(db, SoftDB):
        raise BadInput(f"db is {shown(db)}; expected an open softdb database")
    db.core.require_open()
    return db
