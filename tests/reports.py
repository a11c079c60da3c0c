"""The report of a database's index, which must have one."""

from __future__ import annotations

from softdb import SoftDB
from softdb.reports import IndexReport

__all__ = ["index_report"]


def index_report(db: SoftDB) -> IndexReport:
    """`db.stats().index`, not None."""
    report = db.stats().index
    assert report is not None
    return report
