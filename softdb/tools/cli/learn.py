"""The commands that learn: `softdb train`, a projection from pairs, and `softdb reembed`, keys by another encoder."""

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
from softdb.tools.cli.arguments import AsJson, Database, EncoderName, array_of, spooled
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
    out: Annotated[Path, Option("--out", metavar="FILE.pt", help="Where the projection goes.")],
    queries: Annotated[
        Path | None, Option(metavar="FILE.npy", help="The queries, in the order of PAIRS, which has none then.")
    ] = None,
    query: Annotated[str, Option(metavar="FIELD", help="The field with the query: text or numbers.")] = "query",
    positives: Annotated[
        str, Option(metavar="FIELD", help="The field with the right records: an id or a list of ids.")
    ] = "positives",
    temperature: Annotated[float, Option(help="Of the softmax over all records.")] = 0.05,
    k: Annotated[int | None, Option("-k", min=1, help="Compare with the k nearest only.")] = None,
    rtol: Annotated[float | None, Option(help="Estimate the sum over all records to this tolerance.")] = None,
    bias: Annotated[bool, Option("--bias", help="Train a shift of the queries, too.")] = False,
    keys: Annotated[
        bool, Option("--keys", help="Train an encoder of the keys, too, and change all keys of the database by it.")
    ] = False,
    epochs: Annotated[int, Option(min=1, help="Rounds over the training queries, at most.")] = 10,
    batch_size: Annotated[int, Option(min=1, help="Queries a step.")] = 256,
    lr: Annotated[float, Option("--lr", help="Adam's learning rate.")] = 1e-3,
    holdout: Annotated[float, Option(help="The share of the queries that is held out.")] = 0.2,
    patience: Annotated[int, Option(min=0, help="Stop after so many epochs without gain; 0: never.")] = 2,
    criterion: Annotated[str, Option(help="What chooses the best epoch: recall_1, recall_10 or mrr_100.")] = "mrr_100",
    seed: Annotated[int, Option(min=0, help="Of the split and the order.")] = 0,
    checkpoint: Annotated[Path | None, Option(metavar="FILE", help="Written after each epoch.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on from the checkpoint.")] = False,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Train a projection of the queries, so that they find their right records.

    The database is only read; with --keys its keys are changed at the end, in one commit, if that helps.
    """
    from softdb.opening import table_at
    from softdb.train import fit, read_pairs, save
    from softdb.train.checkpoint import require_writable

    if not out.absolute().parent.is_dir() or out.is_dir():
        raise BadInput(f"{out} cannot be written; give a file in a folder that is there")
    if resume and checkpoint is None:
        raise BadInput("--resume goes on from a checkpoint, but none is named; give its file with --checkpoint")
    if keys and table_at(path) is not None:
        raise BadInput(
            f"--keys changes the keys of one database, and {place(path)} is a cluster's table; leave it out, or make "
            f"one database of it: softdb snapshot {place(path)} DIRECTORY"
        )
    _require_apart(path, [one for one in (pairs, queries) if one is not None], checkpoint, out)
    require_writable(out)
    with spooled(pairs, "stdin.jsonl") as file:
        read = read_pairs(file, query=query, positives=positives, queries=array_of(queries))
    with answering(path, read.is_text, encoder, quiet=as_json) as db:
        read.resolve(db)
        with progress("train") as say, warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)  # the table says it
            fitted = fit(
                db, read.queries, read.positives, temperature=temperature, k=k, rtol=rtol, bias=bias, keys=keys,
                epochs=epochs, batch_size=batch_size, lr=lr, holdout=holdout, patience=patience or None,
                criterion=cast(Any, criterion), seed=seed, checkpoint=checkpoint, resume=resume, progress=say,
            )  # fmt: skip
        facts = {"pairs": len(read.lines), "temperature": temperature, "k": k, "rtol": rtol, "seed": seed}
    before, after = fitted.before._asdict(), fitted.after._asdict()
    measured: dict[str, Any] = {"before": before, "after": after, "fell": fitted.fell, "epochs": fitted.best}
    save(out, fitted.projection, {**facts, **measured})  # first: what changes the keys must be there as long as they
    applied = keys and after[criterion] > before[criterion]
    measured["generation"] = _rekeyed(path, out).generation if applied else None
    if as_json:
        print_json({**measured, "history": [epoch._asdict() for epoch in fitted.history], "projection": str(out)})
        return
    console = terminal()
    trained = f"{counted(len(read.lines), 'pair')}, {counted(len(fitted.history), 'epoch')}"
    console.print(f"{trained}, the projection is of epoch {fitted.best}\n{fitted}")
    if fitted.fell:
        console.print(f"{' and '.join(fitted.fell)} fell: choose the epoch by it with --criterion, or lower --lr")
    if not fitted.best:
        console.print("no epoch was better than the queries as they are: this projection changes nothing")
    if keys:
        console.print(_told_of_keys(path, out, criterion, applied))
    console.print(f"written to {escape(str(out))}; ask with it: softdb search … --projection {escape(str(out))}")


def _told_of_keys(path: Path, out: Path, criterion: str, applied: bool) -> str:
    if applied:
        return "all keys of the database are changed by it; make its index anew: softdb index " + escape(str(path))
    remedy = f"softdb reembed {escape(str(path))} --projection {escape(str(out))} changes them all the same"
    return f"{criterion} did not rise, so the keys stay as they were; {remedy}"


def _require_apart(database: Path, read: list[Path], checkpoint: Path | None, out: Path) -> None:
    """BadInput where a file that is written is one that is read, or part of the database."""
    taken = {one.resolve() for one in read}
    for name, file in (("--checkpoint", checkpoint), ("--out", out)):
        if file is None:
            continue
        mine = file.resolve()
        if mine in taken:
            raise BadInput(f"{name} {file} would overwrite a file of this training; give another")
        if database.resolve() in mine.parents:
            raise BadInput(f"{name} {file} is inside the database {database}; give a file elsewhere")
        taken.add(mine)


def reembed(
    path: Database,
    encoder: EncoderName = None,
    field: Annotated[
        str | None, Option(metavar="FIELD", help="The field of the payload with the text; else the records' own texts.")
    ] = None,
    missing: Annotated[
        str | None, Option(metavar="TEXT", help="Embedded of records that have no text; else the first is an error.")
    ] = None,
    dim: Annotated[int | None, Option(help="The width of ngrams; a model has its own.")] = None,
    batch_size: Annotated[int, Option(min=1, help="Texts a commit.")] = 256,
    projection: Annotated[
        Path | None, Option(metavar="FILE.pt", help="Change the keys themselves by what softdb train --keys wrote.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make every key anew by another encoder, in one commit; stopped, it goes on where it was when called again."""
    if projection is not None:
        if not (encoder is None and field is None and missing is None and dim is None):
            raise BadInput(
                "--projection changes the keys as they are; --encoder, --field, --missing and --dim are of texts"
            )
        _tell_done(_rekeyed(path, projection), as_json)
        return
    if encoder is None:
        raise BadInput(
            "name the encoder of the new keys with --encoder: ngrams, demo or a sentence-transformers model; or give "
            "what softdb train --keys wrote with --projection"
        )
    made = named_encoder(require_outside(path, encoder), dim)
    if dim is not None and getattr(made, "dim", dim) != dim:
        raise BadInput(f"--dim {dim} goes with ngrams alone; {encoder} has its own width")
    with _telling(path) as (db, say):
        report = db.reembed(made, field=field, missing=missing, batch_size=batch_size, progress=say)
    _tell_done(report, as_json)


