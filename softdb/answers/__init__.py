"""Answers of queries: records, hits and pooled values. Each prints as a short text, and as a table in a notebook.

Answers hold tensors, and read ids and payloads at first use. Begin in `records.py` (hits), then `soft.py`.
"""

from softdb.answers.records import *  # noqa: F403 - records, hits
from softdb.answers.shaped import *  # noqa: F403 - the leading dimensions of answers
from softdb.answers.soft import *  # noqa: F403 - pooled values, explanations, samples, estimates
