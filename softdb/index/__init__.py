"""The finders: which rows can matter to a query. Exact search needs nothing; approximate indexes need FAISS."""

from softdb.index.background import Build
from softdb.index.finder import Finder
from softdb.index.flat import nearest

__all__ = ["Build", "Finder", "nearest"]
