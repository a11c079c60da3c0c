"""Finders: the rows that can matter to a query, by comparing all records or by FAISS.

Reads the store's columns; writes `index/`, a cache, through the store's files. Without FAISS exact search still works.
Begin in `finder.py`; `contract.py` is what an engine implements, `planner.py` what each way costs.
"""

from softdb.index.background import Build
from softdb.index.finder import Finder
from softdb.index.flat import nearest

__all__ = ["Build", "Finder", "nearest"]
