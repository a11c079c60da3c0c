"""Rounds of an estimate: how many records a further round draws, and how answers of several rounds are joined."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import holding

from softdb.attend import rounds
from softdb.attend.result import Estimated
from softdb.attend.rounds import MARGIN, WRONG, Estimator, Round
from softdb.check import Tolerance
from softdb.index.planner import CALL
from softdb.index.sampler import FIRST, FirstRound

BUDGET, ALLOWED = 500, 0.05


@pytest.fixture(autouse=True)
def never_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimator, "too_dear", lambda *_: False)


def further(bar: float, stderr: float, records: int = 10**6) -> list[int]:
    """Budgets of the rounds that follow one of BUDGET draws, for one query whose error may be ALLOWED."""
    unused: Any = None
    eligible: Any = SimpleNamespace(inside=records)
    tolerance = Tolerance(0.05, 0.0, 0.95, None)
    estimator = Estimator(unused, unused, tolerance, unused, eligible, np.ones(1), unused, unused, records)
    task = Round(np.arange(1), BUDGET)
    met, rounds, passed = estimator.after(task, np.array([bar]), np.array([ALLOWED]), np.array([stderr]))
    assert met.tolist() == [bar <= ALLOWED]
    assert not len(passed)
    return [more.budget for more in rounds]


def test_a_met_tolerance_needs_no_further_round() -> None:
    assert further(ALLOWED, ALLOWED / 2) == []


def test_a_bar_that_draws_explain_is_met_by_one_further_round() -> None:
    assert further(20 * ALLOWED, 10 * ALLOWED) == [int(MARGIN * 400 * BUDGET)]


@pytest.mark.parametrize("bar", [1e3 * ALLOWED, math.inf])
def test_a_bar_that_draws_do_not_explain_asks_for_a_bounded_round(bar: float) -> None:
    assert further(bar, ALLOWED / 10) == [4 * BUDGET]
    assert further(bar, 100 * ALLOWED) == [WRONG * BUDGET]


@pytest.mark.parametrize("size", [1e3, 1e200, math.inf])
def test_a_further_round_draws_no_more_than_all_records(size: float) -> None:
    assert further(size * ALLOWED, size * ALLOWED / 2, records=30_000) == [30_000]


@pytest.mark.parametrize(("unlucky", "dear"), [(0, False), (1, False), (4, True)])
def test_one_dear_query_of_a_first_round_sends_no_other_to_a_pass(unlucky: int, dear: bool) -> None:
    segment = SimpleNamespace(keys=np.zeros((1, 128), np.float32), values=None)
    request: Any = SimpleNamespace(pools=True)
    source: Any = SimpleNamespace(width=128, snapshot=SimpleNamespace(segments=[segment]))
    sampler: Any = SimpleNamespace(slots_for=lambda kind: 10**6, parts=32)
    unused: Any = None
    tolerance, queries = Tolerance(0.05, 0.0, 0.95, None), np.zeros((64, 128), np.float32)
    estimator = Estimator(request, source, tolerance, sampler, unused, np.ones(64), queries, unused, 10**6)
    first, waiting = Round(np.arange(4), BUDGET), Round(np.arange(4, 64), BUDGET)
    more = [Round(np.arange(unlucky), 8 * BUDGET)] if unlucky else []
    assert estimator.others_too_dear(first, more, np.arange(0), [waiting]) == dear
    bounded = estimator._replace(tolerance=tolerance._replace(most=400))
    assert not bounded.others_too_dear(first, more, np.arange(0), [waiting])


def test_unmet_queries_share_a_round_where_that_costs_less() -> None:
    request: Any = SimpleNamespace(pools=True)
    source: Any = SimpleNamespace(width=128)
    sampler: Any = SimpleNamespace(slots_for=lambda kind: 10**6, parts=32)
    unused: Any = None
    tolerance, queries = Tolerance(0.05, 0.0, 0.95, None), np.zeros((64, 128), np.float32)
    eligible: Any = SimpleNamespace(inside=10**6)
    estimator = Estimator(request, source, tolerance, sampler, eligible, np.ones(64), queries, unused, 10**6)
    bar = np.full(64, ALLOWED)
    bar[[3, 7, 20]] *= np.array([1.2, 2.0, 14.0])  # the bar's square tells the draws: 1,000, 2,600 and 127,400
    _, tasks, _ = estimator.after(Round(np.arange(64), BUDGET), bar, np.full(64, ALLOWED), bar / 2)
    assert [(task.which.tolist(), task.budget) for task in tasks] == [([3, 7], 2600), ([20], 127_400)]


def test_a_further_round_of_a_first_query_leaves_the_others_to_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("softdb.kernels._native")
    keys = np.random.default_rng(0).standard_normal((20_000, 16)).astype(np.float32)
    monkeypatch.setattr(rounds, "pass_cost", lambda queries, *_: 0.75 * CALL * queries)
    plan, sizes = Estimator.after, list[int]()

    def after(self: Estimator, task: Round, *errors: Any) -> Any:
        met, further, passed = plan(self, task, np.array([0.0] * len(task.which)), *errors[1:])
        if not sizes:  # the first query of the first round needs another round
            met[0], further = False, [task._replace(which=task.which[:1], budget=16 * BUDGET)]
        sizes.append(len(task.which))
        return met, further, passed

    monkeypatch.setattr(Estimator, "after", after)
    with holding(keys) as db:
        db.build_index("flat")
        pooled = db.attend(torch.from_numpy(keys[:64]), temperature=1.0, rtol=0.05)
    assert sizes == [4, 1, 60]
    assert not pooled.exact.any()


def planned(needed: list[float], records: int = 10**6, d: int = 128) -> int:
    """The first round's draws, after a first round of FIRST whose queries turned out to need these draws."""
    segment = SimpleNamespace(keys=np.zeros((1, d), np.float32), values=None)
    request: Any = SimpleNamespace(pools=True)
    source: Any = SimpleNamespace(width=d, snapshot=SimpleNamespace(segments=[segment]))
    plans: dict[object, FirstRound] = {}
    sampler: Any = SimpleNamespace(slots_for=lambda kind: records, parts=32, plans=plans)
    unused: Any = None
    tolerance, queries = Tolerance(ALLOWED, 0.0, 0.95, None), np.zeros((1, d), np.float32)
    estimator = Estimator(request, source, tolerance, sampler, unused, np.ones(1), queries, unused, records)
    for draws in needed:
        bar = ALLOWED * np.sqrt(np.array([draws / MARGIN / FIRST]))
        estimator.plan(Round(np.arange(1), FIRST), bar, np.array([ALLOWED]))
    return plans[estimator.kind].budget


