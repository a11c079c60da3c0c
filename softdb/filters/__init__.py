"""Find records by a filter (`where=`), group them by a field, and score them by the words of their texts.

This package reads the catalogue and the snapshot of one generation, on the store's thread, and writes nothing. Begin in
`filtered.py`. `grammar.py` parses a filter to a tree (`conditions.py`), and `masks.py` finds the records that match.
"""

from softdb.filters.filtered import ByText, FilteredStore
from softdb.filters.fulltext import TextScores
from softdb.filters.grammar import parse
from softdb.filters.grouping import Grouping
from softdb.filters.pinned import PinnedStore

__all__ = ["ByText", "FilteredStore", "Grouping", "PinnedStore", "TextScores", "parse"]
