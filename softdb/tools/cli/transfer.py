"""The commands that bring records in and out: `softdb demo`, `import` and `export`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from io import StringIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.console import Console
from rich.markup import escape
from typer import Argument, Context, Option

from softdb.errors import BadInput, NotADatabase, SoftDBError
from softdb.terminal import counted, print_json, print_result, progress, safe, terminal
from softdb.tools.cli.arguments import (
    STDIN,
    AsJson,
    Database,
    DTypeOption,
    EncoderName,
    MetricOption,
    Where,
    filter_of,
    named,
    spooled,
)
from softdb.tools.cli.places import answering, chosen, described, named_encoder, place, writing

if TYPE_CHECKING:
    from softdb.check import Encoder
    from softdb.database import SoftDB
    from softdb.formats import Rows

OnError = Enum("OnError", {"stop": "stop", "skip": "skip"}, type=str)
STOP = OnError("stop")
SHOWN = 20  # bad rows that are told of


def demo(
    path: Annotated[Path, Argument(metavar="[PATH]", help="The new database's directory.")] = Path("softdb-demo"),
    fresh: Annotated[bool, Option("--fresh", help="Replace a demo database that is there already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Store, ask, learn and reopen: the whole job on 20,000 dictionary definitions, in a minute."""
    from softdb.tools.demo import run_demo

    report = run_demo(path, fresh=fresh, console=Console(file=StringIO()) if as_json else None)
    if as_json:
        print_json({"path": str(path), **asdict(report)})


def import_(
    ctx: Context,
    path: Database,
    files: Annotated[
        list[Path],
        Argument(
            metavar="FILE...", help="By suffix: .jsonl, .csv, .parquet, .npy … (docs/formats.md); - is JSON lines."
        ),
    ],
    keys: Annotated[Path | None, Option(help="A .npy or .npz file with the keys, in the order of FILE.")] = None,
    id_field: Annotated[str, Option("--id", metavar="FIELD", help="The field with the id.")] = "id",
    key_field: Annotated[
        str | None, Option("--key", metavar="FIELD", help="The field with the key, numbers; key without --text.")
    ] = None,
    text: Annotated[
        str | None, Option(metavar="FIELD", help="The field with the text; embedded where no key is named.")
    ] = None,
    value: Annotated[str | None, Option(metavar="FIELD", help="The field with the value: numbers or label.")] = None,
    num_classes: Annotated[int | None, Option(help="A new database's values are labels below this.")] = None,
    encoder: EncoderName = None,
    dim: Annotated[int | None, Option(help="The width of a new database's keys.")] = None,
    metric: MetricOption = None,
    dtype: DTypeOption = None,
    batch_size: Annotated[int | None, Option(min=1, help="Records a commit; 10,000, and 256 texts.")] = None,
    upsert: Annotated[bool, Option("--upsert", help="Replace records whose ids are stored already.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with an import that was stopped or killed.")] = False,
    row_ids: Annotated[bool, Option("--row-ids", help="Ids are the rows' numbers, in place of --id.")] = False,
    collection: Annotated[str | None, Option(help="Which one, of another database with several.")] = None,
    on_error: Annotated[OnError, Option(help="At a bad row stop, or tell of it and skip it.")] = STOP,
    as_json: AsJson = False,
) -> None:
    """Import records; all other fields become the payload. A database that is not there is made, as an export says."""
    from softdb.formats import Fields, import_records, read_records
    from softdb.opening import table_at

    if keys is not None and len(files) > 1:
        raise BadInput(f"--keys goes with one file, {len(files)} are given; import them one by one")
    fields = Fields(None if row_ids else id_field, key_field, text, value)
    skipped = _Skipped()
    told = skipped if on_error.value == "skip" else None
    size = batch_size or (256 if fields.key is None and keys is None else 10_000)
    files = [ctx.with_resource(spooled(file, "stdin.jsonl")) for file in files]
    options: dict[str, Any] = {"fields": fields, "keys": keys, "batch_size": size, "on_error": told}
    batches = chain.from_iterable([read_records(file, collection=collection, **options) for file in files])
    first = next(batches, None)  # a file that cannot be read makes no database
    if first is None:
        raise BadInput(f"{files[0].name} holds no records{skipped.said}; nothing was imported")
    new, width, noted = _present(path)
    embeds, is_table = isinstance(first.keys[0], str), table_at(path) is not None
    name = chosen(path, noted, encoder, "ngrams" if new else None) if embeds else None
    given = named(dim=dim, metric=metric, dtype=dtype)
    shape = _shape_of(first, given, name is not None, num_classes) if new else given
    made_by = None if name is None else named_encoder(name, dim if new else width)
    seen, existed, header = 0, path.exists(), first.header

    def show(rows: Rows) -> None:
        nonlocal seen
        seen += len(rows)
        say(rows.path.name, seen, round(seen / max(rows.share, 1e-9)))

    with (
        _taking(path, made_by, shape, as_json) as db,
        progress("import", rate=True) as say,
        _ending(db, path, new, existed),
    ):
        if not is_table and header is not None and header.encoder is not None and name is None and not len(db):
            db.core.store.note_encoder(header.encoder)  # that alone loads nothing
        done = import_records(db, chain([first], batches), upsert=upsert, resume=resume, progress=show, on_error=told)
        if not done:
            raise BadInput(f"no record of {files[0]} could be imported{skipped.said}")
        if not is_table and (new or resume) and header is not None and header.fields:
            db.index_field(*header.fields)
        total = len(db)
    print_result(
        {"imported": done, "records": total},
        as_json,
        f"{counted(done, 'record')} imported{skipped.said}, {total:,} in {escape(place(path))}",
    )


