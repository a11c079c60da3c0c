"""Answers over records: hits, exact, nearest, estimated, sampled, counted, explained.

Each is one function of a `Source`, which has it as a method, and a `Query` or a `Request`. Computes; touches no files.
Begin with request.py and source.py, then exact.py and streaming.py.
"""

from softdb.attend.by_text import TextQuery, fused_hits, text_hits
from softdb.attend.request import Request
from softdb.attend.source import Source
from softdb.attend.stored import Stored
from softdb.attend.tensors import Columns

__all__ = ["Columns", "Request", "Source", "Stored", "TextQuery", "fused_hits", "text_hits"]
