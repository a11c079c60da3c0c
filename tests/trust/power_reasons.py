"""Steps that no cut shows to be needed, each with its reason.

Names are those of `power_mutate`: "without" a sync, or one step "before" another that in truth comes first.
"""

from __future__ import annotations

__all__ = ["NOT_NEEDED", "TOGETHER"]

_CACHE = "of a cache: an index or a key that is lost or damaged is left aside, and search is exact"
_LATER = "the same directory is synced once more before anything refers to what it names"
_COPY = "nothing of a copy is a database until its catalogue has its name, and that comes last"
_ALL_BEFORE = "both are durable before anything refers to them, in either order"
_EMPTY_SYNC = "every commit has synced the WAL already; SQLite's own caution, needed where commits are not synced"
_NO_GENERATION = "these commits make no new generation: the mark is of the one before"
_NEW_WAL = "the WAL's bytes and its name are durable before the commit is acknowledged, in either order"

NOT_NEEDED = {
    "without create: sync_directory directory (nothing)": "SQLite syncs the directory when it makes the WAL in it; "
    "ours does not count on that, once in the life of a database",
    "without append: sync_directory directory (create keys)": _LATER,
    "without compact: sync_directory directory (create keys)": _LATER,
    "without compact: sync_directory directory (create values)": _LATER,
    "without snapshot: sync_directory directory (create *)": _LATER,
    "without snapshot: sync unfinished.sqlite (write)": "SQLite's own; ours before the renaming covers it",
    "without snapshot: sync unfinished.sqlite (nothing)": "SQLite has synced it; ours does not count on who wrote it",
    "without snapshot: sync unfinished.sqlite-journal *": _COPY,
    "without snapshot: sync index (write at 0)": _CACHE,
    "without snapshot: sync_directory directory (link index)": _CACHE,
    "without index: sync_directory directory (*)": _CACHE,
    "without index: sync index (write at 0)": _CACHE,
    "without index: sync catalog.sqlite-wal (write)": _CACHE,
    "without compact: sync_directory directory (unlink values)": _CACHE,
    "without compact: sync_directory directory (nothing)": _CACHE,
    "without compact: sync index (write at 0)": _CACHE,
    "without compact: sync_directory directory (rename index)": _CACHE,
    "without SQLite: sync catalog.sqlite-wal (nothing)": _EMPTY_SYNC,
    "create: make directory before create: sync_directory *": _ALL_BEFORE,
    "create: create lock before create: sync_directory *": "anything may become of a lock file",
    "SQLite: sync_directory directory (create catalog.sqlite-journal) before create: pages *": _ALL_BEFORE,
    "create: pages of catalog.sqlite-journal before SQLite: sync_directory *": _ALL_BEFORE,
    "SQLite: sync_directory directory (create catalog.sqlite-wal) before *: head of *": _NEW_WAL,
    "*: commit of catalog.sqlite-wal before SQLite: sync_directory directory (create catalog.sqlite-wal)": _NEW_WAL,
    "create: sync_directory directory (nothing) before create: commit of catalog.sqlite-wal": _ALL_BEFORE,
    "create: commit of catalog.sqlite-wal before create: write committed": _NO_GENERATION,
    "create: write committed before create: commit of catalog.sqlite-wal": _NO_GENERATION,
    "index: write committed before index: commit of catalog.sqlite-wal": _NO_GENERATION,
    "append: sync_directory * before append: truncate *": _ALL_BEFORE,
    "append: write * before append: sync*": _ALL_BEFORE,
    "append: head of catalog.sqlite-wal before append: sync values (write)": "a WAL without a commit shows nothing",
    "compact: sync_directory * before compact: truncate *": _ALL_BEFORE,
    "compact: sync * before compact: sync *": _ALL_BEFORE,
    "compact: sync keys (write) before compact: write rows": _ALL_BEFORE,
    "compact: write keys before compact: sync_directory *": _ALL_BEFORE,
    "compact: create keys before compact: commit of * and its mark": "that commit takes a number, which may go unused",
    "index: make directory before index: sync_directory *": _CACHE,
    "index: create .softdb before index: sync_directory *": _CACHE,
    "index: create index* before index: sync_directory *": _CACHE,
    "index: rename index before index: sync index *": _CACHE,
    "index: commit of catalog.sqlite-wal before index: sync_directory *": _CACHE,
    "index: commit of catalog.sqlite-wal and its mark before index: *": _CACHE,
    "compact: create index before compact: sync_directory *": _CACHE,
    "compact: rename index before compact: sync index *": _CACHE,
    "compact: unlink index before compact: commit of * and its mark": _CACHE,
    "compact: commit of * before compact: sync_directory directory (rename index)": _CACHE,
    "compact: sync_directory directory (nothing) before compact: sync_directory *": _CACHE,
    "SQLite: sync catalog.sqlite-wal (nothing) before *": _EMPTY_SYNC,
    "*: pages of catalog.sqlite before SQLite: sync catalog.sqlite-wal (nothing)": _EMPTY_SYNC,
    "snapshot: * before snapshot: *": _COPY,
}

TOGETHER = [  # each covers the other: one of them is needed
    ("snapshot: sync unfinished.sqlite (write)", "snapshot: sync unfinished.sqlite (nothing)")
]
