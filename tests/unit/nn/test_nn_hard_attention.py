"""Hard attention: draws, REINFORCE with its baselines, the straight-through estimator, and learning by each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor
from worlds import holding

import softdb
import softdb.nn.hard
from softdb.errors import BadInput, Closed
from softdb.nn import MovingBaseline, hard_attention, leave_one_out, reinforce, straight_through
from softdb.scores import Gaussian

N, D, V, Q = 12, 4, 3, 2
TEXT: Any = "db"


def filled(**schema: Any) -> softdb.SoftDB:
    """Open a database of awkward records, some of them deleted again: ids 0 … N - 1 stay."""
    db = worlds.filled(N + 2, D, ids=[*range(N), -1, -2], **schema)
    db.delete([-1, -2])
    return db


def asking(q: int = Q, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(q, D, dtype=dtype, generator=torch.Generator().manual_seed(5)).requires_grad_()


def columns(db: softdb.SoftDB) -> tuple[Tensor, Tensor]:
    records = db.get(list(range(N)))
    values = records.keys if records.values is None else records.values
    if not values.is_floating_point():
        values = torch.eye(3)[values]
    return records.keys.double(), values.double()


def chances(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """softmax(q·k / T), one number at a time, (q, n)."""
    rows = []
    for q in queries.detach():
        parts = [math.exp(sum(a * b for a, b in zip(q.tolist(), k.tolist(), strict=True)) / temperature) for k in keys]
        rows.append([part / sum(parts) for part in parts])
    return torch.tensor(rows, dtype=torch.float64)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def frequencies_fit(found: Tensor, expected: Tensor) -> None:
    """Asserts that draws (q, n) of numbers 0 … m - 1 come with the chances (q, m)."""
    for mine, p in zip(found, expected, strict=True):
        counts = torch.bincount(mine, minlength=len(p)).double()
        deviation = (len(mine) * p * (1 - p)).sqrt()
        assert bool(((counts - len(mine) * p).abs() < 4.5 * deviation + 1e-9).all())


def test_the_comparer_refuses_other_chances() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    draws = torch.multinomial(p, 10_000, replacement=True, generator=seeded())
    frequencies_fit(draws, p)
    with pytest.raises(AssertionError, match="assert"):
        frequencies_fit(draws, p[:, [0, 2, 1]])


# -- hard_attention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{"value_dim": V}, {"num_classes": 3}, {"metric": "dot"}])
def test_drawn_records_their_values_and_log_probabilities(words: dict[str, Any]) -> None:
    db = filled(**words)
    keys, values = columns(db)
    queries = asking()
    actual = hard_attention(db, queries, 20_000, temperature=0.7, generator=seeded())
    ids = torch.tensor(actual.hits.ids)
    expected = chances(queries, keys, 0.7)
    frequencies_fit(ids, expected)
    torch.testing.assert_close(actual.values, values[ids])
    torch.testing.assert_close(actual.log_prob, expected.log().gather(1, ids), atol=1e-9, rtol=1e-9)
    assert not actual.values.requires_grad
    assert hard_attention(db, queries.float()).values.shape == (Q, 1, values.shape[1])


def test_the_gradient_of_log_probabilities() -> None:
    db = filled()
    assert torch.autograd.gradcheck(
        lambda q: hard_attention(db, q, 5, temperature=0.7, generator=seeded()).log_prob, asking()
    )


@pytest.mark.parametrize("words", [{"value_dim": V}, {"num_classes": 3}])
@pytest.mark.parametrize("how", ["filter", "empty"])
def test_draws_from_no_records_are_zeros(words: dict[str, Any], how: str) -> None:
    db = filled(**words) if how == "filter" else softdb.open(None, dim=D, **words)
    where = {"odd": 3} if how == "filter" else None
    queries = asking()
    actual = hard_attention(db, queries, 2, where=where)
    assert torch.equal(actual.values, torch.zeros(Q, 2, 3, dtype=torch.float64))
    assert actual.hits.ids == [[]] * Q
    loss = reinforce(torch.ones(Q, 2), actual.log_prob)
    assert loss.item() == 0
    for k in (None, 4):
        output = straight_through(db, queries, k=k, where=where)
        assert torch.equal(output, torch.zeros(Q, 3, dtype=torch.float64))
        loss = loss + output.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert torch.equal(queries.grad, torch.zeros_like(queries))


# -- reinforce ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", [None, 0.7, "leave one out", "expected"])
def test_reinforce_is_the_gradient_of_the_expected_reward_on_average(baseline: Any) -> None:
    db = filled()
    keys, values = columns(db)
    queries = asking()
    rewards = values[:, 0] + 2  # (n,), of each record
    scores = queries @ keys.T
    expected_reward = (scores.softmax(1) * rewards).sum(1).mean()
    true = torch.autograd.grad(expected_reward, queries)[0]
    grads = []
    for seed in range(60):
        actual = hard_attention(db, queries, 100, generator=seeded(seed))
        reward = actual.values[..., 0] + 2
        less = leave_one_out(reward) if baseline == "leave one out" else baseline
        less = expected_reward if baseline == "expected" else less
        grads.append(-torch.autograd.grad(reinforce(reward, actual.log_prob, less), queries, retain_graph=True)[0])
    many = torch.stack(grads)
    spread = many.std(0) / len(many) ** 0.5
    assert float(((many.mean(0) - true).abs() / spread).max()) < 4
    assert float(true.abs().max()) > 10 * float(spread.max())  # the test sees a wrong sign or size


def test_reinforce_by_its_equation() -> None:
    reward = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    log_prob = torch.tensor([[-1.0, -2.0], [-0.5, -torch.inf]], requires_grad=True)
    baseline = torch.tensor([[0.5], [1.0]], requires_grad=True)
    loss = reinforce(reward, log_prob, baseline)
    assert loss.item() == pytest.approx(-(0.5 * -1 + 1.5 * -2 + 2 * -0.5) / 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, torch.tensor([[-0.5, -1.5], [-2.0, 0.0]]) / 4)
    assert reward.grad is None
    assert baseline.grad is None


def test_the_mean_of_the_other_draws() -> None:
    actual = leave_one_out(torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]]))
    torch.testing.assert_close(actual, torch.tensor([[4.0, 3.5, 1.5], [1.5, 1.5, 0.0]]))


def test_the_moving_mean_of_earlier_rewards() -> None:
    baseline = MovingBaseline(0.8)
    rewards = [2.0, 4.0, -1.0, 3.0]
    for t, reward in enumerate(rewards):
        weights = [0.8 ** (t - 1 - i) for i in range(t)]
        expected = sum(w * r for w, r in zip(weights, rewards, strict=False)) / sum(weights) if t else 0.0
        assert baseline(torch.tensor([[reward - 1, reward + 1]])).item() == pytest.approx(expected)
    frozen = baseline.eval()(torch.tensor([[100.0]]))
    assert torch.equal(frozen, baseline(torch.tensor([[100.0]])))
    twin = MovingBaseline(0.8)
    twin.load_state_dict(baseline.state_dict())
    assert torch.equal(twin(torch.zeros(1, 1)), frozen)
    assert MovingBaseline(0.0)(torch.ones(1, 1)).item() == 0
    assert "momentum=0.8" in repr(twin)


# -- straight_through --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, N, 5])
@pytest.mark.parametrize("words", [{"value_dim": V}, {"num_classes": 3}])
def test_forward_is_the_value_of_one_drawn_record(k: int | None, words: dict[str, Any]) -> None:
    db = filled(**words)
    keys, values = columns(db)
    queries = asking(1)
    many = straight_through(db, queries.expand(20_000, D), temperature=0.7, relaxation=0.3, k=k, generator=seeded())
    expected = chances(queries, keys, 0.7)[0]
    if k is not None:
        expected[expected < expected.sort(descending=True).values[k - 1]] = 0
        expected = expected / expected.sum()
    distinct, place = torch.unique(values, dim=0, return_inverse=True)
    which = (many.detach().unsqueeze(1) == distinct).all(2).nonzero()
    assert len(which) == len(many)  # each is exactly one stored value
    frequencies_fit(
        which[:, 1].unsqueeze(0), torch.zeros(1, len(distinct)).double().index_add(1, place, expected[None])
    )


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("words", [{"value_dim": V}, {"num_classes": 3}])
def test_backward_is_the_softmax_of_the_perturbed_scores(k: int | None, words: dict[str, Any]) -> None:
    db = filled(**words)
    keys, values = columns(db)
    queries, upstream = asking(), torch.randn(Q, 3, dtype=torch.float64, generator=seeded(3))
    temperature, relaxation = 0.7, 0.4
    output = straight_through(
        db, queries, temperature=temperature, relaxation=relaxation, k=k, generator=seeded(9)
    )  # fmt: skip
    actual = torch.autograd.grad(output, queries, upstream)[0]

    which = torch.arange(N).expand(Q, N) if k is None else (queries @ keys.T).topk(k).indices
    noise = -torch.empty(Q, k or N, dtype=torch.float64).exponential_(generator=seeded(9)).log()
    perturbed = (queries @ keys.T).gather(1, which) / temperature + noise
    soft = torch.einsum("qk,qkv->qv", (perturbed / relaxation).softmax(1), values[which])
    torch.testing.assert_close(actual, torch.autograd.grad(soft, queries, upstream)[0])
    winners = which.gather(1, perturbed.argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(output.detach(), values[winners])


@pytest.mark.parametrize("k", [None, 5])
def test_straight_through_at_extremes(k: int | None) -> None:
    db = filled()
    keys, values = columns(db)
    queries = asking()
    cold = straight_through(db, queries, temperature=1e-30, k=k)
    nearest = (queries @ keys.T).argmax(1)
    torch.testing.assert_close(cold.detach(), values[nearest])
    cold.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert bool(queries.grad.isfinite().all())
    odd = {tuple(values[i].tolist()) for i in range(1, N, 2)}
    filtered = straight_through(db, queries.expand(2, D), where={"odd": True}, k=k)
    assert {tuple(one) for one in filtered.tolist()} <= odd
    assert straight_through(db, queries.float(), score=Gaussian(1.0), k=k).dtype is torch.float32


def test_many_records_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    db = filled()
    queries = asking(7)
    whole = straight_through(db, queries, generator=seeded(2))
    grad = torch.autograd.grad(whole.square().sum(), queries)[0]
    monkeypatch.setattr("softdb.attend.blocks.BLOCK_ROWS", 5)
    monkeypatch.setattr("softdb.attend.blocks.TILE", 10)
    parts = straight_through(db, queries, generator=seeded(2))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts.square().sum(), queries)[0], grad)


# -- learning ----------------------------------------------------------------------------------------------------------


def _by_reinforcement(db: softdb.SoftDB, queries: Tensor, wanted: Tensor, generator: torch.Generator) -> Tensor:
    found = hard_attention(db, queries, 4, temperature=0.5, generator=generator)
    reward = (found.values * wanted.unsqueeze(1)).sum(2)
    return reinforce(reward, found.log_prob, leave_one_out(reward))


def _straight(k: int | None) -> Callable[[softdb.SoftDB, Tensor, Tensor, torch.Generator], Tensor]:
    def loss(db: softdb.SoftDB, queries: Tensor, wanted: Tensor, generator: torch.Generator) -> Tensor:
        return (
            -(straight_through(db, queries, temperature=0.5, relaxation=2.0, k=k, generator=generator) * wanted)
            .sum(1)
            .mean()
        )

    return loss


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [_by_reinforcement, _straight(None), _straight(4)])
def test_a_projection_learns_to_draw_the_record_that_is_rewarded(loss: Any) -> None:
    random = seeded(1)
    keys = torch.nn.functional.normalize(torch.randn(6, 6, generator=random), dim=1)
    db = holding(keys, torch.arange(6), num_classes=6)
    asked = torch.randn(6, 6, generator=random)  # what stands for record i, in a space of its own
    projection = torch.nn.Linear(6, 6, bias=False)
    torch.nn.init.normal_(projection.weight, std=0.3, generator=random)

    def reward() -> float:
        with torch.no_grad():
            return float(hard_attention(db, projection(asked), 200, temperature=0.5, generator=seeded(0)).values.mean(1)
                         .diagonal().mean())  # fmt: skip

    before = reward()
    assert before < 0.3
    optimizer = torch.optim.Adam(projection.parameters(), lr=0.05)
    for _ in range(250):
        optimizer.zero_grad()
        loss(db, projection(asked), torch.eye(6), random).backward()
        optimizer.step()
    assert reward() > 0.75


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda db, q: hard_attention(db, q, 0), "n is 0; expected a whole number"),
        (lambda db, q: hard_attention(TEXT, q), "db is 'db'; expected an open"),
        (lambda db, q: hard_attention(db, q[:, :2]), "queries are 2 wide"),
        (lambda db, q: straight_through(db, q, k=0), "k is 0; expected"),
        (lambda db, q: straight_through(db, q, relaxation=0), "relaxation is 0; expected"),
        (lambda db, q: straight_through(db, q, temperature=-1), "temperature is -1; expected"),
        (lambda *_: reinforce(torch.ones(2, 3), torch.ones(3, 2)), r"\(2, 3\) and log_prob \(3, 2\); give one reward"),
        (lambda *_: reinforce([1.0], torch.ones(1, 1)), r"reward is \[1.0\]; expected a tensor"),  # type: ignore[arg-type]
        (
            lambda *_: reinforce(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)),
            r"baseline has shape \(2,\) and reward \(2, 3\); give one number",
        ),
        (lambda *_: reinforce(torch.ones(1, 3), torch.ones(1, 3), torch.ones(2, 3)), r"baseline has shape \(2, 3\)"),
        (lambda *_: leave_one_out(torch.ones(2, 1)), r"shape \(2, 1\); expected \(q, n\) with n of 2 or more"),
        (lambda *_: MovingBaseline(1.0), "momentum is 1; expected a share below 1"),
        (lambda *_: MovingBaseline(-0.1), "momentum is -0.1; expected a number from 0 to 1"),
        (lambda *_: MovingBaseline()(torch.tensor([[torch.nan]])), "reward holds NaN"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call(filled(), asking())


def test_a_closed_database_is_refused() -> None:
    db = filled()
    db.close()
    for call in (hard_attention, straight_through):
        with pytest.raises(Closed, match="closed"):
            call(db, asking())


def test_a_baseline_of_each_query_stands_in_a_column() -> None:
    reward, log_prob = torch.arange(9.0).reshape(3, 3), torch.full((3, 3), -1.0, dtype=torch.float64)
    column = torch.tensor([[1.0], [2.0], [4.0]])
    expected = float((reward - column).mean())
    assert float(reinforce(reward, log_prob, column)) == pytest.approx(expected)
    assert float(reinforce(reward, log_prob, column.expand(3, 3))) == pytest.approx(expected)
    with pytest.raises(BadInput, match=r"baseline has shape \(3,\) and reward \(3, 3\); .*each query \(3, 1\)"):
        reinforce(reward, log_prob, column[:, 0])


@pytest.mark.parametrize("reward", [[1.0], torch.ones(2, 2, dtype=torch.int64), None])
def test_a_moving_baseline_wants_a_floating_tensor(reward: Any) -> None:
    with pytest.raises(BadInput, match=r"reward is .*; expected a floating tensor \(q, n\)"):
        MovingBaseline()(reward)
