"""softdb.nn.Memory with parameters on a device equals one in RAM, and its commits reach the disk."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.pretended import Pretended
from torch import Tensor
from worlds import D, N, V, filled
from worlds.memories import large

import softdb
from softdb.errors import BadInput
from softdb.nn import Memory, info_nce, pooled_loss, retrieval_loss

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own optimisers make them
OPTIMISERS: dict[str, Any] = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def both(db: softdb.SoftDB, device: torch.device, **words: Any) -> tuple[Any, Any]:
    """A memory in the RAM, and one on a device."""
    return Memory(db, **words), Memory(db, **words).to(device)


def same(one: Tensor | None, other: Tensor | None, tolerance: float = 1e-5) -> None:
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one.cpu(), other.cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("words", [{}, {"keys": False}, {"values": False}])
@pytest.mark.parametrize("kind", [{"metric": "dot"}, {"metric": "cosine"}, {"metric": "l2", "value_dim": None}])
def test_answers_and_gradients_are_those_of_the_ram(
    device: torch.device, kind: dict[str, Any], words: dict[str, Any]
) -> None:
    db = filled(**kind)
    if "value_dim" in kind:
        words = {}
    here, there = both(db, device, k=6, temperature=0.7, **words)
    db.delete([0, 7, 9])  # gone, and not let go by reload()
    queries = torch.randn(7, D)
    asked = queries.clone().requires_grad_(), queries.to(device).requires_grad_()
    answers = here(asked[0]), there(asked[1])
    up = torch.randn_like(answers[0].output)
    for pooled in answers:
        loss = (pooled.output * up.to(pooled.output.device)).sum() + pooled.lse.square().sum()
        loss.backward()
    for name in ("output", "lse", "weights", "exact", "missed_mass"):
        assert getattr(answers[1], name).device == device
        torch.testing.assert_close(*(getattr(answer, name).cpu() for answer in answers), equal_nan=True)
    assert answers[0].hits.ids == answers[1].hits.ids
    assert answers[1].finder == "flat" or not words.get("keys", True)
    same(asked[0].grad, asked[1].grad)
    for parameter, other in zip(here.parameters(), there.parameters(), strict=True):
        assert other.device == device
        assert other.grad is not None
        assert other.grad.is_sparse
        same(parameter.grad.to_dense(), other.grad.cpu().to_dense())
    assert here.report().uncommitted == there.report().uncommitted


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_parameters_learnt_on_the_device_are_committed_to_the_bit(
    device: torch.device, tmp_path: Path, name: str, dtype: Any
) -> None:
    db = filled(path=tmp_path / "db", dtype=dtype)
    before: Any = db.get(range(N))
    memories = both(db, device, k=4)
    queries, targets = torch.randn(5, D), torch.randn(5, V)
    for memory in memories:
        optimiser: Any = OPTIMISERS[name](memory.parameters())
        memory.check(optimiser)
        for _ in range(4):
            optimiser.zero_grad()
            loss = (memory(queries.to(memory.device)).output - targets.to(memory.device)).square().sum()
            loss.backward()
            optimiser.step()
            memory.step()
    here, there = memories
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        same(one.detach(), other.detach(), 1e-4)
    count = there.report().uncommitted
    assert 0 < count < N
    assert there.commit() == count
    assert there.commit() == 0
    db.close()
    with softdb.open(tmp_path / "db", verify=True) as again:
        stored: Any = again.get(range(N))
        for parameter, old, now in zip(
            there.parameters(), (before.keys, before.values), (stored.keys, stored.values), strict=True
        ):
            assert torch.equal(parameter.detach().cpu().to(now.dtype), now)
            assert int((old != now).any(1).sum()) <= count


def test_a_training_step_moves_only_the_candidates(pretended: Pretended) -> None:
    db = large(4000)
    memory: Any = Memory(db, k=8).to(pretended.device)
    optimiser: Any = torch.optim.SparseAdam(list(memory.parameters()), lr=0.01)
    queries = torch.randn(16, 16).to(pretended.device)

    def step() -> None:
        optimiser.zero_grad()
        memory(queries).output.square().sum().backward()
        optimiser.step()
        memory.step()

    step()
    for done in (pretended.crossings, pretended.waits):
        assert done
    pretended.crossings.clear()
    pretended.waits = 0
    step()
    candidates = 16 * 8
    assert {crossing.to for crossing in pretended.crossings} == {"cpu", pretended.device.type}
    assert max(crossing.numbers for crossing in pretended.crossings) <= candidates, "more than positions travels"
    assert sum(crossing.numbers for crossing in pretended.crossings) <= 8 * candidates
    assert pretended.waits <= 4


def test_losses_through_a_memory_on_the_device_match_the_cpu(device: torch.device) -> None:
    db = filled()
    queries = torch.randn(6, D)
    right = [[i, (i + 3) % N] for i in range(6)]
    losses: list[Any] = [
        lambda memory, asked: retrieval_loss(memory, asked, right),
        lambda memory, asked: info_nce(memory, asked, right, negatives=4),
        lambda memory, asked: pooled_loss(memory, asked, torch.ones(6, V, device=asked.device)),
    ]
    for loss in losses:
        results = []
        for memory in both(db, device, k=5):
            asked = queries.clone().to(memory.device).requires_grad_()
            value = loss(memory, asked)
            value.backward()
            assert value.device == memory.device
            results.append((value.detach(), asked.grad, memory.keys.grad.cpu().to_dense()))
        for result, other in zip(*results, strict=True):
            same(result, other)


def test_a_state_moves_between_devices(device: torch.device, tmp_path: Path) -> None:
    db = filled()
    here, there = both(db, device, k=5)
    with torch.no_grad():
        for parameter in there.parameters():
            parameter += 1
    torch.save({name: one.cpu() for name, one in there.state_dict().items()}, tmp_path / "state.pt")
    here.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu"))
    back: Any = Memory(db, k=5).to(device)
    back.load_state_dict(here.state_dict())  # of the RAM, into parameters there
    again: Any = Memory(db, k=5)
    again.load_state_dict(there.state_dict())
    queries = torch.randn(4, D)
    expected = there(queries.to(device)).output
    for memory in (here, back, again, copy.deepcopy(there), copy.deepcopy(there).to("cpu")):
        assert {parameter.device for parameter in memory.parameters()} == {memory.device}
        same(memory(queries.to(memory.device)).output, expected)
    assert back.report().uncommitted == N  # loaded, so all of it may differ


def test_queries_are_answered_where_they_lie(device: torch.device) -> None:
    here, there = both(filled(), device, k=5)
    queries = torch.randn(4, D)
    expected = here(queries).output
    for memory, asked in ((there, queries), (here, queries.to(device))):
        leaf: Any = asked.clone().requires_grad_()
        pooled = memory(leaf)
        assert pooled.output.device == pooled.hits.rows.device == asked.device
        same(pooled.output, expected)
        pooled.output.sum().backward()
        assert leaf.grad.device == asked.device
    assert there(queries.tolist()).output.device == device  # numbers lie nowhere


def test_a_memory_moves_between_devices_during_training(device: torch.device) -> None:
    db = large()
    db.build_index("ivf")
    memory: Any = Memory(db, k=3, reindex=1)
    queries = torch.randn(5, 16)
    assert memory(queries).finder == "ivf"
    memory.reindex()
    assert memory(queries).finder == "stale index"
    memory.to(device)
    for _ in range(2):
        memory.zero_grad()
        pooled = memory(queries.to(device))
        assert pooled.finder == "flat"
        pooled.output.sum().backward()
        torch.optim.SGD(memory.parameters(), lr=0.1).step()
        assert memory.step() == "kept"
    assert (memory.age, memory.measure()) == (0, 1.0)
    assert memory.reindex() is None
    before, touched = memory(queries.to(device)).output, memory.report().uncommitted
    memory.to("cpu")
    assert memory.age == 2  # candidates come from the keys of the last commit
    memory.reindex()
    same(memory(queries).output, before)
    assert memory.commit() == touched


def test_reload_reads_the_changes_of_others(device: torch.device) -> None:
    db = filled()
    memory: Any = Memory(db, k=5).to(device)
    with torch.no_grad():
        memory.keys += 1
    learnt = memory.keys.detach().cpu().clone()
    db.delete([4])
    db.insert(["new"], torch.ones(1, D), torch.ones(1, V))
    assert memory.reload() == N
    assert memory.keys.device == device
    assert torch.equal(memory.keys.detach().cpu()[:4], learnt[:4])
    memory(torch.randn(2, D).to(device)).output.sum().backward()
    assert memory.report().uncommitted > 0


def test_bad_queries_and_mixed_devices_are_refused(device: torch.device) -> None:
    memory: Any = Memory(filled(), k=5).to(device)
    with pytest.raises(BadInput, match="queries hold NaN or infinity, first in query 1"):
        memory(torch.tensor([[1.0] * D, [70000.0] * D]).half().to(device))
    memory.values = torch.nn.Parameter(memory.values.detach().cpu())
    with pytest.raises(BadInput, match=r"the memory has keys on \w+:0 and values on cpu; move both with"):
        memory(torch.randn(2, D))
    memory.to(device)
    memory(torch.randn(2, D))
    with pytest.raises(BadInput, match="in which small steps are lost; keep the memory in float32"):
        memory.half()(torch.randn(2, D))
