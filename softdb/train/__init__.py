"""Training a projection of the queries: what `softdb train` does, from Python."""

from softdb.train.fit import Epoch, Fitted, fit
from softdb.train.held_out import Ranking, ranking
from softdb.train.pairs import Pairs, read_pairs
from softdb.train.projection import QueryProjection, load, save

__all__ = ["Epoch", "Fitted", "Pairs", "QueryProjection", "Ranking", "fit", "load", "ranking", "read_pairs", "save"]
