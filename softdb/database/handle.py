"""The handle of a database: what every verb shares, its lifecycle, and the inner face for modules built on it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.check import Id, Schema
from softdb.encoders import of_name
from softdb.errors import BadInput, DeviceFailed, SoftDBError
from softdb.index import Finder
from softdb.index.device import DEVICE_ERRORS
from softdb.reports import CompactReport, SnapshotReport, Stats
from softdb.store import Snapshot, Store
from softdb.store.backup import backup
from softdb.store.compact import compact
from softdb.store.entry import RecordEntry
from softdb.store.stats import stats
from softdb.store.verify import verify
from softdb.typing import Device, Vectors

__all__ = ["Face", "Handle", "verb"]

_log = logging.getLogger("softdb")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", bound="Handle")
F = TypeVar("F", bound="Face")


class Face(ABC):
    """Whoever has public methods that are verbs: a database, or a cluster."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` was called."""

    @abstractmethod
    def require_open(self) -> None:
        """Raises Closed."""

    def device_failed(self, verb: str, error: Exception) -> DeviceFailed:
        """What a device of this process says, as one of the family."""
        return DeviceFailed(f"{verb}: a device failed ({str(error).splitlines()[0]}); ask fewer queries at once")


def verb(method: Callable[Concatenate[F, P], R]) -> Callable[Concatenate[F, P], R]:
    """A public method: a closed handle is refused first, and every error names the method, once."""

    @functools.wraps(method)
    def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():  # a graph cannot hold files: torch.compile runs the verb as it is
            return torch.compiler.disable(call)(self, *args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        try:
            self.require_open()
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                with check.precise():
                    return method(self, *args, **kwargs)
            return method(self, *args, **kwargs)
        except DEVICE_ERRORS as error:
            raise self.device_failed(method.__name__, error) from error
        except SoftDBError as error:
            if not hasattr(error, "verb"):
                error.verb = method.__name__.strip("_")  # type: ignore[attr-defined]
                error.args = (f"{error.verb}: {error.args[0]}", *error.args[1:])  # type: ignore[attr-defined]
            raise

    return call


class Handle(Face):
    """Store, finder and encoder of one database; its lifecycle, and the inner face for modules built on it."""

    def __init__(
        self,
        store: Store,
        encoder: check.Encoder | None,
        devices: Sequence[torch.device] | None = None,
        dtype: torch.dtype | None = None,  # of the columns there
    ) -> None:
        self._store = store
        self._finder = Finder(store, devices, dtype)
        self._encoders = {store.keyed.since: encoder}  # by the generation that they made the keys of
        self._devices = devices

    def device_failed(self, verb: str, error: Exception) -> DeviceFailed:
        """Which of its devices failed, why, and what to do."""
        why = str(error).split("\n")[0]
        if isinstance(error, torch.cuda.OutOfMemoryError):
            way = "ask fewer queries at once, free memory there, or go on with db.to('cpu')"
        else:
            way = "a device that was lost comes back in a new process alone; go on with db.to('cpu')"
        return DeviceFailed(f"{verb.strip('_')}: {self._finder.place} failed ({why}); nothing is lost: {way}")

    # -- the handle ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """Its directory; None in memory."""
        return self._store.path

    @property
    def mode(self) -> str:
        """ "rw", or "r" for a handle that only reads."""
        return self._store.mode

    @property
    def device(self) -> torch.device:
        """Where this handle computes: its columns and its index lie there, and queries that are no tensors go there.

        Given to `softdb.open`, changed by `to` and `build_index(device=)`; the first of several. A tensor is answered
        where it lies: beside the columns where they are there, else from the host's.
        """
        return torch.device("cpu") if self._devices is None else self._devices[0]

    @property
    def _device(self) -> torch.device | None:
        return None if self._devices is None else self._devices[0]

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return self._store.schema.dim

    @property
    def value_dim(self) -> int | None:
        """v, the width of a value; None where values are labels, or the keys themselves."""
        return self._store.schema.value_dim

    @property
    def num_classes(self) -> int | None:
        """Values are integer labels below this; None where they are not labels."""
        return self._store.schema.num_classes

    @property
    def dtype(self) -> str:
        """How vectors are stored, "float32" or "float16"."""
        return str(self._store.schema.dtype.name)

    @property
    def metric(self) -> str:
        """How queries and keys are compared: "dot", "cosine" or "l2"."""
        return self._store.schema.metric.value

    @property
    def encoder_name(self) -> str | None:
        """The name of the encoder that made the keys; None where none is remembered."""
        return self._store.keyed.encoder

    @property
    def generation(self) -> int:
        """Grows with every change; a reader's is the one that it sees until `refresh()`."""
        self._store.require_open()
        return self._store.snapshot.generation

    @property
    def fields(self) -> tuple[str, ...]:
        """Declared fields of the payload, sorted."""
        self._store.require_open()
        return tuple(self._store.fields())

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
        report = compact(self._store)
        try:
            self._finder.compact()
        except OSError as error:  # a cache: it serves this handle, and is written again at the end
            _log.warning("the index of what is left could not be kept: %s", error)
        return dataclasses.replace(report, bytes=self._store.occupied())

    @verb
    def to(self: H, device: Device, dtype: str | torch.dtype | None = None) -> H:
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
        self._finder.move(devices, narrow)
        self._devices = None if devices[0].type == "cpu" else devices
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
    def stats(self) -> Stats:
        """What the database is, holds and occupies. Cost: a walk over its directory; see `dim`, `metric`, `count()`."""
        return stats(self._store, self._finder.report(), self._finder.device_report())

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
        try:
            if not self._store.closed:
                self._finder.close()
        except (OSError, SoftDBError) as error:  # a cache: the records do not need it
            _log.warning("the index could not be kept, build_index() makes it anew: %s", error)
        finally:
            self._store.close()

    def __enter__(self: H) -> H:
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
        made = self._store.keyed.since, self._encoder(), self._devices, self._finder.dtype
        return _reopen, (type(self), self._store.path, *made)

    # -- the inner face: what modules built on a database use (softdb.nn, train, bench, the command line) ----------

    @property
    def schema(self) -> Schema:
        """Widths, dtype and metric, as the database was made."""
        return self._store.schema

    @property
    def reembedded(self) -> int:
        """The generation that made all keys anew, 0 where none has: what was learned of keys before is of others."""
        return self._store.keyed.since

    @property
    def finder(self) -> Finder:
        """What finds candidates: the index, or exact search."""
        return self._finder

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._store.closed

    def require_open(self) -> None:
        """Raises Closed."""
        self._store.require_open()

    def require_writable(self) -> None:
        """Raises Closed, ReadOnly, and WriteFailed after a write that failed."""
        self._store.require_writable()

    def _as_made(self, ask: Callable[[], T]) -> T:
        """What is worked out from queries and a generation; again, where all keys were made anew between the two."""
        loader = self._store.loader
        while True:
            made = loader.loaded.keyed
            found = ask()
            if loader.loaded.keyed is made:
                return found

    def view(self, where: dict[str, Any] | None = None) -> tuple[Snapshot, NDArray[np.bool_] | None]:
        """The newest generation that this handle sees, and the positions (size,) that a filter allows; None: all."""
        return (self._store.loader.loaded.snapshot, None) if where is None else self._store.matching(where)

    @property
    def keyed(self) -> int:
        """How many records have a key: all that vectors meet."""
        return self._store.snapshot.count

    def stored(self, ids: list[Id]) -> NDArray[np.bool_]:
        """Which of ids (n,) are stored, with a key or without."""
        return self._store.locate(ids).rows >= 0

    def locate(self, ids: list[Id], required: bool = False) -> tuple[Snapshot, NDArray[np.int64]]:
        """The newest generation and the rows (n,) of ids in it; -1 for those not stored, or without a key.

        Raises, if required, UnknownId or BadInput for those.
        """
        snapshot, rows, *_ = (self._store.require if required else self._store.locate)(ids)
        without = ~snapshot.keyed(rows)
        if required and without.any():
            raise BadInput(f"id {check.shown(ids[int(without.argmax())])} has no key; give it one with update()")
        return snapshot, np.where(without, -1, rows)

    def resolve(self, rows: NDArray[np.int64], payloads: bool = True, texts: bool = False) -> dict[int, RecordEntry]:
        """Ids of rows, and their payloads and texts if asked for; those that were deleted or replaced are absent."""
        return self._store.read(rows, payloads, texts)

    def note_encoder(self, name: str) -> None:
        """Keep the name of the encoder that will make the keys, without having it."""
        self._store.note_encoder(name)

    def _encoder(self) -> check.Encoder | None:
        """What encodes texts as the keys of the generation that this handle sees."""
        made = self._store.keyed
        found = self._encoders.get(made.since)
        if found is None and made.encoder is not None:
            found = self._encoders[made.since] = of_name(made.encoder, made.schema.dim)
        return found

    def as_queries(self, queries: Vectors, width: int | None = None) -> Tensor:
        """Queries (q, width) as every verb takes them: checked, encoded where they are text. Raises BadInput."""
        self._finder.require_process(self._finder.board)
        vectors = check.encoded(queries, "queries", lambda: check.query_encoder(self._encoder()))
        dim = self._store.loader.loaded.keyed.schema.dim
        if width in (None, dim):
            return check.queries(vectors, dim, self._device)
        return check.queries(vectors, width, self._device, "this score takes queries")


def _reopen(
    kind: type[H],
    path: Path,
    since: int,
    encoder: check.Encoder | None,
    devices: Sequence[torch.device] | None,
    dtype: torch.dtype | None,
) -> H:
    store = Store(path, "r", None)
    return kind(store, encoder if store.keyed.since == since else None, devices, dtype)  # keys may be made anew
