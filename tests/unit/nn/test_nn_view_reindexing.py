"""softdb.nn.View: its stale index and the policies that rebuild it."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from doubles.held_builds import goes_on_once_waited_for
from torch import Tensor
from worlds import D, V, filled
from worlds.views import WIDE, Gated, loops, mlp, move, true_ids

from softdb.errors import BadInput, StaleRead
from softdb.nn import EverySteps, InBackground, Never, OnRecall, View
from softdb.nn.stale_index import StaleIndex


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def shared(found: list[list[Any]], true: list[list[Any]]) -> float:
    """The share of the true ones that were found."""
    return float(np.mean([len({*a} & {*b}) / len(b) for a, b in zip(found, true, strict=True)]))


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_a_stale_index_costs_recall_but_scores_are_right() -> None:
    db, encoder = filled(400, value_dim=None, seed=1), mlp()
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


def test_inserted_records_become_candidates_and_deleted_ones_stay_away() -> None:
    view = View(filled(300), mlp(), metric="l2", overfetch=1)
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
    view = View(filled(), mlp(), max_age=2, metric="l2")
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


# -- refreshes ---------------------------------------------------------------------------------------------------------


def test_reindexing_happens_every_nth_step() -> None:
    view = View(filled(value_dim=None), mlp(), reindex=3)
    assert view.policy == EverySteps(3)
    assert [view.step() for _ in range(4)] == ["kept"] * 4  # no query was asked, so nothing is stale
    view.search(torch.randn(1, WIDE), 1)
    assert [view.step() for _ in range(6)] == ["kept", "kept", "reindexed"] * 2
    report = view.report()
    assert (report.version, report.reindexes, report.age) == (3, 3, 0)
    assert 0 < report.seconds < report.total_seconds


def test_on_a_drop_of_recall() -> None:
    policy = OnRecall(0.8, every=2, sample=600, k=5)
    view = View(filled(600, value_dim=None), mlp(), metric="l2", reindex=policy, overfetch=2)
    queries = torch.randn(16, WIDE, dtype=torch.float64) * 0.3
    view.search(queries, 5)
    assert [view.step() for _ in range(4)] == ["kept", "measured", "kept", "measured"]
    assert view.report().recall == 1.0
    move(view.encoder, 0.1)
    assert view.step() == "kept"
    missed = shared(view.search(queries, 5).ids, true_ids(view, queries, 5))
    assert view.step() == "reindexed"
    assert view.report().recall == pytest.approx(missed)  # a sample of all is no sample
    assert 0.1 < missed < 0.8
    assert [view.step() for _ in range(2)] == ["kept", "measured"]
    assert view.report().recall == 1.0


def test_a_sample_estimates_the_recall() -> None:
    view = View(filled(2000, value_dim=None), mlp(), metric="l2", overfetch=2)
    queries = torch.randn(64, WIDE, dtype=torch.float64) * 0.3
    view.search(queries, 10)
    move(view.encoder, 0.05)
    whole = view.measure(100, 2000)
    assert 0.3 < whole < 0.97
    assert view.measure(20, 400) == pytest.approx(whole, abs=0.08)
    with pytest.raises(BadInput, match=r"sample is 30 but overfetch · k is 20"):
        view.measure(10, 30)


def test_training_continues_while_reindexing_in_the_background() -> None:
    gate = threading.Event()
    view = View(filled(value_dim=None), Gated(gate), metric="l2", reindex=InBackground(2), overfetch=1)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.search(queries, 3)
    assert [view.step() for _ in range(2)] == ["kept", "started"]
    taken = true_ids(view, queries, 3)
    move(view.encoder, 1.0)  # while the thread encodes with a copy of the old encoder
    assert [view.step() for _ in range(3)] == ["kept"] * 3
    assert view.report().reindexing
    assert view.report().version == 1
    with pytest.raises(BadInput, match="a reindexing is under way in the background"):
        view.reindex(background=True)
    build = view._build
    assert build is not None
    gate.set()
    assert build.result(60).step == view.steps - 3
    report = view.report()
    assert (report.version, report.age, report.reindexes) == (2, 3, 2)
    actual = view._stale.now.find(queries, 3)
    assert actual.tolist() == taken
    assert taken != true_ids(view, queries, 3)
    assert view.step() == "started"
    assert view._build is not None
    view._build.result(60)
    assert view._stale.now.find(queries, 3).tolist() == true_ids(view, queries, 3)


def test_a_background_failure_is_raised_by_the_next_step() -> None:
    gate = threading.Event()
    view = View(filled(value_dim=None), Gated(gate), metric="l2")
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    before = view.search(queries, 3).ids
    view.encoder.held.broken = True
    build = view.reindex(background=True)
    gate.set()
    assert build is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        build.result(60)
    with pytest.raises(RuntimeError, match="out of memory"):
        view.step()
    assert view.step() == "kept"
    assert view.report().version == 1
    assert view.search(queries, 3).ids == before


def test_a_refresh_by_hand_supersedes_one_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    view = View(filled(value_dim=None), Gated(gate), metric="l2", batch_size=4)
    queries = torch.randn(3, WIDE, dtype=torch.float64)
    view.reindex()
    build = view.reindex(background=True)
    assert build is not None
    move(view.encoder, 1.0)
    goes_on_once_waited_for(monkeypatch, gate)
    view.reindex()
    assert build.done
    assert view.report().version == 2
    assert view._stale.now.find(queries, 3).tolist() == true_ids(view, queries, 3)
    assert view.step() == "kept"  # that it was called off is no failure


def test_the_policy_never_leaves_reindexing_to_the_user() -> None:
    view = View(filled(value_dim=None), mlp(), reindex=Never())
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
                actual = now.find(far[1:], 5)
                assert actual.tolist() == [[499, 498, 497, 496, 495]]
                columns = torch.unique(now.vectors_at(rows)[:, 0])
                assert columns.tolist() == [float(now.number)]
                seen.add(now.number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60  # a thread may have to wait for its turn
    for version in itertools.count(2):
        index.replace(rows, vectors(version))
        if (version >= 40 and len(seen) > 1) or errors or time.monotonic() > until:
            break
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(seen) > 1
    assert index.now.number == version


def test_a_view_may_be_searched_while_others_write_and_refresh() -> None:
    view = View(filled(200), mlp().eval(), metric="l2", batch_size=32)
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


@pytest.mark.slow
def test_a_large_stale_index_is_approximate_and_measured() -> None:
    index, centres = StaleIndex("l2", kind="ivf"), torch.randn(50, 12) * 3
    vectors = centres[torch.randint(50, (12_000,))] + torch.randn(12_000, 12)
    rows = np.arange(12_000) * 2 + 1
    index.replace(rows, torch.split(vectors, 5000))
    assert index.now.vectors is not None
    assert index.now.index is not None
    assert index.now.index.kind == "ivf"
    queries = vectors[:300] + 0.1
    true = torch.from_numpy(rows)[torch.cdist(queries, vectors).topk(5, largest=False).indices]
    assert 0.85 < shared(index.now.find(queries, 5).tolist(), true.tolist()) <= 1
    kept = np.zeros(12_000, bool)
    kept[::3] = True
    actual = index.now.find(queries, 5, keep=kept)
    assert ((actual - 1) // 2 % 3 == 0).all()
    assert index.now.seconds > 0
