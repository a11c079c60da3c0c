"""What a cluster of 1e8 to 1e11 records would need: a model, fitted to what `cluster.py` measured on one machine.

    python benchmarks/scaling_model.py --plot docs/images/cluster-scale.png
    python benchmarks/scaling_model.py --host-memory-gb 500 --price 4.0 --records 1e9 1e10

No cluster of more than one machine has run: hosts, network and price are arguments, each with the source of its default
in --help. What is measured: how long a shard's pass takes by its bytes, and a round of draws by its records; the
caller's own work by the answers that it merges; what Ray takes of the caller's processor for each actor; bytes a
question. `errors` says how far the fit is from each measurement. Not modelled: hosts that are slower than others,
callers that ask at once, a busy network, hosts that fail.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).with_name("results") / "cluster.json"
ACTORS = 16  # flat fan-out from Python, beyond which nothing was measured near
MOST_SHARDS = 1 << 16  # softdb.cluster.placement.MOST

ASSUMED: dict[str, tuple[float, str]] = {
    "dim": (128, "d, the width of a key; the model's own choice"),
    "value-dim": (128, "v, the width of a value; the model's own choice"),
    "number-bytes": (2, "float16 columns"),
    "code-bytes": (73, "of a record in an IVF index of 8-bit codes: 692.7 MiB of 1e7 in results/estimate-growth.json"),
    "other-bytes": (100, "a record's id and row in SQLite; an assumption"),
    "host-memory-gb": (128, "r5.4xlarge, 16 vCPUs, as the price's"),
    "usable": (0.8, "of the memory; the rest is for answers, SQLite, Ray and the system; an assumption"),
    "host-read-gb-s": (
        100,
        "how fast one host reads its memory; an assumption: measure it (results name this machine's)",
    ),
    "network-gbit-s": (10, "r5.4xlarge: up to 10 Gbit/s, by AWS's table of instances; an assumption for yours"),
    "round-trip-ms": (0.5, "between hosts of one zone, beyond the loopback's; an assumption: ping them"),
    "price": (
        1.072,
        "USD an hour of a host: r5.4xlarge, Linux, on demand, eu-north-1, AWS' list of June 2019; give yours",
    ),
    "replicas": (1, "R of softdb.cluster.create"),
    "shards-a-host": (8, "P / hosts; an estimate gets an answer from each"),
    "rounds": (3, "of an estimate; an assumption: 1 to 5 were seen in results/cluster.json"),
}


class Given(NamedTuple):
    """The assumptions."""

    dim: float
    value_dim: float
    number_bytes: float
    code_bytes: float
    other_bytes: float
    host_memory_gb: float
    usable: float
    host_read_gb_s: float
    network_gbit_s: float
    round_trip_ms: float
    price: float
    replicas: float
    shards_a_host: float
    rounds: float


DEFAULT = Given(*(value for value, _ in ASSUMED.values()))


class Line(NamedTuple):
    """y = base + slope x, in milliseconds."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        """y."""
        return self.base + self.slope * x


class Power(NamedTuple):
    """y = factor x^exponent, in milliseconds."""

    factor: float
    exponent: float

    def at(self, x: float) -> float:
        """y."""
        return float(self.factor * x**self.exponent)


class Fit(NamedTuple):
    """What was measured, as lines; x in brackets."""

    a_pass: Line  # of one shard and query [GB read]
    a_round: Power  # of draws, of one shard and query [records]
    merging: Line  # the caller's work for an exact answer [answers]
    judging: Line  # and for a round of an estimate [answers]
    sending: Line  # of the caller's processor, for Ray to send and take [actors]
    read_gb_s: float  # of the machine that was measured
    exact_bytes: float  # back from each host a query
    round_bytes: float  # back from each shard a query and round


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """With the least squares of the errors relative to y; neither base nor slope is negative."""
    x, y = np.array(points).T
    columns = np.stack([1 / y, x / y], 1)
    base, slope = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
    if base < 0:
        base, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    elif slope < 0:
        base, slope = float((1 / y).sum() / ((1 / y) ** 2).sum()), 0.0
    return Line(float(base), float(slope))


def power_through(points: Sequence[tuple[float, float]]) -> Power:
    """With the least squares of log y; it does not fall."""
    x, y = np.log(np.array(points)).T
    exponent = max(0.0, float(np.polyfit(x, y, 1)[0]))
    return Power(float(np.exp((y - exponent * x).mean())), exponent)


def measured(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """The points that each line is fitted to."""
    growth = results["growth"]
    return {
        "a_pass": [(one["bytes"] / 1e9, one["pass"]["median"]) for one in growth["shards"]],
        "a_round": [(one["n"], one["round"]["median"]) for one in growth["shards"]],
        "merging": [(one["hosts"], one["exact"]["median"]) for one in growth["callers"]],
        "judging": [(one["hosts"], one["estimate"]["median"]) for one in growth["callers"]],
        "sending": [(one["hosts"], one["processor"]) for one in growth["fan-out"]],
    }


def fitted(results: dict[str, Any]) -> Fit:
    """The model's measured part."""
    points = measured(results)
    sent = results["bytes"]["records"]
    line = sent[max(sent, key=int)]["each shard on a host"]
    return Fit(
        a_pass=line_through(points["a_pass"]),
        a_round=power_through(points["a_round"]),
        merging=line_through(points["merging"]),
        judging=line_through(points["judging"]),
        sending=line_through(points["sending"]),
        read_gb_s=results["growth"]["machine"]["read_gb_s"],
        exact_bytes=line["exact"]["pickled"][1],
        round_bytes=line["round"]["pickled"][1],
    )


