"""What a cluster sends, and whether its answers and bars are one database's: see cluster.py, which runs this."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import softdb
from softdb.cluster.database_shard import DatabaseShard
from softdb.cluster.handle import Cluster
from softdb.cluster.local import Local

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from contracts.cluster_hosts import Hosts

D = V = 128  # of what is counted
Q, K, SHARDS = 4, 10, 8  # queries, hits, shards
BATCH = 100_000  # records inserted at once
INDEXED = 100_000  # records, beyond which a round is a pass: its answer is as long, and no index need be built
ROUND = 12_000  # bytes that a round of an estimate may take a query and shard
OUTPUT, GRADIENT = 1e-5, 5e-6  # relative, that answers may be off by
N, WIDTH, VALUES, CENTRES, ASKED, PARTS = 42_000, 8, 4, 32, 150, 4  # the world of the bars, its queries and shards
DRAWS, RTOL, CONFIDENCE, ALLOWED = 400, 0.01, 0.95, 1.15


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_sent(sizes: list[int]) -> dict[str, Any]:
    """By the number of records. Raises where they grow with it, or are more than they may be."""
    found = {n: counted(n) for n in sizes}
    exact = [
        {name: line["numbers"] for name, line in one["each shard on a host"].items() if name != "round"}
        for one in found.values()
    ]
    if any(one != exact[0] for one in exact):
        raise SystemExit(f"what travels grows with the records: {json.dumps(exact)}")
    return {"dim": D, "value_dim": V, "queries": Q, "hits": K, "shards": SHARDS, "records": found}


def counted(n: int) -> dict[str, Any]:
    """Bytes a query, and how far the answers are from one database's."""
    random = np.random.default_rng(0)
    whole = softdb.open(None, dim=D, value_dim=V)
    parts = [softdb.open(None, dim=D, value_dim=V) for _ in range(SHARDS)]
    for low in range(0, n, BATCH):
        keys, values = (random.standard_normal((min(BATCH, n - low), D), np.float32) for _ in range(2))
        whole.insert(range(low, low + len(keys)), keys, values)
        for shard, part in enumerate(parts):
            mine = np.arange((shard - low) % SHARDS, len(keys), SHARDS)
            part.insert((low + mine).tolist(), keys[mine], values[mine])
    shards = [DatabaseShard(part, shard, SHARDS) for shard, part in enumerate(parts)]
    queries = torch.from_numpy(random.standard_normal((Q, D), np.float32)) / 4
    spread, together = Hosts(shards, SHARDS), Hosts(shards, 1)
    off = {
        "one host a shard": agree(whole, Cluster(spread), queries),
        "one host": agree(whole, Cluster(together), queries),
    }
    for part in parts if n <= INDEXED else ():
        part.build_index("ivf", recall=0.9)
    found: dict[str, Any] = {
        "indexed": n <= INDEXED,
        "off": off,
        "each shard on a host": lines(spread, queries, SHARDS),
        "all on one": lines(together, queries, 1),
    }
    print(n, json.dumps(found), flush=True)
    bound = 4 * (D + V + 1)
    if sum(found["each shard on a host"]["exact"]["numbers"]) > bound:
        raise SystemExit(f"a shard's part of an exact answer takes more than {bound} bytes a query")
    if sum(found["each shard on a host"]["round"]["numbers"]) > ROUND:
        raise SystemExit(f"a round of an estimate takes more than {ROUND} bytes a query and shard")
    for db in (whole, *parts):
        db.close()
    return found


def agree(one: softdb.SoftDB, db: Cluster, queries: Tensor) -> dict[str, float]:
    """How far answers and gradients are from one database's, relative to the largest. Raises where it is too far."""
    answers = []
    for each in (db, one):
        leaf = queries.clone().requires_grad_()
        pooled = each.attend(leaf)
        grad = torch.autograd.grad(pooled.output.square().sum() + pooled.lse.sum(), leaf)[0]
        answers.append((pooled.output.detach(), pooled.lse.detach(), grad))
    names = ("output", OUTPUT), ("lse", OUTPUT), ("gradient", GRADIENT)
    found = dict[str, float]()
    for (name, dial), mine, own in zip(names, *answers, strict=True):
        found[name] = off = float((mine - own).abs().max() / own.abs().max())
        if off > dial:
            raise SystemExit(f"{name} is off by {off:.1e}; nothing counts")
    if db.search(queries, K, exact=True).ids != one.search(queries, K, exact=True).ids:
        raise SystemExit("the cluster finds other records than one database; nothing counts")
    return {name: float(f"{off:.2g}") for name, off in found.items()}


