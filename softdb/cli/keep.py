"""The commands that look after a database: verify, export, compact, snapshot, fields, index, tune."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from softdb.cli.arguments import AsJson, Database, DType, Kind, Metric, QueryFile, Where, array_of, filter_of, opened
from softdb.cli.show import listed, plain, print_json, safe, terminal
from softdb.errors import BadInput
from softdb.reports import IndexReport

__all__ = ["compact", "export", "fields", "index", "snapshot", "tune", "verify"]


def verify(
    path: Database,
    repair: Annotated[
        Path | None, typer.Option(metavar="DEST", help="Save every intact record in a directory that is new or empty.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="With --repair: a setting that is lost, as are those below.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="The width of a value.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Values are labels below this.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="How numbers are stored.")] = None,
    metric: Annotated[Metric | None, typer.Option(help="How queries and keys are compared.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read everything back and compare it with its checksums; or save what is intact of a damaged database."""
    words: dict[str, object] = {"dim": dim, "value_dim": value_dim, "num_classes": num_classes}
    words |= {"dtype": dtype and dtype.value, "metric": metric and metric.value}
    if repair is not None:
        from softdb.cli.repair import repair as salvaged

        salvaged(path, repair, words, as_json)
        return
    if as_json or any(word is not None for word in words.values()):
        raise BadInput("settings and --json go with --repair DEST; without it, give the path alone")
    with opened(path) as db:
        count = db.verify()
    terminal().print(f"[green]ok[/]: {count:,} records, every byte as it was written")


def export(
    path: Database,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .jsonl.gz file to write.")],
    where: Where = None,
) -> None:
    """Write records as JSON lines, which `import` reads back."""
    from softdb.formats import export_records

    with opened(path) as db:
        count = export_records(db, file, where=filter_of(where))
    terminal().print(f"{count:,} records written to {escape(str(file))}")


def compact(path: Database, as_json: AsJson = False) -> None:
    """Take what was deleted or replaced off the disk; answers stay as they are."""
    import softdb

    with softdb.open(path) as db:
        report = db.compact()
    if as_json:
        print_json(report.asdict())
        return
    terminal().print(
        f"{report.removed:,} rows removed, {report.records:,} records stay; "
        f"{_bytes(report.bytes_before)} before, {_bytes(report.bytes)} now"
    )


def snapshot(
    path: Database,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A directory that is new or empty.")],
    as_json: AsJson = False,
) -> None:
    """Copy a database, consistent even while another process writes to it."""
    from softdb.text import copy_note

    with opened(path) as db:
        report = db.snapshot(destination)
    copy_note(path, destination)
    if as_json:
        print_json(report.asdict())
        return
    size = _bytes(report.bytes)
    terminal().print(f"{report.records:,} records, {size}, copied to {escape(str(destination))}")


def fields(
    path: Database,
    add: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Index this field of the payload; may be repeated.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Drop the index of this field; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which fields of the payload have an index, after dropping and adding some: filters on them are fast."""
    import softdb

    with softdb.open(path) if add or drop else opened(path) as db:
        for name in drop or ():
            db.drop_field(name)
        if add:
            db.index_field(*add)
            with warnings.catch_warnings(record=True) as unknown:
                warnings.simplefilter("always", softdb.UnknownField)
                for name in add:
                    db.count({name: {"$exists": True}})
            for warning in unknown:
                terminal(stderr=True).print(f"[yellow]warning:[/] {safe(str(warning.message))}")
        names = list(db.fields)
    if as_json:
        print_json(names)
        return
    terminal().print("\n".join(map(safe, names)) if names else "no field has an index; --add NAME gives it one")


def index(
    path: Database,
    kind: Annotated[Kind, typer.Option(help="Which; auto measures and chooses.")] = Kind.auto,
    recall: Annotated[float, typer.Option(help="The share of the true nearest k to find.")] = 0.95,
    k: Annotated[int, typer.Option("-k", min=1, help="For how many nearest.")] = 10,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What it may occupy: bytes, or such as 200MB.")
    ] = None,
    queries: QueryFile = None,
    as_json: AsJson = False,
) -> None:
    """Build the index that makes searches fast (needs FAISS). Interrupted, it leaves the old one in use."""
    import softdb
    from softdb.demo import progress

    asked = None if queries is None else array_of(queries)
    with softdb.open(path) as db, progress(terminal()) as bar:
        task = bar.add_task("index")

        def show(what: str, done: int, whole: int) -> None:
            bar.update(task, description=what, completed=done, total=whole)

        budget = int(memory) if memory is not None and memory.isdecimal() else memory
        report = db.build_index(kind.value, recall=recall, k=k, queries=asked, memory=budget, progress=show)
    _tell(report, as_json)


def tune(
    path: Database,
    recall: Annotated[float | None, typer.Option(help="The share of the true nearest to find; as before.")] = None,
    k: Annotated[int | None, typer.Option("-k", min=1, help="For how many nearest; as before.")] = None,
    queries: QueryFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the index's recall anew and change how hard it looks, not what it holds."""
    import softdb

    asked = None if queries is None else array_of(queries)
    with softdb.open(path) as db:
        report = db.tune(recall, k=k, queries=asked)
    _tell(report, as_json)


def _tell(report: IndexReport, as_json: bool) -> None:
    """What a build or tuning measured."""
    if as_json:
        print_json(report.asdict())
    else:
        terminal().print(listed(report.told()))


def _bytes(count: int) -> str:
    """A number of bytes as people read it."""
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{plain(count) if unit == 'bytes' else f'{size:.1f}'} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
