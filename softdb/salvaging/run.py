"""Copy every intact record of a damaged database into a new one."""

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
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, NotADatabase, WriteFailed, named
from softdb.salvaging.placing import ColumnSpec, at_once, place, read_slots
from softdb.salvaging.remains import Remains
from softdb.salvaging.settings import schema_of
from softdb.salvaging.sifting import sift
from softdb.store import committed, files
from softdb.store.append import Batch
from softdb.store.backup import require_free
from softdb.store.segments import file_of, shapes_of
from softdb.store.store import Store

LISTED = 1000  # maximum number of lost records, and of unconfirmed ones, that a report names
BYTES = 1 << 26  # maximum bytes of payloads and texts that are copied at once


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
    """Copy every intact record of a damaged database into a new one, and report the lost ones.

        report = softdb.salvage("memories", "memories-saved")

    A record is intact if its payload, text, key and value match the checksums that were stored with it. Nothing else
    is copied, and nothing is guessed: a record whose id differs between the table of records and the index of ids is
    left out. The damaged database is only read, and without SQLite: nothing in it is run. Declared fields and the text
    index are copied; indexes of vectors must be built again.

    Args:
        path: the damaged database. No process may be writing to it.
        destination: a directory that does not exist or is empty.
        dim, value_dim, num_classes, dtype, metric: settings that the catalogue has lost. Widths and types are read
            from the column files; `metric` and `num_classes` are stored nowhere else.

    Returns a dict: `records` and `lost_records` are the numbers of saved and lost records; `lost` has row, id (None if
    unknown) and why of the first 1000 lost ones. `unconfirmed_records` counts, and `unconfirmed` names, saved records
    whose id is missing in the damaged index, or that are marked as deleted though the index has them. `notes` lists
    other findings.

    Cost: columns are read twice, saved records are written once; about a minute per million records.

    Raises:
        NotADatabase: there is no catalogue.
        CorruptionError: the catalogue holds no records that can be found.
        BadInput: the destination is taken, or lost settings are not given.
        DatabaseLocked: another process writes to the database.
        WriteFailed: the disk refused a write; the destination was removed.
    """
    with named("salvage"):
        source, target = (check.folder(place, "path", "the path of a directory") for place in (path, destination))
        given = {"dim": dim, "value_dim": value_dim, "num_classes": num_classes, "dtype": dtype, "metric": metric}
        return _salvage(source, target, given)


def _salvage(path: Path, destination: Path, given: dict[str, Any]) -> dict[str, Any]:
    if not path.is_dir():
        raise NotADatabase(f"{path} is no directory; expected the directory of a database")
    require_free(destination, path, "destination")
    with _hold_off_writers(path), contextlib.closing(Remains(path / "catalog.sqlite")) as remains:
        if not remains.has_records:
            raise CorruptionError(
                f"{path}/catalog.sqlite holds no records that can be found: it is destroyed, or another program's; "
                "restore it from a copy. The vectors alone are in keys-*.npy: numpy.load reads them"
            )
        notes = _missing_commits(remains, path)
        schema = schema_of(remains, path, given, notes)
        try:
            with files.building(destination, "catalog.sqlite") as fresh, files.aside(destination) as scratch:
                report = _Salvage(remains, path, fresh, schema, notes).run(scratch / "scratch.sqlite")
        except (OSError, apsw.Error) as error:
            raise WriteFailed(f"{destination} cannot be written ({error}); make room or choose another path") from error
    return {"path": str(destination), **report}


