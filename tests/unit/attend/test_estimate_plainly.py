"""Estimates with the parameters of an earlier one: the same answers by a path with less overhead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from worlds import holding, indexed

import softdb
from softdb.attend.rounds import ESTIMATORS, FEW_QUERIES, Estimator

pytest.importorskip("softdb.kernels._native")

N, D = 20_000, 16
COLUMNS = ("output", "lse", "exact", "missed_mass", "n_pooled", "weights", "bar", "stderr", "lse_stderr", "met")


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid passes, which cost less for so few records, and plans, after which a query gets another answer."""
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
    monkeypatch.setattr(Estimator, "plan", lambda *_: None)


def world(metric: Any = "dot", num_classes: int | None = None) -> softdb.SoftDB:
    keys = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
    values: Any = np.arange(N) % 3 if num_classes else keys[:, :4]
    db: softdb.SoftDB = indexed(
        keys, values, [{"part": i % 2} for i in range(N)], metric=metric, num_classes=num_classes
    )
    return db


@pytest.fixture
def plain() -> Any:
    with world() as db:
        yield db


def queries(seed: int, q: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((q, D)).astype(np.float32))


def general(monkeypatch: pytest.MonkeyPatch, db: softdb.SoftDB, given: Any, **parts: Any) -> softdb.Pooled:
    with monkeypatch.context() as patch:
        patch.setattr(Estimator, "plainly", lambda *_: None)
        return db.attend(given, **parts)


