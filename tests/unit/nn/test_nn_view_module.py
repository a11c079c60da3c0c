"""softdb.nn.View as a module: state, copies, precision, threads and errors."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import D, N, V, filled, holding
from worlds.views import KINDS, WIDE, Gated, dense, loops, mlp, move, true_ids

import softdb
import softdb.nn.view
from softdb.check import Metric
from softdb.errors import BadInput, Closed, StaleRead
from softdb.nn import EverySteps, InBackground, Never, OnRecall, View
from softdb.nn.reindexed import policy_of
from softdb.scores import Dot, NegativeL2


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


# -- the module --------------------------------------------------------------------------------------------------------


def test_the_state_dict_holds_the_encoder_and_loading_rebuilds_the_index() -> None:
    view = View(filled(200, value_dim=None), mlp(), metric="l2", overfetch=1)
    queries = torch.randn(5, WIDE, dtype=torch.float64)
    assert list(view.state_dict()) == [f"encoder.{name}" for name in view.encoder.state_dict()]
    assert [name for name, _ in view.named_modules()] == ["", "encoder", "encoder.0", "encoder.1", "encoder.2"]
    view.search(queries, 5)
    other = mlp()
    file = io.BytesIO()
    torch.save({f"encoder.{name}": one for name, one in other.state_dict().items()}, file)
    file.seek(0)
    view.load_state_dict(torch.load(file))
    assert view.search(queries, 5).ids == true_ids(view, queries, 5)
    assert view.report().reindexes == 2


def test_copies_share_the_handle_and_not_the_parameters() -> None:
    view = View(filled(value_dim=None), mlp(), metric="l2", reindex=4)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    view.search(queries, 3)
    view.step()
    twin = copy.deepcopy(view)
    assert twin.db is view.db
    assert twin.report().version == 1
    assert (twin.age, twin.policy) == (1, EverySteps(4))
    move(twin.encoder, 1.0)
    twin.reindex()
    assert (twin.report().version, view.report().version) == (2, 1)
    assert twin.search(queries, 3).ids == true_ids(twin, queries, 3)
    assert view.search(queries, 3).ids == true_ids(view, queries, 3)
    assert not torch.equal(view.encoder[0].weight, twin.encoder[0].weight)


def test_a_pickle_travels_and_reads_only(tmp_path: Path) -> None:
    with filled(path=tmp_path / "db", value_dim=None) as db:
        view = View(db, mlp(), metric="l2")
        queries = torch.randn(2, WIDE, dtype=torch.float64)
        ids = view.search(queries, 3).ids
        twin = pickle.loads(pickle.dumps(view))
        assert twin.db.stats().mode == "r"
        assert twin.search(queries, 3).ids == ids
        assert torch.equal(twin.attend(queries).output, view.attend(queries).output)
        twin.db.close()
    with pytest.raises(Closed, match="this handle is closed"):
        view.attend(queries, k=2)
    for ask in (view.reindex, view.report, lambda: view.search(queries), lambda: view.attend(queries)):
        with pytest.raises(Closed, match="this handle is closed"):
            ask()


def _nan_for_the_zero_key(keys: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=1, keepdim=True)
    return keys / lengths


def test_nan_of_an_encoder_names_the_record() -> None:
    view = View(filled(value_dim=None), _nan_for_the_zero_key, batch_size=2)
    queries = torch.randn(1, D)
    asks: list[Callable[[], Any]] = [
        lambda: view.search(queries),
        lambda: view.search(queries, exact=True),
        lambda: view.attend(queries),
        lambda: view.attend(queries, k=2),
        view.reindex,
    ]
    for ask in asks:
        with pytest.raises(BadInput, match="the encoder gave NaN or infinity for the key of the record with id 3;"):
            ask()
    assert view.report().version == 0
    view.db.delete([3])
    view.search(queries)
    view.db.insert([3], torch.zeros(1, D))  # younger than the index
    for ask in asks:
        with pytest.raises(BadInput, match="the encoder gave NaN or infinity for the key of the record with id 3;"):
            ask()
    assert view.report().version == 1


def test_bad_input_is_refused_by_name() -> None:
    db = filled(value_dim=None)

    def changing(keys: Tensor) -> Tensor:
        return keys if len(keys) == 2 else keys[:, :3]

    for encoder, words, match in (
        (3, {}, "encoder is 3; expected an nn.Module or a callable"),
        (mlp(), {"dim": 9}, "dim is 9 but the encoder gives vectors 4 wide"),
        (mlp(), {"metric": "cos"}, "metric is 'cos'; choose one of 'dot', 'cosine', 'l2'"),
        (mlp(), {"reindex": "often"}, r"reindex is 'often'; expected EverySteps\(n\)"),
        (mlp(), {"reindex": EverySteps}, r"reindex is <class .*EverySteps'>; expected EverySteps\(n\)"),
        (mlp(), {"reindex": 0}, "reindex is 0; expected a whole number at least 1"),
        (mlp(), {"overfetch": 0}, "overfetch is 0; expected a whole number at least 1"),
        (mlp(), {"batch_size": 0}, "batch_size is 0; expected a whole number at least 1"),
        (mlp(), {"recall": 0}, "recall is 0; expected a share above 0"),
        (mlp(), {"max_age": -1}, "max_age is -1; expected a whole number at least 0"),
        (mlp(), {"index": "tree"}, "kind is 'tree'; choose .*'auto', 'flat'"),
        (lambda keys: keys[:1], {}, r"the encoder returned shape \(1, 5\) for 2 keys"),
        (lambda keys: keys.sum(1), {}, r"the encoder returned shape \(2,\) for 2 keys"),
        (lambda keys: keys.tolist(), {}, r"the encoder returned \[\[0.0"),
    ):
        with pytest.raises(BadInput, match=match):
            View(db, encoder, **words)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="db is None; expected an open softdb database"):
        View(None, mlp())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"returned shape \(40, 3\) for 40 keys; expected a floating tensor \(40, 5\)"):
        View(db, changing).reindex()
    view, queries = View(db, mlp()), torch.randn(2, WIDE)
    for k in (0, 1.5, True):
        with pytest.raises(BadInput, match=f"k is {k}; expected a whole number at least 1"):
            view.attend(queries, k=k)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=f"k is {k}; expected a whole number at least 1"):
            view.search(queries, k)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"queries are 5 wide but the encoded keys of this view .* 4 wide"):
        view.attend(torch.randn(2, D), k=1)
    with pytest.raises(BadInput, match="temperature is 0; expected a finite number above 0"):
        view.attend(queries, temperature=0)
    with pytest.raises(BadInput, match=r"score is 'dot'; expected an object of softdb\.scores or a callable"):
        view.attend(queries, score="dot")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="which cannot be copied while training goes on"):
        View(db, lambda keys: keys).reindex(background=True)
    assert view.report().version == 0  # nothing of this has made one


def test_policies_refuse_bad_settings() -> None:
    for make, match in (
        (lambda: EverySteps(0), "n is 0; expected a whole number at least 1"),
        (lambda: InBackground(-1), "n is -1; expected a whole number at least 1"),
        (lambda: OnRecall(1.5), "target is 1.5; expected a number from 0 to 1"),
        (lambda: OnRecall(0.9, every=0), "every is 0; expected a whole number at least 1"),
        (lambda: OnRecall(0.9, k=0), "k is 0; expected a whole number at least 1"),
    ):
        with pytest.raises(BadInput, match=match):
            make()
    assert policy_of(None) == Never()
    with pytest.raises(BadInput, match="reindex is True"):
        policy_of(True)


def test_float16_keys_and_a_metric_of_its_own() -> None:
    db = filled(dtype="float16", metric="cosine", value_dim=None)
    view = View(db, torch.nn.Linear(D, D))
    assert view.metric is Metric.COSINE
    queries = torch.randn(3, D)
    expected, _ = dense(db, view.encoder, "cosine", queries, 1.0)
    assert torch.allclose(view.attend(queries).output, expected, atol=1e-5)
    assert view.attend(queries, score=Dot()).output.shape == (3, D)


# -- precision, threads and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [None, 6, N])
@pytest.mark.parametrize("words", KINDS)
def test_autocast_reaches_the_encoder_alone(k: int | None, words: dict[str, Any]) -> None:
    """Scores and pooling are as of the encoded keys of the user's autocast, in the precision of the queries."""
    encoder = mlp(dtype=torch.float32)
    view = View(filled(**words), encoder, metric="l2", batch_size=7)
    view.reindex()
    queries = torch.randn(3, WIDE, requires_grad=True)
    given = (queries, *encoder.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        pooled, hits = view.attend(queries, k=k), view.search(queries, 6)
        grads = torch.autograd.grad(pooled.output.sin().sum(), given)
        view.measure(2)
        assert view._encoding().evaluated(torch.zeros(1, D), np.zeros(1, np.int64)).dtype is torch.float32
    cast = view.db.get(list(range(N)))
    with torch.autocast("cpu", torch.bfloat16):
        encoded = encoder(cast.keys)
    assert encoded.dtype is torch.bfloat16
    if k != 6:
        expected, lse = dense(view.db, lambda keys: encoded.float(), "l2", queries, 1.0)
        assert torch.allclose(pooled.output, expected, atol=1e-5)
        assert torch.allclose(pooled.lse, lse, atol=1e-5)
        others = torch.autograd.grad(expected.sin().sum(), given)
        assert all(torch.allclose(grad, two, atol=0.02) for grad, two in zip(grads, others, strict=True))
    true = loops("l2", queries, encoded.float()).sort(dim=1, descending=True, stable=True).values
    assert torch.allclose(hits.scores, true[:, :6], atol=1e-5)
    assert (pooled.output.dtype, hits.scores.dtype) == (torch.float32, torch.float32)
    actual = pooled.explain(N)  # by the same cast
    assert [one.mass for one in actual] == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize("k", [None, 5])
def test_a_plain_callable_score_meets_keys_in_the_queries_dtype(k: int | None) -> None:
    view = View(filled(), mlp(dtype=torch.float64), metric="dot")
    queries = torch.randn(3, WIDE)
    pooled = view.attend(queries, k=k, score=lambda q, keys: q @ keys.mT)
    expected = view.attend(queries, k=k, score=Dot())
    assert torch.allclose(pooled.output, expected.output, atol=1e-5)
    for ours, other in zip(pooled.explain(3), expected.explain(3), strict=True):
        assert ours.weights == pytest.approx(other.weights, abs=1e-5)


def test_explaining_after_a_step_is_refused() -> None:
    encoder = mlp()
    view = View(filled(), encoder, metric="l2")
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    whole, some = view.attend(queries), view.attend(queries, k=4)
    known = some.explain(2)
    optimizer = torch.optim.Adam(encoder.parameters(), 0.5)
    torch.autograd.backward(whole.lse.sum())
    assert whole.explain(N)[0].mass == pytest.approx(1.0)  # nothing was changed yet
    optimizer.step()
    with pytest.raises(StaleRead, match="the encoder was changed since this answer"):
        whole.explain(2)
    assert [explanation.weights for explanation in some.explain(2)] == [one.weights for one in known]  # these were kept


def test_explaining_more_than_all_records_encodes_only_the_live_ones() -> None:
    db = softdb.open(None, dim=D, value_dim=V)
    view = View(db, _Unit(), metric="dot")
    assert view.attend(torch.randn(2, D)).explain(3)[1].ids == []
    db.insert([7, 8], torch.randn(2, D), torch.randn(2, V), [{"odd": True}, {"odd": False}])
    queries = torch.randn(2, D)
    assert {*view.attend(queries).explain(5)[0].ids} == {7, 8}
    assert view.attend(queries, where={"odd": True}).explain(5)[0].ids == [7]
    assert view.attend(queries[:0]).explain(5) == []


class _Unit(torch.nn.Module):
    def forward(self, keys: Tensor) -> Tensor:
        return _nan_for_the_zero_key(keys) if bool(keys.any()) else keys


def test_threads_keep_their_own_train_and_eval_mode() -> None:
    """Scores with gradient are of training mode, also while another thread finds, in eval mode."""
    entered, leave = threading.Event(), threading.Event()

    modes: list[tuple[bool, bool]] = []

    class Slow(torch.nn.Module):
        def forward(self, keys: Tensor) -> Tensor:
            modes.append((torch.is_grad_enabled(), self.training))
            if threading.current_thread() is not threading.main_thread() and not entered.is_set():
                entered.set()
                leave.wait(0.5)
            return keys * 1.0

    view = View(filled(), Slow(), metric="l2")
    modes.clear()
    other = threading.Thread(target=view.reindex)
    other.start()
    assert entered.wait(60)
    queries = torch.randn(2, D, requires_grad=True)
    view.attend(queries)
    leave.set()
    other.join()
    assert sorted(modes) == [(False, False), (True, True)]


def test_a_score_that_no_index_serves_makes_none() -> None:
    view = View(filled(), mlp(), metric="dot", max_age=0)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    assert view.attend(queries, k=3, score=NegativeL2()).finder == "scan"
    assert view.report().version == 0
    view.reindex()
    view.step()
    assert view.attend(queries, k=3, score=NegativeL2()).finder == "scan"  # no age of a index matters to it
    with pytest.raises(StaleRead, match="1 training steps old"):
        view.attend(queries, k=3)


def test_a_step_that_reports_a_failure_counts() -> None:
    gate = threading.Event()
    view = View(filled(value_dim=None), Gated(gate), metric="l2")
    view.reindex()
    view.encoder.held.broken = True
    build = view.reindex(background=True)
    gate.set()
    assert build is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        build.result(60)
    with pytest.raises(RuntimeError, match="out of memory"):
        view.step()
    assert (view.steps, view.age) == (1, 1)


def test_encoders_that_do_not_fit_are_refused_at_the_door() -> None:
    db = filled(value_dim=None)
    with pytest.raises(BadInput, match=r"the encoder failed on two keys of zeros, 5 wide .* takes \(m, 5\)"):
        View(db, torch.nn.Linear(4, 4))
    with pytest.raises(BadInput, match="which cannot be copied while training goes on"):
        View(db, lambda keys: keys, reindex=InBackground(3))

    class Holding(torch.nn.Linear):
        lock: Any

    encoder = Holding(D, WIDE)
    encoder.lock = threading.Lock()
    with pytest.raises(BadInput, match=r"the encoder cannot be copied, .* reindex at once"):
        View(db, encoder).reindex(background=True)


def test_live_rows_are_cached_by_version_and_follow_the_database() -> None:
    view = View(filled(40, value_dim=None), mlp(), metric="l2")
    view.reindex()
    version, store = view._stale.now, view.db._store
    view.db.delete([3])
    first = version.alive(store.snapshot)
    assert version.alive(store.snapshot) is first
    assert np.flatnonzero(~first).tolist() == [3]
    odd = store.snapshot.rows(np.arange(store.snapshot.size)) % 2 == 1
    assert version.alive(store.snapshot, odd) is version.alive(store.snapshot, odd)
    assert np.flatnonzero(version.alive(store.snapshot, odd)).tolist() == [i for i in range(1, 40, 2) if i != 3]
    view.db.delete([4])
    assert np.flatnonzero(~version.alive(store.snapshot)).tolist() == [3, 4]


# -- learning ----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [Never(), EverySteps(10), OnRecall(0.9, every=10), InBackground(10)])
def test_an_encoder_learns_to_look_past_loud_noise(policy: Any) -> None:
    """Half of each key tells the class, the louder half nothing. Held out queries are encoded by the same encoder."""
    classes, n, d = 8, 1500, 16
    centres = torch.randn(classes, d // 2)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,))
        told = centres[labels] + 0.4 * torch.randn(count, d // 2)
        return torch.cat([told, 3 * torch.randn(count, d // 2)], 1), labels

    keys, labels = drawn(n)
    db = holding(keys, labels, num_classes=classes, metric="l2")
    encoder = torch.nn.Linear(d, 8)
    view = View(db, encoder, reindex=policy)
    held_out, true = drawn(300)

    def recall() -> float:
        view.reindex()
        with torch.no_grad():
            rows = view.search(encoder(held_out), 10).rows
        return float((labels[rows] == true.unsqueeze(1)).double().mean())

    before = recall()
    optimizer = torch.optim.Adam(view.parameters(), 0.02)
    for _ in range(60):
        asked, wanted = drawn(64)
        optimizer.zero_grad()
        shares = view.attend(encoder(asked), temperature=1.0, k=30).output
        torch.autograd.backward(-(shares.gather(1, wanted.unsqueeze(1)) + 1e-3).log().mean())
        optimizer.step()
        view.step()
    assert (view.report().reindexes > 1) == (policy != Never())
    after = recall()
    assert before < 0.5
    assert after > before + 0.3
