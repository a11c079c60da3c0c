"""Candidates for keys that are trained: found among the keys as they were, chosen by the keys as they are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb import check
from softdb.database import SoftDB
from softdb.errors import BadInput, Cancelled
from softdb.index.background import Build
from softdb.index.choose import Progress
from softdb.index.flat import nearest
from softdb.index.rerank import best
from softdb.nn.origin import Followed, Origin
from softdb.nn.refresh import Policy, policy_of
from softdb.nn.shadow import FEWEST, Shadow, Version
from softdb.reports import ReindexReport
from softdb.store import Segment, Snapshot, Store

__all__ = ["Renewed", "closest", "exactly", "lags"]

BLOCK = 1 << 14  # keys copied at once
ASKED = 64  # of the last queries, kept to measure recall with
Rows = NDArray[np.int64]


def closest(
    keys: Tensor,  # (n, d) as they are
    queries: Tensor,  # (q, d) in the RAM, without a graph
    k: int,  # at most origin.count
    overfetch: int,
    version: Version,  # a copy of the keys as they were, or none
    origin: Origin,
) -> tuple[Rows, str]:  # (q, k) parameters
    """The k nearest of the overfetch · k candidates, best first, and what found these; "flat": all were compared.

    Cost: a search, and q k overfetch d; without an index q n d.
    """
    if not lags(keys, version, origin):
        return exactly(keys, queries, k, origin), "flat"
    count = min(k * overfetch, origin.count)
    if version.number:
        keep = None if origin.count == len(origin.rows) else origin.present
        found, finder = version.find(queries, count, keep=keep).numpy(), "shadow"
    else:
        found, finder = origin.find(queries, count, certain=k)
        if finder == "flat":  # so many that the index does not serve
            return exactly(keys, queries, k, origin), finder
    return best(_as_snapshot(keys, origin), queries.float().numpy(), found, k, origin.metric), finder


def exactly(
    keys: Tensor,  # (n, d)
    queries: Tensor,  # (q, d) in the RAM, without a graph
    k: int,
    origin: Origin,
) -> Rows:  # (q, k) parameters
    """The k nearest by the keys as they are, of all. Cost q n d."""
    return nearest(_as_snapshot(keys, origin), queries, k, origin.metric)


def lags(
    keys: Tensor,  # (n, d)
    version: Version,
    origin: Origin,
) -> bool:
    """Whether candidates come from keys as they were; else comparing them all, as they are, costs no more."""
    if len(keys) < FEWEST or keys.dtype is not torch.float32:
        return False
    return version.number > 0 or origin.indexed


def _as_snapshot(
    keys: Tensor,  # (n, d)
    origin: Origin,
) -> Snapshot:
    """Parameters as finding reads records: no copy, unless their rows are not contiguous."""
    if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.float64):
        raise BadInput(
            f"the keys are {keys.dtype} on {keys.device}; a memory lives in the RAM, in float32: move the rest of the "
            "model, its queries may come from a GPU"
        )
    return Snapshot.of(0, (Segment(0, 0, None, keys.detach().contiguous().numpy(), None),), origin.present)


class Renewed(torch.nn.Module):
    """A module that trains keys: where its candidates come from, how old that is, and the policy that renews it."""

    keys: torch.nn.Parameter | None  # (n, d), None: not trained

    def _begin(self, origin: Origin, k: object, overfetch: object, refresh: object) -> None:
        self.k, self.overfetch = check.integer(k, "k"), check.integer(overfetch, "overfetch")
        self.policy: Policy = policy_of(refresh)
        self._followed = Followed.of(origin)
        self.steps = self._since = 0  # training steps, and at which of them candidates were renewed
        self._asked: Tensor | None = None  # (ASKED, d) the last queries
        self._recall: float | None = None
        self._totals: dict[str, Any] = {"refreshes": 0, "seconds": 0.0, "total_seconds": 0.0}
        self._shadow = self._new_shadow()
        self._build: Build[ReindexReport] | None = None  # a refresh in the background

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._origin.db

    def __len__(self) -> int:
        """How many records are held."""
        return len(self._origin.rows)

    @property
    def age(self) -> int:
        """Training steps since the keys were what candidates come from."""
        return self.steps - self._since if self._lags() else 0

    @property
    def refreshing(self) -> bool:
        """Whether a refresh is under way in the background."""
        return self._build is not None and not self._build.done

    def step(self) -> str:
        """Count a training step, after the optimiser's, and do what the policy finds due.

        Returns what that was: "kept", "measured", "refreshed" or "started". Raises what a refresh failed with, the step
        being counted; the old candidates serve on, as after a refresh that was cancelled.
        """
        self.steps += 1
        self._finished()
        return self.policy.after_step(self)

    def refresh(self, *, background: bool = False) -> Build[ReindexReport] | None:
        """Find candidates among the keys as they are now, from here on.

        They are copied and indexed beside the old ones: n d numbers in memory, twice that meanwhile and, in the
        background, three times; wait for the returned build with `.result()`. Does nothing where candidates cannot be
        stale: below 10,000 records, or where keys are not trained. Raises BadInput while another refresh is under way,
        and for keys that are NaN or infinite.
        """
        if self.refreshing:
            raise BadInput("a refresh is under way in the background; wait for it, then refresh")
        self._finished()
        if self.keys is None or len(self) < FEWEST:
            return None
        keys = self.keys.detach().clone() if background else self.keys.detach()
        build = Build(functools.partial(self._copied, self._shadow, keys, self.steps))
        if not background:
            build.run()
            self._renewed()
            return None
        self._build = build
        build.start()
        return build

    def measure(self, k: int = 10, sample: int = 64) -> float:
        """The share of the k nearest, by the keys as they are, that are among the overfetch · self.k candidates.

        For the last queries asked, at most `sample` of them (64 are kept; before any, keys). Cost 64 n d.
        """
        origin, k = self._at_newest(), min(check.integer(k, "k"), self._origin.count)
        check.integer(sample, "sample")
        if self.keys is None or not k or not self._lags():
            return 1.0
        asked = (self.keys.detach()[:ASKED] if self._asked is None else self._asked)[:sample]
        count = min(max(self.k, k) * self.overfetch, origin.count)
        found, _ = closest(self.keys, asked, count, 1, self._shadow.now, origin)
        true = exactly(self.keys, asked, k, origin)
        self._recall = float((true[:, :, None] == found[:, None, :]).any(2).mean())
        return self._recall

    def report(self) -> dict[str, Any]:
        """How old the candidates are, and what keeping them young has cost.

        records; steps; age of the candidates; refreshes, the seconds of the last and of all; refreshing: whether one is
        under way; recall: as last measured, None before.
        """
        return {
            "records": len(self),
            "steps": self.steps,
            "age": self.age,
            "refreshing": self.refreshing,
            **self._totals,
            "recall": self._recall,
        }

    def _lags(self) -> bool:
        return self.keys is not None and lags(self.keys, self._shadow.now, self._origin)

    def _finished(self) -> None:
        """Take note of a refresh that has ended in the background. Raises what it failed with."""
        if self._build is not None and self._build.done:
            build, self._build = self._build, None
            with contextlib.suppress(Cancelled):  # who cancelled it knows
                build.result()
                self._renewed()

    def _renewed(self) -> None:
        version = self._shadow.now
        self._since = version.step
        self._totals["refreshes"] += 1
        self._totals["seconds"] = version.seconds
        self._totals["total_seconds"] += version.seconds

    @staticmethod
    def _copied(shadow: Shadow, keys: Tensor, step: int, say: Progress) -> ReindexReport:
        def blocks() -> Iterator[Tensor]:
            for low in range(0, len(keys), BLOCK):
                say("copying", low, len(keys))
                yield keys[low : low + BLOCK]

        shadow.replace(np.arange(len(keys)), blocks(), step)
        return shadow.report()

    def _find(
        self,
        queries: Tensor,  # (q, d) in the RAM, without a graph
        origin: Origin,  # `_at_newest()`
    ) -> tuple[NDArray[np.int64], str]:  # (q, k) parameters
        """The k nearest records by the keys as they are, among the candidates, and what found these."""
        k = min(self.k, origin.count)
        if not k:
            return np.zeros((len(queries), 0), np.int64), "flat"
        self._asked = queries[:ASKED].clone()
        if self.keys is None:
            return origin.find(queries, k)
        return closest(self.keys, queries, k, self.overfetch, self._shadow.now, origin)

    @property
    def _origin(self) -> Origin:
        return self._followed.origin

    @property
    def _store(self) -> Store:
        return self.db._store

    def _at_newest(self) -> Origin:
        self._followed.origin = self._origin.now()
        return self._origin

    def _new_shadow(self) -> Shadow:
        schema = self._store.schema
        return Shadow(schema.metric, dtype="float16" if schema.dtype == np.float16 else "float32")

    def _forget(self) -> None:
        """Let go of the copy of the keys, and of one that is being made."""
        old, self._build = self._shadow, None
        self._shadow = self._new_shadow()
        old.close()  # last: another thread that asks meets an open one

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_build": None}  # goes on for this one alone
