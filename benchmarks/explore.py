"""How long the explorer takes to answer over a million records, over HTTP as the page asks it.

    python benchmarks/explore.py [DATABASE] [--out benchmarks/results/explore.json]

Without a database it makes one: 1,000,000 records, 128 wide, cosines, payloads with a declared field. Tells the
median, the fastest and the slowest of 10 questions of each kind in milliseconds, after one to warm up, and the
processor time of the server (Linux), which a busy machine changes less. No question is asked twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from common import provenance, write_json

import softdb

RECORDS, DIM, GROUPS, QUESTIONS = 1_000_000, 128, 500, 10


def made(path: Path) -> Path:
    """A database of clusters."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((GROUPS, DIM)).astype(np.float32)
    with softdb.open(path, dim=DIM, metric="cosine", durability="relaxed", fields=["group"]) as db:
        for start in range(0, RECORDS, 50_000):
            own = rng.integers(0, GROUPS, 50_000)
            keys = centres[own] + 0.9 * rng.standard_normal((50_000, DIM), dtype=np.float32)
            payloads = [{"group": int(one), "title": f"record {start + i}"} for i, one in enumerate(own)]
            db.insert(range(start, start + 50_000), keys, payloads=payloads)
    return path


def used(process: int) -> float:
    """Milliseconds of processor time that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(path: Path) -> dict[str, dict[str, float]]:
    """Serve the database, and ask: milliseconds of each kind of question."""
    found: dict[str, dict[str, float]] = {}
    served = [sys.executable, "-m", "softdb", "explore", str(path), "--port", "0"]
    with subprocess.Popen(served, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            connection = HTTPConnection("127.0.0.1", int(server.stdout.readline().split(":")[3].split("/")[0]))

            def took(call: str, **parameters: object) -> float:
                begin = time.perf_counter()
                connection.request("GET", f"/api/{call}?{urlencode(parameters)}")
                answer = json.loads(connection.getresponse().read())
                spent = 1e3 * (time.perf_counter() - begin)
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return spent

            draw = random.Random(0)
            others = iter(draw.sample(range(RECORDS), RECORDS))
            heat = [0.02 * 1.5**i for i in range(QUESTIONS + 1)]
            ways: dict[str, dict[str, object]] = {"every record": {}, "k = 100": {"way": "nearest", "k": 100}}
            ways["estimate, 5 %"] = {"way": "estimate", "rtol": 0.05}

            def tell(name: str, works: list[Callable[[], float]]) -> None:
                works[0]()
                begin = used(server.pid)
                times = [work() for work in works[1:]]
                spent = (used(server.pid) - begin) / len(times)
                kinds = {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
                found[name] = {kind: round(one, 1) for kind, one in (kinds | {"processor": spent}).items()}
                print(f"{name:32}" + "  ".join(f"{kind} {one:6.1f}" for kind, one in found[name].items()), flush=True)

            def drawn() -> list[int]:
                return list(itertools.islice(others, QUESTIONS + 1))

            def asks(**more: object) -> list[Callable[[], float]]:
                return [partial(took, "ask", id=one, temperature=0.05, **more) for one in drawn()]

            def weighs(**more: object) -> list[Callable[[], float]]:
                return [partial(took, "weigh", id=7, temperature=one, **more) for one in heat]

            tell("map", [partial(took, "map")] * 6)
            for name, way in ways.items():
                tell(f"{name}, new question", asks(**way))
                tell(f"{name}, temperature", weighs(**way))
            keep = json.dumps({"group": {"$lt": GROUPS // 2}})
            tell("a filter, new question", asks(where=keep))
            tell("a filter, temperature", weighs(where=keep))
            keeps = [json.dumps({"group": {"$lt": one}}) for one in draw.sample(range(1, GROUPS), QUESTIONS + 1)]
            tell("another filter each time", [partial(took, "ask", id=7, where=one) for one in keeps])
        finally:
            server.terminate()
    return found


def main() -> None:
    """Measure, and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("database", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = provenance(["softdb", "torch", "numpy", "starlette", "uvicorn"]) | {"n": RECORDS, "dim": DIM}
    with tempfile.TemporaryDirectory() as folder:
        result["milliseconds"] = measured(given.database or made(Path(folder) / "million"))
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
