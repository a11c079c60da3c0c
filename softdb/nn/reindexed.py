"""Base of View and Memory: candidates from a stale index, and the policies that say when it is made anew.

Every so many steps, by recall, never: the three of ATLAS (Izacard et al. 2022, section 2.4); and REALM's asynchronous
one (Guu et al. 2020, section 3.3).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from softdb import check
from softdb.check import shown
from softdb.database import SoftDB
from softdb.errors import BadInput, Cancelled
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.nn.stale_index import StaleIndex
from softdb.reports import ReindexReport

Work = Callable[[Progress], ReindexReport]


class Reindexed(torch.nn.Module, ABC):
    """A module that is trained while its candidates come from vectors as they were at some training step."""

    policy: Policy
    steps: int  # training steps so far
    _stale: StaleIndex
    _since: int  # the step at which candidates were renewed otherwise than by a new version
    _build: Build[ReindexReport] | None  # in the background
    _asked: Tensor | None  # the last queries, which `measure` asks
    _recall: float | None  # as last measured

    def _begin(self, reindex: object, stale: StaleIndex) -> None:
        self.policy, self._stale = policy_of(reindex), stale
        self.steps = self._since = self._reindexes = 0
        self._seconds = 0.0
        self._build = self._asked = self._recall = None

    @property
    @abstractmethod
    def db(self) -> SoftDB:
        """The database."""

    @property
    def age(self) -> int:
        """Training steps since the vectors were as candidates come from them; 0 where candidates are never stale."""
        return self.steps - max(self._since, self._stale.now.step) if self._lags() else 0

    @property
    def reindexing(self) -> bool:
        """True if the vectors are being indexed anew in the background."""
        return self._build is not None and not self._build.done

    def step(self) -> str:
        """Count a training step, after optimizer.step(), and do what the policy finds due.

        Returns what that was: "kept", "measured", "reindexed" or "started". Raises what a reindexing failed with, the
        step being counted; the old index serves on, as after one that was cancelled.
        """
        self.steps += 1
        self._finished()
        return self.policy.after_step(self)

    def reindex(self, *, background: bool = False) -> Build[ReindexReport] | None:
        """Index the vectors as they are now, and find candidates there from then on.

        At once, which cancels one under way in the background; or in a thread: wait for the returned build with
        `.result()`. Until the swap the old index answers. Does nothing where candidates cannot be stale. Raises
        BadInput for vectors that are NaN or infinite, for an encoder that cannot be copied for the thread, and, in the
        background, while another one is under way.
        """
        self.db.core.require_open()
        if background and self.reindexing:
            raise BadInput("a reindexing is under way in the background; wait for it, or reindex at once")
        if not background:
            self._stop("reindex() was called")  # it would put older vectors in the place of these
        work = self._work(background)
        if work is None:
            return None
        self._finished()
        build: Build[ReindexReport] = Build(work)
        if not background:
            build.run()
            return None
        self._build = build
        build.start()
        return build

    @abstractmethod
    def measure(self, k: int = 2, sample: int = 4096) -> float:
        """The share of the k nearest, as they are now, that are candidates."""

    @abstractmethod
    def _work(self, background: bool) -> Work | None:
        """Function that makes the next version of the stale index, and counts it; None where there is nothing to do."""

    @abstractmethod
    def _lags(self) -> bool:
        """Return True if candidates come from vectors as they were."""

    def _counted(self, report: ReindexReport) -> ReindexReport:
        self._reindexes += 1
        self._seconds += report.seconds
        return report

    def _finished(self) -> None:
        """Release a build that has ended. Raises what it failed with."""
        if self._build is not None and self._build.done:
            build, self._build = self._build, None
            with contextlib.suppress(Cancelled):  # who cancelled it knows
                build.result()

    def _stop(self, reason: str) -> None:
        if self._build is not None:
            self._build.stop(reason)
            self._build = None


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
    """When the recall of the candidates, measured every so many steps, is below a target. See `View.measure`."""

    target: float = 0.9  # the share of the true nearest that shall be candidates
    every: int = 100  # steps between measurements
    sample: int = 4096  # records that are measured on
    k: int = 2  # how many nearest of them count

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

    One that takes longer than n steps is followed by the next at once; two never run together.
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
