"""Soft queries to a tolerance: error, bias, error bars and time, against truncation, a uniform tail, and torch.

    python benchmarks/estimate.py --data wordnet:DIR --out benchmarks/results/estimate-wordnet.json
    python benchmarks/estimate.py --data clustered --n 1000000 --draws 0 --out benchmarks/results/estimate-1m.json

The truth is the exact answer in float64. Coverage: the share of true errors within the 95 % bar, over draws of a
generator and queries that were not answered exactly. "top-k + uniform": half of the candidates are the nearest, half
are drawn from the rest, all alike. Times are medians of rounds that go over the answers in turn.
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
import torch
from common import MIB, provenance, write_json
from numpy.typing import NDArray

import softdb
from softdb.tools.bench.datasets import load

Array = NDArray[Any]
CANDIDATES = 400


class World:
    """Keys in a database with an index, queries, and the exact answers."""

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
            part = slice(low, low + 100_000)
            mine = None if values is None else values[part]
            db.insert(range(low, low + len(self.keys[part])), self.keys[part], mine)
        return db

    def exact(self, kind: str, temperature: float) -> tuple[Array, Array]:
        """Output (q, v) and lse (q,) in float64."""
        values: Any = self.keys if self.values[kind] is None else self.values[kind]
        outputs, lses = [], []
        for low in range(0, len(self.queries), 64):
            scores = self.queries[low : low + 64].astype(np.float64) @ self.keys.T.astype(np.float64) / temperature
            top = scores.max(1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True)
            weights /= total
            if kind == "labels 45":
                outputs.append(np.stack([np.bincount(values, one, 45) for one in weights]))
            else:
                outputs.append(weights @ values)
            lses.append(top[:, 0] + np.log(total[:, 0]))
        return np.concatenate(outputs), np.concatenate(lses)


def _random(n: int) -> Array:
    return np.random.default_rng(7).standard_normal((n, 64)).astype(np.float32)


def _labels(name: str, n: int) -> Array:
    """WordNet's 45 topics, or labels that go with the order of the records."""
    if not name.startswith("wordnet:"):
        return np.arange(n) * 45 // n
    import gzip

    with gzip.open(Path(name.removeprefix("wordnet:")) / "records.jsonl.gz", "rt") as file:
        topics = [json.loads(line)["topic"] for line in file]
    return np.unique(topics, return_inverse=True)[1]


def quality(world: World, kind: str, temperature: float, draws: int) -> dict[str, Any]:
    """What many draws of CANDIDATES say of one exact answer."""
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
    """Mean relative error and milliseconds a query of 64, at so many candidates each."""
    output, _ = world.exact("keys", temperature)
    db, queries = world.dbs["keys"], torch.from_numpy(world.queries[:64])
    output = output[:64]
    answers: dict[str, Callable[[], torch.Tensor]] = {
        "truncated": lambda: db.attend(queries, temperature=temperature, k=candidates).output,
        "top-k + uniform": lambda: _uniform(db, world.keys, queries, temperature, candidates),
        "estimated": lambda: db.attend(queries, temperature=temperature, rtol=1e-9, max_draws=candidates).output,
        "exact": lambda: db.attend(queries, temperature=temperature).output,
    }
    size, result = np.linalg.norm(output, axis=1), {}
    ladder, count = _ladder(world.keys, queries.numpy().astype(np.float32), temperature, candidates)
    times: dict[str, list[float]] = {name: [] for name in answers}
    for _ in range(6):
        for name, answer in answers.items():
            start = time.perf_counter()
            found = answer()
            times[name].append((time.perf_counter() - start) / len(queries) * 1e3)
            result[name] = round(float((np.linalg.norm(found.double().numpy() - output, axis=1) / size).mean()), 5)
    timed: dict[str, dict[str, Any]] = {
        name: {"error": result[name], "ms_a_query": round(float(np.median(times[name][1:])), 3)} for name in answers
    }
    error = round(float((np.linalg.norm(ladder - output, axis=1) / size).mean()), 5)
    return {**timed, "ladder": {"error": error, "candidates": count}}


