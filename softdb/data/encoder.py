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

    def __init__(self, data: DemoData, weight: NDArray[np.float32] | None = None, has_model: bool = True) -> None:
        """`weight`: (d, d), a projection of the vectors; None: none. `has_model`: load the model for other texts."""
        self.dim, self._weight = data.query_keys.shape[1], weight
        self._vectors = {word.lower(): key for word, key in zip(data.query_texts, data.query_keys, strict=True)}
        self.words = sorted(self._vectors)
        self._model = SentenceEncoder(projection=data.projection, name=DEMO) if has_model else None

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Encode texts. Without the model, raises MissingDependency or BadInput for a text that is no known word."""
        words = [text.strip().lower() for text in texts]
        known = bool(words) and all(word in self._vectors for word in words)
        vectors = np.stack([self._vectors[word] for word in words]) if known else self._by_model(list(texts))
        return vectors if self._weight is None else vectors @ self._weight.T

    def _by_model(self, texts: list[str]) -> Vectors:
        words = f"the demo has vectors of {len(self._vectors):,} words, such as kettle, violin and echo"
        if self._model is None:
            raise BadInput(f"{words}, and no model is loaded for other texts; type one of its words, or rank by words")
        try:
            return self._model(texts)
        except (BadInput, MissingDependency) as error:
            message = f"{words}; other texts need the model of these vectors ({error}). Type one word, or rank by words"
            raise type(error)(message) from None


def demo_encoder(path: str | Path | None = None, has_model: bool = True) -> Encoder:
    """Return the encoder of the demo's keys; given the path of a demo database, the encoder of its queries."""
    from softdb.train import load

    data = load_wordnet()
    if path is None or not (file := Path(path) / PROJECTION).is_file():
        return KnownWords(data, None, has_model)
    try:
        weight = load(file).weight.detach().numpy()
    except BadInput:
        weight = None
    if weight is None or len(weight) != data.query_keys.shape[1]:
        raise BadInput(f"{file} was not saved by the demo; create the demo again by softdb demo --fresh")
    return KnownWords(data, weight, has_model)
