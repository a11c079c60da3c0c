"""The commands `softdb train`, which trains a projection from pairs, and `softdb reembed`, which encodes all keys."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.markup import escape
from typer import Argument, Option

from softdb.errors import BadInput, TrainingWarning
from softdb.terminal import counted, print_json, print_result, progress, safe, terminal
from softdb.tools.cli.arguments import AsJson, Database, EncoderName, array_of, number_or_word, spooled
from softdb.tools.cli.places import answering, named_encoder, place, require_outside

if TYPE_CHECKING:
    from softdb.database import SoftDB
    from softdb.index.choose import Progress
    from softdb.reports import ReembedReport


def train(
    path: Database,
    pairs: Annotated[
        Path, Argument(metavar="PAIRS", help="A .jsonl, .csv or .tsv file (also .gz); - reads JSON lines.")
    ],
    out: Annotated[Path, Option("--out", metavar="FILE.pt", help="File to write the projection to.")],
    queries: Annotated[
        Path | None, Option(metavar="FILE.npy", help="Queries as numbers, in the order of PAIRS, instead of its field.")
    ] = None,
    query: Annotated[str, Option(metavar="FIELD", help="Field with the query: text or numbers.")] = "query",
    positives: Annotated[
        str, Option(metavar="FIELD", help="Field with the right records: an id or a list of ids.")
    ] = "positives",
    weight: Annotated[str | None, Option(metavar="FIELD", help="Field with a query's weight in the loss.")] = None,
    temperature: Annotated[
        Any, Option(parser=number_or_word, metavar="T", help="Temperature of the softmax over all records, or learn.")
    ] = 0.05,
    k: Annotated[int | None, Option("-k", min=1, help="Compare with the k nearest records only.")] = None,
    rtol: Annotated[float | None, Option(help="Estimate the sum over all records to this relative error.")] = None,
    bias: Annotated[bool, Option("--bias", help="Train a vector that is added to the queries, too.")] = False,
    keys: Annotated[
        bool, Option("--keys", help="Train an encoder of the keys, too, and apply it to all keys of the database.")
    ] = False,
    epochs: Annotated[int, Option(min=1, help="Largest number of passes over the training queries.")] = 10,
    batch_size: Annotated[int, Option(min=1, help="Queries per step.")] = 256,
    lr: Annotated[float, Option("--lr", help="Learning rate of Adam.")] = 1e-3,
    holdout: Annotated[float, Option(help="Share of the queries to hold out.")] = 0.2,
    patience: Annotated[int, Option(min=0, help="Stop after this many epochs without gain; 0: never.")] = 2,
    criterion: Annotated[str, Option(help="Take the epoch with the best recall_1, recall_10 or mrr_100.")] = "mrr_100",
    seed: Annotated[int, Option(min=0, help="Seed of the split and of the order of queries.")] = 0,
    checkpoint: Annotated[Path | None, Option(metavar="FILE", help="Checkpoint to write after each epoch.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the checkpoint.")] = False,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Train a projection of the queries, so that queries find their right records.

    The database is only read. With --keys its keys change at the end, in one commit, if the criterion rose.
    """
    from softdb.opening import table_at
    from softdb.train import fit, read_pairs, save
    from softdb.train.checkpoint import require_writable

    if not out.absolute().parent.is_dir() or out.is_dir():
        raise BadInput(f"{out} cannot be written; expected a file in an existing folder")
    if resume and checkpoint is None:
        raise BadInput("--resume needs a checkpoint; give its file with --checkpoint")
    if keys and table_at(path) is not None:
        raise BadInput(
            f"--keys changes the keys of one database, but {place(path)} is a cluster's table; leave --keys out, or "
            f"make one database of the table: softdb snapshot {place(path)} DIRECTORY"
        )
    _require_apart(path, [file for file in (pairs, queries) if file is not None], checkpoint, out)
    require_writable(out)
    with spooled(pairs, "stdin.jsonl") as file:
        read = read_pairs(file, query=query, positives=positives, weight=weight, queries=array_of(queries))
    with answering(path, read.is_text, encoder, quiet=as_json) as db:
        read.resolve(db)
        with progress("train", quiet=as_json) as show, warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)  # the printed recalls show it
            fitted = fit(
                db, read.queries, read.positives, temperature=temperature, k=k, rtol=rtol, bias=bias, keys=keys,
                epochs=epochs, batch_size=batch_size, lr=lr, holdout=holdout, patience=patience or None,
                criterion=cast(Any, criterion), seed=seed, checkpoint=checkpoint, resume=resume, progress=show,
                sample_weight=read.weights,
            )  # fmt: skip
        facts = {"pairs": len(read.lines), "k": k, "rtol": rtol, "seed": seed}
    before, after = fitted.before._asdict(), fitted.after._asdict()
    measured: dict[str, Any] = {"before": before, "after": after, "fell": fitted.fell, "epochs": fitted.best}
    measured["temperature"] = fitted.temperature
    save(out, fitted.projection, {**facts, **measured})  # before the keys change, as they are useless without this file
    applied = keys and after[criterion] > before[criterion]
    measured["generation"] = _rekeyed(path, out, as_json).generation if applied else None
    if as_json:
        print_json({**measured, "history": [epoch._asdict() for epoch in fitted.history], "projection": str(out)})
        return
    console = terminal()
    trained = f"{counted(len(read.lines), 'pair')}, {counted(len(fitted.history), 'epoch')}"
    console.print(f"{trained}; the projection is that of epoch {fitted.best}\n{fitted}")
    if fitted.fell:
        console.print(f"held-out queries fell by {fitted.fall}: choose another epoch with --criterion, or lower --lr")
    if not fitted.best:
        console.print("no epoch was better than the unprojected queries: this projection changes nothing")
    if keys:
        console.print(_about_keys(path, out, criterion, applied))
    console.print(f"written to {escape(str(out))}; query with it: softdb search … --projection {escape(str(out))}")


