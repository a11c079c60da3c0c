"""What a GPU does for softdb, checked and then timed, in one run of less than ten minutes.

    python benchmarks/gpu.py --records 10000000 --out benchmarks/results/gpu.json
    python benchmarks/gpu.py --device cpu --records 20000 --rounds 2       # the same path without a GPU, to try it

Records are 128 + 128 halves. Rates that nothing can beat (reading, products of matrices) are measured on the same card
in the same run; every answer is compared with float64 before its time counts; peers that cannot run are told with the
reason. Times are medians of rounds, which go over the engines in turn. Each part is left out, and told so, once the
time is over.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import provenance, write_json
from gpu_world import Call, Card, K, LeftOut, World, close, flex_of, gradient, loop, sdpa
from torch import Tensor

import softdb
from softdb import device as gpu
from softdb.check import Metric
from softdb.errors import DeviceFailed
from softdb.nn import Memory, retrieval_loss

GOALS = {  # the most that the ratio to the floor shall be
    "forward": 1 / 0.7,
    "backward": 2.2,
    "top-10": 1.3,
    "FAISS": 1.05,
    "step": 2.0,
}
Row = dict[str, Any]


def told(part: str, what: str, seconds: float | str, floor: float | None = None, goal: str | None = None) -> Row:
    """A line of the table; floor in seconds."""
    if isinstance(seconds, str):
        return {"part": part, "what": what, "failed": seconds}
    ratio = None if floor is None else seconds / floor
    most = None if goal is None else GOALS[goal]
    return {
        "part": part,
        "what": what,
        "ms": round(seconds * 1e3, 4),
        "floor_ms": None if floor is None else round(floor * 1e3, 4),
        "ratio": None if ratio is None else round(ratio, 3),
        "goal": None if most is None else round(most, 3),
        "met": None if most is None or ratio is None else ratio <= most,
    }


# -- parts -------------------------------------------------------------------------------------------------------------


def attention(world: World, db: softdb.SoftDB, rate: float, q: int) -> Iterator[Row]:
    """The exact soft query, its gradient, and the peers."""
    card, queries, grad = world.card, world.queries(q), world.queries(q)
    floor = 2 * world.n * 2 * world.dim / rate

    def kernel(asked: Tensor) -> Tensor:
        return gpu.pooled(asked, world.keys, world.values, metric=Metric.DOT)[0]

    def verb(asked: Tensor) -> Tensor:
        return db.attend(asked).output

    few, flex = queries[:4], flex_of(world)
    truth = world.truth(few)[0]
    for name, answer in (("kernel", kernel), ("attend", verb)):
        close(f"softdb's {name}, q = {q}", answer(few), truth, 1e-4)
        close(f"softdb's {name}, all {q}", answer(queries), loop(world, queries), 2e-2)
    if not torch.equal(kernel(queries), kernel(queries)):
        raise SystemExit("two runs of the kernel differ; no time counts")
    leaf = queries.clone().requires_grad_()
    output = kernel(leaf)
    with torch.no_grad():
        seconds = card.in_turn(
            {
                "softdb, kernel": partial(kernel, queries),
                "softdb, db.attend": partial(verb, queries),
                "torch SDPA": partial(sdpa, world, queries),
                "torch Flex": partial(flex, queries),
                "torch loop": partial(loop, world, queries),
            }
        )
    both = card.in_turn(
        {
            "softdb, backward alone": lambda: torch.autograd.grad(output, leaf, grad, retain_graph=True),
            "softdb, both ways": partial(gradient, verb, queries, grad),
            "torch SDPA, both ways": partial(gradient, partial(sdpa, world), queries, grad),
            "torch Flex, both ways": partial(gradient, flex, queries, grad),
            "torch loop, both ways": partial(gradient, partial(loop, world), queries, grad),
        }
    )
    part = f"attention, q = {q}"
    for name, one in seconds.items():
        yield told(part, name, one, floor, "forward" if name.startswith("softdb") else None)
    forward = seconds["softdb, kernel"]
    assert isinstance(forward, float)
    for name, one in both.items():
        alone = name == "softdb, backward alone"
        yield told(part, name, one, forward if alone else 3 * floor, "backward" if alone else None)


def nearest(world: World, db: softdb.SoftDB, rate: float, q: int) -> Iterator[Row]:
    """The ten nearest of all, exactly."""
    queries, floor = world.queries(q), 2 * world.n * world.dim / rate
    k = min(K, world.n)

    def kernel() -> tuple[Tensor, Tensor]:
        return gpu.nearest(queries, world.keys, k, metric=Metric.DOT)

    def verb() -> Tensor:
        return db.search(queries, k).rows

    def torch_loop() -> Tensor:
        size, scores, places = 1 << 20, [], []
        for low in range(0, world.n, size):
            best = (queries.half() @ world.keys[low : low + size].T).topk(min(k, size, world.n - low))
            scores.append(best.values)
            places.append(best.indices + low)
        order = torch.cat(scores, 1).topk(k).indices
        return torch.cat(places, 1).gather(1, order)

    best, _ = world.truth(queries[:4])[1:]
    for name, found in (("kernel", kernel()[1][:4]), ("search", verb()[:4].to(queries.device))):
        mine = (world.keys[found].double() @ queries[:4].double().unsqueeze(2)).squeeze(2)
        if not bool((mine >= best - 1e-5).all()):
            raise SystemExit(f"softdb's {name} missed one of the {k} nearest; no time counts")
    seconds = world.card.in_turn({"softdb, kernel": kernel, "softdb, db.search": verb, "torch loop": torch_loop})
    for name, one in seconds.items():
        yield told(f"top-{k}, q = {q}", name, one, floor, "top-10" if name.startswith("softdb") else None)


def index(world: World, db: softdb.SoftDB, q: int) -> Iterator[Row]:
    """FAISS' search through softdb, and its call alone."""
    card, part = world.card, f"FAISS, q = {q}"
    if card.cuda:
        import faiss

        if not hasattr(faiss, "StandardGpuResources"):
            raise LeftOut("this FAISS is the CPU build")
    db.build_index("ivf", recall=0.9, k=K, device=str(card.device))
    queries, found = world.queries(q), db.core.finder.index
    if found is None:
        raise LeftOut("no index was built: so few records are compared")
    most: int = max(64, found.fetch_k * K)
    any_index: Any = found
    asked = queries if card.cuda else queries.cpu().numpy()
    bare: Call = (
        partial(any_index.near, asked, most, found.effort) if card.cuda else partial(any_index.find, asked, most, None)
    )
    exact, mine = gpu.nearest(queries, world.keys[: len(db)], K, metric=Metric.DOT)[1], db.search(queries, K).rows
    share = float((mine.to(exact.device)[:, :, None] == exact[:, None, :]).any(2).double().mean())
    if share < 0.85:
        raise SystemExit(f"the index finds {share:.2f} of the {K} nearest; no time counts")
    seconds = card.in_turn({"FAISS alone": bare, "softdb, db.search": lambda: db.search(queries, K).rows})
    floor = seconds["FAISS alone"]
    yield told(part, "FAISS alone", floor)
    yield told(
        part, "softdb, db.search", seconds["softdb, db.search"], floor if isinstance(floor, float) else None, "FAISS"
    )


