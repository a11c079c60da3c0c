"""Every intact record of a damaged database, in a new one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zlib import crc32

import apsw
import numpy as np

from softdb import check
from softdb.check import Array, Id, Schema
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, NotADatabase, SoftDBError, WriteFailed
from softdb.salvaging.placing import ColumnSpec, at_once, columns, file_of, place, read_slots
from softdb.salvaging.remains import Remains
from softdb.salvaging.settings import schema_of
from softdb.salvaging.sifting import sift
from softdb.store import committed, files
from softdb.store.append import Batch
from softdb.store.store import Store

LISTED = 1000  # lost records that a report names
BYTES = 1 << 26  # of texts that are copied at once


def salvage(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dim: int | None = None,
    value_dim: int | None = None,
    num_classes: int | None = None,
    dtype: Literal["float32", "float16"] | None = None,
    metric: Literal["dot", "cosine", "l2"] | None = None,
) -> dict[str, Any]:
    """Copy every intact record of a damaged database into a new one, and say what was lost.

        report = softdb.salvage("memories", "memories-saved")

    A record is intact where its payload, text, key and value give the checksums that were stored with it. Nothing
    else is copied, and nothing is guessed: where its id differs between the table of records and the index of ids, a
    record is left out. The damaged database is only read, and without SQLite: nothing in it is run. Declared fields
    are copied; indexes of vectors are to be built anew.

    Args:
        path: the damaged database. Nobody may be writing to it.
        destination: a directory that does not exist or is empty.
        dim, value_dim, num_classes, dtype, metric: what the catalogue has lost of its settings; widths and types are
            read from the column files, `metric` and `num_classes` are nowhere else.

    Returns `records` (how many are saved), `lost_records` and, of the first 1000 of these, `lost`: row, id (None where
    it is not known) and why; `unconfirmed_records` and `unconfirmed`: ids of records that are saved, but whose id was
    not found in the index, which is damaged, or that are marked as deleted though the index has them; `notes`.

    Cost: columns are read twice, what is saved is written once; about a minute per million records.

    Raises:
        NotADatabase: there is no catalogue; what can be done instead is said.
        CorruptionError: nothing of the catalogue's records can be found.
        BadInput: the destination is taken, or settings are lost that the words do not give.
        DatabaseLocked: another process writes to the database.
        WriteFailed: the disk refused; nothing is left at the destination.
    """
    try:
        source, target = (check.folder(place, "path", "the path of a directory") for place in (path, destination))
        words = {"dim": dim, "value_dim": value_dim, "num_classes": num_classes, "dtype": dtype, "metric": metric}
        return _salvage(source, target, words)
    except SoftDBError as error:
        error.args = (f"salvage: {error.args[0]}", *error.args[1:])
        raise


def _salvage(path: Path, destination: Path, words: dict[str, Any]) -> dict[str, Any]:
    if not path.is_dir():
        raise NotADatabase(f"{path} is no directory; a database is one")
    _require_free(path, destination)
    with _unwritten(path), contextlib.closing(Remains(path / "catalog.sqlite")) as remains:
        if not remains.found:
            raise CorruptionError(
                f"{path}/catalog.sqlite holds no records that can be found: it is destroyed, or another program's; "
                "restore it from a copy. The vectors alone are in keys-*.npy: numpy.load reads them"
            )
        notes = _missing(remains, path)
        schema = schema_of(remains, path, words, notes)
        try:
            with files.building(destination, "catalog.sqlite") as fresh, files.aside(destination) as scratch:
                report = _Salvage(remains, path, fresh, schema, notes).run(scratch / "scratch.sqlite")
        except (OSError, apsw.Error) as error:
            raise WriteFailed(f"{destination} cannot be written ({error}); make room, or choose another") from error
    return {"path": str(destination), **report}


def _require_free(path: Path, destination: Path) -> None:
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise BadInput(f"destination {str(destination)!r} is taken; expected a directory that is new or empty")
    if destination.resolve().is_relative_to(path.resolve()):
        raise BadInput(f"destination {str(destination)!r} lies in the database itself; choose one outside")


@contextlib.contextmanager
def _unwritten(path: Path) -> Iterator[None]:
    """While nobody writes. The lock is taken without writing to its file."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            lock = opened.enter_context(files.open_regular(path / "lock"))
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DatabaseLocked(f"another process writes to {path}; close it there first") from None
        yield


