"""How long the explorer takes to answer over a million records, over HTTP as the page asks it.

    python benchmarks/explore.py [DATABASE]

Without a database it makes one: 1,000,000 records, 128 wide, cosines, payloads with a declared field. Prints the median
and the slowest of 20 questions of each kind in milliseconds, after one to warm up.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

import softdb

RECORDS, DIM, GROUPS, QUESTIONS = 1_000_000, 128, 500, 20


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


def main(path: Path) -> None:
    """Serve the database, and ask."""
    command = [sys.executable, "-m", "softdb", "explore", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
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
            ids = [draw.randrange(RECORDS) for _ in range(QUESTIONS + 1)]
            heat = [0.02 * 1.3**i for i in range(QUESTIONS + 1)]
            where = [json.dumps({"group": {"$lt": draw.randrange(1, GROUPS)}}) for _ in range(QUESTIONS + 1)]
            ways: dict[str, dict[str, object]] = {"every record": {}, "k = 100": {"way": "nearest", "k": 100}}
            ways["estimate, 5 %"] = {"way": "estimate", "rtol": 0.05}
            kinds = {"map": [took("map") for _ in ids]}
            for name, way in ways.items():
                kinds[f"{name}, new question"] = [took("ask", id=one, temperature=0.05, **way) for one in ids]
                kinds[f"{name}, temperature"] = [took("weigh", id=7, temperature=one, **way) for one in heat]
            kinds["filtered, new question"] = [
                took("ask", id=one, temperature=0.05, where=keep) for one, keep in zip(ids, where, strict=True)
            ]
            kinds["filtered, temperature"] = [took("weigh", id=7, temperature=one, where=where[0]) for one in heat]
            for name, times in kinds.items():
                print(f"{name:32s} median {statistics.median(times[1:]):7.1f}  slowest {max(times[1:]):7.1f}")
        finally:
            server.terminate()


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(made(Path(folder) / "million"))
