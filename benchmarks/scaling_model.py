"""Model of the hosts, latency and price of a cluster of 1e8 to 1e11 records, fitted to the measurements of cluster.py.

    python benchmarks/scaling_model.py --plot docs/images/cluster-scale.png
    python benchmarks/scaling_model.py --host-memory-gb 500 --price 4.0 --records 1e9 1e10

No cluster of more than one machine has run. Hosts, network and price are arguments, and --help names the source of each
default. Measured are the time of a shard's pass by its bytes, the time of a round of draws by its records, the caller's
own work by the number of answers that it merges, the caller's processor time that Ray takes for each actor, and the
bytes of a query. `errors` compares the fit with each measurement. The model leaves out slow hosts, concurrent callers,
a busy network and failures.
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

from softdb.plots import figure, save, style

RESULTS = Path(__file__).with_name("results") / "cluster.json"
ACTORS = 16  # calls from one Python process; larger numbers are far from what was measured
MOST_SHARDS = 1 << 16  # softdb.cluster.placement.MOST

ASSUMED: dict[str, tuple[float, str]] = {
    "dim": (128, "d, the width of a key; the model's own choice"),
    "value-dim": (128, "v, the width of a value; the model's own choice"),
    "number-bytes": (2, "float16 columns"),
    "code-bytes": (73, "of a record in an IVF index of codes for searches alone: 692.7 MiB of 1e7 at commit 7d8a99b"),
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
    """Assumptions of the model, as in ASSUMED."""

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
    """The line y = base + slope x, y in milliseconds."""

    base: float
    slope: float

    def at(self, x: float) -> float:
        """Return y at x."""
        return self.base + self.slope * x


class Power(NamedTuple):
    """The power law y = factor x^exponent, y in milliseconds."""

    factor: float
    exponent: float

    def at(self, x: float) -> float:
        """Return y at x."""
        return float(self.factor * x**self.exponent)


class Fit(NamedTuple):
    """Fits to the measurements; x in brackets."""

    a_pass: Line  # pass of one shard for one query [GB read]
    a_round: Power  # round of draws of one shard for one query [records]
    merging: Line  # the caller's work for an exact answer [answers]
    judging: Line  # the caller's work for a round of an estimate [answers]
    sending: Line  # the caller's processor time for Ray to send and receive [actors]
    read_gb_s: float  # read rate of the measured machine
    exact_bytes: float  # reply of a host to a query
    round_bytes: float  # reply of a shard to a query and round


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line by least squares of the errors relative to y; neither base nor slope is negative."""
    x, y = np.array(points).T
    columns = np.stack([1 / y, x / y], 1)
    base, slope = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
    if base < 0:
        base, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    elif slope < 0:
        base, slope = float((1 / y).sum() / ((1 / y) ** 2).sum()), 0.0
    return Line(float(base), float(slope))


def power_through(points: Sequence[tuple[float, float]]) -> Power:
    """Fit a power law by least squares of log y; the exponent is not negative."""
    x, y = np.log(np.array(points)).T
    exponent = max(0.0, float(np.polyfit(x, y, 1)[0]))
    return Power(float(np.exp((y - exponent * x).mean())), exponent)


