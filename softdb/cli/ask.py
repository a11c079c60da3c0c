"""The commands that query, `softdb search` and `softdb attend`, and how they show the answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from softdb.cli.arguments import (
    AsJson,
    Database,
    EncoderName,
    Projection,
    Query,
    Where,
    filter_of,
    ids_of,
    opened,
    projected,
)
from softdb.terminal import counted, dumps, print_json, print_table, safe, terminal

if TYPE_CHECKING:
    from softdb.answers import Pooled

__all__ = ["attend", "search"]

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
    exact: Annotated[bool, Option("--exact", help="Do not use the index.")] = False,
    encoder: EncoderName = None,
    projection: Projection = None,
    as_json: AsJson = False,
) -> None:
    """Find the nearest records."""
    with opened(path, query, encoder) as db:
        hits = db.search(
            projected(db, query, projection), k, where=filter_of(where), exact=exact, radius=radius,
            exclude_ids=ids_of(exclude), diversity=diversity, fetch_k=fetch_k,
        )  # fmt: skip
        answers = [[(hit.id, hit.score, hit.payload) for hit in mine] for mine in hits]
    if as_json:
        print_json([_facts("score", answer) for answer in answers])
        return
    for answer in answers:
        _show_hits("score", answer)


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
    facts = [_attended(pooled, i, effective[i], answer) for i, answer in enumerate(answers)]
    if as_json:
        print_json(facts)
        return
    for fact, answer in zip(facts, answers, strict=True):
        _show_attended(fact, answer, temperature, is_label)


def _facts(name: str, hits: list[Any]) -> list[dict[str, Any]]:
    """Hits (id, number, payload) as JSON; `name` is that of the number."""
    return [dict(zip(("id", name, "payload"), hit, strict=True)) for hit in hits]


def _attended(pooled: Pooled, i: int, effective: float, hits: list[Any]) -> dict[str, Any]:
    """The answer to one query of a batch, as JSON."""
    bar = pooled.bar[i].item()
    return {
        "output": pooled.output[i].tolist(),
        "lse": pooled.lse[i].item() if pooled.n_pooled[i] else None,  # JSON has no word for -inf
        "candidates": int(pooled.n_pooled[i]),
        "exact": bool(pooled.exact[i]),
        "missed_mass": pooled.missed_mass[i].item(),
        "bar": bar if math.isfinite(bar) else None,  # unknown where truncated
        "met": bool(pooled.met[i]),
        "effective_records": effective if math.isfinite(effective) else 0.0,
        "hits": _facts("weight", hits),
    }


def _show_attended(answer: dict[str, Any], hits: list[Any], temperature: float, is_label: bool) -> None:
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
    _show_hits("weight", hits)
    output = answer["output"]
    if is_label:
        best = sorted(range(len(output)), key=lambda label: -output[label])[:SHOWN]
        console.print("classes  " + ", ".join(f"{label}: {output[label]:.1%}" for label in best))
    else:
        more = f", … ({len(output)} numbers)" if len(output) > SHOWN else ""
        console.print("output   " + ", ".join(f"{number:.4f}" for number in output[:SHOWN]) + more)


def _show_hits(name: str, hits: list[Any]) -> None:
    """Hits (id, number, payload) as a table; `name` is that of the number."""
    if not hits:
        terminal().print("nothing found")
        return
    longest = max(len(str(record)) for record, _, _ in hits)
    room = max(20, terminal().width - longest - len(name) - 8)  # one line a hit on a terminal, all of it in a pipe
    rows = [(f"{number:.4f}", safe(str(record)), safe(_line(payload), room)) for record, number, payload in hits]
    print_table((name, "id", "payload"), rows, numbers=(name,))


def _line(payload: object) -> str:
    """A payload in one line; `--json` gives it exactly."""
    if isinstance(payload, dict):
        texts = {name: value if isinstance(value, str) else dumps(value) for name, value in payload.items()}
        return ", ".join(f"{name}: {text}" for name, text in texts.items())
    return "" if payload is None else dumps(payload)
