"""What gpu.py measures with: the card and its rates, the records, and how torch alone answers."""

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

K, INSERTED = 10, 1 << 17
Call = Callable[[], Any]


class LeftOut(Exception):
    """A part or a peer that does not run here, and why."""


class Card:
    """The device, its clock and its rates."""

    def __init__(self, device: torch.device, rounds: int, seconds: float) -> None:
        self.device, self.rounds, self.ends = device, rounds, time.monotonic() + seconds
        self.cuda = device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def wait(self) -> None:
        """Until all that was asked is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Call) -> float:
        """One call, with the work that it left to the device."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def in_turn(self, calls: dict[str, Call]) -> dict[str, float | str]:
        """Median seconds of each call, or why it failed; the first round warms up, in which Triton compiles."""
        times: dict[str, list[float]] = {}
        failed: dict[str, float | str] = {}
        for _ in range(self.rounds + 1):
            for name, call in calls.items():
                if name in failed:
                    continue
                try:
                    times.setdefault(name, []).append(self.seconds(call))
                except Exception as error:  # a peer that cannot is a result
                    if name.startswith("softdb"):
                        raise
                    failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
                    self.freed()
        return {name: failed.get(name, statistics.median(times.get(name, [0])[1:] or [0])) for name in calls}

    def freed(self) -> None:
        """Give back what torch holds in reserve."""
        if self.cuda:
            torch.cuda.empty_cache()

    def rates(self, bytes_read: int) -> dict[str, float]:
        """GB/s of reading, and TFLOP/s of a product of matrices in each precision."""
        numbers = torch.ones(bytes_read // 4, device=self.device)
        sides = 8192 if self.cuda else 256
        calls: dict[str, Call] = {"sum": numbers.sum, "max": numbers.amax, "dot": lambda: torch.dot(numbers, numbers)}
        seconds = self.in_turn(calls)
        found = {"read GB/s": max(4 * len(numbers) / s / 1e9 for s in seconds.values() if isinstance(s, float))}
        for name, dtype, precision in (
            ("float16", torch.float16, "highest"),
            ("tf32", torch.float32, "high"),
            ("float32", torch.float32, "highest"),
        ):
            one = torch.randn(sides, sides, device=self.device).to(dtype)
            torch.set_float32_matmul_precision(precision)
            took = self.in_turn({"mm": partial(torch.mm, one, one)})["mm"]
            torch.set_float32_matmul_precision("highest")
            assert isinstance(took, float)
            found[f"{name} TFLOP/s"] = 2 * sides**3 / took / 1e12
        return found


class World:
    """Records of unit spread on the device, and a database of them that is asked there."""

    def __init__(self, card: Card, n: int, dim: int) -> None:
        self.card, self.n, self.dim = card, n, dim
        self.generator = torch.Generator(card.device).manual_seed(0)
        self.keys, self.values = (
            torch.randn(n, dim, generator=self.generator, device=card.device, dtype=torch.float32).half()
            for _ in range(2)
        )

    def queries(self, q: int) -> Tensor:
        """(q, d) float32, each with scores of standard deviation 1."""
        found: Tensor = torch.randn(q, self.dim, generator=self.generator, device=self.card.device)
        return found.div_(self.dim**0.5)

    def database(self, n: int) -> softdb.SoftDB:
        """The first n records, in memory, and resident."""
        db = softdb.open(None, dim=self.dim, value_dim=self.dim, dtype="float16")
        for low in range(0, n, INSERTED):
            part = slice(low, min(n, low + INSERTED))
            db.insert(range(part.start, part.stop), self.keys[part].cpu(), self.values[part].cpu())
        return db.to(str(self.card.device))

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values in blocks, float64."""
        for low in range(0, self.n, 1 << 18):
            part = slice(low, low + (1 << 18))
            yield self.keys[part].double(), self.values[part].double()

    def truth(self, queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, and the K largest scores with their places, in float64."""
        wide = queries.double()
        scores = torch.cat([wide @ keys.T for keys, _ in self.parts()], 1)
        weights, low = scores.softmax(1), 0
        output = torch.zeros_like(wide)
        for _, values in self.parts():
            output += weights[:, low : low + len(values)] @ values
            low += len(values)
        return output, *scores.topk(min(K, self.n))


def close(name: str, found: Tensor, expected: Tensor, most: float) -> float:
    """The largest error of a row over the longest row; raises where it is too large."""
    error = float((found.double() - expected.double()).norm(dim=1).max() / expected.double().norm(dim=1).max())
    if not error <= most:
        raise SystemExit(f"{name} is wrong by {error:.1e}; no time counts")
    return error


# -- peers -------------------------------------------------------------------------------------------------------------


def sdpa(world: World, queries: Tensor) -> Tensor:
    """torch's attention, in halves."""
    asked, keys, values = (one[None, None] for one in (queries.half(), world.keys, world.values))
    return F.scaled_dot_product_attention(asked, keys, values, scale=1.0)[0, 0]


def flex_of(world: World) -> Callable[[Tensor], Tensor]:
    """torch's flex attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention)

    def asked(queries: Tensor) -> Tensor:
        if not world.card.cuda:
            raise LeftOut("is compiled for a GPU alone here")
        column = queries.half(), world.keys, world.values
        found: Tensor = compiled(*(one[None, None] for one in column), scale=1.0)[0, 0]
        return found

    return asked


def loop(world: World, queries: Tensor) -> Tensor:
    """An online softmax over blocks, as one would write it in torch."""
    asked, size = queries.half(), 1 << 20
    top = queries.new_full((len(queries), 1), -torch.inf)
    total, output = torch.zeros_like(top), torch.zeros_like(queries)
    for low in range(0, world.n, size):
        scores = (asked @ world.keys[low : low + size].T).float()
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        weights, decay = (scores - new).exp(), (top - new).exp()
        total = total * decay + weights.sum(1, keepdim=True)
        output = output * decay + (weights.half() @ world.values[low : low + size]).float()
        top = new
    return output / total


def gradient(answer: Callable[[Tensor], Tensor], queries: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the queries, forward and backward."""
    leaf = queries.clone().requires_grad_()
    (found,) = torch.autograd.grad(answer(leaf), leaf, grad.to(queries.dtype))
    return found
