"""The encoder of the demo's texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softdb.check import Encoder
from softdb.data import load_wordnet
from softdb.errors import BadInput
from softdb.text import SentenceEncoder, Vectors

DEMO = "demo"  # name of the encoder
PROJECTION = "projection.pt"  # file in a demo database's directory: the projection of queries that `train.fit` learned


@dataclass(frozen=True)
class _Trained:
    """The demo's encoder, followed by the learned projection of queries."""

    encoder: SentenceEncoder
    weight: NDArray[np.float32]  # (d, d)
    name: str = DEMO

    def __call__(self, texts: Sequence[str]) -> Vectors:
        vectors: Vectors = self.encoder(texts) @ self.weight.T
        return vectors


def demo_encoder(path: Path | None = None) -> Encoder:
    """Return the encoder of the demo's keys; given the path of a demo database, the encoder of its queries."""
    from softdb.train import load

    encoder = SentenceEncoder(projection=load_wordnet().projection, name=DEMO)
    if path is None or not (path / PROJECTION).is_file():
        return encoder
    try:
        weight = load(path / PROJECTION).weight.detach().numpy()
    except BadInput:
        weight = None
    if weight is None or len(weight) != encoder.dim:
        raise BadInput(f"{path / PROJECTION} was not saved by the demo; create the demo again by softdb demo --fresh")
    return _Trained(encoder, weight)
