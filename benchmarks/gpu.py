"""softdb on a GPU: attention, nearest records, training steps and FAISS, in one run of less than ten minutes.

    python benchmarks/gpu.py --records 10000000 --out benchmarks/results/gpu.json
    python benchmarks/gpu.py --device cpu --records 20000 --rounds 2       # try the script without a GPU

A record has a key and a value of 128 float16 numbers each. The rates of reading and of matrix products are measured on
the same card in the same run; they are the floor. Every answer is compared with float64 before its time counts. Times
are medians of rounds that call the engines in turn, with other queries in each round. A peer that cannot run is
reported with the reason. When the time is over, the remaining parts are left out and reported as such.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import each_of, provenance, write_json
from gpu_world import Card, K, LeftOut, World, close, flex_of, gradient, loop, sdpa
from torch import Tensor

import softdb
from softdb import device as gpu
from softdb.check import Metric
from softdb.errors import DeviceFailed
from softdb.nn import Memory, retrieval_loss

GOALS = {  # largest ratio to the floor
    "forward": 1 / 0.7,
    "backward": 2.2,
    "top-10": 1.3,
    "FAISS": 1.05,
    "step": 2.0,
}
Row = dict[str, Any]


def row_of(part: str, name: str, seconds: float | str, floor: float | None = None, goal: str | None = None) -> Row:
    """Return a row of the table, from seconds or the reason of a failure; the floor is in seconds."""
    if isinstance(seconds, str):
        return {"part": part, "what": name, "failed": seconds}
    ratio = None if floor is None else seconds / floor
    limit = None if goal is None else GOALS[goal]
    return {
        "part": part,
        "what": name,
        "ms": round(seconds * 1e3, 4),
        "floor_ms": None if floor is None else round(floor * 1e3, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "goal": None if limit is None else round(limit, 3),
        "met": None if limit is None or ratio is None else ratio <= limit,
    }


# -- parts -------------------------------------------------------------------------------------------------------------


def attention(world: World, db: softdb.SoftDB, rate: float, q: int) -> Iterator[Row]:
    """Measure the exact soft query, its gradient, and the peers."""
    card, grad = world.card, world.queries(q)
    batches = [world.queries(q) for _ in range(card.rounds + 1)]  # one more for the round that warms up
    queries, floor = batches[0], 2 * world.n * 2 * world.dim / rate

    def kernel(queries: Tensor) -> Tensor:
        return gpu.pooled(queries, world.keys, world.values, metric=Metric.DOT)[0]

    def verb(queries: Tensor) -> Tensor:
        return db.attend(queries).output

    few, flex = queries[:4], flex_of(world)
    truth = world.truth(few)[0]
    for name, answer in (("kernel", kernel), ("attend", verb)):
        close(f"softdb's {name}, q = {q}", answer(few), truth, 1e-4)
        close(f"softdb's {name}, all {q}", answer(queries), loop(world, queries), 2e-2)
    if not torch.equal(kernel(queries), kernel(queries)):
        raise SystemExit("two runs of the kernel differ; expected the same output to the bit")
    leaves = [batch.clone().requires_grad_() for batch in batches]
    graphs = [(kernel(leaf), leaf) for leaf in leaves]
    peers: dict[str, Callable[[Tensor], Tensor]] = {
        "torch SDPA": partial(sdpa, world),
        "torch Flex": flex,
        "torch loop": partial(loop, world),
    }
    forward_of = {"softdb, kernel": kernel, "softdb, db.attend": verb, **peers}
    with torch.no_grad():
        seconds = card.in_turn({name: each_of(batches, answer) for name, answer in forward_of.items()})

    def backward(graph: tuple[Tensor, Tensor]) -> object:
        return torch.autograd.grad(*graph, grad, retain_graph=True)

    both = card.in_turn(
        {
            "softdb, backward alone": each_of(graphs, backward),
            **{
                f"{name}, both ways": each_of(batches, partial(gradient, answer, grad=grad))
                for name, answer in {"softdb": verb, **peers}.items()
            },
        }
    )
    part = f"attention, q = {q}"
    for name, spent in seconds.items():
        yield row_of(part, name, spent, floor, "forward" if name.startswith("softdb") else None)
    forward = seconds["softdb, kernel"]
    assert isinstance(forward, float)
    for name, spent in both.items():
        alone = name == "softdb, backward alone"
        yield row_of(part, name, spent, forward if alone else 3 * floor, "backward" if alone else None)


def nearest(world: World, db: softdb.SoftDB, rate: float, q: int) -> Iterator[Row]:
    """Measure the exact search for the ten nearest records."""
    batches = [world.queries(q) for _ in range(world.card.rounds + 1)]
    queries, floor, k = batches[0], 2 * world.n * world.dim / rate, min(K, world.n)

    def kernel(queries: Tensor) -> tuple[Tensor, Tensor]:
        return gpu.nearest(queries, world.keys, k, metric=Metric.DOT)

    def verb(queries: Tensor) -> Tensor:
        return db.search(queries, k).rows

    def torch_loop(queries: Tensor) -> Tensor:
        size, scores, places = 1 << 20, [], []
        for low in range(0, world.n, size):
            best = (queries.half() @ world.keys[low : low + size].T).topk(min(k, size, world.n - low))
            scores.append(best.values)
            places.append(best.indices + low)
        order = torch.cat(scores, 1).topk(k).indices
        return torch.cat(places, 1).gather(1, order)

    best, _ = world.truth(queries[:4])[1:]
    for name, rows in (("kernel", kernel(queries)[1][:4]), ("search", verb(queries)[:4].to(queries.device))):
        scores = (world.keys[rows].double() @ queries[:4].double().unsqueeze(2)).squeeze(2)
        if not bool((scores >= best - 1e-5).all()):
            raise SystemExit(f"softdb's {name} missed one of the {k} nearest; expected all of them")
    searches = {"softdb, kernel": kernel, "softdb, db.search": verb, "torch loop": torch_loop}
    seconds = world.card.in_turn({name: each_of(batches, search) for name, search in searches.items()})
    for name, spent in seconds.items():
        yield row_of(f"top-{k}, q = {q}", name, spent, floor, "top-10" if name.startswith("softdb") else None)


def index(world: World, db: softdb.SoftDB, q: int) -> Iterator[Row]:
    """Measure FAISS' search through softdb, and FAISS' call alone."""
    card, part = world.card, f"FAISS, q = {q}"
    if card.cuda:
        import faiss

        if not hasattr(faiss, "StandardGpuResources"):
            raise LeftOut("this FAISS is the CPU build")
    db.build_index("ivf", recall=0.9, k=K, device=str(card.device))
    batches, own_index = [world.queries(q) for _ in range(card.rounds + 1)], db.core.finder.index
    if own_index is None:
        raise LeftOut("no index was built: so few records are compared")
    fetched: int = max(64, own_index.fetch_k * K)
    any_index: Any = own_index

    def bare(queries: Any) -> Any:
        if card.cuda:
            return any_index.near(queries, fetched, own_index.effort)
        return any_index.find(queries, fetched, None)

    exact = gpu.nearest(batches[0], world.keys[: len(db)], K, metric=Metric.DOT)[1]
    rows = db.search(batches[0], K).rows.to(exact.device)
    share = float((rows[:, :, None] == exact[:, None, :]).any(2).double().mean())
    if share < 0.85:
        raise SystemExit(f"the index finds {share:.2f} of the {K} nearest; expected at least 0.85")
    seconds = card.in_turn(
        {
            "FAISS alone": each_of(batches if card.cuda else [batch.cpu().numpy() for batch in batches], bare),
            "softdb, db.search": each_of(batches, lambda queries: db.search(queries, K).rows),
        }
    )
    floor = seconds["FAISS alone"]
    yield row_of(part, "FAISS alone", floor)
    yield row_of(
        part, "softdb, db.search", seconds["softdb, db.search"], floor if isinstance(floor, float) else None, "FAISS"
    )


def steps(world: World, db: softdb.SoftDB, rates: dict[str, float], q: int) -> Iterator[Row]:
    """Measure training steps: of a projection by the retrieval loss over every record, and of nn.Memory."""
    card, n = world.card, len(db)
    project = torch.nn.Linear(world.dim, world.dim, bias=False).to(card.device)
    optimiser = torch.optim.Adam(project.parameters(), lr=1e-3)
    queries, right = world.queries(q), list(range(q))

    def step() -> None:
        optimiser.zero_grad()
        retrieval_loss(db, project(queries), right).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    loss = retrieval_loss(db, queries[:4], right[:4], reduction="none")
    scores = queries[:4].double() @ world.keys[:n].double().T
    expected = scores.logsumexp(1) - scores[:, :4].diagonal()
    close("the loss", loss[:, None], expected[:, None], 1e-4)
    products = 2 * q * n * world.dim * 3  # scores, scores again, and the gradient
    spent = card.in_turn({"softdb": step})["softdb"]
    part = f"step, q = {q}, n = {n}"
    half_floor, tf32_floor = (products / rates[f"{name} TFLOP/s"] / 1e12 for name in ("float16", "tf32"))
    yield row_of(part, "softdb, projection, floor in float16", spent, half_floor, "step")
    yield row_of(part, "softdb, projection, floor in tf32", spent, tf32_floor)
    memory = Memory(db, k=32).to(card.device)
    sparse = torch.optim.SparseAdam(list(memory.parameters()), lr=1e-3)

    def trained() -> None:
        sparse.zero_grad()
        memory(queries).output.square().sum().backward()  # type: ignore[no-untyped-call]
        sparse.step()  # type: ignore[no-untyped-call]

    floor = max(2 * q * n * world.dim / rates["float32 TFLOP/s"] / 1e12, 4 * n * world.dim / rates["read GB/s"] / 1e9)
    yield row_of(part, "softdb, memory (found in float32)", card.in_turn({"softdb": trained})["softdb"], floor)


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(card: Card, n: int, dim: int, result: dict[str, Any]) -> None:
    """Measure all parts while time is left, and add the rates and rows to the result."""
    rates = card.rates(min(1 << 32, 4 * n * dim))
    print({name: round(rate, 2) for name, rate in rates.items()}, flush=True)
    world, rows = World(card, n, dim), list[Row]()
    result |= {"rates": rates, "rows": rows}
    start = time.monotonic()
    db = world.database(n)
    rows.append({"part": "database", "what": f"{n} records inserted", "ms": round((time.monotonic() - start) * 1e3)})
    print(line(rows[0]), flush=True)
    read, few = rates["read GB/s"] * 1e9, min(n, 1_000_000)
    parts = [partial(attention, world, db, read, q) for q in ((1, 4, 16, 64) if card.cuda else (1, 8))]
    parts += [partial(nearest, world, db, read, q) for q in ((1, 64) if card.cuda else (8,))]
    small = world.database(few) if few < n else db
    parts += [partial(steps, world, small, rates, q) for q in ((1024, 4096) if card.cuda else (64,))]
    parts += [partial(index, world, small, q) for q in ((256, 4096) if card.cuda else (256,))]
    for part in parts:
        name = f"{getattr(part.func, '__name__', '')}, q = {part.args[-1]}"
        try:
            if card.seconds_left < 20:
                raise LeftOut("the time is over")
            for row in part():
                rows.append(row if card.cuda else row | {"met": None})  # the goals are for a GPU
                print(line(rows[-1]), flush=True)
        except (LeftOut, softdb.MissingDependency, DeviceFailed, torch.cuda.OutOfMemoryError) as error:
            rows.append({"part": name, "what": "-", "failed": str(error).splitlines()[0]})
            print(line(rows[-1]), flush=True)
        card.freed()


def line(row: Row) -> str:
    """Format a row as text."""
    if "failed" in row:
        return f"{row['part']:24} {row['what']:40} left out: {row['failed']}"
    met = {True: "met", False: "NOT MET", None: ""}[row.get("met")]
    floor, ratio, goal = (row.get(name) for name in ("floor_ms", "ratio", "goal"))
    numbers = f"{row['ms']:>12} {floor if floor is not None else '':>12} {ratio if ratio is not None else '':>9}"
    return f"{row['part']:24} {row['what']:40} {numbers} {goal if goal is not None else '':>7} {met}"


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=540, help="time after which parts are left out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu --records 20000 tries the path without one")
    card = Card(device, args.rounds, args.seconds)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if card.cuda else "CPU; these are not times of a GPU",
        "kernels": gpu.usable(device) or "Triton",
        **provenance(["softdb", "torch", "triton", "faiss-gpu", "numpy"]),
    }
    print(f"{'part':24} {'what':40} {'ms':>12} {'floor ms':>12} {'ratio':>9} {'goal':>7}")
    try:
        measure(card, args.records, args.dim, result)
    finally:  # keep the rows measured before a failure
        if args.out:
            write_json(args.out, result)
    return result


if __name__ == "__main__":
    main()
