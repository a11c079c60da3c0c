"""The text index: SQLite's FTS5 over `records.text`, in the catalogue, written in the transaction of the records.

It is a contentless table (`format.text_index_sql`), which holds words and where they occur, not the texts. A row
can be deleted by its number alone. softdb updates it without triggers. It may be dropped at any time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import zip_longest

import apsw

from softdb.store import format

NONE = "there is no text index; the writer's db.index_text(), or on a shell softdb fields PATH --text words, makes one"
MATCHING = "row IN (SELECT rowid FROM texts WHERE texts MATCH ?)"  # SQL of a filter
_LISTED = "(SELECT value FROM json_each(?))"
_ADD = "INSERT INTO texts(rowid, text) SELECT row, text FROM records WHERE text NOTNULL AND {} ORDER BY row"


def phrases(text: str) -> list[str]:
    """Split a text at white space, and quote each word for FTS5, so that no character acts as an operator."""
    return ['"{}"'.format(word.replace('"', '""')) for word in text.replace("\0", " ").split()]


def tokenizer(connection: apsw.Connection) -> str | None:
    """Return the index's tokenizer, one of `format.TOKENIZERS`; None if there is no index."""
    if not connection.table_exists("main", "texts"):
        return None
    sql = connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'texts'").fetchall()[0][0]
    return next((name for name in format.TOKENIZERS if format.text_index_sql(name) == sql), None)


def make(connection: apsw.Connection, name: str) -> None:
    """Create the index and add all texts. Cost: 3 µs per record for words, 60 µs for trigrams."""
    connection.execute(format.text_index_sql(name))
    connection.execute(_ADD.format("TRUE"))


def drop(connection: apsw.Connection) -> None:
    """Drop the index, if there is one, even if it is damaged."""
    if connection.table_exists("main", "texts"):
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)  # to repair settings that FTS5 needs to drop it
        try:
            connection.execute("DELETE FROM texts_config; INSERT INTO texts_config VALUES('version', 4)")
        finally:
            connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.execute("DROP TABLE texts")


def add(connection: apsw.Connection, first_row: int) -> None:
    """Index the texts of new records, from `first_row` on."""
    if connection.table_exists("main", "texts"):
        connection.execute(_ADD.format("row >= ?"), (first_row,))


def remove(connection: apsw.Connection, rows: list[int]) -> None:
    """Remove the texts of rows from the index; rows without a text are ignored."""
    if connection.table_exists("main", "texts"):
        connection.execute(f"DELETE FROM texts WHERE rowid IN {_LISTED}", (json.dumps(rows),))


def replace(connection: apsw.Connection, rows: list[int]) -> None:
    """Index the texts of rows again, after they changed."""
    remove(connection, rows)
    if connection.table_exists("main", "texts"):
        connection.execute(_ADD.format(f"row IN {_LISTED}"), (json.dumps(rows),))


def unlike(connection: apsw.Connection) -> bool:
    """Return True if the index is wrong: compare it with a new index of the texts, built in a temporary file."""
    name = tokenizer(connection)
    if name is None:
        return False
    with contextlib.closing(apsw.Connection("")) as fresh:
        fresh.execute(format.text_index_sql(name))
        texts = connection.execute("SELECT row, text FROM records WHERE text NOTNULL ORDER BY row")
        with fresh:
            fresh.executemany("INSERT INTO texts(rowid, text) VALUES(?, ?)", texts)
        return any(own != other for own, other in zip_longest(_entries(connection), _entries(fresh)))


def _entries(connection: apsw.Connection) -> Iterator[tuple[object, ...]]:
    """Yield the length of each text, then each word with the rows and offsets of its occurrences, in a fixed order."""
    yield from connection.execute("SELECT id, sz FROM texts_docsize ORDER BY id")
    connection.execute("CREATE VIRTUAL TABLE IF NOT EXISTS temp.words USING fts5vocab(main, texts, instance)")
    yield from connection.execute("SELECT term, doc, offset FROM temp.words")