def test_a_first_round_draws_what_earlier_queries_needed() -> None:
    assert planned([3000.0] * 15) == FIRST  # too few to plan by
    assert planned([1900.0] * 16) == 4 * FIRST
    assert planned([1900.0] * 12 + [2100.0] * 4) == int(2**2.25 * FIRST)  # a second round would cost more


def test_a_first_round_stays_small_where_few_queries_need_more() -> None:
    assert planned([300.0] * 16) == FIRST
    assert planned([100.0] * 15 + [8000.0]) == FIRST


def test_a_first_round_changes_only_for_a_clear_gain() -> None:
    assert (
        planned([1900.0] * 16 + [990.0] * 64, records=3 * 10**6) == 4 * FIRST
    )  # half of the draws would cost 8 % less


def test_a_first_round_is_planned_by_the_latest_queries() -> None:
    assert planned([3000.0] * 64 + [300.0] * 64) == FIRST


def test_no_first_round_is_planned_that_costs_more_than_a_pass() -> None:
    assert planned([7900.0] * 16, records=100_000) == FIRST
    assert planned([7900.0] * 16) == 16 * FIRST


def test_queries_that_need_more_draws_are_answered_in_one_round_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("softdb.kernels._native")
    random = np.random.default_rng(0)
    keys = random.standard_normal((20_000, 16)).astype(np.float32)
    monkeypatch.setattr(rounds, "pass_cost", lambda *_: np.inf)
    budgets, drawn = list[int](), Estimator.sample

    def noted(self: Estimator, task: Round) -> Any:
        budgets.append(task.budget)
        return drawn(self, task)

    monkeypatch.setattr(Estimator, "sample", noted)
    with holding(keys, random.standard_normal((20_000, 4)) + 2) as db:
        db.build_index("flat")
        for query in torch.from_numpy(keys[:40]):
            budgets.clear()
            assert db.attend(query, temperature=4.0, rtol=0.02).met.all()
    assert len(budgets) == 1
    assert budgets[0] > FIRST


def partial(numbers: list[float], width: int) -> Estimated:
    """The answer to some queries: each column repeats the query's number."""
    column = torch.tensor(numbers)
    wide = column[:, None].repeat(1, width)
    return Estimated(
        column[:, None].repeat(1, 3),
        column,
        column,
        column,
        column,
        column > 0,
        wide.long(),
        wide,
        wide,
        column.long(),
        column,
    )


def test_answers_of_rounds_are_joined_in_the_order_of_the_queries() -> None:
    first, second = partial([3.0, 9.0, 1.0], 4), partial([2.0, 4.0], 2)  # 9 was not met in the first round
    parts = [(np.array([2, 0]), np.array([0, 2]), first), (np.array([1, 3]), np.arange(2), second)]
    answer = Estimated.joined(4, parts)
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for column in (
        answer.output[:, 2],
        answer.lse,
        answer.bar,
        answer.positions[:, 0],
        answer.scores[:, 1],
        answer.drawn,
    ):
        assert torch.equal(column.float(), expected)
    assert answer.positions[1].tolist() == [2, 2, -1, -1]
    assert answer.scores[3].tolist() == [4, 4, -math.inf, -math.inf]
    assert answer.weights[1].tolist() == [2, 2, 0, 0]
    assert answer.met.all()


def test_joined_answers_keep_the_graph() -> None:
    output = torch.ones(1, 3, requires_grad=True)
    graphed = partial([1.0], 1)._replace(output=output)
    answer = Estimated.joined(
        2, [(np.array([1]), np.arange(1), graphed), (np.array([0]), np.arange(1), partial([2.0], 1))]
    )
    answer.output[1].sum().backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad.tolist() == [[1.0, 1.0, 1.0]]
