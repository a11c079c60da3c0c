"""While a model is trained through a database: how well its queries find, and an index that follows the model."""

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
    """Evaluate how soon a model's queries find a right record: recall@1, recall@10 and MRR@100, by exact search.

    Give it to `SentenceTransformerTrainer(evaluator=…)`, or call it with a model. The queries are encoded anew each
    time, the records never: over a database by its stored keys, over a `View` (`loss.view` with encode_keys, which is
    reindexed first where it is stale) by their texts' vectors. recall@k counts queries with a right record among the k
    nearest. The metrics' names are "recall_1", "recall_10", "mrr_100", after `name` and "_".

    Args:
        db: the database, or a View of it.
        queries: m texts.
        ids: m ids, or lists of ids: the right records of each.
        name: before the metrics' names, where there are several evaluators.
        batch_size: queries encoded together.
        primary_metric: by which the trainer chooses the best checkpoint.

    Raises BadInput for no queries, another number of ids, ids that are not stored, a model of another width; Closed.
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
        self._indexed: list[tuple[int, int]] | None = None  # the parameters of the view's vectors
        self.primary_metric = check.one_of(primary_metric, "primary_metric", METRICS)

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """The metrics; a line more in `output_path`/database_evaluation_NAME.csv where a path is given."""
        require_model(model, handle(self.db), "dim" if isinstance(self.db, SoftDB) else None)
        if isinstance(self.db, View):
            now = [(id(parameter), parameter._version) for parameter in self.db.parameters()]
            if now != self._indexed:
                self.db.reindex()
                self._indexed = now
        with torch.no_grad():
            queries = model.encode_query(
                self.queries, batch_size=self.batch_size, show_progress_bar=False, convert_to_numpy=True
            )
        found = ranking(self.db, torch.from_numpy(queries).float(), self.ids)
        metrics = {name: float(getattr(found, name)) for name in METRICS}
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
        """Return the entries of a model card."""
        return {"queries": len(self.queries), "records": handle(self.db).core.keyed}


class RefreshCallback(TrainerCallback):
    """Re-encodes and re-indexes the records of a `DatabaseLoss(encode_keys=True)` when its index has grown stale.

    After every `every`-th step of the optimizer it measures which share of the records that are nearest by the model as
    it is are still candidates, on `sample` records, and makes the index anew where that is below `recall`. The last
    measurement stands in the trainer's logs as "index_recall", how often it was made anew as "reindexes". Without
    arguments the policy that the loss was given, `reindex=`, decides.

    Args:
        loss: the loss, or several in a list.
        recall: the share of the nearest that shall be candidates.
        every: steps between measurements.
        sample: records that are encoded for a measurement.
    """

    def __init__(self, loss: DatabaseLoss, *, recall: float | None = None, every: int = 100, sample: int = 512) -> None:
        if not isinstance(loss, DatabaseLoss) or loss.view is None:
            raise BadInput(
                f"loss is {shown(loss)}; expected a DatabaseLoss with encode_keys=True: without it the stored keys "
                "stay as they are, and nothing grows stale"
            )
        self.view = loss.view
        if recall is not None:
            self.view.policy = OnRecall(recall, every, sample)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A step was made: what is due is done."""
        self.view.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        """Tell how stale the index is."""
        report = self.view.report()
        told = {"reindexes": report.reindexes, "index_recall": report.recall}
        for line in ({} if logs is None else logs, *state.log_history[-1:]):
            line.update({name: value for name, value in told.items() if value is not None})
