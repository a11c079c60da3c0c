"""What a cluster costs beyond its slowest shard, what it sends, and whether its answers and bars are one database's.

    python benchmarks/cluster.py --parts overhead growth bytes bars --out benchmarks/results/cluster.json

overhead: one query over two shards, in this process, by actors of Ray (one that holds both, as on one machine; and two
on two nodes) and on two gloo ranks. Shards note how long each message takes them in the very question that is timed, so
both work side by side; overhead is the time of the whole less that of the slowest shard. The floor is what carries the
messages alone, in the same run: calls of the same actors, and all-to-alls of gloo, that do nothing, or read as many
bytes by torch as a shard does: after such a pause, and beside it, a call takes longer than in a row of empty ones.
growth: what a shard takes by its number of records, and a caller by its number of hosts, for scaling_model.py.
bytes: what is sent and what comes back, at several numbers of records: it must not grow with them.
bars: errors and coverage beside those of one database at equal draws, however the records are shared out.

Every answer is checked before a figure counts. A result file keeps the parts that are not measured anew.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cluster_growth import growth
from cluster_transports import SHARDS, TRANSPORTS, World, overhead, rank_of
from cluster_world import bars, bytes_sent
from common import provenance, write_json


def main() -> None:
    """Measure some parts, and write them beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["overhead", "growth", "bytes", "bars"], default=["overhead"])
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--on", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument(
        "--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="of bytes and growth"
    )
    parser.add_argument("--draws", type=int, default=30, help="of bars: generators a query")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank_of(given.rank, given.meeting, World(given.n, given.dim), given.repeats)))
        return
    result: dict[str, Any] = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    about = {
        **provenance(["softdb", "torch", "numpy", "ray", "pylance"]),
    }
    if "overhead" in given.parts:
        world = World(given.n, given.dim)
        shape = {"n": given.n, "dim": given.dim, "shards": SHARDS, "repeats": given.repeats}
        result["overhead"] = about | shape | {"milliseconds": overhead(world, given.repeats, given.on)}
    if "growth" in given.parts:
        result["growth"] = about | growth(given.records, given.repeats)
    if "bytes" in given.parts:
        result["bytes"] = about | bytes_sent(given.records)
    if "bars" in given.parts:
        result["bars"] = about | bars(given.draws)
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
