"""Re-embedding: replace every key by another encoder's embedding of the record's text."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from softdb import check
from softdb.answers import Record, parsed
from softdb.check import Array, Schema
from softdb.database.database_core import DatabaseCore
from softdb.database.embedding import telling
from softdb.encoders import EncoderLike, encoder_of, fingerprint_of, name_of
from softdb.errors import BadInput, SoftDBError, StaleRead, WriteFailed
from softdb.index.choose import Progress
from softdb.reports import ReembedReport
from softdb.store import Snapshot, switching
from softdb.store.entry import RecordEntry
from softdb.store.gathered import Gathered, digest
from softdb.store.keyed import Keyed
from softdb.store.snapshot import Rows

TextOf: TypeAlias = "str | Callable[[Record], str | None] | None"

READ = 4096  # number of records whose texts are read at once
MAX_PASSES = 10  # largest number of passes over new records; the switch itself embeds what is left then


def reembed(
    core: DatabaseCore,
    encoder: EncoderLike,
    field: TextOf,
    missing: str | None,
    batch_size: int,
    progress: Progress | bool | None,
) -> ReembedReport:
    """Replace every key by another encoder's embedding of the record's text; see `SoftDB.reembed`."""
    core.store.require_writable()
    embed = encoder_of(encoder)
    require_field(field)
    if not (missing is None or isinstance(missing, str)):
        raise BadInput(f"missing is {check.shown(missing)}; expected a text, or None")
    size = check.integer(batch_size, "batch_size")
    with telling(progress) as track:
        return _Run(core, embed, field, missing, size, track).report()


def texts_at(core: DatabaseCore, rows: Rows, field: TextOf = None) -> list[str]:  # (m,) -> m
    """Return records' texts, with `field` as in `reembed`. Raises BadInput for no text, StaleRead for no record."""
    entries = core.store.read(rows, texts=True)
    if gone := [row for row in rows.tolist() if row not in entries]:
        raise StaleRead(f"{len(gone)} of {len(rows)} records were deleted or replaced during the call; call again")
    records = [entries[row] for row in rows.tolist()]
    texts = _texts_of(core, core.store.snapshot, records, field)
    return [_require_text(*pair, field) for pair in zip(records, texts, strict=True)]


def require_field(field: object) -> None:
    """Raise BadInput unless the field is a `TextOf`."""
    if not (callable(field) or isinstance(field, str | None)):
        raise BadInput(f"field is {check.shown(field)}; expected a field's name, or a callable, Record -> text")


