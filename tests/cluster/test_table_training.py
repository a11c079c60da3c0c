"""Training on a cluster equals training on one database, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import softdb
from softdb import cluster, errors, train

N, DIM, M = 1200, 12, 160
KEYS = np.random.default_rng(0).normal(size=(N, DIM)).astype(np.float32)
TURN = np.linalg.qr(np.random.default_rng(1).normal(size=(DIM, DIM)))[0]
QUERIES = torch.tensor(KEYS[:M] @ TURN).float()  # which a projection can turn back


@pytest.fixture
def both(tmp_path: Path) -> Any:
    with softdb.open(None, dim=DIM) as one, cluster.create(
        tmp_path / "t.lance", dim=DIM, shards=4, ids="int", cache=tmp_path / "cache"
    ) as db:  # fmt: skip
        for each in (one, db):
            each.insert(range(N), KEYS)
        yield one, db


SETTINGS: dict[str, Any] = {"epochs": 6, "patience": None, "lr": 0.03, "temperature": 1.0, "batch_size": 32}


@pytest.mark.parametrize("words", [{}, {"k": 40}, {"bias": True, "temperature": 0.2}], ids=str)
def test_a_projection_is_that_of_one_database(both: Any, words: dict[str, Any]) -> None:
    one, other = (train.fit(db, QUERIES, list(range(M)), **{**SETTINGS, **words}) for db in both)
    assert one.after.mrr_100 > one.before.mrr_100 + 0.2
    assert other.before == pytest.approx(one.before, abs=1e-6)
    assert other.after == pytest.approx(one.after, abs=0.04)
    assert (other.projection.weight - one.projection.weight).norm() <= 1e-3 * one.projection.weight.norm()
    losses = [[epoch.loss for epoch in each.history] for each in (other, one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_run_resumes_from_its_checkpoint(both: Any, tmp_path: Path) -> None:
    words: dict[str, Any] = {"patience": None, "checkpoint": tmp_path / "run.pt"}
    whole = train.fit(both[1], QUERIES, list(range(M)), epochs=2, patience=None)
    train.fit(both[1], QUERIES, list(range(M)), epochs=1, **words)
    again = train.fit(both[1], QUERIES, list(range(M)), epochs=2, resume=True, **words)
    assert (again.projection.weight - whole.projection.weight).norm() <= 1e-5 * whole.projection.weight.norm()


def test_an_encoder_of_keys_wants_one_database(both: Any) -> None:
    with pytest.raises(errors.BadInput, match="this needs every record in one place: give one database"):
        train.fit(both[1], QUERIES, list(range(M)), keys=True, epochs=1)
