"""The commands that bring records in and out: `softdb demo`, `import` and `export`."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from functools import partial
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.console import Console
from rich.markup import escape
from typer import Argument, Context, Option

from softdb.errors import BadInput, EncoderWarning, NotADatabase, SoftDBError
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
    from softdb.formats import Fields, Rows

OnError = Enum("OnError", {"stop": "stop", "skip": "skip"}, type=str)
STOP = OnError("stop")
SHOWN = 20  # number of bad rows that are printed


def demo(
    path: Annotated[Path, Argument(metavar="[PATH]", help="The new database's directory.")] = Path("softdb-demo"),
    fresh: Annotated[bool, Option("--fresh", help="Replace an existing demo database at PATH.")] = False,
    as_json: AsJson = False,
) -> None:
    """Store, query, train and reopen a database of 20,000 dictionary definitions, in a minute."""
    from softdb.tools.demo import run_demo

    report = run_demo(path, fresh=fresh, console=Console(quiet=True) if as_json else None)
    if as_json:
        print_json({"path": str(path), **asdict(report)})


def import_(
    ctx: Context,
    path: Database,
    files: Annotated[
        list[Path],
        Argument(
            metavar="FILE...", help="By suffix: .jsonl, .csv, .parquet, .npy … (docs/formats.md); - reads JSON lines."
        ),
    ],
    keys: Annotated[Path | None, Option(help="A .npy or .npz file with the keys, in the order of FILE.")] = None,
    id_field: Annotated[str, Option("--id", metavar="FIELD", help="Field with the id.")] = "id",
    key_field: Annotated[
        str | None,
        Option(
            "--key", metavar="FIELD", help="Field with the key, as numbers; key, vector or embedding without --text."
        ),
    ] = None,
    text: Annotated[
        str | None,
        Option(metavar="FIELD", help='Field with the text, "text" without --key; encoded if there is no key.'),
    ] = None,
    value: Annotated[str | None, Option(metavar="FIELD", help="Field with the value: numbers or a label.")] = None,
    num_classes: Annotated[int | None, Option(help="New database: values are labels below this number.")] = None,
    encoder: EncoderName = None,
    dim: Annotated[int | None, Option(help="New database: width of the keys.")] = None,
    metric: MetricOption = None,
    dtype: DTypeOption = None,
    batch_size: Annotated[int | None, Option(min=1, help="Records per commit; 10,000, or 256 texts.")] = None,
    upsert: Annotated[bool, Option("--upsert", help="Replace records whose ids are stored already.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on with an import that was stopped or killed.")] = False,
    row_ids: Annotated[bool, Option("--row-ids", help="Use row numbers as ids, instead of --id.")] = False,
    collection: Annotated[str | None, Option(help="Collection or table to read, if FILE holds several.")] = None,
    on_error: Annotated[OnError, Option(help="At a bad row: stop, or report and skip it.")] = STOP,
    as_json: AsJson = False,
) -> None:
    """Import records, and create a missing database; fields other than id, key, text and value are the payload."""
    from softdb.formats import Fields, import_records, read_records
    from softdb.formats.importing import fields_of
    from softdb.opening import table_at
    from softdb.tables.rows import named_in

    if keys is not None and len(files) > 1:
        raise BadInput(f"--keys goes with one FILE, but {len(files)} are given; import them one by one")
    skipped = _Skipped()
    skip = skipped if on_error.value == "skip" else None
    new, width, stored_name = _present(path)
    typed, files = files, [ctx.with_resource(spooled(file, "stdin.jsonl")) for file in files]
    fields = Fields(None if row_ids else id_field, key_field, text, value)
    if key_field is None and text is None and keys is None:
        fields = fields_of(files[0], named_in(fields), collection)
    size = batch_size or (256 if fields.key is None and keys is None else 10_000)
    options: dict[str, Any] = {"fields": fields, "keys": keys, "batch_size": size, "on_error": skip}
    batches = chain.from_iterable([read_records(file, collection=collection, **options) for file in files])
    try:
        first = next(batches, None)  # read before a database is created, so that an unreadable file creates none
    except BadInput as error:
        raise BadInput(f"{error}{_remedy(path, typed, files[0], fields, keys is not None)}") from None
    if first is None:
        raise BadInput(f"{files[0].name} holds no records{skipped.summary}; nothing was imported")
    embeds, is_table = isinstance(first.keys[0], str), table_at(path) is not None
    name = chosen(path, stored_name, encoder, "ngrams" if new else None) if embeds else None
    options = named(dim=dim, metric=metric, dtype=dtype)
    schema = _schema_of(first, options, num_classes) if new else options
    embed = None if name is None else named_encoder(name, dim if new else width)
    if name is not None and encoder is None and stored_name is None:
        ngrams = "texts are embedded as n-grams, which find similar spelling; choose a model, or ngrams, by --encoder"
        warnings.warn(ngrams, EncoderWarning, stacklevel=1)
    seen, existed, header = 0, path.exists(), first.header

    def show(rows: Rows) -> None:
        nonlocal seen
        seen += len(rows)
        bar(rows.path.name, seen, round(seen / max(rows.share, 1e-9)))

    with (
        _destination(path, embed, schema, as_json) as db,
        progress("import", rate=True, quiet=as_json) as bar,
        _cleanup(db, path, new, existed),
    ):
        before = len(db)
        if not is_table and header is not None and header.encoder is not None and name is None and not len(db):
            db.core.store.note_encoder(header.encoder, header.fingerprint)  # stores the name, and loads no model
        done = import_records(db, chain([first], batches), upsert=upsert, resume=resume, progress=show, on_error=skip)
        if not done:
            raise BadInput(f"no record of {files[0]} could be imported{skipped.summary}")
        if not is_table and (new or resume) and header is not None and header.fields:
            db.index_field(*header.fields)
        total = len(db)
    new_records, was_stored = (total - before, f", {done - total + before:,} already stored") if resume else (done, "")
    imported = f"{counted(new_records, 'record')} imported{was_stored}{skipped.summary}"
    print_result({"imported": done, "records": total}, as_json, f"{imported}, {total:,} in {escape(place(path))}")


def _remedy(path: Path, typed: list[Path], file: Path, fields: Fields, has_keys: bool) -> str:
    """Return a command that imports a file whose first line has no field of the id or key; empty for other files."""
    from softdb.formats.importing import first_row, is_vector

    row = first_row(file)
    if not row:
        return ""  # another format, or no good first line
    words = ["--row-ids"] if fields.id is None else []
    if fields.id == "id" and "id" not in row:
        name = next((name for name in row if name.lower().endswith(("_id", "uuid"))), None)
        words += ["--row-ids"] if name is None else ["--id", name]
    if fields.key == "key" and "key" not in row and not has_keys:
        vectors = [name for name, value in row.items() if is_vector(value)]
        cells = {name: cell for name, cell in row.items() if isinstance(cell, str) and name not in words}
        texts = [name for name in cells if " " in cells[name].strip()]  # a single word may be a label
        text = max(texts, key=lambda name: len(row[name]), default="")
        by_text = ["--text", text, "--encoder", "ngrams"] if texts else ["--keys", "KEYS.npy"]
        words += ["--key", vectors[0]] if vectors else by_text
    command = shlex.join(["softdb", "import", place(path), *map(str, typed), *words])
    more = " (or a model in place of ngrams)" if "ngrams" in words else ""
    more += ' (or --key with a column of vectors, as in "[1, 2]")' if "--keys" in words else ""
    return f": {command}{more}" if words else ""


class _Skipped:
    """Handler of bad rows that counts them, and prints the first `SHOWN` of them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: BadInput) -> None:
        self.count += 1
        if self.count <= SHOWN:
            more = "; further bad rows are only counted" if self.count == SHOWN else ""
            terminal(stderr=True).print(f"[yellow]skipped:[/] {safe(str(error))}{more}")

    @property
    def summary(self) -> str:
        """Number of bad rows in words; empty if there were none."""
        return f", {counted(self.count, 'bad row')} skipped" if self.count else ""


