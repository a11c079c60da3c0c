"""The commands that query, `softdb search` and `softdb attend`, and how they show the answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from softdb.terminal import counted, dumps, print_json, print_table, safe, terminal
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
    projected,
    query_of,
)
from softdb.tools.cli.places import answering

if TYPE_CHECKING:
    from torch import Tensor

    from softdb.answers import Pooled
    from softdb.database import Verbs

SHOWN = 8  # numbers of a soft query's output that are shown


def search(
    path: Database,
    query: Query,
    k: Annotated[int | None, Option("-k", min=1, help="How many records; 10 without --radius.")] = None,
    where: Where = None,
    radius: Annotated[
        float | None, Option(help="In place of -k: all within this distance (l2), or of at least this score.")
    ] = None,
    exclude: Annotated[
        list[str] | None, Option(metavar="ID", help='Not this record; may be repeated. 7 is the id 7 and the id "7".')
    ] = None,
    diversity: Annotated[float | None, Option(help="0: the nearest; up to 1: unlike each other, too.")] = None,
    fetch_k: Annotated[int | None, Option(help="Among how many to choose diverse ones; 4 k.")] = None,
    mode: Annotated[
        Mode | None, Option(help="text: by the words of the records' texts; hybrid: by words and vector.")
    ] = None,
    texts: Annotated[
        list[str] | None, Option("--words", help="Words beside a QUERY of numbers: hybrid; one for each query.")
    ] = None,
    fusion: Annotated[str | None, Option(help="Of hybrid: scores, ranks or a weight.")] = None,
    offset: Annotated[int, Option(min=0, help="Pass over the best so many: the next page.")] = 0,
    group_by: Annotated[
        str | None, Option(metavar="FIELD", help="The best record of each group: of each document.")
    ] = None,
    group_size: Annotated[int | None, Option(min=1, help="The best so many of each group.")] = None,
    exact: Annotated[bool, Option("--exact", help="Do not use the index.")] = False,
    encoder: EncoderName = None,
    projection: Projection = None,
    as_json: AsJson = False,
) -> None:
    """Find the nearest records."""
    asked, has_text = query_of(query)
    with answering(path, has_text and mode is not Mode.text, encoder, projection, quiet=as_json) as db:
        hits = db.search(
            projected(db, asked, projection), k, where=filter_of(where), exact=exact, radius=radius,
            exclude_ids=ids_of(exclude), diversity=diversity, fetch_k=fetch_k, offset=offset, group_by=group_by,
            group_size=group_size, texts=texts or None, **_hybrid(mode, fusion),
        )  # fmt: skip
        answers = [[_fields("score", hit, hit.score) for hit in row] for row in hits]
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        _show_hits("score", answer)


def _hybrid(mode: Mode | None, fusion: str | None) -> dict[str, Any]:
    """Arguments of a search by words; a fusion is a word or a number."""
    try:
        weight = None if fusion is None else float(fusion)
    except ValueError:
        return named(mode=mode, fusion=fusion)
    return named(mode=mode, fusion=weight)


def attend(
    path: Database,
    query: Query,
    temperature: Annotated[float, Option(help="Near 0 the nearest record, far above the mean of all.")] = 1.0,
    k: Annotated[int | None, Option("-k", min=1, help="Weigh the k nearest; without it all records.")] = None,
    rtol: Annotated[float | None, Option(help="Estimate to this relative error, in place of -k.")] = None,
    where: Where = None,
    encoder: EncoderName = None,
    projection: Projection = None,
    as_json: AsJson = False,
) -> None:
    """Soft query: the mean of all values, each weighted by softmax(score / temperature)."""
    asked, has_text = query_of(query)
    with answering(path, has_text, encoder, projection, quiet=as_json) as db:
        asked, filter_ = projected(db, asked, projection), filter_of(where)
        answers = soft_answers(db, asked, temperature, k, rtol, filter_)
        is_label = db.num_classes is not None
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        _show_attended(answer, temperature, is_label)


def _fields(name: str, hit: Any, number: float) -> dict[str, Any]:
    """A hit as JSON; `name` is that of its number."""
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
    """The soft answer to each query as JSON; "hits" are the records that weigh most."""
    pooled = db.attend(queries, temperature=temperature, k=k, rtol=rtol, where=where)
    # Σ w² = exp(lse(T/2) - 2 lse(T)); its inverse is the number of equal weights that would be as spread out
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
    """The share of the weight beyond the k nearest; where the answer does not tell, as a cluster's, by a pass."""
    unknown = pooled.missed_mass.isnan()
    if not bool(unknown.any()):
        return pooled.missed_mass
    whole = db.attend(queries, temperature=temperature, where=where).lse
    return pooled.missed_mass.where(~unknown, -(pooled.lse - whole).clamp(max=0).expm1())


def _attended(pooled: Pooled, i: int, effective: float, missed: float) -> dict[str, Any]:
    """The answer to one query of a batch, as JSON, without its records."""
    bar = pooled.bar[i].item()
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.n_pooled[i] else None,  # JSON has no word for -inf
        "candidates": int(pooled.n_pooled[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": missed,
        "bar": bar if math.isfinite(bar) else None,  # unknown where truncated
        "met": bool(pooled.met[i]),
        "effective_records": effective if math.isfinite(effective) else 0.0,
    }


def _show_attended(answer: dict[str, Any], temperature: float, is_label: bool) -> None:
    """The answer to one soft query, in words and a table of the records that weigh most."""
    console = terminal()
    if not answer["candidates"]:
        console.print("no record takes part, so the answer is all zeros")
        return
    missed = "" if answer["exact"] else f", {answer['missed_mass']:.1%} of all weight missed"
    if answer["bar"]:
        missed = f", an estimate: in 95 of 100 cases the answer is off by at most {answer['bar']:.3g}"
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
    """Print hits as a table; `name` is that of their number. A text is shown after the payload."""
    if not hits:
        terminal().print("nothing found")
        return
    longest = max(len(str(hit["id"])) for hit in hits)
    room = max(20, terminal().width - longest - len(name) - 8)  # one line a hit on a terminal, all of it in a pipe
    parts = [", ".join(filter(None, (_line(hit["payload"]), hit["text"]))) for hit in hits]
    rows = [(f"{hit[name]:.4f}", safe(str(hit["id"])), safe(part, room)) for hit, part in zip(hits, parts, strict=True)]
    print_table((name, "id", "payload"), rows, numbers=(name,))


def _line(payload: object) -> str:
    """A payload in one line; `--json` gives it exactly."""
    if isinstance(payload, dict):
        texts = {name: value if isinstance(value, str) else dumps(value) for name, value in payload.items()}
        return ", ".join(f"{name}: {text}" for name, text in texts.items())
    return "" if payload is None else dumps(payload)
