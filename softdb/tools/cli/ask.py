"""The commands that query, `softdb search` and `softdb attend`, and the printing of their answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from softdb.errors import BadInput
from softdb.terminal import Excerpt, counted, print_json, print_table, safe, shortened, terminal
from softdb.tools.cli.arguments import (
    AsJson,
    Database,
    EncoderName,
    Mode,
    Projection,
    Query,
    Where,
    filter_of,
    ids_of,
    named,
    number_or_word,
    projected,
    query_of,
)
from softdb.tools.cli.places import answering

if TYPE_CHECKING:
    from torch import Tensor

    from softdb.answers import Pooled
    from softdb.database import Verbs

SHOWN = 8  # largest number of output values that are printed for a soft query


def search(
    path: Database,
    query: Query,
    k: Annotated[int | None, Option("-k", min=1, help="Number of records; 10 without --radius.")] = None,
    where: Where = None,
    radius: Annotated[
        float | None, Option(help="Instead of -k: all within this distance (l2), or with at least this score.")
    ] = None,
    exclude: Annotated[
        list[str] | None, Option(metavar="ID", help='Omit this record; may be repeated. 7 is the id 7 and the id "7".')
    ] = None,
    diversity: Annotated[float | None, Option(help="0: the nearest records; 1: the most unlike each other.")] = None,
    fetch_k: Annotated[int | None, Option(help="With --diversity: choose from this many nearest (4 k).")] = None,
    mode: Annotated[
        Mode | None, Option(help="text: by the words of the records' texts; hybrid: by words and vector.")
    ] = None,
    texts: Annotated[
        list[str] | None, Option("--words", help="Words for a hybrid search beside a QUERY of numbers; once per query.")
    ] = None,
    fusion: Annotated[
        Any,
        Option(parser=number_or_word, metavar="TEXT", help="With hybrid: scores, ranks, or the weight of the words."),
    ] = None,
    offset: Annotated[int, Option(min=0, help="Skip this many of the best records: the next page.")] = 0,
    group_by: Annotated[
        str | None, Option(metavar="FIELD", help="Only the best record for each value of this payload field.")
    ] = None,
    group_size: Annotated[int | None, Option(min=1, help="With --group-by: records per group.")] = None,
    exact: Annotated[bool, Option("--exact", help="Compare all records, without the index.")] = False,
    encoder: EncoderName = None,
    projection: Projection = None,
    as_json: AsJson = False,
) -> None:
    """Find the nearest records."""
    queries, has_text = query_of(query)
    if not has_text and (mode is Mode.text or (mode is Mode.hybrid and not texts)):
        raise BadInput(
            f"QUERY is numbers but --mode {mode.value} compares words; type words as QUERY or, to compare both, add "
            "--mode hybrid --words WORDS"
        )
    with answering(path, has_text and mode is not Mode.text, encoder, projection, quiet=as_json) as db:
        hits = db.search(
            projected(db, queries, projection), k, where=filter_of(where), exact=exact, radius=radius,
            exclude_ids=ids_of(exclude), diversity=diversity, fetch_k=fetch_k, offset=offset, group_by=group_by,
            group_size=group_size, texts=texts or None, **named(mode=mode, fusion=fusion),
        )  # fmt: skip
        answers = [[_fields("score", hit, hit.score) for hit in row] for row in hits]
    if as_json:
        print_json(answers)
        return
    for answer in _headed(answers, queries):
        _show_hits("score", answer)


def attend(
    path: Database,
    query: Query,
    temperature: Annotated[float, Option(help="Small: the nearest weigh most; large: all weigh alike.")] = 1.0,
    k: Annotated[int | None, Option("-k", min=1, help="Weigh the k nearest records; by default all.")] = None,
    rtol: Annotated[float | None, Option(help="Estimate to this relative error, instead of -k.")] = None,
    where: Where = None,
    encoder: EncoderName = None,
    projection: Projection = None,
    as_json: AsJson = False,
) -> None:
    """Soft query: the mean of all values, each weighted by softmax(score / temperature)."""
    queries, has_text = query_of(query)
    with answering(path, has_text, encoder, projection, quiet=as_json) as db:
        answers = soft_answers(db, projected(db, queries, projection), temperature, k, rtol, filter_of(where))
        is_label = db.num_classes is not None
    if as_json:
        print_json(answers)
        return
    for answer in _headed(answers, queries):
        _show_attended(answer, temperature, is_label)


def _headed(answers: list[Any], queries: Any) -> Iterator[Any]:
    """Yield the answers; print a heading before each if there are several."""
    for i, answer in enumerate(answers):
        if len(answers) > 1:
            text = f": {safe(shortened(queries[i], 60))}" if isinstance(queries[i], str) else ""
            terminal().print(f"{chr(10) * (i > 0)}[bold]query {i + 1}[/]{text}")
        yield answer


def _fields(name: str, hit: Any, number: float) -> dict[str, Any]:
    """Return a hit as a dict for JSON; `name` is "score" or "weight", and `number` the hit's score or weight."""
    return {"id": hit.id, name: number, "payload": hit.payload, "text": hit.text}


