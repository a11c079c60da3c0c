"""Evaluation of a model during training through a database, and a callback that keeps a view's index up to date."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.evaluation import BaseEvaluator
from transformers import TrainerCallback

from softdb import check
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.integrations.sentence_transformers.loss import DatabaseLoss, require_model
from softdb.nn import OnRecall, View
from softdb.nn.targets import handle, listed
from softdb.train import ranking
from softdb.train.pairs import require_known

METRICS = ("recall_1", "recall_10", "mrr_100")


class DatabaseEvaluator(BaseEvaluator):
    """Recall@1, recall@10 and MRR@100 of a model's queries, by exact search of a database.

    Give it to `SentenceTransformerTrainer(evaluator=…)`, or call it with a model. Each call encodes the queries again.
    Records of a database are compared by their stored keys; those of a `View` (`loss.view` with encode_keys) by its
    vectors, after a reindex if the view is stale. recall@k is the share of queries with a right record among the k
    nearest. The metrics are named "recall_1", "recall_10" and "mrr_100", with the prefix `name` and "_".

    Args:
        db: the database, or a View of it.
        queries: m texts.
        ids: m ids, or lists of ids: the right records of each query.
        name: a prefix of the metrics' names, to tell several evaluators apart.
        batch_size: number of queries encoded together.
        primary_metric: the metric by which the trainer chooses the best checkpoint.

    Raises BadInput without queries, for more or fewer ids than queries, unknown ids, a model of another width; Closed.
    """

    def __init__(
        self,
        db: SoftDB | View,
        queries: Sequence[str],
        ids: Sequence[Any],
        *,
        name: str = "",
        batch_size: int = 32,
        primary_metric: str = "recall_10",
    ) -> None:
        super().__init__()
        if isinstance(queries, str) or not all(isinstance(query, str) for query in queries) or not len(queries):
            raise BadInput(f"queries are {shown(queries)}; expected one text or more, in a list")
        self.db, self.queries, self.ids = db, list(queries), listed(ids, len(queries))
        require_known(handle(db), self.ids)
        self.name, self.batch_size = name, check.integer(batch_size, "batch_size")
        self._indexed: list[tuple[int, int]] | None = None  # ids and versions of the parameters at the last reindex
        self.primary_metric = check.one_of(primary_metric, "primary_metric", METRICS)

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Return the metrics. If a path is given, append a line to `output_path`/database_evaluation_NAME.csv."""
        require_model(model, handle(self.db), "dim" if isinstance(self.db, SoftDB) else None)
        if isinstance(self.db, View):
            versions = [(id(parameter), parameter._version) for parameter in self.db.parameters()]
            if versions != self._indexed:
                self.db.reindex()
                self._indexed = versions
        with torch.no_grad():
            queries = model.encode_query(
                self.queries, batch_size=self.batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        report = ranking(self.db, torch.from_numpy(queries).float(), self.ids)
        metrics = {name: float(getattr(report, name)) for name in METRICS}
        if output_path is not None:
            self._write(Path(output_path), {"epoch": epoch, "steps": steps, **metrics})
        named: dict[str, float] = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, named, epoch, steps)
        return named

    def _write(self, folder: Path, line: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"database_evaluation{self.name and '_' + self.name}.csv"
        with open(path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(line))
            if not file.tell():
                writer.writeheader()
            writer.writerow(line)

    def get_config_dict(self) -> dict[str, Any]:
        """Return the entries for a model card."""
        return {"queries": len(self.queries), "records": handle(self.db).core.keyed}


class RefreshCallback(TrainerCallback):
    """Callback of the trainer that encodes and indexes the records of a `DatabaseLoss(encode_keys=True)` again.

    After every `every` steps of the optimizer it encodes `sample` records by the current model and measures the share
    of the nearest records that the index still finds. If the share is below `recall`, it reindexes. The trainer's logs
    show the last measurement as "index_recall" and the number of reindexes as "reindexes". Without `recall` the loss's
    own policy, `reindex=`, decides.

    Args:
        loss: the loss.
        recall: least share of the nearest records that the index must find.
        every: number of steps between measurements.
        sample: number of records that a measurement encodes.
    """

    def __init__(self, loss: DatabaseLoss, *, recall: float | None = None, every: int = 100, sample: int = 512) -> None:
        if not isinstance(loss, DatabaseLoss) or loss.view is None:
            raise BadInput(
                f"loss is {shown(loss)}; expected a DatabaseLoss with encode_keys=True: without it the stored keys do "
                "not change, so no index becomes stale"
            )
        self.view = loss.view
        if recall is not None:
            self.view.policy = OnRecall(recall, every, sample)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count a step of the optimizer: measure and reindex if due."""
        self.view.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Add "reindexes" and "index_recall" to the trainer's logs."""
        report = self.view.report()
        metrics = {"reindexes": report.reindexes, "index_recall": report.recall}
        for line in ({} if logs is None else logs, *state.log_history[-1:]):
            line.update({name: value for name, value in metrics.items() if value is not None})
