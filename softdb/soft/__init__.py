"""Soft queries over a snapshot: exact over every record that takes part, or truncated to the k nearest."""

from softdb.soft.hits import hits
from softdb.soft.nearest import attend_nearest, nearest
from softdb.soft.query import SoftQuery, indifferent, score_rows, soft_query
from softdb.soft.whole import attend_all

__all__ = ["SoftQuery", "attend_all", "attend_nearest", "hits", "indifferent", "nearest", "score_rows", "soft_query"]
