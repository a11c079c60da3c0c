"""SoftDB: the one stateful class. It orchestrates store, index and answers, and contains no mathematics."""

from __future__ import annotations

from softdb.database.asking import AskingVerbs
from softdb.database.indexing import IndexVerbs
from softdb.database.reembedding import ReembedVerbs
from softdb.database.soft import SoftVerbs
from softdb.database.tables import TableVerbs

__all__ = ["SoftDB", "SoftVerbs", "TableVerbs"]


class SoftDB(ReembedVerbs, AskingVerbs, IndexVerbs, TableVerbs):
    """A durable database of embedded keys and values that answers exact, approximate and soft queries.

    Made by `softdb.open`. Safe to use from several threads; a context manager; every verb takes batches.
    """
