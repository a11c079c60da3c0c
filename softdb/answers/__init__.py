"""Answers: records, hits and pooled values; as short text, and as tables in a notebook.

They hold tensors, and look ids and payloads up when needed. Begin in `records.py` (hits), then `soft.py`.
"""

from softdb.answers.records import *  # noqa: F403 - records, hits
from softdb.answers.soft import *  # noqa: F403 - pooled values, explanations, samples, estimates
