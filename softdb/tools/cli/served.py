"""A database that stays open, read-only, while a language model or a page queries it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from softdb.errors import BadInput, MissingDependency
from softdb.tools.cli.places import chosen, described, named_encoder, opened

if TYPE_CHECKING:
    from softdb.database import SoftDB

HOST, PORT = "127.0.0.1", 8730  # address of the explorer


class Served:
    """The database at a path, kept open for reading; or, without a path, an open database that is given."""

    def __init__(self, path: Path | None, encoder: str | None = None, db: SoftDB | None = None) -> None:
        self._path, self.encoder, self._lock = path, encoder, threading.Lock()
        if path is not None:
            self._open(path)
        elif db is not None:
            self._db, self.takes_text = db, True

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _open(self, path: Path) -> None:
        try:
            self._db, self.takes_text = self._opened(path), True
        except (BadInput, MissingDependency):  # without a known, installed encoder, or one that --encoder must name
            if self.encoder is not None:
                raise
            self._db, self.takes_text = opened(path), False
        self._file = _identity(path)

    def _opened(self, path: Path) -> SoftDB:
        """Open the database with its encoder. The demo's loads a model only if `--encoder demo` names it."""
        import softdb
        from softdb.data.encoder import DEMO, demo_encoder

        dim, stored = described(path)
        name = chosen(path, stored, self.encoder)
        encoder = demo_encoder(path, self.encoder is not None) if name == DEMO else named_encoder(name, dim, path)
        return softdb.open(path, mode="r", encoder=encoder)

    def newest(self) -> SoftDB:
        """Return the database at its newest commit; open the path again if another database is there now.

        Raises the errors of `softdb.open`.
        """
        if self._path is None:
            return self._db
        with self._lock:
            try:
                same = _identity(self._path) == self._file
            except OSError:
                same = False
            if same and not self._db.closed:
                self._db.refresh()
            else:
                self._db.close()
                self._open(self._path)
            return self._db


def _identity(path: Path) -> tuple[int, int]:
    status = (path / "catalog.sqlite").stat()
    return status.st_dev, status.st_ino