class _Skipped:
    """Tells of the rows that are skipped: of the first ones each, of the others how many."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: BadInput) -> None:
        self.count += 1
        if self.count <= SHOWN:
            more = "; more are counted only" if self.count == SHOWN else ""
            terminal(stderr=True).print(f"[yellow]skipped:[/] {safe(str(error))}{more}")

    @property
    def said(self) -> str:
        """The count in words; empty for none."""
        return f", {counted(self.count, 'bad row')} skipped" if self.count else ""


def _present(path: Path) -> tuple[bool, int | None, str | None]:
    """True for a new database; else False, the width of the keys and the encoder of the present one."""
    from softdb.opening import table_at

    if table_at(path) is not None:
        return False, *described(path)
    try:
        return (False, *described(path)) if (path / "catalog.sqlite").exists() else (True, None, None)
    except NotADatabase:  # another program's, which opening for writing will say; or its making was cut short
        return True, None, None


def _taking(path: Path, encoder: Encoder | None, shape: dict[str, Any], quiet: bool) -> SoftDB:
    """The database, made where nothing is; or the cluster's table, which has all that an import asks of a database."""
    import softdb
    from softdb import check
    from softdb.opening import table_at

    if table_at(path) is None:
        return softdb.open(path, encoder=encoder, **shape)
    db = writing(path, encoder, quiet=quiet)
    check.schema(shape["dim"], None, None, shape["dtype"], shape["metric"], db.core.schema)
    return cast("SoftDB", db)


def _shape_of(first: Rows, given: dict[str, Any], embeds: bool, num_classes: int | None) -> dict[str, Any]:
    """The schema of a new database: by the options, an export's header or the first batch."""
    if first.header is not None:
        return first.header.schema | {name: value for name, value in given.items() if value is not None}
    width = None if embeds else next((len(key) for key in first.keys if key is not None), None)
    shape = given | {"dim": given["dim"] or width}
    value = next((value for value in first.values or () if value is not None), None)
    if value is None:
        return shape
    if hasattr(value, "__len__"):
        return shape | {"value_dim": len(value)}
    if num_classes is None:
        raise BadInput("the values are not lists but labels; say how many classes there are with --num-classes")
    return shape | {"num_classes": num_classes}


@contextmanager
def _ending(db: SoftDB, path: Path, new: bool, existed: bool) -> Iterator[None]:
    """Say how to go on after an interrupt; leave a directory as it was where nothing came into a new database."""
    from softdb.store.ours import remove_database

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{counted(len(db), 'record')} in {place(path)}, on disk; the same command with --resume goes on from there"
        ) from None
    except SoftDBError:
        if new and not len(db):
            db.close()
            remove_database(path, itself=not existed)
        raise


def export(
    path: Database,
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="By suffix: .jsonl, .parquet, .arrow, .csv, .npy … (docs/formats.md); - is a pipe."
        ),
    ],
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Write records; of JSON lines and tables `import` makes the same database. To a pipe (-) it prints them alone."""
    from softdb.formats import export_records, write_records

    def note(text: str) -> None:
        terminal(stderr=True).print(f"[yellow]note:[/] {safe(text)}")

    with answering(path, quiet=as_json) as db:
        if str(file) == STDIN:
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # as JSON is, whatever a terminal has
            write_records(db, sys.stdout, where=filter_of(where))
            return
        with progress("export", rate=True) as say:

            def tell(done: int, whole: int) -> None:
                say(file.name, done, whole)

            count = export_records(db, file, where=filter_of(where), progress=tell, note=note)
    print_result(
        {"records": count, "file": str(file)}, as_json, f"{counted(count, 'record')} written to {escape(str(file))}"
    )
