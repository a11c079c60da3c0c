"""The Request, one soft question, checked; and the Source of whom it is asked. Every answer is a function of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Resolve
from softdb.check import Tolerance, shown
from softdb.errors import BadInput
from softdb.lazy import cached_property
from softdb.scoring import (
    Fold,
    Gaussian,
    Kernel,
    Normalised,
    Score,
    ScoreFunction,
    Softmax,
    Uniform,
    Weighting,
    fold,
    weighting,
)
from softdb.store import Snapshot
from softdb.store.snapshot import Block

__all__ = [
    "AsStored",
    "Candidates",
    "Live",
    "LogScore",
    "Positions",
    "Request",
    "Resident",
    "Scored",
    "Source",
    "indifferent",
]

Positions: TypeAlias = NDArray[np.int64]
Live: TypeAlias = NDArray[np.bool_]

EXACT = ("flat", "scan")  # finders whose candidates are the nearest for sure


class LogScore(torch.nn.Module):
    """log s of a score s ≥ 0, such as a kernel: the softmax of log s is s / Σ s, also where every s underflows."""

    def __init__(self, score: Score | ScoreFunction) -> None:
        super().__init__()
        self.score = score

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # (q, d), (n, d) or (q, k, d) -> (q, n) or (q, k)
        """log s, -inf where s is 0. Raises BadInput where it is negative."""
        if isinstance(self.score, Kernel):
            return self.score.log(queries, keys)
        scores = self.score(queries, keys)
        if bool((scores.detach() < 0).any()):
            raise BadInput(
                f"a score is {scores.detach().min().item()}; normalised weights need kernel values, at least 0: use "
                "softmax, or a score that is a kernel"
            )
        nothing = scores == 0
        return scores.masked_fill(nothing, 1).log().masked_fill(nothing, -torch.inf)

    def fold(self, queries: Tensor) -> Fold | None:  # (q, d)
        """The order is the score's own; a gaussian's log is a squared distance."""
        folded = fold(self.score, queries)
        if folded is not None and isinstance(self.score, Gaussian):
            return folded._replace(scale=0.5 / self.score.bandwidth.double() ** 2, bias=0.0)
        return None if folded is None else folded._replace(scale=None, bias=0.0)


def indifferent(queries: Tensor, keys: Tensor) -> Tensor:  # (…, q, d_q), (…, n, d) -> (…, q, n)
    """A score that tells no key from another, with gradients of 0: what average pooling asks."""
    return queries[..., :1] * 0 + keys[..., :1].mT * 0


@dataclass(frozen=True)
class Request:
    """What is asked, of whom, and how well. `of` checks; which records there are is the Source's to say."""

    queries: Tensor  # (q, d), on the device and in the dtype to compute in, with their graph
    score: Score | ScoreFunction  # of which softmax, or another weighting, is taken
    weighting: Weighting = Softmax()  # noqa: RUF009 - immutable
    temperature: float = 1.0
    allowed: Live | None = None  # (size,) over positions: who takes part; None: every live record
    mask: Tensor | None = None  # (q, live records) in row order, True = takes part
    k: int | None = None  # truncate to the k nearest
    tolerance: Tolerance | None = None  # estimate; without k and tolerance the answer is exact
    seed: int = 0  # of an estimate's draws
    need_weights: bool = False  # hold the weights of an exact answer
    pools: bool = True  # False: the log-normaliser alone is wanted

    @classmethod
    def of(
        cls,
        queries: Tensor,
        score: Score | ScoreFunction,
        weights: str | Weighting | None = None,
        temperature: float = 1.0,
        allowed: Live | None = None,
        mask: Tensor | None = None,
        k: int | None = None,
        tolerance: Tolerance | None = None,
        seed: int = 0,
        need_weights: bool = False,
    ) -> Request:
        """A request. Weights None: "normalised" for a kernel, else "softmax".

        Normalised weights become the softmax of the score's logarithm, which cannot underflow.
        """
        by = weighting(("normalised" if isinstance(score, Kernel) else "softmax") if weights is None else weights)
        if isinstance(by, Normalised):
            if temperature != 1:
                raise BadInput(
                    f"temperature is {shown(temperature)} but normalised weights have none; leave it at 1 and set the "
                    "kernel's bandwidth, or use softmax"
                )
            score, by = LogScore(score), Softmax()
        return cls(queries, score, by, temperature, allowed, mask, k, tolerance, seed, need_weights)

    @cached_property
    def folded(self) -> Fold | None:
        """The score as an index must see it, with the queries' graph; None where no index can find its nearest."""
        return fold(self.score, self.queries)

    @cached_property
    def detached(self) -> Request:
        """The same without a graph: for finding, and for what needs no gradient."""
        return replace(self, queries=self.queries.detach())

    @property
    def streamed_score(self) -> Score | ScoreFunction:
        """The score of a pass over all records: average pooling asks for none."""
        return indifferent if isinstance(self.weighting, Uniform) else self.score

    @property
    def wants_gradient(self) -> bool:
        """Whether the queries do."""
        return self.queries.requires_grad and torch.is_grad_enabled()

    def at(self, which: Positions) -> Request:
        """The same for some of the queries (ascending), with their gradient."""
        if len(which) == len(self.queries):
            return self
        chosen = torch.from_numpy(which).to(self.queries.device)
        mask = None if self.mask is None else self.mask[chosen.to(self.mask.device)]
        return replace(self, queries=self.queries[chosen], mask=mask)

    def shown_scores(self, scores: Tensor) -> Tensor:  # (…) -> (…)
        """Scores as the user's own score gives them."""
        return scores.exp() if isinstance(self.score, LogScore) else scores

    def keep(self, source: Source) -> Live:  # (size,)
        """The positions that take part, but for the mask."""
        return source.live if self.allowed is None else source.live & self.allowed

    def taking_part(self, source: Source) -> Tensor:  # (q,)
        """How many records each query may weigh."""
        device = self.queries.device
        if self.mask is None:
            count = source.count if self.allowed is None else int(np.count_nonzero(self.keep(source)))
            return torch.full((len(self.queries),), count, device=device)
        mask = self.mask.cpu()
        if self.allowed is not None:
            mask = mask & torch.from_numpy(self.allowed[source.live])
        return mask.sum(1).to(device)