def steps(world: World, db: softdb.SoftDB, rates: dict[str, float], q: int) -> Iterator[Row]:
    """Training steps: of a projection by the retrieval loss over every record, and of the records themselves."""
    card, n = world.card, len(db)
    project = torch.nn.Linear(world.dim, world.dim, bias=False).to(card.device)
    optimiser = torch.optim.Adam(project.parameters(), lr=1e-3)
    asked, right = world.queries(q), list(range(q))

    def step() -> None:
        optimiser.zero_grad()
        retrieval_loss(db, project(asked), right).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    loss = retrieval_loss(db, asked[:4], right[:4], reduction="none")
    scores = asked[:4].double() @ world.keys[:n].double().T
    expected = scores.logsumexp(1) - scores[:, :4].diagonal()
    close("the loss", loss[:, None], expected[:, None], 1e-4)
    products = 2 * q * n * world.dim * 3  # scores, scores again, and the gradient
    took = card.in_turn({"softdb": step})["softdb"]
    part = f"step, q = {q}, n = {n}"
    yield told(part, "softdb, projection, floor in float16", took, products / rates["float16 TFLOP/s"] / 1e12, "step")
    yield told(part, "softdb, projection, floor in tf32", took, products / rates["tf32 TFLOP/s"] / 1e12)
    memory = Memory(db, k=32).to(card.device)
    sparse = torch.optim.SparseAdam(list(memory.parameters()), lr=1e-3)

    def trained() -> None:
        sparse.zero_grad()
        memory(asked).output.square().sum().backward()  # type: ignore[no-untyped-call]
        sparse.step()  # type: ignore[no-untyped-call]

    floor = max(2 * q * n * world.dim / rates["float32 TFLOP/s"] / 1e12, 4 * n * world.dim / rates["read GB/s"] / 1e9)
    yield told(part, "softdb, memory (found in float32)", card.in_turn({"softdb": trained})["softdb"], floor)


