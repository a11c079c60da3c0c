"""`softdb.open`: a database handle from a path and options."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import apsw

from softdb import check
from softdb.database import DatabaseCore, SoftDB
from softdb.encoders import REMEDY, EncoderLike, encoder_of, name_of, ngrams, require_like, require_same
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, NotADatabase, SoftDBError, WriteFailed, named
from softdb.filters import FilteredStore
from softdb.misnomers import known_arguments
from softdb.store.keyed import Keyed
from softdb.store.paths import field_names
from softdb.typing import Device

__all__ = ["existing", "open", "table_at"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://?(?=[^/])")  # one slash is enough, as pathlib turns s3:// into s3:/


@known_arguments
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
    encoder: EncoderLike | None = None,
    fields: Iterable[str] | None = None,
    verify: bool = False,
) -> SoftDB:
    """Open a database directory, or create it; `None` is a database in memory.

    Args:
        path: the directory. In mode "rw" a missing database is created.
        dim: d, the width of a key; by default the attribute `dim` of the encoder, or else the width of the first keys.
        value_dim: v, the width of a value; without it the key serves as the value.
        num_classes: values are integer labels below this number, and soft queries return distributions over them.
        dtype: number type of stored vectors, "float32" (default) or "float16".
        metric: "dot" (default), "cosine" or "l2".
        mode: "rw" writes (one process at a time), "r" reads.
        durability: "full": a change is on disk when its call returns. "relaxed": it is on disk within about a second,
            after `flush()` and after `close()`. A crash of the process or the machine before that loses the last
            calls, each of them whole. Other processes see flushed changes only.
        device: "cpu", "cuda", "cuda:1" or a list of GPUs: keys and values are copied there, and queries that are no
            tensors are answered there; see `SoftDB.device` and `SoftDB.to`.
        encoder: texts -> (n, d); then keys and queries may be texts. Any callable, "ngrams", or the name or folder of a
            sentence-transformers model (see `softdb.text.SentenceEncoder`). A database stores the encoder's attribute
            `name`, if there is one, and its vectors of three texts, and refuses an encoder of another name or with
            other vectors from then on. Later, "ngrams" need not be given; a model must be, as models run code. If a
            database without a width gets texts without keys first, n-grams embed them, with an `EncoderWarning`.
        fields: payload fields to index for filters (see `SoftDB.index_field`); fields indexed before stay indexed.
        verify: first compare all stored bytes with their checksums.

    Omitted settings are read from an existing database; settings that are given must agree with it, once it has keys.

    Raises:
        NotADatabase: nothing is at the path, or a file, another program's directory, or an unreadable directory.
        DatabaseLocked: another process writes to the database.
        BadInput: the arguments contradict each other or the database, or a model cannot be loaded.
        CorruptionError, FormatTooNew: the database is damaged, or written by a newer softdb.
        WriteFailed: in mode "rw" the disk refused a write; acknowledged changes are safe.
    """
    with named("open"):
        check.one_of(mode, "mode", ("rw", "r"))
        check.one_of(durability, "durability", ("full", "relaxed"))
        place = None if path is None else check.folder(path, "path", "a directory's path, or None for memory")
        if place is not None and (table := table_at(place)) is not None:
            raise NotADatabase(
                f"{table} is a Lance table, not one database's directory; open it with softdb.cluster.open, or make "
                f"one database of it with 'softdb snapshot {table} DIRECTORY'"
            )
        embed = None if encoder is None else encoder_of(encoder, dim)
        width = check.attribute(embed, "dim") if dim is None else dim
        devices, declared = check.devices(device), field_names(() if fields is None else fields)
        new = check.schema(width, value_dim, num_classes, dtype, metric, None)
        created = place is not None and not (place / "catalog.sqlite").exists()
        try:
            store = FilteredStore(place, mode, new if mode == "rw" else None, durability == "relaxed")
            try:
                if isinstance(encoder, str) and ngrams(encoder) and store.schema.dim and dim is None:
                    embed, width = ngrams(encoder, store.schema.dim), None
                if dim is None and (stored := store.schema.dim) and width not in (None, stored):
                    vectors = f"the encoder {check.shown(name_of(embed) or embed)} gives {width} numbers a text"
                    raise BadInput(f"{vectors}, but this database's keys have {stored}; {REMEDY}")
                schema = check.schema(width, value_dim, num_classes, dtype, metric, store.schema)
                _note_origin(store, store.keyed._replace(schema=schema), embed)
                _declare(store, declared)
                db = SoftDB(DatabaseCore(store, embed, devices))
                db.core.created = created
                if verify:
                    db.verify()
            except BaseException:
                store.close()
                raise
        except (OSError, apsw.Error) as error:
            raise _refused(path, mode, error) from error
        return db


def existing(path: str | os.PathLike[str], encoder: EncoderLike | None = None) -> SoftDB:
    """Open a database for writing, as `open` does, but raise NotADatabase, and create nothing, if there is none."""
    if not (Path(path) / "catalog.sqlite").exists():
        open(path, mode="r")  # raises
    return open(path, encoder=encoder)


def table_at(path: str | os.PathLike[str]) -> str | None:
    """Return the address of a Lance table: a folder that Lance wrote, or an address like s3://bucket/t.lance.

    Return None for any other path: a database's directory, or a path where one may be created.
    """
    place, address = Path(path), _SCHEME.match(os.fspath(path))
    if (place / "_versions").is_dir() and not (place / "catalog.sqlite").exists():
        return str(place)
    if address is None or place.exists():
        return None
    return f"{address[1]}://{os.fspath(path)[address.end() :]}"


def _note_origin(store: FilteredStore, origin: Keyed, encoder: check.Encoder | None) -> None:
    """Store the settings given, and in a database without keys the encoder's name. Raise BadInput for another."""
    if encoder is not None:
        require_same(origin.encoder, encoder, origin.fingerprint is not None)
        try:
            require_like(origin, encoder)
        except OSError as error:  # of a service on the network
            raise BadInput(f"the encoder failed ({type(error).__name__}: {error}); repair it, or give none") from error
        if origin.encoder is None and not store.snapshot.count:
            origin = origin._replace(encoder=name_of(encoder))
    if store.mode == "rw" and origin != store.keyed:
        store.note_origin(origin)
    elif (origin.schema.described | {"dim": 0}) != (store.schema.described | {"dim": 0}):
        raise BadInput("mode='r' changes no settings of a database; give the stored ones, or open it with mode='rw'")


