"""softdb.nn.View with its encoder on a device: encodings stay there, answers lie where the queries lie."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from doubles.pretended import Pretended
from torch import Tensor
from worlds import V, filled

import softdb
from softdb.nn import View, pooled_loss, retrieval_loss

N, D, E = 60, 6, 4


@pytest.fixture
def db() -> softdb.SoftDB:
    torch.manual_seed(3)
    return filled(N, D)


def both(db: softdb.SoftDB, device: torch.device, **words: Any) -> tuple[Any, Any]:
    """A view with its encoder on the CPU, and one with it on a device."""
    encoder = torch.nn.Sequential(torch.nn.Linear(D, 8), torch.nn.ReLU(), torch.nn.Linear(8, E))
    return View(db, encoder, **words), View(db, copy.deepcopy(encoder).to(device), **words)


def slopes(view: View, loss: Tensor, *more: Tensor) -> list[Tensor]:
    return [one.cpu() for one in torch.autograd.grad(loss, [*view.parameters(), *more])]


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("how", [{}, {"k": 5}, {"k": 5, "where": {"odd": True}}])
@pytest.mark.parametrize("asked", ["there", "here"])
def test_answers_and_gradients_are_those_of_the_cpu(
    db: softdb.SoftDB, device: torch.device, metric: Any, how: dict[str, Any], asked: str
) -> None:
    views = both(db, device, metric=metric)
    db.delete([3, 5])
    queries, results = torch.randn(7, E), []
    for view in views:
        view.reindex()
    db.upsert(["young"], torch.ones(1, D), torch.ones(1, V), [{"odd": True}])
    for view, where in zip(views, ("cpu", device if asked == "there" else "cpu"), strict=True):
        leaf = queries.clone().to(where).requires_grad_()
        pooled = view.attend(leaf, temperature=0.7, **how)
        hits = view.search(leaf, 4, where=how.get("where"))
        assert pooled.output.device == hits.scores.device == torch.device(where)
        loss = pooled.output.square().sum() + pooled.lse.sum() + hits.scores.sum()
        assert view.measure() == 1.0
        results.append([pooled.output.detach().cpu(), hits.rows.cpu(), *slopes(view, loss, leaf)])
    for result, other in zip(*results, strict=True):
        torch.testing.assert_close(result, other, atol=1e-5, rtol=1e-4)


def test_encodings_stay_on_their_device(db: softdb.SoftDB, pretended: Pretended) -> None:
    view = both(db, pretended.device)[1]
    queries = torch.randn(4, E).to(pretended.device)
    view.search(queries, 3)
    assert not [crossing for crossing in pretended.crossings if crossing.to == "cpu" and crossing.numbers >= N * E]
    assert view.measure() == 1.0


@pytest.mark.parametrize("loss", [retrieval_loss, pooled_loss])
def test_an_encoder_is_trained_on_the_device(db: softdb.SoftDB, device: torch.device, loss: Any) -> None:
    queries = torch.randn(8, E)
    losses: list[list[float]] = []
    for view in both(db, device, reindex=2):
        place = next(view.parameters()).device
        optimiser = torch.optim.SGD(view.parameters(), 0.05)
        right = list(range(8)) if loss is retrieval_loss else torch.ones(8, V, device=place)
        losses.append([])
        for _ in range(4):
            optimiser.zero_grad()
            value = loss(view, queries.to(place), right, k=6)
            value.backward()
            optimiser.step()
            view.step()
            losses[-1].append(float(value.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_view_moves(db: softdb.SoftDB, device: torch.device) -> None:
    view = both(db, device)[0]
    queries = torch.randn(4, E)
    expected = view.attend(queries, k=5).output
    view.to(device)
    for asked in (queries, queries.to(device)):
        torch.testing.assert_close(view.attend(asked, k=5).output.cpu(), expected)
    view.reindex(background=True).result()
    torch.testing.assert_close(view.attend(queries, k=5).output, expected)
    state = view.state_dict()
    view.to("cpu")
    view.load_state_dict(state)
    torch.testing.assert_close(view.attend(queries, k=5).output, expected)
