"""Lance tables for tests of clusters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from softdb.check import schema
from softdb.cluster.hydrate import Hydrated
from softdb.database.incoming import Given, RecordChecker
from softdb.lance_table.creation import create
from softdb.lance_table.truth import Truth, stored
from softdb.store import Batch

DIM = 6


def made(url: str, shards: int = 4, ids: str = "str", options: dict[str, str] | None = None, **words: Any) -> Truth:
    """An empty table; `words` as of `softdb.check.schema`."""
    given = {"dim": DIM, "value_dim": None, "num_classes": None, "dtype": None, "metric": None, **words}
    create(url, options, schema(**given, stored=None), shards, 1, ids, None)
    return stored(url, options)


def batch(truth: Truth, ids: Sequence[Any], seed: int = 0, keyed: bool = True, **words: Any) -> Batch:
    """Checked records of those ids: their keys say which seed made them."""
    keys = np.random.default_rng(seed).normal(size=(len(ids), DIM)).astype(np.float32)
    given = {
        "values": None,
        "payloads": [{"seed": seed, "id": one} for one in ids],
        "texts": [f"text {one}" for one in ids],
        **words,
    }
    column: Any = keys if keyed else [None] * len(ids)
    checker = RecordChecker(truth.schema, lambda: None)
    return checker.batch(Given(list(ids), column, given["values"], given["payloads"], given["texts"]), lambda *_: None)


def contents(hydrated: Hydrated) -> dict[int | str, tuple[list[float] | None, Any, Any, str | None]]:
    """Every record of every shard: key, value, payload and text."""
    found: dict[int | str, Any] = {}
    for shard in hydrated.own_shards:
        for records in hydrated.databases[shard].scan():
            for i, name in enumerate(records.ids):
                assert name not in found, f"{name} lies in two shards"
                keyed = bool(records.keyed[i])
                value = None if records.values is None or not keyed else records.values[i].tolist()
                key = records.keys[i].tolist() if keyed else None
                found[name] = (key, value, records.payloads[i], records.texts[i])
    return found


def hydrated(truth: Truth, folder: Path) -> Hydrated:
    """All shards at the newest version."""
    return Hydrated(truth, folder, range(truth.shards), truth.newest())


def told(truth: Truth) -> dict[int | str, tuple[list[float] | None, Any, Any, str | None]]:
    """Records of the table, read without softdb."""
    import json

    rows = truth.now().to_table().to_pylist()
    return {
        row["id"]: (row["key"], row.get("value"), row["payload"] and json.loads(row["payload"]), row["text"])
        for row in rows
    }


def held(db: Any) -> dict[Any, Any]:
    """Every record of a cluster, in the form in which `told` reads the table."""
    found: dict[Any, Any] = {}
    for part in db.scan(1000):
        for i, name in enumerate(part.ids):
            assert name not in found, f"{name} comes twice"
            key = part.keys[i].tolist() if part.keyed[i] else None
            found[name] = (key, None, part.payloads[i], part.texts[i])
    return found


def rows(db: Any, ids: list[Any], keys: list[Any], **columns: Any) -> Any:
    """Rows of the table's schema, as another program makes them."""
    import lance
    import pyarrow as pa

    schema = lance.dataset(db.url).schema
    given = {"id": ids, "key": keys, "text": [None] * len(ids), "payload": [None] * len(ids), **columns}
    return pa.table(
        [pa.array(given.get(name, [None] * len(ids)), schema.field(name).type) for name in schema.names], schema=schema
    )


def rewrite(url: str, ids: list[str], column: str, values: list[Any]) -> None:
    """Write a column anew in the files where rows lie, as Lance's `update_columns` does it."""
    import lance
    import pyarrow as pa

    dataset = lance.dataset(url)
    kind = dataset.schema.field(column).type
    changed = pa.table({"id": ids, column: pa.array(values, kind)})
    for part in dataset.get_fragments():
        made, fields = part.update_columns(changed, left_on="id", right_on="id")
        operation = lance.LanceOperation.Update(updated_fragments=[made], fields_modified=fields)
        dataset = lance.LanceDataset.commit(dataset, operation, read_version=dataset.version)
