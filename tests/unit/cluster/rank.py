"""One rank of a job that `test_cluster_ranks` starts: what it finds, it asserts; what it prints, the test reads."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contracts.cluster import N, differentiated, near, subset
from torch.nn.parallel import DistributedDataParallel

import softdb
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.distributed import Ranks
from softdb.cluster.handle import Cluster
from softdb.errors import BadInput, ShardUnavailable

SHARDS = 4


def opened(rank: int, ranks: int, timeout: float = 60.0) -> Cluster:
    home = np.random.default_rng(5).integers(0, SHARDS, N)
    own = {
        shard: DatabaseShard(subset(None, np.flatnonzero(home == shard), "dot"), shard, SHARDS)
        for shard in range(SHARDS)
        if shard % ranks == rank
    }
    dist.barrier()  # a busy machine may have subset them at very different times
    return Cluster(Ranks(own, timeout), timeout)


def equal_to_one_database(cluster: Cluster, rank: int) -> None:
    """Every rank has other queries, and another number of them."""
    one = subset(None, np.arange(N), "dot")
    queries = torch.from_numpy(np.random.default_rng(rank).standard_normal(((3, 1, 0)[rank % 3], 8)))
    for dtype, dial in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        for words in ({}, {"where": {"third": 1}}, {"k": 7}):
            if len(queries):
                for mine, own in zip(
                    *(differentiated(db, queries.to(dtype), **words) for db in (cluster, one)), strict=True
                ):
                    near(mine, own, dial)
            else:
                differentiated(cluster, queries.to(dtype), **words)
    mine, own = (db.search(queries.float(), 5, exact=True) for db in (cluster, one))
    assert (mine.ids, mine.payloads) == (own.ids, own.payloads)
    if rank == 0:  # alone: what hits need came with them
        assert [hit.payload for hit in mine[0]] == [hit.payload for hit in own[0]]
    leaf = queries.float().requires_grad_()
    estimate = cluster.log_partition(leaf, rtol=0.02)
    near(estimate.value.sum() + 1, one.log_partition(queries.float()).value.sum() + 1, 1e-4)
    estimate.value.sum().backward()  # type: ignore[no-untyped-call]
    assert sorted(n for part in cluster.scan(500) for n in part.ids) == list(range(N))
    cluster.sample(queries.float(), 2)


def trains_as_one_process(cluster: Cluster, rank: int, ranks: int) -> None:
    """The gradients of DDP over halves of the queries are those of one process over all, whatever the world size."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 8)
    wrapped = DistributedDataParallel(torch.nn.Linear(8, 8))
    wrapped.module.load_state_dict(plain.state_dict())
    batch, positives = torch.randn(4 * ranks, 8), list(range(4 * ranks))
    mine = slice(4 * rank, 4 * rank + 4)
    softdb.nn.retrieval_loss(cluster, wrapped(batch[mine]), positives[mine]).backward()  # type: ignore[no-untyped-call]
    softdb.nn.retrieval_loss(subset(None, np.arange(N), "dot"), plain(batch), positives).backward()  # type: ignore[no-untyped-call]
    for parameter, true in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert true.grad is not None
        near(parameter.grad, true.grad, 5e-6)


def unlike_calls(cluster: Cluster, rank: int) -> None:
    """Told at once, to everybody; then the ranks go on."""
    with pytest.raises(BadInput, match="every rank makes the same calls"):
        cluster.attend(torch.ones(1, 8)) if rank else cluster.search(torch.ones(1, 8))
    assert cluster.attend(torch.ones(1, 8)).output.shape == (1, 4)


def a_call_of_some(rank: int, ranks: int) -> None:
    """Told within the timeout, and from then on at once."""
    cluster = opened(rank, ranks)
    cluster.caller.timeout = 1.0  # of the question, however long the transport would wait
    if rank == 0:
        for match in ("only some ranks", "out of step since"):
            with pytest.raises(ShardUnavailable, match=match):
                cluster.attend(torch.ones(1, 8))
    dist.barrier()


def a_slow_rank(rank: int, ranks: int) -> None:
    """A question waits as long as the handle allows, even if the transport would not."""
    cluster = opened(rank, ranks, timeout=5.0)
    cluster.caller.timeout = 60.0
    if rank:
        time.sleep(6.0)
    assert cluster.attend(torch.ones(1, 8)).output.shape == (1, 4)


def a_lost_rank(rank: int, ranks: int) -> None:
    """A lost rank is reported at once, not at the timeout, so the test ends before."""
    cluster = opened(rank, ranks, timeout=3600.0)
    dist.barrier()
    if rank == 0:
        with pytest.raises(ShardUnavailable, match="a rank is lost"):
            cluster.attend(torch.ones(1, 8))


def too_few_ranks(rank: int) -> None:
    """Started with fewer ranks than the shards were shared out for."""
    with pytest.raises(BadInput, match="each on one rank"):
        Ranks({rank * 2: DatabaseShard(subset(None, np.arange(4), "dot"), 0, 1)}, 60.0)


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(sys.argv[1])}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    cluster = opened(rank, ranks)
    equal_to_one_database(cluster, rank)
    trains_as_one_process(cluster, rank, ranks)
    unlike_calls(cluster, rank)
    too_few_ranks(rank)
    a_call_of_some(rank, ranks)
    if ranks > 2:  # the long form
        a_slow_rank(rank, ranks)
    a_lost_rank(rank, ranks)
    sys.stdout.write("all is well\n")
    sys.stdout.flush()
    os._exit(0)  # a group that was left in the middle of a call waits at exit


if __name__ == "__main__":
    main()
