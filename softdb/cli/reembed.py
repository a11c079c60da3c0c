"""`softdb reembed`: another encoder for a database, from the texts in its payloads."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from softdb.cli.arguments import AsJson, Database, EncoderName
from softdb.errors import BadInput
from softdb.terminal import counted, print_json, progress, safe, terminal

__all__ = ["reembed"]


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
    as_json: AsJson = False,
) -> None:
    """Make every key anew by another encoder, in one commit; stopped, it goes on where it was when called again."""
    import softdb
    from softdb.cli.encoders import named_encoder, require_outside

    if encoder is None:
        raise BadInput("name the encoder of the new keys with --encoder: ngrams, demo or a sentence-transformers model")
    made = named_encoder(require_outside(path, encoder), dim)
    if dim is not None and getattr(made, "dim", dim) != dim:
        raise BadInput(f"--dim {dim} goes with ngrams alone; {encoder} has its own width")
    done = whole = before = 0

    def tell(what: str, count: int, total: int) -> None:
        nonlocal done, whole
        done, whole = count, total
        say(what, count, total)

    try:
        with softdb.open(path) as db, progress("embed", rate=True) as say:
            before = db.reembedded
            report = db.reembed(made, field=field, missing=missing, batch_size=batch_size, progress=tell)
    except KeyboardInterrupt:
        with softdb.open(path, mode="r") as db:
            changed = db.reembedded != before
        state = "all keys are new" if changed else "the database is as it was; the same command goes on from there"
        raise KeyboardInterrupt(f"{done:,} of {counted(whole, 'record')} embedded, {state}") from None
    if as_json:
        print_json(report.asdict())
        return
    found = report.records - report.embedded
    kept = f", {found:,} found from before" if found > 0 else ""
    name = safe(report.encoder or "an encoder without a name")
    terminal().print(
        f"{counted(report.embedded, 'record')} embedded{kept}; keys are by {name} now, {report.dim} numbers each"
    )
