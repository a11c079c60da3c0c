"""Training around a database: compiled, in half precision, in processes, beside workers."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from worlds import filled, holding

import softdb
from softdb.nn import Attention
from softdb.nn.losses import retrieval_loss

N, D, BATCH = 60, 8, 12
HOWS: list[dict[str, Any]] = [{}, {"k": 9}, {"rtol": 0.1}]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database of N records with values of 5 numbers."""
    filled(N, D, 5, path=tmp_path / "db").close()
    return tmp_path / "db"


@pytest.fixture
def db(path: Path) -> Iterator[softdb.SoftDB]:
    with softdb.open(path, mode="r") as handle:
        yield handle


class Asker(torch.nn.Module):
    """Asks a database, by attention, what to ask it for: the middle layer of a model that is trained around it."""

    def __init__(self, db: softdb.SoftDB, k: int | None = None) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.attention = Attention(db, 16, 2, batch_first=True)
        self.last = torch.nn.Linear(16, D)
        self.k = k

    def forward(
        self,
        x: Tensor,  # (b, 3, 6)
    ) -> Tensor:  # (b, D)
        hidden = torch.tanh(self.first(x))
        found: Tensor = hidden + self.attention(hidden, k=self.k)[0]
        asked: Tensor = self.last(found.mean(1))
        return asked


def model_of(db: softdb.SoftDB, k: int | None = None) -> Asker:
    torch.manual_seed(4)
    return Asker(db, k)


def inputs(count: int = BATCH, seed: int = 5) -> tuple[Tensor, list[list[int]]]:
    """Questions (count, 3, 6) and their right records."""
    x = torch.randn(count, 3, 6, generator=torch.Generator().manual_seed(seed))
    return x, [[i, (3 * i + seed) % N] if i % 2 else [i] for i in range(count)]


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert len(found) == len(list(model.parameters()))
    assert all(float(one.abs().max()) > 1e-7 for name, one in found.items() if "in_proj_bias" not in name)
    return found


def alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Asserts equal gradients, each by its own size."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        gap = float((found[name] - one).abs().max())
        assert gap <= tolerance * max(1e-3, float(one.abs().max())), f"{name}: {gap}"


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Dynamo's counters, of a clean start."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # torch looks at .grad of tensors of any kind when it puts guards on them
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_a_compiled_model_answers_as_the_plain_one(db: softdb.SoftDB, k: int | None, dynamo: Any) -> None:
    model = model_of(db, k)
    compiled = torch.compile(model, backend="aot_eager")
    for count in (BATCH, 5):
        x, _ = inputs(count)
        actual = compiled(x)
        torch.testing.assert_close(actual, model(x))
        alike(gradients(model, actual.square().sum()), gradients(model, model(x).square().sum()))
    frames = dynamo["frames"]["total"]
    for count in (7, 9, 11):
        compiled(inputs(count)[0])
    assert dynamo["frames"]["total"] == frames, "compiled anew for a batch of another size"
    assert dynamo["stats"]["unique_graphs"] >= 2, "nothing of the model was compiled"


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_step_has_the_loss_of_the_plain_one(db: softdb.SoftDB, how: dict[str, Any], dynamo: Any) -> None:
    linear = torch.nn.Linear(6, D)

    def step(x: Tensor, right: list[list[int]]) -> Tensor:
        return 2 * retrieval_loss(db, torch.tanh(linear(x.mean(1))), right, temperature=0.5, **how)

    compiled = torch.compile(step, backend="aot_eager")
    for seed in (1, 2, 3, 4):
        x, right = inputs(seed=seed)
        alike(gradients(linear, compiled(x, right)), gradients(linear, step(x, right)))
        torch.testing.assert_close(compiled(x, right), step(x, right))
    frames = dynamo["frames"]["total"]
    for seed in range(5, 20):  # other ids each time, and other numbers of them
        compiled(*inputs(seed=seed))
    assert dynamo["frames"]["total"] == frames, "compiled anew for other ids"


