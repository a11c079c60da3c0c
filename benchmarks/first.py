"""Time of the first call of each verb in a fresh process, beside the second; and CPU time of import and open.

    python benchmarks/first.py --out benchmarks/results/first.json

Nothing is compiled at run time. A first call takes longer because of imports, of memory that is mapped for the first
time, and of measurements that softdb makes then. Each call has another query. CPU time is that of all threads, in
seconds, without `import torch`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import provenance, write_json

import softdb

VERBS = {
    "search": "db.search(query, k=10)",
    "search by a filter": "db.search(query, k=10, where={'even': True})",
    "search exactly": "db.search(query, k=10, exact=True)",
    "attend, k": "db.attend(query, k=10)",
    "attend": "db.attend(query)",
    "attend, 8 queries": "db.attend(query.repeat(8, 1))",
    "backward": "db.attend(query.clone().requires_grad_()).output.sum().backward()",
    "attend, rtol": "db.attend(query, rtol=0.1)",
    "attend, max_draws": "db.attend(query, rtol=0.1, max_draws=100)",
    "backward, max_draws": "db.attend(query.clone().requires_grad_(), rtol=0.1, max_draws=100).output.sum().backward()",
    "count_within": "db.count_within(query, 0.5)",
    "sample": "db.sample(query, 3)",
}
PROGRAM = """
import json, sys, time, torch
start = time.process_time()
import softdb
imported = time.process_time()
db = softdb.open(sys.argv[1])
opened = time.process_time()
queries = torch.randn(3, 1, db.dim, generator=torch.Generator().manual_seed(1))
times = {{"import": imported - start, "open": opened - imported}}
for name, query in zip(("first", "second", "third"), queries):
    before, cpu = time.perf_counter(), time.process_time()
    {call}
    times[name] = time.perf_counter() - before
    times[name + ", CPU"] = time.process_time() - cpu
print(json.dumps({{name: round(seconds, 4) for name, seconds in times.items()}}))
"""


def make_database(folder: Path, n: int, dim: int) -> Path:
    """Make a database with an index and return its path."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((1000, dim), np.float32)
    keys = centres[random.integers(0, 1000, n)] + 0.7 * random.standard_normal((n, dim), np.float32)
    with softdb.open(folder / "db", dim=dim, metric="cosine") as db:
        db.insert(range(n), keys, payloads=[{"even": i % 2 == 0} for i in range(n)])
        db.build_index("ivf")
    return folder / "db"


def main() -> None:
    """Measure each verb in a process of its own and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = provenance(["softdb", "torch", "numpy", "faiss-cpu"])
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_database(Path(folder), args.n, args.dim)
        for name, call in VERBS.items():
            program = [sys.executable, "-c", PROGRAM.format(call=call), str(path)]
            rows[name] = json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
            print(f"{name:20}", rows[name], flush=True)
    if args.out:
        write_json(args.out, {**result, "rows": rows})


if __name__ == "__main__":
    main()
