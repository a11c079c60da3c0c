"""Open the PATH of a command: a database's directory or, for some commands, a cluster's table."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from softdb.errors import BadInput, SoftDBError, named
from softdb.terminal import progress

if TYPE_CHECKING:
    from softdb.check import Encoder
    from softdb.cluster import TableCluster
    from softdb.database import SoftDB
    from softdb.filters import FilteredStore
    from softdb.index.choose import Progress

    Place: TypeAlias = SoftDB | TableCluster

T = TypeVar("T")

SHARDS_TIMEOUT_SECONDS = 600.0  # to wait for a cluster's shards; Ctrl-C stops the wait


def opened(path: Path, has_text: bool = False, encoder: str | None = None, projection: Path | None = None) -> SoftDB:
    """Open the database for reading; if `has_text`, with the encoder for queries that are texts."""
    import softdb

    return softdb.open(path, mode="r", encoder=_query_encoder(path, encoder, projection) if has_text else None)


def answering(
    path: Path,
    has_text: bool = False,
    encoder: str | None = None,
    projection: Path | None = None,
    *,
    quiet: bool = False,
) -> Place:
    """Open the database or the cluster's table for reading; show the progress of new shards unless `quiet`."""
    from softdb.opening import table_at

    table = table_at(path)
    if table is None:
        return opened(path, has_text, encoder, projection)
    return _cluster(table, "r", _query_encoder(path, encoder, projection) if has_text else None, quiet)


def read(
    path: Path, verb: str, of_store: Callable[[FilteredStore], T], of_handle: Callable[[Place], T], quiet: bool
) -> T:
    """Call `of_store` with the store, which needs no torch; if it cannot be opened, `of_handle` with a handle."""
    import apsw

    from softdb.filters import FilteredStore

    try:
        store = FilteredStore(path, "r", None)
    except (SoftDBError, OSError, apsw.Error):  # a cluster's table, or an error that opening the handle explains
        with answering(path, quiet=quiet) as db:
            return of_handle(db)
    with contextlib.closing(store), named(verb):
        return of_store(store)


def writing(path: Path, encoder: Encoder | None = None, *, quiet: bool = False) -> Place:
    """Open the database or the cluster's table for writing; show the progress of new shards unless `quiet`."""
    from softdb.opening import existing, table_at

    table = table_at(path)
    return existing(path, encoder) if table is None else _cluster(table, "rw", encoder, quiet)


def described(path: Path) -> tuple[int | None, str | None]:
    """Return the width of a database's keys, None if undecided, and the stored name of the encoder that made them."""
    import softdb
    from softdb.opening import table_at

    table = table_at(path)
    if table is not None:
        from softdb.lance_table.truth import stored

        truth = stored(table, None)
        return truth.schema.dim, truth.encoder
    with softdb.open(path, mode="r") as db:
        return db.dim, db.encoder_name


def place(path: Path) -> str:
    """Return the path as it was typed; `Path` shortens the `//` of a table's address."""
    from softdb.opening import table_at

    return table_at(path) or str(path)


def _cluster(table: str, mode: Literal["rw", "r"], encoder: Encoder | None, quiet: bool) -> TableCluster:
    """Open a table with its shards in this process, or on the cluster of Ray that RAY_ADDRESS names."""
    from softdb import cluster

    on: Literal["ray", "here"] = "ray" if os.environ.get("RAY_ADDRESS") else "here"
    with contextlib.ExitStack() as until_open:
        bar: Progress | None = None

        def show(stage: str, done: int, total: int) -> None:
            nonlocal bar
            bar = bar or until_open.enter_context(progress(stage, rate=True))  # no bar if every shard exists
            bar(stage, done, total)

        report = None if quiet else show
        return cluster.open(table, mode, on=on, timeout=SHARDS_TIMEOUT_SECONDS, encoder=encoder, progress=report)


def _query_encoder(path: Path, encoder: str | None, projection: Path | None) -> Encoder:
    """Return the encoder for text queries; for keys that `train --keys` changed, it includes the projection."""
    dim, stored_name = described(path)
    if projection is not None:
        from softdb.train import TextTowers, load

        trained = load(projection)
        if trained.keys is not None and stored_name == trained.name:
            base = chosen(path, trained.metadata.get("encoder"), encoder)
            return TextTowers(trained, named_encoder(base, dim, path))
    return named_encoder(chosen(path, stored_name, encoder), dim, path)


def _is_built_in(name: str) -> bool:
    """Return True for "demo" and n-gram encoders: with these names softdb never loads a model from a folder."""
    from softdb.data.encoder import DEMO
    from softdb.encoders import ngrams

    return name == DEMO or ngrams(name) is not None


def require_outside(path: Path, name: str) -> str:
    """Return the encoder's name unchanged. Raise BadInput if it is a model inside the database's directory."""
    inside = any(full(Path(name)).is_relative_to(full(path)) for full in (Path.absolute, Path.resolve))
    if not _is_built_in(name) and Path(name).exists() and inside:
        raise BadInput(f"the model {name!r} lies in the database's own directory, and models run code; move it out")
    return name


def chosen(path: Path, stored: str | None, option: str | None, default: str | None = None) -> str:
    """Return the name of the encoder to use: `option` (--encoder), else `stored` in the database, else `default`.

    Raises BadInput if option and stored name differ, or if the stored name is a model and no option confirms it.
    """
    from softdb.train.projection import TRAINED

    if option is not None and stored not in (None, require_outside(path, option)):
        raise BadInput(f"the keys of {path} were made by the encoder {stored!r}, not {option!r}; leave --encoder out")
    if stored is not None and stored.startswith(TRAINED):
        raise BadInput(f"the keys of {path} are trained; give the file that softdb train wrote: --projection FILE.pt")
    if option is None and stored is not None and not _is_built_in(stored):
        # a name in a stranger's database must not decide which model is loaded
        remedy = f"load it with --encoder {shlex.quote(stored)}"
        raise BadInput(f"the keys of {path} were made by the model {stored!r}; {remedy}")
    name = option or stored or default
    if name is None:
        models = "--encoder (ngrams, demo or a model)"
        raise BadInput(f"{path} stores no name of an encoder; add {models}, or give numbers: '[1, 0]'")
    return name


def named_encoder(name: str, dim: int | None = None, path: Path | None = None) -> Encoder:
    """Make an encoder from its name: `ngrams` (`dim` wide), `demo`, or a sentence-transformers model.

    For `demo` with a demo database's path, return the query encoder that `softdb demo` trained there.
    """
    from softdb.data.encoder import DEMO, demo_encoder
    from softdb.encoders import encoder_of

    return demo_encoder(path) if name == DEMO else encoder_of(name, dim)