@pytest.mark.slow
def test_compilation_stops_at_the_database(db: softdb.SoftDB, dynamo: Any) -> None:
    places: list[str] = []

    def note(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        places.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    torch.compile(model_of(db), backend=note)(inputs()[0])
    folder = str(Path(softdb.__file__).parent)
    assert any(f"{folder}/nn/attention.py" in place for place in places)
    for inside in ("soft", "stream", "store", "index", "check"):
        assert not any(f"{folder}/{inside}/" in place for place in places)


def test_a_failing_verb_raises_from_compiled_code(db: softdb.SoftDB, dynamo: Any) -> None:
    compiled = torch.compile(lambda x: db.attend(x * 2, temperature=0.5).output, backend="aot_eager")
    x = torch.randn(3, D, requires_grad=True)
    torch.testing.assert_close(compiled(x), db.attend(x * 2, temperature=0.5).output)
    with pytest.raises(softdb.BadInput, match=r"^attend: queries are 5 wide but this database's keys are 8 wide"):
        compiled(torch.randn(3, 5))


@pytest.mark.exhaustive  # inductor takes its time, and a C++ compiler
def test_inductor_compiles_the_model_too(db: softdb.SoftDB, dynamo: Any) -> None:
    model = model_of(db)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own modules warn when they are first loaded
        compiled = torch.compile(model)
        x, _ = inputs()
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        actual = gradients(model, compiled(x).square().sum())
    alike(actual, gradients(model, model(x).square().sum()), 1e-3)


# -- half precision ----------------------------------------------------------------------------------------------------


def test_under_autocast_the_database_answers_in_single_precision(db: softdb.SoftDB) -> None:
    model = model_of(db)
    x, right = inputs()
    exact = retrieval_loss(db, model(x), right, temperature=0.5)
    expected = gradients(model, exact)
    with torch.autocast("cpu", torch.bfloat16):
        asked = model(x)
        loss = retrieval_loss(db, asked, right, temperature=0.5)
    assert (asked.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(loss, retrieval_loss(db, asked.float(), right, temperature=0.5))
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    alike(gradients(model, loss), expected, 0.1)


@pytest.mark.parametrize("how", HOWS)
def test_autocast_changes_no_answer_of_the_database(db: softdb.SoftDB, how: dict[str, Any]) -> None:
    queries = torch.randn(BATCH, D, requires_grad=True)
    _, right = inputs()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = retrieval_loss(db, queries, right, temperature=0.5, **how)
            output = db.attend(queries, temperature=0.5, **how).output
        (slope,) = torch.autograd.grad(loss + output.square().sum(), queries)
        results.append((loss.detach(), output.detach(), slope))
    for result, two in zip(*results, strict=True):
        assert result.dtype is two.dtype is torch.float32
        torch.testing.assert_close(result, two, rtol=1e-6, atol=1e-6)


# -- several processes -------------------------------------------------------------------------------------------------


def in_rank(rank: int, ranks: int, folder: str, model: Asker) -> None:
    """One process of a distributed run: its share of the batch, and the gradients that it ends with."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    db = model.attention.db
    assert db is not None
    shared = torch.nn.parallel.DistributedDataParallel(model)
    x, right = inputs()
    mine = slice(rank, None, ranks)
    found = []
    for how in HOWS:
        loss = retrieval_loss(db, shared(x[mine]), right[mine], temperature=0.5, **how)
        found.append((db.stats().mode, gradients(shared, loss)))
    torch.save(found, f"{folder}/rank-{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_get_the_gradients_of_one(db: softdb.SoftDB, tmp_path: Path) -> None:
    model = model_of(db)
    torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
        in_rank, (2, str(tmp_path), model), 2
    )
    x, right = inputs()
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    for i, how in enumerate(HOWS):
        expected = gradients(model, retrieval_loss(db, model(x), right, temperature=0.5, **how))
        for actual in ranks:
            mode, slopes = actual[i]
            assert mode == "r"
            alike({name.removeprefix("module."): slope for name, slope in slopes.items()}, expected, 1e-4)


# -- workers of a DataLoader -------------------------------------------------------------------------------------------


class Hard(Dataset[Any]):
    """Queries with the records that the database finds for them, in whatever process that is."""

    def __init__(self, db: softdb.SoftDB, queries: Tensor) -> None:
        self.db, self.queries = db, queries

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor, list[Any]]:
        one = self.queries[i]
        return os.getpid(), self.db.attend(one, temperature=0.5).output[0], one, self.db.search(one, 4).ids[0]


def by_itself(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("start", "mode"), [("fork", "r"), ("fork", "rw"), ("spawn", "rw")])
def test_workers_query_the_database(path: Path, start: str, mode: Any) -> None:
    queries = torch.randn(16, D, generator=torch.Generator().manual_seed(8))
    with softdb.open(path, mode=mode) as db:
        expected = db.attend(queries, temperature=0.5).output  # threads of the parent's have worked already
        ids = db.search(queries, 4).ids
        loader = DataLoader(
            Hard(db, queries), 4, num_workers=2, multiprocessing_context=start, collate_fn=by_itself, timeout=60
        )
        rows = [row for batch in loader for row in batch]
        pids, outputs, asked, actual = zip(*rows, strict=True)
        assert os.getpid() not in pids
        assert len(set(pids)) == 2
        assert torch.equal(torch.stack(asked), queries)
        torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-5, atol=1e-6)
        assert list(actual) == ids
        assert torch.equal(db.attend(queries, temperature=0.5).output, expected)
        if mode == "rw":
            db.insert(["later"], torch.ones(1, D), torch.ones(1, 5))  # the workers left its lock alone
            assert len(db) == N + 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_worker_cannot_query_a_database_in_memory() -> None:
    queries = torch.randn(6, D, generator=torch.Generator().manual_seed(8))
    with holding(torch.randn(N, D, generator=torch.Generator().manual_seed(9))) as db:
        words: dict[str, Any] = {"num_workers": 1, "collate_fn": by_itself, "timeout": 60}
        loader = DataLoader(Hard(db, queries), 3, multiprocessing_context="fork", **words)
        with pytest.raises(softdb.Closed, match="in the memory of the process that opened it; give one with a path"):
            next(iter(loader))
        loader = DataLoader(Hard(db, queries), 3, multiprocessing_context="spawn", **words)
        with pytest.raises(softdb.BadInput, match="a database in memory cannot be pickled; give it a path"):
            next(iter(loader))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_trains_as_its_parent_does(db: softdb.SoftDB) -> None:
    model = model_of(db)
    x, right = inputs()

    def steps() -> list[float]:
        losses = []
        trained = model_of(db)
        rate = torch.optim.SGD(trained.parameters(), 0.1)
        for _ in range(3):
            loss = retrieval_loss(db, trained(x), right, temperature=0.5)
            gradients(trained, loss)
            rate.step()
            losses.append(float(loss.detach()))
        return losses

    expected = steps()
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(False)
    child = context.Process(target=lambda: send.send(steps()))
    child.start()
    assert receive.poll(60), "the child hangs"
    assert receive.recv() == pytest.approx(expected, rel=1e-5)
    child.join(60)
    assert child.exitcode == 0
    assert float(retrieval_loss(db, model(x), right, temperature=0.5).detach()) == pytest.approx(expected[0])
