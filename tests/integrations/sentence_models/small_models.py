from __future__ import annotations

import random

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{i}" for i in range(40)]


def new_model(dim: int = 16, seed: int = 0) -> SentenceTransformer:
    """A mean of word vectors: small, quick, and a text's vector does not depend on the others of its batch."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(seed)
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=dim)], device="cpu")


def texts(count: int, seed: int, low: int = 2) -> list[str]:
    draw = random.Random(seed)
    return list(dict.fromkeys(" ".join(draw.sample(WORDS, draw.randint(low, 6))) for _ in range(count)))
