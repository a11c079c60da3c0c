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
    """Words whose vectors ship with softdb; other texts by the model that made them, where it is installed."""

    name = DEMO

    def __init__(self, data: DemoData) -> None:
        self._known = {word.lower(): key for word, key in zip(data.query_texts, data.query_keys, strict=True)}
        self._encoder = demo_encoder()

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts. Raises BadInput for what is not known."""
        words = [text.strip().lower() for text in texts]
        if all(word in self._known for word in words):
            return np.stack([self._known[word] for word in words])
        try:
            return np.asarray(self._encoder(list(texts)), np.float32)
        except (BadInput, MissingDependency) as error:
            raise BadInput(
                f"the demo knows the vectors of {len(self._known):,} words, such as kettle, lighthouse and echo; other "
                f"texts need the model that made them. Try one word, or rank by words ({error})"
            ) from None


def demo_database() -> SoftDB:
    """The definitions of WordNet, with their vectors and texts."""
    data = load_wordnet()
    db = softdb.open(None, dim=data.keys.shape[1], metric="cosine", encoder=KnownWords(data), fields=["pos"])
    db.insert(
        data.ids, data.keys, texts=[payload["gloss"] for payload in data.payloads],
        payloads=[{name: payload[name] for name in ("word", "lemmas", "pos")} for payload in data.payloads],
    )  # fmt: skip
    db.index_text()
    return db
