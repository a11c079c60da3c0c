"""Records that lie in other processes, or on other machines: what a source of them gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from softdb.answers import Estimate, Explanation, Pooled, Resolve, Samples
from softdb.attend.request import AsStored, Candidates, Live, Positions, Request, Scored
from softdb.errors import BadInput
from softdb.store.snapshot import Block

__all__ = ["Remote"]


class Remote(AsStored, ABC):
    """Records that lie on other machines, or in other processes: questions travel to them, not they to the questions.

    Positions are rows. What needs all records in one place raises BadInput.
    """

    columns, trained = None, (None, None)
    missing: tuple[int, ...] = ()  # shards that did not answer

    @property
    @abstractmethod
    def count(self) -> int:
        """How many records take part."""

    @property
    @abstractmethod
    def width(self) -> int:
        """v."""

    @property
    @abstractmethod
    def num_classes(self) -> int | None:
        """Of labels."""

    @property
    @abstractmethod
    def resolve(self) -> Resolve:
        """Ids, payloads and texts of rows."""

    @abstractmethod
    def whole(self) -> Remote:
        """The same, which gives no partial answer: a loss needs all records."""

    @abstractmethod
    def find(self, request: Request, k: int, exact: bool = False) -> Candidates:
        """As `Source.find`."""

    @abstractmethod
    def scored(self, request: Request, positions: Positions) -> Scored:
        """As `Source.scored`."""

    @abstractmethod
    def pooled(self, weights: Tensor, found: Scored) -> Tensor:
        """As `Source.pooled`."""

    def frozen(self) -> Remote:
        """Itself: every question names its version."""
        return self

    @property
    def live(self) -> Live:
        """Nobody here knows."""
        raise self._elsewhere()

    def blocks(self, size: int, allowed: Live | None = None, start: int = 0) -> Iterator[Block]:
        """They do not travel."""
        raise self._elsewhere()

    @staticmethod
    def _elsewhere() -> BadInput:
        return BadInput(
            "this needs every record in one place, but they lie on the shards of a cluster; ask it another way"
        )

    def rows(self, positions: Positions) -> Positions:
        """The positions."""
        return positions

    @abstractmethod
    def streamed(self, request: Request) -> tuple[Tensor, Tensor]:  # (q, v), (q,)
        """As `softdb.attend.streaming.stream`."""

    @abstractmethod
    def estimated(self, request: Request) -> Pooled:
        """As `softdb.attend.estimate.estimated`."""

    @abstractmethod
    def counted(self, request: Request, least: float) -> Estimate:
        """As `softdb.attend.count.counted`."""

    @abstractmethod
    def sampled(self, request: Request, count: int, generator: torch.Generator) -> Samples:
        """As `softdb.attend.sample.sampled`."""

    @abstractmethod
    def explained(self, request: Request, pooled: Pooled, count: int) -> list[Explanation]:
        """As `softdb.attend.result.explained`, where the records were weighed in a pass."""