def lines(transport: Hosts, queries: Tensor, hosts: int) -> dict[str, Any]:
    """Bytes a query and host, up and back: the numbers in arrays, and all that is pickled."""
    db, leaf = Cluster(transport), queries.clone().requires_grad_()
    found = dict[str, Any]()

    def noted(name: str, ask: Callable[[], Any]) -> Any:
        transport.cleared()
        answer = ask()
        each = Q * hosts * (transport.asked if name == "round" else 1)
        found[name] = {
            "numbers": [round(one / each, 1) for one in transport.numbers],
            "pickled": [round(one / each) for one in transport.wire],
        }
        return answer

    loss = noted("exact", lambda: db.attend(leaf)).output.sum()
    noted("backward", lambda: loss.backward())
    noted("search", lambda: db.search(queries, K, exact=True))
    noted("round", lambda: db.attend(queries, rtol=0.05, max_draws=1000))
    found["round"]["rounds"] = transport.asked
    return found


# -- bars --------------------------------------------------------------------------------------------------------------


class Parted(NamedTuple):
    """Clustered records in one database, and shared out."""

    one: softdb.SoftDB
    cluster: Cluster
    queries: Tensor


def parted(kind: str) -> Parted:
    """Records shared out by chance, by cluster, or every key four times, once on each shard."""
    random = np.random.default_rng(0)
    centres, lab = random.standard_normal((CENTRES, WIDTH)), random.integers(0, CENTRES, N)
    keys = (centres[lab] + 0.5 * random.standard_normal((N, WIDTH))).astype(np.float32)
    values = keys @ random.standard_normal((WIDTH, VALUES)) + 0.5 * random.standard_normal((N, VALUES))
    homes = {
        "hash": random.integers(0, PARTS, N),
        "clusters": lab * PARTS // CENTRES,
        "four times": np.arange(N) % PARTS,
    }
    if kind == "four times":
        keys, values = keys[: N // 4].repeat(4, 0), values[: N // 4].repeat(4, 0)
    parts = [softdb.open(None, dim=WIDTH, value_dim=VALUES) for _ in range(PARTS)]
    for shard, part in enumerate(parts):
        mine = np.flatnonzero(homes[kind] == shard)
        part.insert(mine.tolist(), keys[mine], values[mine])
    cluster = Cluster(Local([DatabaseShard(part, shard, PARTS) for shard, part in enumerate(parts)]))
    one = softdb.open(None, dim=WIDTH, value_dim=VALUES)
    one.insert(range(N), keys, values)
    for db in (one, cluster):
        db.build_index("ivf", recall=0.9)
    asked = centres[random.integers(0, CENTRES, ASKED)] + 0.6 * random.standard_normal((ASKED, WIDTH))
    return Parted(one, cluster, torch.from_numpy(asked.astype(np.float32)))


def trials(db: Any, world: Parted, truth: Tensor, looks: bool, repeats: int) -> dict[str, Any]:
    """Errors and bars (repeats, q) of one database or cluster; queries that want gradients get no wider looks."""
    leaf, errors, bars_, pooled_ = world.queries.clone().requires_grad_(not looks), [], [], []
    for seed in range(repeats):
        random = torch.Generator().manual_seed(seed)
        pooled = db.attend(leaf, rtol=RTOL, max_draws=DRAWS, confidence=CONFIDENCE, generator=random)
        if bool(pooled.exact.any()):
            raise SystemExit("an answer is exact, which says nothing of bars")
        errors.append((pooled.output.detach() - truth).norm(dim=1))
        bars_.append(pooled.bar)
        pooled_.append(pooled.n_pooled.float().mean())
    error, bar = torch.stack(errors), torch.stack(bars_)
    inside = (error <= bar).float()
    return {
        "rms error": round(float(error.square().mean().sqrt()), 5),
        "records pooled": round(float(torch.stack(pooled_).mean()), 1),
        "coverage": round(float(inside.mean()), 4),
        "its standard error": round(float(inside.mean(0).std() / inside.shape[1] ** 0.5), 4),  # over queries
        "median bar": round(float(bar.median()), 5),
        "infinite bars": round(float(bar.isinf().float().mean()), 4),
        "answers": inside.numel(),
        "first errors": [round(float(one), 6) for one in error[0, :5]],
    }


def bars(repeats: int) -> dict[str, Any]:
    """Of each way to share records out: error and coverage of the cluster, and of one database."""
    found = dict[str, Any]()
    for kind in ("hash", "clusters", "four times"):
        world = parted(kind)
        truth = world.one.attend(world.queries).output
        found[kind] = line = {
            mode: {
                name: trials(db, world, truth, looks, repeats)
                for name, db in (("cluster", world.cluster), ("one database", world.one))
            }
            for mode, looks in (("plain", True), ("wants gradients", False))
        }
        for both in line.values():
            both["error to one"] = round(both["cluster"]["rms error"] / both["one database"]["rms error"], 4)
        print(kind, json.dumps(line), flush=True)
    worst = max(both["error to one"] for both in found["hash"].values())
    shape = {
        "n": N,
        "dim": WIDTH,
        "value_dim": VALUES,
        "shards": PARTS,
        "queries": ASKED,
        "draws": DRAWS,
        "repeats": repeats,
    }
    return shape | {"confidence": CONFIDENCE, "found": found, "error to one on hash shards": worst, "allowed": ALLOWED}
