"""`softdb.cluster.create`, `open` and `serve`: open the Lance table at an address as one database."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from softdb import check
from softdb.cluster.actors import hosted
from softdb.cluster.addresses import address, folder_of
from softdb.cluster.hydrate import Hydrated
from softdb.cluster.local import LocalTable
from softdb.cluster.placement import power_of_two
from softdb.cluster.shard import Transport
from softdb.cluster.table_cluster import TableCluster
from softdb.cluster.table_core import TableCore
from softdb.database.embedding import telling
from softdb.encoders import EncoderLike, encoder_of, name_of, require_same
from softdb.errors import BadInput, DatabaseLocked, named
from softdb.index.choose import Progress
from softdb.lance_table import creation
from softdb.lance_table import truth as tables
from softdb.lance_table.foreign import served
from softdb.lance_table.storage import lance_errors
from softdb.lance_table.truth import Truth
from softdb.misnomers import require_known
from softdb.tables.rows import Fields

Place = Literal["here", "ray"]

_HANDLES = 64  # largest number of handles of a table on one machine; each has its own directories


@named("create")
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
    encoder: EncoderLike | None = None,
    storage_options: dict[str, str] | None = None,
    **opened: Any,
) -> TableCluster:
    """Create an empty table, and open it.

        db = softdb.cluster.create("s3://bucket/records.lance", shards=4, dim=128)

    Args:
        url: a folder, or an address that Lance opens: s3://, gs://, az://. An object store must support conditional
            puts, as S3 does.
        dim: d, the width of a key; default: the encoder's attribute `dim`.
        shards: P, the number of shards, a power of two. `grow` doubles it.
        replicas: R, the number of actors that serve each shard on Ray; without Ray it has no effect.
        ids: type of the ids, "str" or "int".
        storage_options: Lance's options of the object store: keys, region, endpoint.
        opened: arguments of `open`.

    Other arguments are those of `softdb.open`.

    Raises:
        BadInput: a table exists at the address, or an argument is wrong.
        WriteFailed: the table cannot be written.
    """
    place = address(url)
    check.one_of(ids, "ids", ("str", "int"))
    known = {**inspect.signature(create).parameters, **inspect.signature(open).parameters}
    require_known("create", opened, {name: own for name, own in known.items() if name != "opened"})
    _require_options(**opened)
    embed = None if encoder is None else encoder_of(encoder, dim)
    dim = check.attribute(embed, "dim") if dim is None else dim
    if dim is None:
        raise BadInput("dim is not given; a new table needs the width of its keys")
    schema = check.schema(dim, value_dim, num_classes, dtype, metric, None)
    replicas = check.integer(replicas, "replicas", 1, 16)
    creation.create(place, storage_options, schema, power_of_two(shards), replicas, ids, embed and name_of(embed))
    return open(place, encoder=embed, storage_options=storage_options, **opened)


@named("open")
def open(
    url: str | os.PathLike[str],
    mode: Literal["rw", "r"] = "rw",
    *,
    timeout: float = 30.0,
    partial: bool = False,
    refresh: float | None = None,
    on: Place = "here",
    cache: str | os.PathLike[str] | None = None,
    encoder: EncoderLike | None = None,
    storage_options: dict[str, str] | None = None,
    progress: Progress | bool | None = None,
) -> TableCluster:
    """Open a table that `create` has made, and bring its shards to the newest version.

    Args:
        url: as in `create`.
        mode: "rw" to read and write, "r" to read only. Any number of handles may write at once.
        timeout: seconds to wait for a shard's answer.
        partial: True to answer without shards that exceed the timeout, and to name them; False to raise
            ShardUnavailable.
        refresh: seconds after which the handle moves to the newest version by itself, again and again, in a thread;
            None: only `refresh()` moves it. Until it moves, it answers at its version while others commit.
        on: "here" for all shards in this process, without Ray. "ray" for actors on the hosts of the Ray cluster that
            this process is connected to, or of a new one on this machine. Actors run, for other handles, too, until
            `softdb.cluster.stop(url)`.
        cache: folder of the shards' directories on each host; None: below ~/.cache/softdb. Directories that no
            handle has open may be deleted at any time. On Ray the folder of the handle that starts the actors counts.
        encoder: texts -> (n, d), as in `softdb.open`.
        storage_options: as in `create`.
        progress: called while shards are built in this process, with the name of the step, the number of rows of the
            table that were read, and the number of all; True draws a bar. Actors report no progress.

    Raises:
        NotADatabase: there is no table, or softdb did not make it: use `serve`.
        StorageUnavailable, CorruptionError: the store cannot be reached; a file of the table is missing or damaged.
        ShardUnavailable: an actor did not start within the timeout.
    """
    truth = tables.stored(address(url), storage_options)
    return _opened(truth, mode, timeout, partial, refresh, on, cache, encoder, progress)


@named("serve")
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
    refresh: float | None = None,
    on: Place = "here",
    cache: str | os.PathLike[str] | None = None,
    encoder: EncoderLike | None = None,
    storage_options: dict[str, str] | None = None,
    progress: Progress | bool | None = None,
) -> TableCluster:
    """Open a Lance table that another program has made, for reading only.

        db = softdb.cluster.serve("recipes.lance", keys="vector")    # a table of LanceDB

    Args:
        url: the table's folder; LanceDB's table `t` is `t.lance` in the database's folder.
        keys: name of the column of keys: lists of floats of one length.
        values: name of the column of values: lists of floats, or integers below `num_classes`; None: use the keys.
        ids: name of the column of ids: unique texts or integers.
        payload: names of the columns that form the payload; None: all others. Other columns are never read.
        num_classes: number of classes; None: the largest label + 1.

    Other arguments are those of `open` and `create`. `refresh()` reads only the rows that have changed.

    Raises BadInput, before any shard is built, if a column is missing, holds null, or holds vectors of several lengths.
    Rows with NaN, rows with a repeated id, and later faulty rows are left out: see `TableCluster.left_out`.
    """
    fields = Fields(id=ids, key=keys, value=values)
    shards, replicas = power_of_two(shards), check.integer(replicas, "replicas", 1, 16)
    with lance_errors(place := address(url)):
        truth = served(place, storage_options, fields, metric, num_classes, shards, replicas, payload)
    return _opened(truth, "r", timeout, partial, refresh, on, cache, encoder, progress)


def _require_options(
    mode: str = "rw",
    timeout: float = 30.0,
    refresh: float | None = None,
    on: str = "here",
    cache: Any = None,
    **_: Any,
) -> float | None:
    """Raise BadInput for a wrong argument of `open`; return `refresh` as a number."""
    check.one_of(mode, "mode", ("rw", "r"))
    check.one_of(on, "on", ("here", "ray"))
    check.positive(timeout, "timeout")
    if cache is not None:
        check.folder(cache, "cache", "a folder")
    return None if refresh is None else check.positive(refresh, "refresh")


def _opened(
    truth: Truth,
    mode: str,
    timeout: float,
    partial: bool,
    refresh: float | None,
    on: Place,
    cache: str | os.PathLike[str] | None,
    encoder: EncoderLike | None,
    progress: Progress | bool | None,
) -> TableCluster:
    interval = _require_options(mode, timeout, refresh, on, cache)
    embed = None if encoder is None else encoder_of(encoder, truth.schema.dim)
    if embed is not None:
        require_same(truth.encoder, embed)
    seconds, folder = check.positive(timeout, "timeout"), folder_of(truth.url, cache) / truth.digest
    report: Progress | None = None

    def connect(table: Truth) -> Transport:
        if on == "here":
            return _here(table, folder, report)
        return hosted(table, folder, seconds)

    with telling(progress) as sink:
        report = sink
        cluster = TableCluster(TableCore(connect, truth, seconds, partial, mode, embed))
    report = None
    if interval is not None:
        cluster.core.keep_refreshing(interval)
    return cluster


def _here(truth: Truth, folder: Path, report: Progress | None) -> LocalTable:
    """Return a transport to all shards in this process; their directories are in a folder that no other handle uses."""
    version = truth.newest()
    for number in range(_HANDLES):
        try:
            hydrated = Hydrated(truth, folder / f"here-{number}", range(truth.shards), version, report)
        except DatabaseLocked:
            continue
        return LocalTable(hydrated)
    raise DatabaseLocked(
        f"{_HANDLES} handles on this machine have {truth.url} open; close some handles, or give another folder, cache="
    )
