"""Soft queries to a tolerance: error, bias, error bars and time, against truncation, a uniform tail, and torch.

    python benchmarks/estimate.py --data wordnet:DIR --out benchmarks/results/estimate-wordnet.json
    python benchmarks/estimate.py --data clustered --n 1000000 --draws 0 --out benchmarks/results/estimate-1m.json

The truth is the exact answer in float64. Coverage is the share of true errors within the 95 % bar, over the draws of a
generator and the queries that were not answered exactly. In "top-k + uniform" half of the candidates are the nearest
records, and half are drawn uniformly from the others. Times are medians of rounds that take the answers in turn; each
round has other queries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import torch
from common import MIB, provenance, write_json
from numpy.typing import NDArray

import softdb
from softdb.tools.bench.datasets import load

Array = NDArray[Any]
CANDIDATES = 400


class World:
    """Keys in databases with an index, one for each kind of values; queries, and the exact answers."""

    def __init__(self, name: str, n: int, dim: int, queries: int, folder: Path) -> None:
        size: dict[str, Any] = {} if name.startswith("wordnet:") else {"n": n, "dim": dim}
        data = load(name, **size, most=2000)
        self.keys = np.concatenate([keys for _, keys in data.blocks()])
        tune, self.queries = data.queries[1000:], data.queries[:queries]
        self.values = {"keys": None, "random 64": _random(len(self.keys)), "labels 45": _labels(name, len(self.keys))}
        self.dbs = {name: self._database(folder / str(i), name) for i, name in enumerate(self.values)}
        for db in self.dbs.values():
            self.report = db.build_index("ivf", recall=0.95, queries=tune)

    def _database(self, folder: Path, kind: str) -> softdb.SoftDB:
        values = self.values[kind]
        shape: dict[str, Any] = {}
        if kind == "random 64":
            shape = {"value_dim": 64}
        elif kind == "labels 45":
            shape = {"num_classes": 45}
        db = softdb.open(folder, dim=self.keys.shape[1], **shape)
        for low in range(0, len(self.keys), 100_000):
            block = slice(low, low + 100_000)
            block_values = None if values is None else values[block]
            db.insert(range(low, low + len(self.keys[block])), self.keys[block], block_values)
        return db

    def exact(self, kind: str, temperature: float) -> tuple[Array, Array]:
        """Return output (q, v) and lse (q,) in float64."""
        values: Any = self.keys if self.values[kind] is None else self.values[kind]
        outputs, lses = [], []
        for low in range(0, len(self.queries), 64):
            scores = self.queries[low : low + 64].astype(np.float64) @ self.keys.T.astype(np.float64) / temperature
            top = scores.max(1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True)
            weights /= total
            if kind == "labels 45":
                outputs.append(np.stack([np.bincount(values, row, 45) for row in weights]))
            else:
                outputs.append(weights @ values)
            lses.append(top[:, 0] + np.log(total[:, 0]))
        return np.concatenate(outputs), np.concatenate(lses)


def _random(n: int) -> Array:
    return np.random.default_rng(7).standard_normal((n, 64)).astype(np.float32)


def _labels(name: str, n: int) -> Array:
    """Return WordNet's 45 topics, or labels that follow the order of the records."""
    if not name.startswith("wordnet:"):
        return np.arange(n) * 45 // n
    import gzip

    with gzip.open(Path(name.removeprefix("wordnet:")) / "records.jsonl.gz", "rt") as file:
        topics = [json.loads(line)["topic"] for line in file]
    return np.unique(topics, return_inverse=True)[1]


def quality(world: World, kind: str, temperature: float, draws: int) -> dict[str, Any]:
    """Return coverage, bias and error over many draws of CANDIDATES records."""
    output, lse = world.exact(kind, temperature)
    db, queries = world.dbs[kind], torch.from_numpy(world.queries)
    errors, bars, ratios, deviations, pooled_records = [], [], [], [], []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        pooled = db.attend(queries, temperature=temperature, rtol=0.05, max_draws=CANDIDATES, generator=generator)
        assert not pooled.exact.any()
        errors.append(np.linalg.norm(pooled.output.double().numpy() - output, axis=1))
        bars.append(pooled.bar.numpy())
        ratios.append(np.exp(pooled.lse.double().numpy() - lse))
        deviations.append(pooled.lse_stderr.numpy())
        pooled_records.append(pooled.n_pooled.float().mean().item())
    error, bar = np.stack(errors), np.stack(bars)
    size = np.linalg.norm(output, axis=1)
    bias = float(np.mean(ratios) - 1)
    return {
        "values": kind,
        "temperature": temperature,
        "inside_bar": round(float((error <= bar).mean()), 4),
        "bar_over_q95": round(float(np.median(bar) / np.quantile(error, 0.95)), 3),
        "mean_error": round(float((error / size).mean()), 5),
        "bias": round(bias, 5),
        "bias_over_stderr": round(bias / max(float(np.mean(deviations)), 1e-12), 3),
        "records_pooled": round(float(np.mean(pooled_records))),
    }