def soft_answers(
    db: Verbs,
    queries: Any,
    temperature: float,
    k: int | None = None,
    rtol: float | None = None,
    where: Any = None,
    shown: int = 10,
) -> list[dict[str, Any]]:
    """Return the soft answer to each query as a dict for JSON; "hits" lists the records with the largest weights."""
    pooled = db.attend(queries, temperature=temperature, k=k, rtol=rtol, where=where)
    # effective number of records: 1 / Σ w², and Σ w² = exp(lse(T/2) - 2 lse(T))
    half = db.attend(queries, temperature=temperature / 2, k=k, rtol=rtol, where=where)
    effective = (2 * pooled.lse - half.lse).exp().tolist()
    hits = db.search(queries, min(k or shown, shown), where=where)
    weighed = [
        [_fields("weight", hit, math.exp(hit.score / temperature - lse)) for hit in row]
        for row, lse in zip(hits, pooled.lse.tolist(), strict=True)
    ]
    missed = _missed(db, queries, pooled, temperature, where).tolist()
    return [{**_attended(pooled, i, effective[i], missed[i]), "hits": hits} for i, hits in enumerate(weighed)]


def _missed(db: Verbs, queries: Any, pooled: Pooled, temperature: float, where: Any) -> Tensor:  # (q,)
    """Return the share of weight that was not pooled; if a cluster's answer lacks it, compute it from all records."""
    unknown = pooled.missed_mass.isnan()
    if not bool(unknown.any()):
        return pooled.missed_mass
    lse = db.attend(queries, temperature=temperature, where=where).lse
    return pooled.missed_mass.where(~unknown, -(pooled.lse - lse).clamp(max=0).expm1())


def _attended(pooled: Pooled, i: int, effective: float, missed: float) -> dict[str, Any]:
    """Return the soft answer to query i of a batch as a dict for JSON, without hits."""
    bar = pooled.bar[i].item()
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.n_pooled[i] else None,  # JSON cannot hold -inf
        "candidates": int(pooled.n_pooled[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": missed,
        "bar": bar if math.isfinite(bar) else None,  # unknown for a truncated answer
        "met": bool(pooled.met[i]),
        "effective_records": effective if math.isfinite(effective) else 0.0,
    }


def _show_attended(answer: dict[str, Any], temperature: float, is_label: bool) -> None:
    """Print the answer to one soft query: a sentence, and a table of the records with the largest weights."""
    console = terminal()
    if not answer["candidates"]:
        console.print("no record takes part, so the answer is all zeros")
        return
    missed = "" if answer["exact"] else f", {answer['missed_mass']:.1%} of all weight missed"
    if answer["bar"]:
        missed = f", an estimate: its error is at most {answer['bar']:.3g} in 95 of 100 cases"
    console.print(
        f"{counted(answer['candidates'], 'record')} weighed at temperature {temperature:g}{missed}; "
        f"the answer is a mean of about {answer['effective_records']:,.1f} of them"
    )
    _show_hits("weight", answer["hits"])
    output = answer["output"]
    if is_label:
        best = sorted(range(len(output)), key=lambda label: -output[label])[:SHOWN]
        console.print("classes  " + ", ".join(f"{label}: {output[label]:.1%}" for label in best))
    else:
        more = f", … ({len(output)} numbers)" if len(output) > SHOWN else ""
        console.print("output   " + ", ".join(f"{number:.4f}" for number in output[:SHOWN]) + more)


def _show_hits(name: str, hits: list[dict[str, Any]]) -> None:
    """Print hits as a table, with their payloads and texts; `name` is the column of numbers, "score" or "weight"."""
    if not hits:
        terminal().print("nothing found")
        return
    used = [field for field in ("payload", "text") if any(hit[field] is not None for hit in hits)]
    rows: list[tuple[str | Excerpt, ...]] = [
        (f"{h[name]:.4f}", safe(str(h["id"])), *(Excerpt(h[field]) for field in used)) for h in hits
    ]
    print_table((name, "id", *used), rows, numbers=(name,))