def _declare(store: FilteredStore, fields: tuple[str, ...]) -> None:
    """Index the fields that are not indexed yet. Raise BadInput if the database is open for reading only."""
    missing = sorted(set(fields) - set(store.fields()))
    if missing and store.mode == "r":
        raise BadInput(f"fields {', '.join(missing)} have no index and mode is 'r'; open it with mode='rw'")
    if missing:
        store.index_fields(missing)


def _refused(path: object, mode: str, error: OSError | apsw.Error) -> SoftDBError:
    """Translate an error of SQLite or the operating system into an error of softdb."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.ReadOnlyError) and mode == "r":
        return NotADatabase(
            f"{path} holds no database that can be read without writing to it ({why}): its creation was cut short, or "
            'its files may not be written; open it once with mode="rw"'
        )
    if isinstance(error, PermissionError | apsw.PermissionsError | apsw.ReadOnlyError | apsw.CantOpenError):
        return NotADatabase(f"{path} cannot be opened ({why}); check the path and its permissions")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return DatabaseLocked(f"{path} is held by another process ({why}); wait for it, or end it")
    if mode == "rw":
        return WriteFailed(f"{path} cannot be opened for writing ({why}); repair the cause, then open it again")
    return CorruptionError(f"{path} cannot be read ({why}); repair the disk, or restore the directory from a copy")
