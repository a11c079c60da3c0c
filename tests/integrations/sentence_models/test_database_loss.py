from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from small_models import new_model, texts

import softdb
from softdb.errors import BadInput, Closed, StaleRead
from softdb.integrations.sentence_transformers import (
    DatabaseEvaluator,
    DatabaseLoss,
    ModelEncoder,
    RefreshCallback,
    labelled,
)

QUERIES = texts(48, 2)


def right(db: softdb.SoftDB) -> list[str]:
    """Of each query the record whose text has the most of its words: what a model can learn."""
    records = [(str(record.id), set(str(record.text).split())) for batch in db.scan() for record in batch]
    return [max(records, key=lambda one: len(one[1] & set(query.split())))[0] for query in QUERIES]


def trained(model: SentenceTransformer, loss: torch.nn.Module, data: Dataset, path: Path, **words: Any) -> Any:
    args = SentenceTransformerTrainingArguments(
        output_dir=str(path), num_train_epochs=words.pop("epochs", 8), per_device_train_batch_size=8, report_to=[],
        learning_rate=0.02, save_strategy="no", disable_tqdm=True, logging_steps=6, use_cpu=True, warmup_steps=0,
        **words.pop("args", {}),
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=loss, **words)
    trainer.train()
    return trainer


def features(model: SentenceTransformer, queries: list[str]) -> list[dict[str, Any]]:
    return [model.preprocess(queries)]


def test_the_loss_is_over_every_record(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    with torch.no_grad():
        asked = torch.from_numpy(model.encode(QUERIES)).double()
    keys = torch.tensor([db[f"r{i}"].key.tolist() for i in range(len(db))]).double()
    scores = torch.nn.functional.normalize(asked) @ keys.T / 0.1
    ids = right(db)
    wanted = scores.logsumexp(1) - scores[range(len(ids)), [int(one[1:]) for one in ids]]
    loss = DatabaseLoss(model, db, temperature=0.1)(features(model, QUERIES), ids)
    torch.testing.assert_close(loss.double(), wanted.mean(), rtol=1e-5, atol=1e-6)
    loss.backward()
    assert float(next(model.parameters()).grad.abs().sum()) > 0


@pytest.mark.parametrize("several", [False, True])
def test_labels_of_a_dataset_are_the_ids(model: SentenceTransformer, db: softdb.SoftDB, several: bool) -> None:
    ids: list[Any] = right(db)
    if several:
        ids = [[one, "r0"][: 1 + i % 2] for i, one in enumerate(ids)]
    data = labelled(Dataset.from_dict({"query": QUERIES, "answers": ids}), db, "answers")
    assert data.column_names == ["query", "label"]
    loss = DatabaseLoss(model, db)
    named, plain = loss(features(model, QUERIES), torch.tensor(data["label"][:])), loss(features(model, QUERIES), ids)
    assert named.item() == plain.item() > 0


def test_int_ids_are_labels_as_they_are(model: SentenceTransformer) -> None:
    with softdb.open(None, dim=16) as db:
        db.insert([7, -3, 2**40], torch.randn(3, 16))
        loss = DatabaseLoss(model, db)
        by_tensor = loss(features(model, QUERIES[:2]), torch.tensor([-3, 2**40]))
        assert by_tensor.item() == loss(features(model, QUERIES[:2]), [-3, 2**40]).item()


@pytest.mark.parametrize(
    "how", [{}, {"k": 5}, {"rtol": 0.2}, {"encode_keys": True}, {"encode_keys": True, "k": 4}], ids=str
)
def test_the_trainer_learns(model: SentenceTransformer, db: softdb.SoftDB, tmp_path: Path, how: dict[str, Any]) -> None:
    data = labelled(Dataset.from_dict({"query": QUERIES, "ids": right(db)}), db, "ids")
    loss = DatabaseLoss(model, db, temperature=0.1, **how)
    judge = DatabaseEvaluator(db if loss.view is None else loss.view, QUERIES, right(db))
    before = judge(model)
    callbacks = [] if loss.view is None else [RefreshCallback(loss, recall=0.99, every=5, sample=64)]
    trainer = trained(model, loss, data, tmp_path, callbacks=callbacks, evaluator=judge)
    after = judge(model)
    assert after["recall_1"] > before["recall_1"] + 0.1
    assert after["mrr_100"] > before["mrr_100"]
    if callbacks:
        actual = [line for line in trainer.state.log_history if "reindexes" in line]
        assert actual[-1]["reindexes"] > 1 if how.get("k") else actual
        db.reembed(ModelEncoder(model))
        assert DatabaseEvaluator(db, QUERIES, right(db))(model) == pytest.approx(after, abs=0.03)  # ties


def test_keys_stay_as_they_are_unless_they_are_encoded(
    model: SentenceTransformer, db: softdb.SoftDB, tmp_path: Path
) -> None:
    before = db["r3"].key.clone()
    data = labelled(Dataset.from_dict({"query": QUERIES, "ids": right(db)}), db, "ids")
    trained(model, DatabaseLoss(model, db), data, tmp_path, epochs=1)
    assert (db["r3"].key == before).all()


def test_the_evaluator_names_and_writes_its_metrics(
    model: SentenceTransformer, db: softdb.SoftDB, tmp_path: Path
) -> None:
    corpus = [str(record.text) for batch in db.scan() for record in batch]
    judge = DatabaseEvaluator(
        db, [*corpus, QUERIES[0]], [*(f"r{i}" for i in range(len(corpus))), ["r0", "r1"]], name="dev"
    )
    actual = judge(model, str(tmp_path), epoch=1, steps=2)
    assert actual["dev_recall_1"] >= len(corpus) / (len(corpus) + 1)
    assert judge.primary_metric == "dev_recall_10"
    judge(model, str(tmp_path))
    lines = (tmp_path / "database_evaluation_dev.csv").read_text().splitlines()
    assert lines[0] == "epoch,steps,recall_1,recall_10,mrr_100"
    assert len(lines) == 3


def test_a_view_is_evaluated_with_the_current_model(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    loss = DatabaseLoss(model, db, encode_keys=True, k=3)
    ids = right(db)
    judge = DatabaseEvaluator(loss.view or db, QUERIES, ids)
    assert judge(model) == pytest.approx(DatabaseEvaluator(db, QUERIES, ids)(model))
    with torch.no_grad():
        next(model.parameters()).normal_()
    actual = judge(model)
    db.reembed(ModelEncoder(model))
    assert actual == pytest.approx(DatabaseEvaluator(db, QUERIES, ids)(model))


def test_a_model_object_is_an_encoder(model: SentenceTransformer, tmp_path: Path) -> None:
    for given in (model, ModelEncoder(model)):  # the second time, the fingerprint of the first is compared
        with softdb.open(tmp_path / "db", encoder=given) as db:
            db.upsert([1, 2], texts=QUERIES[:2])
            assert db.search(QUERIES[:2], k=1).ids == [[1], [2]]


def test_a_model_encoder_gives_the_vectors_of_the_model(model: SentenceTransformer) -> None:
    assert (ModelEncoder(model, batch_size=5)(QUERIES) == model.encode(QUERIES)).all()
    with pytest.raises(BadInput, match="expected a SentenceTransformer"):
        ModelEncoder("MiniLM")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"k": 0}, "k is 0"),
        ({"k": 2, "rtol": 0.1}, "k"),
        ({"rtol": 0.1, "k": 2, "encode_keys": True}, "k and a tolerance are both given"),
        ({"field": "gloss"}, "need encode_keys=True"),
        ({"field": 3, "encode_keys": True}, "field is 3"),
    ],
    ids=str,
)
def test_a_loss_refuses(model: SentenceTransformer, db: softdb.SoftDB, words: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        DatabaseLoss(model, db, **words)


def test_a_model_of_another_width_is_refused(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    other = new_model(dim=8)
    with pytest.raises(BadInput, match="8 wide but the keys of this database 16"):
        DatabaseLoss(other, db)
    with pytest.raises(BadInput, match="8 wide but the keys of this database 16"):
        DatabaseEvaluator(db, QUERIES, right(db))(other)
    assert DatabaseLoss(other, db, encode_keys=True).view is not None
    with pytest.raises(BadInput, match="expected a SentenceTransformer"):
        DatabaseLoss("all-MiniLM-L6-v2", db)
    with pytest.raises(BadInput, match="expected an open softdb database"):
        DatabaseLoss(model, "films")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (None, "there are no labels"),
        (torch.ones(2), "dtype torch.float32"),
        (torch.tensor([[1, 2], [3, 4]]), "labels from labelled"),
        (["r1"], "positives are 1 for 2 queries"),
        ([["r1"], []], "query 1 has no positives"),
    ],
    ids=str,
)
def test_labels_that_are_no_ids_are_refused(
    model: SentenceTransformer, db: softdb.SoftDB, labels: Any, told: str
) -> None:
    with pytest.raises(BadInput, match=told):
        DatabaseLoss(model, db)(features(model, QUERIES[:2]), labels)


