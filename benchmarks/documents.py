"""Full text and hybrid search: answers and times beside FTS5's own, and recall of each mode on a reverse dictionary.

    python benchmarks/documents.py --data DIR --out benchmarks/results/documents.json

DIR holds records.jsonl.gz (id, gloss), keys.npy, queries.jsonl.gz (word, definition, answers) and queries.npy. Before a
time is taken, the ten best records of the ten-word definitions, and their scores, must be those of FTS5. Recall is the
share of definitions with a right record among the ten best. Half of the words choose the weight of the fusion; the
recall is reported for the other half.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
from common import provenance, write_json

import softdb
from softdb.store.format import TOKENIZERS

WEIGHTS = (0.002, 0.004, 0.006, 0.008, 0.012, 0.02)
BATCH = 256


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a compressed JSON Lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def fts5(records: list[dict[str, Any]]) -> Callable[[str], list[tuple[int, float]]]:
    """Return a function that finds the ten best rows and scores of a text by FTS5 itself, all words OR-ed."""
    table = apsw.Connection(":memory:")
    table.execute(f"CREATE VIRTUAL TABLE t USING fts5(text, tokenize='{TOKENIZERS['words']}')")
    with table:
        table.executemany("INSERT INTO t(rowid, text) VALUES(?, ?)", enumerate(record["gloss"] for record in records))

    def best(text: str) -> list[tuple[int, float]]:
        words = " OR ".join('"{}"'.format(word.replace('"', '""')) for word in text.split())
        sql = "SELECT rowid, -rank FROM t WHERE t MATCH ? ORDER BY rank LIMIT 10"
        matches: list[Any] = table.execute(sql, (words,)).fetchall()
        return matches

    return best


def require_equal(db: softdb.SoftDB, texts: list[str], best: Callable[[str], list[tuple[int, float]]]) -> None:
    """Raise SystemExit if rows or scores differ from FTS5's."""
    for text in texts:
        hits, expected = db.search(text, mode="text"), best(text)
        rows, scores = hits.rows[0].tolist()[: len(expected)], hits.scores[0][: len(expected)]
        right_scores = np.allclose(scores, [score for _, score in expected], rtol=0, atol=1e-9)
        if rows != [row for row, _ in expected] or not right_scores:
            raise SystemExit(f"the ten best records of {text!r} differ from FTS5's; expected the same rows and scores")


def times(ways: dict[str, Callable[[int], object]], count: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of single queries: each is asked once in each way, with another way first each time."""
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(count):
        for name, ask in [*list(ways.items())[i % len(ways) :], *list(ways.items())[: i % len(ways)]]:
            start = time.perf_counter()
            ask(i)
            milliseconds[name].append(1000 * (time.perf_counter() - start))
    return {
        name: {"p50": round(float(np.median(column)), 3), "p95": round(float(np.percentile(column, 95)), 3)}
        for name, column in milliseconds.items()
    }


def recalls(db: softdb.SoftDB, definitions: list[dict[str, Any]], vectors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return recall@10 of each way over the held-out words; the weight is the best over the other words."""

    def hit(places: np.ndarray[Any, Any], **options: Any) -> np.ndarray[Any, Any]:  # (n,) bool
        right = np.zeros(len(places), np.bool_)
        for low in range(0, len(places), BATCH):
            batch = places[low : low + BATCH]
            words: dict[str, Any] = (
                {} if options.get("mode") == "vector" else {"texts": [definitions[i]["definition"] for i in batch]}
            )
            queries: dict[str, Any] = {} if options.get("mode") == "text" else {"queries": vectors[batch]}
            hits = db.search(k=10, exact=True, **queries, **words, **options)
            right[low : low + BATCH] = [
                not set(ids).isdisjoint(definitions[i]["answers"]) for i, ids in zip(batch, hits.ids, strict=True)
            ]
        return right

    half_of = {word: i % 2 for i, word in enumerate(sorted({line["word"] for line in definitions}))}
    half = np.array([half_of[line["word"]] for line in definitions])
    tuned, held_out = np.flatnonzero(half == 0), np.flatnonzero(half == 1)
    weight = max(WEIGHTS, key=lambda weight: hit(tuned[::4], fusion=weight).mean())
    ways: dict[str, dict[str, Any]] = {
        "vector": {"mode": "vector"},
        "text": {"mode": "text"},
        "hybrid, ranks": {"fusion": "ranks"},
        "hybrid, scores": {},
        f"hybrid, weight {weight}": {"fusion": weight},
    }
    right = {name: hit(held_out, **options) for name, options in ways.items()}
    gain = {name: 100 * (column.astype(float) - right["vector"]) for name, column in right.items()}
    return {
        name: {
            "recall@10": round(100 * float(column.mean()), 2),
            "above vector": round(float(gain[name].mean()), 2),
            "standard error": round(float(gain[name].std() / len(column) ** 0.5), 2),
        }
        for name, column in right.items()
    }


def main() -> None:
    """Check the answers, time the queries, measure recall and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=200, help="number of ten-word definitions to time")
    parser.add_argument("--recall-of", type=int, default=None, help="number of definitions for recall (default: all)")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    records, definitions = lines(args.data / "records.jsonl.gz"), lines(args.data / "queries.jsonl.gz")
    keys, vectors = (np.load(args.data / f"{name}.npy").astype(np.float32) for name in ("keys", "queries"))
    ten = [i for i, line in enumerate(definitions) if len(line["definition"].split()) == 10]
    ten = ten[:: max(1, len(ten) // args.questions)][: args.questions]
    texts = [definitions[i]["definition"] for i in ten]
    with tempfile.TemporaryDirectory() as folder, softdb.open(Path(folder) / "db", dim=384, metric="cosine") as db:
        db.insert([record["id"] for record in records], keys, texts=[record["gloss"] for record in records])
        start = time.process_time()
        db.index_text()
        index_text_seconds = time.process_time() - start
        best = fts5(records)
        require_equal(db, texts, best)
    with tempfile.TemporaryDirectory() as folder, softdb.open(Path(folder) / "db", dim=384, metric="cosine") as db:
        db.insert([record["id"] for record in records], keys, texts=[record["gloss"] for record in records])
        db.index_text()
        db.build_index()
        db.watch(share=0)
        db.search(vectors[:1])
        first = texts[0]
        start = time.perf_counter()
        db.search(first, mode="text")
        opening = 1000 * (time.perf_counter() - start)
        ways: dict[str, Callable[[int], object]] = {
            "text": lambda i: db.search(texts[i], mode="text"),
            "vector": lambda i: db.search(vectors[ten[i]]),
            "hybrid": lambda i: db.search(vectors[ten[i]], texts=texts[i]),
            "fts5": lambda i: best(texts[i]),
        }
        milliseconds = times(ways, len(ten))
        step = 1 if args.recall_of is None else max(1, len(definitions) // args.recall_of)
        report = {
            **provenance(["softdb", "apsw", "faiss-cpu", "torch"]),
            "records": len(records),
            "index_text_seconds": round(index_text_seconds, 2),
            "first_text_ms": round(opening, 1),
            "ms": milliseconds,
            "text_of_fts5": round(milliseconds["text"]["p50"] / milliseconds["fts5"]["p50"], 4),
            "hybrid_above_both_ms": round(
                milliseconds["hybrid"]["p50"] - milliseconds["text"]["p50"] - milliseconds["vector"]["p50"], 3
            ),
            "recall": recalls(db, definitions[::step], vectors[::step]),
        }
    print(json.dumps(report, indent=1))
    if args.out is not None:
        write_json(args.out, report)


if __name__ == "__main__":
    main()
