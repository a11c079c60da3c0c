"""The base class of all sources of records, which has every kind of answer as a method."""

from __future__ import annotations

from softdb.attend.count import count_by_scores
from softdb.attend.estimate import estimate, log_partition
from softdb.attend.exact import all_scores, exact, log_normaliser, shared_scores
from softdb.attend.nearest import nearest
from softdb.attend.protocol import SourceRecords
from softdb.attend.result import heaviest
from softdb.attend.sample import sample
from softdb.attend.streaming import stream


class Source(SourceRecords):
    """Records and the answers over them. Each method is a function from the module of its name.

    A new source implements `SourceRecords` and inherits all answers. It overrides answers that it computes faster or
    elsewhere: a database draws records for estimates and counts, a cluster asks its shards.
    """

    stream = stream
    exact = exact
    nearest = nearest
    estimate = estimate
    log_normaliser = log_normaliser
    log_partition = log_partition
    sample = sample
    count_within = count_by_scores
    heaviest = heaviest
    all_scores = all_scores
    shared_scores = shared_scores
