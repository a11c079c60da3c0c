"""Salvage: the records that can still be read of a damaged database, put into a new one.

Reads files without SQLite, by the formats of `store`; writes only the new directory.
Begin in `run.py`; `remains.py` reads the catalogue, `placing.py` finds vectors in the column files.
"""

from softdb.salvaging.run import salvage

__all__ = ["salvage"]
