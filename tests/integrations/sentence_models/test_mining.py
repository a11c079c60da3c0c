from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, util
from small_models import new_model, texts

import softdb
from softdb.errors import BadInput, Closed
from softdb.integrations.sentence_transformers import mine_hard_negatives

FORMATS = ["triplet", "n-tuple", "labeled-pair", "labeled-list"]
WAYS: list[dict[str, Any]] = [
    {},
    {"range_min": 3, "range_max": 12},
    {"range_max": 500},
    {"max_score": 0.7, "min_score": 0.1},
    {"absolute_margin": 0.1},
    {"relative_margin": 0.05, "num_negatives": 5},
    {"sampling_strategy": "random", "range_max": 20},
    {"include_positives": True},
    {"absolute_margin": 0.0, "relative_margin": 0.2, "range_min": 1, "num_negatives": 2, "max_score": 0.9},
]


def corpus_of(db: softdb.SoftDB) -> list[str]:
    return [str(record.text) for batch in db.scan() for record in batch]


def pairs(db: softdb.SoftDB) -> Dataset:
    """Queries with a right text each, some of them twice with different ones."""
    draw, corpus, queries = random.Random(3), corpus_of(db), texts(30, 2)
    asked = [*queries, *queries[:8]]
    return Dataset.from_dict({"query": asked, "answer": [draw.choice(corpus) for _ in asked]})


@pytest.mark.parametrize(
    ("way", "output_format", "output_scores"), [*itertools.product(WAYS, FORMATS, [False, True])], ids=str
)
def test_rows_are_those_of_the_library(
    model: SentenceTransformer, db: softdb.SoftDB, way: dict[str, Any], output_format: str, output_scores: bool
) -> None:
    words = {**way, "output_format": output_format, "output_scores": output_scores, "verbose": False}
    random.seed(5)
    theirs = util.mine_hard_negatives(pairs(db), model, corpus=corpus_of(db), **words)
    random.seed(5)
    model.encode_document = None  # the records are not embedded again
    ours = mine_hard_negatives(pairs(db), model, db, **words)
    assert ours.column_names == theirs.column_names
    assert ours.to_dict() == theirs.to_dict()
    assert len(ours)


def test_the_corpus_may_be_some_of_the_records(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    corpus = corpus_of(db)[:30]
    theirs = util.mine_hard_negatives(pairs(db), model, corpus=corpus, verbose=False)
    assert mine_hard_negatives(pairs(db), model, db, corpus=corpus, verbose=False).to_dict() == theirs.to_dict()
    db.update(["r0", "r1", "r2", "r3", "r4", "r5"], payloads=[{"part": 1}] * 6)
    few = Dataset.from_dict({"query": ["w1 w2"], "answer": [corpus[1]]})
    actual = mine_hard_negatives(few, model, db, where={"part": 1}, verbose=False)
    assert set(actual["negative"]) <= {corpus[0], *corpus[2:6]}


def test_an_index_finds_the_same_where_it_misses_nothing(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    more = [one for one in texts(1500, 7) if one not in corpus_of(db)]
    db.insert(range(len(more)), model.encode_document(more, normalize_embeddings=True), texts=more)
    db.build_index("hnsw", recall=0.99)
    words: dict[str, Any] = {"output_scores": True, "verbose": False, "relative_margin": 0.05, "range_min": 2}
    exact, actual = (mine_hard_negatives(pairs(db), model, db, use_faiss=one, **words) for one in (False, True))
    same = [one == other for one, other in zip(actual["negative"], exact["negative"], strict=True)]
    assert sum(same) > 0.95 * len(same)
    scores = (torch.tensor(one["scores"][:])[torch.tensor(same)] for one in (actual, exact))
    torch.testing.assert_close(*scores)


def test_bad_input(model: SentenceTransformer, db: softdb.SoftDB) -> None:
    data, other = pairs(db), new_model(dim=8)
    for words, told in (
        ({"range_mini": 3}, "range_mini: the library's mine_hard_negatives takes no such argument"),
        ({"cache_folder": "there"}, "embed the corpus, which is stored already"),
        ({"output_format": "pairs"}, "Invalid output_format"),
        ({"num_negatives": 0}, "num_negatives must be at least 1"),
        ({"corpus": ["w1 w2 nowhere"]}, "1 texts, such as 'w1 w2 nowhere', belong to no record"),
        ({"corpus": ["w1"], "use_faiss": True}, "the index searches all records"),
        ({"field": "gloss"}, "record 'r0' has no text"),
    ):
        with pytest.raises(BadInput, match=told):
            mine_hard_negatives(data, model, db, verbose=False, **words)
    with pytest.raises(BadInput, match="8 wide"):
        mine_hard_negatives(data, other, db)
    with pytest.raises(BadInput, match="and 0 rows; expected pairs"):
        mine_hard_negatives(data.select([]), model, db)
    db.close()
    with pytest.raises(Closed):
        mine_hard_negatives(data, model, db)
