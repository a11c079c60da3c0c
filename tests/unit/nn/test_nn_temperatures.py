"""Temperatures that are learnt through losses, modules, views and memories."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import holding
from worlds.attentions import E, filled

from softdb.errors import BadInput
from softdb.nn import (
    Attention,
    Memory,
    Telemetry,
    View,
    gradient_report,
    hard_attention,
    info_nce,
    label_loss,
    pooled_loss,
    retrieval_loss,
    straight_through,
)

N, D, Q = 60, 6, 5
METRICS: list[Any] = ["dot", "cosine", "l2"]


def columns() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    keys, values, queries = (torch.randn(n, w, generator=random) for n, w in ((N, D), (N, 3), (Q, D)))
    return keys, values, queries


def scores_of(metric: str, queries: Tensor, keys: Tensor) -> Tensor:
    if metric == "l2":
        return -(queries.unsqueeze(1) - keys).square().sum(2)
    if metric == "cosine":
        queries, keys = (torch.nn.functional.normalize(vectors, dim=1) for vectors in (queries, keys))
    return queries @ keys.T


def heat_of(shape: tuple[int, ...] = (Q,)) -> Tensor:
    return (0.4 + torch.rand(shape, generator=torch.Generator().manual_seed(1))).requires_grad_()


def require_equal_slopes(loss: Tensor, heat: Tensor, expected: Tensor, wide: Tensor) -> None:
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-4, atol=1e-5)
    pairs = ((loss, heat), (expected, wide))
    slopes = [torch.autograd.grad(one.sum(), of, retain_graph=True)[0] for one, of in pairs]
    torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=1e-4, atol=1e-5)
    assert float(slopes[1].abs().max()) > 1e-3


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(), (Q,)], ids=["scalar", "queries"])
@pytest.mark.parametrize("kind", ["database", "view", "memory"])
def test_losses_teach_the_temperature(metric: Any, shape: tuple[int, ...], kind: str) -> None:
    keys, values, queries = columns()
    db, heat = holding(keys, values, metric=metric), heat_of(shape)
    source: Any = {
        "database": lambda: db,
        "view": lambda: View(db, torch.nn.Identity()),
        "memory": lambda: Memory(db, k=N),
    }
    source = source[kind]()
    wide = heat.detach().double().requires_grad_()
    logits = scores_of(metric, queries.double(), keys.double()) / wide.expand(Q).unsqueeze(1)
    right, rows = torch.arange(Q) * 7, torch.arange(Q)
    likelihood = logits.logsumexp(1) - logits[rows, right]
    asking: list[dict[str, Any]] = [{}, {"k": 4}, {"k": N}]
    for words in asking:
        loss = retrieval_loss(source, queries, right, temperature=heat, reduction="none", **words)
        expected = likelihood
        if words.get("k") == 4:
            nearest = torch.zeros(Q, N, dtype=torch.bool).scatter_(1, logits.topk(4).indices, True)
            nearest[rows, right] = True
            expected = logits.masked_fill(~nearest, -torch.inf).logsumexp(1) - logits[rows, right]
        require_equal_slopes(loss, heat, expected, wide)
    loss = info_nce(source, queries, right, negatives=N, temperature=heat, reduction="none")
    require_equal_slopes(loss, heat, likelihood, wide)
    if kind != "memory":
        loss = pooled_loss(source, queries, values[:Q], temperature=heat, reduction="none")
        expected = (logits.softmax(1) @ values.double() - values[:Q].double()).square().sum(1)
        require_equal_slopes(loss, heat, expected, wide)


def test_labels_teach_the_temperature() -> None:
    keys, _, queries = columns()
    labels, heat = torch.arange(N) % 3, heat_of(())
    with holding(keys, labels, num_classes=3, metric="l2") as db:
        loss = label_loss(db, queries, labels[:Q], temperature=heat, reduction="none")
    wide = heat.detach().double().requires_grad_()
    shares = (scores_of("l2", queries.double(), keys.double()) / wide).softmax(1) @ torch.eye(3).double()[labels]
    require_equal_slopes(loss, heat, -shares[torch.arange(Q), labels[:Q]].log(), wide)


@pytest.mark.parametrize("shape", [(), (3,), (4, 1), (2, 4, 3)], ids=["scalar", "heads", "queries", "every"])
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"k": 9}])
def test_heads_have_temperatures(shape: tuple[int, ...], words: dict[str, Any]) -> None:
    asking = {"k": words["k"]} if "k" in words else {}
    made = {name: value for name, value in words.items() if name != "k"}
    torch.manual_seed(0)
    with filled() as db:
        module = Attention(db, E, 3, batch_first=True, dtype=torch.float64, **made)
        query, heat = torch.randn(2, 4, E, dtype=torch.float64), heat_of(shape).detach().double().requires_grad_()
        output = module(query, temperature=heat, **asking)[0]
        assert torch.autograd.gradcheck(lambda heat: module(query, temperature=heat, **asking)[0], heat)
        for n, line in enumerate(heat.detach().expand(2, 4, 3)):
            for i, heads in enumerate(line):  # a head's scores are linear in its rows of W_q and b_q
                alone = copy.deepcopy(module)
                scale = heads.repeat_interleave(E // 3)
                with torch.no_grad():
                    alone.q_proj_weight.div_(scale.unsqueeze(1))
                    alone.in_proj_bias[:E].div_(scale)
                torch.testing.assert_close(output[n, i], alone(query[n, i : i + 1], **asking)[0][0])


def test_heads_of_tensors_have_none() -> None:
    tensors = [torch.randn(1, 3, E)] * 3
    with pytest.raises(BadInput, match="temperature are given without a database"):
        Attention(None, E, 3)(*tensors, temperature=torch.ones(3))
    with filled() as db, pytest.raises(BadInput, match=r"shape \(2,\) and the queries \(1, 3, 3\)"):
        Attention(db, E, 3, batch_first=True)(tensors[0], temperature=torch.ones(2))


@pytest.mark.parametrize("metric", METRICS)
def test_a_memory_has_a_temperature_to_train(metric: Any) -> None:
    keys, values, queries = columns()
    with holding(keys, values, metric=metric) as db:
        heat = torch.nn.Parameter(torch.tensor(0.6))
        memory = Memory(db, k=8, temperature=heat)
        assert [name for name, _ in memory.named_parameters()] == ["keys", "values", "learnt.temperature"]
        assert "temperature=0.6" in repr(memory).replace("0.6000000238418579", "0.6")
        wide = heat.detach().double().requires_grad_()
        logits, chosen = (scores_of(metric, queries.double(), keys.double()) / wide).topk(8)
        expected = torch.einsum("qk,qkv->qv", logits.softmax(1), values.double()[chosen])
        require_equal_slopes(memory(queries).output.square(), heat, expected.square(), wide)
        memory(queries).output.square().sum().backward()  # type: ignore[no-untyped-call]
        assert heat.grad is not None
        assert memory.keys is not None
        assert memory.keys.grad is not None
        assert memory.keys.grad.is_sparse
        sparse = torch.optim.SparseAdam([*memory.columns.values()], lr=0.1)
        memory.check(sparse)
        with pytest.raises(BadInput, match="holds no parameter of the memory"):
            memory.check(torch.optim.Adam([heat]))
        sparse.step()  # type: ignore[no-untyped-call]
        torch.optim.Adam([heat], lr=0.1).step()
        assert heat.item() != pytest.approx(0.6)
        assert memory.commit() > 0
        other = Memory(db, k=8, temperature=torch.nn.Parameter(torch.tensor(1.0)))
        other.load_state_dict(memory.state_dict())
        assert torch.equal(other.state_dict()["learnt.temperature"], heat.detach())
        copied = copy.deepcopy(memory)
        torch.testing.assert_close(copied(queries).output, memory(queries).output)


@pytest.mark.parametrize("heat", [torch.nn.Parameter(torch.tensor(-1.0)), torch.nn.Parameter(torch.ones(2)), 0.0])
def test_a_memory_refuses_other_temperatures(heat: Any) -> None:
    with holding(columns()[0]) as db, pytest.raises(BadInput, match="temperature"):
        Memory(db, temperature=heat)


@pytest.mark.parametrize("max_draws", [None, 200])
def test_a_view_by_draws(max_draws: int | None) -> None:
    pytest.importorskip("faiss")
    random = torch.Generator().manual_seed(0)
    keys, queries, heat = torch.randn(12_000, D, generator=random), torch.randn(Q, D, generator=random), heat_of()
    with holding(keys, metric="l2") as db:
        view = View(db, torch.nn.Linear(D, D), index="ivf", recall=0.5)
        exact = view.attend(queries, temperature=heat)
        shift = exact.lse.detach()
        (true,) = torch.autograd.grad((exact.lse - shift).exp().sum(), heat)
        if max_draws is None:
            plain = [view.attend(queries[i : i + 1], temperature=heat[i].item()).lse[0] for i in range(Q)]
            torch.testing.assert_close(exact.lse, torch.stack(plain), rtol=1e-5, atol=1e-5)
            return
        grads = []
        for seed in range(60):
            generator = torch.Generator().manual_seed(seed)
            pooled = view.attend(queries, temperature=heat, max_draws=max_draws, generator=generator)
            assert pooled.finder == "stale index"
            grads.append(torch.autograd.grad((pooled.lse - shift).exp().sum(), heat)[0])
    actual = torch.stack(grads)
    doubt = actual.std(0) / len(grads) ** 0.5
    assert ((actual.mean(0) - true).abs() <= 4.5 * doubt + 1e-4 * true.abs()).all()


@pytest.mark.parametrize("metric", METRICS)
def test_hard_attention_and_straight_through(metric: Any) -> None:
    keys, values, queries = columns()
    heat = heat_of()
    with holding(keys, values, metric=metric) as db:
        samples = hard_attention(db, queries, 6, temperature=heat, generator=torch.Generator().manual_seed(0))
        wide = heat.detach().double().requires_grad_()
        logs = (scores_of(metric, queries.double(), keys.double()) / wide.unsqueeze(1)).log_softmax(1)
        require_equal_slopes(samples.log_prob, heat, logs.gather(1, samples.hits.rows), wide)
        for k in (None, 9):
            drawn = straight_through(db, queries, temperature=heat, k=k, generator=torch.Generator().manual_seed(0))
            assert torch.autograd.grad(drawn.sum(), heat)[0].abs().min() > 0


def test_reports_take_temperatures() -> None:
    keys, values, queries = columns()
    log, telemetry = heat_of().detach().log().requires_grad_(), Telemetry(every=1, sample=3)
    with holding(keys, values) as db:
        for heat in (log.exp(), log.exp()[0], 0.5):
            report = gradient_report(db, queries, temperature=heat, k=N)
            torch.testing.assert_close(report.cosine, torch.ones(Q), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(report.mass, torch.ones(Q), rtol=1e-5, atol=1e-5)
            few = gradient_report(db, queries, temperature=heat, k=2)
            each = heat.expand(Q).tolist() if isinstance(heat, Tensor) else [heat] * Q
            for i in range(Q):
                alone = gradient_report(db, queries[i : i + 1], temperature=each[i], k=2)
                assert few.mass[i].item() == pytest.approx(alone.mass.item(), rel=1e-4)
            every = Telemetry(every=1, sample=Q)(db, queries, temperature=heat, k=2)  # in another order
            assert every is not None
            torch.testing.assert_close(every.mass.sort().values, few.mass.sort().values)
            measured = telemetry(db, queries, temperature=heat, k=N)
            assert measured is not None
            assert float(measured.cosine.min()) > 0.999
            if isinstance(heat, Tensor):
                heat.sum().backward()  # type: ignore[no-untyped-call]  # the graph of the temperature is whole


def test_clips_scale_and_its_bound() -> None:
    """The logarithm of a scale of 100 at most, as CLIP learns it."""
    keys, _, queries = columns()
    scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    adam = torch.optim.Adam([scale], lr=0.5)
    with holding(keys, metric="cosine") as db:
        right = db.search(queries, 1).rows[:, 0]
        for _ in range(20):
            adam.zero_grad()
            retrieval_loss(db, queries, right, temperature=(-scale).exp()).backward()  # type: ignore[no-untyped-call]
            adam.step()
            with torch.no_grad():
                scale.clamp_(max=math.log(100))
    assert scale.item() == pytest.approx(math.log(100))
