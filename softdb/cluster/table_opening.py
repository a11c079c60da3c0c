"""`softdb.cluster.create`, `open` and `serve`: from the address of a table to a handle that answers as one database."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from softdb import check
from softdb.cluster import truth as tables
from softdb.cluster.actors import hosted
from softdb.cluster.addresses import address, folder_of, named
from softdb.cluster.foreign import served
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import LocalTable
from softdb.cluster.placement import power_of_two
from softdb.cluster.shard import Transport
from softdb.cluster.storage import lance_errors
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.truth import Truth
from softdb.database.embedding import telling
from softdb.encoders import name_of, require_same
from softdb.errors import BadInput, DatabaseLocked
from softdb.formats.rows import Fields
from softdb.index.choose import Progress

Place = Literal["here", "ray"]

_HANDLES = 64  # of one table on one machine, each with directories of its own


@named
def create(
    url: str | os.PathLike[str],
    *,
    dim: int | None = None,
    shards: int = 1,
    replicas: int = 1,
    ids: Literal["str", "int"] = "str",
    value_dim: int | None = None,
    num_classes: int | None = None,
    dtype: Literal["float32", "float16"] | None = None,
    metric: Literal["dot", "cosine", "l2"] | None = None,
    encoder: check.Encoder | None = None,
    storage_options: dict[str, str] | None = None,
    **opened: Any,
) -> TableCluster:
    """Make a table and open it.

        db = softdb.cluster.create("s3://bucket/records.lance", shards=4, dim=128)

    Args:
        url: a folder, or whatever Lance opens: s3://, gs://, az://. An object store must put conditionally, as S3 does.
        dim: d, the width of a key; an encoder with an attribute `dim` says it itself.
        shards: P, a power of two: how many parts the records are answered by. It doubles with `grow`.
        replicas: R, how many actors answer for each shard on Ray; elsewhere one does.
        ids: what the ids are, texts or whole numbers.
        storage_options: what Lance gives the object store: keys, region, endpoint.
        opened: as `open` takes it.

    The others are those of `softdb.open`.

    Raises:
        BadInput: there is a table already, or an argument cannot be used.
        WriteFailed: the place refused.
    """
    place = address(url)
    check.one_of(ids, "ids", ("str", "int"))
    dim = check.attribute(encoder, "dim") if dim is None else dim
    schema = check.schema(dim, value_dim, num_classes, dtype, metric, None)
    replicas = check.integer(replicas, "replicas", 1, 16)
    tables.create(place, storage_options, schema, power_of_two(shards), replicas, ids, encoder and name_of(encoder))
    return open(place, encoder=encoder, storage_options=storage_options, **opened)


@named
def open(
    url: str | os.PathLike[str],
    mode: Literal["rw", "r"] = "rw",
    *,
    timeout: float = 30.0,
    partial: bool = False,
    on: Place = "here",
    cache: str | os.PathLike[str] | None = None,
    encoder: check.Encoder | None = None,
    storage_options: dict[str, str] | None = None,
    progress: Progress | bool | None = None,
) -> TableCluster:
    """Open a table that `create` has made, and bring its shards to the newest version.

    Args:
        url: as of `create`.
        mode: "rw" writes, "r" does not. Any number of handles may write at once.
        timeout: seconds after which a shard that has not answered is given up.
        partial: answer without such shards, and say so, in place of ShardUnavailable.
        on: "here": every shard in this process, which needs no Ray. "ray": in actors on the hosts of the Ray cluster
            that this process is connected to, or of one that is started here; they live on, for others, too, until
            `softdb.cluster.stop(url)`.
        cache: where directories of the shards lie, on each host; None: below ~/.cache/softdb. They may be deleted
            at any time while nothing has them open.
        encoder: texts -> (n, d), as of `softdb.open`.
        storage_options: as of `create`.
        progress: of shards that are made here: called with what is being done, how many rows of the table were passed
            over for that, and of how many; True draws a bar. Actors tell nothing.

    Raises:
        NotADatabase: there is no table, or one that softdb has not made: `serve` it.
        StorageUnavailable, CorruptionError: the store cannot be reached; a file of the table is missing or damaged.
        ShardUnavailable: an actor did not come up within the timeout.
    """
    check.one_of(mode, "mode", ("rw", "r"))
    truth = tables.stored(address(url), storage_options)
    if encoder is not None:
        require_same(truth.encoder, encoder)
    return _opened(truth, mode, timeout, partial, on, cache, encoder, progress)


@named
def serve(
    url: str | os.PathLike[str],
    *,
    keys: str = "vector",
    values: str | None = None,
    ids: str = "id",
    payload: Sequence[str] | None = None,
    metric: Literal["dot", "cosine", "l2"] = "dot",
    num_classes: int | None = None,
    shards: int = 1,
    replicas: int = 1,
    timeout: float = 30.0,
    partial: bool = False,
    on: Place = "here",
    cache: str | os.PathLike[str] | None = None,
    encoder: check.Encoder | None = None,
    storage_options: dict[str, str] | None = None,
    progress: Progress | bool | None = None,
) -> TableCluster:
    """Answer over a Lance table that another program has made, as it is; the handle only reads.

        db = softdb.cluster.serve("recipes.lance", keys="vector")    # a table of LanceDB

    Args:
        url: the table's folder; LanceDB's table `t` is `t.lance` in the database's folder.
        keys: the column of the keys, lists of floats of one length.
        values: the column of the values, such lists, or whole numbers below `num_classes`; None: the keys serve.
        ids: the column of the ids, texts or whole numbers, each once.
        payload: the columns that are the fields of the payload; None: all others. What is not named is never read.
        num_classes: None: one more than the largest label.

    The others are those of `open` and `create`. `refresh()` takes in what has changed since: only that, where the table
    has stable row ids, else every row anew.

    Raises BadInput, before anything is made: a column is missing, holds null, or vectors of several lengths. Rows with
    NaN, or an id that comes twice, and what comes later, are left out: see `TableCluster.left_out`.
    """
    fields = Fields(id=ids, key=keys, value=values)
    shards, replicas = power_of_two(shards), check.integer(replicas, "replicas", 1, 16)
    with lance_errors(place := address(url)):
        truth = served(place, storage_options, fields, metric, num_classes, shards, replicas, payload)
    return _opened(truth, "r", timeout, partial, on, cache, encoder, progress)


def _opened(
    truth: Truth,
    mode: str,
    timeout: float,
    partial: bool,
    on: Place,
    cache: str | os.PathLike[str] | None,
    encoder: check.Encoder | None,
    progress: Progress | bool | None,
) -> TableCluster:
    check.one_of(on, "on", ("here", "ray"))
    if encoder is not None and not callable(encoder):
        raise BadInput(f"encoder is {check.shown(encoder)}; expected a callable, texts -> (n, d)")
    seconds, folder = check.positive(timeout, "timeout"), folder_of(truth.url, cache) / truth.digest
    say: Progress | None = None

    def connect(table: Truth) -> Transport:
        if on == "here":
            return _here(table, folder, say)
        return hosted(table, folder, seconds)

    with telling(progress) as told:
        say = told
        made = TableCluster(connect, truth, seconds, partial, mode, encoder)
    say = None
    return made


def _here(truth: Truth, folder: Path, say: Progress | None) -> LocalTable:
    """Every shard in this process, in the first folder that no other handle has."""
    version = truth.newest()
    for number in range(_HANDLES):
        try:
            hydrated = Hydrated(truth, folder / f"here-{number}", range(truth.shards), version, say)
        except DatabaseLocked:
            continue
        return LocalTable(hydrated)
    raise DatabaseLocked(
        f"{_HANDLES} handles of this machine have {truth.url} open; close some, or give another cache="
    )
