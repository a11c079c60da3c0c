"""A database on a device equals one on the CPU at every step and reads only the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doubles.fake_gpu import pretend

import softdb
from softdb.answers import Hits
from softdb.device import Board, availability, compare, nearest, resident
from softdb.index.planner import pass_cost
from softdb.scores import Gaussian, Laplacian
from softdb.store.compact import compact

D, V = 4, 3
KINDS: dict[str, dict[str, Any]] = {
    "dot": {"metric": "dot", "value_dim": V},
    "cosine of halves": {"metric": "cosine", "dtype": "float16"},
    "distances, labels": {"metric": "l2", "num_classes": V},
}
WHERE = {"x": {"$gt": 0}}


def values_of(rng: np.random.Generator, kind: str, n: int) -> Any:
    if "num_classes" in KINDS[kind]:
        return rng.integers(0, V, n)
    return rng.standard_normal((n, V)).astype(np.float32) if "value_dim" in KINDS[kind] else None


def of_kind(path: Path | None, kind: str, rng: np.random.Generator, n: int = 60, **words: Any) -> softdb.SoftDB:
    db = softdb.open(path, dim=D, **KINDS[kind], **words)
    insert(db, kind, rng, range(n))
    return db


def insert(db: softdb.SoftDB, kind: str, rng: np.random.Generator, ids: Any) -> None:
    keys = rng.standard_normal((len(ids), D)).astype(np.float32)
    keys[len(ids) // 2 :] = keys[: len(ids) - len(ids) // 2]  # pairs that tie
    db.insert(ids, keys, values_of(rng, kind, len(ids)), [{"x": float(key[0]), "g": int(key[1] > 0)} for key in keys])


def sampled(db: softdb.SoftDB, queries: torch.Tensor) -> tuple[Any, ...]:
    """Quantities that must be 0 for any draw: the records drawn depend on the blocks."""
    found = db.sample(queries, 3, temperature=0.5, generator=torch.Generator().manual_seed(3))
    return (found.log_prob + db.log_partition(queries, temperature=0.5).value[:, None] - 2 * found.hits.scores,)


def hits(found: Hits) -> tuple[Any, ...]:
    return found.rows, found.scores


def pooled(found: softdb.Pooled) -> tuple[Any, ...]:
    return found.output, found.lse, found.exact, found.missed_mass, found.n_pooled


ASKED: dict[str, Callable[[softdb.SoftDB, torch.Tensor], tuple[Any, ...]]] = {
    "search": lambda db, q: hits(db.search(q, 7)),
    "filter": lambda db, q: hits(db.search(q, 3, where=WHERE)),
    "page": lambda db, q: hits(db.search(q, 3, offset=2, exclude_ids=[1, 2])),
    "many": lambda db, q: hits(db.search(q, 3000)),
    "radius": lambda db, q: hits(db.search(q, radius=1.0 if db.metric == "l2" else 0.3)),
    "diverse": lambda db, q: hits(db.search(q, 4, diversity=0.3)),
    "groups": lambda db, q: hits(db.search(q, 2, group_by="g", group_size=2)),
    "attend": lambda db, q: pooled(db.attend(q, temperature=0.7)),
    "attend, filter": lambda db, q: pooled(db.attend(q, where=WHERE)),
    "attend, mask": lambda db, q: pooled(db.attend(q, mask=torch.arange(db.core.keyed) % 3 > 0)),
    "attend, k": lambda db, q: pooled(db.attend(q, k=5)),
    "attend, k, mask": lambda db, q: pooled(db.attend(q, k=5, mask=torch.arange(db.core.keyed) % 2 > 0)),
    "weights": lambda db, q: pooled(db.attend(q, need_weights=True)),
    "sparse": lambda db, q: pooled(db.attend(q, weights="sparsemax")),
    "mean": lambda db, q: pooled(db.attend(q, weights="uniform")),
    "lookup": lambda db, q: pooled(db.attend(q, weights="argmax")),
    "kernel": lambda db, q: pooled(db.attend(q, score=Gaussian(0.8))),
    "no product": lambda db, q: pooled(db.attend(q, score=Laplacian(0.8))),
    "estimate": lambda db, q: pooled(db.attend(q, rtol=0.1)),
    "partition": lambda db, q: (db.log_partition(q).value,),
    "density": lambda db, q: (db.log_density(q, Gaussian(0.5)).value,),
    "count": lambda db, q: (db.count_within(q, 1.0 if db.metric == "l2" else 0.3).value,),
    "sample": sampled,
}


def answers_of(db: softdb.SoftDB, queries: torch.Tensor, name: str) -> tuple[Any, ...]:
    """An answer, and the gradient of all of it that has one."""
    own = queries.clone().requires_grad_()
    found = ASKED[name](db, own)
    wanted = [one[one.isfinite()].sum() for one in found if one.requires_grad]
    return (*found, *(torch.autograd.grad(sum(wanted), own) if wanted else ()))


def assert_alike(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, equal_nan=True)


def spoil(db: softdb.SoftDB) -> None:
    """Fill the host's columns with NaN."""
    for segment in db._store.snapshot.segments:
        for column in (segment.keys, segment.values):
            if column is not None:
                ctypes.memset(column.ctypes.data, 0xFF, column.nbytes)