def compared(world: World, temperature: float, candidates: int = CANDIDATES) -> dict[str, Any]:
    """Return mean relative errors and milliseconds per query in batches of 64, with this many candidates each."""
    truth, _ = world.exact("keys", temperature)
    db, queries = world.dbs["keys"], torch.from_numpy(world.queries)
    answers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "truncated": lambda batch: db.attend(batch, temperature=temperature, k=candidates).output,
        "top-k + uniform": lambda batch: _uniform(db, world.keys, batch, temperature, candidates),
        "estimated": lambda batch: db.attend(batch, temperature=temperature, rtol=1e-9, max_draws=candidates).output,
        "exact": lambda batch: db.attend(batch, temperature=temperature).output,
    }
    size = np.linalg.norm(truth, axis=1)
    times: dict[str, list[float]] = {name: [] for name in answers}
    errors: dict[str, list[float]] = {name: [] for name in answers}
    for turn in range(6):
        low = turn * 64 % max(1, len(queries) - 63)  # another batch each time
        batch = slice(low, low + 64)
        for name, answer in answers.items():
            start = time.perf_counter()
            output = answer(queries[batch])
            times[name].append((time.perf_counter() - start) / len(output) * 1e3)
            off = np.linalg.norm(output.double().numpy() - truth[batch], axis=1)
            errors[name].append(float((off / size[batch]).mean()))
    ladder, count = _ladder(world.keys, queries[:64].numpy().astype(np.float32), temperature, candidates)
    ladder_error = float((np.linalg.norm(ladder - truth[:64], axis=1) / size[:64]).mean())
    rows: dict[str, dict[str, Any]] = {
        name: {
            "error": round(float(np.mean(errors[name])), 5),
            "ms_a_query": round(float(np.median(times[name][1:])), 3),
        }
        for name in answers
    }
    return {**rows, "ladder": {"error": round(ladder_error, 5), "candidates": count}}


def _uniform(
    db: softdb.SoftDB, keys: Array, queries: torch.Tensor, temperature: float, candidates: int
) -> torch.Tensor:
    """Estimate the output (q, d) from the nearest records for one half and uniform draws for the other half."""
    half = candidates // 2
    rows = db.search(queries, k=half).rows
    drawn = torch.from_numpy(np.random.default_rng(0).integers(0, len(keys), (len(queries), half)))
    candidate_keys = torch.from_numpy(keys)[torch.cat([rows, drawn], 1)]
    logits = (candidate_keys @ queries.unsqueeze(2)).squeeze(2) / temperature
    twice = (drawn.unsqueeze(2) == rows.unsqueeze(1)).any(2)
    logits[:, half:] += np.log((len(keys) - half) / half)
    logits[:, half:].masked_fill_(twice, -torch.inf)
    return (logits.softmax(1).unsqueeze(1) @ candidate_keys).squeeze(1)


def _ladder(keys: Array, queries: Array, temperature: float, candidates: int) -> tuple[Array, int]:
    """Return the output (q, d) of the rank ladder (Mussmann et al. 2026) and its mean number of candidates; not timed.

    Row i draws a level g with P(g ≥ l) = 2^-l. The k best rows of each level are candidates, each with weight 2^m for
    the first level m that has it. Searches are exact.
    """
    levels = np.random.default_rng(1).geometric(0.5, len(keys)) - 1
    k = max(2, round(candidates / (np.log2(len(keys) / candidates) / 2 + 2.5)))
    outputs, counts = [], []
    for query in queries:
        scores = keys @ query
        limits: list[float] = []  # the (k + 1)-th best score of each level
        while (level_scores := scores[levels >= len(limits)]).size > k:
            limits.append(float(np.partition(level_scores, -k - 1)[-k - 1]))
        first = len(limits) - np.searchsorted(np.array(limits[::-1]), scores)  # the first level whose limit is below
        chosen = levels >= first
        logits = scores[chosen] / temperature + first[chosen] * np.log(2)
        weights = np.exp(logits - logits.max())
        outputs.append(weights / weights.sum() @ keys[chosen])
        counts.append(int(chosen.sum()))
    return np.stack(outputs), round(float(np.mean(counts)))


