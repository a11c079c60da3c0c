"""The commands that query: `softdb search` and `softdb attend`."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from softdb.cli.arguments import (
    AsJson,
    Database,
    EncoderName,
    ProjectionFile,
    Query,
    Where,
    filter_of,
    ids_of,
    opened,
    projected,
)
from softdb.cli.show import attended, print_json, show_attended, show_hits

__all__ = ["attend", "search"]


def search(
    path: Database,
    query: Query,
    k: Annotated[int | None, typer.Option("-k", min=1, help="How many records; 10 without --radius.")] = None,
    where: Where = None,
    radius: Annotated[
        float | None, typer.Option(help="In place of -k: all within this distance (l2), or of at least this score.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help='Not this record; may be repeated. 7 is the id 7 and the id "7".'),
    ] = None,
    diversity: Annotated[float | None, typer.Option(help="0: the nearest; up to 1: unlike each other, too.")] = None,
    fetch_k: Annotated[int | None, typer.Option(help="Among how many to choose diverse ones; 4 k.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Do not use the index.")] = False,
    encoder: EncoderName = None,
    projection: ProjectionFile = None,
    as_json: AsJson = False,
) -> None:
    """Find the nearest records."""
    with opened(path, query, encoder) as db:
        hits = db.search(
            projected(db, query, projection),
            k,
            where=filter_of(where),
            exact=exact,
            radius=radius,
            exclude_ids=ids_of(exclude),
            diversity=diversity,
            fetch_k=fetch_k,
        )
        answers = [[(hit.id, hit.score, hit.payload) for hit in mine] for mine in hits]
    if as_json:
        names = ("id", "score", "payload")
        print_json([[dict(zip(names, hit, strict=True)) for hit in answer] for answer in answers])
        return
    for answer in answers:
        show_hits("score", answer)


def attend(
    path: Database,
    query: Query,
    temperature: Annotated[float, typer.Option(help="Near 0 the nearest record, far above the mean of all.")] = 1.0,
    k: Annotated[int | None, typer.Option("-k", min=1, help="Weigh the k nearest; without it all records.")] = None,
    rtol: Annotated[float | None, typer.Option(help="Estimate to this relative error, in place of -k.")] = None,
    where: Where = None,
    encoder: EncoderName = None,
    projection: ProjectionFile = None,
    as_json: AsJson = False,
) -> None:
    """Soft query: the mean of all values, each weighted by softmax(score / temperature)."""
    with opened(path, query, encoder) as db:
        asked, filter_ = projected(db, query, projection), filter_of(where)
        pooled = db.attend(asked, temperature=temperature, k=k, rtol=rtol, where=filter_)
        # Σ w² = exp(lse(T/2) - 2 lse(T)); its inverse is the number of equal weights that would be as spread out
        half = db.attend(asked, temperature=temperature / 2, k=k, rtol=rtol, where=filter_)
        effective = (2 * pooled.lse - half.lse).exp().tolist()
        hits = db.search(asked, min(k or 10, 10), where=filter_)
        answers = [
            [(hit.id, math.exp(hit.score / temperature - lse), hit.payload) for hit in mine]
            for mine, lse in zip(hits, pooled.lse.tolist(), strict=True)
        ]
        is_label = db.num_classes is not None
    facts = [attended(pooled, i, effective[i], answer) for i, answer in enumerate(answers)]
    if as_json:
        print_json(facts)
        return
    for fact, answer in zip(facts, answers, strict=True):
        show_attended(fact, answer, temperature, is_label)
