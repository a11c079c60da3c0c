"""Parts of gpu.py: the card and its rates, the records, and the peers written in torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import softdb

K, INSERTED = 10, 1 << 17  # hits of a search; records in an insert
Call = Callable[[], Any]


class LeftOut(Exception):
    """Raised with the reason why a part or a peer does not run on this machine."""


class Card:
    """The device, its clock and its rates."""

    def __init__(self, device: torch.device, rounds: int, seconds: float) -> None:
        self.device, self.rounds, self.ends = device, rounds, time.monotonic() + seconds
        self.cuda = device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        return self.ends - time.monotonic()

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Call) -> float:
        """Return the seconds of one call, with the work that it gave to the device."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def in_turn(self, calls: dict[str, Call]) -> dict[str, float | str]:
        """Return the median seconds of each call, or why it failed. The first round warms up; Triton compiles then."""
        times: dict[str, list[float]] = {}
        failed: dict[str, float | str] = {}
        for _ in range(self.rounds + 1):
            for name, call in calls.items():
                if name in failed:
                    continue
                try:
                    times.setdefault(name, []).append(self.seconds(call))
                except Exception as error:  # a peer that fails is a result
                    if name.startswith("softdb"):
                        raise
                    failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
                    self.freed()
        return {name: failed.get(name, statistics.median(times.get(name, [0])[1:] or [0])) for name in calls}

    def freed(self) -> None:
        """Release the memory that torch caches."""
        if self.cuda:
            torch.cuda.empty_cache()

    def rates(self, bytes_read: int) -> dict[str, float]:
        """Return GB/s of reading, and TFLOP/s of a matrix product in each precision."""
        numbers = torch.ones(bytes_read // 4, device=self.device)
        sides = 8192 if self.cuda else 256
        calls: dict[str, Call] = {"sum": numbers.sum, "max": numbers.amax, "dot": lambda: torch.dot(numbers, numbers)}
        seconds = self.in_turn(calls)
        rates = {"read GB/s": max(4 * len(numbers) / s / 1e9 for s in seconds.values() if isinstance(s, float))}
        for name, dtype, precision in (
            ("float16", torch.float16, "highest"),
            ("tf32", torch.float32, "high"),
            ("float32", torch.float32, "highest"),
        ):
            matrix = torch.randn(sides, sides, device=self.device).to(dtype)
            torch.set_float32_matmul_precision(precision)
            product_seconds = self.in_turn({"mm": partial(torch.mm, matrix, matrix)})["mm"]
            torch.set_float32_matmul_precision("highest")
            assert isinstance(product_seconds, float)
            rates[f"{name} TFLOP/s"] = 2 * sides**3 / product_seconds / 1e12
        return rates


class World:
    """Records from a normal distribution on the device, and databases of them that answer there."""

    def __init__(self, card: Card, n: int, dim: int) -> None:
        self.card, self.n, self.dim = card, n, dim
        self.generator = torch.Generator(card.device).manual_seed(0)
        self.keys, self.values = (
            torch.randn(n, dim, generator=self.generator, device=card.device, dtype=torch.float32).half()
            for _ in range(2)
        )

    def queries(self, q: int) -> Tensor:
        """Draw new queries (q, d) in float32, whose scores have standard deviation 1."""
        queries: Tensor = torch.randn(q, self.dim, generator=self.generator, device=self.card.device)
        return queries.div_(self.dim**0.5)

    def database(self, n: int) -> softdb.SoftDB:
        """Return a database of the first n records, in memory and resident on the device."""
        db = softdb.open(None, dim=self.dim, value_dim=self.dim, dtype="float16")
        for low in range(0, n, INSERTED):
            block = slice(low, min(n, low + INSERTED))
            db.insert(range(block.start, block.stop), self.keys[block].cpu(), self.values[block].cpu())
        return db.to(str(self.card.device))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values in blocks, in float64."""
        for low in range(0, self.n, 1 << 18):
            block = slice(low, low + (1 << 18))
            yield self.keys[block].double(), self.values[block].double()

    def truth(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (q, v), and the K largest scores (q, K) with their rows, in float64."""
        wide = queries.double()
        scores = torch.cat([wide @ keys.T for keys, _ in self.blocks()], 1)
        weights, low = scores.softmax(1), 0
        output = torch.zeros_like(wide)
        for _, values in self.blocks():
            output += weights[:, low : low + len(values)] @ values
            low += len(values)
        return output, *scores.topk(min(K, self.n))


def close(name: str, output: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest error of a row over the norm of the longest row; raise SystemExit above the limit."""
    error = float((output.double() - expected.double()).norm(dim=1).max() / expected.double().norm(dim=1).max())
    if not error <= limit:
        raise SystemExit(f"{name} is wrong by {error:.1e}; expected at most {limit:.0e}")
    return error


# -- peers -------------------------------------------------------------------------------------------------------------


def sdpa(world: World, queries: Tensor) -> Tensor:
    """Return the output of torch's attention in float16."""
    half, keys, values = (tensor[None, None] for tensor in (queries.half(), world.keys, world.values))
    return F.scaled_dot_product_attention(half, keys, values, scale=1.0)[0, 0]


def flex_of(world: World) -> Callable[[Tensor], Tensor]:
    """Return torch's flex attention over the records, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention)

    def flex(queries: Tensor) -> Tensor:
        if not world.card.cuda:
            raise LeftOut("is compiled for a GPU alone here")
        tensors = queries.half(), world.keys, world.values
        output: Tensor = compiled(*(tensor[None, None] for tensor in tensors), scale=1.0)[0, 0]
        return output

    return flex


def loop(world: World, queries: Tensor) -> Tensor:
    """Return the output of an online softmax over blocks, written in plain torch."""
    half, size = queries.half(), 1 << 20
    top = queries.new_full((len(queries), 1), -torch.inf)
    total, output = torch.zeros_like(top), torch.zeros_like(queries)
    for low in range(0, world.n, size):
        scores = (half @ world.keys[low : low + size].T).float()
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        weights, decay = (scores - new).exp(), (top - new).exp()
        total = total * decay + weights.sum(1, keepdim=True)
        output = output * decay + (weights.half() @ world.values[low : low + size]).float()
        top = new
    return output / total


def gradient(answer: Callable[[Tensor], Tensor], queries: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the queries (q, d), by a forward and a backward pass."""
    leaf = queries.clone().requires_grad_()
    (grad_queries,) = torch.autograd.grad(answer(leaf), leaf, grad.to(queries.dtype))
    return grad_queries
