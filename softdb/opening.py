"""`softdb.open`: from a path and a few words to a database handle."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import apsw

from softdb import check
from softdb.database import DatabaseCore, SoftDB
from softdb.encoders import name_of, require_same
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, NotADatabase, SoftDBError, WriteFailed
from softdb.filters import FilteredStore
from softdb.store.paths import field_names
from softdb.typing import Device

__all__ = ["open", "table_at"]

_STORED = re.compile(r"([a-z][a-z0-9+.-]*)://?(?=[^/])")  # pathlib makes s3:/bucket of s3://bucket


def open(
    path: str | os.PathLike[str] | None,
    *,
    dim: int | None = None,
    value_dim: int | None = None,
    num_classes: int | None = None,
    dtype: Literal["float32", "float16"] | None = None,
    metric: Literal["dot", "cosine", "l2"] | None = None,
    mode: Literal["rw", "r"] = "rw",
    durability: Literal["full", "relaxed"] = "full",
    device: Device | None = None,
    encoder: check.Encoder | None = None,
    fields: Iterable[str] | None = None,
    verify: bool = False,
) -> SoftDB:
    """Open a database directory, or make it; `None` is a database in memory.

    Args:
        path: the directory. In mode "rw" it is made when `dim` is given and nothing is there.
        dim: d, the width of a key; an encoder with an attribute `dim` says it itself.
        value_dim: v, the width of a value; without it the key serves as the value.
        num_classes: values are integer labels below this instead, and soft queries answer with distributions.
        dtype: how vectors are stored, "float32" (default) or "float16".
        metric: "dot" (default), "cosine" or "l2".
        mode: "rw" writes (one process at a time), "r" reads.
        durability: "full": what a verb has done is on disk when it returns. "relaxed": it is within about a second, at
            `flush()` and at `close()`; a crash of the process or the machine before that takes the last changes, whole
            verbs from the last one back, never half of one. Other processes see what was flushed.
        device: where this handle computes, "cpu", "cuda", "cuda:1" or a list of GPUs: where its columns are copied to
            and queries that are no tensors are answered; see `SoftDB.device` and `SoftDB.to`.
        encoder: texts -> (n, d); then keys and queries may be texts. Its attribute `name`, where it has one, is kept
            with a database that holds no records yet; another's is refused from then on. "ngrams" is then made again
            without being given; a model is not, as models run code.
        fields: of the payload, to be indexed for filters (see `SoftDB.index_field`); those declared before stay.
        verify: read everything back against its checksums first.

    Whatever is omitted is read from an existing database; what is given must agree with it.

    Raises:
        NotADatabase: nothing there, a file, another program's directory, or one that may not be read.
        DatabaseLocked: another process writes to it.
        BadInput: the arguments contradict each other or the database.
        CorruptionError, FormatTooNew: its files are damaged, or newer than this softdb.
        WriteFailed: in mode "rw" the disk refused; what was acknowledged is as it was.
    """
    try:
        check.one_of(mode, "mode", ("rw", "r"))
        check.one_of(durability, "durability", ("full", "relaxed"))
        place = None if path is None else check.folder(path, "path", "a directory's path, or None for memory")
        if place is not None and (table := table_at(place)) is not None:
            raise NotADatabase(
                f"{table} is a Lance table, not one database's directory: softdb.cluster.open answers over it, and "
                f"'softdb snapshot {table} DIRECTORY' makes one database of it, for what needs that"
            )
        if encoder is not None and not callable(encoder):
            raise BadInput(f"encoder is {check.shown(encoder)}; expected a callable, texts -> (n, d)")
        dim = check.attribute(encoder, "dim") if dim is None else dim
        where, declared = check.devices(device), field_names(() if fields is None else fields)
        shape = (dim, value_dim, num_classes, dtype, metric)
        new = check.schema(*shape, None) if dim is not None or path is None else None
        try:
            store = FilteredStore(place, mode, new, durability == "relaxed")
            try:
                check.schema(*shape, store.schema)
                _declare(store, declared)
                _remember(store, encoder)
                db = SoftDB(DatabaseCore(store, encoder, where))
                if verify:
                    db.verify()
            except BaseException:
                store.close()
                raise
        except (OSError, apsw.Error) as error:
            raise _refused(path, mode, error) from error
        return db
    except SoftDBError as error:
        if not hasattr(error, "verb"):
            error.args = (f"open: {error.args[0]}", *error.args[1:])
        raise


def table_at(path: str | os.PathLike[str]) -> str | None:
    """The address of the Lance table that a path names: a folder that Lance wrote, or such as s3://bucket/t.lance.

    None where it names anything else: a database's directory, or what may become one.
    """
    place, address = Path(path), _STORED.match(os.fspath(path))
    if (place / "_versions").is_dir() and not (place / "catalog.sqlite").exists():
        return str(place)
    if address is None or place.exists():
        return None
    return f"{address[1]}://{os.fspath(path)[address.end() :]}"


def _remember(store: FilteredStore, encoder: check.Encoder | None) -> None:
    """Keep the encoder's name where it makes the first keys; BadInput where another has made those that are there."""
    if encoder is None:
        return
    noted = store.keyed.encoder
    require_same(noted, encoder)
    name = name_of(encoder)
    if noted is None and name is not None and store.mode == "rw" and not store.snapshot.count:
        store.note_encoder(name)


def _declare(store: FilteredStore, fields: tuple[str, ...]) -> None:
    """Index the fields that are not indexed yet."""
    missing = sorted(set(fields) - set(store.fields()))
    if missing and store.mode == "r":
        raise BadInput(f"fields {', '.join(missing)} have no index and this handle only reads; open it with mode='rw'")
    if missing:
        store.index_fields(missing)


def _refused(path: object, mode: str, error: OSError | apsw.Error) -> SoftDBError:
    """Return an error of the system as one of softdb's."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.ReadOnlyError) and mode == "r":
        return NotADatabase(
            f"{path} holds no database that can be read without writing to it ({why}): its making was cut short, or "
            'files of it may not be written; open it once with mode="rw"'
        )
    if isinstance(error, PermissionError | apsw.PermissionsError | apsw.ReadOnlyError | apsw.CantOpenError):
        return NotADatabase(f"{path} cannot be opened ({why}); check the path and its permissions")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return DatabaseLocked(f"{path} is held by another process ({why}); wait for it, or end it")
    if mode == "rw":
        return WriteFailed(f"{path} cannot be opened for writing ({why}); mend the cause, open again")
    return CorruptionError(f"{path} cannot be read ({why}); mend the disk, or restore the directory from a copy")