# -- the run -----------------------------------------------------------------------------------------------------------


def measure(card: Card, n: int, dim: int, found: dict[str, Any]) -> None:
    """All parts, as far as the time goes; into what was found."""
    rates = card.rates(min(1 << 32, 4 * n * dim))
    print({name: round(rate, 2) for name, rate in rates.items()}, flush=True)
    world, rows = World(card, n, dim), list[Row]()
    found |= {"rates": rates, "rows": rows}
    start = time.monotonic()
    db = world.database(n)
    rows.append({"part": "database", "what": f"{n} records inserted", "ms": round((time.monotonic() - start) * 1e3)})
    print(line(rows[0]), flush=True)
    read, some = rates["read GB/s"] * 1e9, min(n, 1_000_000)
    parts = [partial(attention, world, db, read, q) for q in ((1, 4, 16, 64) if card.cuda else (1, 8))]
    parts += [partial(nearest, world, db, read, q) for q in ((1, 64) if card.cuda else (8,))]
    small = world.database(some) if some < n else db
    parts += [partial(steps, world, small, rates, q) for q in ((1024, 4096) if card.cuda else (64,))]
    parts += [partial(index, world, small, q) for q in ((256, 4096) if card.cuda else (256,))]
    for part in parts:
        name = f"{getattr(part.func, '__name__', '')}, q = {part.args[-1]}"
        try:
            if card.left < 20:
                raise LeftOut("the time is over")
            for row in part():
                rows.append(row if card.cuda else row | {"met": None})  # goals are a GPU's
                print(line(rows[-1]), flush=True)
        except (LeftOut, softdb.MissingDependency, DeviceFailed, torch.cuda.OutOfMemoryError) as error:
            rows.append({"part": name, "what": "-", "failed": str(error).splitlines()[0]})
            print(line(rows[-1]), flush=True)
        card.freed()


def line(row: Row) -> str:
    """A row as text."""
    if "failed" in row:
        return f"{row['part']:24} {row['what']:40} left out: {row['failed']}"
    met = {True: "met", False: "NOT MET", None: ""}[row.get("met")]
    floor, ratio, goal = (row.get(name) for name in ("floor_ms", "ratio", "goal"))
    numbers = f"{row['ms']:>12} {floor if floor is not None else '':>12} {ratio if ratio is not None else '':>9}"
    return f"{row['part']:24} {row['what']:40} {numbers} {goal if goal is not None else '':>7} {met}"


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Check, time, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=540, help="after which parts are left out")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu --records 20000 tries the path without one")
    card = Card(device, given.rounds, given.seconds)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if card.cuda else "the CPU: these are no times of a GPU",
        "kernels": gpu.usable(device) or "Triton",
        **provenance(["softdb", "torch", "triton", "faiss-gpu", "numpy"]),
    }
    print(f"{'part':24} {'what':40} {'ms':>12} {'floor ms':>12} {'ratio':>9} {'goal':>7}")
    try:
        measure(card, given.records, given.dim, result)
    finally:  # what was found before something failed is worth keeping
        if given.out:
            write_json(given.out, result)
    return result


if __name__ == "__main__":
    main()
