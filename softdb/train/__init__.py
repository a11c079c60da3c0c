"""Training of a projection of the queries and of an encoder of the keys, from Python.

This folder may use what `nn` may, and the user's files: projections and checkpoints. Begin reading in `fit.py`.
"""

from softdb.train.applied import TextTowers, apply
from softdb.train.fit import Epoch, Fitted, fit
from softdb.train.held_out import Ranking, ranking
from softdb.train.keys import KeyEncoder
from softdb.train.pairs import Pairs, read_pairs
from softdb.train.projection import QueryProjection, load, save

__all__ = [
    "Epoch", "Fitted", "KeyEncoder", "Pairs", "QueryProjection", "Ranking", "TextTowers", "apply", "fit", "load",
    "ranking", "read_pairs", "save",
]  # fmt: skip
