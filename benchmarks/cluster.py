"""Cost of a cluster beyond its slowest shard, bytes that it sends, and its answers and bars beside one database's.

    python benchmarks/cluster.py --parts overhead growth bytes bars --out benchmarks/results/cluster.json

overhead: one query over two shards, in this process, by actors of Ray (one actor with both shards, as on one machine;
and two actors on two nodes), and on two gloo ranks. The shards record how long they take for each message of the query
that is timed. Overhead is the time of the query less that of the slowest shard. The floor is the transport alone, in
the same run: calls of the same actors, and all-to-alls of gloo, that do nothing; and calls that read as many bytes as a
shard does, because a call after a busy pause takes longer than one in a row of empty calls.
growth: time of a shard by its number of records, and of a caller by its number of hosts, for scaling_model.py.
bytes: bytes of requests and replies at several numbers of records; they must not grow with it.
size: ids placed per second, and seconds in which shards are made from each GB of a table, beside the floors.
bars: errors and coverage beside those of one database with the same draws, for several ways to place the records.

Every answer is checked before a figure counts. A result file keeps the parts that are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from cluster_growth import growth
from cluster_size import hydrated, placed
from cluster_transports import SHARDS, TRANSPORTS, World, overhead, rank_of
from cluster_world import bars, bytes_sent
from common import provenance, write_json

SIZE_ROUNDS = 5


def main() -> None:
    """Measure the chosen parts and write them beside those in the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=["overhead", "growth", "bytes", "size", "bars"], default=["overhead"]
    )
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--on", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument(
        "--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="sizes for bytes and growth"
    )
    parser.add_argument("--draws", type=int, default=30, help="generators per query for bars")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(rank_of(args.rank, args.meeting, World(args.n, args.dim), args.repeats)))
        return
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    about = provenance(["softdb", "torch", "numpy", "ray", "pylance"])
    if "overhead" in args.parts:
        world = World(args.n, args.dim)
        shape = {"n": args.n, "dim": args.dim, "shards": SHARDS, "repeats": args.repeats}
        result["overhead"] = about | shape | {"milliseconds": overhead(world, args.repeats, args.on)}
    if "growth" in args.parts:
        result["growth"] = about | growth(args.records, args.repeats)
    if "bytes" in args.parts:
        result["bytes"] = about | bytes_sent(args.records)
    if "size" in args.parts:
        result["size"] = about | placed(SIZE_ROUNDS) | hydrated(args.n, SIZE_ROUNDS)
    if "bars" in args.parts:
        result["bars"] = about | bars(args.draws)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
