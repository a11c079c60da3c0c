"""The encoder of the demo's texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softdb.check import Encoder
from softdb.data import DemoData, load_wordnet
from softdb.errors import BadInput, MissingDependency
from softdb.text import SentenceEncoder, Vectors

DEMO = "demo"  # name of the encoder
PROJECTION = "projection.pt"  # file in a demo database's directory: the projection of queries that `train.fit` learned


class KnownWords:
    """Encode the demo's words by the vectors that ship with softdb, and other texts by their model, if installed."""

    name = DEMO

    def __init__(self, data: DemoData, weight: NDArray[np.float32] | None = None) -> None:
        self.dim, self._weight = data.query_keys.shape[1], weight  # (d, d) the learned projection of queries
        self._vectors = {word.lower(): key for word, key in zip(data.query_texts, data.query_keys, strict=True)}
        self._model = SentenceEncoder(projection=data.projection, name=DEMO)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Encode texts. Without the model, raises MissingDependency or BadInput for a text that is no known word."""
        vectors = self._encoded(texts)
        return vectors if self._weight is None else np.asarray(vectors @ self._weight.T)

    def _encoded(self, texts: Sequence[str]) -> Vectors:
        words = [text.strip().lower() for text in texts]
        if words and all(word in self._vectors for word in words):
            return np.stack([self._vectors[word] for word in words])
        try:
            return np.asarray(self._model(list(texts)), np.float32)
        except (BadInput, MissingDependency) as error:
            raise type(error)(
                f"the demo has vectors of {len(self._vectors):,} words, such as kettle, helmet and echo; other "
                f"texts need the model of these vectors ({error}). Type one word, or rank by words"
            ) from None


def demo_encoder(path: Path | None = None) -> Encoder:
    """Return the encoder of the demo's keys; given the path of a demo database, the encoder of its queries."""
    from softdb.train import load

    data = load_wordnet()
    if path is None or not (path / PROJECTION).is_file():
        return KnownWords(data)
    try:
        weight = load(path / PROJECTION).weight.detach().numpy()
    except BadInput:
        weight = None
    if weight is None or len(weight) != data.query_keys.shape[1]:
        raise BadInput(f"{path / PROJECTION} was not saved by the demo; create the demo again by softdb demo --fresh")
    return KnownWords(data, weight)
