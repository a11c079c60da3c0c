"""Statistics of a database, computed without importing torch or FAISS."""

from __future__ import annotations

import os

import numpy as np

from softdb.kernels import in_use
from softdb.reports import DeviceReport, IndexReport, Stats
from softdb.store.store import Store


def stats(store: Store, index: IndexReport | None, device: DeviceReport | None = None) -> Stats:
    """Return the statistics of a store. Cost: one stat for each file of its directory."""
    snapshot = store.snapshot
    return Stats(
        path=None if store.path is None else str(store.path),
        mode=store.mode,
        durability="relaxed" if store.relaxed else "full",
        unflushed=store.waiting,
        records=snapshot.records,
        keyless=len(snapshot.keyless),
        dead=snapshot.size - snapshot.count - int(np.count_nonzero(snapshot.positions(snapshot.keyless) >= 0)),
        **store.schema.described,
        encoder=store.keyed.encoder,
        generation=snapshot.generation,
        segments=len(snapshot.segments),
        fields=list(store.fields()),
        text_index=store.text_index(),
        bytes=store.occupied(),
        kernels=in_use(),
        index=index,
        device=device,
    )


def noted_index(store: Store) -> IndexReport | None:
    """Return the index report from the catalogue, without checking the index file; None if the file is absent."""
    entry = store.index_entry() or {}
    facts, covered = entry.get("report"), entry.get("covered")
    if store.path is None or not isinstance(facts, dict) or "kind" not in facts or type(covered) is not int:
        return None
    try:
        exists = entry.get("file") in os.listdir(store.path / "index")
    except OSError:
        return None
    unindexed = store.snapshot.size - store.snapshot.count_below(covered)
    return IndexReport.of({**facts, "unindexed": unindexed}) if exists else None
