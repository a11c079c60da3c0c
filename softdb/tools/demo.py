"""`softdb demo`: a database of some 20,000 WordNet glosses that ship with the package.

Store the glosses, query them in three ways, train a projection of the queries through the soft query, reopen.
"""

from __future__ import annotations

import json
import shlex
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

import softdb
from softdb.data import DemoData, load_wordnet
from softdb.data.encoder import DEMO, PROJECTION
from softdb.database import SoftDB
from softdb.errors import BadInput, CorruptionError, DatabaseLocked, MissingDependency, SoftDBError, TrainingWarning
from softdb.opening import existing
from softdb.store.ours import remove_database, require_ours
from softdb.terminal import Excerpt, print_table, progress, safe, shortened
from softdb.tools.cli.ask import soft_answers
from softdb.train import fit, ranking, save

MARK = "demo.json"  # --fresh replaces only directories with this file
_OURS = (MARK, PROJECTION, "projection.npy")  # files that the demo adds to the database's directory

TEMPERATURE = 0.05  # scores are cosines, so the softmax needs a small one
TEMPERATURES = (0.01, 0.05, 0.5)
WORDS = ("kettle", "helmet", "echo")  # the demo queries with the first of them that is held out
RECORDS_PER_COMMIT = 2000
SETTINGS: dict[str, Any] = {"dim": 96, "metric": "cosine", "fields": ["pos"]}


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
    """Make the demo database at a path, query it, train on it and print the answers; the database stays.

    Args:
        path: the new database's directory; it must be missing or empty unless `fresh`.
        fresh: replace an older demo database at the path.
        data: other records and queries, all of unit length.
        console: the console to print to.
        seed: seed of the order of the training queries.
        epochs: number of passes over the training queries.
    """
    begin = time.perf_counter()
    console = console or Console(highlight=False)
    _clear(path, fresh)
    data = data or load_wordnet()
    with softdb.open(path, **SETTINGS) as db:
        (path / MARK).write_text(json.dumps({"records": len(data.ids), "seed": seed}) + "\n")
        db.core.store.note_encoder(DEMO)
        _fill(db, data, console)
        query = _chosen(data)
        _query(db, data, query, _index(db, console), console)
        before, after = _learn(db, data, query, path, console, seed, epochs)
    _reopen(path, data, console)
    seconds = time.perf_counter() - begin
    console.print(f"\n[b green]Done[/] in {seconds:.0f} s. Go on with these; they need no network:\n")
    place, word = escape(shlex.quote(str(path))), data.query_texts[query]
    for line in ("info {}", f"search {{}} {word}", f"attend {{}} {word} --temperature {TEMPERATURE}", "explore {}"):
        console.print(f"  softdb {line.format(place)}", soft_wrap=True)
    console.print("\nOther words work, too; sentences need softdb\\[text], the last command needs softdb\\[explore].")
    return DemoReport(len(data.ids), before, after, seconds)


# -- the steps ---------------------------------------------------------------------------------------------------------


def _clear(path: Path, fresh: bool) -> None:
    """Remove a demo database at the path if `fresh`. Raise BadInput if anything else exists there."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / MARK).is_file():
        raise BadInput(f"{path} exists and is not a demo database; give a new or empty directory")
    if not fresh:
        raise BadInput(f"{path} holds the demo database already; query it (softdb search), or replace it with --fresh")
    require_ours(path.resolve(), *_OURS)
    try:
        existing(path).close()
    except SoftDBError as error:  # a damaged or incomplete database is replaced; one in use is not
        if isinstance(error, DatabaseLocked):
            raise
    remove_database(path.resolve(), *_OURS)


def insert(db: SoftDB, data: DemoData, batch: slice) -> None:
    """Insert a batch of the glosses as texts, with their vectors and the other fields as payloads."""
    payloads = [{name: payload[name] for name in ("word", "lemmas", "pos")} for payload in data.payloads[batch]]
    glosses = [payload["gloss"] for payload in data.payloads[batch]]
    db.insert(data.ids[batch], data.keys[batch], texts=glosses, payloads=payloads)


def _fill(db: SoftDB, data: DemoData, console: Console) -> None:
    _step(console, 1, "Store", "every commit is on disk before the next begins")
    begin, count = time.perf_counter(), len(data.ids)
    with progress("insert", console) as show:
        for start in range(0, count, RECORDS_PER_COMMIT):
            insert(db, data, slice(start, start + RECORDS_PER_COMMIT))
            show("insert", min(count, start + RECORDS_PER_COMMIT), count)
    seconds, width = time.perf_counter() - begin, data.keys.shape[1]
    db.index_text()
    console.print(f"  {count:,} definitions, {width} numbers each: {seconds:.1f} s, {count / seconds:,.0f} records/s")


def _index(db: SoftDB, console: Console) -> str:
    """Build the index if FAISS is installed, and describe in words how searches are answered."""
    try:
        with progress("index", console) as show:
            report = db.build_index(progress=show)
    except MissingDependency:
        return "all records compared; an index needs softdb\\[cpu]"
    if report.kind == "flat":
        return "every record compared; so few need no index"
    return f"by an index ({report.kind}, recall {report.recall:.0%})"


def _chosen(data: DemoData) -> int:
    """Return the index of the demo's query: a held-out one with a word of WORDS, or else the first held-out one."""
    held_out = np.flatnonzero(data.held_out)
    words = {data.query_texts[i]: int(i) for i in held_out}
    return next((words[word] for word in WORDS if word in words), int(held_out[0]))


