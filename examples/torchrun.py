"""Train a retriever on several ranks. Each rank holds some of the records, and the loss is over all records.

    torchrun --nproc-per-node 2 examples/torchrun.py [--plot PICTURE.png] [--quick]

Without torchrun it starts two ranks itself. Each rank holds two of the four shards and queries with its own half of
every batch. DistributedDataParallel averages the gradients as usual, so the ranks learn what a single process would.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from shared import arguments, lines
from torch.nn.parallel import DistributedDataParallel

import softdb
from softdb.cluster import Cluster, DatabaseShard, Ranks

N, D, SHARDS, STEPS, BATCH = 2000, 16, 4, 30, 32


def trained(rank: int, ranks: int, picture: str | None, quick: bool) -> None:
    """Train on one rank. The queries are the keys, rotated and with noise added; query i shall find record i."""
    torch.manual_seed(0)
    keys = torch.randn(N, D)
    queries = keys @ torch.linalg.qr(torch.randn(D, D)).Q + 0.1 * torch.randn(N, D)
    own = {}
    for shard in range(rank, SHARDS, ranks):
        db = softdb.open(None, dim=D, metric="cosine")
        db.insert(range(shard, N, SHARDS), keys[shard::SHARDS])
        own[shard] = DatabaseShard(db, shard, SHARDS)
    cluster = Cluster(Ranks(own))
    projection = DistributedDataParallel(torch.nn.Linear(D, D, bias=False))
    optimizer = torch.optim.Adam(projection.parameters(), lr=0.05)
    random, losses = torch.Generator().manual_seed(1), []
    for _ in range(20 if quick else STEPS):
        batch = torch.randint(N, (BATCH,), generator=random)[rank::ranks]
        loss = softdb.nn.retrieval_loss(cluster, projection(queries[batch]), batch.tolist(), temperature=0.1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    hits = cluster.search(projection(queries[:200]).detach(), 1).ids
    recall = sum(ids == [i] for i, ids in enumerate(hits)) / 200
    report = f"{ranks} ranks, {SHARDS} shards, {len(cluster)} records"  # a collective call: every rank makes it
    if rank == 0:
        print(f"{report}\nloss {losses[0]:.2f} -> {losses[-1]:.2f}\nrecall at 1 {recall:.2f}")
        if picture:
            lines(picture, losses, f"{ranks} ranks train one projection over all {N:,} records")
    cluster.close()
    assert recall > 0.9


def main(picture: str | None, quick: bool) -> None:
    """Run this rank, or start two ranks if torchrun has not."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            meeting = {"WORLD_SIZE": "2", "SOFTDB_MEETING": f"file://{Path(folder) / 'meeting'}"}
            envs = [os.environ | meeting | {"RANK": str(rank)} for rank in range(2)]
            processes = [subprocess.Popen([sys.executable, *sys.argv], env=env) for env in envs]
            try:
                sys.exit(max(abs(process.wait(timeout=100)) for process in processes))
            finally:
                for process in processes:
                    process.kill()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", os.environ.get("SOFTDB_MEETING", "env://"), rank=rank, world_size=ranks)
    trained(rank, ranks, picture, quick)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**arguments(__doc__))
