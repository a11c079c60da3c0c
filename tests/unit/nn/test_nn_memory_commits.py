"""softdb.nn.Memory: durable commits beside changes by others."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import D, N, V, filled, holding
from worlds.memories import large, moved, stored, trained

import softdb
from softdb.errors import BadInput, ReadOnly, StaleRead
from softdb.nn import Memory

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# -- commits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_commit_writes_only_the_trained_rows(tmp_path: Path, dtype: Any) -> None:
    db = filled(path=tmp_path / "db", dtype=dtype)
    memory = Memory(db, k=4)
    before, rows = stored(db), db.search(torch.randn(1, D), N).rows.max()
    trained(memory, torch.randn(3, D))
    touched = np.flatnonzero(memory._touched)
    assert 4 <= len(touched) <= 12
    assert memory.report().uncommitted == len(touched)
    generation = db.stats().generation
    assert memory.commit() == len(touched)
    assert db.stats().generation == generation + 1  # one transaction
    assert memory.report().uncommitted == 0
    assert memory.commit() == 0
    db.close()
    with softdb.open(tmp_path / "db", verify=True) as again:
        after = stored(again)
        assert memory.keys is not None
        assert memory.values is not None
        for old, new, parameter in zip(before, after, (memory.keys, memory.values), strict=True):
            same = (old == new).all(1)
            assert set(np.flatnonzero(~same.numpy())) == set(touched)
            assert torch.equal(new, parameter.detach().to(new.dtype))
        assert again.get([int(touched[0])]).payloads == [{"odd": bool(touched[0] % 2)}]
        assert int(again.search(torch.randn(1, D), N).rows.max()) == rows + len(touched)


def test_training_goes_on_after_a_commit_with_the_same_parameters() -> None:
    db = filled()
    memory = Memory(db, k=5)
    twin = copy.deepcopy(memory)  # follows what the other writes
    queries = torch.randn(4, D)
    for one in (memory, twin):
        trained(one, queries)
        if one is memory:
            one.commit()
        trained(one, queries)
    ours, theirs = memory(queries), twin(queries)
    assert torch.equal(ours.output, theirs.output)
    assert ours.hits is not None
    assert memory.commit() > 0
    assert ours.hits.rows.shape == (4, 5)
    again = memory(queries).hits
    assert again is not None
    assert [set(one) for one in again.ids] == [set(one) for one in memory(queries).hits.ids]  # type: ignore[union-attr]
    torch.testing.assert_close(db.attend(queries, k=5).output, memory(queries).output, atol=1e-5, rtol=1e-5)
    with pytest.raises(StaleRead, match="gone or replaced since the search"):
        _ = ours.hits.ids  # of before the commit


def test_a_step_that_stands_out_at_a_commit_is_written_with_the_next() -> None:
    memory = Memory(filled(), k=4)
    optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)
    queries = torch.randn(2, D)
    memory(queries).output.sum().backward()  # type: ignore[no-untyped-call]
    assert memory.commit() == 0  # nothing differs yet
    optimizer.step()
    count = memory.commit()
    assert count > 0
    optimizer.step()  # again, by the gradient that is still there
    assert memory.commit() == count
    optimizer.zero_grad()
    assert memory.commit() == 0


def test_changes_by_hand_are_written_when_everything_is_compared() -> None:
    memory = Memory(filled(), k=4)
    with torch.no_grad():
        assert memory.values is not None
        memory.values[9] += 1
    assert memory.commit() == 0
    assert memory.commit(everything=True) == 1
    torch.autograd.backward(
        memory.values.square().sum()
    )  # a dense gradient, of a loss that looks at the parameter itself
    torch.optim.SGD(memory.parameters(), lr=0.1).step()
    assert memory.commit() == N


def test_broken_parameters_are_not_committed() -> None:
    db = filled(dtype="float16")
    memory = Memory(db, k=4)
    moved(memory, torch.tensor([4]), torch.full((1, D), 1e6))
    before, generation = stored(db), db.stats().generation
    with pytest.raises(BadInput, match="the largest float16 is 65504"):
        memory.commit()
    moved(memory, torch.tensor([4]), torch.full((1, D), torch.nan))
    with pytest.raises(BadInput, match="keys hold NaN or infinity"):
        memory.commit()
    assert db.stats().generation == generation
    assert torch.equal(stored(db)[0], before[0])
    moved(memory, torch.tensor([4]), torch.ones(1, D))
    assert memory.commit() == 1


def test_a_database_for_reading_trains_but_does_not_commit(tmp_path: Path) -> None:
    filled(path=tmp_path / "db").close()
    queries = torch.randn(3, D)
    with softdb.open(tmp_path / "db", mode="r") as db:
        memory = Memory(db, k=4)
        trained(memory, queries)
        with pytest.raises(ReadOnly, match="open the database with mode='rw'"):
            memory.commit()
        learnt = memory.state_dict()
    with softdb.open(tmp_path / "db") as db:
        writer = Memory(db, k=4)
        writer.load_state_dict(learnt)
        assert 0 < writer.commit() < N  # all are compared, and what differs is written
        assert torch.equal(stored(db)[0], learnt["keys"])


CRASH = """
import sys, torch, softdb
from softdb.nn import Memory
db = softdb.open(sys.argv[1])
memory = Memory(db, k=100)
step = int(memory.values.detach()[0, 0])
optimizer = torch.optim.SGD(memory.parameters(), lr=1.0)
queries = torch.zeros(1, db.stats().dim)
while True:  # every value grows by 1 a step
    optimizer.zero_grad()
    (-100 * memory(queries).output.sum()).backward()
    optimizer.step()
    step += 1
    memory.commit()
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_training_loses_only_uncommitted_steps(tmp_path: Path) -> None:
    db = holding(torch.randn(100, 4), torch.zeros(100, 3), path=tmp_path / "db")
    db.close()
    told = 0
    for round_ in range(2):
        worker = subprocess.Popen(
            [sys.executable, "-c", CRASH, str(tmp_path / "db")], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        for _ in range(4 + 3 * round_):
            told = int(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        with softdb.open(tmp_path / "db", verify=True) as again:
            _, values = stored(again, 100)
            later = [told, *(int(line) for line in worker.stdout.read().split())]
            reached = float(values[0, 0])
            assert (values == reached).all()  # all of a commit or nothing
            assert later[-1] <= reached <= later[-1] + 1
        worker.stdout.close()


# -- changes by others -------------------------------------------------------------------------------------------------


def test_search_leaves_out_deleted_replaced_and_uncommitted_records() -> None:
    db = filled()
    memory = Memory(db, k=N)
    db.delete([4])
    db.update([5], keys=torch.ones(1, D))
    db.insert(["new"], torch.ones(1, D), torch.ones(1, V))
    pooled = memory(torch.randn(2, D))
    assert pooled.hits is not None
    assert pooled.exact.all()
    assert {one for ids in pooled.hits.ids for one in ids} == set(range(N)) - {4, 5}
    assert memory.reload() == N
    pooled = memory(torch.randn(2, D))
    assert pooled.hits is not None
    assert {one for ids in pooled.hits.ids for one in ids} == set(range(N)) - {4} | {"new"}


def test_a_deleted_trained_record_stops_a_commit_until_a_reload() -> None:
    db = filled()
    memory = Memory(db, k=4)
    trained(memory, torch.randn(3, D))
    touched = np.flatnonzero(memory._touched)
    db.upsert([int(touched[0])], torch.zeros(1, D), torch.zeros(1, V), [None])
    db.insert(["new"], torch.ones(1, D), torch.ones(1, V))
    generation = db.stats().generation
    with pytest.raises(StaleRead, match=f"1 of {len(touched)} trained records were deleted or replaced since"):
        memory.commit()
    assert db.stats().generation == generation
    learnt = memory.keys.detach()[touched[1:]].clone()  # type: ignore[union-attr]
    optimizer = torch.optim.SparseAdam(list(memory.parameters()))
    assert memory.reload() == N + 1
    with pytest.raises(BadInput, match="holds no parameter of the memory"):
        memory.check(optimizer)
    assert memory.commit() == len(touched) - 1
    assert torch.equal(db.get(touched[1:].tolist()).keys, learnt)
    assert db.get([int(touched[0]), "new"]).keys.tolist() == [[0.0] * D, [1.0] * D]
    trained(memory, torch.ones(3, D) * 3)
    assert memory.commit() > 0


def test_a_write_between_the_two_halves_of_a_commit_survives() -> None:
    db = filled()
    memory = Memory(db, k=4)
    moved(memory, torch.tensor([4]), torch.ones(1, D))
    read, threads = db._store.read, []

    def meanwhile(rows: Any) -> Any:
        known = read(rows)
        threads.append(threading.Thread(target=db.update, args=([4],), kwargs={"keys": torch.full((1, D), 9.0)}))
        threads[-1].start()
        threads[-1].join(0.2)
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(db._store, "read", meanwhile)
        memory.commit()
    for thread in threads:
        thread.join()
    assert len(threads) == 1
    assert db.get([4]).keys.tolist() == [[9.0] * D]  # it came after the commit, not under it


def test_a_reload_sees_one_generation() -> None:
    db = filled()
    memory = Memory(db, k=N)
    newest, write = memory._at_newest, iter([True])

    def meanwhile() -> Any:
        origin = newest()
        if next(write, False):
            db.insert(["late"], torch.ones(1, D), torch.ones(1, V))
        return origin

    db.insert(["new"], torch.ones(1, D), torch.ones(1, V))
    memory._at_newest = meanwhile  # type: ignore[method-assign]
    assert memory.reload() == N + 1
    assert memory._followed.origin.present.all()  # none of a later generation, whose columns it could not read
    assert memory.reload() == N + 2


def test_a_reload_that_cannot_copy_the_keys_changes_nothing() -> None:
    db = large(10_500, dtype="float16")
    memory = Memory(db, k=2)
    memory.reindex()
    keys = memory.keys
    for wrong in (torch.nan, 1e6):
        moved(memory, torch.tensor([4]), torch.full((1, 16), wrong))
        db.upsert(["new"], torch.ones(1, 16), torch.ones(1, V))
        with pytest.raises(BadInput, match="keys are NaN, infinite or too large"):
            memory.reload()
        assert memory.keys is keys
        assert len(memory) == 10_500
        assert memory(torch.ones(1, 16)).finder == "stale index"


def test_a_reload_where_nothing_changed_leaves_the_parameters_alone() -> None:
    db = filled()
    memory = Memory(db, k=4)
    keys = memory.keys
    trained(memory, torch.randn(3, D))
    memory.commit()
    assert memory.reload() == N
    assert memory.keys is keys


def test_a_compaction_changes_no_parameter() -> None:
    db = filled()
    memory = Memory(db, k=4)
    queries = torch.randn(3, D)
    trained(memory, queries)
    memory.commit()
    expected = memory(queries).output
    db.delete(list(range(0, N, 7)))
    gone = memory(queries).output
    db.compact()
    assert torch.equal(memory(queries).output, gone)
    assert not torch.equal(gone, expected)
    trained(memory, queries)
    assert memory.commit() > 0
    torch.testing.assert_close(memory(queries).output, db.attend(queries, k=4).output, atol=1e-5, rtol=1e-5)


def test_with_an_index_records_of_others_take_no_part() -> None:
    db = large()
    db.build_index("ivf")
    memory = Memory(db, k=3)
    far = torch.full((1, 16), 50.0)
    db.insert(["new"], far, torch.ones(1, V))
    first = memory(far)
    assert first.finder == "ivf"
    assert first.hits is not None
    assert "new" not in first.hits.ids[0]
    best = first.hits.ids[0][0]
    db.delete([best])
    second = memory(far).hits
    assert second is not None
    assert (
        second.ids[0][:2]
        == first.hits.__class__(first.hits.rows[:, 1:], first.hits.scores[:, 1:], first.hits.resolve).ids[0]
    )
    memory.reindex()
    third = memory(far)
    assert third.finder == "stale index"
    assert third.hits is not None
    assert third.hits.ids == second.ids