@contextlib.contextmanager
def _hold_off_writers(path: Path) -> Iterator[None]:
    """Lock out writers during a block, without writing to the lock file. Raises DatabaseLocked."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            lock = opened.enter_context(files.open_regular(path / "lock"))
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DatabaseLocked(f"another process writes to {path}; close it there first") from None
        yield


def _missing_commits(remains: Remains, path: Path) -> list[str]:
    """Return a list with a note on commits that are lost with the write-ahead log; empty if none is."""
    acknowledged, state = -1, remains.state()
    with contextlib.suppress(OSError):
        acknowledged = committed.last(path)
    if state is not None and state.generation < acknowledged:
        return [
            f"{acknowledged - state.generation} generations are missing, the last of {acknowledged}: they were in "
            "catalog.sqlite-wal, which is damaged, gone or renamed; records that they deleted are back"
        ]
    if remains.log_cut and not (remains.checkpointed and state is not None and state.generation == acknowledged):
        return ["catalog.sqlite-wal does not end in a commit; later changes are lost, and their deletions undone"]
    return []


# -- the records -----------------------------------------------------------------------------------------------------


class _Placed(NamedTuple):
    """A record, and the slots that match its checksums."""

    row: int
    id: Id
    payload: str | None
    text: str | None
    keyless: bool
    keys: tuple[int, int, int]  # checksum, file, slot; all None if the record has no key
    values: tuple[int, int, int]  # checksum, file, slot of the value; all None without a value


class _Salvage:
    def __init__(self, remains: Remains, path: Path, fresh: Path, schema: Schema, notes: list[str]) -> None:
        self.remains, self.path, self.fresh, self.schema = remains, path, fresh, schema
        self.columns = [ColumnSpec(name, *shape) for name, shape in shapes_of(schema).items()]
        self.notes = notes

    def run(self, file: Path) -> dict[str, Any]:
        """Copy the records, and return the report; `file`: path for a temporary SQLite file that lists the records."""
        with contextlib.closing(apsw.Connection(str(file))) as scratch:
            scratch.execute("PRAGMA journal_mode = OFF")
            scratch.execute("PRAGMA synchronous = OFF")
            sift(self.remains, scratch)
            with scratch:
                place(self.remains, self.path, self.columns, scratch)
                self._explain(scratch)
            with contextlib.closing(Store(self.fresh, "rw", self.schema)) as store:
                name, fingerprint = (self.remains.settings().get(key) for key in ("encoder", "fingerprint"))
                if isinstance(name, str | None) and isinstance(fingerprint, str | None) and (name or fingerprint):
                    with contextlib.suppress(BadInput):
                        store.note_encoder(name, fingerprint)
                for chunk in self._intact_records(scratch):
                    self._copy(scratch, store, chunk)
                store.index_fields(self.remains.fields)
                store.index_text(self.remains.tokenizer)
            files.sync(self.fresh / "catalog.sqlite")
            return self._report(scratch)

    def _explain(self, scratch: apsw.Connection) -> None:
        """Write the reason of the loss (`why`) for each record whose vectors were not found."""
        if not self.schema.has_values:
            scratch.execute(
                "UPDATE records SET why = 'it has a value, but the settings state no values' "
                "WHERE why IS NULL AND value_crc IS NOT NULL"
            )
        for column, noun in ((column.name, column.name[:-1]) for column in self.columns):
            scratch.execute(
                f"UPDATE records SET why = CASE WHEN {column}_file IS NULL THEN 'no column file holds its {noun}' ELSE "
                f"printf('{column}-%08d.npy: its {noun} is not there as it was written', {column}_file) END "
                f"WHERE why IS NULL AND {column}_slot IS NULL AND NOT keyless"
            )

    def _intact_records(self, scratch: apsw.Connection) -> Iterator[list[_Placed]]:
        """Yield chunks of the intact records, in the order of rows."""
        sql = """SELECT row, id, payload, text, keyless,
                        key_crc, keys_file, keys_slot, value_crc, values_file, values_slot FROM records
                 WHERE why IS NULL AND row > ? ORDER BY row LIMIT ?"""
        low, count = -1, at_once(sum(column.bytes for column in self.columns))
        while chunk := self._chunk(scratch.execute(sql, (low, count))):
            low = chunk[-1].row
            yield chunk

    def _chunk(self, rows: Iterable[Any]) -> list[_Placed]:
        """Return the first records of `rows`, until their payloads and texts exceed BYTES in total."""
        chunk, size = list[_Placed](), 0
        for row, name, payload, text, keyless, *places in rows:
            chunk.append(_Placed(row, name, payload, text, bool(keyless), tuple(places[:3]), tuple(places[3:])))
            size += len(payload or "") + len(text or "")
            if size > BYTES:
                break
        return chunk

    def _copy(self, scratch: apsw.Connection, store: Store, chunk: list[_Placed]) -> None:
        """Read the vectors of records, and write the records whose checksums still match to the new database."""
        good, keyed = np.ones(len(chunk), np.bool_), np.array([not record.keyless for record in chunk], np.bool_)
        arrays = []
        for column in self.columns:
            array = np.zeros((len(chunk), *column.width), column.dtype)
            if keyed.any():
                array[keyed], good[keyed] = self._read(
                    column, [getattr(record, column.name) for record in chunk if not record.keyless], good[keyed]
                )
            arrays.append(array)
        because = "UPDATE records SET why = ? WHERE row = ?"
        changed = "its bytes changed while they were read"
        scratch.executemany(because, [(changed, chunk[i].row) for i in np.flatnonzero(~good)])
        if self.schema.num_classes is not None:
            in_range = (arrays[1] >= 0) & (arrays[1] < self.schema.num_classes)
            outside = f"its label is not from 0 to {self.schema.num_classes - 1}"
            scratch.executemany(because, [(outside, chunk[i].row) for i in np.flatnonzero(good & ~in_range)])
            good &= in_range
        intact = [chunk[i] for i in np.flatnonzero(good)]
        if intact:
            keys, values = arrays[0][good], arrays[1][good] if len(arrays) > 1 else None
            own = None if keyed[good].all() else keyed[good]
            payloads, texts = [record.payload for record in intact], [record.text for record in intact]
            store.insert(Batch([record.id for record in intact], keys, values, payloads, texts, own))

    def _read(self, column: ColumnSpec, places: list[tuple[int, int, int]], before: Array) -> tuple[Array, Array]:
        """Return vectors (m, …) of a column, and a mask (m,): True if `before` is True and the checksum matches."""
        data = [b""] * len(places)
        order = sorted(range(len(places)), key=lambda i: places[i][1:])
        slots = np.array([places[i][1:] for i in order])
        runs = np.split(np.array(order), np.flatnonzero((np.diff(slots, axis=0) != (0, 1)).any(1)) + 1)
        for run in runs:
            _, number, low = places[run[0]]
            with contextlib.suppress(OSError), files.open_regular(file_of(self.path, column.name, number)) as file:
                for i, slot in zip(run, read_slots(file, column.bytes, low, low + len(run)), strict=True):
                    data[i] = slot
        good = np.array([crc32(slot) == crc for slot, (crc, *_) in zip(data, places, strict=True)])
        joined = b"".join(slot if right else bytes(column.bytes) for slot, right in zip(data, good, strict=True))
        dtype = column.dtype.newbyteorder("<")
        return np.frombuffer(joined, dtype).reshape(-1, *column.width).astype(column.dtype), good & before

    def _report(self, scratch: apsw.Connection) -> dict[str, Any]:
        counts: list[Any] = scratch.execute(
            "SELECT count(*) FILTER (WHERE why IS NULL), count(why), "
            "count(*) FILTER (WHERE why IS NULL AND NOT confirmed), count(*) FILTER (WHERE keyless) FROM records"
        ).fetchall()
        saved, lost, unconfirmed, keyless = counts[0]
        sql = "SELECT row, id, why FROM records WHERE {} ORDER BY row LIMIT ?"
        lost_records = scratch.execute(sql.format("why IS NOT NULL"), (LISTED,)).fetchall()
        unconfirmed_records = scratch.execute(sql.format("why IS NULL AND NOT confirmed"), (LISTED,)).fetchall()
        more, pages = self.remains.expected() - (saved + lost - keyless), self.remains.damaged
        if more > 0:
            self.notes.append(f"{more} more records are lost, of which catalog.sqlite holds no trace")
        elif more < 0:
            self.notes.append(f"catalog.sqlite counts {-more} fewer records; some saved ones may have been deleted")
        if pages:
            shown = ", ".join(map(str, pages[:20])) + (", …" if len(pages) > 20 else "")
            self.notes.append(f"catalog.sqlite: damaged pages, of {self.remains.pages.size} bytes: {shown}")
        return {
            "records": saved,
            "lost_records": lost,
            "lost": [{"row": row, "id": name, "why": why} for row, name, why in lost_records],
            "unconfirmed_records": unconfirmed,
            "unconfirmed": [name for _, name, _ in unconfirmed_records],
            "notes": self.notes,
        }
