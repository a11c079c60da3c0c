"""Draws over a view use the codes of the indexed vectors and the scores of the current encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from with_kernels import NEEDS_KERNELS
from worlds import holding
from worlds.views import move

import softdb
from softdb.check import Tolerance
from softdb.nn import View, gradient_report, label_loss, pooled_loss, retrieval_loss
from softdb.nn.drawn import OTHER_SEEDS, PILOT
from softdb.nn.stale_index import Version

pytest.importorskip("faiss")
pytestmark = NEEDS_KERNELS

N, D, V, DRAWS, TEMPERATURE, RTOL = 12_000, 8, 3, 300, 0.5, 0.4
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


# -- to a tolerance ----------------------------------------------------------------------------------------------------


def to_tolerance(view: View, queries: Tensor, seed: int, rtol: float = RTOL, **more: Any) -> softdb.Pooled:
    generator = torch.Generator().manual_seed(seed)
    return view.attend(queries, temperature=TEMPERATURE, rtol=rtol, generator=generator, **more)


def sizes_of(view: View, queries: Tensor) -> Tensor:  # (q, 6) -> (q,)
    """max(‖o‖, 0.1 √Σ w ‖v‖²) over all records, in float64."""
    records = view.db.get(range(N))
    keys, values = view.encoder(records.keys).double(), records.values
    weights = (-torch.cdist(queries.double(), keys).square() / TEMPERATURE).softmax(1)
    values = keys if values is None else values
    table = values.double() if values.is_floating_point() else torch.nn.functional.one_hot(values.long()).double()
    return torch.maximum((weights @ table).norm(dim=1), 0.1 * (weights @ table.square().sum(1)).sqrt())


@pytest.mark.parametrize("shape", KINDS, ids=["values", "labels", "keys"])
def test_answers_to_a_tolerance_lie_within_it(shape: dict[str, Any]) -> None:
    view, _ = stale_view(shape)
    queries, inside, met, drawn = torch.randn(10, 6, generator=torch.Generator().manual_seed(8)), [], [], []
    with torch.no_grad():
        exact, sizes = view.attend(queries, temperature=TEMPERATURE), sizes_of(view, queries)
        for seed in range(20):
            pooled = to_tolerance(view, queries, seed)
            if pooled.exact.all():  # its pilot saw too large an error; pilots share no draws with answers
                continue
            assert pooled.bar.isnan().all()
            inside.append((pooled.output - exact.output).norm(dim=1) <= RTOL * sizes)
            met.append(pooled.met)
            drawn.append(pooled.n_pooled)
    assert len(inside) >= 8, "or that says nothing"
    within, known = torch.stack(inside), torch.stack(met)
    assert stats.binomtest(int(within.sum()), within.numel(), 0.95, "less").pvalue > 1e-4
    assert stats.binomtest(int(within[known].sum()), int(known.sum()), 0.95, "less").pvalue > 1e-4
    assert known.double().mean() > 0.4
    assert (torch.stack(drawn) >= 0.8 * PILOT).all()
    assert torch.stack(drawn).double().mean() < N / 8


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.few(2)
def test_the_error_that_decides_holds_as_often_as_stated(temperature: float, pools: bool) -> None:
    """The ratio of error and tolerance, which plans the draws and sets `met`, by a tolerance of 1."""
    view, _ = stale_view({"value_dim": V})
    queries, inside = torch.randn(20, 6, generator=torch.Generator().manual_seed(9)), []
    with torch.no_grad():
        exact = view.attend(queries, temperature=temperature)
        for seed in range(15):
            request, source = view.request(
                queries, temperature, tolerance=Tolerance(1.0, 0.0, 0.95, DRAWS),
                generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            drawn = source._drawn(replace(request, pools=pools), np.full(20, DRAWS))
            assert drawn is not None
            answer, ratio = drawn
            error = (answer.lse - exact.lse).expm1().abs()
            if pools:
                error = (answer.output - exact.output).norm(dim=1) / answer.output.norm(dim=1)
            inside.append(error <= ratio + 1e-5)
    count = torch.stack(inside)
    assert stats.binomtest(int(count.sum()), count.numel(), 0.93, "less").pvalue > 1e-4


def test_sums_and_gradients_to_a_tolerance_are_unbiased() -> None:
    view, queries = stale_view({"value_dim": V})
    queries = queries.requires_grad_()
    wanted = [queries, *view.encoder.parameters()]
    shift = view.attend(queries, temperature=TEMPERATURE).lse.detach()

    def sums(pooled: softdb.Pooled) -> Tensor:
        z = (pooled.lse - shift).exp()
        numerators = pooled.output * z.unsqueeze(1)
        gradients = torch.autograd.grad(z.sum() + numerators.sum(), wanted)
        return torch.cat([part.detach().flatten() for part in (z, numerators, *gradients)])

    exact = sums(view.attend(queries, temperature=TEMPERATURE))
    answers = [to_tolerance(view, queries, seed) for seed in range(60)]
    assert sum(bool(answer.exact.any()) for answer in answers) < 20
    estimates = torch.stack([sums(answer) for answer in answers])
    doubt = estimates.std(0) / len(estimates) ** 0.5
    assert ((estimates.mean(0) - exact).abs() <= 4.5 * doubt + 1e-5).all()
    assert (estimates.mean(0) - exact).norm() < 0.1 * exact.norm()


def test_the_answer_shares_no_draws_with_its_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    view, queries = stale_view({"value_dim": V})
    seen = []
    plain = Version.draw

    def watched(self: Version, drawing: Any, keep: Any = None) -> Any:
        seen.append((drawing.seed >= OTHER_SEEDS, len(drawing.queries), drawing.budget))
        return plain(self, drawing, keep)

    monkeypatch.setattr(Version, "draw", watched)
    pooled = to_tolerance(view, queries, 0)
    assert pooled.output.requires_grad
    pilots, answers = ([x[1:] for x in seen if x[0] is pilot] for pilot in (True, False))
    assert pilots[0] == (4, PILOT)
    assert sum(q for q, _ in answers) == 4
    assert max(budget for _, budget in answers) > PILOT
    assert not seen[-1][0]
    seen.clear()
    again = to_tolerance(view, queries, 0, max_draws=DRAWS)
    assert seen == [(False, 4, DRAWS)], "one round, of that size"
    assert again.n_pooled.amin() >= 0.9 * DRAWS
    loose = view.attend(queries, temperature=TEMPERATURE, atol=1e3)
    assert loose.met.all()
    assert (loose.n_pooled <= 1.5 * PILOT).all()


def test_tolerances_that_cost_too_much_or_cannot_be_drawn_are_exact() -> None:
    view, queries = stale_view({"value_dim": V})
    truth = view.attend(queries, temperature=TEMPERATURE).output
    small = View(holding(torch.randn(50, D), torch.randn(50, V), value_dim=V), torch.nn.Linear(D, 6), metric="l2")
    flat, _ = stale_view({"value_dim": V}, "flat")
    for pooled in (
        to_tolerance(view, queries, 0, 1e-3),
        to_tolerance(view, queries.repeat(N // 4 // PILOT, 1), 0),
        to_tolerance(small, queries, 0),
        to_tolerance(flat, queries, 0),
        to_tolerance(view, queries, 0, where={"odd": 3}),
    ):
        assert pooled.exact.all()
        assert pooled.met.all()
        assert (pooled.bar == 0).all()
    assert torch.equal(to_tolerance(view, queries, 0, 1e-3).output, truth)
    assert to_tolerance(view, queries[:0], 0).output.shape == (0, V)
    expected = small.attend(queries, temperature=TEMPERATURE)
    assert torch.equal(to_tolerance(small, queries, 0).lse, expected.lse)


def test_the_report_of_a_view_measures_the_noise_of_its_gradient() -> None:
    view, queries = stale_view({"value_dim": V})
    view.encoder = torch.nn.Sequential(view.encoder, torch.nn.Dropout(0.5))
    words: dict[str, Any] = {"temperature": TEMPERATURE, "upstream": torch.ones(4, V)}
    leaf = queries.clone().requires_grad_()
    with torch.random.fork_rng():
        view.encoder.eval()
        exact = view.attend(leaf, temperature=TEMPERATURE)
        (gradient,) = torch.autograd.grad(exact.output.sum(), leaf)
        cut_leaf = queries.clone().requires_grad_()
        (cut,) = torch.autograd.grad(view.attend(cut_leaf, temperature=TEMPERATURE, k=30).output.sum(), cut_leaf)
        view.encoder.train()
    before = torch.random.get_rng_state()
    truncated = gradient_report(view, queries, k=30, **words)
    torch.testing.assert_close(truncated.gradient_error, (cut - gradient).norm(dim=1) / gradient.norm(dim=1))
    assert (truncated.gradient_stderr == 0).all()
    assert (truncated.mass < 0.9).all()
    reports = [
        gradient_report(view, queries, max_draws=DRAWS, generator=torch.Generator().manual_seed(seed), **words)
        for seed in range(8)
    ]
    error, stderr = (
        torch.stack([getattr(report, name) for report in reports]) for name in ("gradient_error", "gradient_stderr")
    )
    assert 0.5 < float(stderr.square().mean().sqrt() / error.square().mean().sqrt()) < 2
    assert (gradient_report(view, queries, rtol=1e-3, **words).gradient_stderr == 0).all(), "which is exact"
    assert gradient_report(view, queries, rtol=RTOL, **words).gradient_stderr.min() > 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert view.encoder[1].training
    assert all(parameter.grad is None for parameter in view.encoder.parameters())


def test_losses_take_draws() -> None:
    view, queries = stale_view({"value_dim": V})
    ids = [3, 50, 700, 9000]
    ask: dict[str, Any] = {"temperature": TEMPERATURE, "reduction": "none"}

    def drawing() -> dict[str, Any]:
        return {"max_draws": DRAWS, "generator": torch.Generator().manual_seed(1)}

    exact, near = retrieval_loss(view, queries, ids, **ask), retrieval_loss(view, queries, ids, **ask, **drawing())
    assert not torch.equal(exact, near)
    assert torch.allclose(exact, near, atol=0.5)
    near = retrieval_loss(view, queries, ids, rtol=RTOL, generator=torch.Generator().manual_seed(2), **ask)
    assert not torch.equal(exact, near)
    assert torch.allclose(exact, near, atol=0.3)
    near.sum().backward()  # type: ignore[no-untyped-call]
    assert view.encoder.weight.grad.abs().sum() > 0
    few = retrieval_loss(view, queries, ids, rtol=RTOL, **drawing(), **ask)
    assert torch.equal(few, retrieval_loss(view, queries, ids, **ask, **drawing())), "one round of that many draws"
    targets = torch.zeros(4, V)
    exact, near = pooled_loss(view, queries, targets, **ask), pooled_loss(view, queries, targets, **ask, **drawing())
    assert not torch.equal(exact, near)
    assert near.requires_grad
    rough = pooled_loss(view, queries, targets, rtol=RTOL, atol=0.1, **ask)
    assert rough.requires_grad
    assert torch.allclose(exact, rough, rtol=0.5, atol=0.2)
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
    with pytest.raises(softdb.BadInput, match="k and a tolerance are both given"):
        retrieval_loss(view, queries, [1, 2, 3, 4], rtol=0.1, k=5)
    with pytest.raises(softdb.BadInput, match=r"rtol is 2; expected a number above 0 and below 1"):
        view.attend(queries, rtol=2)
    with pytest.raises(softdb.BadInput, match="atol is -1"):
        view.attend(queries, atol=-1, max_draws=10)
    with pytest.raises(softdb.BadInput, match=r"no estimate|no index can estimate"):
        view.attend(queries, rtol=0.1, score=softdb.scores.Laplacian(1.0))
    with pytest.raises(softdb.BadInput, match=r"no estimate|no index can estimate"):
        view.attend(queries, max_draws=10, score=softdb.scores.Laplacian(1.0))
