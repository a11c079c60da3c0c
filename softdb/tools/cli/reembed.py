"""`softdb reembed`: another encoder for a database, from its texts, or a trained one from its keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from softdb.errors import BadInput
from softdb.terminal import counted, print_json, progress, safe, terminal
from softdb.tools.cli.arguments import AsJson, Database, EncoderName

if TYPE_CHECKING:
    from softdb.database import SoftDB
    from softdb.index.choose import Progress
    from softdb.reports import ReembedReport

__all__ = ["reembed", "reembedded"]


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
    from softdb.tools.cli.encoders import named_encoder, require_outside

    if projection is not None:
        if not (encoder is None and field is None and missing is None and dim is None):
            raise BadInput(
                "--projection changes the keys as they are; --encoder, --field, --missing and --dim are of texts"
            )
        _tell_done(reembedded(path, projection), as_json)
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


def reembedded(path: Path, projection: Path) -> ReembedReport:
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
            before = db.reembedded
            yield db, tell
    except KeyboardInterrupt:
        with softdb.open(path, mode="r") as db:
            changed = db.reembedded != before
        state = "all keys are new" if changed else "the database is as it was; the same command goes on from there"
        raise KeyboardInterrupt(f"{done:,} of {counted(whole, 'record')} embedded, {state}") from None


def _tell_done(report: ReembedReport, as_json: bool) -> None:
    if as_json:
        print_json(report.asdict())
        return
    found = report.records - report.embedded
    kept = f", {found:,} found from before" if found > 0 else ""
    name = safe(report.encoder or "an encoder without a name")
    terminal().print(
        f"{counted(report.embedded, 'record')} embedded{kept}; keys are by {name} now, {report.dim} numbers each"
    )
