"""softdb.nn.Memory: outputs and sparse gradients against dense torch, staleness, and commits that last."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import index_report
from torch import Tensor

import softdb
import softdb.nn.memory
from softdb.errors import BadInput, Cancelled, Closed, ReadOnly, StaleRead
from softdb.index.background import Build
from softdb.nn import Memory
from softdb.nn.reindexed import EverySteps, InBackground, OnRecall
from softdb.nn.stale_index import StaleIndex
from softdb.reports import IndexReport, ReindexReport

N, D, V = 40, 5, 3
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def filled(n: int = N, d: int = D, v: int | None = V, path: Any = None, **words: Any) -> softdb.SoftDB:
    """Ids 0 … n - 1; with ties, a duplicate and a zero key."""
    db = softdb.open(path, dim=d, value_dim=v, **words)
    keys = torch.randn(n, d)
    if n > 3:
        keys[1], keys[2], keys[3] = keys[0], 0, -keys[0]
    values = torch.arange(n) % 4 if "num_classes" in words else None if v is None else torch.randn(n, v)
    if n:
        db.insert(list(range(n)), keys, values, [{"odd": i % 2 == 1} for i in range(n)])
    return db


def large(n: int = 12_000, d: int = 16, **words: Any) -> softdb.SoftDB:
    """Enough records for an index, in clusters."""
    centres = torch.randn(64, d) * 3
    db = softdb.open(None, dim=d, value_dim=V, **words)
    db.insert(list(range(n)), centres[torch.arange(n) % 64] + torch.randn(n, d), torch.randn(n, V))
    return db


def dense(db: softdb.SoftDB, keys: Tensor, values: Tensor, queries: Tensor, k: int, t: float) -> tuple[Tensor, Tensor]:
    """The equation by loops: output (q, v) and lse (q,)."""
    metric = db.stats().metric
    outputs, normalisers = [], []
    for q in queries:
        scores = []
        for key in keys:
            if metric == "dot":
                scores.append((q * key).sum())
            elif metric == "l2":
                scores.append(-((q - key) ** 2).sum())
            else:
                length = q.norm() * key.norm()
                scores.append((q * key).sum() / length if length > 0 else (q * key).sum() * 0)
        row = torch.stack(scores)
        best = row.detach().sort(descending=True, stable=True).indices[:k]
        z = row[best] / t
        normalisers.append(z.logsumexp(0))
        outputs.append(z.softmax(0) @ values[best])
    return torch.stack(outputs), torch.stack(normalisers)


def stored(db: softdb.SoftDB, n: int = N) -> tuple[Tensor, Tensor]:
    records = db.get(list(range(n)))
    return records.keys, records.keys if records.values is None else records.values


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 6, N, N + 5])
def test_outputs_and_gradients_are_those_of_dense_torch(metric: Any, k: int) -> None:
    db = filled(metric=metric)
    memory = Memory(db, k=k, temperature=0.7)
    queries = torch.randn(7, D)
    mine = [queries.clone().requires_grad_(), memory.keys, memory.values]
    pooled = memory(mine[0])
    leaves = [one.detach().double().requires_grad_() for one in (queries, *stored(db))]
    output, lse = dense(db, leaves[1], leaves[2], leaves[0], k, 0.7)
    torch.testing.assert_close(pooled.output.double(), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled.lse.double(), lse, atol=1e-5, rtol=1e-5)
    up, down = torch.randn(7, V), torch.randn(7)
    ((pooled.output * up).sum() + (pooled.lse * down).sum()).backward()  # type: ignore[no-untyped-call]
    torch.autograd.backward((output * up).sum() + (lse * down).sum())
    for one, other in zip(mine, leaves, strict=True):
        assert one is not None
        assert one.grad is not None
        torch.testing.assert_close(one.grad.to_dense().double(), other.grad, atol=1e-5, rtol=1e-4)
    assert pooled.exact.all() == (k >= N)
    assert pooled.missed_mass.isnan().all() == (k < N)
    assert pooled.finder == "flat"


class Densely(torch.autograd.Function):
    """The identity, whose gradient is dense: gradcheck compares no others."""

    @staticmethod
    def forward(_: Any, leaf: Tensor) -> Tensor:
        return leaf.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad.to_dense()


@pytest.mark.parametrize("words", [{}, {"keys": False}, {"values": False}])
def test_gradcheck(words: dict[str, Any]) -> None:
    memory = Memory(filled(12), k=4, temperature=0.5, **words).double()
    queries = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in memory.named_parameters()]
    assert names == [name for name in ("keys", "values") if words.get(name, True)]
    leaves = [one.detach().clone().requires_grad_() for one in memory.parameters()]

    def asked(queries: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        columns = dict(zip(names, map(Densely.apply, leaves), strict=True))
        pooled = torch.func.functional_call(memory, columns, (queries,))
        return pooled.output, pooled.lse, pooled.weights

    assert torch.autograd.gradcheck(asked, (queries, *leaves))


def test_gradients_are_sparse_and_of_the_records_found() -> None:
    memory = Memory(filled(), k=4)
    pooled = memory(torch.randn(2, D))
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
    assert pooled.hits is not None
    for parameter in (memory.keys, memory.values):
        assert parameter is not None
        assert parameter.grad is not None
        assert parameter.grad.is_sparse
        assert set(parameter.grad._indices()[0].tolist()) == set(pooled.hits.rows.flatten().tolist())
        assert parameter.grad._values().shape[0] == 2 * 4


def test_overfetched_candidates_get_no_gradient() -> None:
    db = large()
    db.build_index("ivf")
    memory = Memory(db, k=3, overfetch=20)
    pooled = memory(torch.randn(5, 16))
    assert pooled.finder == "ivf"
    pooled.output.sum().backward()  # type: ignore[no-untyped-call]
    assert memory.keys is not None
    assert memory.keys.grad is not None
    assert memory.keys.grad._values().shape[0] == 5 * 3


def test_the_search_is_as_hard_as_for_k_however_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    db, efforts = large(), []
    db.build_index("ivf", k=10)
    index = db.finder.index
    assert index is not None
    search = type(index).find

    def find(self: Any, queries: Any, c: int, allowed: Any = None, effort: int | None = None) -> Any:
        efforts.append(effort)
        return search(self, queries, c, allowed, effort)

    monkeypatch.setattr(type(index), "find", find)
    Memory(db, k=10, overfetch=4)(torch.randn(5, 16))
    assert efforts == [index.effort]


@pytest.mark.slow
def test_the_memory_of_a_step_does_not_grow_with_the_records() -> None:
    import tracemalloc

    peaks = []
    for n in (12_000, 48_000):
        db = large(n)
        db.build_index("ivf")
        memory = Memory(db, k=8)
        optimizer = torch.optim.SGD(memory.parameters(), lr=0.1)
        queries = torch.randn(4, 16)

        def step(memory: Memory = memory, optimizer: Any = optimizer, queries: Tensor = queries) -> None:
            memory(queries).output.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        step()  # what is kept from one step to the next
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            tracemalloc.start()
            step()
            numpy_peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
        peaks.append(numpy_peak + allocated)
    assert max(peaks) < 48_000  # less than a byte a record; a dense gradient takes 64


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SparseAdam(list(p), lr=0.05),
        lambda p: torch.optim.Adagrad(p, lr=0.3),
        lambda p: torch.optim.SGD(p, lr=1.0),
    ],
)
def test_it_learns_with_every_sparse_optimiser(make: Any) -> None:
    memory = Memory(filled(), k=6)
    optimizer = make(memory.parameters())
    memory.check(optimizer)
    queries, target = torch.randn(16, D), torch.randn(16, V)
    losses = []
    for _ in range(60):
        loss = (memory(queries).output - target).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_optimisers_that_cannot_are_named_with_those_that_can() -> None:
    memory = Memory(filled())
    mine = list(memory.parameters())
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        with pytest.raises(BadInput, match=f"{kind.__name__} takes no sparse gradients; use torch.optim.SparseAdam"):
            memory.check(kind(mine, lr=0.1))
    with pytest.raises(BadInput, match=r"this SGD has momentum=0\.9, which reaches every record"):
        memory.check(torch.optim.SGD(mine, lr=0.1, momentum=0.9))
    with pytest.raises(BadInput, match=r"this Adagrad has weight_decay=0\.1"):
        memory.check(torch.optim.Adagrad(mine, lr=0.1, weight_decay=0.1))
    with pytest.raises(BadInput, match="this SGD holds no parameter of the memory"):
        memory.check(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    other = torch.nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": mine}, {"params": [other], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    memory.check(optimizer)  # what others do with theirs is theirs


# -- which columns -----------------------------------------------------------------------------------------------------


def test_labels_stay_and_keys_train() -> None:
    db = filled(v=None, num_classes=4)
    memory = Memory(db, k=N)
    assert memory.values is None
    pooled = memory(torch.randn(3, D))
    torch.testing.assert_close(pooled.output.sum(1), torch.ones(3))
    pooled.output[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    assert memory.keys is not None
    assert memory.keys.grad is not None
    keys, labels = stored(db)
    leaf = keys.double().requires_grad_()
    queries = torch.randn(3, D)
    output, _ = dense(db, leaf, torch.nn.functional.one_hot(labels, 4).double(), queries.double(), N, 1.0)
    torch.testing.assert_close(memory(queries).output.double(), output, atol=1e-5, rtol=1e-5)
    with pytest.raises(BadInput, match="values=True, but this database's values are labels, which cannot be trained"):
        Memory(db, values=True)


def test_where_the_key_serves_the_trained_key_is_the_value() -> None:
    db = filled(v=None)
    memory = Memory(db, k=N)
    queries = torch.randn(4, D)
    pooled = memory(queries)
    leaf = stored(db)[0].double().requires_grad_()
    output, _ = dense(db, leaf, leaf, queries.double(), N, 1.0)
    torch.testing.assert_close(pooled.output.double(), output, atol=1e-5, rtol=1e-5)
    up = torch.randn(4, D)
    torch.autograd.backward([pooled.output, output], [up, up.double()])
    assert memory.keys is not None
    assert memory.keys.grad is not None
    torch.testing.assert_close(memory.keys.grad.to_dense().double(), leaf.grad, atol=1e-5, rtol=1e-4)
    with pytest.raises(BadInput, match="values=True, but this database's values are none: the key serves"):
        Memory(db, values=True)


def test_what_is_not_trained_is_read_from_the_database() -> None:
    db = filled()
    queries = torch.randn(4, D)
    expected = db.attend(queries, k=6).output
    for words in ({"keys": False}, {"values": False}):
        memory = Memory(db, k=6, **words)
        assert len(list(memory.parameters())) == 1
        torch.testing.assert_close(memory(queries).output, expected)


def test_it_is_the_soft_query_of_the_database_before_training() -> None:
    for metric in ("dot", "cosine", "l2"):
        db = filled(metric=metric, dtype="float16")
        queries = torch.randn(6, D)
        mine, theirs = Memory(db, k=5, temperature=0.3)(queries), db.attend(queries, k=5, temperature=0.3)
        torch.testing.assert_close(mine.output, theirs.output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.lse, theirs.lse, atol=1e-5, rtol=1e-5)
        assert mine.hits is not None
        assert theirs.hits is not None
        assert mine.hits.ids == theirs.hits.ids
        assert mine.hits.payloads == theirs.hits.payloads
        assert str(mine.explain(3)[0]).endswith("effectively " + str(theirs.explain(3)[0]).rsplit(" ", 1)[1])


@pytest.mark.parametrize("words", [{}, {"v": None}, {"v": None, "num_classes": 4}])
def test_an_empty_database(words: dict[str, Any]) -> None:
    memory = Memory(filled(0, **words))
    queries = torch.randn(3, D, requires_grad=True)
    pooled = memory(queries)
    assert pooled.exact.all()
    assert (pooled.output == 0).all()
    assert (pooled.lse == -torch.inf).all()
    (pooled.output.sum() + pooled.lse.nan_to_num(neginf=0).sum()).backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert (queries.grad == 0).all()
    assert memory.commit() == 0


def test_what_cannot_be_made_or_asked() -> None:
    db = filled()
    with pytest.raises(BadInput, match="db is None; expected an open softdb database"):
        Memory(None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="neither keys nor values would be trained"):
        Memory(db, keys=False, values=False)
    with pytest.raises(BadInput, match="neither keys nor values would be trained"):
        Memory(filled(v=None), keys=False)
    with pytest.raises(BadInput, match="keys is 1 and values None; expected True or False"):
        Memory(db, keys=1)  # type: ignore[arg-type]
    for word in ("k", "overfetch", "reindex", "temperature"):
        wrong: dict[str, Any] = {word: 0}
        with pytest.raises(BadInput, match=f"{word} is 0; expected"):
            Memory(db, **wrong)
    memory = Memory(db)
    with pytest.raises(BadInput, match="queries are 4 wide but this database's keys are 5 wide"):
        memory(torch.zeros(2, 4))
    with pytest.raises(BadInput, match=r"the keys are torch.bfloat16 on cpu; a memory lives in the RAM, in float32"):
        Memory(db).bfloat16()(torch.zeros(2, D))
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys[:] = torch.nan
    with pytest.raises(BadInput, match="scores are NaN or infinite: training has moved the keys too far"):
        memory(torch.ones(2, D))
    db.close()
    with pytest.raises(Closed, match="closed"):
        memory(torch.zeros(2, D))
    with pytest.raises(Closed, match="closed"):
        memory.commit()
    with pytest.raises(Closed, match="closed"):
        Memory(db)


# -- candidates --------------------------------------------------------------------------------------------------------


def moved(memory: Memory, which: Tensor, to: Tensor) -> None:
    """As if trained: keys stand elsewhere, and the memory knows that they had a gradient."""
    assert memory.keys is not None
    with torch.no_grad():
        memory.keys[which] = to
    memory.keys.grad = torch.sparse_coo_tensor(which[None], torch.zeros(len(which), to.shape[1]), memory.keys.shape)
    memory._mark(memory.keys)
    memory.keys.grad = None


def test_below_ten_thousand_records_nothing_is_stale() -> None:
    db = large(9_000)
    db.build_index("ivf")
    memory = Memory(db, k=1, reindex=1)
    far = torch.full((1, 16), 50.0)
    moved(memory, torch.tensor([7]), far)
    pooled = memory(far)
    assert pooled.hits is not None
    assert pooled.hits.rows.tolist() == [[7]]
    assert pooled.finder == "flat"
    memory.step()
    assert memory.report().reindexes == memory.age == 0


def test_a_stale_index_misses_what_moved_far_until_a_refresh() -> None:
    db = large()
    db.build_index("ivf")
    memory = Memory(db, k=1)
    far = torch.full((1, 16), 50.0)
    last = memory(far).hits
    assert last is not None
    loser = int((memory.keys @ far[0]).argmin())  # type: ignore[operator]
    moved(memory, torch.tensor([loser]), far)
    assert memory(far).hits.rows.tolist() == last.rows.tolist()  # type: ignore[union-attr]
    assert memory.measure(k=1) < 1
    memory.reindex()
    pooled = memory(far)
    assert pooled.finder == "stale index"
    assert pooled.hits.rows.tolist() == [[loser]]  # type: ignore[union-attr]
    assert memory.measure(k=1) == 1
    torch.testing.assert_close(pooled.lse, far.square().sum(1))


def test_candidates_are_scored_as_they_are() -> None:
    db = large()
    db.build_index("ivf")
    memory = Memory(db, k=6, overfetch=100)
    queries = torch.randn(8, 16)
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys.add_(0.7 * torch.randn(memory.keys.shape))
    truth = (queries @ memory.keys.detach().T).topk(6).indices
    shares = []
    for overfetch in (1, 100):
        memory.overfetch = overfetch
        pooled = memory(queries)
        assert pooled.finder == "ivf"
        assert pooled.hits is not None
        rows, scores = pooled.hits.rows, pooled.hits.scores
        shares.append(float((rows[:, :, None] == truth[:, None, :]).any(2).double().mean()))
        now = (queries.unsqueeze(1) * memory.keys[rows]).sum(2)
        torch.testing.assert_close(scores, now, atol=1e-4, rtol=1e-4)
        assert (scores[:, 1:] <= scores[:, :-1]).all()  # best first, as they are
    assert shares[0] < 0.8
    assert shares[1] > 0.95


def test_reindexing_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    db = large(10_500)
    memory = Memory(db, k=2, reindex=EverySteps(2))
    assert [memory.step() for _ in range(2)] == ["kept", "kept"]  # no index: every key is compared, nothing lags
    db.build_index("ivf")
    assert memory.age == 2
    assert memory.step() == "reindexed"
    assert [memory.age, memory.report().reindexes] == [0, 1]
    assert [memory.step(), memory.step()] == ["kept", "reindexed"]
    assert memory.report().total_seconds > memory.report().seconds > 0
    memory.policy = OnRecall(0.99, every=1, k=1)
    memory(torch.randn(64, 16))
    assert memory.step() == "measured"
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys.copy_(memory.keys.flip(0))
    assert memory.step() == "reindexed"
    assert (memory.report().recall or 0) < 0.99
    memory.policy = InBackground(1)
    gate, replace = threading.Event(), StaleIndex.replace
    monkeypatch.setattr(StaleIndex, "replace", lambda *args: gate.wait(30) and replace(*args))
    assert memory.step() == "started"
    assert memory.reindexing
    with pytest.raises(BadInput, match="a reindexing is under way in the background"):
        memory.reindex(background=True)
    assert memory._build is not None
    gate.set()
    memory._build.result(30)
    memory.policy = EverySteps(100)
    assert memory.step() == "kept"
    assert memory.report().reindexes == 4
    assert memory.age == 1


def test_a_refresh_in_the_background_takes_the_keys_as_they_were() -> None:
    memory = Memory(large(10_500), k=1)
    far = torch.full((1, 16), 50.0)
    build = memory.reindex(background=True)
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys[5] = far
    assert build is not None
    build.result(30)
    assert 5 not in memory._stale.now.find(far, 20)[0].tolist()


# -- commits -----------------------------------------------------------------------------------------------------------


def trained(memory: Memory, queries: Tensor, steps: int = 3) -> None:
    optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(list(memory.parameters()), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        memory(queries).output.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_commit_writes_what_was_trained_and_nothing_else(tmp_path: Path, dtype: Any) -> None:
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
    mine, theirs = memory(queries), twin(queries)
    assert torch.equal(mine.output, theirs.output)
    assert mine.hits is not None
    assert memory.commit() > 0
    assert mine.hits.rows.shape == (4, 5)
    again = memory(queries).hits
    assert again is not None
    assert [set(one) for one in again.ids] == [set(one) for one in memory(queries).hits.ids]  # type: ignore[union-attr]
    torch.testing.assert_close(db.attend(queries, k=5).output, memory(queries).output, atol=1e-5, rtol=1e-5)
    with pytest.raises(StaleRead, match="gone or replaced since the search"):
        _ = mine.hits.ids  # of before the commit


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


def test_what_training_broke_is_not_written() -> None:
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
def test_a_killed_training_loses_at_most_what_was_not_committed(tmp_path: Path) -> None:
    db = softdb.open(tmp_path / "db", dim=4, value_dim=3)
    db.insert(range(100), torch.randn(100, 4), torch.zeros(100, 3))
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


# -- what others do ----------------------------------------------------------------------------------------------------


def test_deleted_and_replaced_records_are_not_found_and_inserted_ones_not_yet() -> None:
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


def test_a_trained_record_that_is_gone_stops_a_commit_until_a_reload() -> None:
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


def test_what_another_thread_writes_is_not_lost_between_the_two_halves_of_a_commit() -> None:
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
    for one in threads:
        one.join()
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


def test_a_compaction_moves_nothing_that_matters() -> None:
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


# -- the index after commits -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_many_commits_the_index_is_built_anew() -> None:
    db = large()
    db.build_index("ivf", recall=0.9)
    memory = Memory(db, k=4)
    torch.manual_seed(0)
    which = torch.randperm(len(memory))
    moved(memory, which[:3000], torch.randn(3000, 16))
    assert memory.commit() == 3000
    assert index_report(db).unindexed == 3000
    moved(memory, which[3000:6000], torch.randn(3000, 16))
    assert memory.commit(reindex=False) == 3000
    assert index_report(db).unindexed == 6000
    moved(memory, which[:1], torch.randn(1, 16))
    assert memory.commit() == 1
    index = index_report(db)
    assert index.unindexed == 0
    assert index.kind == "ivf"
    assert index.target == 0.9
    queries = torch.randn(32, 16)
    pooled = memory(queries)
    assert pooled.finder == "ivf"
    assert pooled.hits is not None
    truth = db.search(queries, 4, exact=True).ids
    shared = [len(set(one) & set(other)) / 4 for one, other in zip(pooled.hits.ids, truth, strict=True)]
    assert np.mean(shared) > 0.85


def test_a_commit_gives_the_copy_back_where_the_database_has_an_index() -> None:
    db = large()
    memory = Memory(db, k=2)
    memory.reindex()
    moved(memory, torch.arange(10), torch.randn(10, 16))
    memory.commit()
    assert memory(torch.randn(1, 16)).finder == "stale index"  # the database has none
    db.build_index("ivf")
    moved(memory, torch.arange(10), torch.randn(10, 16))
    memory.commit()
    assert memory(torch.randn(1, 16)).finder == "ivf"


def test_a_build_that_fails_or_goes_on_leaves_a_commit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    db = large()
    db.build_index("ivf")
    memory = Memory(db, k=2)
    memory.reindex()
    moved(memory, torch.arange(10), torch.randn(10, 16))

    def refuse(*_: Any, **__: Any) -> None:
        raise BadInput("no index reaches that recall")

    with monkeypatch.context() as patch:
        patch.setattr(softdb.SoftDB, "build_index", refuse)
        with pytest.raises(BadInput, match="no index reaches that recall"):
            memory.commit(reindex=True)
    assert memory.report().uncommitted == memory.commit() == memory.age == 0
    assert memory(torch.randn(1, 16)).finder == "ivf"  # which knows what was written; no copy of before is asked
    waits, goes = threading.Event(), threading.Event()

    def long(_: Any) -> IndexReport:
        waits.set()
        goes.wait(30)
        return IndexReport("flat")

    build = db._finder.begin(long)
    build.start()
    waits.wait(30)
    try:
        moved(memory, torch.arange(7000), torch.randn(7000, 16))
        generation = db.stats().generation
        with pytest.raises(BadInput, match="reindex=True while an index is being built"):
            memory.commit(reindex=True)
        assert db.stats().generation == generation
        assert memory.commit() == 7000  # the build that is due waits for the next commit
        assert index_report(db).unindexed >= 7000
    finally:
        goes.set()
        build.result(30)


def test_a_commit_takes_true_and_false() -> None:
    memory = Memory(filled(), k=4)
    for words in ({"everything": 1}, {"reindex": "yes"}, {"everything": None}):
        with pytest.raises(BadInput, match="expected True or False"):
            memory.commit(**words)


def test_the_age_after_a_commit_without_an_index_is_that_of_the_keys_committed() -> None:
    db = large(10_500)
    memory = Memory(db, k=2)
    memory.step()
    moved(memory, torch.arange(3), torch.randn(3, 16))
    memory.commit()
    memory.step()
    db.build_index("ivf")
    assert memory.age == 1


def test_a_step_counts_whatever_became_of_the_refresh() -> None:
    memory = Memory(large(10_500), k=2, reindex=InBackground(1))
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys[5] = torch.nan
    build = memory.reindex(background=True)
    assert build is not None
    with pytest.raises(BadInput, match="NaN"):
        build.result(30)
    with pytest.raises(BadInput, match="NaN"):
        memory.step()
    assert memory.steps == 1
    with torch.no_grad():
        memory.keys[5] = 0

    def copied(say: Any) -> ReindexReport:
        cancelled.cancel()
        say("copying", 0, 1)
        return ReindexReport(1, 0, 0, 0.0)

    memory._build = cancelled = Build(copied)
    cancelled.start()
    with pytest.raises(Cancelled):
        cancelled.result(30)
    assert memory.step() == "kept"  # nothing lags yet
    assert memory.steps == 2
    assert memory.report().reindexes == 0


# -- copies ------------------------------------------------------------------------------------------------------------


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
    others = softdb.open(None, dim=D, value_dim=V)
    others.insert([*range(N - 1), "3"], torch.randn(N, D), torch.randn(N, V))
    with pytest.raises(BadInput, match=f"the state lacks 1 of this memory's {N} records and holds 1 others"):
        memory.load_state_dict(Memory(others).state_dict())
    with pytest.raises(BadInput, match=f"the state lacks 0 of this memory's {N} records and holds 2 others"):
        memory.load_state_dict(Memory(filled(N + 2)).state_dict())
    state = memory.state_dict()
    with pytest.raises(BadInput, match="the state's 'records' are None"):
        memory.load_state_dict({"keys": torch.ones(N, D), "values": state["values"]}, strict=False)
    with pytest.raises(BadInput, match=rf"the state has {N} records and columns of \[{N - 1}, {N}\] rows"):
        memory.load_state_dict({**state, "keys": torch.ones(N - 1, D)})
    assert torch.equal(memory.keys, keys)  # type: ignore[arg-type]
    assert memory.report().uncommitted == 0


def test_a_state_of_before_or_after_a_deletion_is_loaded_without_what_is_gone() -> None:
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


def test_copies_share_the_handle_and_nothing_else() -> None:
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


def test_a_frozen_parameter_stays_as_it_is() -> None:
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


def test_the_example_runs() -> None:
    assert doctest.testmod(softdb.nn.memory, extraglobs={"torch": torch}).failed == 0