def test_deleted_records_are_reported(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    loss, asked = DatabaseLoss(model, db), features(model, QUERIES[:2])
    with pytest.raises(softdb.UnknownId, match="r999"):
        loss(asked, ["r1", "r999"])
    with pytest.raises(BadInput, match="2 columns of texts"):
        loss(asked * 2, ["r1", "r2"])
    data = labelled(Dataset.from_dict({"query": QUERIES[:2], "ids": ["r1", "r2"]}), db, "ids")
    labels = torch.tensor(data["label"][:])
    db.delete(["r2"])
    with pytest.raises(StaleRead, match="1 right records of the batch were deleted"):
        loss(asked, labels)
    db.reembed(ModelEncoder(model))
    with pytest.raises(StaleRead, match="make another"):
        loss(asked, ["r1", "r1"])
    db.close()
    with pytest.raises(Closed):
        loss(asked, ["r1", "r1"])


def test_labelled_refuses(db: softdb.SoftDB) -> None:
    for rows, column, told in (
        ({"query": ["w1"], "ids": ["r999"]}, "ids", "not in the database: 'r999'"),
        ({"query": ["w1"], "ids": ["r1"]}, "label", "no column 'label'; it has 'query', 'ids'"),
        ({"query": [], "ids": []}, "ids", "the dataset is empty"),
        ({"query": ["w1"], "ids": [[]]}, "ids", "query 0 has no positives"),
    ):
        with pytest.raises(BadInput, match=told):
            labelled(Dataset.from_dict(rows), db, column)


def test_records_without_text_cannot_be_encoded(model: SentenceTransformer) -> None:
    with softdb.open(None, dim=16) as db:
        db.insert(["a", "b"], torch.randn(2, 16), payloads=[{"gloss": "w1 w2"}, {"gloss": "w3"}])
        asked = features(model, ["w1"])
        with pytest.raises(BadInput, match="record 'a' has no text"):
            DatabaseLoss(model, db, encode_keys=True)(asked, ["a"])
        assert DatabaseLoss(model, db, encode_keys=True, field="gloss")(asked, ["a"]).isfinite()
        with pytest.raises(BadInput, match="no index becomes stale"):
            RefreshCallback(DatabaseLoss(model, db))
        with pytest.raises(BadInput, match="queries are"):
            DatabaseEvaluator(db, [], [])