def tolerance(world: World, temperature: float, rtol: float) -> dict[str, Any]:
    """Return the share of queries within the tolerance, and the time beside the exact pass and torch's attention."""
    output, _ = world.exact("keys", temperature)
    db, queries = world.dbs["keys"], torch.from_numpy(world.queries)
    pooled = db.attend(queries, temperature=temperature, rtol=rtol)
    error = np.linalg.norm(pooled.output.double().numpy() - output, axis=1)
    allowed = rtol * np.maximum(np.linalg.norm(output, axis=1), 0.1 * np.sqrt((world.keys**2).sum(1).mean()))
    keys = torch.from_numpy(world.keys)

    def attend(batch: torch.Tensor) -> torch.Tensor:
        return db.attend(batch, temperature=temperature, rtol=rtol).output

    def sdpa(batch: torch.Tensor) -> torch.Tensor:
        columns = batch[None, None], keys[None, None], keys[None, None]
        return torch.nn.functional.scaled_dot_product_attention(*columns, scale=1 / temperature)[0, 0]

    row: dict[str, Any] = {
        "rtol": rtol,
        "temperature": temperature,
        "within": round(float((error <= allowed).mean()), 4),
        "answered_exactly": round(float(pooled.exact.float().mean()), 4),
        "records_pooled": round(float(pooled.n_pooled.float().mean())),
    }

    def exact(batch: torch.Tensor) -> torch.Tensor:
        return db.attend(batch, temperature=temperature).output

    code_bytes = len(world.keys) * (world.keys.shape[1] / 8 + 2)
    for q in (1, 64, 256):
        estimated, scanned, peer = _timed(queries, q, attend, exact, sdpa)
        row[f"q={q}"] = {
            "softdb_ms": round(float(np.median(estimated)), 3),
            "exact_ms": round(float(np.median(scanned)), 3),
            "sdpa_ms": round(float(np.median(peer)), 3),
            "of_exact": round(float(np.median(estimated / scanned)), 3),
            "of_sdpa": round(float(np.median(estimated / peer)), 4),
            "codes_read_once_ms": round(code_bytes / _read_bandwidth() * 1e3, 3),  # a batch reads them once
        }
    return row


def _read_bandwidth() -> float:
    """Return the bytes per second that a sum over 256 MB reads."""
    numbers = torch.ones(1 << 26)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.numel() * 4 / min(seconds)


def _timed(queries: torch.Tensor, q: int, *answers: Callable[[torch.Tensor], torch.Tensor]) -> list[Array]:
    """Return the milliseconds of each answer in each turn; a turn has other queries, and the first two warm up.

    Before each measurement a pause lets the threads of the last answer sleep: OpenMP's spin for a while.
    """
    turns, times = 32 if q == 1 else 8, list[list[float]]()
    for turn in range(turns):
        low = turn * q % max(1, len(queries) - q)
        row = [0.0] * len(answers)
        for place in range(len(answers)):  # in another order each time: each answer leaves its own data in the cache
            number = (place + turn) % len(answers)
            time.sleep(0.02)
            start = time.perf_counter()
            answers[number](queries[low : low + q])
            row[number] = (time.perf_counter() - start) * 1e3
        times.append(row)
    return list(np.array(times[2:]).T)


def main() -> None:
    """Measure tolerance, comparison and quality, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="Draw error against time at temperature 0.05.")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        world = World(args.data, args.n, args.dim, args.queries, Path(folder))
        result: dict[str, Any] = {
            **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
            "data": {"name": args.data.split(":")[0], "n": len(world.keys), "dim": world.keys.shape[1]},
            "index_mib": round(world.report.bytes / MIB, 1),
        }
        temperatures = (0.02, 0.05, 0.2)
        result["tolerance"] = [tolerance(world, temperature, 0.05) for temperature in temperatures]
        print(*result["tolerance"], sep="\n", flush=True)
        result["compared"] = {str(t): compared(world, t) for t in temperatures}
        print(*result["compared"].items(), sep="\n", flush=True)
        if args.plot:
            result["curve"] = {str(c): compared(world, 0.05, c) for c in (50, 100, 200, 400, 800, 1600)}
            pictures.estimate(result, args.plot)
        result["quality"] = []
        for temperature in temperatures if args.draws else ():
            for kind in world.dbs:
                result["quality"].append(quality(world, kind, temperature, args.draws))
                print(result["quality"][-1], flush=True)
        for db in world.dbs.values():
            db.close()
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
