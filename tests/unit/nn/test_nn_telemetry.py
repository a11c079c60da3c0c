"""Telemetry of gradients, against the exact ones computed by plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import D, N, V, clusters, filled, indexed, near

import softdb
import softdb.nn.telemetry
from softdb.errors import BadInput, Closed
from softdb.nn import GradientReport, Telemetry, gradient_report
from softdb.scores import Gaussian

Q = 4
NOTHING: Any = None
TEXT: Any = "text"


def asking(q: int = Q) -> Tensor:
    return torch.randn(q, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def plain(
    db: softdb.SoftDB, queries: Tensor, upstream: Tensor, k: int | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of upstream · output, and weights (q, N) of all records, the k nearest only."""
    records = db.get(list(range(N)))
    assert records.values is not None
    leaf = queries.clone().requires_grad_()
    logits = leaf @ records.keys.double().T / temperature
    if k is not None:
        logits = logits.masked_fill(logits < logits.topk(k).values[:, -1:], -torch.inf)
    weights = logits.softmax(1)
    output = weights @ records.values.double()
    grad = torch.autograd.grad((output * upstream).sum(), leaf)[0]
    return output.detach(), grad, weights.detach()


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_the_report_of_a_truncated_query(k: int, temperature: float) -> None:
    db, queries = filled(), asking()
    upstream = torch.randn(Q, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = gradient_report(db, queries, temperature=temperature, k=k, upstream=upstream)
    output, grad, weights = plain(db, queries, upstream, None, temperature)
    cut, cut_grad, cut_weights = plain(db, queries, upstream, k, temperature)
    for i in range(Q):
        assert actual.mass[i].item() == pytest.approx(float(weights[i][cut_weights[i] > 0].sum()))
        entropy = -sum(w * math.log(w) for w in weights[i].tolist())
        assert actual.effective[i].item() == pytest.approx(math.exp(entropy))
        assert actual.output_error[i].item() == pytest.approx(float((cut[i] - output[i]).norm() / output[i].norm()))
        assert actual.gradient_error[i].item() == pytest.approx(
            float((cut_grad[i] - grad[i]).norm() / grad[i].norm()), abs=1e-9
        )
        if k == 1:  # one record gives the same answer for every query
            assert math.isnan(actual.cosine[i].item())
        else:
            expected = float(torch.nn.functional.cosine_similarity(cut_grad[i], grad[i], 0))
            assert actual.cosine[i].item() == pytest.approx(expected)


@pytest.mark.parametrize("words", [{}, {"k": N}, {"k": 3 * N}, {"rtol": 0.1}, {"score": Gaussian(1.0)}])
def test_an_exact_query_misses_no_mass(words: dict[str, Any]) -> None:
    actual = gradient_report(filled(), asking(), **words)
    one = torch.ones(Q, dtype=torch.float64)
    torch.testing.assert_close(actual.mass, one)
    torch.testing.assert_close(actual.cosine, one)
    torch.testing.assert_close(actual.gradient_error, 0 * one, atol=1e-9, rtol=0)
    torch.testing.assert_close(actual.output_error, 0 * one, atol=1e-9, rtol=0)
    assert actual.means()["mass"] == pytest.approx(1)


def test_a_filter_a_kernel_and_more_candidates() -> None:
    db, queries = filled(), asking()
    reports = [gradient_report(db, queries, k=k, where={"odd": True}, score=Gaussian(0.8)) for k in (2, 8, 19)]
    masses = torch.stack([report.mass for report in reports])
    assert bool((masses.diff(dim=0) > 0).all())
    assert bool((reports[2].output_error < reports[0].output_error).all())
    only = {"odd": True}
    exact = db.attend(queries, where=only, score=Gaussian(0.8))
    held = (db.attend(queries, where=only, score=Gaussian(0.8), k=2).lse - exact.lse).exp()
    torch.testing.assert_close(reports[0].mass, held)
    effective = [explanation.effective for explanation in exact.explain(1)]
    torch.testing.assert_close(reports[0].effective, torch.tensor(effective, dtype=torch.float64))


@pytest.fixture(scope="module")
def clustered() -> tuple[softdb.SoftDB, Tensor]:
    """30 000 records of 60 clusters with an IVF index, and queries among them."""
    random = np.random.default_rng(0)
    keys = clusters(random, 30_000)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return indexed(keys, recall=0.9), torch.tensor(near(random, keys, 8, 0.1), dtype=torch.float32)


@pytest.mark.slow
def test_an_estimate_points_the_right_way_where_truncation_does_not(
    clustered: tuple[softdb.SoftDB, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)  # always draw
    db, queries = clustered
    cut = gradient_report(db, queries, temperature=0.1, k=50)
    assert float(cut.mass.max()) < 0.6
    assert float(cut.effective.min()) > 50
    drawn = []
    for seed in range(12):
        report = gradient_report(
            db, queries, temperature=0.1, rtol=1e-9, max_draws=1000, generator=torch.Generator().manual_seed(seed)
        )
        drawn.append(report)
        assert bool((report.mass < 0.99).all())  # the drawn records themselves hold less than everything
        assert bool((report.mass > cut.mass).all())
    assert not torch.equal(drawn[0].cosine, drawn[1].cosine)
    assert torch.stack([one.cosine for one in drawn]).mean() > cut.cosine.mean()
    assert torch.stack([one.output_error for one in drawn]).mean() < cut.output_error.mean()
    error, stderr = (
        torch.stack([getattr(report, name) for report in drawn]) for name in ("gradient_error", "gradient_stderr")
    )
    assert bool((cut.gradient_stderr == 0).all())
    assert 0.5 < float(stderr.square().mean().sqrt() / error.square().mean().sqrt()) < 2


def test_an_empty_database_is_reported() -> None:
    actual = gradient_report(softdb.open(None, dim=D, value_dim=V), asking(), k=3)
    assert actual.mass.tolist() == [1] * Q
    assert actual.effective.tolist() == [0] * Q
    assert actual.output_error.tolist() == [0] * Q
    assert bool(actual.cosine.isnan().all())


def test_a_report_leaves_gradients_and_random_numbers_alone() -> None:
    db, queries = filled(), asking().requires_grad_()
    state = torch.get_rng_state()
    score = softdb.scores.General(D, D).double()
    state = torch.get_rng_state()
    with torch.no_grad():
        actual = gradient_report(db, queries, k=3, score=score)
    assert float(actual.cosine.min()) > -1
    assert queries.grad is None
    assert all(parameter.grad is None for parameter in score.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(column.requires_grad for column in actual)


def test_every_nth_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    true = softdb.nn.telemetry.gradient_report

    def counting(db: softdb.SoftDB, queries: Tensor, **words: Any) -> GradientReport:
        calls.append(len(queries))
        return true(db, queries, **words)

    monkeypatch.setattr(softdb.nn.telemetry, "gradient_report", counting)
    db, telemetry = filled(), Telemetry(every=3, sample=2)
    reports = [telemetry(db, asking(), temperature=0.5, k=4) for _ in range(8)]
    assert [i for i, report in enumerate(reports) if report is not None] == [0, 3, 6]
    assert calls == [2, 2, 2]
    assert [one["step"] for one in telemetry.history] == [0, 3, 6]
    for entry, report in zip(telemetry.history, reports[::3], strict=True):
        assert report is not None
        assert entry["queries"] == 2
        assert entry["seconds"] > 0
        for name in GradientReport._fields:
            assert entry[name] == pytest.approx(float(getattr(report, name).mean()))
    assert telemetry.history[0]["mass"] != telemetry.history[1]["mass"]  # other queries each time


def test_the_sample_keeps_queries_and_upstream_together() -> None:
    db, queries = filled(), asking(6)
    upstream = torch.randn(6, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = gradient_report(db, queries, k=4, upstream=upstream)
    part = Telemetry(sample=3, seed=7)(db, queries, k=4, upstream=upstream)
    assert part is not None
    assert len(part.cosine) == 3
    for i in range(3):
        place = (whole.gradient_error - part.gradient_error[i]).abs().argmin()
        torch.testing.assert_close(whole.gradient_error[place], part.gradient_error[i])
        torch.testing.assert_close(whole.cosine[place], part.cosine[i])


def test_telemetry_does_not_change_training(
    clustered: tuple[softdb.SoftDB, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
    db, queries = clustered

    def trained(telemetry: Telemetry | None) -> Tensor:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3)
        leaf = queries.clone().requires_grad_()
        for _ in range(4):
            words: dict[str, Any] = {"temperature": 0.1, "rtol": 0.2}
            asked = leaf + 0.01 * torch.randn(leaf.shape)
            if telemetry is not None:
                telemetry(db, asked, **words)
            output = db.attend(asked, generator=generator, **words).output
            leaf = (leaf - torch.autograd.grad(output.sum(), leaf)[0]).detach().requires_grad_()
        return leaf.detach()

    telemetry = Telemetry(every=2)
    assert torch.equal(trained(telemetry), trained(None))
    assert len(telemetry.history) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda db, q: gradient_report(db, q, k=0), "k is 0; expected"),
        (lambda db, q: gradient_report(db, q, k=3, rtol=0.1), "k and a tolerance are both given"),
        (lambda _, q: gradient_report(NOTHING, q), "db is None; expected an open"),
        (
            lambda db, q: gradient_report(db, q, upstream=torch.ones(Q, 1)),
            r"upstream have shape \(4, 1\); expected \(4, 3\)",
        ),
        (lambda *_: Telemetry(every=0), "every is 0; expected"),
        (lambda *_: Telemetry(sample=0), "sample is 0; expected"),
        (lambda db, q: Telemetry()(db, q[:0]), r"queries have shape \(0, 5\); expected the batch"),
        (lambda db, q: Telemetry()(db, TEXT), "queries have 'text'; expected the batch"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call(filled(), asking())


def test_a_closed_database_is_refused() -> None:
    db = filled()
    db.close()
    with pytest.raises(Closed, match="closed"):
        gradient_report(db, asking())


def test_a_seed_beyond_64_bits_is_refused() -> None:
    with pytest.raises(BadInput, match="seed is 1180591620717411303424; expected a whole number from 0"):
        Telemetry(seed=2**70)
