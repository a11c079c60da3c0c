"""softdb.nn.View, against plain torch over all encoded keys; the index it finds by, and when that is refreshed."""

from __future__ import annotations

import copy
import doctest
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

import softdb
import softdb.nn.view
from softdb.check import Metric
from softdb.errors import BadInput, Closed, StaleRead
from softdb.nn import EverySteps, InBackground, Never, OnRecall, View
from softdb.nn.reindexed import policy_of
from softdb.nn.stale_index import StaleIndex
from softdb.scores import Dot, Gaussian, General, NegativeL2, ScaledDot

N, D, WIDE, V, CLASSES = 31, 5, 4, 3, 6
METRICS = ["dot", "cosine", "l2"]
KINDS: list[dict[str, Any]] = [{"value_dim": V}, {"num_classes": CLASSES}, {}]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def filled(n: int = N, d: int = D, path: Path | None = None, **words: Any) -> softdb.SoftDB:
    """A database whose ids are 0 … n - 1, with an exact twin of its first record and a zero key."""
    db = softdb.open(path, dim=d, **words)
    keys = torch.randn(n, d)
    if n > 2:
        keys[1], keys[2] = keys[0], 0
    values: Tensor | None = None
    if "value_dim" in words:
        values = torch.randn(n, words["value_dim"])
    elif "num_classes" in words:
        values = torch.randint(words["num_classes"], (n,))
    db.insert(list(range(n)), keys, values, [{"odd": i % 2 == 1} for i in range(n)])
    return db


def mlp(d: int = D, wide: int = WIDE, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(d, 7), torch.nn.Tanh(), torch.nn.Linear(7, wide)).to(dtype)


def loops(metric: str, queries: Tensor, encoded: Tensor) -> Tensor:
    """Scores (q, n), one by one, from the equations."""
    rows = []
    for q in queries:
        for key in encoded:
            if metric == "dot":
                rows.append((q * key).sum())
            elif metric == "l2":
                rows.append(-(q - key).square().sum())
            else:
                rows.append((q * key).sum() / (q.square().sum().sqrt() * key.square().sum().sqrt()))
    return torch.stack(rows).view(len(queries), len(encoded))


