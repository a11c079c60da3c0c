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
from softdb.train import QueryProjection

STEPS = 200  # largest number of steps, whose weights are all kept: 36 kB a step for the demo
BATCH, RATE, TEMPERATURE, SEED = 64, 1e-3, 0.05, 0
MEASURED, AT_ONCE = 512, 64  # number of held-out words for a recall, and of words searched at once
DEPTH = 100  # largest rank of a word's record that is reported as a number
SECONDS = 0.25  # time after which a call stops, with fewer steps than it was asked for


class Training:
    """A training run: a projection W of the queries, by Adam on the retrieval loss, with the demo's pairs.

    The same seed gives the same batches, so that W is a function of the number of steps. A page names that number; the
    server remembers nothing about pages, and keeps this one run for all of them.
    """

    def __init__(self, db: SoftDB) -> None:
        """Encode the words by the database's encoder. Raises the errors of the encoder."""
        data = load_wordnet()
        self.words = {word.lower(): i for i, word in enumerate(data.query_texts)}
        self.right = [[data.ids[i] for i in answers] for answers in data.answers]
        self.queries = db.core.as_queries(data.query_texts).float()  # (m, d)
        self.held_out = data.held_out
        self.train = torch.from_numpy(np.flatnonzero(~data.held_out))
        self.projection = QueryProjection(self.queries.shape[1])
        self.adam = torch.optim.Adam(self.projection.parameters(), lr=RATE)
        self.order = torch.Generator().manual_seed(SEED)
        self.weights: list[Tensor] = [self.projection.weight.detach().clone()]  # W after each number of steps
        self.losses: list[float] = []
        self._recalls: dict[int, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def projected(self, query: Tensor, steps: int) -> Tensor:  # (q, d) -> (q, d)
        """Project queries by W after a number of steps. Raises BadInput if the run has not come so far."""
        if steps >= len(self.weights):
            raise BadInput(
                f"the projection has {len(self.weights) - 1} steps, not {steps}; train it to that step first"
            )
        return query @ self.weights[steps].T

    def advance(self, db: SoftDB, steps: int, wanted: Callable[[], None]) -> int:
        """Train up to a number of steps, for SECONDS at most; return the number of the steps that are there."""
        begin = time.perf_counter()
        with self._lock:
            while len(self.losses) < steps and time.perf_counter() - begin < SECONDS:
                wanted()
                self._step(db)
        return min(steps, len(self.losses))

    @torch.enable_grad()
    def _step(self, db: SoftDB) -> None:
        batch = self.train[torch.randint(len(self.train), (BATCH,), generator=self.order)]
        queries, right = self.projection(self.queries[batch]), [self.right[i] for i in batch.tolist()]
        loss = retrieval_loss(db, queries, right, temperature=TEMPERATURE)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()
        self.losses.append(float(loss.detach()))
        self.weights.append(self.projection.weight.detach().clone())

    def recall(self, db: SoftDB, steps: int, wanted: Callable[[], None]) -> tuple[float, float]:
        """Return recall@1 and recall@10 on held-out words, after a number of steps."""
        if steps not in self._recalls:
            chosen = np.flatnonzero(self.held_out)[:MEASURED]
            places = []
            for start in range(0, len(chosen), AT_ONCE):
                wanted()
                places += self._places(db, chosen[start : start + AT_ONCE], steps, 10)
            found = np.array(places)
            self._recalls[steps] = float((found == 1).mean()), float((found > 0).mean())
        return self._recalls[steps]

    def place(self, db: SoftDB, word: str, steps: int) -> dict[str, Any] | None:
        """Return the place of a word's right record before training and now; None for a word without one."""
        i = self.words.get(word.strip().lower())
        if i is None:
            return None
        before, now = (self._places(db, np.array([i]), at, DEPTH)[0] for at in (0, steps))
        return {"word": word.strip(), "held_out": bool(self.held_out[i]), "before": before, "now": now}

    def _places(self, db: SoftDB, chosen: np.ndarray, steps: int, depth: int) -> list[int]:
        """Return the rank of each query's first right record, from 1; 0 if it is not among the `depth` nearest."""
        found = db.search(self.projected(self.queries[chosen], steps), depth, exact=True).ids
        ranks = (
            (rank for rank, name in enumerate(names, 1) if name in right)
            for names, right in zip(found, (self.right[i] for i in chosen), strict=True)
        )
        return [next(rank, 0) for rank in ranks]


class Trainer:
    """The training run of the served database, and a page's requests about it."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._run: Training | None = None
        self._of = 0, 0  # the database's object and generation that the run is for

    def fits(self, db: SoftDB) -> bool:
        """Return True for the demo's records, whose words have known right answers."""
        return self._served.takes_text and db.encoder_name == DEMO and "noun.02503517" in db

    def run(self, db: SoftDB) -> Training:
        """Return the run for the database's present records. Raises BadInput if there are no pairs."""
        if self._run is None or self._of != (id(db), db.generation):
            if not self.fits(db):
                raise BadInput("this database has no pairs to train on; softdb explore --demo has")
            self._run, self._of = Training(db), (id(db), db.generation)
        return self._run

    def train(self, params: dict[str, str], wanted: Callable[[], None]) -> dict[str, Any]:
        """Train to a number of steps, or a part of the way; return losses, a word's place and, if asked, recalls."""
        db = self._served.newest()
        run, given = self.run(db), params.get("steps", "")
        if not given.isdecimal() or not 0 <= int(given) <= STEPS:
            raise BadInput(f"steps is {check.shown(given)}; expected a whole number from 0 to {STEPS}")
        steps = run.advance(db, int(given), wanted)
        return {
            "steps": steps, "losses": run.losses[:steps], "place": run.place(db, params.get("text", ""), steps),
            "recalls": [run.recall(db, at, wanted) for at in (0, steps)] if "measure" in params else None,
            "words": [len(run.train), min(MEASURED, int(run.held_out.sum()))], "most": STEPS,
        }  # fmt: skip
