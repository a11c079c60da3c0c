"""Salvage: copy the intact records of a damaged database to a new one.

It reads the damaged files without SQLite, in the formats that `softdb.store` states, and writes only the new directory.
Begin in `run.py`. `remains.py` reads the catalogue; `placing.py` finds vectors in the column files.
"""

from softdb.salvaging.run import salvage

__all__ = ["salvage"]
