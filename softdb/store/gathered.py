"""New keys on their way: a database within the database's directory, so that a run that was cut short goes on.

It lies in the folder `reembed-G`, G the generation that last made all keys anew: once such a commit has happened, the
next writer knows by the name that the folder is left over. Its ids are rows, its payloads digests of the texts: a key
counts for a record only while the record's text gives the digest, whatever became of either in between.
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
from softdb.store.soundness import damaged, damaged_texts
from softdb.store.store import Store

Rows = NDArray[np.int64]


def digest(text: str) -> str:
    """Digest of a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Gathered:
    """The new keys of rows."""

    def __init__(self, store: Store, schema: Schema, encoder: str | None) -> None:
        """Remains of a run by the same encoder, or nothing yet. One without a name may be any, and begins anew.

        Raises DatabaseLocked where another run goes on, BadInput where others' files lie in its folder, WriteFailed.
        """
        only_keys = dataclasses.replace(schema, value_dim=None, num_classes=None)
        self._folder = None if store.path is None else store.path / f"reembed-{store.keyed.since}"
        try:
            self._store = self._found(Keyed(only_keys, encoder, 0)) or self._made(only_keys, encoder)
        except (OSError, apsw.Error) as error:
            why = f"{type(error).__name__}: {error}"
            raise WriteFailed(
                f"the disk refused the folder of the new keys ({why}); nothing has changed: mend the cause"
            ) from error

    def _made(self, schema: Schema, encoder: str | None) -> Store:
        store = Store(self._folder, "rw", schema)
        with contextlib.ExitStack() as opened:
            opened.callback(store.close)
            if encoder is not None:
                store.note_encoder(encoder)
            opened.pop_all()
        return store

    def _found(self, made: Keyed) -> Store | None:
        """Return the remains of a run, if they are sound and of this one; else remove them."""
        if self._folder is None or not (self._folder.exists() or self._folder.is_symlink()):
            return None
        require_ours(self._folder)
        with contextlib.suppress(CorruptionError, NotADatabase, FormatTooNew), contextlib.ExitStack() as opened:
            store = Store(self._folder, "rw", None)
            opened.callback(store.close)
            if (
                made.encoder is not None
                and store.keyed == made
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
        """Of which rows (m,) with texts of these digests there is no key yet."""
        if not len(self):
            return np.ones(len(rows), np.bool_)
        stored = self._store.locate(rows.tolist(), whole=True).payloads
        return np.array([text != json.dumps(one) for text, one in zip(stored, digests, strict=True)], np.bool_)

    def put(self, rows: Rows, keys: Array, digests: Iterable[str]) -> None:
        """Keep keys (m, d); on disk when this returns. Raises WriteFailed."""
        self._store.upsert(Batch(rows.tolist(), keys, None, [json.dumps(one) for one in digests]))

    def keys(self, rows: Rows) -> Array:
        """The keys (m, d) of rows that are all there."""
        located = self._store.require(rows.tolist())
        found: Array = located.snapshot.keys_at(located.snapshot.positions(located.rows)).numpy()
        return found

    def close(self) -> None:
        """Keep what there is for another run. What fails now has been on disk before, or does not matter."""
        with contextlib.suppress(OSError, SoftDBError, apsw.Error):
            self._store.close()

    def discard(self) -> None:
        """Remove it: it has served."""
        self.close()
        if self._folder is not None:
            remove_database(self._folder)
