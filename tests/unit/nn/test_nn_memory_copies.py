"""softdb.nn.Memory: its state, copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import D, N, V, filled, holding
from worlds.memories import large, stored, trained

from softdb.errors import BadInput, ReadOnly
from softdb.nn import Memory

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def test_the_state_is_the_parameters_and_whose_they_are() -> None:
    db = filled()
    memory = Memory(db, k=4)
    queries = torch.randn(3, D)
    trained(memory, queries)
    held = io.BytesIO()
    torch.save(memory.state_dict(), held)
    held.seek(0)
    state = torch.load(held)
    assert list(state) == ["keys", "values", "records"]
    other = Memory(db, k=4)
    other.load_state_dict(state)
    assert torch.equal(other(queries).output, memory(queries).output)
    replaced = Memory(db, k=4)
    replaced.load_state_dict(state, assign=True)
    trained(replaced, queries)
    assert replaced.commit() > 0


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_finds_its_records_whatever_their_order(assign: bool) -> None:
    db = filled()
    memory = Memory(db, k=4)
    trained(memory, torch.randn(3, D))
    memory.commit()  # whose records have other rows now, and stand elsewhere in a memory made from here on
    trained(memory, torch.randn(3, D))
    twin = Memory(db, k=4)
    other = torch.nn.ModuleDict({"inner": twin})
    other.load_state_dict({f"inner.{name}": one for name, one in memory.state_dict().items()}, assign=assign)
    queries = torch.randn(5, D)
    expected = memory(queries).output
    assert torch.equal(twin(queries).output, expected)
    assert twin.commit() < N
    torch.testing.assert_close(db.attend(queries, k=4).output, expected, atol=1e-5, rtol=1e-5)
    keys, values = stored(db)
    assert memory.keys is not None
    assert memory.values is not None
    assert torch.equal(keys, memory.keys.detach())  # by id, which are in the memory's order
    assert torch.equal(values, memory.values.detach())


def test_a_state_of_other_records_is_refused_before_anything_changes() -> None:
    memory = Memory(filled(), k=4)
    keys = memory.keys.detach().clone()  # type: ignore[union-attr]
    others = holding(torch.randn(N, D), torch.randn(N, V), ids=[*range(N - 1), "3"])
    with pytest.raises(BadInput, match=f"the state lacks 1 of this memory's {N} records and holds 1 others"):
        memory.load_state_dict(Memory(others).state_dict())
    with pytest.raises(BadInput, match=f"the state lacks 0 of this memory's {N} records and holds 2 others"):
        memory.load_state_dict(Memory(filled(N + 2)).state_dict())
    state = memory.state_dict()
    with pytest.raises(BadInput, match="the state's 'records' are None"):
        memory.load_state_dict({"keys": torch.ones(N, D), "values": state["values"]}, strict=False)
    with pytest.raises(BadInput, match=rf"the state has {N} records but columns of \[{N - 1}, {N}\] rows"):
        memory.load_state_dict({**state, "keys": torch.ones(N - 1, D)})
    assert torch.equal(memory.keys, keys)  # type: ignore[arg-type]
    assert memory.report().uncommitted == 0


def test_loading_a_state_drops_deleted_records() -> None:
    db = filled()
    memory = Memory(db, k=4)
    trained(memory, torch.randn(3, D))
    before = {name: one.clone() for name, one in memory.state_dict().items()}
    db.delete([0, 7])
    after = memory.state_dict()
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys.zero_()
    memory.load_state_dict(before)
    assert torch.equal(memory.keys, before["keys"])
    fresh = Memory(db, k=4)
    fresh.load_state_dict(after)
    queries = torch.randn(3, D)
    assert torch.equal(fresh(queries).output, memory(queries).output)
    db.close()
    assert torch.equal(memory.state_dict()["records"], after["records"])  # and asks the database for nothing


def test_columns_that_are_not_contiguous_are_read_as_they_are() -> None:
    db, queries = large(), torch.randn(3, 16)
    db.build_index("ivf")
    memory, other = Memory(db, k=4), Memory(db, k=4)
    trained(memory, queries)
    assert memory(queries).finder == "ivf"
    state = memory.state_dict()
    state["keys"] = state["keys"].t().contiguous().t()
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(queries).output, memory(queries).output)


def test_however_often_a_state_is_loaded_a_gradient_is_noted_once() -> None:
    memory = Memory(filled(), k=4)
    mark, noted = Memory._mark, []

    def noting(self: Memory, one: Tensor) -> None:
        noted.append(one)
        mark(self, one)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "_mark", noting)
        memory.load_state_dict(memory.state_dict())
        memory.load_state_dict(memory.state_dict())
        memory(torch.randn(2, D)).output.sum().backward()  # type: ignore[no-untyped-call]
    assert len(noted) == 2


def test_copies_share_only_the_handle() -> None:
    db = filled()
    memory = Memory(db, k=4)
    twin = copy.deepcopy(memory)
    assert twin.db is db
    queries = torch.randn(3, D)
    trained(twin, queries)
    assert np.count_nonzero(memory._touched) == 0
    assert not torch.equal(twin(queries).output, memory(queries).output)
    assert memory.commit() == 0
    assert twin.commit() > 0
    trained(memory, torch.randn(3, D))
    touched = np.flatnonzero(memory._touched)
    assert memory.commit() == len(touched)  # follows the records to where the other has written them
    assert memory.keys is not None
    assert torch.equal(stored(db)[0][touched], memory.keys.detach()[touched])
    assert memory(queries).exact.logical_not().all()
    assert twin(queries).n_pooled.tolist() == [4] * 3


def test_a_pickle_reopens_the_database(tmp_path: Path) -> None:
    db = filled(path=tmp_path / "db")
    memory = Memory(db, k=4)
    queries = torch.randn(3, D)
    trained(memory, queries)
    memory.commit()
    twin: Memory = pickle.loads(pickle.dumps(memory))
    assert torch.equal(twin(queries).output, memory(queries).output)
    trained(twin, queries)
    assert np.count_nonzero(twin._touched) > 0
    with pytest.raises(ReadOnly, match="read-only"):
        twin.commit()
    twin.db.close()
    with pytest.raises(BadInput, match="a database in memory cannot be pickled"):
        pickle.dumps(Memory(filled()))


def test_a_frozen_parameter_is_unchanged() -> None:
    memory = Memory(filled(), k=4)
    assert memory.keys is not None
    memory.keys.requires_grad_(False)
    before = memory.keys.detach().clone()
    twin = copy.deepcopy(memory)
    for one in (memory, twin):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        one(torch.randn(2, D)).output.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert one.keys is not None
        assert torch.equal(one.keys, before)
    assert memory.commit() > 0


def test_functions_that_initialise_embeddings_leave_the_records_as_they_are() -> None:
    """A memory is an nn.Embedding to DistributedDataParallel, and so it is to a model's `apply`."""
    model = torch.nn.Sequential(torch.nn.Linear(D, D), Memory(filled()))
    before = [parameter.detach().clone() for parameter in model[1].parameters()]

    def initialise(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.xavier_uniform_(module.weight)
            module.reset_parameters()

    model.apply(initialise)
    assert all(map(torch.equal, before, model[1].parameters()))
    assert [name for name, _ in model[1].named_parameters()] == ["keys", "values"]
