"""Answers are freed with their last reference: in a cycle they would keep their arrays until garbage is collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

import softdb


@pytest.fixture(scope="module")
def db() -> Iterator[softdb.SoftDB]:
    keys = np.random.default_rng(0).standard_normal((12_000, 16)).astype(np.float32)
    with holding(keys) as db:
        if softdb.kernels.available():
            db.build_index("flat")
        yield db


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


ANSWERS: dict[str, Callable[[softdb.SoftDB, torch.Tensor], Any]] = {
    "exact": lambda db, queries: db.attend(queries),
    "nearest": lambda db, queries: db.attend(queries, k=10),
    "weights": lambda db, queries: db.attend(queries, need_weights=True),
    "sparse": lambda db, queries: db.attend(queries, weights="sparsemax"),
    "estimate": lambda db, queries: db.attend(queries, rtol=0.05, max_draws=500),
    "normaliser": lambda db, queries: db.log_partition(queries, rtol=0.05),
    "samples": lambda db, queries: db.sample(queries, n=4),
    "search": lambda db, queries: db.search(queries, k=4),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_is_freed_at_once(db: softdb.SoftDB, kind: str, gradient: bool) -> None:
    answer = ANSWERS[kind](db, torch.randn(2, 16, generator=torch.manual_seed(0), requires_grad=gradient))
    freed = weakref.ref(answer)
    del answer
    assert freed() is None


@pytest.mark.usefixtures("no_collection")
def test_an_explained_answer_is_freed_at_once(db: softdb.SoftDB) -> None:
    answer = db.attend(torch.ones(1, 16), rtol=0.05, max_draws=500)
    answer.explain(3)
    freed = weakref.ref(answer)
    del answer
    assert freed() is None
