"""`softdb demo`: the whole job in one go, on some 20,000 WordNet glosses that ship with the package.

Store the glosses, ask for one in three ways, train a projection of the queries through the soft query, reopen.
"""

from __future__ import annotations

import json
import shlex
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import softdb
from softdb.answers import Hits
from softdb.data import DemoData, load_wordnet
from softdb.data.encoder import DEMO, PROJECTION
from softdb.database import SoftDB
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, MissingDependency, SoftDBError, TrainingWarning
from softdb.store.ours import remove_database, require_ours
from softdb.terminal import print_table, progress, safe
from softdb.train import fit, save

MARK = "demo.json"  # a directory with this file may be made anew by --fresh
_OURS = (MARK, PROJECTION, "projection.npy")  # beside the database

TEMPERATURE = 0.05  # scores are cosines, so the softmax needs a small one
TEMPERATURES = (0.01, 0.05, 0.5)
SHOWN = ("kettle", "helmet", "echo")  # words for the three ways, the first that is held out
TYPED = "a tower with a light that warns ships"
CHUNK = 2000  # records a commit


@dataclass(frozen=True)
class DemoReport:
    """Figures that the demo measured."""

    records: int
    before: tuple[float, float]  # recall@1 and recall@10 on held-out queries
    after: tuple[float, float]
    seconds: float


def run_demo(
    path: Path,
    *,
    fresh: bool = False,
    data: DemoData | None = None,
    console: Console | None = None,
    seed: int = 0,
    epochs: int = 4,
) -> DemoReport:
    """Make the demo database at a path and show what it does; the database stays there.

    Args:
        path: a directory that does not exist, or is empty.
        fresh: make a demo database that is there already anew; anything else is never touched.
        data: other records and queries, all of unit length.
        console: where to print.
        seed: of the order in which training queries come.
        epochs: how often each comes.
    """
    begin = time.perf_counter()
    console = console or Console(highlight=False)
    _clear(path, fresh)
    data = data or load_wordnet()
    with softdb.open(path, dim=data.keys.shape[1]) as db:
        (path / MARK).write_text(json.dumps({"records": len(data.ids), "seed": seed}) + "\n")
        db.core.store.note_encoder(DEMO)
        _fill(db, data, console)
        query = _chosen(data)
        _ask(db, data, query, _index(db, console), console)
        before, after = _learn(db, data, query, path, console, seed, epochs)
    _reopen(path, data, console)
    seconds = time.perf_counter() - begin
    console.print(f"\n[b green]Done[/] in {seconds:.0f} s. Yours to ask (typed text needs softdb\\[text]):\n")
    place = escape(shlex.quote(str(path)))
    for line in (f"info {place}", f'search {place} "{TYPED}"', f'attend {place} "{TYPED}" --temperature {TEMPERATURE}'):
        console.print(f"  softdb {line}", soft_wrap=True)
    return DemoReport(len(data.ids), before, after, seconds)


# -- the steps ---------------------------------------------------------------------------------------------------------


