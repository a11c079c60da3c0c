"""softdb.nn.View: its answers, against plain torch over all encoded keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import D, N, V, filled
from worlds.views import CLASSES, KINDS, WIDE, dense, loops, mlp, move, true_ids

import softdb
from softdb.nn import View
from softdb.scores import Gaussian, General, NegativeL2, ScaledDot

METRICS = ["dot", "cosine", "l2"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def plain(ids: list[list[Any]]) -> list[list[Any]]:
    """Ids with the twin of the first record under its name: which of two rounds up is no matter."""
    return [[0 if one == 1 else one for one in row] for row in ids]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("k", [None, N, 9])
def test_output_and_gradients_are_those_of_all_encoded_keys(metric: str, words: dict[str, Any], k: int | None) -> None:
    db, encoder = filled(**words), mlp()
    view = View(db, encoder, metric=metric, batch_size=7, overfetch=5)  # type: ignore[arg-type]
    view.reindex()
    move(encoder, 0.5)  # the index is wrong now, the answer may not be
    queries = torch.randn(3, WIDE, dtype=torch.float64, requires_grad=True)
    pooled = view.attend(queries, temperature=0.7, k=k)
    expected, lse = dense(db, encoder, metric, queries, 0.7)
    if k == 9:
        expected, lse = _truncated(db, encoder, metric, queries, 0.7, k)
    assert torch.allclose(pooled.output, expected, atol=1e-12)
    assert torch.allclose(pooled.lse, lse, atol=1e-12)
    assert pooled.exact.tolist() == [k != 9] * 3
    wanted = (queries, *encoder.parameters())
    grads = [
        torch.autograd.grad(output.sin().sum() + top.square().sum(), wanted)
        for output, top in ((pooled.output, pooled.lse), (expected, lse))
    ]
    for ours, other in zip(*grads, strict=True):
        assert torch.allclose(ours, other, atol=1e-10)
    assert all(float(grad.abs().max()) > 1e-6 for grad in grads[0])


def _truncated(
    db: softdb.SoftDB, encoder: Callable[[Tensor], Tensor], metric: str, queries: Tensor, temperature: float, k: int
) -> tuple[Tensor, Tensor]:
    """`dense` over each query's k best; of the tied twins the earlier is taken."""
    records = db.get(list(range(len(db))))
    encoded = encoder(records.keys.to(queries.dtype))
    scores = loops(metric, queries, encoded)
    order = scores.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    scores = scores.gather(1, order) / temperature
    values = encoded if records.values is None else records.values
    if not values.is_floating_point():
        values = torch.nn.functional.one_hot(values, CLASSES)
    return torch.einsum("qk,qkv->qv", scores.softmax(1), values.to(queries.dtype)[order]), scores.logsumexp(1)


@pytest.mark.few(1)
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("words", KINDS)
def test_gradients_of_queries_and_encoder_match_finite_differences(k: int | None, words: dict[str, Any]) -> None:
    view = View(filled(9, 2, **words), mlp(2, 2), metric="l2", batch_size=4)
    queries = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*view.named_parameters(), strict=True)

    def ask(asked: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            kept = [parameter.clone() for parameter in parameters]
        stateless = torch.func.functional_call(
            _Asking(view, k), {f"view.{name}": one for name, one in zip(names, given, strict=True)}, (asked,)
        )
        assert all(torch.equal(one, two) for one, two in zip(kept, parameters, strict=True))
        return stateless  # type: ignore[no-any-return]

    given = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)
    assert torch.autograd.gradcheck(ask, (queries, *given), atol=1e-6)


class _Asking(torch.nn.Module):
    def __init__(self, view: View, k: int | None) -> None:
        super().__init__()
        self.view, self.k = view, k

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.view.attend(queries, k=self.k)
        return pooled.output, pooled.lse


