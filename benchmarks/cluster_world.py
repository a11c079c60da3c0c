"""Bytes that a cluster sends, and its answers and bars beside one database's; run by cluster.py."""

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

D = V = 128  # widths of keys and values, for the bytes
Q, K, SHARDS = 4, 10, 8  # queries, hits, shards
BATCH = 100_000  # records in an insert
INDEXED = 100_000  # records up to which an index is built; beyond, a round is a pass, whose reply is as long
ROUND_BYTES = 12_000  # largest size of a round of an estimate, per query and shard
OUTPUT, GRADIENT = 1e-5, 5e-6  # largest relative errors of outputs and gradients
N, WIDTH, VALUES, CENTRES, ASKED, PARTS = 42_000, 8, 4, 32, 150, 4  # the world of the bars, its queries and shards
DRAWS, RTOL, CONFIDENCE = 400, 0.01, 0.95
ALLOWED = 1.15  # largest rms error of the cluster over that of one database


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_sent(sizes: list[int]) -> dict[str, Any]:
    """Count bytes per query by the number of records; raise SystemExit if they grow with it or exceed their bounds."""
    records = {n: counted(n) for n in sizes}
    exact = [
        {verb: sent["numbers"] for verb, sent in row["each shard on a host"].items() if verb != "round"}
        for row in records.values()
    ]
    if any(sent != exact[0] for sent in exact):
        raise SystemExit(f"bytes grow with the number of records; expected the same bytes: {json.dumps(exact)}")
    return {"dim": D, "value_dim": V, "queries": Q, "hits": K, "shards": SHARDS, "records": records}


def counted(n: int) -> dict[str, Any]:
    """Count the bytes of each verb over n records, and compare the answers with those of one database."""
    random = np.random.default_rng(0)
    single = softdb.open(None, dim=D, value_dim=V)
    parts = [softdb.open(None, dim=D, value_dim=V) for _ in range(SHARDS)]
    for low in range(0, n, BATCH):
        keys, values = (random.standard_normal((min(BATCH, n - low), D), np.float32) for _ in range(2))
        single.insert(range(low, low + len(keys)), keys, values)
        for shard, part in enumerate(parts):
            own_rows = np.arange((shard - low) % SHARDS, len(keys), SHARDS)
            part.insert((low + own_rows).tolist(), keys[own_rows], values[own_rows])
    shards = [DatabaseShard(part, shard, SHARDS) for shard, part in enumerate(parts)]
    queries = torch.from_numpy(random.standard_normal((Q, D), np.float32)) / 4
    spread, together = Hosts(shards, SHARDS), Hosts(shards, 1)
    off = {
        "one host a shard": agree(single, Cluster(spread), queries),
        "one host": agree(single, Cluster(together), queries),
    }
    for part in parts if n <= INDEXED else ():
        part.build_index("ivf", recall=0.9)
    row: dict[str, Any] = {
        "indexed": n <= INDEXED,
        "off": off,
        "each shard on a host": lines(spread, queries, SHARDS),
        "all on one": lines(together, queries, 1),
    }
    print(n, json.dumps(row), flush=True)
    bounds = {"exact": 4 * (D + V + 1), "round": ROUND_BYTES}
    for verb, bound in bounds.items():
        sent = sum(row["each shard on a host"][verb]["numbers"])
        if sent > bound:
            raise SystemExit(f"{verb}: {sent:.0f} bytes per query and shard; expected at most {bound}")
    for db in (single, *parts):
        db.close()
    return row


def agree(single: softdb.SoftDB, db: Cluster, queries: Tensor) -> dict[str, float]:
    """Return the largest differences to one database's answers, relative to the largest; raise if one is too large."""
    answers = []
    for source in (db, single):
        leaf = queries.clone().requires_grad_()
        pooled = source.attend(leaf)
        grad = torch.autograd.grad(pooled.output.square().sum() + pooled.lse.sum(), leaf)[0]
        answers.append((pooled.output.detach(), pooled.lse.detach(), grad))
    limits = ("output", OUTPUT), ("lse", OUTPUT), ("gradient", GRADIENT)
    errors = dict[str, float]()
    for (name, limit), answer, expected in zip(limits, *answers, strict=True):
        errors[name] = error = float((answer - expected).abs().max() / expected.abs().max())
        if error > limit:
            raise SystemExit(f"{name} is off by {error:.1e} of one database's; expected at most {limit:.0e}")
    if db.search(queries, K, exact=True).ids != single.search(queries, K, exact=True).ids:
        raise SystemExit("the cluster finds other records than one database; expected the same ids")
    return {name: float(f"{error:.2g}") for name, error in errors.items()}


