"""A module that trains keys of records: where its candidates come from, how old that is, and making it anew."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.attend import Request
from softdb.database import SoftDB
from softdb.index.choose import Progress
from softdb.nn.origin import Followed, Origin
from softdb.nn.parameters import Parameters
from softdb.nn.policies import policy_of
from softdb.nn.reindexed import Reindexed, Work
from softdb.nn.stale_index import FEWEST, StaleIndex
from softdb.reports import MemoryReport, ReindexReport
from softdb.scores import score_of

__all__ = ["TrainedKeys"]

BLOCK = 1 << 14  # keys copied at once
ASKED = 64  # of the last queries, kept to measure recall with


class TrainedKeys(Reindexed):
    """Keys of records as parameters, whose candidates are found among the keys as they were."""

    keys: torch.nn.Parameter | None  # (n, d), None: not trained
    values: torch.nn.Parameter | None  # (n, v), None: not trained

    def _follow(self, origin: Origin, k: object, overfetch: object, reindex: object) -> None:
        self.k, self.overfetch = check.integer(k, "k"), check.integer(overfetch, "overfetch")
        self._followed = Followed.of(origin)
        self._begin(policy_of(reindex), self._new_index())

    @property
    def db(self) -> SoftDB:
        """The database."""
        return self._origin.db

    def __len__(self) -> int:
        """How many records are held."""
        return len(self._origin.rows)

    def source(self) -> Parameters:
        """The records, by keys and values as they are now. Raises Closed."""
        return Parameters(self._at_newest(), self.keys, self.values, self._stale.now, self.overfetch)

    def measure(self, k: int = 10, sample: int = 64) -> float:
        """The share of the k nearest, by the keys as they are, that are among the overfetch · self.k candidates.

        For the last queries asked, at most `sample` of them (64 are kept; before any, keys). Cost 64 n d.
        """
        source = self.source()
        k = min(check.integer(k, "k"), source.count)
        check.integer(sample, "sample")
        if self.keys is None or not k or not source.stale:
            return 1.0
        asked = (self.keys.detach()[:ASKED] if self._asked is None else self._asked)[:sample]
        request = Request.of(asked, score_of(source.origin.metric))
        # the candidates themselves: as many as are looked at, of which all are kept
        whole = Parameters(source.origin, self.keys, self.values, self._stale.now, 1)
        found = whole.find(request, min(max(self.k, k) * self.overfetch, source.count)).positions
        true = source.find(request, k, exact=True).positions
        self._recall = float((true[:, :, None] == found[:, None, :]).any(2).mean())
        return self._recall

    def report(self) -> MemoryReport:
        """How old the candidates are, and what making them anew has cost."""
        seconds = self._stale.now.seconds
        return MemoryReport(
            len(self), self.steps, self.age, self._recall, self.reindexing, self._reindexes, seconds, self._seconds
        )

    def _lags(self) -> bool:
        return self.keys is not None and Parameters(self._origin, self.keys, None, self._stale.now, 1).stale

    def _work(self, background: bool) -> Work | None:
        if self.keys is None or len(self) < FEWEST:
            return None
        keys = self.keys.detach().clone() if background else self.keys.detach()
        return functools.partial(self._copied, self._stale, keys, self.steps)

    @staticmethod
    def _copied(stale: StaleIndex, keys: Tensor, step: int, say: Progress) -> ReindexReport:
        def blocks() -> Iterator[Tensor]:
            for low in range(0, len(keys), BLOCK):
                say("copying", low, len(keys))
                yield keys[low : low + BLOCK]

        return stale.replace(np.arange(len(keys)), blocks(), step)

    @property
    def _origin(self) -> Origin:
        return self._followed.origin

    def _at_newest(self) -> Origin:
        self._followed.origin = self._origin.now()
        return self._origin

    def _new_index(self) -> StaleIndex:
        schema = self.db.schema
        return StaleIndex(schema.metric, dtype="float16" if schema.dtype == np.float16 else "float32")

    def _forget(self) -> None:
        """Release the copy of the keys, and one that is being made."""
        old, self._build = self._stale, None
        self._stale = self._new_index()
        old.close()  # last: another thread that asks meets an open one

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_build": None}  # goes on for this one alone
