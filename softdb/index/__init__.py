"""Finders: they name the records that can matter to a query, by exact search or by an index.

Reads the store's columns; writes `index/`, a cache, through the store's files. Without FAISS exact search still works.
Begin in `finder.py`. `contract.py` declares the methods of an engine; `planner.py` estimates costs.
"""

from softdb.index.background import Build
from softdb.index.finder import Finder
from softdb.index.flat import nearest

__all__ = ["Build", "Finder", "nearest"]
