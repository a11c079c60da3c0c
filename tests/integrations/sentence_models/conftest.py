from __future__ import annotations

from collections.abc import Iterator

import pytest
from sentence_transformers import SentenceTransformer
from small_models import new_model, texts

import softdb


@pytest.fixture
def model() -> SentenceTransformer:
    return new_model()


@pytest.fixture
def db(model: SentenceTransformer) -> Iterator[softdb.SoftDB]:
    """Records with ids "r0", "r1" …, their texts, and the keys that the model makes of these."""
    corpus = texts(80, 1)
    with softdb.open(None, dim=16, metric="cosine") as opened:
        keys = model.encode_document(corpus, normalize_embeddings=True)
        opened.insert([f"r{i}" for i in range(len(corpus))], keys, texts=corpus)
        yield opened