@pytest.mark.parametrize("cards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_the_cpu(kind: str, cards: int, rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch, cards)
    seed = int(rng.integers(1 << 30))
    here, there = (of_kind(None, kind, np.random.default_rng(seed), device=on) for on in (None, "cpu:0"))
    for db in (here, there):
        db.delete([3, 50])
    queries = torch.from_numpy(rng.standard_normal((5, D)).astype(np.float32))
    for name in ASKED:
        assert_alike(answers_of(there, queries, name), answers_of(here, queries, name))
        assert_alike(answers_of(there, queries.double(), name), answers_of(here, queries.double(), name))
    place = " and ".join(f"cpu:{i}" for i in range(cards))
    assert there.attend(queries).finder == f"all on {place}"
    assert there.attend(queries, k=3).finder == f"flat on {place}"
    report = there.stats().device
    assert report is not None
    assert (report.keys, report.dtype) == ("resident", here.dtype)
    assert report.kernels == "cpu:0 is not a CUDA device"


@pytest.mark.parametrize("cards", [1, 3])
def test_draws_come_as_often_as_they_weigh(cards: int, rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch, cards)
    db = of_kind(None, "dot", rng, 20, device="cpu:0")
    query = torch.from_numpy(rng.standard_normal((1, D)).astype(np.float32))
    actual = db.sample(query, 30_000, generator=torch.Generator().manual_seed(1)).hits.rows[0]
    shares = torch.bincount(actual, minlength=20) / len(actual)
    torch.testing.assert_close(shares, db.attend(query, need_weights=True).weights[0], atol=0.01, rtol=0)  # type: ignore[index]


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_reads_the_host(kind: str, cards: int, rng: np.random.Generator, monkeypatch: Any) -> None:
    """Once columns are there, those of the host may be overwritten with NaN."""
    pretend(monkeypatch, cards)
    db = of_kind(None, kind, rng, device="cpu:0")
    db.delete([3, 50])
    queries = torch.from_numpy(rng.standard_normal((5, D)).astype(np.float32))
    expected = {name: answers_of(db, queries, name) for name in ASKED}
    spoil(db)
    for name, answer in expected.items():
        actual = answers_of(db, queries, name)
        for one, other in zip(actual, answer, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(softdb.BadInput, match="NaN"):  # and it would be seen
        db.to("cpu").attend(queries)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_device_copy_follows_every_change(
    kind: str, fits: bool, cards: int, rng: np.random.Generator, tmp_path: Path, monkeypatch: Any
) -> None:
    """A writer on the CPU and a reader on a device, or the other way round: equal after every step."""
    pretend(monkeypatch, cards)
    if not fits:
        monkeypatch.setattr(resident, "room", lambda device: 0)
    on: list[dict[str, Any]] = [{}, {"device": "cpu:0"}]
    if rng.random() < 0.5:
        on.reverse()
    writer = of_kind(tmp_path / "db", kind, rng, 30, **on[0])
    reader = softdb.open(tmp_path / "db", mode="r", **on[1])
    number, names, kept = 30, list(ASKED), []
    for step in range(12):
        living = [one for batch in writer.scan() for one in batch.ids]
        some = rng.choice(len(living), 4, replace=False)
        which = [living[i] for i in some]
        change = ["insert", "delete", "update", "compact", "nothing"][step % 5]
        if change == "insert":
            insert(writer, kind, rng, range(number, number + 8))
            number += 8
        elif change == "delete":
            writer.delete(which)
        elif change == "update":
            writer.update(which, keys=rng.standard_normal((4, D)).astype(np.float32))
        elif change == "compact":
            compact(writer._store)
        reader.refresh()
        queries = torch.from_numpy(rng.standard_normal((3, D)).astype(np.float32))
        for name in rng.choice(names, 4, replace=False):
            assert_alike(answers_of(reader, queries, name), answers_of(writer, queries, name))
        there = reader if on[1] else writer
        request, source = there.core.request(queries)
        kept.append((request, source, source.exact(request)))
        for before, seen, answer in kept[-6:]:  # what saw an older generation sees it still
            assert_alike(pooled(seen.exact(before)), pooled(answer))
    assert there.stats().device.keys == ("resident" if fits else "streamed")  # type: ignore[union-attr]


ESTIMATED: dict[str, Callable[[softdb.SoftDB, torch.Tensor], tuple[Any, ...]]] = {
    "attend": lambda db, q: estimate(db.attend(q, temperature=0.3, rtol=0.5)),
    "filter": lambda db, q: estimate(db.attend(q, temperature=0.3, rtol=0.5, where={"x": {"$gt": -1}})),
    "bounded": lambda db, q: estimate(db.attend(q, temperature=0.3, rtol=0.5, max_draws=200)),
    "partition": lambda db, q: numbers_of(db.log_partition(q, temperature=0.3)),
    "count": lambda db, q: numbers_of(db.count_within(q, 1.5 if db.metric == "l2" else 2.0, rtol=0.2)),
}


def estimate(found: softdb.Pooled) -> tuple[Any, ...]:
    """Not the bars, which are made with other random signs there."""
    assert not bool(found.exact.any())
    assert bool((found.bar > 0).all())
    assert bool(found.bar.isfinite().all())
    return found.output, found.lse, found.n_pooled


def numbers_of(found: softdb.Estimate) -> tuple[Any, ...]:
    return found.value, found.bar, found.exact


@pytest.mark.parametrize("kind", ["dot", "distances, labels"])
def test_estimates_draw_on_the_host_and_gather_on_the_device(
    kind: str, rng: np.random.Generator, monkeypatch: Any
) -> None:
    pretend(monkeypatch)
    for name in ("rounds", "count"):  # a pass is dear
        monkeypatch.setattr(f"softdb.attend.{name}.pass_cost", lambda *given: 1000 * pass_cost(*given))
    db = of_kind(None, kind, rng, 30_000)
    db.build_index("ivf")
    insert(db, kind, rng, range(30_000, 30_100))  # which the index lacks
    db.delete(range(0, 2000, 3))
    queries = torch.from_numpy(rng.standard_normal((3, D)).astype(np.float32))
    expected = {name: ask(db, queries) for name, ask in ESTIMATED.items()}
    grads, steep = [], [one.clone().requires_grad_() for one in (queries, queries)]
    for own, there in zip(steep, (False, True), strict=True):
        steeply = (db.to("cpu:0") if there else db).attend(own, temperature=0.3, rtol=0.5)
        grads.append(torch.autograd.grad(steeply.output[:, 0].sum(), own))
    assert_alike(grads[1], grads[0])
    answers = {name: ask(db, queries) for name, ask in ESTIMATED.items()}
    for name, answer in answers.items():
        assert_alike(answer, expected[name])
    assert db.attend(queries, temperature=0.3, rtol=0.5).finder == "ivf on cpu:0"


def test_columns_too_large_for_the_device_are_streamed(rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(resident, "room", lambda device: 0)
    db = of_kind(None, "dot", rng, 5000)
    queries = torch.from_numpy(rng.standard_normal((4, D)).astype(np.float32))
    names = ["attend", "attend, filter", "attend, mask", "kernel"]
    expected = {name: answers_of(db, queries, name) for name in names}
    db.to("cpu:0")
    for name in names:
        assert_alike(answers_of(db, queries, name), expected[name])
    answer = db.attend(queries)
    assert answer.finder == "all streamed to cpu:0"
    assert_alike(
        (torch.tensor(answer.explain(3)[0].weights),),
        (torch.tensor(db.to("cpu").attend(queries).explain(3)[0].weights),),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_of_a_device_find_the_same(
    kind: str, rng: np.random.Generator, monkeypatch: Any, request: pytest.FixtureRequest
) -> None:
    pretend(monkeypatch)
    db = of_kind(None, kind, rng, 300)
    db.delete(range(0, 300, 7))
    queries = torch.from_numpy(rng.standard_normal((5, D)).astype(np.float32))
    queries[0], queries[1] = 0, 1e30  # which tie, and overflow
    few = {"where": {"x": {"$gt": 1}}}
    expected = [hits(db.search(queries, k, **words)) for k in (1, 9, 400) for words in ({}, few)]  # type: ignore[arg-type]
    request.getfixturevalue("interpreted")
    results: list[int] = []

    def counted(*given: Any, **words: Any) -> Any:
        results.append(given[2])
        return nearest(*given, **words)

    monkeypatch.setattr(compare, "kernel_nearest", counted)
    db.to("cpu:0")
    answers = [hits(db.search(queries, k, **words)) for k in (1, 9, 400) for words in ({}, few)]  # type: ignore[arg-type]
    for answer, other in zip(answers, expected, strict=True):
        assert answer[0].tolist() == other[0].tolist()
    assert len(results) == 3  # few matches are gathered


# -- faults on the device ----------------------------------------------------------------------------------------------

FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried")
LOST = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: unspecified")
NAMED = pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch names this error since 2.8")


@pytest.mark.parametrize(
    ("error", "way"), [(FULL, "fewer queries at once"), pytest.param(LOST, "only in a new process", marks=NAMED)]
)
@pytest.mark.parametrize("where", ["softdb.device.placed.pooled", "softdb.device.resident.Shard.keys_at"])
def test_a_device_that_fails_loses_no_record(
    error: Exception, way: str, where: str, rng: np.random.Generator, monkeypatch: Any
) -> None:
    pretend(monkeypatch)
    db = of_kind(None, "dot", rng, device="cpu:0")
    queries = rng.standard_normal((2, D)).astype(np.float32)
    expected = hits(db.search(queries, 3)), pooled(db.attend(queries))

    def failing(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as failed:
        failed.setattr(where, failing)
        verb = db.attend if where.endswith("pooled") else db.search
        with pytest.raises(
            softdb.DeviceFailed, match=rf"{verb.__name__}: cpu:0 failed \(CUDA .*nothing is lost.*{way}"
        ):
            verb(queries)
        insert(db, "dot", rng, [1000])  # later changes
        db.delete([1000])
        assert_alike(hits(db.to("cpu").search(queries, 3)), expected[0])
        assert db.stats().device is None
        assert db.attend(queries).finder == "all"
    assert_alike(pooled(db.to("cpu:0").attend(queries)), expected[1])


def test_a_device_that_fills_up_while_columns_are_copied_loses_nothing(
    rng: np.random.Generator, monkeypatch: Any
) -> None:
    pretend(monkeypatch)
    db, queries = of_kind(None, "dot", rng, device="cpu:0"), rng.standard_normal((2, D)).astype(np.float32)
    expected = pooled(db.to("cpu").attend(queries))
    empty = torch.empty

    def full(size: Any, *rest: Any, **words: Any) -> Any:
        if words.get("device") == torch.device("cpu", 0) and size[1] == V:
            raise FULL
        return empty(size, *rest, **words)

    with monkeypatch.context() as failed:
        failed.setattr(torch, "empty", full)
        answer = db.to("cpu:0").attend(queries)
    assert_alike(pooled(answer), expected)
    assert answer.finder == "all streamed to cpu:0"
    report = db.stats().device
    assert report is not None
    assert (report.keys, report.values, report.bytes) == ("resident", "streamed", 60 * D * 4)
    assert db.attend(queries, k=3).finder == "flat streamed to cpu:0"


def test_a_forked_process_is_refused(rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch)
    db, queries = of_kind(None, "dot", rng, device="cpu:0"), rng.standard_normal((2, D)).astype(np.float32)
    expected = pooled(db.attend(queries))
    monkeypatch.setattr("softdb.device.board.forked", lambda device: True)
    for ask in (db.search, db.attend, db.sample):
        with pytest.raises(softdb.DeviceFailed, match="forked from one that used CUDA, and cannot use cpu:0"):
            ask(queries)
    insert(db, "dot", rng, [1000])
    db.delete([1000])
    assert_alike(pooled(db.to("cpu").attend(queries)), expected)


def test_a_process_that_cannot_use_cuda(monkeypatch: Any) -> None:
    def refused() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    device, begun = torch.device("cuda", 0), False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    monkeypatch.setattr(torch.cuda, "init", refused)
    assert availability.forked(device)
    assert not availability.forked(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert not availability.forked(device)
    begun = True
    monkeypatch.setattr(torch.cuda, "init", refused)
    assert not availability.forked(device)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:7", r"to: device is cuda:7 but the last that torch sees is 'cuda:1'"),
        (["cuda:0", "cuda:0"], "expected one device, or a list of GPUs that are all different"),
        (["cuda:0", "cpu"], "expected one device, or a list of GPUs that are all different"),
        ([], "expected one device, or a list of GPUs"),
        (None, "device is None; expected 'cpu'"),
    ],
)
def test_devices_that_are_none(device: Any, message: str, rng: np.random.Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    db = of_kind(None, "dot", rng)
    with pytest.raises(softdb.BadInput, match=message):
        db.to(device)
    assert db.device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(softdb.BadInput, match="device is cuda but torch sees no CUDA device"):
        db.to("cuda")


def test_narrower_copies(rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch)
    db, queries = of_kind(None, "dot", rng), rng.standard_normal((4, D)).astype(np.float32)
    exactly, lengths = db.attend(queries, k=60), np.linalg.norm(queries, axis=1)[:, None]
    longest = float(np.linalg.norm(np.concatenate([batch.keys for batch in db.scan()]), axis=1).max())
    narrower: list[tuple[Any, float]] = [("float16", 2.0**-11), (torch.bfloat16, 2.0**-8)]
    for dtype, unit in narrower:
        answer = db.to("cpu:0", dtype).attend(queries, k=60)
        assert db.stats().device.dtype == str(dtype).removeprefix("torch.")  # type: ignore[union-attr]
        results: list[Any] = [answer.hits, exactly.hits]
        mine, others = (result.scores.gather(1, result.rows.argsort(1)) for result in results)
        off = (mine - others).abs().numpy()
        assert (off <= 1.01 * unit * lengths * longest).all()
        assert off.max() > unit / 100
        torch.testing.assert_close(answer.output, exactly.output, rtol=0, atol=20 * unit)
    db.insert(["large"], np.full((1, D), 1e5, np.float32), np.zeros((1, V), np.float32))
    with pytest.raises(softdb.BadInput, match=r"keys are too large for torch.float16 .its largest is 65504"):
        db.to("cpu:0", "float16").attend(queries)
    assert db.to("cpu:0", torch.bfloat16).attend(queries).finder == "all on cpu:0"
    with pytest.raises(softdb.BadInput, match="dtype is 'int8'; expected 'float32', 'float16' or 'bfloat16'"):
        db.to("cpu:0", "int8")


def test_the_answer_lies_on_the_device_of_the_queries(rng: np.random.Generator, monkeypatch: Any) -> None:
    pretend(monkeypatch)
    db, queries = of_kind(None, "dot", rng, device="cpu:0"), rng.standard_normal((2, D)).astype(np.float32)
    beside = db.attend(queries)
    monkeypatch.setattr(Board, "_holds", lambda self, device: False)
    asked_elsewhere = torch.from_numpy(queries)
    assert_alike(pooled(db.attend(asked_elsewhere)), pooled(beside))
    assert (beside.finder, db.attend(asked_elsewhere).finder) == ("all on cpu:0", "all")
    assert_alike(hits(db.search(asked_elsewhere, 3)), hits(db.to("cpu").search(queries, 3)))
