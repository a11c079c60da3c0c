"""softdb.nn.Memory: the source of candidates and its staleness."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from worlds import filled, index_report
from worlds.memories import large, moved

import softdb
from softdb.errors import BadInput, Cancelled
from softdb.index.background import Build
from softdb.nn import Memory
from softdb.nn.reindexed import EverySteps, InBackground, OnRecall
from softdb.nn.stale_index import StaleIndex
from softdb.reports import IndexReport, ReindexReport

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad makes them


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


def test_below_ten_thousand_records_all_keys_are_compared() -> None:
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


def test_a_stale_index_misses_moved_keys_until_a_refresh() -> None:
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
    monkeypatch.setattr(StaleIndex, "replace", lambda *args: gate.wait(60) and replace(*args))
    assert memory.step() == "started"
    assert memory.reindexing
    with pytest.raises(BadInput, match="a reindexing is under way in the background"):
        memory.reindex(background=True)
    assert memory._build is not None
    gate.set()
    memory._build.result(60)
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
    build.result(60)
    assert 5 not in memory._stale.now.find(far, 20)[0].tolist()


@pytest.mark.parametrize("late", [False, True])
def test_a_commit_cancels_a_background_build_and_does_not_wait(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    db = large(10_500)
    db.build_index("ivf")
    memory, gate, replace = Memory(db, k=1), threading.Event(), StaleIndex.replace

    def gated(*args: Any) -> ReindexReport:
        report = replace(*args) if late else None
        assert gate.wait(60)
        return report or replace(*args)

    monkeypatch.setattr(StaleIndex, "replace", gated)
    build = memory.reindex(background=True)
    with torch.no_grad():
        assert memory.keys is not None
        memory.keys[5] += 1
    assert memory.commit(everything=True) == 1
    assert build is not None
    assert not build.done
    assert not memory.reindexing
    gate.set()
    with pytest.raises(Cancelled, match=r"commit\(\), reload\(\) or to\(\) has dropped the stale index"):
        build.result(60)
    assert memory.report().reindexes == memory._stale.now.number == 0


@pytest.mark.slow
def test_after_many_commits_the_index_is_rebuilt() -> None:
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


def test_a_commit_is_complete_beside_a_failed_or_running_build(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert memory(torch.randn(1, 16)).finder == "ivf"  # the index includes the commit; no older copy is used
    waits, goes = threading.Event(), threading.Event()

    def long(_: Any) -> IndexReport:
        waits.set()
        goes.wait(60)
        return IndexReport("flat")

    build = db._finder.begin(long)
    build.start()
    waits.wait(60)
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
        build.result(60)


def test_a_commit_takes_true_and_false() -> None:
    memory = Memory(filled(), k=4)
    for words in ({"everything": 1}, {"reindex": "yes"}, {"everything": None}):
        with pytest.raises(BadInput, match="expected True or False"):
            memory.commit(**words)


def test_age_without_an_index_is_that_of_the_committed_keys() -> None:
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
        build.result(60)
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
        cancelled.result(60)
    assert memory.step() == "kept"  # nothing lags yet
    assert memory.steps == 2
    assert memory.report().reindexes == 0
