"""Draws over a view use the codes of the indexed vectors and the scores of the current encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from with_kernels import NEEDS_KERNELS
from worlds import holding
from worlds.views import move

import softdb
from softdb.nn import View, label_loss, pooled_loss, retrieval_loss

pytest.importorskip("faiss")
pytestmark = NEEDS_KERNELS

N, D, V, DRAWS, TEMPERATURE = 12_000, 8, 3, 300, 0.5
KINDS: list[dict[str, Any]] = [{"value_dim": V}, {"num_classes": 4}, {}]


def stale_view(shape: dict[str, Any], index: str = "ivf", metric: Any = "l2") -> tuple[View, Tensor]:
    """A view whose stale index is of an encoder that was changed since, and queries."""
    random = torch.Generator().manual_seed(0)
    keys = torch.randn(N, D, generator=random)
    values: Tensor | None = None
    if "value_dim" in shape:
        values = keys[:, :V] + 0.3 * torch.randn(N, V, generator=random)
    elif "num_classes" in shape:
        values = (keys[:, 0] > 0).long() + 2 * (keys[:, 1] > 0)
    db = holding(keys, values, [{"odd": i % 2 == 1} for i in range(N)], **shape)
    torch.manual_seed(0)
    view = View(db, torch.nn.Linear(D, 6), metric=metric, index=index, recall=0.5)
    view.reindex()
    move(view.encoder, 0.1)
    return view, torch.randn(4, 6, generator=random)


def drawn(view: View, queries: Tensor, seed: int = 0, **more: Any) -> softdb.Pooled:
    generator = torch.Generator().manual_seed(seed)
    return view.attend(queries, temperature=TEMPERATURE, max_draws=DRAWS, generator=generator, **more)


@pytest.mark.parametrize("shape", KINDS, ids=["values", "labels", "keys"])
@pytest.mark.parametrize("index", ["ivf", "hnsw"])
@pytest.mark.few(1)
def test_sums_are_unbiased_however_stale_the_index_is(shape: dict[str, Any], index: str) -> None:
    view, queries = stale_view(shape, index)
    with torch.no_grad():
        exact = view.attend(queries, temperature=TEMPERATURE)
        answers = [drawn(view, queries, seed) for seed in range(120)]
    ratios = torch.stack([(answer.lse - exact.lse).exp() for answer in answers])
    numerators = torch.stack([answer.output * (answer.lse - exact.lse).exp().unsqueeze(1) for answer in answers])
    for estimates, truth in ((ratios, torch.ones(4)), (numerators, exact.output)):
        doubt = estimates.std(0) / len(answers) ** 0.5
        assert ((estimates.mean(0) - truth).abs() <= 4 * doubt + 1e-5).all()
    assert (ratios.std(0) < 0.4).all(), "or that says nothing"
    assert (ratios.std(0) > 0.001).all()
    spread = torch.stack([(answer.output - exact.output).square().sum(1) for answer in answers]).mean(0).sqrt()
    shown = torch.stack([answer.stderr.square() for answer in answers]).mean(0).sqrt() / spread
    assert ((shown > 0.75) & (shown < 1.2)).all()
    errors = torch.stack([answer.lse_stderr for answer in answers]) * ratios  # of Z, whose variance is then unbiased
    shown = errors.square().mean(0).sqrt() / ratios.std(0)
    assert ((shown > 0.7) & (shown < 1.4)).all()


def test_an_answer_promises_no_bar() -> None:
    view, queries = stale_view({"value_dim": V})
    pooled = drawn(view, queries)
    assert pooled.finder == "stale index"
    assert pooled.bar.isnan().all()
    assert not pooled.met.any()
    assert not pooled.exact.any()
    assert (pooled.n_pooled >= DRAWS).all()
    assert (pooled.n_pooled <= 1.5 * DRAWS).all()
    assert pooled.hits is not None
    assert pooled.weights is not None
    assert (pooled.weights.diff(dim=1) <= 0).all()
    assert pooled.explain(3)[0].ids[0] == pooled.hits.ids[0][0]
    assert torch.equal(drawn(view, queries).output, pooled.output), "a seed decides"
    assert not torch.equal(drawn(view, queries, 1).output, pooled.output)


def test_gradients_reach_queries_and_encoder_and_are_unbiased() -> None:
    view, queries = stale_view({"value_dim": V})
    queries = queries.requires_grad_()
    wanted = [queries, *view.encoder.parameters()]
    shift = view.attend(queries, temperature=TEMPERATURE).lse.detach()

    def gradients(pooled: softdb.Pooled) -> Tensor:
        z = (pooled.lse - shift).exp()
        total = z.sum() + (pooled.output * z.unsqueeze(1)).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(total, wanted)])

    exact = gradients(view.attend(queries, temperature=TEMPERATURE))
    estimates = torch.stack([gradients(drawn(view, queries, seed)) for seed in range(80)])
    doubt = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - exact).abs() <= 4.5 * doubt + 1e-5).all()
    assert (estimates.mean(0) - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("where", [None, {"odd": True}])
def test_the_dead_are_not_drawn_and_the_young_all_count(where: dict[str, Any] | None) -> None:
    view, queries = stale_view({"value_dim": V})
    view.db.delete(range(0, N, 5))
    random = torch.Generator().manual_seed(3)
    young = torch.randn(200, D, generator=random)
    view.db.insert(range(N, N + 200), young, torch.full((200, V), 9.0), [{"odd": True}] * 200)
    view.db.upsert([1], torch.zeros(1, D), torch.full((1, V), 99.0), [{"odd": True}])
    with torch.no_grad():
        exact = view.attend(queries, temperature=TEMPERATURE, where=where)
        answers = [drawn(view, queries, seed, where=where) for seed in range(60)]
    for one in answers:
        assert one.hits is not None
        assert one.weights is not None
        assert (one.weights.sum(1) < 0.999).all(), "the young have their share"
        ids = {int(name) for batch in one.hits.ids for name in batch}
        assert all(name % 5 and name < N for name in ids)
        assert where is None or all(name % 2 for name in ids)
    ratios = torch.stack([(answer.lse - exact.lse).exp() for answer in answers])
    assert ((ratios.mean(0) - 1).abs() <= 4 * ratios.std(0) / len(answers) ** 0.5).all()
    numerators = torch.stack([answer.output * (answer.lse - exact.lse).exp().unsqueeze(1) for answer in answers])
    doubt = numerators.std(0) / len(answers) ** 0.5
    assert ((numerators.mean(0) - exact.output).abs() <= 4 * doubt).all()
    assert (doubt.norm(dim=1) < 0.1 * exact.output.norm(dim=1)).all(), "or that says nothing"


def test_cheap_or_undrawable_questions_are_exact() -> None:
    view, queries = stale_view({"value_dim": V})
    truth = view.attend(queries, temperature=TEMPERATURE)
    for pooled in (
        view.attend(queries, temperature=TEMPERATURE, max_draws=N // 4),
        stale_view({"value_dim": V}, "flat")[0].attend(queries, temperature=TEMPERATURE, max_draws=100),
        view.attend(queries, temperature=TEMPERATURE, max_draws=100, where={"odd": 3}),
    ):
        assert pooled.exact.all()
    assert torch.allclose(view.attend(queries, temperature=TEMPERATURE, max_draws=N).output, truth.output)


def test_losses_take_draws() -> None:
    view, queries = stale_view({"value_dim": V})
    ids = [3, 50, 700, 9000]
    ask: dict[str, Any] = {"temperature": TEMPERATURE, "reduction": "none"}

    def drawing() -> dict[str, Any]:
        return {"max_draws": DRAWS, "generator": torch.Generator().manual_seed(1)}

    exact, near = retrieval_loss(view, queries, ids, **ask), retrieval_loss(view, queries, ids, **ask, **drawing())
    assert not torch.equal(exact, near)
    assert torch.allclose(exact, near, atol=0.5)
    targets = torch.zeros(4, V)
    exact, near = pooled_loss(view, queries, targets, **ask), pooled_loss(view, queries, targets, **ask, **drawing())
    assert not torch.equal(exact, near)
    assert near.requires_grad
    labelled, _ = stale_view({"num_classes": 4})
    assert label_loss(labelled, queries, [0, 1, 2, 3], **ask, **drawing()).shape == (4,)


def test_senseless_arguments_are_refused() -> None:
    view, queries = stale_view({"value_dim": V})
    with pytest.raises(softdb.BadInput, match="k is 3 and max_draws 100"):
        view.attend(queries, k=3, max_draws=100)
    with pytest.raises(softdb.BadInput, match="max_draws is 0"):
        view.attend(queries, max_draws=0)
    with pytest.raises(softdb.BadInput, match="generator is 3"):
        view.attend(queries, max_draws=10, generator=3)  # type: ignore[arg-type]
    with pytest.raises(softdb.BadInput, match="takes no rtol"):
        retrieval_loss(view, queries, [1, 2, 3, 4], rtol=0.1)
    with pytest.raises(softdb.BadInput, match=r"no estimate|no index can estimate"):
        view.attend(queries, max_draws=10, score=softdb.scores.Laplacian(1.0))
