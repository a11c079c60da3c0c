"""Check the invariant of a cluster: its shards hold the records of its table at one version, no more and no fewer.

After every refresh and restart a handle calls `is_kept`. It checks that each shard's directory names this table's
version, and that the numbers of records and of rows left out sum to the table's number of rows. Shards that break the
invariant are rebuilt from the table. `verified` compares the records themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from softdb.check import Id, shown
from softdb.cluster.handle import Cluster
from softdb.cluster.placement import is_id, shard_of
from softdb.cluster.shard import Description, Refresh, of_records
from softdb.errors import CorruptionError, ShardUnavailable, StaleRead
from softdb.lance_table.storable import storable
from softdb.lance_table.truth import LeftOut, Truth
from softdb.store import Batch

_AT_ONCE = 2000  # number of rows compared at once
_NAMED = 10  # largest number of ids in an error message


def is_kept(truth: Truth, known: Mapping[int, Description], dataset: Any = None) -> bool:
    """Return True if shards at one version keep the invariant, or if a missing shard prevents the check.

    `dataset`: that version of the table, if it is open.
    """
    if len(known) < truth.shards:
        return True
    if dataset is None:
        dataset = truth.at(of_records(known[0].version))
    rows = sum(shard.records + len(shard.left_out) for shard in known.values())
    return {shard.identity for shard in known.values()} == {truth.identity(dataset)} and rows == dataset.count_rows()


def verified(db: Cluster, truth: Truth, version: int, left_out: tuple[LeftOut, ...]) -> int:
    """Compare the records of all shards with a version of the table; return the number of records.

    Cost: one pass over the table, and one over the records. If records differ, rebuilds the shards that hold them, and
    raises CorruptionError with the shards and ids.
    """
    dataset, wrong, same, id_column = truth.at(version), dict[Id | None, str](left_out), 0, truth.fields.id
    for rows in truth.batches(dataset, _AT_ONCE):
        ids, refused = rows.column(rows.schema.names.index(id_column)).to_pylist(), list[LeftOut]()
        records = truth.rows(rows.take(np.flatnonzero([id not in wrong for id in ids])), refused)
        for batch in [] if records is None else storable(truth, records, refused):
            differing = _differing(db, batch)
            same += len(batch.ids) - len(differing)
            wrong |= differing
        wrong |= dict(refused)
    if len(db) > same + int(db.core.stored([*filter(is_id, wrong)]).sum()):
        table = set(dataset.to_table(columns=[id_column])[id_column].to_pylist())
        surplus = (id for records in db.scan(_AT_ONCE) for id in records.ids if id not in table)
        wrong |= dict.fromkeys(surplus, "the table has no such row")
    if wrong:
        differing_shards = set(shard_of([*(wrong.keys() - {id for id, _ in left_out})], truth.shards).tolist())
        with contextlib.suppress(ShardUnavailable, StaleRead):
            db.caller.look(lambda shard: Refresh(version, rebuild=shard in differing_shards))
        raise _named(truth, version, wrong, len(differing_shards))
    return same


def _differing(db: Cluster, batch: Batch) -> dict[Id | None, str]:
    """Compare a batch of the table with the cluster; return {id: reason} for records that are missing or differ."""
    stored = db.core.stored(batch.ids)
    places = np.flatnonzero(stored)
    records = db.get([batch.ids[i] for i in places])
    keyed = np.ones(len(stored), np.bool_) if batch.keyed is None else batch.keyed
    unequal = {"key": keyed[places] != records.keyed.numpy()}
    for name, column, own in (("key", batch.keys, records.keys), ("value", batch.values, records.values)):
        if column is not None and own is not None:
            apart = (column[places] != own.numpy()).reshape(len(places), -1).any(1) & keyed[places]
            unequal[name] = unequal.get(name, False) | apart
    for name, texts, others in (
        ("payload", batch.payloads, records.payload_texts),
        ("text", batch.texts or [None] * len(stored), records.texts),
    ):
        unequal[name] = np.array([texts[i] != text for i, text in zip(places, others, strict=True)], np.bool_)
    wrong: dict[Id | None, str] = {batch.ids[i]: "it is missing" for i in np.flatnonzero(~stored)}
    return wrong | {batch.ids[i]: f"its {name} differs" for name, rows in unequal.items() for i in places[rows]}


def _named(truth: Truth, version: int, wrong: dict[Id | None, str], rebuilt: int) -> CorruptionError:
    """Return an error that names the first _NAMED differing records, sorted by shard."""
    parts = shard_of([*wrong], truth.shards).tolist()
    first = sorted(zip(parts, wrong.items(), strict=True), key=lambda pair: pair[0])[:_NAMED]
    names = "; ".join(f"shard {shard}, id {shown(id)}: {reason}" for shard, (id, reason) in first)
    more = f"; and {len(wrong) - len(first)} more" if len(wrong) > len(first) else ""
    advice = f"{rebuilt} shards are being rebuilt" if rebuilt else "correct these rows by upsert, or delete them"
    return CorruptionError(
        f"{len(wrong)} records differ from those in {truth.url} at version {version}: {names}{more}; {advice}"
    )
