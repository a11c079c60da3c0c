"""The store: catalogue and column files, the only truth of a database."""

from softdb.store.append import Batch
from softdb.store.fulltext import TextScores
from softdb.store.snapshot import Block, Segment, Snapshot
from softdb.store.store import ByText, Store

__all__ = ["Batch", "Block", "ByText", "Segment", "Snapshot", "Store", "TextScores"]