def test_second_gradients_pass() -> None:
    view = View(filled(8, 2, value_dim=1), mlp(2, 2), metric="l2", batch_size=3)
    queries = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda q: view.attend(q).output, (queries,), atol=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_search_gives_fresh_scores_in_order_with_gradient(metric: str) -> None:
    view = View(filled(value_dim=None), mlp(), metric=metric)  # type: ignore[arg-type]
    view.reindex()
    move(view.encoder, 1.0)
    queries = torch.randn(4, WIDE, dtype=torch.float64, requires_grad=True)
    hits = view.search(queries, 10)  # 4 · 10 candidates are all
    assert plain(hits.ids) == plain(true_ids(view, queries.detach(), 10, metric))
    assert plain(hits.ids) == plain(view.search(queries, 10, exact=True).ids)
    assert bool((hits.scores.detach().diff(dim=1) <= 0).all())
    encoded = view.encoder(view.db.get([one for row in hits.ids for one in row]).keys.double())
    expected = torch.cat([loops(metric, q[None], e) for q, e in zip(queries, encoded.view(4, 10, -1), strict=True)])
    assert torch.allclose(hits.scores, expected)
    actual = torch.autograd.grad(hits.scores.sum(), tuple(view.parameters()), retain_graph=True)
    for ours, other in zip(actual, torch.autograd.grad(expected.sum(), tuple(view.parameters())), strict=True):
        assert torch.allclose(ours, other, atol=1e-10)


def test_ties_come_by_row() -> None:
    view = View(filled(value_dim=None), lambda keys: keys, metric="l2")
    assert view.search(view.db[0].key, 2).ids == [[0, 1]]
    assert view.search(view.db[0].key, 2, exact=True).ids == [[0, 1]]


@pytest.mark.parametrize(
    "score", [ScaledDot(), NegativeL2(), Gaussian(1.3), General(WIDE, WIDE), lambda q, k: q @ k.mT]
)
@pytest.mark.parametrize("k", [None, 5])
def test_other_scores_use_the_encoded_keys(score: Any, k: int | None) -> None:
    view = View(filled(), mlp(dtype=torch.float32), metric="dot", overfetch=7)
    queries = torch.randn(3, WIDE)
    pooled = view.attend(queries, k=k, score=score)
    twin = softdb.open(None, dim=WIDE, value_dim=V)
    records = view.db.get(list(range(N)))
    twin.insert(records.ids, view.encoder(records.keys).detach(), records.values)
    expected = twin.attend(queries, k=k, score=score)
    assert torch.allclose(pooled.output, expected.output, atol=1e-5)
    assert torch.allclose(pooled.lse, expected.lse, atol=1e-5)
    assert torch.equal(pooled.n_pooled, expected.n_pooled)
    folds = isinstance(score, ScaledDot | General)
    assert pooled.finder == ("all" if k is None else "stale index" if folds else "scan")


def test_parameters_of_a_score_get_gradients() -> None:
    score = Gaussian(1.3, learnable=True)
    view = View(filled(), mlp(), batch_size=6)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    grads = [
        torch.autograd.grad(view.attend(queries, score=score, k=k).output.sum(), list(score.parameters()))[0]
        for k in (None, N)
    ]
    assert torch.allclose(grads[0], grads[1], atol=1e-10)
    assert float(grads[0].abs().max()) > 1e-6