def _rekeyed(path: Path, projection: Path) -> ReembedReport:
    """Change the keys by the encoder of keys in a projection's file."""
    from softdb.train import apply, load

    with _telling(path) as (db, say):
        return apply(db, load(projection), progress=say)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[tuple[SoftDB, Progress]]:
    """The database, and what is told of progress; a Ctrl-C says how far it came."""
    import softdb

    done = whole = before = 0

    def tell(what: str, count: int, total: int) -> None:
        nonlocal done, whole
        done, whole = count, total
        say(what, count, total)

    try:
        with softdb.open(path) as db, progress("embed", rate=True) as say:
            before = db.core.reembedded
            yield db, tell
    except KeyboardInterrupt:
        with softdb.open(path, mode="r") as db:
            changed = db.core.reembedded != before
        state = "all keys are new" if changed else "the database is as it was; the same command goes on from there"
        raise KeyboardInterrupt(f"{done:,} of {counted(whole, 'record')} embedded, {state}") from None


def _tell_done(report: ReembedReport, as_json: bool) -> None:
    earlier = report.records - report.embedded
    reused = f", {earlier:,} found from before" if earlier > 0 else ""
    state = f"keys are by {safe(report.encoder or 'an encoder without a name')} now, {report.dim} numbers each"
    print_result(report.asdict(), as_json, f"{counted(report.embedded, 'record')} embedded{reused}; {state}")