def paths(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that grows by True for each call of `attend` that takes the plain path, and by False for others."""
    taken, known = list[bool](), Estimator.plainly

    def noted(*given: Any) -> Any:
        estimator = known(*given)
        taken.append(estimator is not None)
        return estimator

    monkeypatch.setattr(Estimator, "plainly", noted)
    return taken


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("q", [1, 5])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_answers_are_those_of_the_general_path(
    metric: Any, q: int, num_classes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = paths(monkeypatch)
    with world(metric, num_classes) as db:
        db.attend(queries(0, q), temperature=2.0, rtol=0.1)
        for seed in range(1, 6):
            slow = general(monkeypatch, db, queries(seed, q), temperature=2.0, rtol=0.1)
            fast = db.attend(queries(seed, q), temperature=2.0, rtol=0.1)
            for name in COLUMNS:
                assert torch.equal(getattr(fast, name), getattr(slow, name)), name
            assert slow.hits is not None
            assert fast.hits is not None
            assert torch.equal(fast.hits.rows, slow.hits.rows)
            assert torch.equal(fast.hits.scores, slow.hits.scores)
            assert fast.finder == slow.finder
            assert [e.ids for e in fast.explain(3)] == [e.ids for e in slow.explain(3)]
            assert [e.effective for e in fast.explain(3)] == pytest.approx([e.effective for e in slow.explain(3)])
        db.attend(queries(1, q)[:1], temperature=2.0, rtol=0.1, max_draws=500)
    assert taken == [False, *[True] * 5]


def test_a_query_that_needs_another_round_gets_it(plain: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        slow = general(monkeypatch, plain, queries(seed), temperature=0.5, rtol=0.02)
        fast = plain.attend(queries(seed), temperature=0.5, rtol=0.02)
        assert fast.met.all()
        assert (fast.n_pooled > 500).all()
        torch.testing.assert_close(fast.output, slow.output)


def test_other_questions_take_the_general_path(plain: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"temperature": 2.0, "rtol": 0.1}
    plain.attend(queries(0), **asked)
    taken = paths(monkeypatch)
    for other in ({"temperature": 3.0}, {"rtol": 0.2}, {"atol": 0.1}, {"confidence": 0.9}):
        plain.attend(queries(1), **(asked | other))
    plain.attend(queries(1, 2), **asked)
    plain.attend(queries(1).double(), **asked)
    plain.attend(queries(1).half(), **asked)
    assert not any(taken)
    asked_for_weights = plain.attend(queries(1), need_weights=True, **asked)
    of_part = plain.attend(queries(1), where={"part": 1}, **asked)
    assert asked_for_weights.hits is not None
    assert of_part.hits is not None
    assert {payload["part"] for payload in of_part.hits.payloads[0]} == {1}
    graph = plain.attend(queries(1).requires_grad_(), **asked)
    assert graph.output.requires_grad
    seeded = plain.attend(queries(1), generator=torch.Generator().manual_seed(1), **asked)
    assert not torch.equal(seeded.output, plain.attend(queries(1), **asked).output)
    assert taken[-1]
    assert sum(taken) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_queries_that_are_not_finite_are_refused(plain: softdb.SoftDB, bad: float) -> None:
    given = queries(0)
    plain.attend(given, temperature=2.0, rtol=0.1)
    given[0, 3] = bad
    with pytest.raises(softdb.BadInput, match="NaN or infinity, first in query 0"):
        plain.attend(given, temperature=2.0, rtol=0.1)


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
def test_tangents_are_refused(plain: softdb.SoftDB) -> None:
    plain.attend(queries(0), temperature=2.0, rtol=0.1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(queries(0), queries(1))  # type: ignore[no-untyped-call]
        with pytest.raises(softdb.BadInput, match="tangents"):
            plain.attend(dual, temperature=2.0, rtol=0.1)
        with pytest.raises(softdb.BadInput, match="tangents"):
            plain.search(dual, k=1)


def test_inserted_and_deleted_records_are_seen() -> None:
    keys = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
    with holding(keys, keys[:, :4]) as db:
        db.build_index("ivf")
        given = queries(0)
        before = db.attend(given, temperature=0.5, rtol=0.05)
        ids = db.insert(keys=10 * given, values=np.ones((1, 4), np.float32))
        after = db.attend(given, temperature=0.5, rtol=0.05)
        assert after.lse > before.lse + 5
        torch.testing.assert_close(after.output, torch.ones(1, 4), rtol=1e-3, atol=1e-3)
        db.delete(ids)
        nearest = db.search(given, k=1).ids[0]
        db.delete(nearest)
        again = db.attend(given, temperature=0.5, rtol=0.05)
        assert again.hits is not None
        assert nearest[0] not in again.hits.ids[0]
        assert again.lse < before.lse + 0.2


OTHERS: list[dict[str, Any]] = [
    {"where": {"part": 1}},
    {"need_weights": True},
    {"max_draws": 500},
    {"temperature": torch.tensor([1.0, 2.0])},
    {"score": softdb.scores.ScaledDot()},
    {"generator": torch.Generator().manual_seed(1)},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_other_questions_are_not_remembered(plain: softdb.SoftDB, other: dict[str, Any]) -> None:
    """A later question with the same temperature and tolerance would be answered with their filter, score or seed."""
    drawable = plain._finder.sampler(plain._store.snapshot, None)
    assert drawable is not None
    given = queries(0, 2)
    plain.attend(given, **{"temperature": 1.0, "rtol": 0.3, **other})
    plain.attend(given.clone().requires_grad_(), temperature=1.0, rtol=0.3)
    assert not drawable[0].remembered
    plain.attend(given, temperature=1.0, rtol=0.3, atol=0.1, confidence=0.9)
    assert [*drawable[0].remembered] == [(2, 1.0, 0.3, 0.1, 0.9)]


def test_few_parameters_and_no_queries_are_remembered(plain: softdb.SoftDB) -> None:
    drawable = plain._finder.sampler(plain._store.snapshot, None)
    assert drawable is not None
    remembered: dict[Any, Any] = drawable[0].remembered
    plain.attend(queries(0, FEW_QUERIES + 1), temperature=2.0, rtol=0.1)
    assert not remembered
    for place in range(ESTIMATORS + 3):
        plain.attend(queries(0), temperature=2.0 + place, rtol=0.5)
        assert 0 < len(remembered) <= ESTIMATORS
    held: list[NDArray[Any]] = [request.queries.untyped_storage().nbytes() for request, *_ in remembered.values()]
    assert not any(held)
