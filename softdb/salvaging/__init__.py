"""What is intact of a damaged database, read from its files without SQLite, put into a new one."""

from softdb.salvaging.run import salvage

__all__ = ["salvage"]
