"""Times of two checkouts of softdb, side by side: what a change costs.

    python benchmarks/two_versions.py ../old . --out benchmarks/results/two_versions.json

Each checkout answers in a process of its own, with the kernels that lie in it, from copies of one database with one
index. Exact answers are compared first. What a way costs each measures for itself, so that a choice between ways that
cost about the same may differ.
The two are then called by turns in random order, each time with other queries and after a call that does not count, so
that whatever else the machine does slows them alike. A ratio is the median over turns of new / old; its spread, the
middle half of the turns.
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
    """Keys in clusters, and 4,096 queries from them."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(10, n // 100), dim), np.float32)

    def some(count: int) -> np.ndarray[Any, Any]:
        return centres[random.integers(0, len(centres), count)] + 0.7 * random.standard_normal((count, dim), np.float32)

    return some(n), some(4096)


def calls(n: int, dim: int, folder: Path) -> dict[str, Callable[[int, int], Any]]:
    """The verbs over a world, each a function of the number of queries and of the turn."""
    import torch

    import softdb

    keys, queries = world(n, dim)
    path = folder / f"{n}-{dim}"
    if not path.exists():
        with softdb.open(path, dim=dim, value_dim=dim) as made:
            made.insert(range(n), keys, keys)
            made.build_index("ivf")
    db = softdb.open(path)
    assert db.stats().index is not None
    db.watch(share=0)
    warm, fresh = 0.1 * dim**0.5, iter(range(n, 10**9))

    def asked(q: int, turn: int) -> np.ndarray[Any, Any]:
        return queries[(turn * q) % (4096 - q) :][:q]

    def backward(q: int, turn: int) -> Any:
        wanted = torch.from_numpy(asked(q, turn).copy()).requires_grad_()
        db.attend(wanted, temperature=warm).output.sum().backward()  # type: ignore[no-untyped-call]
        return wanted.grad

    def insert(q: int, turn: int) -> Any:
        return db.insert([next(fresh) for _ in range(q)], asked(q, turn), asked(q, turn))

    return {
        "search": lambda q, turn: db.search(asked(q, turn), k=10).rows,
        "exact search": lambda q, turn: db.search(asked(q, turn), k=10, exact=True).rows,
        "attend": lambda q, turn: db.attend(asked(q, turn), temperature=warm).output,
        "attend rtol": lambda q, turn: db.attend(asked(q, turn), temperature=warm, rtol=0.05).output,
        "attend k": lambda q, turn: db.attend(asked(q, turn), temperature=warm, k=32).output,
        "backward": backward,
        "get": lambda q, turn: db.get([(turn * q + i) % n for i in range(q)]).keys,
        "insert": insert,
    }


def serve(folder: Path) -> None:
    """Read a world, a verb, queries and a turn a line; write the seconds, and the answer of the first turn."""
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
        """One request and its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply


def rows(versions: list[Version], turns: int, worlds: list[tuple[int, int]], verbs: list[str]) -> Iterator[Any]:
    """A row for each world, verb and number of queries."""
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
    """Print a line a row, and the ratios of each verb at the end."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return
    from common import provenance, write_json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--most", type=int, default=10**9, help="records of a world at most")
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=VERBS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = provenance(["torch", "numpy", "faiss-cpu"])
    found, worlds = [], [world for world in WORLDS if world[0] <= options.most]
    with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
        pair = [Version(options.old, Path(old)), Version(options.new, Path(new))]
        for row in rows(pair, options.turns, worlds, options.verbs):
            print("{n} x {dim} {verb}, {q}: {old_ms} -> {new_ms} ms, {ratio} {spread}".format(**row), flush=True)
            found.append(row)
    for verb in options.verbs:
        ratios = [row["ratio"] for row in found if row["verb"] == verb]
        print(f"{verb}: median {np.median(ratios):.3f}, {min(ratios)} to {max(ratios)}")
    if options.out:
        write_json(options.out, about | {"rows": found})


if __name__ == "__main__":
    main()
