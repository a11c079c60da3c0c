"""Answers over records: exact over every one that takes part, truncated to the nearest, estimated, sampled, counted."""

from softdb.attend.blocks import Task
from softdb.attend.count import Ball, count_within
from softdb.attend.estimate import attend_estimated, log_partition
from softdb.attend.exact import attend_all, log_all
from softdb.attend.hits import hits
from softdb.attend.nearest import attend_nearest
from softdb.attend.request import SoftQuery, indifferent, score_rows, soft_query
from softdb.attend.sample import drawn
from softdb.attend.scanning import scan
from softdb.attend.source import Columns, Source
from softdb.attend.streaming import stream

__all__ = [
    "Ball",
    "Columns",
    "SoftQuery",
    "Source",
    "Task",
    "attend_all",
    "attend_estimated",
    "attend_nearest",
    "count_within",
    "drawn",
    "hits",
    "indifferent",
    "log_all",
    "log_partition",
    "scan",
    "score_rows",
    "soft_query",
    "stream",
]