class _Run:
    """One run of `reembed`: embeds all texts, then switches the database to the new keys."""

    def __init__(
        self, core: DatabaseCore, encoder: check.Encoder, field: TextOf, missing: str | None, size: int, track: Progress
    ) -> None:
        self.core, self.store = core, core.store
        self.encoder, self.name, self.field, self.missing = encoder, name_of(encoder), field, missing
        self.size, self.track = size, track
        self.progress = switching.Progress()
        self.present = self.embedded = 0  # number of rows with a new key; of these embedded by this run
        self.total = self.store.snapshot.records

    def report(self) -> ReembedReport:
        """Re-embed, and return the report."""
        begin = time.perf_counter()
        switching.require_sound_values(self.store)
        self.schema: Schema = dataclasses.replace(self.store.schema, dim=self._width(self._require_texts()))
        self.gathered = Gathered(self.store, self.schema, self.name)
        with contextlib.closing(self.gathered):
            self._gather_all()
            self.track("switch", self.total, self.total)
            origin = Keyed(self.schema, self.name, 0, fingerprint_of(self.encoder, self.schema.dim))
            switching.Switch(self.store, origin, self.gathered, self.progress, self.gather, self._announce).run()
        with contextlib.suppress(OSError, SoftDBError):  # the switch is done; the next writer removes leftover files
            self.gathered.discard()
        self.core.finder.forget()
        count, generation = self.store.snapshot.count, self.store.keyed.since
        seconds = time.perf_counter() - begin
        return ReembedReport(count, self.embedded, self.schema.dim, self.name, generation, seconds)

    def _announce(self, generation: int) -> None:
        self.core.encoders[generation] = self.encoder

    # -- texts -----------------------------------------------------------------------------------------------------

    def _require_texts(self) -> str | None:
        """Check that all records have a text, and return one of the texts; None without records. Raises BadInput."""
        example, (snapshot, rows) = None, switching.pending(self.store, self.progress)
        for low in range(0, len(rows), READ):
            for text in self._texts(snapshot, rows[low : low + READ])[1]:
                example = example or text
        return example

    def _texts(self, snapshot: Snapshot, rows: Rows) -> tuple[Rows, list[str | None], Rows]:
        """Return the rows (m,) that still exist, their texts, and the checksums (m, 2) of payloads and texts.

        The text is None for a record that has no key and will not get one.
        """
        entries = self.store.read(rows, texts=True)
        rows = rows[[row in entries for row in rows.tolist()]]
        records = [entries[row] for row in rows.tolist()]
        texts = _texts_of(self.core, snapshot, records, self.field)
        crcs = [
            [-1 if string is None else crc32(string.encode()) for string in (record.payload, record.text)]
            for record in records
        ]
        keyed = snapshot.keyed(rows).tolist()
        checked = [self._text(*arguments) for arguments in zip(records, texts, keyed, strict=True)]
        return rows, checked, np.array(crcs, np.int64).reshape(-1, 2)

    def _text(self, record: RecordEntry, text: object, keyed: bool) -> str | None:
        if not keyed and self.store.schema.has_values:
            return None
        if text is None and (self.missing is not None or not keyed):
            return self.missing
        return _require_text(record, text, self.field, ", or give a text for such records with missing=")

    # -- keys ------------------------------------------------------------------------------------------------------

    def _width(self, text: str | None) -> int:
        """Return the width d of the new keys: the encoder's `dim`, or the width of the encoder's output for `text`."""
        dim = check.attribute(self.encoder, "dim")
        if dim is not None:
            return check.integer(dim, "the encoder's dim", 1, check.MAX_DIM)
        return int(self._matrix([text or "text"], None).shape[1])

    def _matrix(self, texts: list[str], width: int | None) -> Array:
        """Encode n texts as keys (n, d) of the stored dtype. Raises BadInput if the output has another shape."""
        vectors: Any = check.encoded(texts, "texts", lambda: self.encoder)
        try:
            shape = tuple(np.shape(vectors))
        except ValueError:  # ragged lists
            shape = ()
        if len(shape) != 2 or (width is not None and shape[1] != width) or not shape[1]:
            raise BadInput(
                f"the encoder gave shape {shape} for {len(texts)} texts; expected ({len(texts)}, {width or 'd'})"
            )
        return check.matrix(vectors, "the encoder's vectors", int(shape[1]), self.store.schema.dtype)

    def _gather_all(self) -> None:
        """Embed all records, then those written meanwhile, until a pass has at most one batch of records."""
        for _ in range(MAX_PASSES):
            snapshot, rows = switching.pending(self.store, self.progress)
            self.gather(snapshot, rows)
            if len(rows) <= self.size:
                return

    def gather(self, snapshot: Snapshot, rows: Rows) -> None:
        """Embed the texts of rows (m,) of a snapshot, and store the new keys, except keys that are stored already."""
        for low in range(0, len(rows), READ):
            block, texts, crcs = self._texts(snapshot, rows[low : low + READ])
            if len(block):
                has_text = np.array([text is not None for text in texts], np.bool_)
                self._gather_block(block[has_text], [text for text in texts if text is not None])
                if not has_text.all():
                    self._advance(int(np.count_nonzero(~has_text)))
                self.progress.add(block, crcs, has_text)
        self.progress.generation = snapshot.generation

    def _gather_block(self, rows: Rows, texts: list[str]) -> None:
        digests = list(map(digest, texts))
        missing = np.flatnonzero(self.gathered.missing(rows, digests))
        self._advance(len(rows) - len(missing))
        for start in range(0, len(missing), self.size):
            batch = missing[start : start + self.size]
            try:
                keys = self._matrix([texts[i] for i in batch], self.schema.dim)
                self.gathered.put(rows[batch], keys, [digests[i] for i in batch])
            except (BadInput, WriteFailed) as error:
                error.args = (
                    f"{error.args[0]}; {self.present:,} of {self.total:,} records have their new keys, the database is "
                    "as it was; repair the cause, then call reembed again",
                    *error.args[1:],
                )
                raise
            self.embedded += len(batch)
            self._advance(len(batch))

    def _advance(self, count: int) -> None:
        self.present += count
        self.total = max(self.total, self.present)
        self.track("embed", self.present, self.total)


def _texts_of(core: DatabaseCore, snapshot: Snapshot, records: list[RecordEntry], field: TextOf) -> list[Any]:
    """Return what `field` gives as text for each of m records, unchecked; None for a record without a text."""
    if callable(field):
        return [field(record) for record in core.records(snapshot, records)]
    name = "text" if field is None else field
    payloads = parsed([record.payload for record in records])
    texts = [payload.get(name) if isinstance(payload, dict) else None for payload in payloads]
    if field is not None:
        return texts
    return [text if record.text is None else record.text for record, text in zip(records, texts, strict=True)]


def _require_text(record: RecordEntry, text: object, field: TextOf, advice: str = "") -> str:
    if isinstance(text, str):
        return text
    reason = "the callable gave" if callable(field) else f"its field {check.shown(field or 'text')} is"
    raise BadInput(
        f"record {check.shown(record.id)} has no text: {reason} {check.shown(text)}; name the field of the payload "
        f"that has it with field={advice}"
    )
