"""softdb.device and a database on a device against float64: real sizes on a GPU, small ones on the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import holding

import softdb
from softdb import device as gpu
from softdb.check import Metric
from softdb.errors import DeviceFailed
from softdb.nn import Memory

HALVES = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-4}
LARGEST = torch.iinfo(torch.int32).max


def world(device: torch.device, dtype: torch.dtype, d: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the weights of a gradient."""
    torch.manual_seed(3)
    n = 1_000_003 if device.type == "cuda" else 1003
    keys, values = (torch.randn(n, d, device=device).to(dtype) for _ in range(2))
    keys[1], keys[2] = keys[0], 0
    queries, grad = (torch.randn(7, d, device=device) for _ in range(2))
    return queries / d**0.5, keys, values, grad


def expected(queries: Tensor, keys: Tensor, values: Tensor, metric: Metric) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, output and lse in float64."""
    wide, stored = queries.double(), keys.double()
    far = [(one - stored).square().sum(1) for one in wide] if metric is Metric.L2 else []
    scores = -torch.stack(far) if far else wide @ stored.T
    if metric is Metric.COSINE:
        lengths = wide.norm(dim=1)[:, None] * stored.norm(dim=1)
        scores = scores / lengths.masked_fill(lengths == 0, torch.inf)
    return scores, scores.softmax(1) @ values.double(), scores.logsumexp(1)


def near(found: Tensor, true: Tensor, tolerance: float, like: Tensor | None = None) -> None:
    """Asserts that rows differ by no more than that share of the longest of some rows; None: of their own."""
    longest = (true if like is None else like).double().norm(dim=-1).max()
    assert float((found.double() - true.double()).norm(dim=-1).max() / longest) <= tolerance


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("dtype", HALVES)
def test_answers_and_gradients_are_those_of_float64(anywhere: torch.device, metric: Metric, dtype: torch.dtype) -> None:
    queries, keys, values, grad = world(anywhere, dtype)
    leaf, wide = queries.clone().requires_grad_(), queries.double().requires_grad_()
    output, lse = gpu.pooled(leaf, keys, values, metric=metric, scale=2.0)
    scores, _, _ = expected(wide, keys, values, metric)
    true, normaliser = (2 * scores).softmax(1) @ values.double(), (2 * scores).logsumexp(1)
    near(output.detach(), true.detach(), HALVES[dtype], values)
    near(lse.detach()[:, None], normaliser.detach()[:, None], HALVES[dtype])
    ((output * grad).sum() + lse.sum()).backward()  # type: ignore[no-untyped-call]
    (slope,) = torch.autograd.grad((true * grad.double()).sum() + normaliser.sum(), wide)
    assert leaf.grad is not None
    near(leaf.grad, slope, 10 * HALVES[dtype])


@pytest.mark.parametrize("metric", Metric)
@pytest.mark.parametrize("k", [10, 5000])
def test_the_nearest_are_those_of_float64(anywhere: torch.device, metric: Metric, k: int) -> None:
    queries, keys, values, _ = world(anywhere, torch.float16)
    k = min(k, len(keys))
    keep = torch.rand(len(keys), device=anywhere) < 0.7
    scores, places = gpu.nearest(queries, keys, k, metric=metric, keep=keep)
    true = expected(queries, keys, values, metric)[0].masked_fill(~keep, -torch.inf)
    k = min(k, int(keep.sum()))
    best = true.topk(k).values
    mine = true.gather(1, places[:, :k])
    torch.testing.assert_close(mine, best, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores[:, :k].double(), mine, rtol=1e-5, atol=1e-5)
    assert bool((places[:, k:] == -1).all())
    assert all(len(set(row)) == k for row in places[:, :k].tolist())


def test_two_runs_are_equal_to_the_bit(anywhere: torch.device) -> None:
    queries, keys, values, grad = world(anywhere, torch.float16)
    results = []
    for _ in range(3):
        leaves = [one.clone().float().requires_grad_() for one in (queries, keys, values)]
        output, lse = gpu.pooled(*leaves, metric=Metric.L2)
        ((output * grad).sum() + lse.sum()).backward()  # type: ignore[no-untyped-call]
        more = gpu.nearest(queries, keys, 100, metric=Metric.DOT)
        results.append([output.detach(), lse.detach(), *(leave.grad for leave in leaves), *more])
    for other in results[1:]:
        for one, again in zip(results[0], other, strict=True):
            assert one is not None
            assert again is not None
            assert torch.equal(one, again)


@pytest.mark.gpu
def test_columns_of_more_numbers_than_an_int32_counts(cuda: torch.device) -> None:
    n, d = LARGEST // 128 + 4096, 128
    if torch.cuda.mem_get_info(cuda)[0] < 6 * n * d:
        pytest.skip("too little memory is free on this GPU")
    keys = torch.zeros(n, d, dtype=torch.float16, device=cuda)
    keys[-1] = 1
    output, lse = gpu.pooled(torch.ones(3, d, device=cuda), keys, keys, metric=Metric.DOT)
    assert bool((output > 0.999).all())
    near(lse[:, None], torch.full((3, 1), 128.0, device=cuda), 1e-5)
    assert gpu.nearest(torch.ones(3, d, device=cuda), keys, 1, metric=Metric.DOT)[1].tolist() == [[n - 1]] * 3


def database(device: torch.device, path: Path | None = None) -> softdb.SoftDB:
    """Open a database of random records on a device."""
    n = 200_000 if device.type == "cuda" else 2000
    torch.manual_seed(4)
    return holding(torch.randn(n, 32), torch.randn(n, 8), path=path, device=str(device))


def test_a_delete_under_a_resident_column(anywhere: torch.device) -> None:
    db = database(anywhere)
    queries = torch.randn(5, 32, device=anywhere, requires_grad=True)
    before = db.search(queries, 3)
    pending = db.attend(queries, temperature=0.1)
    (slope,) = torch.autograd.grad(pending.output.sum(), queries, retain_graph=True)
    gone = {row[0] for row in before.ids}
    db.delete(list(gone))
    assert not gone & {one for row in db.search(queries, 3).ids for one in row}
    after = db.attend(queries, temperature=0.1).output
    assert not torch.equal(after, pending.output)
    (again,) = torch.autograd.grad(pending.output.sum(), queries)  # of the generation that was asked
    assert torch.equal(slope, again)
    torch.testing.assert_close(
        after.cpu(), db.attend(queries.detach().cpu(), temperature=0.1).output, rtol=1e-4, atol=1e-5
    )


def test_a_memory_on_a_full_device_loses_no_parameter(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    db = holding(torch.randn(30, 4), torch.randn(30, 2))
    memory: Any = Memory(db, k=3).to(device)
    memory(torch.randn(2, 4)).output.sum().backward()
    torch.optim.SGD(memory.parameters(), lr=0.1).step()
    touched = memory.report().uncommitted

    def full(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB")

    with monkeypatch.context() as patch:
        patch.setattr("softdb.nn.parameters.nearest_on_device", full)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
            memory(torch.randn(2, 4))
    assert memory(torch.randn(2, 4)).output.isfinite().all()
    assert memory.commit() == touched
    torch.testing.assert_close(torch.as_tensor(db.get(range(30)).keys), memory.keys.detach().cpu())


@pytest.mark.gpu
def test_a_full_gpu_is_reported_and_freed(cuda: torch.device) -> None:
    db = database(cuda)
    queries = torch.randn(64, 32, device=cuda)
    expected = db.attend(queries).output
    torch.cuda.empty_cache()
    hog = torch.empty(int(torch.cuda.mem_get_info(cuda)[0] - (16 << 20)), dtype=torch.uint8, device=cuda)
    try:
        torch.testing.assert_close(db.attend(queries).output, expected)
    except DeviceFailed as error:
        assert "nothing is lost" in str(error)  # noqa: PT017
    db.insert(["more"], torch.zeros(1, 32), torch.zeros(1, 8))
    del hog
    torch.cuda.empty_cache()
    assert db.attend(queries).output.isfinite().all()
    torch.testing.assert_close(db.to("cpu").attend(queries.cpu()).output, expected.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_fork_after_cuda_was_started(cuda: torch.device, tmp_path: Path) -> None:
    db = database(cuda, tmp_path / "db")
    ids = db.search(torch.ones(1, 32), 3).ids
    child = os.fork()
    if not child:
        code = 1
        try:
            db.search(torch.ones(1, 32), 3)
        except DeviceFailed:
            code = 0 if db.to("cpu").search(torch.ones(1, 32), 3).ids == ids else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert db.search(torch.ones(1, 32), 3).ids == ids


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ivf", "ivf-sq8"])
def test_faiss_on_the_gpu_finds_the_same_as_on_the_cpu(cuda: torch.device, tmp_path: Path, kind: Any) -> None:
    faiss = pytest.importorskip("faiss")
    if not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this FAISS is the CPU build")
    db, queries = database(cuda, tmp_path / "db"), np.random.default_rng(0).standard_normal((100, 32), np.float32)
    exact = db.search(queries, 10, exact=True).rows.cpu()
    db.build_index(kind, recall=0.9, k=10, device="cuda")
    db.delete([0, 1])

    def recall(handle: softdb.SoftDB) -> float:
        actual = handle.search(queries, 10).rows.cpu()
        return float((actual[:, :, None] == exact[:, None, :]).any(2).double().mean())

    assert recall(db) > 0.85
    db.close()
    with softdb.open(tmp_path / "db") as again:
        assert recall(again) > 0.85
