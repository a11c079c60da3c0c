"""Answers over records: exact over all, truncated to the nearest, estimated, sampled, counted, explained.

Each is one function of a `Request`, what is asked, and a `Source`, where the records are.
"""

from softdb.attend.count import counted
from softdb.attend.estimate import estimated, log_partition
from softdb.attend.exact import all_scores, exact, log_normaliser, shared_scores
from softdb.attend.grouped import grouped
from softdb.attend.hits import hits
from softdb.attend.nearest import nearest
from softdb.attend.remote import Remote
from softdb.attend.request import Request, Source
from softdb.attend.result import explained
from softdb.attend.sample import sampled
from softdb.attend.source import Columns, Stored
from softdb.attend.streaming import stream
from softdb.attend.texts import fused_hits, text_hits

__all__ = [
    "Columns",
    "Remote",
    "Request",
    "Source",
    "Stored",
    "all_scores",
    "counted",
    "estimated",
    "exact",
    "explained",
    "fused_hits",
    "grouped",
    "hits",
    "log_normaliser",
    "log_partition",
    "nearest",
    "sampled",
    "shared_scores",
    "stream",
    "text_hits",
]
