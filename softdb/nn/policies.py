"""When the vectors from which candidates come are made anew: every so many steps, by recall, in the background, never.

The three of ATLAS (Izacard et al. 2022, section 2.4) and REALM's asynchronous one (Guu et al. 2020, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from softdb import check
from softdb.check import shown
from softdb.errors import BadInput

if TYPE_CHECKING:
    from softdb.nn.reindexed import Reindexed

__all__ = ["EverySteps", "InBackground", "Never", "OnRecall", "Policy", "policy_of"]


@runtime_checkable
class Policy(Protocol):
    """When to reindex. Asked once after every training step."""

    def after_step(self, view: Reindexed) -> str:
        """Do what is due, and tell what that was: "kept", "measured", "reindexed" or "started"."""


@dataclass(frozen=True)
class Never:
    """Not by itself: for an encoder of the queries alone (the records' stays), or with `reindex()` by hand."""

    def after_step(self, view: Reindexed) -> str:
        """Nothing."""
        return "kept"


@dataclass(frozen=True)
class EverySteps:
    """Every n training steps, which wait for it. Cost: n records through the encoder, and an index, every n steps."""

    n: int

    def __post_init__(self) -> None:
        check.integer(self.n, "n")

    def after_step(self, view: Reindexed) -> str:
        """Reindex when the vectors are n steps old."""
        if view.age < self.n:
            return "kept"
        view.reindex()
        return "reindexed"


@dataclass(frozen=True)
class OnRecall:
    """When the recall of the candidates, measured every so many steps, is below a target. See `View.measure`.

    Args:
        target: the share of the true nearest that shall be candidates.
        every: steps between measurements.
        sample: records that are measured on.
        k: how many nearest of them count.
    """

    target: float = 0.9
    every: int = 100
    sample: int = 4096
    k: int = 2

    def __post_init__(self) -> None:
        check.share(self.target, "target")
        for name in ("every", "sample", "k"):
            check.integer(getattr(self, name), name)

    def after_step(self, view: Reindexed) -> str:
        """Measure when it is time, and reindex where too little is found."""
        if view.age == 0 or view.steps % self.every:
            return "kept"
        if view.measure(self.k, self.sample) >= self.target:
            return "measured"
        view.reindex()
        return "reindexed"


class InBackground(EverySteps):
    """Every n training steps, which go on meanwhile: a thread encodes with a copy of the encoder as it was.

    A reindexing that takes longer than n steps is followed by the next one at once; two never run together.
    """

    def after_step(self, view: Reindexed) -> str:
        """Start one when the vectors are n steps old and none is under way."""
        if view.age < self.n or view.reindexing:
            return "kept"
        view.reindex(background=True)
        return "started"


def policy_of(reindex: object) -> Policy:
    """The policy given; a number n is EverySteps(n), None is Never(). Raises BadInput for anything else."""
    if reindex is None:
        return Never()
    if isinstance(reindex, int) and not isinstance(reindex, bool):
        return EverySteps(check.integer(reindex, "reindex"))
    if isinstance(reindex, Policy) and not isinstance(reindex, type):
        return reindex
    raise BadInput(
        f"reindex is {shown(reindex)}; expected EverySteps(n), OnRecall(target), InBackground(n), Never(), a number of "
        "steps, or None to reindex by hand"
    )