def _query(db: SoftDB, data: DemoData, query: int, index: str, console: Console) -> None:
    """Look up the right record of a query by its id, search for the nearest records, and ask a soft query."""
    key, right = torch.from_numpy(data.query_keys[query]), {data.ids[i] for i in data.answers[query]}
    _step(console, 2, "Query", f'in three ways, for the word "{data.query_texts[query]}"')

    record = db[data.ids[data.answers[query][0]]]
    gloss = safe(shortened(record.text or "", max(20, console.width - 33)))
    console.print(f"  [b]by id[/]        {record.id}: {gloss}")

    spent = []
    for _ in range(2):  # the first search loads code and warms caches
        begin = time.perf_counter()
        hits = db.search(key, k=5)
        spent.append((time.perf_counter() - begin) * 1e3)
    console.print(f"  [b]nearest[/]      in {spent[1]:.1f} ms, {index}")
    console.print(f"               [dim](the first search of the process took {spent[0]:.1f} ms)[/]")
    rows = []
    for hit in hits[0]:
        mark = "[b green]right[/]" if hit.id in right else ""
        rows.append((f"{hit.score:.2f}", Excerpt(hit.payload["word"]), mark, Excerpt(hit.text or "")))
    print_table(("score", "word", "", "definition"), rows, console=console, indent=4)

    console.print("  [b]soft[/]         mean of all records; nearer ones weigh more, by temperature")
    sweep = []
    for temperature in TEMPERATURES:
        (soft,) = soft_answers(db, key[None], temperature, shown=1)
        share, effective = soft["hits"][0]["weight"], soft["effective_records"]
        sweep.append((f"{temperature:g}", f"{share:.1%}", f"{effective:,.0f} of {len(db):,} definitions"))
    print_table(("temperature", "weight of the nearest", "averages about"), sweep, console=console, indent=4)


def _learn(
    db: SoftDB, data: DemoData, query: int, path: Path, console: Console, seed: int, epochs: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Train and save the projection; return recall@1 and recall@10 of the held-out queries before and after."""
    _step(console, 3, "Train", "a projection of the queries, by gradients through the soft query")
    right, begin = [[data.ids[i] for i in answer] for answer in data.answers], time.perf_counter()
    with progress("train", console) as show, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)  # the table below shows recalls that fell
        fitted = fit(
            db, data.query_keys, right, temperature=TEMPERATURE, epochs=epochs, holdout=data.held_out, patience=None,
            seed=seed, progress=show,
        )  # fmt: skip
    seconds, (before, after) = time.perf_counter() - begin, (fitted.before, fitted.after)
    save(path / PROJECTION, fitted.projection, {"temperature": TEMPERATURE, "epochs": epochs, "seed": seed})
    trained, held_out = len(data.held_out) - before.queries, before.queries
    console.print(f"  {seconds:.0f} s, {epochs} epochs over {trained:,} words; tested on {held_out:,} other words:")
    key = torch.from_numpy(data.query_keys[query : query + 1])
    vectors = key, fitted.projection.of(db, key)
    reciprocals = [ranking(db, vector, [right[query]]).mrr_100 for vector in vectors]
    ranks = [f"{1 / reciprocal:.0f}" if reciprocal >= 0.1 else "> 10" for reciprocal in reciprocals]
    rows = [
        ("first (recall@1)", f"{before.recall_1:.1%}", f"[b]{after.recall_1:.1%}[/]"),
        ("among ten (recall@10)", f"{before.recall_10:.1%}", f"[b]{after.recall_10:.1%}[/]"),
        ("mean of 1 / rank (MRR@100)", f"{before.mrr_100:.3f}", f"[b]{after.mrr_100:.3f}[/]"),
        (f'rank for "{data.query_texts[query]}"', *ranks),
    ]
    print_table(("right definition", "before", "after"), rows, console=console, indent=4)
    return before[:2], after[:2]


def _reopen(path: Path, data: DemoData, console: Console) -> None:
    """Open the database again, verify it, and compare a sample with the data."""
    _step(console, 4, "Reopen", "read-only, and compare every byte with its checksum")
    sample = list(range(0, len(data.ids), max(1, len(data.ids) // 500)))
    with softdb.open(path, mode="r") as db:
        count, records = db.verify(), db.get([data.ids[i] for i in sample])
    same = np.array_equal(records.keys.numpy(), data.keys[sample])
    if count != len(data.ids) or not same or records.texts != [data.payloads[i]["gloss"] for i in sample]:
        raise CorruptionError(f"{path} lacks inserted records; please report this with the output of softdb verify")
    console.print(f"  {count:,} records, nothing lost; {len(sample)} of them compared with the inserted ones")


def _step(console: Console, number: int, title: str, more: str) -> None:
    console.print(f"\n[b cyan]{number} {title}[/] [dim]- {escape(more)}[/]")
