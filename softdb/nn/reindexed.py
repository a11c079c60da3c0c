"""Base of View and Memory: candidates from a stale index, and policies that say when to reindex.

EverySteps, OnRecall and Never are the policies of ATLAS (Izacard et al. 2022, section 2.4); InBackground is REALM's
asynchronous one (Guu et al. 2020, section 3.3).
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
    """A module in training whose candidates come from the vectors of an earlier training step."""

    policy: Policy
    steps: int  # training steps so far
    _stale: StaleIndex
    _since: int  # last step at which candidates became current otherwise, by a commit
    _build: Build[ReindexReport] | None  # reindexing that runs in the background
    _last_queries: Tensor | None  # the latest queries, for `measure`
    _recall: float | None  # result of the latest `measure`

    def _begin(self, reindex: object, stale: StaleIndex) -> None:
        self.policy, self._stale = policy_of(reindex), stale
        self.steps = self._since = self._reindexes = 0
        self._seconds = 0.0
        self._build = self._last_queries = self._recall = None

    @property
    @abstractmethod
    def db(self) -> SoftDB:
        """The database."""

    @property
    def age(self) -> int:
        """Age in training steps of the vectors that candidates come from; 0 if candidates are never stale."""
        return self.steps - max(self._since, self._stale.now.step) if self._lags() else 0

    @property
    def reindexing(self) -> bool:
        """True while a reindexing runs in the background."""
        return self._build is not None and not self._build.done

    def step(self) -> str:
        """Count a training step, and reindex or measure if the policy says so. Call it after optimizer.step().

        Returns "kept" (nothing was done), "measured", "reindexed" or "started" (in the background). Raises the error of
        a failed reindexing, after counting the step; the old index stays in use, as after a cancelled one.
        """
        self.steps += 1
        self._finished()
        return self.policy.after_step(self)

    def reindex(self, *, background: bool = False) -> Build[ReindexReport] | None:
        """Index the current vectors; later candidates come from this index.

        By default waits for the index, and cancels a reindexing in the background. With `background` returns a build
        that runs in a thread; wait for it with `.result()`. Until the swap the old index answers. Does nothing if
        candidates cannot be stale. Raises BadInput for vectors that are NaN or infinite, for an encoder that cannot be
        copied for the thread, and with `background` while another reindexing runs.
        """
        self.db.core.require_open()
        if background and self.reindexing:
            raise BadInput("a reindexing is under way in the background; wait for it, or reindex in the foreground")
        if not background:
            self._stop("reindex() was called")  # its older vectors would replace the current ones
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
        """Measure the share of the k nearest records, by the current vectors, that are among the candidates."""

    @abstractmethod
    def _work(self, background: bool) -> Work | None:
        """Return a function that makes the next version of the stale index; None if no stale index is needed."""

    @abstractmethod
    def _lags(self) -> bool:
        """Return True if candidates come from the vectors of an earlier training step."""

    def _counted(self, report: ReindexReport) -> ReindexReport:
        self._reindexes += 1
        self._seconds += report.seconds
        return report

    def _finished(self) -> None:
        """Release the background build if it has ended. Raises the error of a failed build."""
        if self._build is not None and self._build.done:
            build, self._build = self._build, None
            with contextlib.suppress(Cancelled):  # the caller of cancel() knows
                build.result()

    def _stop(self, reason: str, wait: bool = True) -> None:
        if self._build is not None:
            self._build.stop(reason, wait)
            self._build = None


@runtime_checkable
class Policy(Protocol):
    """Decides when to reindex; called once after every training step."""

    def after_step(self, view: Reindexed) -> str:
        """Reindex or measure if the policy says so; return "kept", "measured", "reindexed" or "started"."""


@dataclass(frozen=True)
class Never:
    """Never reindex: use it to train only the encoder of the queries, or to call `reindex()` yourself."""

    def after_step(self, view: Reindexed) -> str:
        """Return "kept"."""
        return "kept"


@dataclass(frozen=True)
class EverySteps:
    """Reindex every n training steps, and wait for the new index. Each time all records are encoded and indexed."""

    n: int

    def __post_init__(self) -> None:
        check.integer(self.n, "n")

    def after_step(self, view: Reindexed) -> str:
        """Reindex if the indexed vectors are n steps old."""
        if view.age < self.n:
            return "kept"
        view.reindex()
        return "reindexed"


@dataclass(frozen=True)
class OnRecall:
    """Measure the recall of the candidates every `every` steps, and reindex if it is below `target`."""

    target: float = 0.9  # least share of the true nearest records that should be candidates
    every: int = 100  # steps between measurements
    sample: int = 4096  # number of records to measure on
    k: int = 2  # number of nearest records to look for

    def __post_init__(self) -> None:
        check.share(self.target, "target")
        for name in ("every", "sample", "k"):
            check.integer(getattr(self, name), name)

    def after_step(self, view: Reindexed) -> str:
        """Measure every `every` steps, and reindex if the recall is below the target."""
        if view.age == 0 or view.steps % self.every:
            return "kept"
        if view.measure(self.k, self.sample) >= self.target:
            return "measured"
        view.reindex()
        return "reindexed"


class InBackground(EverySteps):
    """Reindex every n training steps in a thread, with a copy of the encoder, while training goes on.

    After a reindexing that took longer than n steps the next one starts at once; two never run at the same time.
    """

    def after_step(self, view: Reindexed) -> str:
        """Start a reindexing if the indexed vectors are n steps old and no other reindexing runs."""
        if view.age < self.n or view.reindexing:
            return "kept"
        view.reindex(background=True)
        return "started"


def policy_of(reindex: object) -> Policy:
    """Convert the argument `reindex` to a policy: n to EverySteps(n), None to Never(). Raises BadInput otherwise."""
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
