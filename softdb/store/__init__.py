"""The store: catalogue and column files, from which everything else of a database can be rebuilt.

Only the store touches the database's directory, through `disk.py` and SQLite. It knows no index and no query.
Begin in `store.py` (the operations), then `session.py` (opening) and `writer.py` (the commit).
"""

from softdb.store.append import Batch
from softdb.store.snapshot import Block, Segment, Snapshot
from softdb.store.store import Store

__all__ = ["Batch", "Block", "Segment", "Snapshot", "Store"]