def measured(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the measured points (x, y) of each fit."""
    growth = results["growth"]
    return {
        "a_pass": [(row["bytes"] / 1e9, row["pass"]["median"]) for row in growth["shards"]],
        "a_round": [(row["n"], row["round"]["median"]) for row in growth["shards"]],
        "merging": [(row["hosts"], row["exact"]["median"]) for row in growth["callers"]],
        "judging": [(row["hosts"], row["estimate"]["median"]) for row in growth["callers"]],
        "sending": [(row["hosts"], row["processor"]) for row in growth["fan-out"]],
    }


def fitted(results: dict[str, Any]) -> Fit:
    """Fit the model to the results of cluster.py."""
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
    """Return, for each fit, x, the measured y and the fitted y of each point."""
    fit = fitted(results)
    return {name: [(x, y, getattr(fit, name).at(x)) for x, y in points] for name, points in measured(results).items()}


class Needed(NamedTuple):
    """Hosts, memory, latency of one query on an idle cluster, and price for a number of records."""

    records: float
    hosts: int  # of one replica
    memory_gb: float  # of all hosts of a replica
    exact_ms: float
    exact_caller_ms: float  # part of exact_ms for sending, receiving and merging
    estimate_ms: float
    estimate_caller_ms: float
    dollars_an_hour: float
    dollars_a_million: float  # exact queries, one after another

    @property
    def shards(self) -> int:
        """Number of shards P: the power of two that gives each host at least one."""
        return 1 << math.ceil(math.log2(self.hosts))


def needed(records: float, fit: Fit, given: Given = DEFAULT) -> Needed:
    """Apply the model to a number of records."""
    columns = (given.dim + given.value_dim) * given.number_bytes
    memory = records * (columns + given.code_bytes + given.other_bytes) / 1e9
    hosts = math.ceil(memory / (given.host_memory_gb * given.usable))
    per_ms = given.network_gbit_s * 1e9 / 8 / 1e3  # bytes per millisecond
    speedup = given.host_read_gb_s / fit.read_gb_s  # over the measured machine
    read = columns * records / hosts / 1e9
    exact_caller = fit.sending.at(hosts) + fit.merging.at(hosts) + hosts * fit.exact_bytes / per_ms
    exact = given.round_trip_ms + exact_caller + fit.a_pass.base + fit.a_pass.slope * read / speedup
    answers = hosts * given.shards_a_host
    caller = fit.sending.at(hosts) + fit.judging.at(answers) + answers * fit.round_bytes / per_ms
    # the shards of a host draw in parallel, each from its part of the records
    draws = fit.a_round.at(max(1.0, records / answers))
    estimate = given.rounds * (given.round_trip_ms + caller + draws)
    hourly = hosts * given.replicas * given.price
    return Needed(
        records, hosts, memory, exact, exact_caller, estimate, given.rounds * caller, hourly, hourly * exact / 3.6
    )


def breaks(fit: Fit, given: Given = DEFAULT) -> list[tuple[str, float]]:
    """Return each limit with the number of records from which on it is always exceeded."""
    grid = [10 ** (power / 50) for power in range(300, 701)]
    limits: list[tuple[str, Callable[[Needed], bool]]] = [
        ("one host's memory is full", lambda need: need.hosts > 1),
        ("an exact query takes more than 100 ms", lambda need: need.exact_ms > 100),
        (f"more than {ACTORS} actors: nothing was measured near", lambda need: need.hosts > ACTORS),
        ("an estimate takes more than 100 ms", lambda need: need.estimate_ms > 100),
        ("the caller is most of an estimate", lambda need: 2 * need.estimate_caller_ms > need.estimate_ms),
        ("an estimate takes longer than an exact answer", lambda need: need.estimate_ms > need.exact_ms),
        (f"{MOST_SHARDS:,} shards are too few", lambda need: need.hosts > MOST_SHARDS),
    ]
    needs = [needed(n, fit, given) for n in grid]
    starts = []
    for limit, exceeded in limits:
        above = list(itertools.takewhile(exceeded, reversed(needs)))
        starts.append((limit, above[-1].records if above else math.inf))
    return starts


def table(records: Sequence[float], fit: Fit, given: Given = DEFAULT) -> str:
    """Format the table of docs/cluster.md."""
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
    for need in (needed(n, fit, given) for n in records):
        lines.append([
            f"{need.records:.0e}".replace("e+", "e"), f"{need.hosts:,}", f"{need.memory_gb:,.0f}",
            f"{need.exact_ms:,.0f}", f"{need.exact_caller_ms:,.1f}", f"{need.estimate_ms:,.0f}",
            f"{need.estimate_caller_ms:,.0f}", f"{need.dollars_an_hour:,.0f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def broken(fit: Fit, given: Given = DEFAULT) -> str:
    """Format `breaks` as Markdown."""
    lines = [
        f"| {limit} | {'not up to 1e14' if math.isinf(n) else f'{n:.0e}'.replace('e+', 'e')} |"
        for limit, n in breaks(fit, given)
    ]
    return "\n".join(["| what breaks | from so many records on |", "| --- | --- |", *lines])


@style()
def draw(path: Path, fit: Fit, given: Given = DEFAULT) -> None:
    """Draw latency and hosts by the number of records."""
    grid = np.logspace(8, 11, 61)
    needs = [needed(float(n), fit, given) for n in grid]
    drawn, (left, right) = figure(2, height=3.8)
    for name, color in (("exact", "C0"), ("estimate", "C1")):
        left.plot(grid, [getattr(need, f"{name}_ms") for need in needs], color, label=f"{name} answer")
        caller_ms = [getattr(need, f"{name}_caller_ms") for need in needs]
        left.plot(grid, caller_ms, f"{color}:", label="of which the caller's work")
    left.set(xscale="log", yscale="log", xlabel="records", ylabel="milliseconds", title="A model of one query's time")
    price = needs[0].dollars_an_hour / needs[0].hosts
    right.plot(grid, [need.hosts for need in needs], color="C2", label=f"hosts, {price:.2f} USD an hour each")
    right.axhline(ACTORS, color="0.4", linestyle=":", label=f"{ACTORS} actors; no more were measured")
    right.set(xscale="log", yscale="log", xlabel="records", ylabel="hosts", title="A model of the hosts needed")
    left.set_ylim(top=2e5)  # room for the legends
    right.set_ylim(top=5e3)
    for ax in (left, right):
        ax.legend(loc="upper left")
    save(drawn, path)


def main() -> None:
    """Print the fit, the table and the limits, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--records", type=float, nargs="+", default=[1e8, 1e9, 1e10, 1e11])
    parser.add_argument("--plot", type=Path)
    for name, (value, source) in ASSUMED.items():
        parser.add_argument(
            f"--{name}", type=float, default=value, help=f"{source} (default {value:g})".replace("%", "%%")
        )
    options = vars(parser.parse_args())
    results, given = json.loads(options["results"].read_text()), Given(*(options[name] for name in Given._fields))
    fit = fitted(results)
    for name, points in errors(results).items():
        off = max(abs(fitted_y / y - 1) for _, y, fitted_y in points)
        print(f"{name:8} {getattr(fit, name)}, off by {off:.0%} at most at {len(points)} measured points")
    print("\n" + table(options["records"], fit, given))
    print("\n" + broken(fit, given))
    if options["plot"]:
        draw(options["plot"], fit, given)


if __name__ == "__main__":
    main()
