"""Full text and hybrid search: answers and times beside FTS5's own, and the recall of each way on a reverse dictionary.

    python benchmarks/documents.py --data DIR --out benchmarks/results/documents.json

DIR holds records.jsonl.gz (id, gloss), keys.npy, queries.jsonl.gz (word, definition, answers) and queries.npy. The ten
best of ten-word definitions, and their scores, must be FTS5's own before a time is taken. Recall counts the definitions
with a right record among the ten best; a weight is chosen on every other word, and all is reported on the others.
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
    """The objects of a compressed JSON Lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def fts5(records: list[dict[str, Any]]) -> Callable[[str], list[tuple[int, float]]]:
    """The ten best by FTS5 itself, all words OR-ed."""
    table = apsw.Connection(":memory:")
    table.execute(f"CREATE VIRTUAL TABLE t USING fts5(text, tokenize='{TOKENIZERS['words']}')")
    with table:
        table.executemany("INSERT INTO t(rowid, text) VALUES(?, ?)", enumerate(one["gloss"] for one in records))

    def best(text: str) -> list[tuple[int, float]]:
        asked = " OR ".join('"{}"'.format(word.replace('"', '""')) for word in text.split())
        sql = "SELECT rowid, -rank FROM t WHERE t MATCH ? ORDER BY rank LIMIT 10"
        found: list[Any] = table.execute(sql, (asked,)).fetchall()
        return found

    return best


def require_equal(db: softdb.SoftDB, texts: list[str], best: Callable[[str], list[tuple[int, float]]]) -> None:
    """Stop where rows or scores differ from FTS5's."""
    for text in texts:
        hits, own = db.search(text, mode="text"), best(text)
        rows, scores = hits.rows[0].tolist()[: len(own)], hits.scores[0][: len(own)]
        if rows != [row for row, _ in own] or not np.allclose(scores, [one for _, one in own], rtol=0, atol=1e-9):
            raise SystemExit(f"the ten best of {text!r} are not FTS5's")


def times(ways: dict[str, Callable[[int], object]], count: int) -> dict[str, dict[str, float]]:
    """Milliseconds of single questions, each asked once in each way, another way first each time."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(count):
        for name, ask in [*list(ways.items())[i % len(ways) :], *list(ways.items())[: i % len(ways)]]:
            start = time.perf_counter()
            ask(i)
            taken[name].append(1000 * (time.perf_counter() - start))
    return {
        name: {"p50": round(float(np.median(own)), 3), "p95": round(float(np.percentile(own, 95)), 3)}
        for name, own in taken.items()
    }


def recalls(db: softdb.SoftDB, asked: list[dict[str, Any]], vectors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Recall@10 of each way over the held-out words; the weight is the best over the others."""

    def found(where: np.ndarray[Any, Any], **how: Any) -> np.ndarray[Any, Any]:
        right = np.zeros(len(where), np.bool_)
        for low in range(0, len(where), BATCH):
            some = where[low : low + BATCH]
            words: dict[str, Any] = (
                {} if how.get("mode") == "vector" else {"texts": [asked[i]["definition"] for i in some]}
            )
            queries: dict[str, Any] = {} if how.get("mode") == "text" else {"queries": vectors[some]}
            hits = db.search(k=10, exact=True, **queries, **words, **how)
            right[low : low + BATCH] = [
                not set(ids).isdisjoint(asked[i]["answers"]) for i, ids in zip(some, hits.ids, strict=True)
            ]
        return right

    chosen = {word: i % 2 for i, word in enumerate(sorted({one["word"] for one in asked}))}
    half = np.array([chosen[one["word"]] for one in asked])
    tuned, held_out = np.flatnonzero(half == 0), np.flatnonzero(half == 1)
    weight = max(WEIGHTS, key=lambda one: found(tuned[::4], fusion=one).mean())
    ways: dict[str, dict[str, Any]] = {
        "vector": {"mode": "vector"},
        "text": {"mode": "text"},
        "hybrid, ranks": {"fusion": "ranks"},
        "hybrid, scores": {},
        f"hybrid, weight {weight}": {"fusion": weight},
    }
    right = {name: found(held_out, **how) for name, how in ways.items()}
    gain = {name: 100 * (one.astype(float) - right["vector"]) for name, one in right.items()}
    return {
        name: {
            "recall@10": round(100 * float(one.mean()), 2),
            "above vector": round(float(gain[name].mean()), 2),
            "standard error": round(float(gain[name].std() / len(one) ** 0.5), 2),
        }
        for name, one in right.items()
    }


def main() -> None:
    """Check, time, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=200, help="ten-word definitions that are timed")
    parser.add_argument("--recall-of", type=int, default=None, help="definitions that recall is taken of; all")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    records, asked = lines(given.data / "records.jsonl.gz"), lines(given.data / "queries.jsonl.gz")
    keys, vectors = (np.load(given.data / f"{name}.npy").astype(np.float32) for name in ("keys", "queries"))
    ten = [i for i, one in enumerate(asked) if len(one["definition"].split()) == 10]
    ten = ten[:: max(1, len(ten) // given.questions)][: given.questions]
    texts = [asked[i]["definition"] for i in ten]
    with tempfile.TemporaryDirectory() as folder, softdb.open(Path(folder) / "db", dim=384, metric="cosine") as db:
        db.insert([one["id"] for one in records], keys, texts=[one["gloss"] for one in records])
        start = time.process_time()
        db.index_text()
        making = time.process_time() - start
        best = fts5(records)
        require_equal(db, texts, best)
    with tempfile.TemporaryDirectory() as folder, softdb.open(Path(folder) / "db", dim=384, metric="cosine") as db:
        db.insert([one["id"] for one in records], keys, texts=[one["gloss"] for one in records])
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
        some = slice(None) if given.recall_of is None else slice(None, None, max(1, len(asked) // given.recall_of))
        report = {
            **provenance(["softdb", "apsw", "faiss-cpu", "torch"]),
            "records": len(records),
            "index_text_seconds": round(making, 2),
            "first_text_ms": round(opening, 1),
            "ms": milliseconds,
            "text_of_fts5": round(milliseconds["text"]["p50"] / milliseconds["fts5"]["p50"], 4),
            "hybrid_above_both_ms": round(
                milliseconds["hybrid"]["p50"] - milliseconds["text"]["p50"] - milliseconds["vector"]["p50"], 3
            ),
            "recall": recalls(db, asked[some], vectors[some]),
        }
    print(json.dumps(report, indent=1))
    if given.out is not None:
        write_json(given.out, report)


if __name__ == "__main__":
    main()
