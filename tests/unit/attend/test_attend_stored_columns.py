"""Scores and pooling read stored columns in place: equal to copies, with gradients of any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import awkward, snapshot

from softdb.attend.scoring import Rowwise, dots, metric_in_place, pool_rows, score_rows, sums
from softdb.check import Metric
from softdb.index.rerank import scores_at
from softdb.kernels import threads
from softdb.scores import Cosine, Dot, score_of
from softdb.store import Snapshot

Array = np.ndarray[Any, Any]


def world(dtype: str) -> tuple[Snapshot, Array]:
    """Records in several segments, some of them not live, and candidates: twins, the zero key, missing ones."""
    random = np.random.default_rng(0)
    records = snapshot(awkward(random, 50, 7), random.standard_normal((50, 3)), dtype=dtype, cuts=(9, 10, 33))
    positions = np.stack([random.permutation(50)[:12] for _ in range(5)])
    positions[0, :4], positions[1, 5:], positions[2] = [0, 1, 3, 4], -1, -1
    return records, positions


def copies(records: Snapshot, positions: Array) -> tuple[Tensor, Tensor]:
    """Keys (q, k, d) and values (q, k, v) in float64, zeros for none."""
    return records.keys_at(positions).double(), records.values_at(positions).double()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_scores_and_pooled_values_with_their_gradients(dtype: str, metric: str) -> None:
    records, positions = world(dtype)
    keys, values = copies(records, positions)
    score = score_of(Metric(metric))
    asked = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    truly = asked.detach().double().requires_grad_()
    assert metric_in_place(score, asked, records, gradient=True) is not None
    scores = score_rows(score, asked, records, positions)
    output = pool_rows((scores / 3).exp(), records, positions, None)
    each = (truly.unsqueeze(1) * keys).sum(2) if metric == "dot" else -(truly.unsqueeze(1) - keys).square().sum(2)
    each = each.masked_fill(torch.from_numpy(positions < 0), -torch.inf)
    expected = ((each / 3).exp().unsqueeze(2) * values).sum(1)
    torch.testing.assert_close(scores.double(), each, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    toward = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (actual,) = torch.autograd.grad((output * toward).sum(), asked, create_graph=True)
    (true,) = torch.autograd.grad((expected * toward).sum(), truly, create_graph=True)
    torch.testing.assert_close(actual.double(), true, rtol=1e-4, atol=1e-4)
    twice, truth = (torch.autograd.grad(one.square().sum(), x)[0] for one, x in ((actual, asked), (true, truly)))
    torch.testing.assert_close(twice.double(), truth, rtol=1e-3, atol=1e-3)


def test_threads_share_the_candidates_of_a_single_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    asked: list[int] = []
    work = threads.share_out

    def counted(do: Callable[[slice], Any], parts: Sequence[slice]) -> list[Any]:
        asked.append(len(parts))
        return work(do, parts)

    monkeypatch.setattr(threads, "share_out", counted)
    records, positions = world("float32")
    query = np.random.default_rng(1).standard_normal((1, 7)).astype(np.float32)
    for line in positions:
        actual = scores_at(records.key_column, query, line[None], Metric.L2)
        truth = -((records.keys_at(line).double() - torch.from_numpy(query)) ** 2).sum(1)
        truth = truth.masked_fill(torch.from_numpy(line < 0), -torch.inf)
        torch.testing.assert_close(torch.from_numpy(actual[0]).double(), truth, rtol=1e-5, atol=0)
    assert asked == [2] * len(positions)  # 84 products, of 30 and more each


@pytest.mark.parametrize("offset", [0, 100, 10_000])
def test_gradients_of_distances_far_from_the_origin(offset: float) -> None:
    random = np.random.default_rng(0)
    records = snapshot(offset + 0.1 * random.standard_normal((30, 8)))
    positions = np.stack([random.permutation(30)[:10] for _ in range(4)])
    asked = torch.from_numpy((offset + 0.1 * random.standard_normal((4, 8))).astype(np.float32)).requires_grad_()
    truly = asked.detach().double().requires_grad_()
    weights = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    (actual,) = torch.autograd.grad((score_rows(score_of(Metric.L2), asked, records, positions) * weights).sum(), asked)
    apart = truly.unsqueeze(1) - records.keys_at(positions).double()
    (true,) = torch.autograd.grad(-(apart.square().sum(2) * weights).sum(), truly)
    torch.testing.assert_close(actual.double(), true, rtol=1e-5, atol=1e-5)


def test_each_is_the_transpose_of_the_other() -> None:
    records, positions = world("float32")
    for values, width in ((False, 7), (True, 3)):
        column = Rowwise(records, positions, values)
        x, w = torch.randn(5, width), torch.randn(5, 12)
        torch.testing.assert_close((dots(x, column) * w).sum(), (sums(w, column) * x).sum(), rtol=1e-4, atol=1e-4)


def test_labels_and_other_precisions_are_pooled_from_copies() -> None:
    random = np.random.default_rng(0)
    labels = snapshot(awkward(random, 50, 7), random.integers(0, 4, 50))
    _, positions = world("float32")
    weights = torch.rand(5, 12, generator=torch.Generator().manual_seed(1))
    weights[torch.from_numpy(positions < 0)] = 0
    shares = pool_rows(weights, labels, positions, 4)
    torch.testing.assert_close(shares.sum(1), weights.sum(1))
    records, _ = world("float32")
    torch.testing.assert_close(
        pool_rows(weights.double(), records, positions, None), pool_rows(weights, records, positions, None).double()
    )


def test_unsupported_cases_go_to_torch() -> None:
    records, _ = world("float32")
    asked = torch.randn(2, 7, requires_grad=True)
    assert metric_in_place(Cosine(), asked, records, gradient=True) is None
    assert metric_in_place(Dot(), asked.double(), records, gradient=True) is None
    assert metric_in_place(Dot(), asked, records) is None
    assert metric_in_place(Dot(), asked.detach(), records) is Metric.DOT
    huge = torch.full((1, 7), 1e38, requires_grad=True)
    assert score_rows(Dot(), huge, records, np.array([[0, 1]])).dtype is torch.float32  # overflows: torch's own answer


def test_no_column_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    records, positions = world("float32")
    monkeypatch.setattr(Snapshot, "_gather", lambda *_: pytest.fail("records were copied"))
    asked = torch.randn(5, 7, requires_grad=True)
    scores = score_rows(Dot(), asked, records, positions)
    pool_rows(scores.softmax(1).nan_to_num(), records, positions, None).sum().backward()  # type: ignore[no-untyped-call]
    assert asked.grad is not None
