"""What a View and a Memory share: candidates from a stale index, and when that is made anew."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from softdb.database import SoftDB
from softdb.errors import BadInput, Cancelled
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.nn.policies import Policy
from softdb.nn.stale_index import StaleIndex
from softdb.reports import ReindexReport

__all__ = ["Reindexed"]

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

    def _begin(self, policy: Policy, stale: StaleIndex) -> None:
        self.policy, self._stale = policy, stale
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
        """Whether the vectors are being indexed anew in the background."""
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
        self.db.require_open()
        if background and self.reindexing:
            raise BadInput("a reindexing is under way in the background; wait for it, or reindex at once")
        if not background:
            self._stop("reindex() was called")  # it would put older vectors in the place of these
        work = self._work(background)
        if work is None:
            return None
        self._finished()
        build: Build[ReindexReport] = Build(self._counted(work))
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
        """What makes the next version of the stale index; None where there is nothing to do."""

    @abstractmethod
    def _lags(self) -> bool:
        """Whether candidates come from vectors as they were."""

    def _counted(self, work: Work) -> Work:
        def counted(say: Progress) -> ReindexReport:
            report = work(say)
            self._reindexes += 1
            self._seconds += report.seconds
            return report

        return counted

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