def dense(
    db: softdb.SoftDB, encoder: Callable[[Tensor], Tensor], metric: str, queries: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Output and lse over every record, by plain torch."""
    records = db.get(list(range(len(db))))
    encoded = encoder(records.keys.to(queries.dtype))
    scores = loops(metric, queries, encoded) / temperature
    if records.values is None:
        values = encoded
    elif records.values.is_floating_point():
        values = records.values.to(queries.dtype)
    else:
        values = torch.nn.functional.one_hot(records.values, CLASSES).to(queries.dtype)
    return scores.softmax(1) @ values, scores.logsumexp(1)


def move(encoder: torch.nn.Module, by: float) -> None:
    """What training does, at once."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(by * torch.randn_like(parameter))


def true_ids(view: View, queries: Tensor, k: int, metric: str = "l2") -> list[list[Any]]:
    """Ids of the k best by the encoder as it is, by sorting every score."""
    found: list[Any] = [record for batch in view.db.scan() for record in zip(batch.ids, batch.keys, strict=True)]
    with torch.no_grad():
        encoded = view.encoder(torch.stack([key for _, key in found]).to(queries.dtype))
        order = loops(metric, queries, encoded).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return [[found[i][0] for i in row] for row in order.tolist()]


def shared(found: list[list[Any]], true: list[list[Any]]) -> float:
    """The share of the true ones that were found."""
    return float(np.mean([len({*a} & {*b}) / len(b) for a, b in zip(found, true, strict=True)]))


def plain(ids: list[list[Any]]) -> list[list[Any]]:
    """Ids with the twin of the first record under its name: which of two rounds up is no matter."""
    return [[0 if one == 1 else one for one in row] for row in ids]


# -- the answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("k", [None, N, 9])
def test_output_and_gradients_are_those_of_all_encoded_keys(metric: str, words: dict[str, Any], k: int | None) -> None:
    db, encoder = filled(**words), mlp()
    view = View(db, encoder, metric=metric, batch_size=7, overfetch=4)  # type: ignore[arg-type]
    view.reindex()
    move(encoder, 0.5)  # the index is wrong now, the answer may not be
    queries = torch.randn(3, WIDE, dtype=torch.float64, requires_grad=True)
    pooled = view.attend(queries, temperature=0.7, k=k)
    expected, lse = dense(db, encoder, metric, queries, 0.7)
    if k == 9:
        expected, lse = _truncated(db, encoder, metric, queries, 0.7, k)
    assert torch.allclose(pooled.output, expected, atol=1e-12)
    assert torch.allclose(pooled.lse, lse, atol=1e-12)
    assert pooled.exact.tolist() == [k != 9] * 3
    wanted = (queries, *encoder.parameters())
    grads = [
        torch.autograd.grad(output.sin().sum() + top.square().sum(), wanted)
        for output, top in ((pooled.output, pooled.lse), (expected, lse))
    ]
    for mine, other in zip(*grads, strict=True):
        assert torch.allclose(mine, other, atol=1e-10)
    assert all(float(grad.abs().max()) > 1e-6 for grad in grads[0])


def _truncated(
    db: softdb.SoftDB, encoder: Callable[[Tensor], Tensor], metric: str, queries: Tensor, temperature: float, k: int
) -> tuple[Tensor, Tensor]:
    """As `dense`, over each query's k best; the twins of the world make ties, of which the earlier is taken."""
    records = db.get(list(range(len(db))))
    encoded = encoder(records.keys.to(queries.dtype))
    scores = loops(metric, queries, encoded)
    order = scores.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    scores = scores.gather(1, order) / temperature
    values = encoded if records.values is None else records.values
    if not values.is_floating_point():
        values = torch.nn.functional.one_hot(values, CLASSES)
    return torch.einsum("qk,qkv->qv", scores.softmax(1), values.to(queries.dtype)[order]), scores.logsumexp(1)


@pytest.mark.few(1)
@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("words", KINDS)
def test_gradients_into_queries_and_encoder_are_those_of_small_differences(
    k: int | None, words: dict[str, Any]
) -> None:
    view = View(filled(9, 2, **words), mlp(2, 2), metric="l2", batch_size=4)
    queries = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*view.named_parameters(), strict=True)

    def ask(asked: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            kept = [one.clone() for one in parameters]
        stateless = torch.func.functional_call(
            _Asking(view, k), {f"view.{name}": one for name, one in zip(names, given, strict=True)}, (asked,)
        )
        assert all(torch.equal(one, two) for one, two in zip(kept, parameters, strict=True))
        return stateless  # type: ignore[no-any-return]

    given = tuple(parameter.detach().clone().requires_grad_() for parameter in parameters)
    assert torch.autograd.gradcheck(ask, (queries, *given), atol=1e-6)


class _Asking(torch.nn.Module):
    def __init__(self, view: View, k: int | None) -> None:
        super().__init__()
        self.view, self.k = view, k

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.view.attend(queries, k=self.k)
        return pooled.output, pooled.lse


def test_second_gradients_pass() -> None:
    view = View(filled(8, 2, value_dim=1), mlp(2, 2), metric="l2", batch_size=3)
    queries = torch.randn(1, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda q: view.attend(q).output, (queries,), atol=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_search_gives_fresh_scores_in_order_with_gradient(metric: str) -> None:
    view = View(filled(), mlp(), metric=metric)  # type: ignore[arg-type]
    view.reindex()
    move(view.encoder, 1.0)
    queries = torch.randn(4, WIDE, dtype=torch.float64, requires_grad=True)
    hits = view.search(queries, 8)  # 4 · 8 candidates are all
    assert plain(hits.ids) == plain(true_ids(view, queries.detach(), 8, metric))
    assert plain(hits.ids) == plain(view.search(queries, 8, exact=True).ids)
    assert bool((hits.scores.detach().diff(dim=1) <= 0).all())
    encoded = view.encoder(view.db.get([one for row in hits.ids for one in row]).keys.double())
    expected = torch.cat([loops(metric, q[None], e) for q, e in zip(queries, encoded.view(4, 8, -1), strict=True)])
    assert torch.allclose(hits.scores, expected)
    found = torch.autograd.grad(hits.scores.sum(), tuple(view.parameters()), retain_graph=True)
    for mine, other in zip(found, torch.autograd.grad(expected.sum(), tuple(view.parameters())), strict=True):
        assert torch.allclose(mine, other, atol=1e-10)


def test_ties_come_by_row() -> None:
    view = View(filled(), lambda keys: keys, metric="l2")
    assert view.search(view.db[0].key, 2).ids == [[0, 1]]
    assert view.search(view.db[0].key, 2, exact=True).ids == [[0, 1]]


@pytest.mark.parametrize(
    "score", [ScaledDot(), NegativeL2(), Gaussian(1.3), General(WIDE, WIDE), lambda q, k: q @ k.mT]
)
@pytest.mark.parametrize("k", [None, 5])
def test_other_scores_are_asked_of_the_encoded_keys(score: Any, k: int | None) -> None:
    view = View(filled(value_dim=V), mlp(dtype=torch.float32), metric="dot", overfetch=7)
    queries = torch.randn(3, WIDE)
    pooled = view.attend(queries, k=k, score=score)
    twin = softdb.open(None, dim=WIDE, value_dim=V)
    records = view.db.get(list(range(N)))
    twin.insert(records.ids, view.encoder(records.keys).detach(), records.values)
    expected = twin.attend(queries, k=k, score=score)
    assert torch.allclose(pooled.output, expected.output, atol=1e-5)
    assert torch.allclose(pooled.lse, expected.lse, atol=1e-5)
    assert torch.equal(pooled.n_pooled, expected.n_pooled)
    folds = isinstance(score, ScaledDot | General)
    assert pooled.finder == ("all" if k is None else "stale index" if folds else "scan")


def test_parameters_of_a_score_get_gradients() -> None:
    score = Gaussian(1.3, learnable=True)
    view = View(filled(value_dim=V), mlp(), batch_size=6)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    grads = [
        torch.autograd.grad(view.attend(queries, score=score, k=k).output.sum(), list(score.parameters()))[0]
        for k in (None, N)
    ]
    assert torch.allclose(grads[0], grads[1], atol=1e-10)
    assert float(grads[0].abs().max()) > 1e-6


@pytest.mark.parametrize("k", [None, 4])
def test_a_filter_is_kept(k: int | None) -> None:
    view = View(filled(value_dim=V), mlp())
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    odd = view.attend(queries, k=k, where={"odd": True})
    assert odd.n_pooled.tolist() == [N // 2 if k is None else k] * 3
    assert all(one % 2 for row in view.search(queries, 40, where={"odd": True}).ids for one in row)
    # all of the odd ones: the answer of a database that holds nothing else
    rest = View(filled(value_dim=V), view.encoder)
    rest.db.delete(where={"odd": False})
    kept = view.db.get(list(range(1, N, 2)))
    rest.db.update(kept.ids, keys=kept.keys, values=kept.values)
    assert torch.allclose(odd.output, rest.attend(queries, k=k).output)


@pytest.mark.parametrize("k", [None, 3])
def test_nothing_stored_gives_zeros_and_no_gradient(k: int | None) -> None:
    db = softdb.open(None, dim=D, value_dim=V)
    view = View(db, mlp())
    queries = torch.randn(2, WIDE, dtype=torch.float64, requires_grad=True)
    pooled = view.attend(queries, k=k)
    assert pooled.output.tolist() == [[0.0] * V] * 2
    assert pooled.lse.tolist() == [-torch.inf] * 2
    assert pooled.exact.tolist() == [True, True]
    torch.autograd.backward(pooled.output.sum())
    assert queries.grad is not None
    assert float(queries.grad.abs().max()) == 0
    assert view.attend(queries[:0], k=k).output.shape == (0, V)


def test_fewer_records_than_k() -> None:
    view = View(filled(3, value_dim=V), mlp())
    hits = view.search(torch.randn(2, WIDE), 5)
    assert hits.rows.shape == hits.scores.shape == (2, 3)
    assert bool(hits.live.all())


@pytest.mark.parametrize("k", [None, N])
@pytest.mark.parametrize("words", KINDS)
def test_explanations_name_the_heaviest_records(k: int | None, words: dict[str, Any]) -> None:
    view = View(filled(**words), mlp(), metric="l2", batch_size=8)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    told = view.attend(queries, temperature=0.3, k=k).explain(4)
    assert plain([one.ids for one in told]) == plain(true_ids(view, queries, 4))
    encoded = view.encoder(view.db.get(list(range(N))).keys.double())
    weights = (loops("l2", queries, encoded) / 0.3).softmax(1).detach()
    for i, one in enumerate(told):
        assert one.weights == pytest.approx(weights[i].sort(descending=True).values[:4].tolist())
        assert one.effective == pytest.approx(float(torch.special.entr(weights[i]).sum().exp()))


def test_explanations_show_the_users_own_scores() -> None:
    view = View(filled(value_dim=V), mlp(), metric="l2")
    queries = torch.randn(1, WIDE, dtype=torch.float64)
    shown = [view.attend(queries, k=k, score=Gaussian(0.9)).explain(3)[0].scores for k in (None, N)]
    assert shown[0] == pytest.approx(shown[1])
    assert all(0 < score <= 1 for score in shown[0])


def test_candidates_are_encoded_once_and_only_the_best_with_gradient() -> None:
    seen: list[tuple[int, bool]] = []

    def encoder(keys: Tensor) -> Tensor:
        seen.append((len(keys), torch.is_grad_enabled()))
        return keys * 2

    view = View(filled(200, value_dim=V), encoder, overfetch=4)
    view.reindex()
    seen.clear()
    view.attend(torch.randn(8, D), k=5)
    (found, without), (scored, with_gradient) = seen
    assert not without
    assert with_gradient
    assert found <= 8 * 20
    assert scored <= 8 * 5
    seen.clear()
    view.attend(view.db[0].key.expand(8, D), k=5)
    assert [count for count, _ in seen] == [20, 5]


def test_memory_of_all_records_is_that_of_a_block() -> None:
    alive: list[int] = []

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(D, WIDE)

        def forward(self, keys: Tensor) -> Tensor:
            alive.append(len(keys))
            return torch.tanh(self.inner(keys))

    view = View(filled(40), Counting(), batch_size=8)
    alive.clear()
    output = view.attend(torch.randn(2, WIDE)).output
    assert alive == [8] * 5
    torch.autograd.backward(output.sum())
    assert alive == [8] * 10  # computed again, block by block


@pytest.mark.parametrize("k", [None, N])
def test_dropout_acts_on_scores_in_training_and_never_on_finding(k: int | None) -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(D, WIDE), torch.nn.Dropout(0.5)).double()
    view = View(filled(value_dim=V), encoder, metric="l2")
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.reindex()
    assert all(part.training for part in encoder)
    kept = view._stale.now.vectors_at(np.arange(N))
    assert torch.allclose(kept, encoder[0](view.db.get(list(range(N))).keys.double()).float(), atol=1e-6)
    asked = [view.attend(queries, k=k).output for _ in range(2)]
    assert not torch.allclose(asked[0], asked[1])
    torch.autograd.backward(asked[0].sum())  # recomputes with the same random numbers, or raises
    view.eval()
    assert torch.equal(view.attend(queries, k=k).output, view.attend(queries, k=k).output)


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_a_stale_index_costs_recall_but_scores_are_right() -> None:
    db, encoder = filled(400), mlp()
    view = View(db, encoder, metric="l2", overfetch=2)
    queries = torch.randn(20, WIDE, dtype=torch.float64) * 0.3
    assert view.search(queries, 5).ids == true_ids(view, queries, 5)
    optimizer = torch.optim.SGD(encoder.parameters(), 0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = -view.search(queries[:, [1, 0, 3, 2]], 5).scores.mean() - encoder(torch.ones(1, D).double()).sum()
        torch.autograd.backward(loss)
        optimizer.step()
        assert view.step() == "kept"
    hits = view.search(queries, 5)
    with torch.no_grad():
        encoded = encoder(db.get([one for row in hits.ids for one in row]).keys.double()).view(20, 5, -1)
    expected = torch.cat([loops("l2", q[None], e) for q, e in zip(queries, encoded, strict=True)])
    assert torch.allclose(hits.scores.detach(), expected)
    assert shared(hits.ids, true_ids(view, queries, 5)) < 0.95  # there was something to lose
    assert view.report().age == 20
    view.reindex()
    assert view.report().age == 0
    assert view.search(queries, 5).ids == true_ids(view, queries, 5)


def test_records_inserted_later_are_candidates_and_deleted_ones_never_come_back() -> None:
    view = View(filled(300, value_dim=V), mlp(), metric="l2", overfetch=1)
    queries = torch.randn(6, WIDE, dtype=torch.float64) * 0.3
    assert view.search(queries, 6).ids == true_ids(view, queries, 6)
    gone = sorted({row[0] for row in view.search(queries, 6).ids if row})
    view.db.delete(gone)
    view.db.insert(list(range(300, 350)), torch.randn(50, D), torch.randn(50, V), [{}] * 50)
    moved = next(i for i in range(3, 300) if i not in gone)
    view.db.update([moved], keys=torch.zeros(1, D), values=torch.zeros(1, V))  # moves to a row of its own
    for _ in ("as it is", "compacted", "reindexed"):
        ids = view.search(queries, 6).ids
        assert ids == true_ids(view, queries, 6)
        assert not {one for row in ids for one in row} & set(gone)
        assert view.attend(queries, k=len(view.db)).exact.all()
        if view.report().unindexed == 51 and view.db.stats().dead:
            view.db.compact()
        else:
            view.reindex()
    assert any(isinstance(one, int) and one >= 300 for row in ids for one in row)
    assert view.report().unindexed == 0


def test_a_index_older_than_allowed_is_refused() -> None:
    view = View(filled(value_dim=V), mlp(), max_age=2, metric="l2")
    queries = torch.randn(2, WIDE)
    view.attend(queries, k=3)
    for _ in range(2):
        view.step()
    view.attend(queries, k=3)
    view.step()
    for ask in (lambda: view.attend(queries, k=3), lambda: view.search(queries, 3)):
        with pytest.raises(StaleRead, match=r"3 training steps old and max_age is 2; call reindex\(\)"):
            ask()
    assert view.attend(queries).exact.all()  # every record needs no index
    view.reindex()
    view.attend(queries, k=3)


# -- when to refresh ---------------------------------------------------------------------------------------------------


def test_every_so_many_steps() -> None:
    view = View(filled(), mlp(), reindex=3)
    assert view.policy == EverySteps(3)
    assert [view.step() for _ in range(4)] == ["kept"] * 4  # nobody asked: there is nothing to refresh
    view.search(torch.randn(1, WIDE), 1)
    assert [view.step() for _ in range(6)] == ["kept", "kept", "reindexed"] * 2
    report = view.report()
    assert (report.version, report.reindexes, report.age) == (3, 3, 0)
    assert 0 < report.seconds < report.total_seconds


def test_on_a_drop_of_recall() -> None:
    view = View(filled(600), mlp(), metric="l2", reindex=OnRecall(0.8, every=2, sample=600, k=5), overfetch=2)
    queries = torch.randn(16, WIDE, dtype=torch.float64) * 0.3
    view.search(queries, 5)
    assert [view.step() for _ in range(4)] == ["kept", "measured", "kept", "measured"]
    assert view.report().recall == 1.0
    move(view.encoder, 0.03)
    assert view.step() == "kept"
    missed = shared(view.search(queries, 5).ids, true_ids(view, queries, 5))
    assert view.step() == "reindexed"
    assert view.report().recall == pytest.approx(missed)  # a sample of all is no sample
    assert 0.1 < missed < 0.8
    assert [view.step() for _ in range(2)] == ["kept", "measured"]
    assert view.report().recall == 1.0


def test_a_sample_tells_the_recall_about() -> None:
    view = View(filled(2000), mlp(), metric="l2", overfetch=2)
    queries = torch.randn(64, WIDE, dtype=torch.float64) * 0.3
    view.search(queries, 10)
    move(view.encoder, 0.25)
    whole = view.measure(100, 2000)
    assert 0.3 < whole < 0.97
    assert view.measure(20, 400) == pytest.approx(whole, abs=0.08)
    with pytest.raises(BadInput, match=r"sample is 30 but overfetch · k is 20"):
        view.measure(10, 30)


class Gated(torch.nn.Module):
    """An encoder that waits until it may go on, in threads other than the first."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(D, WIDE).double()
        self.held = _Gate(gate)

    def forward(self, keys: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            assert self.held.gate.wait(30)
            if self.held.broken:
                raise RuntimeError("out of memory")
        encoded: Tensor = self.inner(keys)
        return encoded


class _Gate:
    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.broken = gate, False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gate:
        return self


def test_in_the_background_training_goes_on() -> None:
    gate = threading.Event()
    view = View(filled(), Gated(gate), metric="l2", reindex=InBackground(2), overfetch=1)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.search(queries, 3)
    assert [view.step() for _ in range(2)] == ["kept", "started"]
    taken = true_ids(view, queries, 3)
    move(view.encoder, 1.0)  # while the thread encodes with a copy of what was
    assert [view.step() for _ in range(3)] == ["kept"] * 3
    assert view.report().reindexing
    assert view.report().version == 1
    with pytest.raises(BadInput, match="a reindexing is under way in the background"):
        view.reindex(background=True)
    build = view._build
    assert build is not None
    gate.set()
    assert build.result(30).step == view.steps - 3
    report = view.report()
    assert (report.version, report.age, report.reindexes) == (2, 3, 2)
    found = view._stale.now.find(queries, 3)
    assert found.tolist() == taken
    assert taken != true_ids(view, queries, 3)
    assert view.step() == "started"
    assert view._build is not None
    view._build.result(30)
    assert view._stale.now.find(queries, 3).tolist() == true_ids(view, queries, 3)


def test_what_fails_in_the_background_is_raised_by_the_next_step_and_the_old_one_serves_on() -> None:
    gate = threading.Event()
    view = View(filled(), Gated(gate), metric="l2")
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    before = view.search(queries, 3).ids
    view.encoder.held.broken = True
    build = view.reindex(background=True)
    gate.set()
    assert build is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        build.result(30)
    with pytest.raises(RuntimeError, match="out of memory"):
        view.step()
    assert view.step() == "kept"
    assert view.report().version == 1
    assert view.search(queries, 3).ids == before


def test_a_refresh_by_hand_supersedes_one_in_the_background() -> None:
    gate = threading.Event()
    view = View(filled(), Gated(gate), metric="l2", batch_size=4)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.reindex()
    build = view.reindex(background=True)
    assert build is not None
    move(view.encoder, 1.0)
    threading.Timer(0.2, gate.set).start()
    view.reindex()
    assert build.done
    assert view.report().version == 2
    assert view._stale.now.find(queries, 3).tolist() == true_ids(view, queries, 3)
    assert view.step() == "kept"  # that it was called off is no failure


def test_never_is_left_to_the_user() -> None:
    view = View(filled(), mlp(), reindex=Never())
    view.reindex()
    assert [view.step() for _ in range(50)] == ["kept"] * 50
    assert view.report().version == 1


def test_searches_during_refreshes_never_fail_and_never_mix_versions() -> None:
    index, n = StaleIndex("dot"), 500
    far = torch.eye(2)  # version i holds i in the first column: a search that mixes two would see both
    rows = np.arange(n)

    def vectors(version: int) -> list[Tensor]:
        return list(torch.split(torch.stack([torch.full((n,), float(version)), torch.arange(n).float()], 1), 100))

    index.replace(rows, vectors(1))
    errors: list[BaseException] = []
    ended = threading.Event()
    seen: set[int] = set()

    def search() -> None:
        try:
            while not ended.is_set():
                now = index.now
                found = now.find(far[1:], 5)
                assert found.tolist() == [[499, 498, 497, 496, 495]]
                columns = torch.unique(now.vectors_at(rows)[:, 0])
                assert columns.tolist() == [float(now.number)]
                seen.add(now.number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(2, 40):
        index.replace(rows, vectors(version))
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(seen) > 1
    assert index.now.number == 39


def test_a_view_may_be_searched_while_others_write_and_refresh() -> None:
    view = View(filled(200, value_dim=V), mlp().eval(), metric="l2", batch_size=32)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    errors: list[BaseException] = []
    ended = threading.Event()

    def ask() -> None:
        try:
            while not ended.is_set():
                with torch.no_grad():
                    rows = view.search(queries, 4).rows
                    assert bool((rows >= 0).all())
                    assert bool(view.attend(queries, k=4).output.isfinite().all())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(15):
        view.reindex(background=True)
        view.db.insert([1000 + i], torch.randn(1, D), torch.randn(1, V))
        view.db.delete([i])
        view.reindex()
        if i % 5 == 4:
            view.db.compact()
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert view.search(queries, 4).ids == true_ids(view, queries, 4)


# -- the index --------------------------------------------------------------------------------------------------------


def test_a_failing_replacement_leaves_the_old_version() -> None:
    index = StaleIndex("l2")
    assert index.now.find(torch.zeros(2, 3), 2).tolist() == [[-1, -1]] * 2
    index.replace(np.array([7, 9]), [torch.zeros(1, 3), torch.ones(1, 3)])
    assert (index.now.number, len(index.now.rows)) == (1, 2)

    def failing() -> Any:
        yield torch.zeros(1, 3)
        assert (index.now.number, len(index.now.rows)) == (1, 2)
        assert index.now.find(torch.ones(1, 3), 3).tolist() == [[9, 7, -1]]
        raise RuntimeError("the encoder broke")

    for blocks, error, match in (
        (failing(), RuntimeError, "the encoder broke"),
        ([torch.zeros(1, 3)], BadInput, "2 rows but only 1 vectors"),
        ([torch.zeros(3, 3)], BadInput, "2 rows but at least 3 vectors"),
        ([torch.full((2, 3), torch.nan)], BadInput, "vectors hold NaN or infinity"),
    ):
        with pytest.raises(error, match=match):
            index.replace(np.array([1, 2]), blocks)
        assert (index.now.number, len(index.now.rows)) == (1, 2)
        assert index.now.find(torch.ones(1, 3), 3).tolist() == [[9, 7, -1]]
    index.close()
    index.close()
    with pytest.raises(Closed, match="this stale index was closed"):
        index.now.find(torch.ones(1, 3), 1)
    with pytest.raises(Closed, match="this stale index was closed"):
        index.replace(np.array([1]), [torch.zeros(1, 3)])


@pytest.mark.slow
def test_a_large_index_is_indexed_and_says_what_it_finds() -> None:
    index, centres = StaleIndex("l2", kind="ivf-sq8"), torch.randn(50, 12) * 3
    vectors = centres[torch.randint(50, (12_000,))] + torch.randn(12_000, 12)
    rows = np.arange(12_000) * 2 + 1
    index.replace(rows, torch.split(vectors, 5000))
    assert index.now.vectors is not None
    assert index.now.index is not None
    assert index.now.index.kind == "ivf-sq8"
    queries = vectors[:300] + 0.1
    true = torch.from_numpy(rows)[torch.cdist(queries, vectors).topk(5, largest=False).indices]
    assert 0.85 < shared(index.now.find(queries, 5).tolist(), true.tolist()) <= 1
    kept = np.zeros(12_000, bool)
    kept[::3] = True
    found = index.now.find(queries, 5, keep=kept)
    assert ((found - 1) // 2 % 3 == 0).all()
    assert index.now.seconds > 0


# -- the module --------------------------------------------------------------------------------------------------------


def test_only_the_encoder_is_in_the_state_dict_and_loading_makes_the_index_anew() -> None:
    view = View(filled(200), mlp(), metric="l2", overfetch=1)
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


def test_copies_share_the_handle_and_not_what_is_learnt() -> None:
    view = View(filled(), mlp(), metric="l2", reindex=4)
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
    with filled(path=tmp_path / "db") as db:
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


def test_an_encoder_that_gives_nan_is_told_of_which_record() -> None:
    view = View(filled(), _nan_for_the_zero_key, batch_size=2)
    queries = torch.randn(1, D)
    asks: list[Callable[[], Any]] = [
        lambda: view.search(queries),
        lambda: view.search(queries, exact=True),
        lambda: view.attend(queries),
        lambda: view.attend(queries, k=2),
        view.reindex,
    ]
    for ask in asks:
        with pytest.raises(BadInput, match="the encoder gave NaN or infinity for the key of the record with id 2;"):
            ask()
    assert view.report().version == 0
    view.db.delete([2])
    view.search(queries)
    view.db.insert([2], torch.zeros(1, D))  # younger than the index
    for ask in asks:
        with pytest.raises(BadInput, match="the encoder gave NaN or infinity for the key of the record with id 2;"):
            ask()
    assert view.report().version == 1


def test_bad_input_is_refused_by_name() -> None:
    db = filled()

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
        (mlp(), {"index": "tree"}, "kind is 'tree'; choose 'auto', 'flat'"),
        (lambda keys: keys[:1], {}, r"the encoder returned shape \(1, 5\) for 2 keys"),
        (lambda keys: keys.sum(1), {}, r"the encoder returned shape \(2,\) for 2 keys"),
        (lambda keys: keys.tolist(), {}, r"the encoder returned \[\[0.0"),
    ):
        with pytest.raises(BadInput, match=match):
            View(db, encoder, **words)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="db is None; expected an open softdb database"):
        View(None, mlp())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"returned shape \(31, 3\) for 31 keys; expected a floating tensor \(31, 5\)"):
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
    with pytest.raises(BadInput, match="of which no copy can be frozen while training goes on"):
        View(db, lambda keys: keys).reindex(background=True)
    assert view.report().version == 0  # nothing of this has made one


def test_policies_refuse_what_they_cannot_keep() -> None:
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
    db = filled(dtype="float16", metric="cosine")
    view = View(db, torch.nn.Linear(D, D))
    assert view.metric is Metric.COSINE
    queries = torch.randn(3, D)
    expected, _ = dense(db, view.encoder, "cosine", queries, 1.0)
    assert torch.allclose(view.attend(queries).output, expected, atol=1e-5)
    assert view.attend(queries, score=Dot()).output.shape == (3, D)


def test_the_example_runs() -> None:
    failed, tried = doctest.testmod(softdb.nn.view)
    assert (failed, tried > 3) == (0, True)


# -- precision, threads and what is refused ----------------------------------------------------------------------------


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
        assert view._encoding().found(torch.zeros(1, D), np.zeros(1, np.int64)).dtype is torch.float32
    cast = view.db.get(list(range(N)))
    with torch.autocast("cpu", torch.bfloat16):
        encoded = encoder(cast.keys)
    assert encoded.dtype is torch.bfloat16
    if k != 6:
        expected, lse = dense(view.db, lambda keys: encoded.float(), "l2", queries, 1.0)
        assert torch.allclose(pooled.output, expected, atol=1e-5)
        assert torch.allclose(pooled.lse, lse, atol=1e-5)
        others = torch.autograd.grad(expected.sin().sum(), given)
        assert all(torch.allclose(one, two, atol=0.02) for one, two in zip(grads, others, strict=True))
    true = loops("l2", queries, encoded.float()).sort(dim=1, descending=True, stable=True).values
    assert torch.allclose(hits.scores, true[:, :6], atol=1e-5)
    assert (pooled.output.dtype, hits.scores.dtype) == (torch.float32, torch.float32)
    told = pooled.explain(N)  # by the same cast
    assert [one.mass for one in told] == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize("k", [None, 5])
def test_a_plain_callable_score_meets_keys_in_the_queries_dtype(k: int | None) -> None:
    view = View(filled(value_dim=V), mlp(dtype=torch.float64), metric="dot")
    queries = torch.randn(3, WIDE)
    pooled = view.attend(queries, k=k, score=lambda q, keys: q @ keys.mT)
    expected = view.attend(queries, k=k, score=Dot())
    assert torch.allclose(pooled.output, expected.output, atol=1e-5)
    for mine, other in zip(pooled.explain(3), expected.explain(3), strict=True):
        assert mine.weights == pytest.approx(other.weights, abs=1e-5)


def test_explaining_after_a_step_is_refused_where_weights_would_be_of_another_encoder() -> None:
    encoder = mlp()
    view = View(filled(value_dim=V), encoder, metric="l2")
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    whole, some = view.attend(queries), view.attend(queries, k=4)
    known = some.explain(2)
    optimizer = torch.optim.Adam(encoder.parameters(), 0.5)
    torch.autograd.backward(whole.lse.sum())
    assert whole.explain(N)[0].mass == pytest.approx(1.0)  # nothing was changed yet
    optimizer.step()
    with pytest.raises(StaleRead, match="the encoder was changed since this answer"):
        whole.explain(2)
    assert [one.weights for one in some.explain(2)] == [one.weights for one in known]  # these were kept


def test_more_explained_than_there_are_does_not_encode_what_is_not_there() -> None:
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


def test_no_thread_meets_the_mode_that_another_asked_for() -> None:
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

    view = View(filled(value_dim=V), Slow(), metric="l2")
    modes.clear()
    other = threading.Thread(target=view.reindex)
    other.start()
    assert entered.wait(10)
    queries = torch.randn(2, D, requires_grad=True)
    view.attend(queries)
    leave.set()
    other.join()
    assert sorted(modes) == [(False, False), (True, True)]


def test_a_score_that_no_index_serves_makes_none() -> None:
    view = View(filled(value_dim=V), mlp(), metric="dot", max_age=0)
    queries = torch.randn(2, WIDE, dtype=torch.float64)
    assert view.attend(queries, k=3, score=NegativeL2()).finder == "scan"
    assert view.report().version == 0
    view.reindex()
    view.step()
    assert view.attend(queries, k=3, score=NegativeL2()).finder == "scan"  # no age of a index matters to it
    with pytest.raises(StaleRead, match="1 training steps old"):
        view.attend(queries, k=3)


def test_a_step_counts_also_where_it_tells_of_a_failure() -> None:
    gate = threading.Event()
    view = View(filled(), Gated(gate), metric="l2")
    view.reindex()
    view.encoder.held.broken = True
    build = view.reindex(background=True)
    gate.set()
    assert build is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        build.result(30)
    with pytest.raises(RuntimeError, match="out of memory"):
        view.step()
    assert (view.steps, view.age) == (1, 1)


def test_encoders_that_do_not_fit_are_refused_at_the_door() -> None:
    db = filled()
    with pytest.raises(BadInput, match=r"the encoder failed on two keys of zeros, 5 wide .* takes \(m, 5\)"):
        View(db, torch.nn.Linear(4, 4))
    with pytest.raises(BadInput, match="of which no copy can be frozen while training goes on"):
        View(db, lambda keys: keys, reindex=InBackground(3))

    class Holding(torch.nn.Linear):
        lock: Any

    encoder = Holding(D, WIDE)
    encoder.lock = threading.Lock()
    with pytest.raises(BadInput, match=r"the encoder cannot be copied, .* reindex at once"):
        View(db, encoder).reindex(background=True)


def test_what_is_alive_of_a_version_is_remembered_and_follows_the_database() -> None:
    view = View(filled(40), mlp(), metric="l2")
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
    db = softdb.open(None, dim=d, num_classes=classes, metric="l2")
    db.insert(list(range(n)), keys, labels)
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
