"""softdb.nn.Memory: outputs and sparse gradients against dense torch; trained and untrained columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import D, N, V, filled
from worlds.memories import large, stored

import softdb
from softdb.errors import BadInput, Closed
from softdb.index.lists import Lists
from softdb.nn import Memory

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


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


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("k", [1, 6, N, N + 5])
def test_outputs_and_gradients_are_those_of_dense_torch(metric: Any, k: int) -> None:
    db = filled(metric=metric)
    memory = Memory(db, k=k, temperature=0.7)
    queries = torch.randn(7, D)
    ours = [queries.clone().requires_grad_(), memory.keys, memory.values]
    pooled = memory(ours[0])
    leaves = [one.detach().double().requires_grad_() for one in (queries, *stored(db))]
    output, lse = dense(db, leaves[1], leaves[2], leaves[0], k, 0.7)
    torch.testing.assert_close(pooled.output.double(), output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled.lse.double(), lse, atol=1e-5, rtol=1e-5)
    up, down = torch.randn(7, V), torch.randn(7)
    ((pooled.output * up).sum() + (pooled.lse * down).sum()).backward()  # type: ignore[no-untyped-call]
    torch.autograd.backward((output * up).sum() + (lse * down).sum())
    for one, other in zip(ours, leaves, strict=True):
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
    memory = Memory(filled(12, seed=4), k=4, temperature=0.5, **words).double()
    queries = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in memory.named_parameters()]
    assert names == [name for name in ("keys", "values") if words.get(name, True)]
    leaves = [parameter.detach().clone().requires_grad_() for parameter in memory.parameters()]

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
    db, certain = large(), list[int]()
    db.build_index("ivf", k=10)
    scan = Lists.scan

    def counted(self: Lists, queries: Any, k: int, *others: Any) -> Any:
        certain.append(others[1])
        return scan(self, queries, k, *others)

    monkeypatch.setattr(Lists, "scan", counted)
    Memory(db, k=10, overfetch=4)(torch.randn(5, 16))
    assert certain == [10]


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

        step()  # state of the optimiser between steps
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
def test_a_memory_learns_with_every_sparse_optimiser(make: Any) -> None:
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


def test_unsuitable_optimisers_are_named_with_suitable_ones() -> None:
    memory = Memory(filled())
    ours = list(memory.parameters())
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        with pytest.raises(BadInput, match=f"{kind.__name__} takes no sparse gradients; use torch.optim.SparseAdam"):
            memory.check(kind(ours, lr=0.1))
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), memory])
    memory(torch.ones(1, D)).output.sum().backward()  # type: ignore[no-untyped-call]
    for adam in (torch.optim.Adam, torch.optim.AdamW):
        before = [own.clone() for own in model.parameters()]
        with pytest.raises(BadInput, match=f"{adam.__name__} takes no sparse gradients; use torch.optim.SparseAdam"):
            adam(model.parameters()).step()
        assert all(map(torch.equal, before, model.parameters()))
    torch.optim.Adam(model[0].parameters()).step()  # of other parameters
    with pytest.raises(BadInput, match=r"this SGD has momentum=0\.9, which changes every record"):
        memory.check(torch.optim.SGD(ours, lr=0.1, momentum=0.9))
    with pytest.raises(BadInput, match=r"this Adagrad has weight_decay=0\.1"):
        memory.check(torch.optim.Adagrad(ours, lr=0.1, weight_decay=0.1))
    with pytest.raises(BadInput, match="this SGD holds no parameter of the memory"):
        memory.check(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    other = torch.nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": ours}, {"params": [other], "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    memory.check(optimizer)  # what others do with theirs is theirs


# -- trained columns ---------------------------------------------------------------------------------------------------


def test_labels_stay_and_keys_train() -> None:
    db = filled(num_classes=4)
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
    db = filled(value_dim=None)
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


def test_untrained_columns_are_read_from_the_database() -> None:
    db = filled()
    queries = torch.randn(4, D)
    expected = db.attend(queries, k=6).output
    for words in ({"keys": False}, {"values": False}):
        memory = Memory(db, k=6, **words)
        assert len(list(memory.parameters())) == 1
        torch.testing.assert_close(memory(queries).output, expected)


def test_before_training_a_memory_answers_as_its_database() -> None:
    for metric in ("dot", "cosine", "l2"):
        db = filled(metric=metric, dtype="float16")
        queries = torch.randn(6, D)
        ours, theirs = Memory(db, k=5, temperature=0.3)(queries), db.attend(queries, k=5, temperature=0.3)
        torch.testing.assert_close(ours.output, theirs.output, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.lse, theirs.lse, atol=1e-5, rtol=1e-5)
        assert ours.hits is not None
        assert theirs.hits is not None
        assert ours.hits.ids == theirs.hits.ids
        assert ours.hits.payloads == theirs.hits.payloads
        assert str(ours.explain(3)[0]).endswith("effectively " + str(theirs.explain(3)[0]).rsplit(" ", 1)[1])


@pytest.mark.parametrize("words", [{}, {"value_dim": None}, {"num_classes": 4}])
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


def test_bad_arguments_are_refused_by_name() -> None:
    db = filled()
    with pytest.raises(BadInput, match="db is None; expected an open softdb database"):
        Memory(None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="neither keys nor values would be trained"):
        Memory(db, keys=False, values=False)
    with pytest.raises(BadInput, match="neither keys nor values would be trained"):
        Memory(filled(value_dim=None), keys=False)
    with pytest.raises(BadInput, match="keys is 1 and values None; expected True or False"):
        Memory(db, keys=1)  # type: ignore[arg-type]
    for word in ("k", "overfetch", "reindex", "temperature"):
        wrong: dict[str, Any] = {word: 0}
        with pytest.raises(BadInput, match=f"{word} is 0; expected"):
            Memory(db, **wrong)
    memory = Memory(db)
    with pytest.raises(BadInput, match="queries are 4 wide but this database's keys are 5 wide"):
        memory(torch.zeros(2, 4))
    with pytest.raises(BadInput, match=r"the keys are torch.bfloat16, in which small steps are lost"):
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