def _present(path: Path) -> tuple[bool, int | None, str | None]:
    """Return True if no database is there, else False; then the width of the keys and the name of their encoder."""
    from softdb.opening import table_at

    if path.is_file():
        raise BadInput(f"{path} is a file; name the database first: softdb import DATABASE {path}")
    if table_at(path) is None and not (path / "catalog.sqlite").exists():
        return True, None, None
    try:
        return False, *described(path)
    except NotADatabase:  # an unfinished database, or another program's directory, which softdb.open refuses
        return True, None, None


def _destination(path: Path, encoder: Encoder | None, schema: dict[str, Any], quiet: bool) -> SoftDB:
    """Open the database, creating it if there is none; or a cluster's table, which imports by the same methods."""
    import softdb
    from softdb import check
    from softdb.opening import table_at

    if table_at(path) is None:
        return softdb.open(path, encoder=encoder, **schema)
    db = writing(path, encoder, quiet=quiet)
    check.schema(schema["dim"], None, None, schema["dtype"], schema["metric"], db.core.schema)
    return cast("SoftDB", db)


def _schema_of(first: Rows, options: dict[str, Any], num_classes: int | None) -> dict[str, Any]:
    """Return the schema of a new database, from the options and from the export's header or the first batch."""
    if first.header is not None:
        return first.header.schema | {name: value for name, value in options.items() if value is not None}
    value = next((value for value in first.values or () if value is not None), None)
    if value is None:
        return options
    if hasattr(value, "__len__"):
        return options | {"value_dim": len(value)}
    if num_classes is None:
        raise BadInput("the values are labels, not lists; give the number of classes with --num-classes")
    return options | {"num_classes": num_classes}


@contextmanager
def _cleanup(db: SoftDB, path: Path, new: bool, existed: bool) -> Iterator[None]:
    """Handle a stopped import: on Ctrl-C say how to go on, on an error remove a new database without records."""
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
            metavar="FILE", help="By suffix: .jsonl, .parquet, .csv, .npy … (docs/formats.md); - is standard output."
        ),
    ],
    where: Where = None,
    force: Annotated[bool, Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write records to a file; `import` can make the database again from JSON lines or tables. - prints records."""
    if file.is_file() and not force and str(file) != STDIN:
        raise BadInput(f"{file} exists already; name another file, or replace it with --force")
    from softdb.formats import export_records, write_records

    def note(text: str) -> None:
        terminal(stderr=True).print(f"[yellow]note:[/] {safe(text)}")

    with answering(path, quiet=as_json) as db:
        if str(file) == STDIN:
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # JSON is UTF-8, whatever the locale's encoding
            write_records(db, sys.stdout, where=filter_of(where))
            return
        with progress("export", rate=True, quiet=as_json) as bar:
            show = partial(bar, file.name)
            count = export_records(db, file, where=filter_of(where), progress=show, note=note)
    text = f"{counted(count, 'record')} written to {escape(str(file))}"
    print_result({"records": count, "file": str(file)}, as_json, text)
