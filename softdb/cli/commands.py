"""The commands. What one needs is imported when it runs: `softdb --help` must not wait for torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from softdb.cli.arguments import (
    AsJson,
    Database,
    DType,
    EncoderName,
    Metric,
    opened,
)
from softdb.cli.ask import attend, search
from softdb.cli.bench import bench
from softdb.cli.keep import compact, export, fields, index, snapshot, tune, verify
from softdb.cli.show import (
    fail,
    plain,
    print_json,
    print_table,
    safe,
    terminal,
)
from softdb.cli.train import train
from softdb.errors import BadInput, SoftDBError

if TYPE_CHECKING:
    from softdb.database import SoftDB
    from softdb.formats import Rows

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The commands; an error of ours or of the system becomes one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SoftDBError as error:
            fail(str(error))
        except BrokenPipeError:
            raise  # whoever reads has had enough; no error
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


app = typer.Typer(
    cls=_Commands,
    name="softdb",
    help="A durable vector database you can backpropagate through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    # torch reads it when it is loaded: on a busy machine, threads that sleep while they wait are ten times faster
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app(prog_name="softdb")


def _version(asked: bool) -> None:
    if asked:
        import softdb

        typer.echo(f"softdb {softdb.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def demo(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="Where to make it.")] = Path("softdb-demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Make a demo database that is there already anew.")] = False,
) -> None:
    """Store, ask, learn and reopen: the whole job on 20,000 dictionary definitions, in a minute."""
    from softdb.demo import run_demo

    run_demo(path, fresh=fresh)


@app.command()
def info(path: Database, as_json: AsJson = False) -> None:
    """Show what a database is, holds and occupies."""
    from softdb.text import noted_encoder

    with opened(path) as db:
        report = db.stats()
    stats = {**report.asdict(), "encoder": noted_encoder(path)}
    if as_json:
        print_json(stats)
        return
    del stats["index"]
    index = {"kind": "none"} if report.index is None else report.index.told()
    stats |= {f"index {name}": value for name, value in index.items()}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in stats.items():
        if value is not None:
            table.add_row(f"[dim]{name.replace('_', ' ')}[/]", safe(plain(value)))
    print_table(table)


@app.command("import")
def import_(
    path: Database,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=".jsonl, .csv (also .gz), .npy or .npz.")],
    keys: Annotated[Path | None, typer.Option(help="A .npy or .npz file with the keys, in the order of FILE.")] = None,
    id_field: Annotated[str, typer.Option("--id", metavar="FIELD", help="The field with the id.")] = "id",
    key_field: Annotated[str, typer.Option("--key", metavar="FIELD", help="The field with the key: numbers.")] = "key",
    text: Annotated[str | None, typer.Option(metavar="FIELD", help="A field with a text, encoded as the key.")] = None,
    value: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field with the value: numbers or label.")
    ] = None,
    num_classes: Annotated[int | None, typer.Option(help="A new database's values are labels below this.")] = None,
    encoder: EncoderName = None,
    dim: Annotated[int | None, typer.Option(help="The width of a new database's keys.")] = None,
    metric: Annotated[Metric | None, typer.Option(help="How queries and keys are compared.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="How numbers are stored.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Records a commit.")] = 10_000,
    upsert: Annotated[bool, typer.Option("--upsert", help="Replace records whose ids are stored already.")] = False,
) -> None:
    """Import records. The database is made if it is not there; fields not named otherwise become the payload."""
    import softdb
    from softdb.demo import named_encoder
    from softdb.formats import Fields, import_records, read_records
    from softdb.text import encoder_name, note_encoder

    if keys is not None and len(files) > 1:
        raise BadInput(f"--keys goes with one file, {len(files)} are given; import them one by one")
    fields = Fields(id_field, key_field, text, value)
    readers = [read_records(file, fields=fields, keys=keys, batch_size=batch_size) for file in files]
    batches = chain.from_iterable(readers)
    first = next(batches, None)  # a file that cannot be read makes no database
    if first is None:
        raise BadInput(f"{files[0]} holds no records; nothing was imported")
    new = not (path / "catalog.sqlite").exists()
    name = encoder_name(path, encoder, "ngrams" if new else None) if text is not None and keys is None else None
    shape: dict[str, Any] = {"dim": dim, "metric": metric and metric.value, "dtype": dtype and dtype.value}
    if new:
        shape |= {"dim": dim or (None if name else len(first.keys[0])), **_values_of(first, num_classes)}
    elif name is not None:
        with opened(path) as db:
            dim = db.dim
    with softdb.open(path, encoder=None if name is None else named_encoder(name, dim), **shape) as db:
        if name is not None:
            note_encoder(path, name)
        done = _fill(db, import_records, chain([first], batches), upsert)
        terminal().print(f"{done:,} records imported, {len(db):,} in {escape(str(path))}")


def _fill(db: SoftDB, importer: Any, batches: Iterator[Rows], upsert: bool) -> int:
    from softdb.demo import progress

    done = 0
    with progress(terminal()) as bar:
        task = bar.add_task("import", total=None)

        def show(rows: Rows) -> None:
            nonlocal done
            done += len(rows)
            bar.update(task, description=rows.path.name, completed=done, total=round(done / max(rows.share, 1e-9)))

        return int(importer(db, batches, upsert=upsert, progress=show))


def _values_of(first: Rows, num_classes: int | None) -> dict[str, Any]:
    """What a new database's values are, by those of the first batch."""
    if first.values is None:
        return {}
    if isinstance(first.values[0], list):
        return {"value_dim": len(first.values[0])}
    if num_classes is None:
        raise BadInput("the values are not lists but labels; say how many classes there are with --num-classes")
    return {"num_classes": num_classes}


for command in (search, attend, verify, export, compact, snapshot, fields, index, tune, train, bench):
    app.command()(command)
