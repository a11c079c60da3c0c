"""Losses of views and memories."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb import nn
from softdb.errors import BadInput, StaleRead
from softdb.nn import info_nce, label_loss, pooled_loss, retrieval_loss


def small() -> tuple[softdb.SoftDB, Tensor, Tensor, list[list[int]]]:
    """A database with deleted records, its keys by id, queries and positives."""
    draws = torch.Generator().manual_seed(5)
    keys = torch.randn(40, 4, generator=draws)
    db = holding(keys, [i % 3 for i in range(40)], num_classes=3)
    db.delete([3, 17])
    return db, keys, torch.randn(5, 4, generator=draws), [[0], [1, 2], [39, 5, 7], [8], [2]]


def expected(scores: Tensor, positives: list[list[int]], taking_part: Tensor) -> Tensor:  # (q, 40), (q, 40) -> ()
    wins = torch.zeros_like(taking_part)
    for i, positive in enumerate(positives):
        wins[i, positive] = True
    sides = (scores.masked_fill(~side, -torch.inf).logsumexp(1) for side in (taking_part, wins))
    whole, found = sides
    return (whole - found).mean()


def alive(queries: Tensor) -> Tensor:
    live = torch.ones(len(queries), 40, dtype=torch.bool)
    live[:, [3, 17]] = False
    return live


@pytest.mark.parametrize("k", [None, 3, 100])
def test_the_loss_of_a_view_is_that_of_its_encoded_keys(k: int | None) -> None:
    db, keys, queries, positives = small()
    encoder = torch.nn.Linear(4, 4)
    asked = queries.clone().requires_grad_()
    loss = retrieval_loss(nn.View(db, encoder, metric="dot"), asked, positives, temperature=0.5, k=k)
    leaf = queries.clone().requires_grad_()
    scores, live = leaf @ encoder(keys).T / 0.5, alive(queries)
    if k == 3:
        near = torch.zeros_like(live)
        near.scatter_(1, scores.detach().masked_fill(~live, -torch.inf).topk(3).indices, True)
        for i, positive in enumerate(positives):
            near[i, positive] = True
        live = near
    truth = expected(scores, positives, live)
    torch.testing.assert_close(loss, truth)
    parameters = [encoder.weight, encoder.bias]
    for actual, right in zip(
        torch.autograd.grad(loss, [asked, *parameters]), torch.autograd.grad(truth, [leaf, *parameters]), strict=True
    ):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_memory_is_over_its_nearest_and_the_positives() -> None:
    db, keys, queries, positives = small()
    memory = nn.Memory(db, k=6, temperature=0.5)
    assert memory.keys is not None
    memory.keys.data += 0.1
    asked = queries.clone().requires_grad_()
    places = {int(i): place for place, i in enumerate(i for i in range(40) if i not in (3, 17))}
    table = (keys + 0.1).requires_grad_()
    leaf = queries.clone().requires_grad_()
    scores, live = leaf @ table.T / 0.5, alive(queries)
    near = torch.zeros_like(live).scatter_(1, scores.detach().masked_fill(~live, -torch.inf).topk(6).indices, True)
    for i, positive in enumerate(positives):
        near[i, positive] = True
    truth = expected(scores, positives, near)
    loss = retrieval_loss(memory, asked, positives)
    torch.testing.assert_close(loss, truth)
    truth.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(asked.grad, leaf.grad, rtol=1e-4, atol=1e-5)
    assert memory.keys.grad is not None
    assert memory.keys.grad.is_sparse
    assert table.grad is not None
    torch.testing.assert_close(memory.keys.grad.to_dense(), table.grad[list(places)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("negatives", [0, 4])
def test_info_nce_of_views_and_memories_is_that_of_the_database(in_batch: bool, negatives: int) -> None:
    if not in_batch and not negatives:
        pytest.skip("nothing to tell apart")
    db, _, queries, positives = small()
    words: dict[str, Any] = {"in_batch": in_batch, "negatives": negatives, "temperature": 0.3, "skip": 1}
    right = info_nce(db, queries, positives, **words)
    identity = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(identity.weight)
    for records in (nn.View(db, identity, metric="dot"), nn.Memory(db)):
        actual = info_nce(records, queries, positives, **words)
        torch.testing.assert_close(actual, right)
        actual.backward()  # type: ignore[no-untyped-call]
        assert any(
            parameter.grad is not None and bool(parameter.grad.to_dense().any()) for parameter in records.parameters()
        )


def test_losses_of_answers_take_views_and_memories() -> None:
    db, _, queries, _ = small()
    labels, targets = torch.tensor([0, 1, 2, 0, 1]), torch.rand(5, 3)
    identity = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(identity.weight)
    view, memory = nn.View(db, identity, metric="dot"), nn.Memory(db, values=False, k=38)
    for records in (view, memory):
        torch.testing.assert_close(label_loss(records, queries, labels), label_loss(db, queries, labels))
        torch.testing.assert_close(pooled_loss(records, queries, targets), pooled_loss(db, queries, targets))
    cold = pooled_loss(view, queries, targets, temperature=0.1, k=5)
    torch.testing.assert_close(cold, pooled_loss(db, queries, targets, temperature=0.1, k=5))


def test_arguments_that_views_and_memories_lack_are_refused() -> None:
    db, _, queries, positives = small()
    view, memory = nn.View(db, torch.nn.Linear(4, 4), metric="dot"), nn.Memory(db)
    with pytest.raises(BadInput, match="a Memory takes no rtol; leave it out, or pass its database"):
        retrieval_loss(memory, queries, positives, rtol=0.1)
    with pytest.raises(BadInput, match="a Memory takes no where"):
        info_nce(memory, queries, positives, where={"a": 1})
    with pytest.raises(BadInput, match="a View takes no weights and no mask"):
        pooled_loss(view, queries, torch.rand(5, 3), weights="sparsemax", mask=[True] * 38, rtol=0.1)
    with pytest.raises(BadInput, match="a Memory takes no temperature"):
        label_loss(memory, queries, [0] * 5, temperature=0.1)
    with pytest.raises(BadInput, match="db is 3; expected an open softdb database"):
        retrieval_loss(3, queries, positives)  # type: ignore[arg-type]
    db.insert([100], torch.ones(1, 4), [0])
    with pytest.raises(StaleRead, match=r"positive 100 .* reload\(\) the memory"):
        retrieval_loss(memory, queries, [100] * 5)
