"""Soft queries through the database, against loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb import scores


def reference(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, temperature: float, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output (q, v) and lse (q,) of dot-product attention, one query and one record at a time."""
    outputs, lses = [], []
    for i, query in enumerate(queries.astype(np.float64)):
        rows = [j for j in range(len(keys)) if allowed is None or allowed[i, j]]
        logits = [float(query @ keys[j].astype(np.float64)) / temperature for j in rows]
        if not rows:
            outputs.append(np.zeros(values.shape[1]))
            lses.append(-np.inf)
            continue
        top = max(logits)
        parts = [np.exp(logit - top) for logit in logits]
        outputs.append(sum(p * values[j].astype(np.float64) for p, j in zip(parts, rows, strict=True)) / sum(parts))
        lses.append(np.log(sum(parts)) + top)
    return np.array(outputs), np.array(lses)


@pytest.fixture
def world(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys = rng.standard_normal((300, 6)).astype(np.float32)
    keys[7] = keys[8]
    keys[9] = 0
    return keys, rng.standard_normal((300, 4)).astype(np.float32), rng.standard_normal((5, 6)).astype(np.float32)


def halves(keys: np.ndarray, values: np.ndarray | None, **words: Any) -> softdb.SoftDB:
    return holding(keys, values, [{"even": i % 2 == 0} for i in range(len(keys))], **words)


def close(pooled: softdb.Pooled, output: np.ndarray, lse: np.ndarray, values: np.ndarray) -> None:
    np.testing.assert_allclose(pooled.output.detach().numpy(), output, atol=1e-5 * np.abs(values).max(), rtol=0)
    np.testing.assert_allclose(pooled.lse.detach().numpy(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_over_everything(
    world: tuple[np.ndarray, np.ndarray, np.ndarray], temperature: float, dtype: Any
) -> None:
    keys, values, queries = world
    keys, values = keys.astype(dtype), values.astype(dtype)
    pooled = halves(keys, values, dtype=dtype).attend(queries, temperature=temperature)
    close(pooled, *reference(queries, keys, values, temperature), values)
    assert pooled.exact.tolist() == [True] * 5
    assert pooled.missed_mass.tolist() == [0.0] * 5
    assert pooled.n_pooled.tolist() == [300] * 5


def test_dead_keys_never_reach_the_score() -> None:
    with holding([[1, 0, 0], [0, 2, 0], [1, 1, 1]]) as few:
        actual = few.attend(torch.ones(1, 3), k=5, score=lambda q, k: q @ (k / k.norm(dim=-1, keepdim=True)).mT)
        assert actual.n_pooled.item() == 3
        assert actual.lse.isfinite().all()


def test_autocast_around_changes_no_answer(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    with holding(keys, values) as db:
        plain, effective = db.attend(queries), db.attend(queries).explain(2)[0].effective
        with torch.autocast("cpu", torch.bfloat16):
            cast = db.attend(queries)
            assert torch.equal(cast.output, plain.output)
            assert cast.explain(2)[0].effective == effective


def test_the_key_serves_where_there_is_no_value(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, _, queries = world
    db = halves(keys, None)
    close(db.attend(queries), *reference(queries, keys, keys, 1.0), keys)
    close(db.attend(queries, k=300), *reference(queries, keys, keys, 1.0), keys)


def test_deleted_records_have_no_weight(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    db.delete(list(range(0, 300, 3)))
    kept = np.ones((5, 300), bool)
    kept[:, ::3] = False
    expected = reference(queries, keys, values, 1.0, kept)
    close(db.attend(queries), *expected, values)
    close(db.attend(queries, k=200), *expected, values)


@pytest.mark.parametrize("k", [None, 300])
def test_filters_and_masks(
    world: tuple[np.ndarray, np.ndarray, np.ndarray], k: int | None, rng: np.random.Generator
) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    even = np.broadcast_to(np.arange(300) % 2 == 0, (5, 300))
    mask = rng.random((5, 300)) < 0.3
    mask[2] = False
    for words, allowed in [
        ({"where": {"even": True}}, even),
        ({"mask": mask}, mask),
        ({"mask": torch.from_numpy(mask[0])}, np.broadcast_to(mask[0], (5, 300))),
        ({"mask": mask, "where": {"even": True}}, mask & even),
        ({"where": {"even": None}}, np.zeros((5, 300), bool)),
    ]:
        pooled = db.attend(queries, k=k, **words)  # type: ignore[arg-type]
        close(pooled, *reference(queries, keys, values, 1.0, allowed), values)
        assert pooled.n_pooled.tolist() == allowed.sum(1).tolist()
        assert bool(pooled.exact.all())


def test_a_mask_counts_live_records_in_row_order(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    db.delete([0, 5])
    mask = np.zeros((5, 298), bool)
    mask[:, [0, 4]] = True
    allowed = np.zeros((5, 300), bool)
    allowed[:, [1, 6]] = True
    for k in (None, 2):
        close(db.attend(queries, mask=mask, k=k), *reference(queries, keys, values, 1.0, allowed), values)


def test_truncated_attention_weighs_the_nearest(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    pooled = halves(keys, values).attend(queries, k=20, temperature=0.5)
    order = np.argsort(-(queries.astype(np.float64) @ keys.T.astype(np.float64)), axis=1)[:, :20]
    allowed = np.zeros((5, 300), bool)
    np.put_along_axis(allowed, order, True, axis=1)
    close(pooled, *reference(queries, keys, values, 0.5, allowed), values)
    assert pooled.hits is not None
    assert pooled.weights is not None
    assert pooled.weights.shape == pooled.hits.rows.shape == (5, 20)
    torch.testing.assert_close(pooled.weights.sum(1), torch.ones(5))
    assert not pooled.exact.any()
    np.testing.assert_array_equal(pooled.hits.rows.numpy(), order)


def test_the_missed_mass_is_estimated(rng: np.random.Generator) -> None:
    """Over many databases the estimate is right on average, and each is near the truth when the weights are flat."""
    errors = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        keys = random.standard_normal((3000, 8)).astype(np.float32) / 2
        queries = random.standard_normal((3, 8)).astype(np.float32)
        db = holding(keys)
        db.delete(list(range(0, 3000, 4)))
        truncated, whole = db.attend(queries, k=50), db.attend(queries)
        truth = 1 - (truncated.lse - whole.lse).exp()
        assert bool((truth > 0.3).all())
        errors.append((truncated.missed_mass - truth).numpy())
    assert np.abs(errors).max() < 0.1
    assert abs(np.mean(errors)) < 0.01


def test_labels_give_a_distribution(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((200, 3)).astype(np.float32)
    labels = rng.integers(0, 5, 200)
    queries = rng.standard_normal((4, 3)).astype(np.float32)
    with softdb.open(None, dim=3, num_classes=5) as db:
        empty = db.attend(queries)
        assert empty.output.tolist() == [[0.0] * 5] * 4
        db.insert(list(range(200)), keys, labels)
        expected = reference(queries, keys, np.eye(5)[labels], 1.0)
        for k in (None, 200):
            pooled = db.attend(queries, k=k)
            close(pooled, *expected, np.ones(1))
            torch.testing.assert_close(pooled.output.sum(1), torch.ones(4))


def test_temperature_leads_from_look_up_to_average(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    nearest = db.search(queries, k=1).rows[:, 0].numpy()
    np.testing.assert_allclose(db.attend(queries, temperature=1e-6).output.numpy(), values[nearest], atol=1e-5)
    mean = np.broadcast_to(values.mean(0), (5, 4))
    np.testing.assert_allclose(db.attend(queries, temperature=1e9).output.numpy(), mean, atol=1e-5)


@pytest.mark.parametrize("k", [None, 7])
@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_gradients_to_the_query(k: int | None, metric: Any, rng: np.random.Generator) -> None:
    keys, values = rng.standard_normal((40, 3)), rng.standard_normal((40, 2))
    db = halves(keys, values, metric=metric)
    queries = torch.from_numpy(rng.standard_normal((3, 3))).requires_grad_()

    def answer(queries: Tensor) -> tuple[Tensor, Tensor]:
        pooled = db.attend(queries, temperature=0.7, k=k)
        return pooled.output, pooled.lse

    assert torch.autograd.gradcheck(answer, (queries,))


@pytest.mark.parametrize("k", [None, 3])
def test_no_records_give_zeros(k: int | None) -> None:
    with softdb.open(None, dim=2, value_dim=3) as db:
        queries = torch.ones(2, 2, requires_grad=True)
        for _ in range(2):
            pooled = db.attend(queries, k=k, where=None if len(db) == 0 else {"x": 1})
            assert pooled.output.tolist() == [[0.0] * 3] * 2
            assert pooled.lse.tolist() == [-np.inf] * 2
            (pooled.output.sum() + pooled.lse.masked_fill(pooled.lse == -np.inf, 0).sum()).backward()  # type: ignore[no-untyped-call]
            assert queries.grad is not None
            assert queries.grad.tolist() == [[0.0, 0.0]] * 2
            db.upsert(["a"], [[1, 1]], [[1, 2, 3]])


def test_other_scores(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    expected = reference(queries / np.sqrt(6), keys, values, 1.0)
    close(db.attend(queries, score=scores.ScaledDot()), *expected, values)
    close(db.attend(queries, score=scores.ScaledDot(), k=300), *expected, values)
    close(db.attend(queries, score=lambda q, k: q @ k.T / 6**0.5), *expected, values)
    nearest = db.attend(queries, score=scores.NegativeL2(), k=1).hits
    assert nearest is not None
    distances = ((queries[:, None].astype(np.float64) - keys[None]) ** 2).sum(-1)
    np.testing.assert_array_equal(nearest.rows[:, 0].numpy(), distances.argmin(1))


def test_float64_queries_give_float64_answers(world: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    keys, values, queries = world
    db = halves(keys, values)
    pooled = db.attend(queries.astype(np.float64))
    assert pooled.output.dtype is pooled.lse.dtype is torch.float64
    output, _ = reference(queries, keys, values, 1.0)
    np.testing.assert_allclose(pooled.output.numpy(), output, atol=1e-12)


def test_a_projection_learns_through_the_database(rng: np.random.Generator) -> None:
    keys = torch.nn.functional.normalize(torch.from_numpy(rng.standard_normal((200, 8)).astype(np.float32)), dim=1)
    turned = keys @ torch.linalg.qr(torch.from_numpy(rng.standard_normal((8, 8)).astype(np.float32)))[0]
    db = halves(keys.numpy(), None)
    project = torch.nn.Linear(8, 8, bias=False)
    optimiser = torch.optim.Adam(project.parameters(), lr=0.03)

    def accuracy() -> float:
        return float((db.search(project(turned), k=1).rows[:, 0] == torch.arange(200)).float().mean())

    before = accuracy()
    for _ in range(120):
        queries = project(turned)
        loss = (db.attend(queries, temperature=0.1).lse - (queries * keys).sum(1) / 0.1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert before < 0.1
    assert accuracy() > 0.95
