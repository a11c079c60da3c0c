"""`SoftDB`: the one stateful class, no mathematics. Its verbs check and hand on; `DatabaseCore` does the work."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch

from softdb import check
from softdb.database.database_core import DatabaseCore
from softdb.database.indexing import index_kept
from softdb.database.questions import verb
from softdb.database.reembedding import TextOf, reembed
from softdb.database.verbs import Verbs
from softdb.device import Board
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

    Made by `softdb.open`. Safe to use from several threads; a context manager; every verb takes batches.
    """

    core: DatabaseCore  # what other rooms of softdb need of a database, beside its verbs

    def __init__(self, core: DatabaseCore) -> None:
        self.core, self._store, self._finder = core, core.store, core.finder

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> str:
        """ "rw", or "r" for a handle that only reads."""
        return self._store.mode

    @property
    def device(self) -> torch.device:
        """Device of this handle: its columns and its index lie there, and queries that are no tensors go there.

        Given to `softdb.open`, changed by `to` and `build_index(device=)`; the first of several. A tensor is answered
        where it lies: beside the columns where they are there, else from the host's.
        """
        return self.core.device or torch.device("cpu")

    @property
    def generation(self) -> int:
        """Grows with every change; a reader's is the one that it sees until `refresh()`."""
        self._store.require_open()
        return self._store.snapshot.generation

    @verb
    def refresh(self) -> int:
        """See what other processes have committed since, and return the generation. A writer sees all at once."""
        self._finder.refresh()
        return self._store.refresh()

    @verb
    def compact(self) -> CompactReport:
        """Remove from disk, and from the index, what was deleted or replaced; answers and rows stay what they are.

        Reading and writing go on meanwhile, here and in other processes; readers see the new files after `refresh()`.
        A crash at any moment loses nothing. Cost: see `softdb.store.compact.compact`.

        Raises:
            ReadOnly, WriteFailed: this handle may not, or can no longer, write.
            CorruptionError: something to be copied does not give its checksum.
        """
        return self.core.compact()

    @verb
    def to(self: D, device: Device, dtype: str | torch.dtype | None = None) -> D:
        """Compute on another device from now on, as `torch.nn.Module.to`: changes this handle, and returns it.

        Keys, values and what is live are copied there when a query first needs them, and follow every commit; records
        lie on disk as ever. Where a column does not fit, it passes through in blocks; `stats().device` tells.

        Args:
            device: "cpu", "cuda", "cuda:1", or a list of GPUs that each take a run of the records.
            dtype: of the copies: "float32", "float16" or "bfloat16"; None: as they are stored. With a narrower one
                answers are those of the rounded records: a component is off by 2⁻¹¹ of itself in float16, 2⁻⁸ in
                bfloat16, a dot product by at most so much of ‖q‖‖k‖.

        Raises BadInput for a device that is not there.
        """
        devices, narrow = check.devices(device), check.resident_dtype(dtype)
        if devices is None:
            raise BadInput("device is None; expected 'cpu', 'cuda', 'cuda:1' or a list of GPUs")
        self._finder.move(Board.of(devices, narrow))
        self.core.devices = None if devices[0].type == "cpu" else devices
        return self

    @verb
    def snapshot(self, path: str | os.PathLike[str]) -> SnapshotReport:
        """Copy the newest generation to another directory, consistent while writing goes on; it opens by itself.

        Args:
            path: a directory that does not exist or is empty. A database in memory is saved there.

        Raises BadInput for another path, and WriteFailed where the disk refuses: then nothing of the copy is left, and
        this handle goes on.
        """
        return backup(self._store, check.folder(path, "path", "the path of a new directory"))

    @verb
    def verify(self) -> int:
        """Read everything back against its checksums and return the number of records. Raises CorruptionError."""
        return verify(self._store)

    @verb
    def flush(self) -> None:
        """Bring all changes to disk; with `durability="full"` they are there already.

        Cost: one fsync for each column file that has changed, and one for the catalogue.

        Raises:
            WriteFailed: the disk refused; the changes since the last flush are undone.
            ReadOnly, Closed: this handle does not write.
        """
        self._store.flush()

    def close(self) -> None:
        """Let go of files and lock; the handle then refuses everything. Safe to call twice.

        Raises WriteFailed where changes of a relaxed database could not be brought to disk.
        """
        self.core.close()

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "in memory" if self._store.path is None else repr(str(self._store.path))
        if self._store.closed:
            return f"<SoftDB {where}, closed>"
        schema = self._store.schema
        return f"<SoftDB {where}: {self._store.snapshot.records} records, dim {schema.dim}, {schema.metric.value}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A handle travels to another process as its path, and opens there for reading."""
        if self._store.path is None:
            raise BadInput("a database in memory cannot be pickled; give it a path")
        made = self._store.keyed.since, self.core.encoder(), self.core.devices, self._finder.dtype
        return _reopen, (self._store.path, *made)

    # -- fields of the payload -------------------------------------------------------------------------------------

    @verb
    def index_field(self, *names: str) -> None:
        """Declare fields of the payload: SQLite indexes them, and filters on them no longer read the payloads.

            db.index_field("year", "lang")
            db.search(queries, where={"year": {"$gte": 2020}, "lang": "de"})

        Kept with the database; an index that is there already stays. Any answer is the same without. Equality, order,
        `$in`, `$exists` and their negations use it, `$contains` does not. Cost: one pass over the payloads now, and on
        every insert 1 to 3 µs and 20 to 30 bytes a record and field.
        """
        self._store.index_fields(field_names(names))

    @verb
    def drop_field(self, name: str) -> None:
        """Drop the index of a declared field. Raises BadInput where it has none."""
        self._store.drop_field(*field_names([name]))

    @verb
    def order_fields(self) -> None:
        """Remember the order of declared fields now, of up to four; else a field's, once filters ask much of it.

        What matches a range of values is then a slice of it. Cost: some 0.1 µs a record and field, and 4 bytes.
        """
        self._store.order_fields()

    @verb
    def index_text(self, tokenizer: Literal["words", "trigram"] = "words") -> None:
        """Index the texts of all records for full-text search; kept with the database and with every write.

        Args:
            tokenizer: "words": runs of letters and digits of any script, without case and diacritics. "trigram": every
                three characters, so that a word is found within longer ones, and languages that put no blanks between
                words are searched; words of fewer than three characters find nothing.

        An index of that tokenizer stays, another one is made anew. Cost: 3 µs a record of ten words now and with every
        insert (60 µs by trigrams), and about as many bytes as the texts have.
        """
        self._store.index_text(check.one_of(tokenizer, "tokenizer", ("words", "trigram")))

    @verb
    def drop_text_index(self) -> None:
        """Drop the index of the texts, if there is one; the texts stay."""
        self._store.index_text(None)

    @property
    def text_index(self) -> str | None:
        """The tokenizer of the index of the texts, "words" or "trigram"; None where there is none."""
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
        """Build the approximate index anew, measure its recall, keep it as a cache, and return the report.

        A build that is interrupted, or that fails, leaves the old index in use. Reading and writing may go on meanwhile
        in other threads, and nothing that they change is lost; one build runs at a time.

        Args:
            kind: "auto" (the fastest on a sample), "ivf" (lists with 4-bit codes), "hnsw" (a graph over bytes), "flat"
                (none: codes for estimates alone), or on a GPU "ivf-sq8" (lists with a byte a number).
            recall: the share of the true k nearest that a search shall find; the effort is raised until it is measured.
            k: for which k.
            queries: (q, d) of the kind that will come; without them, stored keys held aside. Half of them are tuned
                on, and the recall that the other half meets is reported.
            memory: what codes and ids may occupy, in bytes or as text such as "200MB".
            progress: called with what is being done, how much of it is done, and the whole.
            background: return at once a `softdb.index.background.Build`: `.done`, `.progress`, `.cancel()`, and
                `.result(timeout)`, the report. Closing the database cancels it. `progress` is called in its thread.
            device: where this handle computes from then on, "cpu", "cuda" or "cuda:1", as `db.device` says; None: as
                before. On a GPU "ivf" has 8-bit codes, "hnsw" does not exist, and memory is the GPU's;
                the cache is an index that a CPU reads, too.

        Raises:
            BadInput: no index meets the memory, or none that does reaches the recall; the message says what would do.
                Or another build is going on; or the device is not there, or has no such index.
            MissingDependency: FAISS, or its GPU build, is not installed.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; build the index from the one that writes")
        asked = None if queries is None else self.core.as_queries(queries).detach()
        if not isinstance(background, bool):
            raise BadInput(f"background is {check.shown(background)}; expected True or False")
        if asked is not None and background:
            asked = asked.clone()  # the caller may go on to change what was given
        where = check.devices(device)
        board = self._finder.devices if where is None else Board.of(where, self._finder.dtype)
        work = self._finder.builder(kind, recall, check.integer(k, "k"), asked, memory, board)
        build = self._finder.begin(functools.partial(self._build_index, work, where), progress)
        if not background:
            return build.run()
        build.start()
        return build

    @verb
    def _build_index(
        self, work: Callable[[Progress], IndexReport], devices: tuple[torch.device, ...] | None, say: Progress
    ) -> IndexReport:
        with index_kept():
            report = work(say)
        self.core.devices = self.core.devices if devices is None else devices
        return report

    @verb
    def tune(self, recall: float | None = None, *, k: int | None = None, queries: Vectors | None = None) -> IndexReport:
        """Measure the index's recall anew and change how hard it looks, not its codes; returns the report.

        After many changes, or for queries of another kind than it was tuned for. Costs the exact search of 512 queries.

        Args:
            recall: the share of the true k nearest to find; None: as before.
            k: for which k; None: as before.
            queries: (q, d) of the kind that will come; without them, stored keys held aside.
        """
        if self._store.mode != "rw":
            raise ReadOnly("this handle is read-only; tune the index from the one that writes")
        asked = None if queries is None else self.core.as_queries(queries).detach()
        with index_kept():
            return self._finder.tune(recall, None if k is None else check.integer(k, "k"), asked)

    @verb
    def watch(self, share: float = 0.01, window: int = 500) -> None:
        """Set how closely this handle watches the recall of its searches by the index; it watches from the beginning.

        Now and then one query of a batch is also searched exactly, after the batch was answered. `stats().index`
        shows the share of the true nearest that such queries were given (`live_recall`) and how many were checked; a
        `RecallWarning` says, once until the index is built or tuned anew, that it is surely below the target.

        Args:
            share: of the time that searches take, how much the checks may take besides; 0: none.
            window: how many checks count, the latest ones.
        """
        self._finder.watch.change(check.share(share, "share"), check.integer(window, "window", 1, 10**6))

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
        return reembed(self.core, encoder, field, missing, batch_size, progress)


def _reopen(
    path: Path,
    since: int,
    encoder: check.Encoder | None,
    devices: Sequence[torch.device] | None,
    dtype: torch.dtype | None,
) -> SoftDB:
    store = FilteredStore(path, "r", None)
    # keys may be made anew
    return SoftDB(DatabaseCore(store, encoder if store.keyed.since == since else None, devices, dtype))