@pytest.mark.parametrize("k", [None, 4])
def test_a_filter_is_respected(k: int | None) -> None:
    view = View(filled(), mlp())
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    odd = view.attend(queries, k=k, where={"odd": True})
    assert odd.n_pooled.tolist() == [N // 2 if k is None else k] * 3
    assert all(one % 2 for row in view.search(queries, 40, where={"odd": True}).ids for one in row)
    # all of the odd ones: the answer of a database that holds nothing else
    rest = View(filled(), view.encoder)
    rest.db.delete(where={"odd": False})
    kept = view.db.get(list(range(1, N, 2)))
    rest.db.update(kept.ids, keys=kept.keys, values=kept.values)
    assert torch.allclose(odd.output, rest.attend(queries, k=k).output)


@pytest.mark.parametrize("k", [None, 3])
def test_no_records_give_zeros_and_no_gradient(k: int | None) -> None:
    db = softdb.open(None, dim=D, value_dim=V)
    view = View(db, mlp())
    queries = torch.randn(2, WIDE, dtype=torch.float64, requires_grad=True)
    pooled = view.attend(queries, k=k)
    assert pooled.output.tolist() == [[0.0] * V] * 2
    assert pooled.lse.tolist() == [-torch.inf] * 2
    assert pooled.exact.tolist() == [True, True]
    torch.autograd.backward(pooled.output.sum())
    assert queries.grad is not None
    assert float(queries.grad.abs().max()) == 0
    assert view.attend(queries[:0], k=k).output.shape == (0, V)


def test_fewer_records_than_k() -> None:
    view = View(filled(3), mlp())
    hits = view.search(torch.randn(2, WIDE), 5)
    assert hits.rows.shape == hits.scores.shape == (2, 3)
    assert bool(hits.live.all())


@pytest.mark.parametrize("k", [None, N])
@pytest.mark.parametrize("words", KINDS)
def test_explanations_name_the_heaviest_records(k: int | None, words: dict[str, Any]) -> None:
    view = View(filled(**words), mlp(), metric="l2", batch_size=8)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    actual = view.attend(queries, temperature=0.3, k=k).explain(4)
    assert plain([one.ids for one in actual]) == plain(true_ids(view, queries, 4))
    encoded = view.encoder(view.db.get(list(range(N))).keys.double())
    weights = (loops("l2", queries, encoded) / 0.3).softmax(1).detach()
    for i, one in enumerate(actual):
        assert one.weights == pytest.approx(weights[i].sort(descending=True).values[:4].tolist())
        assert one.effective == pytest.approx(float(torch.special.entr(weights[i]).sum().exp()))


def test_explanations_show_the_users_own_scores() -> None:
    view = View(filled(), mlp(), metric="l2")
    queries = torch.randn(1, WIDE, dtype=torch.float64)
    shown = [view.attend(queries, k=k, score=Gaussian(0.9)).explain(3)[0].scores for k in (None, N)]
    assert shown[0] == pytest.approx(shown[1])
    assert all(0 < score <= 1 for score in shown[0])


def test_candidates_are_encoded_once_and_only_the_best_with_gradient() -> None:
    seen: list[tuple[int, bool]] = []

    def encoder(keys: Tensor) -> Tensor:
        seen.append((len(keys), torch.is_grad_enabled()))
        return keys * 2

    view = View(filled(200), encoder, overfetch=4)
    view.reindex()
    seen.clear()
    view.attend(torch.randn(8, D), k=5)
    (actual, without), (scored, with_gradient) = seen
    assert not without
    assert with_gradient
    assert actual <= 8 * 20
    assert scored <= 8 * 5
    seen.clear()
    view.attend(view.db[0].key.expand(8, D), k=5)
    assert [count for count, _ in seen] == [20, 5]


def test_memory_of_all_records_is_that_of_a_block() -> None:
    alive: list[int] = []

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(D, WIDE)

        def forward(self, keys: Tensor) -> Tensor:
            alive.append(len(keys))
            return torch.tanh(self.inner(keys))

    view = View(filled(40, value_dim=None), Counting(), batch_size=8)
    alive.clear()
    output = view.attend(torch.randn(2, WIDE)).output
    assert alive == [8] * 5
    torch.autograd.backward(output.sum())
    assert alive == [8] * 10  # computed again, block by block


@pytest.mark.parametrize("k", [None, N])
def test_dropout_acts_on_scores_in_training_and_never_on_finding(k: int | None) -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(D, WIDE), torch.nn.Dropout(0.5)).double()
    view = View(filled(), encoder, metric="l2")
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.reindex()
    assert all(part.training for part in encoder)
    kept = view._stale.now.vectors_at(np.arange(N))
    assert torch.allclose(kept, encoder[0](view.db.get(list(range(N))).keys.double()).float(), atol=1e-6)
    asked = [view.attend(queries, k=k).output for _ in range(2)]
    assert not torch.allclose(asked[0], asked[1])
    torch.autograd.backward(asked[0].sum())  # recomputes with the same random numbers, or raises
    view.eval()
    assert torch.equal(view.attend(queries, k=k).output, view.attend(queries, k=k).output)
