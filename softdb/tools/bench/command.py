"""`softdb bench`: measure engines with a dataset on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from softdb.errors import BadInput
from softdb.terminal import counted, print_json, print_table, progress, terminal
from softdb.tools.cli.arguments import AsJson, MetricName

COMPARED = {
    "batch": "{softdb} has {ratio} times the queries/s of {peer}",
    "single": "{softdb} takes {ratio} times as long for a single query as {peer}",
}


def bench(
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="[DATASET]",
            help="A file of vectors (.npy, .fvecs, .bvecs, .fbin, .u8bin, .hdf5), a folder with keys.npy and "
            "queries.npy (wordnet:DIR), clustered or uniform.",
        ),
    ] = "clustered",
    engines: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Engines to measure; all: every engine that is installed.")
    ] = None,
    recalls: Annotated[str, typer.Option(metavar="SHARE,…", help="Recalls to reach.")] = "0.95,0.98",
    curve: Annotated[bool, typer.Option("--curve", help="Recalls from 0.8 to 0.995, for a curve.")] = False,
    efforts: Annotated[
        str | None, typer.Option(metavar="NUMBER,…", help="Search efforts (ef, nprobe …), instead of recalls.")
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Number of keys.")] = None,
    dim: Annotated[int | None, typer.Option(min=2, help="Width of clustered or uniform keys.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of nearest neighbours.")] = 10,
    metric: Annotated[MetricName | None, typer.Option(help="Score of a query and a key, if not the file's.")] = None,
    queries: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the queries; by default rows of a file of keys.")
    ] = None,
    threads: Annotated[str, typer.Option(metavar="NUMBER,…", help="Numbers of threads; builds use the largest.")] = "2",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds over all engines.")] = 5,
    construction: Annotated[int, typer.Option(min=1, help="Construction effort of graphs (efConstruction).")] = 100,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot the report (or .svg, .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure recall, speed, build time and memory of softdb and other engines with the same queries."""
    from softdb.tools.bench.datasets import load
    from softdb.tools.bench.grid import CURVE, DEFAULT, Grid, run
    from softdb.tools.bench.peers import ENGINES
    from softdb.tools.bench.report import draw, require_drawable, write_json

    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise BadInput(f"there is no folder {file.parent} to write {file.name} into; create it first")
    if plot is not None:
        require_drawable(plot)
    names = DEFAULT if engines is None else tuple(ENGINES) if engines == "all" else tuple(engines.split(","))
    goals = CURVE if curve else tuple(_numbers(recalls, float, "--recalls"))
    fixed = () if efforts is None else tuple(_numbers(efforts, int, "--efforts"))
    counts = tuple(_numbers(threads, int, "--threads"))
    grid = Grid(tuple(dict.fromkeys(names)), goals, fixed, k, counts, rounds, construction)
    grid.checked()
    console = Console(quiet=True) if as_json else terminal()
    data = load(dataset, n=n, dim=dim, queries=queries, metric=metric and metric.value)
    console.print(
        f"{escape(data.name)}: {counted(data.n, 'key')} of width {data.dim}, {len(data.queries):,} "
        f"{'held-out ' * data.held_out}queries, compared by {data.metric.value}"
    )
    with progress("bench", console) as bar:
        result = run(data, grid, lambda line: console.print(escape(line)), bar)
    if as_json:
        print_json(result)
    else:
        _show(result)
    if out is not None:
        write_json(out, result)
    if plot is not None:
        draw(result, plot)


def _numbers(text: str, kind: type[float] | type[int], name: str) -> list[Any]:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise BadInput(f"{name} is {text!r}; expected numbers with commas between them, such as 1,2") from None


def _show(result: dict[str, Any]) -> None:
    """Print a table for each goal with the best variants of the engines, and compare softdb with the fastest peer."""
    from softdb.tools.bench.report import MIB, leading

    columns = "recall", "queries/s", "one query", "build", "with tuning", "beside the keys", "in all"
    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in leading(result["rows"]):
        title = f"{row['goal']}, {counted(row['threads'], 'thread')}"
        cells = (
            row["label"],
            f"{row['recall']:.3f}" + ("" if row["met"] else " missed"),
            f"{row['batch_queries_s']['median']:,.0f}",
            f"{row['single_ms']['median']:.3f} ms",
            f"{row['build_s']['without_tuning']:.1f} s",
            f"{row['build_s']['with_tuning']:.1f} s",
            *(f"{row[size] / MIB:,.1f} MiB" for size in ("beside_keys_bytes", "in_all_bytes")),
        )
        tables.setdefault(title, []).append(cells)
    for title, rows in tables.items():
        terminal().print(title)
        print_table(("engine", *columns), rows, numbers=columns)
    for facts in result["compared"]:
        goal = f"{facts['goal']}, {counted(facts['threads'], 'thread')}"
        for name, text in COMPARED.items():
            if name in facts:
                terminal().print(f"{goal}: {text.format(**facts[name])}, the fastest peer", markup=False)
