"""What is intact of a damaged database, read from its files without SQLite, put into a new one."""

from softdb.store.salvage.run import salvage

__all__ = ["salvage"]
