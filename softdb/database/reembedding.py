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
from softdb.database.embedding import telling
from softdb.database.handle import verb
from softdb.database.records import RecordVerbs
from softdb.encoders import name_of
from softdb.errors import BadInput, SoftDBError, StaleRead, WriteFailed
from softdb.index.choose import Progress
from softdb.reports import ReembedReport
from softdb.store import Snapshot, reembed
from softdb.store.entry import RecordEntry
from softdb.store.gathered import Gathered, digest

__all__ = ["ReembedVerbs", "TextOf"]

TextOf: TypeAlias = "str | Callable[[Record], str | None] | None"

READ = 4096  # records whose texts are looked at together
PASSES = 10  # over the records; then what is written meanwhile is embedded with the switch

Rows = NDArray[np.int64]


class ReembedVerbs(RecordVerbs):
    """How a database changes its encoder."""

    @verb
    def reembed(
        self,
        encoder: check.Encoder,
        *,
        field: TextOf = None,
        missing: str | None = None,
        batch_size: int = 256,
        progress: Progress | bool | None = None,
    ) -> ReembedReport:
        """Make every key anew with another encoder, also of another width; everything else of a record stays.

        Until all of them are there, every answer is by the old keys; then one commit changes keys, width and encoder.
        New keys are kept on disk batch by batch: where the process is killed, the encoder fails or the disk is full,
        nothing has changed, and calling it again with an encoder of the same name goes on where it stopped. Others read
        and write on meanwhile; what they write is embedded, too. Readers see the new keys after `refresh()`.

            db.reembed(SentenceEncoder("all-MiniLM-L6-v2"), progress=True)

        Args:
            encoder: n texts -> (n, d). One without an attribute `name` may be any, so a run by it always begins anew.
            field: None: the text of a record, or, where it has none, the field "text" of its payload. Or the name of a
                field of the payload, or a callable that gives the text of a `Record`.
            missing: what is embedded of a record that has no text; None: that is an error, before anything is embedded.
                A record without a key gets one, if it has a text; in a database with values it stays without.
            batch_size: texts that are given to the encoder at once, and kept with one sync.
            progress: called with what is being done, how much of it is done, and the whole; True draws a bar.

        Cost: what the encoder takes; 2 syncs a batch; while it goes on, room for the new keys twice, for the values
        once. The commit rewrites the catalogue's records; other operations wait for it. The index is dropped, it held
        the old keys: `build_index()` makes another.

        Raises:
            BadInput: a record has no text, or the encoder gives what is no vector.
            DatabaseLocked: another run goes on.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
            CorruptionError: a value, which would be carried over, differs from its checksum.
        """
        self._store.require_writable()
        if not callable(encoder):
            raise BadInput(f"encoder is {check.shown(encoder)}; expected a callable, texts -> (n, d)")
        self.require_field(field)
        if not (missing is None or isinstance(missing, str)):
            raise BadInput(f"missing is {check.shown(missing)}; expected a text, or None")
        size = check.integer(batch_size, "batch_size")
        with telling(progress) as say:
            return _Run(self, encoder, field, missing, size, say).report()

    def texts_at(self, rows: Rows, field: TextOf = None) -> list[str]:  # (m,) -> m
        """The texts of records, as `reembed` takes them. Raises BadInput for one without, StaleRead for one deleted."""
        found = self._store.read(rows, texts=True)
        if gone := [row for row in rows.tolist() if row not in found]:
            raise StaleRead(f"{len(gone)} of {len(rows)} records were deleted or replaced during the call; call again")
        records = [found[row] for row in rows.tolist()]
        texts = _texts_of(self, self._store.snapshot, records, field)
        return [_require_text(*one, field) for one in zip(records, texts, strict=True)]

    def require_field(self, field: object) -> None:
        """Raises BadInput for what is no `TextOf`."""
        if not (callable(field) or isinstance(field, str | None)):
            raise BadInput(f"field is {check.shown(field)}; expected a field's name, or a callable, Record -> text")


class _Run:
    """One change of the encoder."""

    def __init__(
        self, db: ReembedVerbs, encoder: check.Encoder, field: TextOf, missing: str | None, size: int, say: Progress
    ) -> None:
        self.db, self.store = db, db._store
        self.encoder, self.name, self.field, self.missing = encoder, name_of(encoder), field, missing
        self.size, self.say = size, say
        self.progress = reembed.Progress()
        self.present = self.embedded = 0  # rows with a new key; those of them that this run has encoded
        self.total = self.store.snapshot.records

    def report(self) -> ReembedReport:
        """Do it, and say what was done."""
        begin = time.perf_counter()
        reembed.require_sound_values(self.store)
        self.schema: Schema = dataclasses.replace(self.store.schema, dim=self._width(self._require_texts()))
        self.gathered = Gathered(self.store, self.schema, self.name)
        with contextlib.ExitStack() as open_until:
            open_until.callback(self.gathered.close)
            self._gather_all()
            self.say("switch", self.total, self.total)
            reembed.Switch(
                self.store, self.schema, self.name, self.gathered, self.progress, self.gather, self._announce
            ).run()
        with contextlib.suppress(OSError, SoftDBError):  # it has happened; the next writer removes what is left
            self.gathered.discard()
        self.db.finder.forget()
        count, generation = self.store.snapshot.count, self.store.keyed.since
        seconds = time.perf_counter() - begin
        return ReembedReport(count, self.embedded, self.schema.dim, self.name, generation, seconds)

    def _announce(self, generation: int) -> None:
        self.db._encoders[generation] = self.encoder

    # -- texts -----------------------------------------------------------------------------------------------------

    def _require_texts(self) -> str | None:
        """Some text of a record, None where there are none. Raises BadInput where one has no text."""
        some, (snapshot, rows) = None, reembed.pending(self.store, self.progress)
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
        texts = _texts_of(self.db, snapshot, records, self.field)
        crcs = [[-1 if part is None else crc32(part.encode()) for part in (one.payload, one.text)] for one in records]
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
            snapshot, rows = reembed.pending(self.store, self.progress)
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


def _texts_of(db: ReembedVerbs, snapshot: Snapshot, records: list[RecordEntry], field: TextOf) -> list[Any]:
    """The texts of m records, or whatever stands in their place."""
    if callable(field):
        return [field(record) for record in db._records(snapshot, records)]
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
