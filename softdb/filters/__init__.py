"""Filters: the records that a `where=`, a group's field or the words of a text names.

May read the catalogue and the snapshot of one generation, on the store's thread; writes nothing.
Begin in `filtered.py`; `grammar.py` parses a filter to the tree of `conditions.py`, `masks.py` finds its matches.
"""

from softdb.filters.filtered import ByText, FilteredStore
from softdb.filters.fulltext import TextScores
from softdb.filters.grammar import parse
from softdb.filters.grouping import Grouping

__all__ = ["ByText", "FilteredStore", "Grouping", "TextScores", "parse"]