def errors(results: dict[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """By line: x, what was measured, and what the model says of it."""
    fit = fitted(results)
    return {name: [(x, y, getattr(fit, name).at(x)) for x, y in points] for name, points in measured(results).items()}


class Needed(NamedTuple):
    """What so many records need, and how long one query takes when nobody else asks."""

    records: float
    hosts: int  # of one replica
    memory_gb: float  # of all of these
    exact_ms: float
    exact_caller_ms: float  # of these: sending, taking and merging
    estimate_ms: float
    estimate_caller_ms: float
    dollars_an_hour: float
    dollars_a_million: float  # exact queries, one after another

    @property
    def shards(self) -> int:
        """P, the power of two that gives each host at least one."""
        return 1 << math.ceil(math.log2(self.hosts))


def needed(records: float, fit: Fit, given: Given = DEFAULT) -> Needed:
    """The model."""
    columns = (given.dim + given.value_dim) * given.number_bytes
    memory = records * (columns + given.code_bytes + given.other_bytes) / 1e9
    hosts = math.ceil(memory / (given.host_memory_gb * given.usable))
    per_ms = given.network_gbit_s * 1e9 / 8 / 1e3  # bytes
    here = given.host_read_gb_s / fit.read_gb_s  # times as fast as what was measured
    read = columns * records / hosts / 1e9
    exact_caller = fit.sending.at(hosts) + fit.merging.at(hosts) + hosts * fit.exact_bytes / per_ms
    exact = given.round_trip_ms + exact_caller + fit.a_pass.base + fit.a_pass.slope * read / here
    answers = hosts * given.shards_a_host
    caller = fit.sending.at(hosts) + fit.judging.at(answers) + answers * fit.round_bytes / per_ms
    # the shards of a host draw side by side; each has its part of the records
    draws = fit.a_round.at(max(1.0, records / answers))
    estimate = given.rounds * (given.round_trip_ms + caller + draws)
    hourly = hosts * given.replicas * given.price
    return Needed(
        records, hosts, memory, exact, exact_caller, estimate, given.rounds * caller, hourly, hourly * exact / 3.6
    )


def breaks(fit: Fit, given: Given = DEFAULT) -> list[tuple[str, float]]:
    """Where each part breaks: what happens there, and from how many records on, whatever more they are."""
    grid = [10 ** (power / 50) for power in range(300, 701)]
    told: list[tuple[str, Callable[[Needed], bool]]] = [
        ("one host's memory is full", lambda one: one.hosts > 1),
        ("an exact query takes more than 100 ms", lambda one: one.exact_ms > 100),
        (f"more than {ACTORS} actors: nothing was measured near", lambda one: one.hosts > ACTORS),
        ("an estimate takes more than 100 ms", lambda one: one.estimate_ms > 100),
        ("the caller is most of an estimate", lambda one: 2 * one.estimate_caller_ms > one.estimate_ms),
        ("an estimate takes longer than an exact answer", lambda one: one.estimate_ms > one.exact_ms),
        (f"{MOST_SHARDS:,} shards are too few", lambda one: one.hosts > MOST_SHARDS),
    ]
    found = [needed(n, fit, given) for n in grid]
    ends = []
    for what, holds in told:
        from_here = list(itertools.takewhile(holds, reversed(found)))
        ends.append((what, from_here[-1].records if from_here else math.inf))
    return ends


def table(records: Sequence[float], fit: Fit, given: Given = DEFAULT) -> str:
    """In Markdown, as docs/cluster.md has it."""
    head = [
        "records",
        "hosts",
        "memory, GB",
        "exact, ms",
        "of which caller",
        "estimate, ms",
        "of which caller",
        "USD an hour",
    ]
    lines = [head, ["---"] * len(head)]
    for one in (needed(n, fit, given) for n in records):
        lines.append([
            f"{one.records:.0e}".replace("e+", "e"), f"{one.hosts:,}", f"{one.memory_gb:,.0f}", f"{one.exact_ms:,.0f}",
            f"{one.exact_caller_ms:,.1f}", f"{one.estimate_ms:,.0f}", f"{one.estimate_caller_ms:,.0f}",
            f"{one.dollars_an_hour:,.0f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def broken(fit: Fit, given: Given = DEFAULT) -> str:
    """`breaks` in Markdown."""
    lines = [
        f"| {what} | {'not up to 1e14' if math.isinf(n) else f'{n:.0e}'.replace('e+', 'e')} |"
        for what, n in breaks(fit, given)
    ]
    return "\n".join(["| what breaks | from so many records on |", "| --- | --- |", *lines])


def draw(path: Path, fit: Fit, given: Given = DEFAULT) -> None:
    """A picture of latency and of hosts by the number of records."""
    from matplotlib.figure import Figure

    grid = np.logspace(8, 11, 61)
    found = [needed(float(n), fit, given) for n in grid]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in (("exact", "-"), ("estimate", "--")):
        left.plot(grid, [getattr(one, f"{name}_ms") for one in found], f"C0{style}", label=f"{name}, one query")
        left.plot(grid, [getattr(one, f"{name}_caller_ms") for one in found], f"C1{style}", label="of which the caller")
    left.set(xscale="log", yscale="log", xlabel="records", ylabel="milliseconds", title="a model: latency")
    right.plot(grid, [one.hosts for one in found], label="hosts")
    right.plot(grid, [one.dollars_an_hour for one in found], "--", label="USD an hour")
    right.axhline(ACTORS, color="grey", linewidth=0.8, linestyle=":", label=f"{ACTORS} actors")
    right.set(xscale="log", yscale="log", xlabel="records", title="a model: hosts and cost")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print the fit, the table and where it breaks; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--records", type=float, nargs="+", default=[1e8, 1e9, 1e10, 1e11])
    parser.add_argument("--plot", type=Path)
    for name, (value, source) in ASSUMED.items():
        parser.add_argument(
            f"--{name}", type=float, default=value, help=f"{source} (default {value:g})".replace("%", "%%")
        )
    words = vars(parser.parse_args())
    results, given = json.loads(words["results"].read_text()), Given(*(words[name] for name in Given._fields))
    fit = fitted(results)
    for name, points in errors(results).items():
        off = max(abs(said / true - 1) for _, true, said in points)
        print(f"{name:8} {getattr(fit, name)}, off by {off:.0%} at most at {len(points)} measured points")
    print("\n" + table(words["records"], fit, given))
    print("\n" + broken(fit, given))
    if words["plot"]:
        draw(words["plot"], fit, given)


if __name__ == "__main__":
    main()
