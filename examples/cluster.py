"""A Lance table with four shards that are lost and made again.

    python examples/cluster.py [ray] [--plot PICTURE.png] [--quick]

The shards are in this process, or with `ray` in actors of Ray. All files are in a folder that is removed at the end.
Needs softdb[cluster].
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from shared import arguments

import softdb
from softdb import cluster
from softdb.plots import figure, save


def main(on: Literal["here", "ray"], picture: str | None, quick: bool) -> None:
    """Write, query, delete the shards, double their number; compare all answers with those of a single database."""
    rng = np.random.default_rng(0)
    n = 500 if quick else 2000
    ids, keys = [f"r{i}" for i in range(n)], rng.normal(size=(n, 32)).astype(np.float32)
    single = softdb.open(None, dim=32, metric="cosine")
    single.insert(ids, keys)
    with tempfile.TemporaryDirectory() as folder:
        url, cache = Path(folder, "records.lance"), Path(folder, "cache")
        db = cluster.create(url, dim=32, metric="cosine", shards=4, on=on, cache=cache, timeout=120)
        db.insert(ids, keys)
        print(f"written     {len(db)} records, {db.shards} shards, version {db.version}")
        print(f"queried     {compare(single, db, keys)}")
        db.close()
        if on == "ray":
            cluster.stop(url)
        shutil.rmtree(cache)  # deletes every shard
        db = cluster.open(url, on=on, cache=cache, timeout=120)
        print(f"made again  {compare(single, db, keys, picture)}")
        if on == "here":
            print(f"grown       {db.grow()} shards, {compare(single, db, keys)}")
        with cluster.open(url, "r", cache=cache) as other:
            db.upsert("r0", -keys[:1])
            before = other.search(-keys[:1], 1).ids[0]
            other.refresh()
            print(f"refreshed   {before} -> {other.search(-keys[:1], 1).ids[0]}")
        db.close()
        if on == "ray":
            cluster.stop(url)


def compare(single: softdb.SoftDB, db: cluster.TableCluster, keys: np.ndarray, picture: str | None = None) -> str:
    """Check that a cluster gives the answers and gradients of a single database; return a line that says so."""
    answers, grads = [], []
    for handle in (single, db):
        queries = torch.tensor(keys[:4] + 0.1, requires_grad=True)
        pooled = handle.attend(queries, temperature=0.1)
        grads.append(torch.autograd.grad(pooled.output.square().sum(), queries)[0])
        answers.append((handle.search(queries, 5).ids, pooled.output.detach()))
    assert answers[0][0] == answers[1][0]
    torch.testing.assert_close(answers[1][1], answers[0][1], rtol=1e-4, atol=1e-5)
    assert (grads[1] - grads[0]).norm() <= 1e-4 * grads[0].norm()
    if picture:
        drawn, (ax,) = figure()
        ax.axline((0, 0), slope=1, color="0.6", label="equal")
        ax.plot(answers[0][1].flatten(), answers[1][1].flatten(), "o", label="one number of a soft answer")
        ax.set(xlabel="by a single database", ylabel="by four shards, made again", title="Four shards answer as one")
        ax.legend()
        save(drawn, picture)
    return "answers as a single database"


if __name__ == "__main__":
    main(**arguments(__doc__, on={"nargs": "?", "choices": ["here", "ray"], "default": "here"}))
