"""Progress of a re-embedding: the new keys, in a database of their own, so that an interrupted run can be resumed.

This second database is the folder `reembed-G` in the first one's directory, where G is the generation that last
re-embedded all keys. After another re-embedding, writers know by G that the folder is obsolete. Its ids are rows of the
first database, its payloads digests of the texts. A key is used only if the record's text still has that digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable

import apsw
import numpy as np
from numpy.typing import NDArray

from softdb.check import Array, Schema
from softdb.errors import CorruptionError, FormatTooNew, NotADatabase, SoftDBError, WriteFailed
from softdb.store.append import Batch
from softdb.store.keyed import Keyed
from softdb.store.ours import remove_database, require_ours
from softdb.store.snapshot import Rows
from softdb.store.soundness import damaged, damaged_texts
from softdb.store.store import Store


def digest(text: str) -> str:
    """Return a hexadecimal digest of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Gathered:
    """The new keys, looked up by row."""

    def __init__(self, store: Store, schema: Schema, encoder: str | None) -> None:
        """Resume an interrupted run of the same encoder, or begin a new one; without an encoder's name, always begin.

        Raises DatabaseLocked if another run is in progress, BadInput if the folder has foreign files, WriteFailed.
        """
        only_keys = dataclasses.replace(schema, value_dim=None, num_classes=None)
        self._folder = None if store.path is None else store.path / f"reembed-{store.keyed.since}"
        try:
            self._store = self._resume(Keyed(only_keys, encoder, 0)) or self._create(only_keys, encoder)
        except (OSError, apsw.Error) as error:
            why = f"{type(error).__name__}: {error}"
            raise WriteFailed(
                f"the disk refused the folder of the new keys ({why}), and nothing has changed; fix the cause"
            ) from error

    def _create(self, schema: Schema, encoder: str | None) -> Store:
        store = Store(self._folder, "rw", schema)
        with contextlib.ExitStack() as opened:
            opened.callback(store.close)
            if encoder is not None:
                store.note_encoder(encoder)
            opened.pop_all()
        return store

    def _resume(self, origin: Keyed) -> Store | None:
        """Return an interrupted run's store if it is undamaged and has this `origin`; else remove its folder."""
        if self._folder is None or not (self._folder.exists() or self._folder.is_symlink()):
            return None
        require_ours(self._folder)
        with contextlib.suppress(CorruptionError, NotADatabase, FormatTooNew), contextlib.ExitStack() as opened:
            store = Store(self._folder, "rw", None)
            opened.callback(store.close)
            if (
                origin.encoder is not None
                and store.keyed == origin
                and not any(any(damaged(store.checksums, segment)) for segment in store.snapshot.segments)
                and not any(damaged_texts(store.damaged_texts))
            ):
                opened.pop_all()
                return store
        remove_database(self._folder)
        return None

    def __len__(self) -> int:
        return self._store.snapshot.count

    def missing(self, rows: Rows, digests: list[str]) -> NDArray[np.bool_]:
        """Return a mask (m,), True for each row that has no new key for the text with its digest."""
        if not len(self):
            return np.ones(len(rows), np.bool_)
        stored = self._store.locate(rows.tolist(), True).payloads
        return np.array([old != json.dumps(new) for old, new in zip(stored, digests, strict=True)], np.bool_)

    def put(self, rows: Rows, keys: Array, digests: Iterable[str]) -> None:
        """Store keys (m, d) of rows; on disk when this returns. Raises WriteFailed."""
        batch = Batch(rows.tolist(), keys, None, list(map(json.dumps, digests)))
        self._store.insert(batch, replace=True)

    def keys(self, rows: Rows) -> Array:
        """Return the new keys (m, d) of rows (m,). A new key must be stored for each row."""
        located = self._store.require(rows.tolist())
        keys: Array = located.snapshot.keys_at(located.snapshot.positions(located.rows)).numpy()
        return keys

    def close(self) -> None:
        """Close the files, for another run to resume. Errors are ignored: every `put` is on disk already."""
        with contextlib.suppress(OSError, SoftDBError, apsw.Error):
            self._store.close()

    def discard(self) -> None:
        """Close and remove the files."""
        self.close()
        if self._folder is not None:
            remove_database(self._folder)
