"""Changing the model: every key made anew by another encoder, from the records' texts."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from softdb import check
from softdb.answers import Record, parsed
from softdb.check import Array, Schema
from softdb.database.database_core import DatabaseCore
from softdb.database.embedding import telling
from softdb.encoders import name_of
from softdb.errors import BadInput, SoftDBError, StaleRead, WriteFailed
from softdb.index.choose import Progress
from softdb.reports import ReembedReport
from softdb.store import Snapshot, switching
from softdb.store.entry import RecordEntry
from softdb.store.gathered import Gathered, digest

TextOf: TypeAlias = "str | Callable[[Record], str | None] | None"

READ = 4096  # records whose texts are looked at together
PASSES = 10  # over the records; then what is written meanwhile is embedded with the switch

Rows = NDArray[np.int64]


def reembed(
    core: DatabaseCore,
    encoder: check.Encoder,
    field: TextOf,
    missing: str | None,
    batch_size: int,
    progress: Progress | bool | None,
) -> ReembedReport:
    """Make every key anew with another encoder; see `SoftDB.reembed`."""
    core.store.require_writable()
    if not callable(encoder):
        raise BadInput(f"encoder is {check.shown(encoder)}; expected a callable, texts -> (n, d)")
    require_field(field)
    if not (missing is None or isinstance(missing, str)):
        raise BadInput(f"missing is {check.shown(missing)}; expected a text, or None")
    size = check.integer(batch_size, "batch_size")
    with telling(progress) as say:
        return _Run(core, encoder, field, missing, size, say).report()


def texts_at(core: DatabaseCore, rows: Rows, field: TextOf = None) -> list[str]:  # (m,) -> m
    """Return the texts of records as `reembed` takes them. Raises BadInput for none, StaleRead for a deleted one."""
    entries = core.store.read(rows, texts=True)
    if gone := [row for row in rows.tolist() if row not in entries]:
        raise StaleRead(f"{len(gone)} of {len(rows)} records were deleted or replaced during the call; call again")
    records = [entries[row] for row in rows.tolist()]
    texts = _texts_of(core, core.store.snapshot, records, field)
    return [_require_text(*pair, field) for pair in zip(records, texts, strict=True)]


def require_field(field: object) -> None:
    """Raises BadInput for what is no `TextOf`."""
    if not (callable(field) or isinstance(field, str | None)):
        raise BadInput(f"field is {check.shown(field)}; expected a field's name, or a callable, Record -> text")


class _Run:
    """One change of the encoder."""

    def __init__(
        self, core: DatabaseCore, encoder: check.Encoder, field: TextOf, missing: str | None, size: int, say: Progress
    ) -> None:
        self.core, self.store = core, core.store
        self.encoder, self.name, self.field, self.missing = encoder, name_of(encoder), field, missing
        self.size, self.say = size, say
        self.progress = switching.Progress()
        self.present = self.embedded = 0  # rows with a new key; those of them that this run has encoded
        self.total = self.store.snapshot.records

    def report(self) -> ReembedReport:
        """Do it, and say what was done."""
        begin = time.perf_counter()
        switching.require_sound_values(self.store)
        self.schema: Schema = dataclasses.replace(self.store.schema, dim=self._width(self._require_texts()))
        self.gathered = Gathered(self.store, self.schema, self.name)
        with contextlib.ExitStack() as open_until:
            open_until.callback(self.gathered.close)
            self._gather_all()
            self.say("switch", self.total, self.total)
            switching.Switch(
                self.store, self.schema, self.name, self.gathered, self.progress, self.gather, self._announce
            ).run()
        with contextlib.suppress(OSError, SoftDBError):  # it has happened; the next writer removes what is left
            self.gathered.discard()
        self.core.finder.forget()
        count, generation = self.store.snapshot.count, self.store.keyed.since
        seconds = time.perf_counter() - begin
        return ReembedReport(count, self.embedded, self.schema.dim, self.name, generation, seconds)

    def _announce(self, generation: int) -> None:
        self.core.encoders[generation] = self.encoder

    # -- texts -----------------------------------------------------------------------------------------------------

    def _require_texts(self) -> str | None:
        """Some text of a record, None where there are none. Raises BadInput where one has no text."""
        some, (snapshot, rows) = None, switching.pending(self.store, self.progress)
        for low in range(0, len(rows), READ):
            for text in self._texts(snapshot, rows[low : low + READ])[1]:
                some = some or text
        return some

    def _texts(self, snapshot: Snapshot, rows: Rows) -> tuple[Rows, list[str | None], Rows]:
        """Those of rows (m,) that are still there, their texts, and the checksums (m, 2) of payloads and texts.

        The text is None for a record without a key that stays so.
        """
        found = self.store.read(rows, texts=True)
        kept = rows[[row in found for row in rows.tolist()]]
        records = [found[row] for row in kept.tolist()]
        texts = _texts_of(self.core, snapshot, records, self.field)
        crcs = [
            [-1 if part is None else crc32(part.encode()) for part in (record.payload, record.text)]
            for record in records
        ]
        keyed = snapshot.keyed(kept).tolist()
        checked = [self._text(*one) for one in zip(records, texts, keyed, strict=True)]
        return kept, checked, np.array(crcs, np.int64).reshape(-1, 2)

    def _text(self, record: RecordEntry, text: object, keyed: bool) -> str | None:
        if not keyed and self.store.schema.has_values:
            return None
        if text is None and (self.missing is not None or not keyed):
            return self.missing
        return _require_text(record, text, self.field, ", or give a text for such records with missing=")

    # -- keys ------------------------------------------------------------------------------------------------------

    def _width(self, text: str | None) -> int:
        """d of the new keys, as the encoder says it, or as it gives it."""
        said = check.attribute(self.encoder, "dim")
        if said is not None:
            return check.integer(said, "the encoder's dim", 1, check.MAX_DIM)
        return int(self._matrix([text or "text"], None).shape[1])

    def _matrix(self, texts: list[str], width: int | None) -> Array:
        """The vectors (n, d) of texts, as they are stored. Raises BadInput where they are none."""
        vectors: Any = check.encoded(texts, "texts", lambda: self.encoder)
        try:
            found = tuple(np.shape(vectors))
        except ValueError:  # ragged lists
            found = ()
        if len(found) != 2 or (width is not None and found[1] != width) or not found[1]:
            raise BadInput(
                f"the encoder gave shape {found} for {len(texts)} texts; expected ({len(texts)}, {width or 'd'})"
            )
        return check.matrix(vectors, "the encoder's vectors", int(found[1]), self.store.schema.dtype)

    def _gather_all(self) -> None:
        """Gather keys until what others write meanwhile is less than a batch."""
        for _ in range(PASSES):
            snapshot, rows = switching.pending(self.store, self.progress)
            self.gather(snapshot, rows)
            if len(rows) <= self.size:
                return

    def gather(self, snapshot: Snapshot, rows: Rows) -> None:
        """Gather the keys of rows (m,) of a generation, those that are not there."""
        for low in range(0, len(rows), READ):
            mine, texts, crcs = self._texts(snapshot, rows[low : low + READ])
            if len(mine):
                own = np.array([text is not None for text in texts], np.bool_)
                self._gather_some(mine[own], [text for text in texts if text is not None])
                if not own.all():
                    self._tell(int(np.count_nonzero(~own)))
                self.progress.add(mine, crcs, own)
        self.progress.generation = snapshot.generation

    def _gather_some(self, rows: Rows, texts: list[str]) -> None:
        digests = list(map(digest, texts))
        missing = np.flatnonzero(self.gathered.missing(rows, digests))
        self._tell(len(rows) - len(missing))
        for start in range(0, len(missing), self.size):
            some = missing[start : start + self.size]
            try:
                keys = self._matrix([texts[i] for i in some], self.schema.dim)
                self.gathered.put(rows[some], keys, [digests[i] for i in some])
            except (BadInput, WriteFailed) as error:
                error.args = (
                    f"{error.args[0]}; {self.present:,} of {self.total:,} records have their new keys, the database is "
                    "as it was: mend that, then reembed goes on",
                    *error.args[1:],
                )
                raise
            self.embedded += len(some)
            self._tell(len(some))

    def _tell(self, more: int) -> None:
        self.present += more
        self.total = max(self.total, self.present)
        self.say("embed", self.present, self.total)


def _texts_of(core: DatabaseCore, snapshot: Snapshot, records: list[RecordEntry], field: TextOf) -> list[Any]:
    """The texts of m records, or whatever stands in their place."""
    if callable(field):
        return [field(record) for record in core.records(snapshot, records)]
    name = "text" if field is None else field
    texts = [one.get(name) if isinstance(one, dict) else None for one in parsed([one.payload for one in records])]
    if field is not None:
        return texts
    return [text if one.text is None else one.text for one, text in zip(records, texts, strict=True)]


def _require_text(record: RecordEntry, text: object, field: TextOf, advice: str = "") -> str:
    if isinstance(text, str):
        return text
    where = "the callable gave" if callable(field) else f"its field {check.shown(field or 'text')} is"
    raise BadInput(
        f"record {check.shown(record.id)} has no text: {where} {check.shown(text)}; name the field of the payload "
        f"that has it with field={advice}"
    )