def _clear(path: Path, fresh: bool) -> None:
    """Make sure that nothing is there, removing at most a demo database, and that only if asked."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / MARK).is_file():
        raise BadInput(f"{path} is there and is not a demo database, so it is left alone; give another directory")
    if not fresh:
        raise BadInput(f"{path} holds the demo database already; ask it (softdb search), or make it anew with --fresh")
    require_ours(path.resolve(), *_OURS)
    try:
        softdb.open(path).close()
    except SoftDBError as error:  # damaged or half made: the more reason to make it anew
        if isinstance(error, DatabaseLocked):
            raise
    remove_database(path.resolve(), *_OURS)


def _fill(db: SoftDB, data: DemoData, console: Console) -> None:
    _step(console, 1, "Store", "every commit is on disk before the next begins")
    begin, count = time.perf_counter(), len(data.ids)
    with progress("insert", console) as say:
        for start in range(0, count, CHUNK):
            part = slice(start, start + CHUNK)
            db.insert(data.ids[part], data.keys[part], payloads=data.payloads[part])
            say("insert", min(count, start + CHUNK), count)
    seconds, what = time.perf_counter() - begin, f"{count:,} dictionary definitions, {data.keys.shape[1]} numbers each"
    console.print(f"  {what}: {seconds:.1f} s, {count / seconds:,.0f} records/s")


def _index(db: SoftDB, console: Console) -> str:
    """Build the index where FAISS is there, and say how searches are answered."""
    try:
        with progress("index", console) as say:
            report = db.build_index(progress=say)
    except MissingDependency:
        return "exactly: an index needs softdb\\[cpu]"
    if report.kind == "flat":
        return "exactly: no index is faster here"
    return f"by an index ({report.kind}, recall {report.recall:.0%})"


def _chosen(data: DemoData) -> int:
    """A held-out query that a stranger knows, or else the first."""
    held = np.flatnonzero(data.held_out)
    words = {data.query_texts[i]: int(i) for i in held}
    return next((words[word] for word in SHOWN if word in words), int(held[0]))


def _ask(db: SoftDB, data: DemoData, query: int, index: str, console: Console) -> None:
    """One query, answered in the three ways."""
    key, right = torch.from_numpy(data.query_keys[query]), {data.ids[i] for i in data.answers[query]}
    _step(console, 2, "Ask", f'in three ways, for the word "{data.query_texts[query]}"')

    record = db[data.ids[data.answers[query][0]]]
    console.print(f"  [b]exact[/]        {record.id}: {safe(record.payload['gloss'], console.width - 33)}")

    (_, first), (hits, spent) = _timed(db, key), _timed(db, key)  # the first search of a process compiles its loops
    console.print(f"  [b]approximate[/]  the nearest in {spent * 1e3:.1f} ms, {index}")
    console.print(f"               [dim](after a first search to warm up, {first * 1e3:.1f} ms)[/]")
    rows = [
        (
            f"{hit.score:.2f}",
            safe(hit.payload["word"], 20),
            "[b green]right[/]" if hit.id in right else "",
            safe(hit.payload["gloss"], console.width - 48),
        )
        for hit in hits[0]
    ]
    print_table(("score", "word", "", "definition"), rows, console=console, indent=4)

    console.print("  [b]soft[/]         all of them, the nearer the more; temperature sets how much")
    sweep, nearest = [], hits.scores[0, 0]
    for temperature in TEMPERATURES:
        lse, half = (db.attend(key, temperature=one).lse[0] for one in (temperature, temperature / 2))
        share, effective = torch.exp(nearest / temperature - lse), torch.exp(2 * lse - half)
        sweep.append((f"{temperature:g}", f"{float(share):.1%}", f"{float(effective):,.0f} of {len(db):,} definitions"))
    print_table(("temperature", "weight of the nearest", "averages about"), sweep, console=console, indent=4)


def _timed(db: SoftDB, key: Tensor) -> tuple[Hits, float]:
    """The five nearest, and the seconds that it took."""
    begin = time.perf_counter()
    hits = db.search(key, k=5)
    return hits, time.perf_counter() - begin


def _learn(
    db: SoftDB, data: DemoData, query: int, path: Path, console: Console, seed: int, epochs: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Train the projection, keep it, and measure what it is good for: recall before and after."""
    _step(console, 3, "Learn", "a projection of the queries, by gradients through the soft query")
    right, begin = [[data.ids[i] for i in mine] for mine in data.answers], time.perf_counter()
    with progress("train", console) as say, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)  # the table says it
        fitted = fit(
            db, data.query_keys, right, temperature=TEMPERATURE, epochs=epochs, holdout=data.held_out, patience=None,
            seed=seed, progress=say,
        )  # fmt: skip
    seconds, (before, after) = time.perf_counter() - begin, (fitted.before, fitted.after)
    save(path / PROJECTION, fitted.projection, {"temperature": TEMPERATURE, "epochs": epochs, "seed": seed})
    learnt, unseen = len(data.held_out) - before.queries, before.queries
    console.print(f"  {seconds:.0f} s, {epochs} rounds over {learnt:,} words; then {unseen:,} words it never saw:")
    key = torch.from_numpy(data.query_keys[query : query + 1])
    places = [_place(db, asked, right[query]) for asked in (key, fitted.projection.of(db, key))]
    rows = [
        ("first (recall@1)", f"{before.recall_1:.1%}", f"[b]{after.recall_1:.1%}[/]"),
        ("among ten (recall@10)", f"{before.recall_10:.1%}", f"[b]{after.recall_10:.1%}[/]"),
        ("mean of 1 / place (MRR@100)", f"{before.mrr_100:.3f}", f"[b]{after.mrr_100:.3f}[/]"),
        (f'in place, for "{data.query_texts[query]}"', *places),
    ]
    print_table(("the right definition comes", "before", "after"), rows, console=console, indent=4)
    return before[:2], after[:2]


def _place(db: SoftDB, query: Tensor, right: list[str]) -> str:
    """At which place the first right record comes, of the ten nearest."""
    (ids,) = db.search(query, k=10, exact=True).ids
    return next((str(i) for i, name in enumerate(ids, 1) if name in right), "> 10")


def _reopen(path: Path, data: DemoData, console: Console) -> None:
    """Open what is on disk anew, and compare it with what went in."""
    _step(console, 4, "Reopen", "read-only, and every byte compared with its checksum")
    sample = list(range(0, len(data.ids), max(1, len(data.ids) // 500)))
    with softdb.open(path, mode="r") as db:
        count, records = db.verify(), db.get([data.ids[i] for i in sample])
    same = np.array_equal(records.keys.numpy(), data.keys[sample])
    if count != len(data.ids) or not same or records.payloads != [data.payloads[i] for i in sample]:
        raise CorruptionError(f"{path} does not hold what went in; please report this with the output of softdb verify")
    console.print(f"  {count:,} records, nothing lost; {len(sample)} of them compared with what went in")


def _step(console: Console, number: int, title: str, more: str) -> None:
    console.print(f"\n[b cyan]{number} {title}[/] [dim]- {escape(more)}[/]")
