"""The watch over the recall target: its checks, its warnings and its cost."""

from __future__ import annotations

import threading
import warnings
from typing import Any, cast

import numpy as np
import pytest
from doubles.clock import Clock
from worlds import holding, index_report

import softdb
from softdb import BadInput, RecallWarning, SoftDB
from softdb.index.contract import Index, Rows
from softdb.index.watch import Watch

TRUTH = np.arange(10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for the watch."""
    clock = Clock()
    monkeypatch.setattr("softdb.index.timing.time", clock.module)
    return clock


class Tuned:
    """All that the watch sees of an index."""

    def __init__(self, **report: Any) -> None:
        self.report = {"target": 0.95, "recall": 0.96, **report}


def index(**report: Any) -> Index:
    return cast(Index, Tuned(**report))


def answer(recall: float) -> Rows:
    """Hits (q, k) of a search with that recall of TRUTH."""
    found = np.where(round(10 * recall) > TRUTH, TRUTH, 99)
    return np.tile(found, (3, 1))


def saw(watch: Watch, one: Index, recall: float, times: int) -> int:
    """That many searches; how many of them were checked."""
    checks: list[int] = []

    def exact(which: int) -> Rows:
        checks.append(which)
        return TRUTH

    for _ in range(times):
        watch.saw(one, 1.0, answer(recall), 1000, exact)
    assert all(0 <= which < 3 for which in checks)
    return len(checks)


def test_good_recall_does_not_warn() -> None:
    watch, one = Watch(share=1.0), index()
    assert saw(watch, one, 1.0, 300) == 300
    assert watch.report(one) == {"live_recall": 1.0, "live_checked": 300}


def test_chance_misses_do_not_warn() -> None:
    """A recall exactly as promised, spread as widely as it can be: every tenth answer misses half."""
    watch, one, random = Watch(share=1.0), index(), np.random.default_rng(0)
    for _ in range(2000):
        saw(watch, one, 0.5 if random.random() < 0.1 else 1.0, 1)
    assert watch.report(one)["live_recall"] == pytest.approx(0.95, abs=0.02)


def test_bad_searches_warn_once_and_name_the_remedy() -> None:
    watch, one = Watch(share=1.0), index()
    with pytest.warns(RecallWarning, match=r"0\.600 of the true nearest .* not the 0\.950 .*tune\(.*build_index\("):
        saw(watch, one, 0.6, 100)
    saw(watch, one, 0.6, 100)  # a second one would be an error
    assert watch.report(one) == {"live_recall": 0.6, "live_checked": 200}
    again = index()  # built anew
    assert watch.report(again) == {"live_recall": None, "live_checked": 0}
    with pytest.warns(RecallWarning, match="last 20 searches"):
        saw(watch, again, 0.6, 20)


def test_a_few_bad_ones_are_no_proof() -> None:
    watch, one = Watch(share=1.0), index()
    saw(watch, one, 0.0, 19)
    watch, one = Watch(share=1.0), index()
    saw(watch, one, 0.9, 60)
    assert watch.report(one)["live_recall"] == 0.9


def test_recall_below_an_unpromised_goal_does_not_warn() -> None:
    saw(Watch(share=1.0), index(recall=0.6), 0.6, 300)
    saw(Watch(share=1.0), index(target=0.5), 0.6, 300)


def test_only_the_window_counts() -> None:
    watch, one = Watch(share=1.0, window=50), index(target=0.5)
    saw(watch, one, 0.6, 40)
    saw(watch, one, 1.0, 50)
    assert watch.report(one) == {"live_recall": 1.0, "live_checked": 90}
    watch.change(1.0, 200)
    assert saw(watch, one, 0.8, 150) == 150
    assert watch.report(one) == {"live_recall": 0.85, "live_checked": 240}


def test_an_index_that_grew_is_the_same_index() -> None:
    watch, one, grown = Watch(share=1.0), index(), index()
    saw(watch, one, 1.0, 30)
    watch.follow(grown)
    assert watch.report(grown)["live_checked"] == 30


def test_no_share_no_checks() -> None:
    watch, one = Watch(share=0.0), index()
    assert saw(watch, one, 0.0, 1000) == 0
    watch.change(1.0, 500)
    assert saw(watch, one, 1.0, 10) == 10


def test_checks_cost_no_more_than_their_share(clock: Clock) -> None:
    watch, one = Watch(share=0.1), index()

    def exact(which: int) -> Rows:
        clock.spend(0.002)
        return TRUTH

    for _ in range(1000):
        watch.saw(one, 0.001, answer(1.0), 1000, exact)
    assert 0.09 < clock.now <= 0.1 + 0.002  # of 1000 searches of a millisecond


def test_an_exact_search_that_fails_leaves_the_watch_alive() -> None:
    watch, one = Watch(share=1.0), index()

    def exact(which: int) -> Rows:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        watch.saw(one, 1.0, answer(1.0), 1000, exact)
    assert saw(watch, one, 1.0, 5) == 5


def test_threads_share_a_watch() -> None:
    watch, one, counts = Watch(share=1.0), index(), []
    threads = [threading.Thread(target=lambda: counts.append(saw(watch, one, 1.0, 200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.report(one) == {"live_recall": 1.0, "live_checked": sum(counts)}


def drifting(rng: np.random.Generator) -> tuple[SoftDB, np.ndarray[Any, Any]]:
    """A database tuned for queries along the wide directions of its keys, and queries along the narrow ones."""
    wide = np.arange(64) < 8
    keys = (np.where(wide, 1, 0.2) * rng.standard_normal((9000, 64))).astype(np.float32)
    db = holding(keys, metric="l2")
    db.build_index("ivf", recall=0.9)
    narrow = np.where(wide, 0, rng.standard_normal((400, 64))).astype(np.float32)
    return db, narrow


def many(db: SoftDB, queries: np.ndarray[Any, Any]) -> None:
    """One search a query."""
    for query in queries:
        db.search(query)


@pytest.mark.slow
@pytest.mark.usefixtures("clock")  # checks cost nothing: each search is checked
def test_drifted_queries_are_noticed(rng: np.random.Generator) -> None:
    db, narrow = drifting(rng)
    keys = db.get(range(400)).keys
    assert index_report(db).live_recall is None
    db.watch(share=1.0)
    many(db, keys.numpy())
    seen = index_report(db)
    assert seen.live_recall is not None
    assert seen.live_recall > 0.85
    assert seen.live_checked >= 20
    db.watch(share=1.0, window=30)
    with pytest.warns(RecallWarning, match="have drifted"):
        many(db, narrow)
    assert (index_report(db).live_recall or 1.0) < 0.9


@pytest.mark.slow
def test_exact_searches_are_not_checked(rng: np.random.Generator) -> None:
    db, narrow = drifting(rng)
    db.watch(share=1.0)
    for query in narrow:
        db.search(query, exact=True)
        db.search(query, k=2000)  # too many for the index
    assert index_report(db).live_checked == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecallWarning)
        for query in narrow:
            db.attend(query, k=5)
    assert index_report(db).live_checked > 0
    db.build_index("flat")
    assert db.stats().index is None


def test_bad_watches() -> None:
    with softdb.open(None, dim=2) as db:
        for share in (-0.1, 1.1, "all", True):
            with pytest.raises(BadInput, match=r"watch: share is .*; expected a number from 0 to 1"):
                db.watch(share=cast(Any, share))
        with pytest.raises(BadInput, match="watch: window is 0; expected a whole number"):
            db.watch(window=0)
