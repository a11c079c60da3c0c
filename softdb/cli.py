"""The command `softdb`. What it needs is imported when a command runs: `softdb --help` must not wait for torch."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from softdb.errors import BadInput, SoftDBError

if TYPE_CHECKING:
    from softdb.answers import Pooled
    from softdb.database import SoftDB
    from softdb.formats import Rows

__all__ = ["app", "main"]

PIPED = 1 << 16  # columns where there is no terminal: a line stays a line for whatever reads it
SHOWN = 8  # numbers of a soft query's output that are shown


class _Commands(TyperGroup):
    """The commands; an error of ours or of the system becomes one line and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SoftDBError as error:
            _fail(str(error))
        except BrokenPipeError:
            raise  # whoever reads has had enough; no error
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


class Metric(str, Enum):
    """How a query and a key are compared."""

    dot = "dot"
    cosine = "cosine"
    l2 = "l2"


class DType(str, Enum):
    """How numbers are stored."""

    float32 = "float32"
    float16 = "float16"


class Kind(str, Enum):
    """The kinds of index."""

    auto = "auto"
    ivf = "ivf"
    hnsw = "hnsw"
    flat = "flat"


app = typer.Typer(
    cls=_Commands,
    name="softdb",
    help="A durable vector database you can backpropagate through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Database = Annotated[Path, typer.Argument(metavar="PATH", help="The database's directory.")]
Query = Annotated[str, typer.Argument(help="A text, a JSON list of numbers, or @FILE.npy.")]
Where = Annotated[str | None, typer.Option(help='A filter, as JSON: \'{"year": {"$gte": 2020}}\'.')]
EncoderName = Annotated[str | None, typer.Option("--encoder", help="ngrams, demo, or a sentence-transformers model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


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

    with _open(path) as db:
        stats = {**db.stats(), "encoder": noted_encoder(path)}
    if as_json:
        _print_json(stats)
        return
    stats |= {f"index {name}": value for name, value in (stats.pop("index") or {"kind": "none"}).items()}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in stats.items():
        if value is not None:
            table.add_row(f"[dim]{name.replace('_', ' ')}[/]", escape(_plain(value)))
    _print_table(table)


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
        with _open(path) as db:
            dim = db.stats()["dim"]
    with softdb.open(path, encoder=None if name is None else named_encoder(name, dim), **shape) as db:
        if name is not None:
            note_encoder(path, name)
        done = _fill(db, import_records, chain([first], batches), upsert)
        _console().print(f"{done:,} records imported, {len(db):,} in {escape(str(path))}")


def _fill(db: SoftDB, importer: Any, batches: Iterator[Rows], upsert: bool) -> int:
    from softdb.demo import progress

    done = 0
    with progress(_console()) as bar:
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


@app.command()
def search(
    path: Database,
    query: Query,
    k: Annotated[int, typer.Option("-k", min=1, help="How many records.")] = 10,
    where: Where = None,
    exact: Annotated[bool, typer.Option("--exact", help="Pass the index by.")] = False,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Find the nearest records."""
    with _open(path, query, encoder) as db:
        hits = db.search(_query(query), k, where=_filter(where), exact=exact)
        columns = zip(hits.ids, hits.scores.tolist(), hits.payloads, strict=True)
        found = [[hit for hit in zip(*one, strict=True) if hit[0] is not None] for one in columns]
    if as_json:
        names = ("id", "score", "payload")
        _print_json([[dict(zip(names, hit, strict=True)) for hit in one] for one in found])
        return
    for one in found:
        _show_hits("score", one)


@app.command()
def attend(
    path: Database,
    query: Query,
    temperature: Annotated[float, typer.Option(help="Near 0 the nearest record, far above the mean of all.")] = 1.0,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Weigh the k nearest; without it all records.")] = None,
    where: Where = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Ask softly: the mean of all values, each weighted by softmax(score / temperature)."""
    with _open(path, query, encoder) as db:
        asked, filter_ = _query(query), _filter(where)
        pooled = db.attend(asked, temperature=temperature, k=k, where=filter_)
        # Σ w² = exp(lse(T/2) - 2 lse(T)); its inverse is the number of equal weights that would be as spread out
        half = db.attend(asked, temperature=temperature / 2, k=k, where=filter_)
        spread = (2 * pooled.lse - half.lse).exp().tolist()
        hits = db.search(asked, min(k or 10, 10), where=filter_)
        weights = (hits.scores.double() / temperature - pooled.lse[:, None].double()).exp().tolist()
        columns = zip(hits.ids, weights, hits.payloads, strict=True)
        found = [[hit for hit in zip(*one, strict=True) if hit[0] is not None] for one in columns]
        is_label = db.stats()["num_classes"] is not None
    if as_json:
        _print_json([_attended(pooled, i, spread[i], one) for i, one in enumerate(found)])
        return
    for i, one in enumerate(found):
        _show_attended(_attended(pooled, i, spread[i], one), one, temperature, is_label)


def _attended(pooled: Pooled, i: int, spread: float, hits: list[Any]) -> dict[str, Any]:
    """The answer to one query of a batch, as JSON."""
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.candidates[i] else None,  # JSON has no word for -inf
        "candidates": int(pooled.candidates[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": pooled.missed_mass[i].item(),
        "effective_records": spread if math.isfinite(spread) else 0.0,
        "hits": [dict(zip(("id", "weight", "payload"), hit, strict=True)) for hit in hits],
    }


def _show_attended(answer: dict[str, Any], hits: list[Any], temperature: float, is_label: bool) -> None:
    console = _console()
    if not answer["candidates"]:
        console.print("no record takes part, so the answer is all zeros")
        return
    missed = "" if answer["exact"] else f", {answer['missed_mass']:.1%} of all weight missed"
    console.print(
        f"{answer['candidates']:,} records weighed at temperature {temperature:g}{missed}; "
        f"the answer is a mean of about {answer['effective_records']:,.1f} of them"
    )
    _show_hits("weight", hits)
    output = answer["output"]
    if is_label:
        best = sorted(range(len(output)), key=lambda label: -output[label])[:SHOWN]
        console.print("classes  " + ", ".join(f"{label}: {output[label]:.1%}" for label in best))
    else:
        more = f", … ({len(output)} numbers)" if len(output) > SHOWN else ""
        console.print("output   " + ", ".join(f"{one:.4f}" for one in output[:SHOWN]) + more)


@app.command()
def verify(path: Database) -> None:
    """Read everything back and compare it with its checksums."""
    with _open(path) as db:
        count = db.verify()
    _console().print(f"[green]ok[/]: {count:,} records, every byte as it was written")


@app.command()
def export(
    path: Database,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .jsonl or .jsonl.gz file to write.")],
    where: Where = None,
) -> None:
    """Write records as JSON lines, which `import` reads back."""
    from softdb.formats import export_records

    with _open(path) as db:
        count = export_records(db, file, where=_filter(where))
    _console().print(f"{count:,} records written to {escape(str(file))}")


@app.command()
def index(
    path: Database,
    kind: Annotated[Kind, typer.Option(help="Which; auto measures and chooses.")] = Kind.auto,
    recall: Annotated[float, typer.Option(help="The share of the true nearest 10 to find.")] = 0.95,
) -> None:
    """Build the index that makes searches fast (needs FAISS)."""
    import softdb
    from softdb.demo import progress

    console = _console()
    with softdb.open(path) as db, progress(console) as bar:
        task = bar.add_task("index")

        def show(what: str, done: int, whole: int) -> None:
            bar.update(task, description=what, completed=done, total=whole)

        report = db.build_index(kind.value, recall=recall, progress=show)
    console.print(_listed(report))


# -- helpers -----------------------------------------------------------------------------------------------------------


def _open(path: Path, query: str | None = None, encoder: str | None = None) -> SoftDB:
    """The database for reading, with the encoder that a text query needs."""
    import softdb

    if query is None or not _is_text(query):
        return softdb.open(path, mode="r")
    from softdb.demo import named_encoder
    from softdb.text import encoder_name

    with softdb.open(path, mode="r") as db:
        dim = db.stats()["dim"]
    return softdb.open(path, mode="r", encoder=named_encoder(encoder_name(path, encoder), dim, path))


def _is_text(query: str) -> bool:
    return not (query.startswith("[") or (query.startswith("@") and query.endswith(".npy")))


def _query(query: str) -> Any:
    """A query as it was typed: a text, numbers, or the array of a file."""
    if _is_text(query):
        return query
    if query.startswith("["):
        return _json(query, "QUERY starts with [ but")
    import numpy as np

    try:
        return np.load(query[1:], allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{query[1:]} cannot be read as an array of numbers ({error})") from None


def _filter(where: str | None) -> Any:
    return None if where is None else _json(where, "--where")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not JSON ({error}); quote it for the shell: '…'") from None


def _show_hits(name: str, hits: list[Any]) -> None:
    if not hits:
        _console().print("nothing found")
        return
    console, width = _console(), max(len(str(one)) for one, _, _ in hits)
    room = max(20, console.width - width - len(name) - 8)  # one line a hit on a terminal, all of it in a pipe
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(name, justify="right", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("payload", no_wrap=True)
    for one, number, payload in hits:
        text = _payload(payload)
        shown = text if len(text) <= room else text[: room - 1] + "…"
        table.add_row(f"{number:.4f}", escape(str(one)), escape(shown))
    _print_table(table)


def _payload(payload: object) -> str:
    """A payload in one line; `--json` gives it exactly."""
    if isinstance(payload, dict):
        return ", ".join(
            f"{name}: {value if isinstance(value, str) else _dumps(value)}" for name, value in payload.items()
        )
    return "" if payload is None else _dumps(payload)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in facts.items())


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _print_table(table: Table) -> None:
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


def _print_json(value: object) -> None:
    typer.echo(_dumps(value))


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PIPED
    return console


def _fail(message: str) -> NoReturn:
    _console(stderr=True).print(f"[red]error:[/] {escape(' '.join(message.split()))}")
    sys.exit(1)