def draw(curve: dict[int, dict[str, Any]], path: Path) -> None:
    """Error against time, one line an answer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("truncated", "top-k + uniform", "estimated"):
        points = [curve[candidates][name] for candidates in curve]
        axes.plot([p["ms_a_query"] for p in points], [p["error"] for p in points], marker="o", label=name)
        for candidates, point in zip(curve, points, strict=True):
            axes.annotate(str(candidates), (point["ms_a_query"], point["error"]), fontsize=7)
    exact = float(np.median([one["exact"]["ms_a_query"] for one in curve.values()]))
    axes.axvline(exact, color="grey", linestyle="--", label="exact")
    axes.set(xscale="log", yscale="log", xlabel="milliseconds a query, in batches of 64", ylabel="mean relative error")
    axes.legend()
    figure.savefig(path, dpi=150)


def _uniform(
    db: softdb.SoftDB, keys: Array, queries: torch.Tensor, temperature: float, candidates: int
) -> torch.Tensor:
    """The nearest half surely, the other half from the rest, all alike."""
    half = candidates // 2
    rows = db.search(queries, k=half).rows
    drawn = torch.from_numpy(np.random.default_rng(0).integers(0, len(keys), (len(queries), half)))
    mine = torch.from_numpy(keys)[torch.cat([rows, drawn], 1)]
    logits = (mine @ queries.unsqueeze(2)).squeeze(2) / temperature
    twice = (drawn.unsqueeze(2) == rows.unsqueeze(1)).any(2)
    logits[:, half:] += np.log((len(keys) - half) / half)
    logits[:, half:].masked_fill_(twice, -torch.inf)
    return (logits.softmax(1).unsqueeze(1) @ mine).squeeze(1)


def _ladder(keys: Array, queries: Array, temperature: float, candidates: int) -> tuple[Array, int]:
    """The rank ladder (Mussmann et al. 2026), of exact searches, and how many candidates a query has; not timed.

    Row i draws a level g, P(g ≥ l) = 2^-l; the k best of each level count, as 2^m for the first level m that has them.
    """
    levels = np.random.default_rng(1).geometric(0.5, len(keys)) - 1
    k = max(2, round(candidates / (np.log2(len(keys) / candidates) / 2 + 2.5)))
    outputs, counts = [], []
    for query in queries:
        scores = keys @ query
        limits: list[float] = []  # the (k + 1)-th best score of each level
        while (held := scores[levels >= len(limits)]).size > k:
            limits.append(float(np.partition(held, -k - 1)[-k - 1]))
        first = len(limits) - np.searchsorted(np.array(limits[::-1]), scores)  # the first level whose limit is below
        mine = levels >= first
        logits = scores[mine] / temperature + first[mine] * np.log(2)
        weights = np.exp(logits - logits.max())
        outputs.append(weights / weights.sum() @ keys[mine])
        counts.append(int(mine.sum()))
    return np.stack(outputs), round(float(np.mean(counts)))


def tolerance(world: World, temperature: float, rtol: float) -> dict[str, Any]:
    """How many queries end within the tolerance, and what that costs against torch over all."""
    output, _ = world.exact("keys", temperature)
    db, queries = world.dbs["keys"], torch.from_numpy(world.queries)
    pooled = db.attend(queries, temperature=temperature, rtol=rtol)
    error = np.linalg.norm(pooled.output.double().numpy() - output, axis=1)
    allowed = rtol * np.maximum(np.linalg.norm(output, axis=1), 0.1 * np.sqrt((world.keys**2).sum(1).mean()))
    keys = torch.from_numpy(world.keys)

    def attend(asked: torch.Tensor) -> torch.Tensor:
        return db.attend(asked, temperature=temperature, rtol=rtol).output

    def sdpa(asked: torch.Tensor) -> torch.Tensor:
        columns = asked[None, None], keys[None, None], keys[None, None]
        return torch.nn.functional.scaled_dot_product_attention(*columns, scale=1 / temperature)[0, 0]

    found: dict[str, Any] = {
        "rtol": rtol,
        "temperature": temperature,
        "within": round(float((error <= allowed).mean()), 4),
        "answered_exactly": round(float(pooled.exact.float().mean()), 4),
        "records_pooled": round(float(pooled.n_pooled.float().mean())),
    }

    def exact(asked: torch.Tensor) -> torch.Tensor:
        return db.attend(asked, temperature=temperature).output

    code_bytes = len(world.keys) * (world.keys.shape[1] / 8 + 2)
    for q in (1, 64, 256):
        estimated, whole, peer = _timed(queries, q, attend, exact, sdpa)
        found[f"q={q}"] = {
            "softdb_ms": round(float(np.median(estimated)), 3),
            "exact_ms": round(float(np.median(whole)), 3),
            "sdpa_ms": round(float(np.median(peer)), 3),
            "of_exact": round(float(np.median(estimated / whole)), 3),
            "of_sdpa": round(float(np.median(estimated / peer)), 4),
            "codes_read_once_ms": round(code_bytes / _read_bandwidth() * 1e3, 3),  # a batch reads them once
        }
    return found


def _read_bandwidth() -> float:
    """Bytes a second that a sum over 256 MB reads."""
    numbers = torch.ones(1 << 26)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.numel() * 4 / min(seconds)


def _timed(queries: torch.Tensor, q: int, *answers: Callable[[torch.Tensor], torch.Tensor]) -> list[Array]:
    """Milliseconds of each answer, taken in turns, to other queries each time; the first turns warm up."""
    turns, times = 32 if q == 1 else 8, list[list[float]]()
    for turn in range(turns):
        low = turn * q % max(1, len(queries) - q)
        row = [0.0] * len(answers)
        for place in range(len(answers)):  # each after each other one: they leave the caches as they do
            which = (place + turn) % len(answers)
            start = time.perf_counter()
            answers[which](queries[low : low + q])
            row[which] = (time.perf_counter() - start) * 1e3
        times.append(row)
    return list(np.array(times[2:]).T)


def main() -> None:
    """Quality, comparison and tolerance, written as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="clustered", help="wordnet:DIR, clustered or uniform")
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="Draw error against time at temperature 0.05.")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        world = World(given.data, given.n, given.dim, given.queries, Path(folder))
        result: dict[str, Any] = {
            **provenance(["softdb", "torch", "numpy", "faiss-cpu"]),
            "data": {"name": given.data.split(":")[0], "n": len(world.keys), "dim": world.keys.shape[1]},
            "index_mib": round(world.report.bytes / MIB, 1),
        }
        temperatures = (0.02, 0.05, 0.2)
        result["tolerance"] = [tolerance(world, temperature, 0.05) for temperature in temperatures]
        print(*result["tolerance"], sep="\n", flush=True)
        result["compared"] = {str(t): compared(world, t) for t in temperatures}
        print(*result["compared"].items(), sep="\n", flush=True)
        if given.plot:
            result["curve"] = {c: compared(world, 0.05, c) for c in (50, 100, 200, 400, 800, 1600)}
            draw(result["curve"], given.plot)
        result["quality"] = []
        for temperature in temperatures if given.draws else ():
            for kind in world.dbs:
                result["quality"].append(quality(world, kind, temperature, given.draws))
                print(result["quality"][-1], flush=True)
        for db in world.dbs.values():
            db.close()
    if given.out:
        write_json(given.out, result)


if __name__ == "__main__":
    main()
