"""The databases of a command's PATH, opened: a directory, or a cluster's table where the command takes one."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from softdb.errors import BadInput, SoftDBError
from softdb.terminal import progress

if TYPE_CHECKING:
    from softdb.check import Encoder
    from softdb.cluster import TableCluster
    from softdb.database import SoftDB
    from softdb.filters import FilteredStore
    from softdb.index.choose import Progress

    Place: TypeAlias = SoftDB | TableCluster

T = TypeVar("T")

PATIENCE = 600.0  # seconds for a cluster's shards; a person can end it before


def opened(path: Path, has_text: bool = False, encoder: str | None = None, projection: Path | None = None) -> SoftDB:
    """The database for reading, with the encoder that a text query needs, of trained keys that of the projection."""
    import softdb

    return softdb.open(path, mode="r", encoder=_asking(path, encoder, projection) if has_text else None)


def answering(
    path: Path,
    has_text: bool = False,
    encoder: str | None = None,
    projection: Path | None = None,
    *,
    quiet: bool = False,
) -> Place:
    """As `opened`, of a cluster's table, too; a terminal is told how its shards are made, unless `quiet`."""
    from softdb.opening import table_at

    table = table_at(path)
    if table is None:
        return opened(path, has_text, encoder, projection)
    return _cluster(table, "r", _asking(path, encoder, projection) if has_text else None, quiet)


def read(
    path: Path, verb: str, of_store: Callable[[FilteredStore], T], of_handle: Callable[[Place], T], quiet: bool
) -> T:
    """Ask a database's store, which imports no torch; where there is none, or it refuses to open, ask the handle."""
    import apsw

    from softdb.filters import FilteredStore

    try:
        store = FilteredStore(path, "r", None)
    except (SoftDBError, OSError, apsw.Error):  # a table of a cluster; or an error that the handle names
        with answering(path, quiet=quiet) as db:
            return of_handle(db)
    with contextlib.closing(store):
        try:
            return of_store(store)
        except SoftDBError as error:
            error.args = (f"{verb}: {error.args[0]}", *error.args[1:])
            raise


def writing(path: Path, encoder: Encoder | None = None, *, quiet: bool = False) -> Place:
    """The database, or the cluster's table, for writing; as `answering`."""
    import softdb
    from softdb.opening import table_at

    table = table_at(path)
    return softdb.open(path, encoder=encoder) if table is None else _cluster(table, "rw", encoder, quiet)


def described(path: Path) -> tuple[int, str | None]:
    """The width of the keys, and the name of the encoder that made them."""
    import softdb
    from softdb.opening import table_at

    table = table_at(path)
    if table is not None:
        from softdb.cluster.truth import stored

        truth = stored(table, None)
        return truth.schema.dim, truth.encoder
    with softdb.open(path, mode="r") as db:
        return db.dim, db.encoder_name


def place(path: Path) -> str:
    """A path as it was typed."""
    from softdb.opening import table_at

    return table_at(path) or str(path)


def _cluster(table: str, mode: Literal["rw", "r"], encoder: Encoder | None, quiet: bool) -> TableCluster:
    """Its shards in this process; where RAY_ADDRESS says that there is one, on that cluster of Ray."""
    from softdb import cluster

    on: Literal["ray", "here"] = "ray" if os.environ.get("RAY_ADDRESS") else "here"
    with contextlib.ExitStack() as until_open:
        bar: Progress | None = None

        def say(what: str, done: int, whole: int) -> None:
            nonlocal bar
            bar = bar or until_open.enter_context(progress(what, rate=True))  # none where every shard is there
            bar(what, done, whole)

        told = None if quiet else say
        return cluster.open(table, mode, on=on, timeout=PATIENCE, encoder=encoder, progress=told)


def _asking(path: Path, encoder: str | None, projection: Path | None) -> Encoder:
    """Return the encoder of a command's texts."""
    dim, noted = described(path)
    if projection is not None:
        from softdb.train import TextTowers, load

        trained = load(projection)
        if trained.keys is not None and noted == trained.name:
            base = chosen(path, trained.metadata.get("encoder"), encoder)
            return TextTowers(trained, named_encoder(base, dim, path))
    return named_encoder(chosen(path, noted, encoder), dim, path)


def _lies_in(one: Path, folder: Path) -> bool:
    return one.absolute().is_relative_to(folder.absolute()) or one.resolve().is_relative_to(folder.resolve())


def _is_ours(name: str) -> bool:
    """Return True for a name that loads nothing a stranger could have put in a model's place."""
    from softdb.data.encoder import DEMO
    from softdb.encoders import ngrams

    return name == DEMO or ngrams(name) is not None


def require_outside(path: Path, name: str) -> str:
    """The name of an encoder. BadInput where that is a model in the database's own directory."""
    if not _is_ours(name) and Path(name).exists() and _lies_in(Path(name), path):
        raise BadInput(f"the model {name!r} lies in the database's own directory, and models run code; move it out")
    return name


def chosen(path: Path, noted: str | None, asked: str | None, default: str | None = None) -> str:
    """The name of a database's encoder: asked for, noted there, or else the default. BadInput where they differ."""
    from softdb.train.projection import TRAINED

    if asked is not None and noted not in (None, require_outside(path, asked)):
        raise BadInput(f"the keys of {path} were made by the encoder {noted!r}, not {asked!r}; leave --encoder out")
    if noted is not None and noted.startswith(TRAINED):
        raise BadInput(f"the keys of {path} were trained; texts are asked with what that wrote: --projection FILE.pt")
    if asked is None and noted is not None and not _is_ours(noted):
        # what a stranger has noted must not choose which model is loaded
        remedy = f"load it with --encoder {shlex.quote(noted)}"
        raise BadInput(f"the keys of {path} were made by the model {noted!r}; {remedy}")
    name = asked or noted or default
    if name is None:
        raise BadInput(
            f"{path} does not say what made its keys; add --encoder (ngrams, demo or a model), or give numbers"
        )
    return name


def named_encoder(name: str, dim: int | None = None, path: Path | None = None) -> Encoder:
    """The encoder of a name: `ngrams` (`dim` wide), `demo`, or a sentence-transformers model.

    `demo` with the path of a demo database is the encoder of its queries, as trained.
    """
    from softdb.data.encoder import DEMO, demo_encoder
    from softdb.encoders import ngrams
    from softdb.text import SentenceEncoder

    return demo_encoder(path) if name == DEMO else ngrams(name, dim) or SentenceEncoder(name)
