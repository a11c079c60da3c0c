"""Training of the demo's projection of queries, step by step, while its page looks on. The database is only read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from softdb import check
from softdb.data import load_wordnet
from softdb.data.encoder import DEMO
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.nn import retrieval_loss
from softdb.tools.cli.served import Served
from softdb.train import QueryProjection, Ranking
from softdb.train.held_out import ranked

STEPS = 200  # largest number of steps, whose weights are all kept: 36 kB a step for the demo
BATCH, RATE, TEMPERATURE, SEED = 64, 1e-3, 0.05, 0
MEASURED, AT_ONCE = 512, 64  # number of held-out words for a recall, and of words searched at once
SECONDS = 0.25  # time after which a call stops, with fewer steps than it was to reach


class DemoRun:
    """A training run: a projection W of the queries, by Adam on the retrieval loss, with the demo's pairs.

    The same seed gives the same batches, so that W is a function of the number of steps. A page names that number; the
    server remembers nothing about pages, and keeps this one run for all of them.
    """

    def __init__(self, db: SoftDB) -> None:
        """Encode the words by the database's encoder."""
        data = load_wordnet()
        self.words = {word.lower(): i for i, word in enumerate(data.query_texts)}
        self.right = [[data.ids[i] for i in answers] for answers in data.answers]
        self.queries = db.core.as_queries(data.query_texts).float()  # (m, d)
        self.held_out, self.trained = data.held_out, torch.from_numpy(np.flatnonzero(~data.held_out))
        self.projection = QueryProjection(self.queries.shape[1])
        self.adam = torch.optim.Adam(self.projection.parameters(), lr=RATE)
        self.order = torch.Generator().manual_seed(SEED)
        self.weights: list[Tensor] = [self.projection.weight.detach().clone()]  # W after each number of steps
        self.losses: list[float] = []
        self.recalls: dict[int, tuple[float, float]] = {}

    def projected(self, query: Tensor, steps: int) -> Tensor:  # (q, d) -> (q, d)
        """Project queries by W after a number of steps. Raises BadInput if the run has not come so far."""
        if steps >= len(self.weights):
            raise BadInput(f"the run has {len(self.weights) - 1} steps, not {steps}; train it to that step first")
        return query @ self.weights[steps].T

    @torch.enable_grad()
    def step(self, db: SoftDB) -> None:
        """Make a step of Adam on a batch of pairs."""
        batch = self.trained[torch.randint(len(self.trained), (BATCH,), generator=self.order)]
        queries, right = self.projection(self.queries[batch]), [self.right[i] for i in batch.tolist()]
        loss = retrieval_loss(db, queries, right, temperature=TEMPERATURE)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.weights.append(self.projection.weight.detach().clone())
        self.losses.append(float(loss.detach()))

    def recall(self, db: SoftDB, steps: int, wanted: Callable[[], None]) -> tuple[float, float]:
        """Return recall@1 and recall@10 on held-out words, after a number of steps."""
        if steps not in self.recalls:
            parts = []  # (recall@1, recall@10) of equally many words each
            for some in np.flatnonzero(self.held_out)[:MEASURED].reshape(-1, AT_ONCE):
                wanted()
                parts.append(self._ranking(db, some, steps)[:2])
            self.recalls[steps] = tuple(np.mean(parts, axis=0).tolist())
        return self.recalls[steps]

    def place(self, db: SoftDB, word: str, steps: int) -> dict[str, Any] | None:
        """Return the rank of a word's record before training and after some steps; None for a word without a record."""
        i = self.words.get(word.strip().lower())
        if i is None:
            return None
        reciprocals = (self._ranking(db, np.array([i]), at).mrr_100 for at in (0, steps))
        before, now = (round(1 / reciprocal) if reciprocal else 0 for reciprocal in reciprocals)  # 0: beyond 100
        return {"word": word.strip(), "held_out": bool(self.held_out[i]), "before": before, "now": now}

    def _ranking(self, db: SoftDB, words: np.ndarray, steps: int) -> Ranking:
        """Rank the words' right records after a number of steps."""
        return ranked(db, self.projected(self.queries[words], steps), [self.right[i] for i in words], None)


class Trainer:
    """The training run of the served database, and a page's requests about it."""

    def __init__(self, served: Served) -> None:
        self._served, self._lock = served, threading.Lock()
        self._run: DemoRun | None = None
        self._of = 0, 0  # the database's object and generation that the run is for

    def fits(self, db: SoftDB) -> bool:
        """Return True for the demo's records, whose words have known right answers."""
        return self._served.takes_text and db.encoder_name == DEMO and "noun.02503517" in db

    def run(self, db: SoftDB) -> DemoRun:
        """Return the run for the database's present records. Raises BadInput if there are no pairs."""
        with self._lock:
            if self._run is None or self._of != (id(db), db.generation):
                if not self.fits(db):
                    raise BadInput("this database has no pairs to train on; softdb explore --demo has")
                self._run, self._of = DemoRun(db), (id(db), db.generation)
            return self._run

    def train(self, params: dict[str, str], wanted: Callable[[], None]) -> dict[str, Any]:
        """Train to a number of steps, or a part of the way; return losses, a word's ranks and, with `measure`, recalls.

        One thread calls this.
        """
        db, given, begin = self._served.newest(), params.get("steps", ""), time.perf_counter()
        if not given.isdecimal() or not 0 <= int(given) <= STEPS:
            raise BadInput(f"steps is {check.shown(given)}; expected a whole number from 0 to {STEPS}")
        run = self.run(db)
        while len(run.losses) < int(given) and time.perf_counter() - begin < SECONDS:
            wanted()
            run.step(db)
        steps = min(int(given), len(run.losses))
        return {
            "steps": steps, "losses": run.losses[:steps], "place": run.place(db, params.get("text", ""), steps),
            "recalls": [run.recall(db, at, wanted) for at in (0, steps)] if "measure" in params else None,
            "words": [len(run.trained), MEASURED], "most": STEPS,
        }  # fmt: skip
