"""Compute answers over records: hits, soft answers (exact, truncated, estimated), samples, counts and explanations.

Each kind of answer is a function of a `Source` and a `Query` or `Request`, and a method of the source. Nothing here
reads or writes files. Begin with request.py and source.py, then read exact.py and streaming.py.
"""

from softdb.attend.by_text import TextQuery, fused_hits, text_hits
from softdb.attend.request import Request
from softdb.attend.source import Source
from softdb.attend.stored import Stored
from softdb.attend.tensors import Columns

__all__ = ["Columns", "Request", "Source", "Stored", "TextQuery", "fused_hits", "text_hits"]
