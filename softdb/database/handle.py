"""`SoftDB`: the only stateful class, no mathematics. Its verbs check arguments and call `DatabaseCore`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from softdb import check
from softdb.database.database_core import DatabaseCore
from softdb.database.indexing import index_write_errors
from softdb.database.questions import verb
from softdb.database.reembedding import TextOf, reembed
from softdb.database.verbs import Verbs
from softdb.device import Board
from softdb.encoders import EncoderLike
from softdb.errors import BadInput, ReadOnly
from softdb.filters import FilteredStore
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.reports import CompactReport, IndexReport, ReembedReport, SnapshotReport
from softdb.store.backup import backup
from softdb.store.paths import field_names
from softdb.store.verify import verify
from softdb.typing import Device, Vectors

D = TypeVar("D", bound="SoftDB")


class SoftDB(Verbs):
    """A durable database of embedded keys and values that answers exact, approximate and soft queries.

    Made by `softdb.open`. Safe to use from several threads, and a context manager. Its methods take batches.
    """

    core: DatabaseCore  # the interface for other folders of softdb

    def __init__(self, core: DatabaseCore) -> None:
        self.core, self._store, self._finder = core, core.store, core.finder

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """Mode of access, "rw", or "r" for a handle that only reads."""
        return self._store.mode

    @property
    def device(self) -> torch.device:
        """Device of the handle's columns and index, and of queries that are not tensors; with several GPUs the first.

        Set by `softdb.open`, `to` and `build_index(device=)`. A query tensor is answered on its own device: from the
        columns of that device if there are any, else from the host's.
        """
        return self.core.device or torch.device("cpu")

    @property
    def generation(self) -> int:
        """Number of the newest commit that this handle sees. A reader sees later commits only after `refresh()`."""
        self._store.require_open()
        return self._store.snapshot.generation

    @verb
    def refresh(self) -> int:
        """Make other processes' commits visible, and return the generation. A writer's handle is always current."""
        self._finder.refresh()
        return self._store.refresh()

    @verb
    def compact(self) -> CompactReport:
        """Remove deleted and replaced records from disk and from the index; answers and rows do not change.

        Other threads and processes read and write meanwhile; readers see the new files after `refresh()`. A crash at
        any moment loses nothing. Cost: see `softdb.store.compact.compact`.

        Raises:
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
            CorruptionError: a record to be copied differs from its checksum.
        """
        return self.core.compact()

    @verb
    def to(self: D, device: Device, dtype: str | torch.dtype | None = None) -> D:
        """Move the computation of this handle to another device, and return the handle, as `torch.nn.Module.to`.

        Keys, values and the mask of live records are copied there when a query first needs them, and follow every
        commit; the files do not change. A column that does not fit is streamed in blocks; see `stats().device`.

        Args:
            device: "cpu", "cuda", "cuda:1", or a list of GPUs, each of which takes a part of the records.
            dtype: of the copies: "float32", "float16" or "bfloat16"; None: the stored dtype. A narrower dtype rounds
                the records: relative errors are up to 2⁻¹¹ of a component in float16, 2⁻⁸ in bfloat16, and at most
                the same share of ‖q‖‖k‖ in a dot product.

        Raises BadInput for an unknown device.
        """
        devices, narrow = check.devices(device), check.resident_dtype(dtype)
        if devices is None:
            raise BadInput("device is None; expected 'cpu', 'cuda', 'cuda:1' or a list of GPUs")
        self._finder.move(Board.of(devices, narrow))
        self.core.devices = None if devices[0].type == "cpu" else devices
        return self

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy the newest generation, as a complete database, to another directory; other threads may write meanwhile.

        Args:
            path: a directory that does not exist or is empty. A database in memory can be saved, too.

        Raises BadInput for any other path, and WriteFailed if the copy cannot be written: it is then removed, and this
        handle stays usable.
        """
        return backup(self._store, check.folder(path, "path", "the path of a new directory"))

    @verb
    def verify(self) -> int:
        """Check all data against its checksums, and return the number of records. Raises CorruptionError."""
        return verify(self._store)

    @verb
    def flush(self) -> None:
        """Write all changes to disk; with `durability="full"` they are on disk already.

        Cost: one fsync for each column file that has changed, and one for the catalogue.

        Raises:
            WriteFailed: writing to disk failed; the changes since the last flush are undone.
            ReadOnly, Closed: this handle does not write.
        """
        self._store.flush()

    def __repr__(self) -> str:
        path = "in memory" if self._store.path is None else repr(str(self._store.path))
        if self._store.closed:
            return f"<SoftDB {path}, closed>"
        width, metric = self._store.schema.dim or "undecided", self._store.schema.metric.value
        return f"<SoftDB {path}: {self._store.snapshot.records} records, dim {width}, {metric}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the path; unpickling opens the database for reading."""
        if self._store.path is None:
            raise BadInput("a database in memory cannot be pickled; give it a path")
        since, encoder = self._store.keyed.since, self.core.encoder()
        return _reopen, (self._store.path, since, encoder, self.core.devices, self._finder.dtype)

    # -- fields of the payload -------------------------------------------------------------------------------------

    @verb
    def index_field(self, *names: str) -> None:
        """Declare fields of the payload: SQLite indexes them, and filters on them no longer read the payloads.

        >>> db.index_field("year", "lang")
        >>> hits = db.search(queries, k=1, where={"year": {"$gte": 2000}})

        The declaration is stored in the database; declaring a field twice changes nothing. Answers stay the same.
        Equality, order, `$in`, `$exists` and their negations use the index, `$contains` does not. Cost: one pass over
        the payloads now, and on every insert 1 to 3 µs and 20 to 30 bytes for each record and field. Raises
        BadInput for anything but names and paths of fields.
        """
        self._store.index_fields(field_names(names))

    @verb
    def drop_field(self, name: str) -> None:
        """Drop the index of a declared field. Raises BadInput for a field that is not declared."""
        self._store.drop_field(*field_names([name]))

    @verb
    def order_fields(self) -> None:
        """Cache the sort order of up to four declared fields now, instead of after many filters have used a field.

        A filter on a range then reads a slice of that order. Cost: about 0.1 µs and 4 bytes for each record and field.
        """
        self._store.order_fields()

    @verb
    def index_text(self, tokenizer: Literal["words", "trigram"] = "words") -> None:
        """Index the texts of all records for full-text search. The database stores the index; every write updates it.

        Args:
            tokenizer: "words": runs of letters and digits of any script, without case and diacritics. "trigram": every
                three characters, which finds a word within longer ones, and searches languages that put no blanks
                between words; words of fewer than three characters match nothing.

        An existing index is kept if it has this tokenizer, else rebuilt. Cost: for a record of ten words 3 µs (trigrams
        60 µs), now and with every insert, and about as many bytes as the texts. Raises BadInput for another tokenizer.
        """
        self._store.index_text(check.one_of(tokenizer, "tokenizer", ("words", "trigram")))

    @verb
    def drop_text_index(self) -> None:
        """Drop the index of the texts, if there is one; the texts stay."""
        self._store.index_text(None)

    @property
    def text_index(self) -> str | None:
        """Tokenizer of the index of the texts, "words" or "trigram"; None without an index."""
        self._store.require_open()
        return self._store.text_index()

    @overload
    def build_index(
        self, /, kind: str = "auto", *, recall: float = 0.95, k: int = 10, queries: Vectors | None = None,
        memory: int | str | None = None, progress: Progress | None = None, background: Literal[False] = False,
        device: Device | None = None,
    ) -> IndexReport: ...  # fmt: skip

    @overload
    def build_index(
        self, /, kind: str = "auto", *, recall: float = 0.95, k: int = 10, queries: Vectors | None = None,
        memory: int | str | None = None, progress: Progress | None = None, background: Literal[True],
        device: Device | None = None,
    ) -> Build[IndexReport]: ...  # fmt: skip

    @verb
    def build_index(
        self,
        kind: str = "auto",
        *,
        recall: float = 0.95,
        k: int = 10,
        queries: Vectors | None = None,
        memory: int | str | None = None,
        progress: Progress | None = None,
        background: bool = False,
        device: Device | None = None,
    ) -> IndexReport | Build[IndexReport]:
        """Build the approximate index, measure its recall, store it as a cache, and return the report.

        If the build fails or is interrupted, the old index stays in use. Other threads may read and write meanwhile,
        and searches find their changes. One build runs at a time.

        Args:
            kind: "auto" (the fastest on a sample), "ivf" (lists with 4-bit codes), "hnsw" (a graph over bytes), "flat"
                (no index, only codes for estimates), or on a GPU "ivf-sq8" (lists with a byte for each number).
            recall: share of the true k nearest that searches should find; sets the search effort by measurement.
            k: number of nearest records by which the recall is measured.
            queries: (q, d) typical queries; None: stored keys that are held out. Half of the queries tune the index,
                the other half measure the reported recall.
            memory: limit for codes and ids, in bytes or as text such as "200MB".
            progress: called with the stage, the amount done and the total.
            background: return a `softdb.index.background.Build` at once: `.done`, `.progress`, `.cancel()`, and
                `.result(timeout)`, the report. Closing the database cancels it. `progress` is called in its thread.
            device: move this handle to "cpu", "cuda" or "cuda:1", see `db.device`; None: the current device. On a GPU
                "ivf" has 8-bit codes, "hnsw" does not exist, and memory is the GPU's; a CPU can read the cache, too.

        Raises:
            BadInput: no index fits the memory, or no index that fits reaches the recall (the message names values that
                work); or another build is running; or the device is unknown, or has no index of this kind.
            MissingDependency: FAISS, or its GPU build, is not installed.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; build the index with a handle that writes")
        vectors = None if queries is None else self.core.as_queries(queries).detach()
        if not isinstance(background, bool):
            raise BadInput(f"background is {check.shown(background)}; expected True or False")
        if vectors is not None and background:
            vectors = vectors.clone()  # the caller may change the tensor during the build
        devices = check.devices(device)
        board = self._finder.devices if devices is None else Board.of(devices, self._finder.dtype)
        work = self._finder.builder(kind, recall, check.integer(k, "k"), vectors, memory, board)
        build = self._finder.begin(functools.partial(self._build_index, work, devices), progress)
        if not background:
            return build.run()
        build.start()
        return build

    @verb
    def _build_index(
        self, work: Callable[[Progress], IndexReport], devices: tuple[torch.device, ...] | None, progress: Progress
    ) -> IndexReport:
        with index_write_errors():
            report = work(progress)
        self.core.devices = self.core.devices if devices is None else devices
        return report

    @verb
    def tune(
        self, recall: float | None = None, *, k: int | None = None, queries: Vectors | None = None,
        progress: Progress | None = None,
    ) -> IndexReport:  # fmt: skip
        """Measure the index's recall, set its search effort to reach the target, and return the report.

        Call it after many changes, or for queries of another kind. The codes stay. Cost: exact search of 1,024 queries.
        Raises ReadOnly for a handle that only reads, and BadInput without an index or for arguments that do not fit.

        Args:
            recall: share of the true k nearest to find; None: as before.
            k: number of nearest records by which the recall is measured; None: as before.
            queries: (q, d) typical queries; None: stored keys that are held out.
            progress: called with the stage, the amount done and the total.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; tune the index with a handle that writes")
        vectors = None if queries is None else self.core.as_queries(queries).detach()
        with index_write_errors():
            return self._finder.tune(recall, None if k is None else check.integer(k, "k"), vectors, progress)

    @verb
    def watch(self, share: float = 0.01, window: int = 500) -> None:
        """Configure the monitoring of recall, which is on by default.

        Now and then a query of a batch is also searched exactly, after the batch was answered. `stats().index` shows
        the measured recall (`live_recall`) and the number of checked queries. A `RecallWarning` is given if the recall
        is significantly below the target, but only once until the index is built or tuned again. Raises BadInput for
        a share that is not in 0 … 1, or a window below 1.

        Args:
            share: time that checks may take, as a share of the time of searches; 0: no checks.
            window: number of the latest checks that count.
        """
        self._finder.watch.change(check.share(share, "share"), check.integer(window, "window", 1, 10**6))

    @verb
    def reembed(
        self,
        encoder: EncoderLike,
        *,
        field: TextOf = None,
        missing: str | None = None,
        batch_size: int = 256,
        progress: Progress | bool | None = None,
    ) -> ReembedReport:
        """Replace every key by the embedding of another encoder, also of another width; nothing else changes.

        New keys are collected on disk, batch by batch; until all are ready, all answers use the old keys. Then one
        commit changes keys, width and encoder. If the process is killed, the encoder fails or the disk is full, the
        database is unchanged; call `reembed` again with an encoder of the same name to continue. Other threads and
        processes may read and write meanwhile; new records are embedded, too. Readers see new keys after `refresh()`.

        >>> report = db.reembed("ngrams", progress=True)

        Args:
            encoder: n texts -> (n, d), or a name or a folder as in `softdb.open`. For an encoder without an attribute
                `name` each run starts from the beginning.
            field: None: the text of a record or, without a text, the field "text" of its payload. Else the name of a
                field of the payload, or a callable that returns the text of a `Record`.
            missing: text to embed for a record without a text; None: raise BadInput before any text is embedded.
                A record without a key gets one if it has a text, except in a database with values.
            batch_size: number of texts that the encoder gets at once, and that are stored with one sync.
            progress: called with the stage, the amount done and the total; True draws a bar.

        Cost: the time of the encoder; 2 syncs for each batch; disk space for the new keys twice and the values once
        until the end. The commit rewrites the catalogue's records; other operations wait for it. The index held the old
        keys and is dropped: `build_index()` makes another.

        Raises:
            BadInput: a record has no text, or the encoder returns anything but vectors of its width.
            DatabaseLocked: another `reembed` is running.
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
            CorruptionError: a value to be copied differs from its checksum.
        """
        return reembed(self.core, encoder, field, missing, batch_size, progress)


def _reopen(
    path: Path,
    since: int,
    encoder: check.Encoder | None,
    devices: Sequence[torch.device] | None,
    dtype: torch.dtype | None,
) -> SoftDB:
    store = FilteredStore(path, "r", None)
    # drop the encoder if it belongs to old keys, because the database was re-embedded since
    return SoftDB(DatabaseCore(store, encoder if store.keyed.since == since else None, devices, dtype))
