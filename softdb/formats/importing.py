"""Import: batches of records into a database, a commit each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.database import SoftDB
from softdb.errors import BadInput, DuplicateId, SoftDBError
from softdb.formats.recordfiles import read_records
from softdb.formats.rows import OnError, Rows

__all__ = ["import_records"]


def import_records(
    db: SoftDB,
    source: Any,
    *,
    upsert: bool = False,
    resume: bool = False,
    progress: Callable[[Rows], None] | None = None,
    on_error: OnError | None = None,
) -> int:
    """Insert (or upsert) records, a commit a batch, and return how many.

        import_records(db, "records.parquet")
        import_records(db, frame)                           # of pandas, polars, pyarrow
        import_records(db, read_records(path, fields=…))    # with options

    `resume` passes over those that an import which was cut short has brought in: their ids are stored, with the same
    payload, value and key, or the same text. One that is stored but differs is refused, or with `upsert` replaced.

    A record that cannot be inserted is named with its place in an error, and those before it are in the database; the
    error says how many. With `on_error`, that is called with the error, and the import goes on without that record.

    Texts are encoded by the database's encoder. What was exported from a database of another metric is refused: the
    nearest would be others.
    """
    is_rows = isinstance(source, Iterator) and not hasattr(source, "__arrow_c_stream__")
    batches: Iterator[Rows] = source if is_rows else read_records(source, on_error=on_error)
    done, write = 0, db.upsert if upsert else db.insert

    def put(rows: Rows) -> None:
        fresh = _missing(db, rows, upsert) if resume else rows
        if len(fresh):
            write(fresh.ids, fresh.keys, fresh.values, fresh.payloads, texts=fresh.texts)

    try:
        for rows in batches:
            if rows.header is not None and rows.header.metric != db.metric:
                raise BadInput(
                    f"{rows.place}: made for databases that compare by {rows.header.metric}, this one does by "
                    f"{db.metric}; import it into one that is opened with metric={rows.header.metric!r}"
                )
            _require_same_encoder(db, rows)
            for count in _inserted(put, rows, on_error):
                done += count
            if progress is not None:
                progress(rows)
    except SoftDBError as error:
        remedy = ", and resume goes on with an import that was cut short" if isinstance(error, DuplicateId) else ""
        message = f"{error.args[0]}{remedy}; the {done} records before are in the database"
        error.args = (message, *error.args[1:])
        raise
    return done


def _inserted(put: Callable[[Rows], None], rows: Rows, on_error: OnError | None) -> Iterator[int]:
    """Insert records, and tell how many. Where one cannot be, its place is found by halves; those before it go in."""
    try:
        put(rows)
        yield len(rows)
        return
    except BadInput as error:
        if len(rows) == 1:
            error.args = (f"{rows.place}: {error.args[0]}", *error.args[1:])
            if on_error is None:
                raise
            on_error(error)
            return
    half = len(rows) // 2
    yield from _inserted(put, rows.some(list(range(half))), on_error)
    yield from _inserted(put, rows.some(list(range(half, len(rows)))), on_error)


def _missing(db: SoftDB, rows: Rows, upsert: bool) -> Rows:
    """The records that the database lacks, or with `upsert` has otherwise. Raises BadInput where it has one so."""
    stored = np.flatnonzero(db.core.stored(rows.ids))
    if not len(stored):
        return rows
    differ = stored[_differ(db, rows.some(stored.tolist()))]
    if len(differ) and not upsert:
        raise BadInput(
            f"id {check.shown(rows.ids[differ[0]])} is stored already, and not as it stands there: this is not the "
            "import that was cut short, or the record has changed since; upsert replaces"
        )
    same = set(stored.tolist()) - set(differ.tolist())
    return rows.some([i for i in range(len(rows)) if i not in same])


def _differ(db: SoftDB, rows: Rows) -> NDArray[np.bool_]:
    """Mask of the records, all of them stored, that are stored otherwise."""
    stored, schema = db.get(rows.ids), db.core.schema
    texts = check.payloads(rows.payloads, len(rows))
    pairs = zip(texts, stored.payload_texts, rows.texts, stored.texts, strict=True)
    differ = np.array([payload != own or text != own_text for payload, own, text, own_text in pairs], np.bool_)
    keyed = np.array([key is not None for key in rows.keys])
    differ |= keyed != stored.keyed.numpy()
    both = np.flatnonzero(keyed & stored.keyed.numpy())
    rows = rows.some(both.tolist())
    if len(both) and not isinstance(rows.keys[0], str):  # else they are made of the texts
        keys = check.matrix(rows.keys, "keys", schema.dim, schema.dtype)
        differ[both] |= (keys != stored.keys.numpy()[both]).any(1)
    if len(both) and (values := check.values(rows.values, schema, len(both))) is not None:
        differ[both] |= (values != np.asarray(stored.values)[both]).reshape(len(both), -1).any(1)
    return differ


def _require_same_encoder(db: SoftDB, rows: Rows) -> None:
    """BadInput where vectors of one encoder would lie beside those of another."""
    theirs, ours = None if rows.header is None else rows.header.encoder, db.encoder_name
    if None not in (theirs, ours) and theirs != ours and not isinstance(rows.keys[0], str):
        raise BadInput(
            f"{rows.path.name}: its keys were made by the encoder {theirs!r}, this one's by {ours!r}; import it into "
            "one like it, or embed its texts anew: Fields(text='text'), or --text text on a shell"
        )