def _missing(remains: Remains, path: Path) -> list[str]:
    """Commits that are gone with the write-ahead log."""
    acknowledged, state = -1, remains.state()
    with contextlib.suppress(OSError):
        acknowledged = committed.last(path)
    if state is not None and state.generation < acknowledged:
        return [
            f"{acknowledged - state.generation} generations are missing, the last of {acknowledged}: they were in "
            "catalog.sqlite-wal, which is damaged, gone or put aside under another name; what they deleted is back"
        ]
    if remains.log_cut and not (remains.checkpointed and state is not None and state.generation == acknowledged):
        return ["catalog.sqlite-wal does not end in a commit; what came after is lost, what that deleted is back"]
    return []


# -- the records -----------------------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """A record whose checksums are known to be met in these slots."""

    row: int
    id: Id
    payload: str | None
    text: str | None
    keyless: bool
    keys: tuple[int, int, int]  # checksum, file, slot; where it has a key
    values: tuple[int, int, int]


class _Salvage:
    """One salvage under way."""

    def __init__(self, remains: Remains, path: Path, fresh: Path, schema: Schema, notes: list[str]) -> None:
        self.remains, self.path, self.fresh, self.schema = remains, path, fresh, schema
        self.columns = columns(schema)
        self.notes = notes

    def run(self, file: Path) -> dict[str, Any]:
        """All of it, by lists in a file of their own, which is of no use afterwards."""
        scratch = apsw.Connection(str(file))
        try:
            scratch.execute("PRAGMA journal_mode = OFF")
            scratch.execute("PRAGMA synchronous = OFF")
            sift(self.remains, scratch)
            with scratch:
                place(self.remains, self.path, self.columns, scratch)
                self._explain(scratch)
            store = Store(self.fresh, "rw", self.schema)
            try:
                name = self.remains.settings().get("encoder")
                if isinstance(name, str):
                    with contextlib.suppress(BadInput):
                        store.note_encoder(name)
                for some in self._placed(scratch):
                    self._copy(scratch, store, some)
                store.index_fields(self.remains.fields)
                store.index_text(self.remains.tokenizer)
            finally:
                store.close()
            files.sync(self.fresh / "catalog.sqlite")
            return self._report(scratch)
        finally:
            scratch.close()

    def _explain(self, scratch: apsw.Connection) -> None:
        """Say why records have no place."""
        if not self.schema.has_values:
            scratch.execute(
                "UPDATE found SET why = 'it has a value, and the settings know of none' "
                "WHERE why IS NULL AND value_crc IS NOT NULL"
            )
        for column, what in ((one.name, one.name[:-1]) for one in self.columns):
            scratch.execute(
                f"UPDATE found SET why = CASE WHEN {column}_file IS NULL THEN 'no column file holds its {what}' ELSE "
                f"printf('{column}-%08d.npy: its {what} is not there as it was written', {column}_file) END "
                f"WHERE why IS NULL AND {column}_slot IS NULL AND NOT keyless"
            )

    def _placed(self, scratch: apsw.Connection) -> Iterator[list[_Placed]]:
        """The records that are intact, in the order of rows, some at a time."""
        sql = """SELECT row, id, payload, text, keyless,
                        key_crc, keys_file, keys_slot, value_crc, values_file, values_slot FROM found
                 WHERE why IS NULL AND row > ? ORDER BY row LIMIT ?"""
        low, count = -1, at_once(sum(column.bytes for column in self.columns))
        while some := self._some(scratch.execute(sql, (low, count))):
            low = some[-1].row
            yield some

    def _some(self, found: Iterable[Any]) -> list[_Placed]:
        """The first of some records: as many as have texts of BYTES in all, or one more."""
        some, size = list[_Placed](), 0
        for row, one, payload, text, keyless, *places in found:
            some.append(_Placed(row, one, payload, text, bool(keyless), tuple(places[:3]), tuple(places[3:])))
            size += len(payload or "") + len(text or "")
            if size > BYTES:
                break
        return some

    def _copy(self, scratch: apsw.Connection, store: Store, some: list[_Placed]) -> None:
        """Read records, and write those that are still as they were a moment ago."""
        good, keyed = np.ones(len(some), np.bool_), np.array([not one.keyless for one in some], np.bool_)
        arrays = []
        for column in self.columns:
            array = np.zeros((len(some), *column.width), column.dtype)
            if keyed.any():
                array[keyed], good[keyed] = self._read(
                    column, [getattr(one, column.name) for one in some if not one.keyless], good[keyed]
                )
            arrays.append(array)
        because = "UPDATE found SET why = ? WHERE row = ?"
        changed = "its bytes changed while they were read"
        scratch.executemany(because, [(changed, some[i].row) for i in np.flatnonzero(~good)])
        if self.schema.num_classes is not None:
            known = (arrays[1] >= 0) & (arrays[1] < self.schema.num_classes)
            strange = f"its label is none of {self.schema.num_classes} classes"
            scratch.executemany(because, [(strange, some[i].row) for i in np.flatnonzero(good & ~known)])
            good &= known
        kept = [some[i] for i in np.flatnonzero(good)]
        if kept:
            keys, values = arrays[0][good], arrays[1][good] if len(arrays) > 1 else None
            own = None if keyed[good].all() else keyed[good]
            payloads, texts = [one.payload for one in kept], [one.text for one in kept]
            store.insert(Batch([one.id for one in kept], keys, values, payloads, texts, own))

    def _read(self, column: ColumnSpec, places: list[tuple[int, int, int]], before: Array) -> tuple[Array, Array]:
        """Numbers (m, …) of a column, and whether each gives its checksum, where all was right `before`."""
        found = [b""] * len(places)
        order = sorted(range(len(places)), key=lambda i: places[i][1:])
        slots = np.array([places[i][1:] for i in order])
        runs = np.split(np.array(order), np.flatnonzero((np.diff(slots, axis=0) != (0, 1)).any(1)) + 1)
        for run in runs:
            _, number, low = places[run[0]]
            with contextlib.suppress(OSError), files.open_regular(file_of(self.path, column.name, number)) as file:
                for i, one in zip(run, read_slots(file, column.bytes, low, low + len(run)), strict=True):
                    found[i] = one
        good = np.array([crc32(one) == crc for one, (crc, *_) in zip(found, places, strict=True)])
        whole = b"".join(one if right else bytes(column.bytes) for one, right in zip(found, good, strict=True))
        dtype = column.dtype.newbyteorder("<")
        return np.frombuffer(whole, dtype).reshape(-1, *column.width).astype(column.dtype), good & before

    def _report(self, scratch: apsw.Connection) -> dict[str, Any]:
        counts: list[Any] = scratch.execute(
            "SELECT count(*) FILTER (WHERE why IS NULL), count(why), count(*) FILTER (WHERE why IS NULL AND NOT sure), "
            "count(*) FILTER (WHERE keyless) FROM found"
        ).fetchall()
        saved, lost, unsure, keyless = counts[0]
        sql = "SELECT row, id, why FROM found WHERE {} ORDER BY row LIMIT ?"
        named = scratch.execute(sql.format("why IS NOT NULL"), (LISTED,)).fetchall()
        unconfirmed = scratch.execute(sql.format("why IS NULL AND NOT sure"), (LISTED,)).fetchall()
        more, pages = self.remains.expected() - (saved + lost - keyless), self.remains.damaged
        if more > 0:
            self.notes.append(f"{more} records more are lost, nothing of them is left in catalog.sqlite")
        elif more < 0:
            self.notes.append(f"by its counts {-more} of the records were deleted, or rows are lost that said so")
        if pages:
            shown = ", ".join(map(str, pages[:20])) + (", …" if len(pages) > 20 else "")
            self.notes.append(f"catalog.sqlite: damaged pages, of {self.remains.pages.size} bytes: {shown}")
        return {
            "records": saved,
            "lost_records": lost,
            "lost": [{"row": row, "id": one, "why": why} for row, one, why in named],
            "unconfirmed_records": unsure,
            "unconfirmed": [one for _, one, _ in unconfirmed],
            "notes": self.notes,
        }
