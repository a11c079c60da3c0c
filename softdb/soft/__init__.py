"""Soft queries over a snapshot: exact over every record that takes part, truncated to the k nearest, or estimated."""

from softdb.soft.draws import drawn
from softdb.soft.estimate import attend_estimated, log_partition
from softdb.soft.hits import hits
from softdb.soft.nearest import attend_nearest, nearest
from softdb.soft.query import SoftQuery, indifferent, score_rows, soft_query
from softdb.soft.whole import attend_all, log_all
from softdb.soft.within import Ball, count_within

__all__ = [
    "Ball",
    "SoftQuery",
    "attend_all",
    "attend_estimated",
    "attend_nearest",
    "count_within",
    "drawn",
    "hits",
    "indifferent",
    "log_all",
    "log_partition",
    "nearest",
    "score_rows",
    "soft_query",
]