def _about_keys(path: Path, out: Path, criterion: str, applied: bool) -> str:
    if applied:
        return "all keys of the database are changed; build its index again: softdb index " + escape(str(path))
    remedy = f"to change them nevertheless: softdb reembed {escape(str(path))} --projection {escape(str(out))}"
    return f"{criterion} did not rise, so the keys are unchanged; {remedy}"


def _require_apart(database: Path, inputs: list[Path], checkpoint: Path | None, out: Path) -> None:
    """Raise BadInput if an output file is an input file, the other output file or inside the database."""
    taken = {file.resolve() for file in inputs}
    for name, file in (("--checkpoint", checkpoint), ("--out", out)):
        if file is None:
            continue
        target = file.resolve()
        if target in taken:
            raise BadInput(f"{name} {file} would overwrite a file of this training; give another path")
        if database.resolve() in target.parents:
            raise BadInput(f"{name} {file} is inside the database {database}; give a path elsewhere")
        taken.add(target)


def reembed(
    path: Database,
    encoder: EncoderName = None,
    field: Annotated[
        str | None, Option(metavar="FIELD", help="Payload field with the text; by default the records' own texts.")
    ] = None,
    missing: Annotated[
        str | None, Option(metavar="TEXT", help="Text for records that have none; by default they are an error.")
    ] = None,
    dim: Annotated[int | None, Option(help="Width of the keys of ngrams; a model has its own.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Texts per commit.")] = 256,
    projection: Annotated[
        Path | None, Option(metavar="FILE.pt", help="Transform the stored keys by this file of softdb train --keys.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute every key again with another encoder, in one commit; if stopped, the same command goes on."""
    if projection is not None:
        if not (encoder is None and field is None and missing is None and dim is None):
            raise BadInput("--projection takes no texts; leave out --encoder, --field, --missing and --dim")
        _print_report(_rekeyed(path, projection, as_json), as_json)
        return
    if encoder is None:
        raise BadInput(
            "name the encoder of the new keys with --encoder: ngrams, demo or a sentence-transformers model; or give "
            "--projection with a file that softdb train --keys wrote"
        )
    embed = named_encoder(require_outside(path, encoder), dim)
    if dim is not None and getattr(embed, "dim", dim) != dim:
        raise BadInput(f"--dim {dim} is given, but {encoder} has its own width; leave --dim out")
    with _reporting(path, as_json) as (db, show):
        report = db.reembed(embed, field=field, missing=missing, batch_size=batch_size, progress=show)
    _print_report(report, as_json)


def _rekeyed(path: Path, projection: Path, quiet: bool) -> ReembedReport:
    """Transform all stored keys by the encoder of keys in a projection's file."""
    from softdb.train import apply, load

    with _reporting(path, quiet) as (db, show):
        return apply(db, load(projection), progress=show)


@contextlib.contextmanager
def _reporting(path: Path, quiet: bool) -> Iterator[tuple[SoftDB, Progress]]:
    """Yield the open database and a function that shows progress; on Ctrl-C say how many records are embedded."""
    import softdb
    from softdb.opening import existing

    done = total = before = 0

    def show(stage: str, count: int, of: int) -> None:
        nonlocal done, total
        done, total = count, of
        bar(stage, count, of)

    try:
        with existing(path) as db, progress("embed", rate=True, quiet=quiet) as bar:
            before = db.core.reembedded
            yield db, show
    except KeyboardInterrupt:
        with softdb.open(path, mode="r") as db:
            changed = db.core.reembedded != before
        state = "all keys are new" if changed else "the database is unchanged; the same command goes on from there"
        raise KeyboardInterrupt(f"{done:,} of {counted(total, 'record')} embedded, {state}") from None


def _print_report(report: ReembedReport, as_json: bool) -> None:
    earlier = report.records - report.embedded
    reused = f", {earlier:,} reused from an earlier run" if earlier > 0 else ""
    state = f"the keys are now made by {safe(report.encoder or 'an encoder without a name')}, {report.dim} numbers each"
    print_result(report.asdict(), as_json, f"{counted(report.embedded, 'record')} embedded{reused}; {state}")