# -- of whom -----------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Records in order. Positions count them, 0 … size - 1, dead ones included; -1 means none.

    A new source (columns on a device, shards on other machines) gives these, and is then asked whatever a database is.
    """

    @property
    def live(self) -> Live:
        """Which positions hold a record, (size,) bool."""

    @property
    def count(self) -> int:
        """How many do."""

    @property
    def width(self) -> int:
        """v, how wide an answer is."""

    @property
    def num_classes(self) -> int | None:
        """How many classes there are, where values are labels."""

    @property
    def columns(self) -> Snapshot | None:
        """Keys and values as kernels read them where they lie; None: they come by `blocks` alone."""

    @property
    def resident(self) -> tuple[Resident, ...]:
        """The columns where they lie on devices, in order of positions; none: they come by `columns` or `blocks`."""

    @property
    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """The source's own keys (n, d) and values (n, v), where they want a gradient."""

    @property
    def graph(self) -> bool:
        """Whether `encoded` makes keys with a graph."""

    @property
    def block_size(self) -> int:
        """How many records `encoded` takes at once; asked where there is a graph."""

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """The allowed live records from a position on, in order, at most `size` at a time."""

    def encoded(self, block: Block) -> Block:
        """A block with its keys as they are compared."""

    def frozen(self) -> Source:
        """The same records without a graph, to look again. Raises StaleRead where they have changed since."""

    def find(self, request: Request, k: int, exact: bool = False) -> Candidates:
        """The k nearest of each query by the request's score; `exact`: for sure."""

    def scored(self, request: Request, positions: Positions) -> Scored:
        """Scores of candidates (q, k), with their gradients."""

    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """The weighted sum of candidates' values (q, v), with its gradients."""

    def rows(self, positions: Positions) -> Positions:
        """Permanent row numbers, -1 where there is none."""

    @property
    def resolve(self) -> Resolve:
        """Ids and payload texts of rows; those deleted since are absent."""


class AsStored:
    """A source whose keys are compared as they are stored."""

    graph, block_size = False, 0

    @property
    def resident(self) -> tuple[Resident, ...]:
        """None."""
        return ()

    def encoded(self, block: Block) -> Block:
        """The block itself."""
        return block


class Resident(NamedTuple):
    """Columns of a range of positions, on one device; those that want a gradient are given with their graph."""

    keys: Tensor  # (m, d), float32, float16 or bfloat16
    values: Tensor | None  # (m, v), or int labels (m,); None: the key serves
    live: Tensor | None = None  # (m,) bool; None: all are live
    start: int = 0  # the first position

    def taking_part(self, keep: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of what is allowed (size,) and a mask (q, size), over all positions, this range here, without the dead."""
        device, rows = self.keys.device, slice(self.start, self.start + len(self.keys))
        live = self.live
        if keep is not None:
            allowed = keep[rows].to(device)
            live = allowed if live is None else live & allowed
        return live, None if mask is None else mask[:, rows].to(device)


class Candidates(NamedTuple):
    """The records that a request may weigh."""

    positions: Positions  # (q, k), -1 = none
    finder: str  # which one found them

    @property
    def certain(self) -> bool:
        """Whether they are the nearest for sure."""
        return self.finder in EXACT


class Scored(NamedTuple):
    """Candidates and their scores."""

    positions: Positions  # (q, k), -1 = none
    scores: Tensor  # (q, k), -inf for none, with gradients
    keys: Tensor | None = None  # (q, k, d) as they were compared, where pooling may need them