def lines(transport: Hosts, queries: Tensor, hosts: int) -> dict[str, Any]:
    """Count bytes per query and host, requests and replies: of the arrays alone, and of the pickled messages."""
    db, leaf = Cluster(transport), queries.clone().requires_grad_()
    counts = dict[str, Any]()

    def count(name: str, ask: Callable[[], Any]) -> Any:
        transport.cleared()
        answer = ask()
        messages = Q * hosts * (transport.asked if name == "round" else 1)
        counts[name] = {
            "numbers": [round(total / messages, 1) for total in transport.numbers],
            "pickled": [round(total / messages) for total in transport.wire],
        }
        return answer

    loss = count("exact", lambda: db.attend(leaf)).output.sum()
    count("backward", lambda: loss.backward())
    count("search", lambda: db.search(queries, K, exact=True))
    count("round", lambda: db.attend(queries, rtol=0.05, max_draws=1000))
    counts["round"]["rounds"] = transport.asked
    return counts


# -- bars --------------------------------------------------------------------------------------------------------------


class Parted(NamedTuple):
    """Clustered records in one database and in a cluster, and queries."""

    single: softdb.SoftDB
    cluster: Cluster
    queries: Tensor


def parted(kind: str) -> Parted:
    """Place records on shards at random, by their cluster, or every key four times, once on each shard."""
    random = np.random.default_rng(0)
    centres, labels = random.standard_normal((CENTRES, WIDTH)), random.integers(0, CENTRES, N)
    keys = (centres[labels] + 0.5 * random.standard_normal((N, WIDTH))).astype(np.float32)
    values = keys @ random.standard_normal((WIDTH, VALUES)) + 0.5 * random.standard_normal((N, VALUES))
    homes = {
        "hash": random.integers(0, PARTS, N),
        "clusters": labels * PARTS // CENTRES,
        "four times": np.arange(N) % PARTS,
    }
    if kind == "four times":
        keys, values = keys[: N // 4].repeat(4, 0), values[: N // 4].repeat(4, 0)
    parts = [softdb.open(None, dim=WIDTH, value_dim=VALUES) for _ in range(PARTS)]
    for shard, part in enumerate(parts):
        own_rows = np.flatnonzero(homes[kind] == shard)
        part.insert(own_rows.tolist(), keys[own_rows], values[own_rows])
    cluster = Cluster(Local([DatabaseShard(part, shard, PARTS) for shard, part in enumerate(parts)]))
    single = softdb.open(None, dim=WIDTH, value_dim=VALUES)
    single.insert(range(N), keys, values)
    for db in (single, cluster):
        db.build_index("ivf", recall=0.9)
    queries = centres[random.integers(0, CENTRES, ASKED)] + 0.6 * random.standard_normal((ASKED, WIDTH))
    return Parted(single, cluster, torch.from_numpy(queries.astype(np.float32)))


def trials(db: Any, world: Parted, truth: Tensor, looks: bool, repeats: int) -> dict[str, Any]:
    """Summarise errors and bars (repeats, q); queries that want gradients get no wider searches (`looks=False`)."""
    leaf, errors, bars_, pooled_ = world.queries.clone().requires_grad_(not looks), [], [], []
    for seed in range(repeats):
        random = torch.Generator().manual_seed(seed)
        pooled = db.attend(leaf, rtol=RTOL, max_draws=DRAWS, confidence=CONFIDENCE, generator=random)
        if bool(pooled.exact.any()):
            raise SystemExit("an answer is exact; expected estimates alone, whose bars can be judged")
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
        "first errors": [round(float(first), 6) for first in error[0, :5]],
    }


def bars(repeats: int) -> dict[str, Any]:
    """Measure error and coverage of the cluster and of one database, for each way to place the records."""
    kinds = dict[str, Any]()
    for kind in ("hash", "clusters", "four times"):
        world = parted(kind)
        truth = world.single.attend(world.queries).output
        kinds[kind] = modes = {
            mode: {
                name: trials(db, world, truth, looks, repeats)
                for name, db in (("cluster", world.cluster), ("one database", world.single))
            }
            for mode, looks in (("plain", True), ("wants gradients", False))
        }
        for figures in modes.values():
            figures["error to one"] = round(figures["cluster"]["rms error"] / figures["one database"]["rms error"], 4)
        print(kind, json.dumps(modes), flush=True)
    worst = max(figures["error to one"] for figures in kinds["hash"].values())
    shape = {
        "n": N,
        "dim": WIDTH,
        "value_dim": VALUES,
        "shards": PARTS,
        "queries": ASKED,
        "draws": DRAWS,
        "repeats": repeats,
    }
    return shape | {"confidence": CONFIDENCE, "found": kinds, "error to one on hash shards": worst, "allowed": ALLOWED}
