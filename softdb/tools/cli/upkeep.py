"""The commands that maintain a database: info, verify, compact, snapshot, fields, index, tune."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from rich.filesize import decimal
from rich.markup import escape
from typer import Argument, Option

from softdb.errors import BadInput, CorruptionError
from softdb.terminal import (
    Excerpt,
    counted,
    fact,
    print_facts,
    print_json,
    print_result,
    print_table,
    progress,
    safe,
    terminal,
)
from softdb.tools.cli.arguments import (
    AsJson,
    Database,
    DTypeOption,
    Kind,
    MetricOption,
    QueryFile,
    TextIndex,
    array_of,
    named,
)
from softdb.tools.cli.places import answering, opened, read, writing

LOST = 20  # number of lost records that are printed; --json lists up to a thousand


def info(path: Database, as_json: AsJson = False) -> None:
    """Show a database's settings, its number of records and its size on disk."""
    from softdb.store.stats import noted_index, stats

    report = read(path, "stats", lambda store: stats(store, noted_index(store)), lambda db: db.stats(), as_json)
    facts = report.asdict()
    if as_json:
        print_json(facts)
        return
    del facts["index"]
    about_index = {"kind": "none"} if report.index is None else report.index.summary()
    _print_report(facts | {f"index {name}": value for name, value in about_index.items()})


def _print_report(facts: dict[str, Any]) -> None:
    print_facts({name.replace("_", " "): safe(fact(value)) for name, value in facts.items() if value is not None})


