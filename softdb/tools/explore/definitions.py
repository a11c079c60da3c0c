"""The data of `softdb explore --demo`: the definitions that ship with softdb, in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import softdb
from softdb.data import DemoData, load_wordnet
from softdb.data.encoder import DEMO, demo_encoder
from softdb.database import SoftDB
from softdb.errors import BadInput, MissingDependency
from softdb.text import Vectors


class KnownWords:
    """Encode single words by the vectors that ship with softdb, and other texts by the same model, if installed."""

    name = DEMO

    def __init__(self, data: DemoData) -> None:
        self._vectors = {word.lower(): key for word, key in zip(data.query_texts, data.query_keys, strict=True)}
        self._encoder = demo_encoder()

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Encode texts. Without the model, raises BadInput for a text that is not one of the known words."""
        words = [text.strip().lower() for text in texts]
        if all(word in self._vectors for word in words):
            return np.stack([self._vectors[word] for word in words])
        try:
            return np.asarray(self._encoder(list(texts)), np.float32)
        except (BadInput, MissingDependency) as error:
            raise BadInput(
                f"the demo has vectors of {len(self._vectors):,} words, such as kettle, lighthouse and echo; other "
                f"texts need the model of these vectors ({error}). Type one word, or rank by words"
            ) from None


def demo_database() -> SoftDB:
    """Return a database in memory with WordNet's definitions, their vectors and texts."""
    data = load_wordnet()
    db = softdb.open(None, dim=data.keys.shape[1], metric="cosine", encoder=KnownWords(data), fields=["pos"])
    db.insert(
        data.ids, data.keys, texts=[payload["gloss"] for payload in data.payloads],
        payloads=[{name: payload[name] for name in ("word", "lemmas", "pos")} for payload in data.payloads],
    )  # fmt: skip
    db.index_text()
    return db
