"""Time of the explorer's answers over a million records, over HTTP as its page asks.

    python benchmarks/explore.py [DATABASE] [--records 1000000] [--out benchmarks/results/explore.json]

Without DATABASE the script makes one: records of 128 numbers, metric cosine, payloads with a declared field.
It reports the median, fastest and slowest of 10 questions of each kind in milliseconds, after one that warms up, and
the processor time of the server (Linux), which a busy machine changes less. No question is asked twice.
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
from urllib.parse import urlencode, urlsplit

import numpy as np
from common import provenance, write_json

import softdb

RECORDS, DIM, GROUPS, QUESTIONS = 1_000_000, 128, 500, 10


def make_database(path: Path, records: int) -> Path:
    """Make a database of clustered records and return its path."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((GROUPS, DIM)).astype(np.float32)
    with softdb.open(path, dim=DIM, metric="cosine", durability="relaxed", fields=["group"]) as db:
        for start in range(0, records, 50_000):
            groups = rng.integers(0, GROUPS, 50_000)
            keys = centres[groups] + 0.9 * rng.standard_normal((50_000, DIM), dtype=np.float32)
            payloads = [{"group": int(group), "title": f"record {start + i}"} for i, group in enumerate(groups)]
            db.insert(range(start, start + 50_000), keys, payloads=payloads)
    return path


def processor_ms(process: int) -> float:
    """Return the milliseconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(path: Path, records: int) -> dict[str, dict[str, float]]:
    """Serve the database and return milliseconds of each kind of question."""
    milliseconds: dict[str, dict[str, float]] = {}
    command = [sys.executable, "-m", "softdb", "explore", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = urlsplit(server.stdout.readline().split()[2])
            connection = HTTPConnection("127.0.0.1", address.port)

            def request_ms(call: str, **parameters: object) -> float:
                begin = time.perf_counter()
                connection.request("GET", f"{address.path}api/{call}?{urlencode(parameters)}")
                answer = json.loads(connection.getresponse().read())
                spent = 1e3 * (time.perf_counter() - begin)
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return spent

            draw = random.Random(0)
            fresh_ids = iter(draw.sample(range(records), records))
            temperatures = [0.02 * 1.5**i for i in range(QUESTIONS + 1)]
            ways: dict[str, dict[str, object]] = {"every record": {}, "k = 100": {"way": "nearest", "k": 100}}
            ways["estimate, 5 %"] = {"way": "estimate", "rtol": 0.05}

            def measure(name: str, calls: list[Callable[[], float]]) -> None:
                calls[0]()  # warms up
                begin = processor_ms(server.pid)
                times = [call() for call in calls[1:]]
                spent = (processor_ms(server.pid) - begin) / len(times)
                kinds = {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}
                row = {kind: round(value, 1) for kind, value in (kinds | {"processor": spent}).items()}
                milliseconds[name] = row
                print(f"{name:32}" + "  ".join(f"{kind} {value:6.1f}" for kind, value in row.items()), flush=True)

            def asks(**options: object) -> list[Callable[[], float]]:
                ids = itertools.islice(fresh_ids, QUESTIONS + 1)
                return [partial(request_ms, "ask", id=record, temperature=0.05, **options) for record in ids]

            def weighs(**options: object) -> list[Callable[[], float]]:
                return [partial(request_ms, "weigh", id=7, temperature=heat, **options) for heat in temperatures]

            measure("map", [partial(request_ms, "map")] * 6)
            measure("map, colours", [partial(request_ms, "colours", field="group")] * 6)
            for name, way in ways.items():
                measure(f"{name}, new question", asks(**way))
                measure(f"{name}, temperature", weighs(**way))
                slopes = partial(request_ms, "gradient", id=7, right=8, **way)
                measure(f"{name}, gradient", [partial(slopes, temperature=t) for t in temperatures])
                ids = itertools.islice(fresh_ids, QUESTIONS + 1)
                measure(f"{name}, trail", [partial(request_ms, "trail", id=record, **way) for record in ids])
            moves = [json.dumps([[8, 0.05]] * count) for count in range(1, QUESTIONS + 2)]
            measure("a step of the question", [partial(request_ms, "ask", id=7, moves=some) for some in moves])
            where = json.dumps({"group": {"$lt": GROUPS // 2}})
            measure("a filter, new question", asks(where=where))
            measure("a filter, temperature", weighs(where=where))
            filters = [json.dumps({"group": {"$lt": group}}) for group in draw.sample(range(1, GROUPS), QUESTIONS + 1)]
            measure("another filter each time", [partial(request_ms, "ask", id=7, where=where) for where in filters])
        finally:
            server.terminate()
    return milliseconds


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("database", type=Path, nargs="?")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = provenance(["softdb", "torch", "numpy", "starlette", "uvicorn"]) | {"n": args.records, "dim": DIM}
    with tempfile.TemporaryDirectory() as folder:
        result["milliseconds"] = measured(
            args.database or make_database(Path(folder) / "records", args.records), args.records
        )
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