def verify(
    path: Database,
    repair: Annotated[
        Path | None, Option(metavar="DEST", help="Save every intact record in a directory that is new or empty.")
    ] = None,
    dim: Annotated[int | None, Option(help="With --repair: width of the keys, if that setting is lost.")] = None,
    value_dim: Annotated[int | None, Option(help="With --repair: width of the values.")] = None,
    num_classes: Annotated[int | None, Option(help="With --repair: values are labels below this number.")] = None,
    dtype: DTypeOption = None,
    metric: MetricOption = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte and compare it with its checksum; with --repair DEST, save all intact records."""
    settings = named(dim=dim, value_dim=value_dim, num_classes=num_classes, dtype=dtype, metric=metric)
    if repair is not None:
        _repair(path, repair, settings, as_json)
        return
    if any(setting is not None for setting in settings.values()):
        raise BadInput("--dim and other settings go with --repair; add --repair DEST, or leave them out")
    from softdb.store.verify import verify as verified

    try:
        count = read(path, "verify", verified, lambda db: db.verify(), as_json)
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}; or save all intact records with softdb verify {shlex.quote(str(path))} --repair DEST"
        ) from error
    print_result({"records": count}, as_json, f"[green]ok[/]: {counted(count, 'record')}, every byte as it was written")


def _repair(path: Path, destination: Path, settings: dict[str, Any], as_json: bool) -> None:
    """Save the intact records of a damaged database in a new one, and print the lost records."""
    import softdb

    report = softdb.salvage(path, destination, **settings)
    if as_json:
        print_json(report)
        return
    console = terminal()
    console.print(
        f"{counted(report['records'], 'record')} saved to {escape(str(destination))}, {report['lost_records']:,} lost; "
        f"{escape(str(path))} is unchanged"
    )
    for note in report["notes"]:
        console.print(f"note: {safe(note)}")
    if report["unconfirmed_records"]:
        console.print(
            f"note: {counted(report['unconfirmed_records'], 'saved record')} without an entry in the index of ids or "
            "marked as deleted; --json lists them"
        )
    lost = report["lost"]
    if not lost:
        return
    rows = [
        (str(loss["row"]), "" if loss["id"] is None else safe(str(loss["id"])), Excerpt(loss["why"]))
        for loss in lost[:LOST]
    ]
    print_table(("row", "id", "why lost"), rows)
    if report["lost_records"] > LOST:
        console.print(f"… and {report['lost_records'] - LOST:,} more; --json lists {len(lost):,}")


def compact(path: Database, as_json: AsJson = False) -> None:
    """Remove deleted and replaced records from the disk; answers do not change."""
    with writing(path, quiet=as_json) as db:
        report = db.compact()
    removed = f"{counted(report.removed, 'row')} removed, {counted(report.records, 'record')} left"
    occupied = f"{decimal(report.bytes_before or 0)} before, {decimal(report.bytes or 0)} now"
    print_result(report.asdict(), as_json, f"{removed}; {occupied}")


def snapshot(
    path: Database,
    destination: Annotated[Path, Argument(metavar="DEST", help="A directory that is new or empty.")],
    as_json: AsJson = False,
) -> None:
    """Copy a database; the copy is consistent even while another process writes."""
    with answering(path, quiet=as_json) as db:
        report = db.snapshot(destination)
    copied = f"{counted(report.records, 'record')}, {decimal(report.bytes)}, copied to {destination}"
    print_result(report.asdict(), as_json, escape(copied))


def fields(
    path: Database,
    add: Annotated[
        list[str] | None, Option(metavar="NAME", help="Index this field of the payload; may be repeated.")
    ] = None,
    drop: Annotated[
        list[str] | None, Option(metavar="NAME", help="Drop the index of this field; may be repeated.")
    ] = None,
    text: Annotated[
        TextIndex | None, Option(help="Index the records' texts, for search --mode text; none drops that index.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add and drop indexes of payload fields, which make filters fast; print the indexed fields."""
    from softdb.opening import existing

    with existing(path) if add or drop or text else opened(path) as db:
        if text is not None:
            db.drop_text_index() if text is TextIndex.none else db.index_text(text.value)
        for name in drop or ():
            db.drop_field(name)
        if add:
            db.index_field(*add)
            for name in add:
                db.count({name: {"$exists": True}})  # warns of a name that no record has
        names, text_index = list(db.fields), db.text_index
    lines = list(map(safe, names)) or ["no field has an index; add one with --add NAME"]
    if text_index is not None:
        lines.append(f"[dim]text index: {text_index}[/]")
    print_result(names, as_json, "\n".join(lines))


def index(
    path: Database,
    kind: Annotated[Kind, Option(help="Kind of index; auto measures and chooses.")] = Kind.auto,
    recall: Annotated[float, Option(help="Share of the true k nearest records to find.")] = 0.95,
    k: Annotated[int, Option("-k", min=1, help="Number of nearest records in a search.")] = 10,
    memory: Annotated[str | None, Option(metavar="SIZE", help="Largest size in memory: bytes, or like 200MB.")] = None,
    queries: QueryFile = None,
    as_json: AsJson = False,
) -> None:
    """Build the index that makes searches fast (needs FAISS). If interrupted, the old index stays in use."""
    from softdb.opening import existing, table_at

    samples = array_of(queries)
    budget = int(memory) if memory is not None and memory.isdecimal() else memory
    if table_at(path) is not None:  # one report per shard
        with answering(path, quiet=as_json) as shards:
            reports: Any = shards.build_index(kind.value, recall=recall, k=k, queries=samples, memory=budget)
        if as_json:
            print_json([report.asdict() for report in reports])
            return
        for i, report in enumerate(reports):
            _print_report({"shard": i} | report.summary())
        return
    with existing(path) as db, progress("index", quiet=as_json) as show:
        report = db.build_index(kind.value, recall=recall, k=k, queries=samples, memory=budget, progress=show)
    print_json(report.asdict()) if as_json else _print_report(report.summary())


def tune(
    path: Database,
    recall: Annotated[float | None, Option(help="Share of the true nearest to find; by default unchanged.")] = None,
    k: Annotated[int | None, Option("-k", min=1, help="Number of nearest records; by default unchanged.")] = None,
    queries: QueryFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure the index's recall again and set its search effort; the index is not built again."""
    from softdb.opening import existing

    samples = array_of(queries)
    with existing(path) as db, progress("measuring", quiet=as_json) as show:
        report = db.tune(recall, k=k, queries=samples, progress=show)
    print_json(report.asdict()) if as_json else _print_report(report.summary())
