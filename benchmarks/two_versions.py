"""Times of two checkouts of softdb by turns, to measure the cost of a change.

    python benchmarks/two_versions.py ../old . --out benchmarks/results/two_versions.json

Each checkout answers in a process of its own, with its own kernels, from a copy of one database with one index. Exact
answers are compared first. Each process measures for itself which way is faster, so that the two may choose differently
where the ways cost about the same. The checkouts are called by turns in random order, each time with other queries and
after a call that does not count, so that other work on the machine slows them alike. A ratio is the median of new / old
over the turns; its spread is the middle half of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WORLDS = ((5_000, 16), (5_000, 384), (20_000, 32), (50_000, 384), (200_000, 128))
QUERIES = (1, 8, 64, 256)
VERBS = ("search", "exact search", "attend", "attend rtol", "attend k", "backward", "insert", "get")


def world(n: int, dim: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return keys in clusters (n, d), and queries of the same clusters (4,096, d)."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(10, n // 100), dim), np.float32)

    def drawn(count: int) -> np.ndarray[Any, Any]:
        return centres[random.integers(0, len(centres), count)] + 0.7 * random.standard_normal((count, dim), np.float32)

    return drawn(n), drawn(4096)


def calls(n: int, dim: int, folder: Path) -> dict[str, Callable[[int, int], Any]]:
    """Return the verbs over a world, each a function of the number of queries and of the turn."""
    import torch

    import softdb

    keys, queries = world(n, dim)
    path = folder / f"{n}-{dim}"
    if not path.exists():
        with softdb.open(path, dim=dim, value_dim=dim) as new:
            new.insert(range(n), keys, keys)
            new.build_index("ivf")
    db = softdb.open(path)
    assert db.stats().index is not None
    db.watch(share=0)
    temperature, fresh_ids = 0.1 * dim**0.5, iter(range(n, 10**9))

    def batch(q: int, turn: int) -> np.ndarray[Any, Any]:
        return queries[(turn * q) % (4096 - q) :][:q]

    def backward(q: int, turn: int) -> Any:
        leaf = torch.from_numpy(batch(q, turn).copy()).requires_grad_()
        db.attend(leaf, temperature=temperature).output.sum().backward()  # type: ignore[no-untyped-call]
        return leaf.grad

    def insert(q: int, turn: int) -> Any:
        return db.insert([next(fresh_ids) for _ in range(q)], batch(q, turn), batch(q, turn))

    return {
        "search": lambda q, turn: db.search(batch(q, turn), k=10).rows,
        "exact search": lambda q, turn: db.search(batch(q, turn), k=10, exact=True).rows,
        "attend": lambda q, turn: db.attend(batch(q, turn), temperature=temperature).output,
        "attend rtol": lambda q, turn: db.attend(batch(q, turn), temperature=temperature, rtol=0.05).output,
        "attend k": lambda q, turn: db.attend(batch(q, turn), temperature=temperature, k=32).output,
        "backward": backward,
        "get": lambda q, turn: db.get([(turn * q + i) % n for i in range(q)]).keys,
        "insert": insert,
    }


def serve(folder: Path) -> None:
    """Answer requests on standard input: a world, a verb, a number of queries and a turn in each line.

    Write the seconds of each, and the answer of the first turn.
    """
    verbs: dict[str, Callable[[int, int], Any]] = {}
    for line in sys.stdin:
        n, dim, verb, q, turn = json.loads(line)
        if not verb:
            verbs = calls(n, dim, folder)
            print("{}", flush=True)
            continue
        verbs[verb](q, 2 * turn)
        start = time.perf_counter()
        answer = verbs[verb](q, 2 * turn + 1)
        seconds = time.perf_counter() - start
        first = np.asarray(answer).tolist() if turn == 0 and answer is not None else None
        print(json.dumps({"seconds": seconds, "answer": first}), flush=True)


class Version:
    """A checkout that answers in a process of its own."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def call(self, *words: Any) -> dict[str, Any]:
        """Send a request and return its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply


def rows(versions: list[Version], turns: int, worlds: list[tuple[int, int]], verbs: list[str]) -> Iterator[Any]:
    """Yield a row for each world, verb and number of queries."""
    random = np.random.default_rng(0)
    for n, dim in worlds:
        versions[0].call(n, dim, "", 0, 0)
        shutil.copytree(versions[0].folder / f"{n}-{dim}", versions[1].folder / f"{n}-{dim}")
        versions[1].call(n, dim, "", 0, 0)
        for verb in verbs:
            for q in QUERIES:
                first = [version.call(n, dim, verb, q, 0)["answer"] for version in versions]
                if verb in ("exact search", "attend", "backward", "get"):
                    np.testing.assert_allclose(first[1], first[0], rtol=1e-4, atol=1e-5, err_msg=f"{verb} {n} x {dim}")
                seconds = np.empty((turns, 2))
                for turn in range(turns):
                    for i in random.permutation(2):
                        seconds[turn, i] = versions[i].call(n, dim, verb, q, turn + 1)["seconds"]
                low, ratio, high = np.percentile(seconds[:, 1] / seconds[:, 0], (25, 50, 75)).round(3).tolist()
                old, new = (1000 * np.median(seconds, 0)).round(4).tolist()
                yield {
                    "n": n, "dim": dim, "verb": verb, "q": q, "old_ms": old, "new_ms": new, "ratio": ratio,
                    "spread": [low, high],
                }  # fmt: skip


def main() -> None:
    """Print a line for each row and the ratios of each verb, and write the result."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return
    from common import provenance, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--most", type=int, default=10**9, help="largest number of records of a world")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = provenance(["torch", "numpy", "faiss-cpu"])
    table, worlds = [], [world for world in WORLDS if world[0] <= args.most]
    with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
        pair = [Version(args.old, Path(old)), Version(args.new, Path(new))]
        for row in rows(pair, args.turns, worlds, args.verbs):
            print("{n} x {dim} {verb}, {q}: {old_ms} -> {new_ms} ms, {ratio} {spread}".format(**row), flush=True)
            table.append(row)
    for verb in args.verbs:
        ratios = [row["ratio"] for row in table if row["verb"] == verb]
        print(f"{verb}: median {np.median(ratios):.3f}, {min(ratios)} to {max(ratios)}")
    if args.out:
        write_json(args.out, about | {"rows": table})


if __name__ == "__main__":
    main()
