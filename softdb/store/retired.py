"""Deleted records that older generations still read, in a temporary table of the connection.

SQLite keeps the table in memory or in a temporary file, and rolls it back with the transaction that deletes.
"""

from __future__ import annotations

import apsw

from softdb.store.snapshot import Snapshot

_TABLE = """
CREATE TEMP TABLE IF NOT EXISTS retired(
    row INTEGER PRIMARY KEY, id ANY NOT NULL, payload TEXT, key_crc INTEGER, value_crc INTEGER, payload_crc INTEGER,
    text_crc INTEGER, text TEXT, until INTEGER NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS temp.retired_ids ON retired(id);
"""  # the columns of `records`, and the generation that deleted the record
_ROWS = "row IN (SELECT value FROM json_each(?))"


class Retired:
    """The retained records of one connection: none until `retain` is called."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection, self._retains = connection, False

    def retain(self, since: int) -> None:
        """Keep the records that are deleted after generation `since`; forget all others."""
        self._retains = True
        self._connection.execute(_TABLE)
        self._connection.execute("DELETE FROM retired WHERE until <= ?", (since,))

    def keep(self, rows: str, generation: int) -> None:
        """Copy records, by a JSON list of rows, before the transaction of a generation deletes them."""
        if self._retains:
            self._connection.execute(_TABLE)
            sql = f"INSERT OR REPLACE INTO retired SELECT *, ? FROM records WHERE {_ROWS}"
            self._connection.execute(sql, (generation, rows))

    def since(self, snapshot: Snapshot) -> str:
        """Return the source, for `FROM` in SQL, of a snapshot's records that were deleted later."""
        self._connection.execute(_TABLE)
        return f"(SELECT * FROM retired WHERE until > {snapshot.generation:d} AND row < {snapshot.stop_row:d})"
