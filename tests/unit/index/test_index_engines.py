"""The engines under the contract; building, tuning, absorbing, and working without FAISS."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from contracts.index import Floats, IndexContract, recall, scores, world
from worlds import holding, index_report

import softdb
from softdb.index import build, choose, finder, lists, tune


class TestIVF(IndexContract):
    kind: ClassVar[str] = "ivf"


@pytest.mark.slow
class TestHNSW(IndexContract):
    kind: ClassVar[str] = "hnsw"


@pytest.fixture
def db() -> softdb.SoftDB:
    keys, _ = world()
    return holding(keys)


def test_few_records_need_no_index(db: softdb.SoftDB) -> None:
    report = db.build_index()
    assert report.kind == "flat"
    assert "6000 records" in report.reason
    assert db.stats().index is None


def test_too_few_records_to_train_on() -> None:
    with holding(np.ones((50, 2))) as db, pytest.raises(softdb.BadInput, match="50 records are too few"):
        db.build_index("ivf")


def test_effort_is_raised_until_the_recall_is_measured(db: softdb.SoftDB) -> None:
    _, queries = world(1)
    reports = [db.build_index("ivf", recall=target, queries=queries) for target in (0.3, 0.9, 0.99)]
    assert all(report.met and report.recall >= report.target for report in reports)
    assert reports[0].records_per_match < reports[2].records_per_match or reports[0].fetch_k < reports[2].fetch_k
    assert [report.measured_on for report in reports] == ["queries given"] * 3


def test_k_beyond_the_records_is_cut_to_their_number(db: softdb.SoftDB) -> None:
    """A recall at 10⁹ once allocated a terabyte."""
    _, queries = world(1)
    report = db.build_index("ivf", k=10**9, queries=queries[:8])
    assert (report.k, report.met) == (len(db), True)
    assert db.tune(k=2**62, queries=queries[:8]).k == len(db)


def test_progress_is_reported() -> None:
    keys, _ = world(d=64)
    reports: list[tuple[str, int, int]] = []
    with holding(keys) as wide:
        wide.build_index("ivf", progress=lambda *step: reports.append(step))
    assert list(dict.fromkeys(what for what, _, _ in reports)) == ["choosing", "training", "adding", "measuring"]
    assert ("adding", 6000, 6000) in reports


def test_many_young_records_are_taken_in(db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    db.build_index("ivf", recall=0.99)
    old, queries = world()
    keys = old[::-1] * np.float32(1.1)
    db.insert([f"a{i}" for i in range(90)], keys[:90])
    assert index_report(db).unindexed == 90
    db.insert([f"b{i}" for i in range(2000)], keys[:2000])
    assert index_report(db).unindexed == 0
    truth = scores("dot", queries, np.concatenate([old, keys[:90], keys[:2000]]))
    assert recall(db.search(queries, k=10), truth, 10) >= 0.9


def test_absorbed_records_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "ABSORB_ROWS", 100)
    keys, queries = world()
    with holding(keys[:3000], path=tmp_path / "db") as db:
        db.build_index("ivf")
        db.insert(range(3000, 6000), keys[3000:])
        expected = db.search(queries, k=5).rows.tolist()
    assert len(list((tmp_path / "db" / "index").iterdir())) == 1
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert index_report(db).unindexed == 0
        assert db.search(queries, k=5).rows.tolist() == expected


@pytest.mark.slow
def test_a_reader_takes_up_a_newer_index(tmp_path: Path) -> None:
    keys, queries = world()
    with holding(keys, path=tmp_path / "db") as db, softdb.open(tmp_path / "db", mode="r") as reader:
        assert reader.stats().index is None
        db.build_index("hnsw")
        reader.refresh()
        assert index_report(reader).kind == "hnsw"
        db.build_index("ivf")
        reader.refresh()
        assert index_report(reader).kind == "ivf"
        assert reader.search(queries, k=5).rows.tolist() == db.search(queries, k=5).rows.tolist()
        db.build_index("flat")
        reader.refresh()
        assert reader.stats().index is None


def test_the_index_folder_may_be_deleted(tmp_path: Path) -> None:
    import shutil

    keys, queries = world()
    with holding(keys, path=tmp_path / "db") as db:
        db.build_index("ivf")
        exact = db.search(queries, k=5, exact=True).rows.tolist()
    shutil.rmtree(tmp_path / "db" / "index")
    with softdb.open(tmp_path / "db") as db:
        assert db.search(queries, k=5).rows.tolist() == exact


def test_the_signing_key_is_private(key_file: Path, tmp_path: Path) -> None:
    key_file.unlink(missing_ok=True)
    keys, _ = world()
    with holding(keys, path=tmp_path / "db") as db:
        db.build_index("ivf")
    assert key_file.stat().st_size == 32
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert not any(
        key_file.read_bytes() in path.read_bytes() for path in (tmp_path / "db").rglob("*") if path.is_file()
    )
    assert os.listdir(key_file.parent).count(key_file.name) == 1


def test_without_faiss_search_is_exact_and_the_extra_is_named(
    db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, queries = world()
    expected = scores("dot", queries, keys).argmax(1).tolist()
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert db.search(queries, k=1).rows[:, 0].tolist() == expected
    assert db.attend(queries, k=3).output.shape == db.attend(queries).output.shape == (40, 16)
    with pytest.raises(softdb.MissingDependency, match=r"pip install 'softdb\[cpu\]'"):
        db.build_index("ivf")


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_a_database_with_an_index_opens_without_faiss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Lists need none; of a graph the extra is named, and search is exact."""
    keys, queries = world()
    with holding(keys, path=tmp_path / "db") as db:
        db.build_index(kind, recall=0.99)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with softdb.open(tmp_path / "db", mode="r") as db:
        truth = scores("dot", queries, keys)
        assert recall(db.search(queries, k=10), truth, 10) >= 0.9
        assert (db.stats().index is None) == ("softdb[cpu]" in caplog.text) == (kind == "hnsw")


def test_other_scores_are_found_by_their_own_metric(db: softdb.SoftDB) -> None:
    from softdb.scores import NegativeL2

    db.build_index("ivf", recall=0.99)
    keys, queries = world(3)
    pooled = db.attend(torch.from_numpy(queries), k=1, score=NegativeL2())
    assert pooled.hits is not None
    keys, _ = world()
    assert pooled.hits.rows[:, 0].tolist() == scores("l2", queries, keys).argmax(1).tolist()


def test_tuning_without_an_index_is_refused(db: softdb.SoftDB) -> None:
    with pytest.raises(softdb.BadInput, match=r"no index to tune.*build one"):
        db.tune()


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("moment", ["choosing", "training", "adding", "measuring"])
def test_an_interrupted_build_leaves_the_old_index(tmp_path: Path, moment: str, error: type[BaseException]) -> None:
    keys, queries = world(d=64)

    def stop(what: str, done: int, whole: int) -> None:
        if what == moment and done:
            raise error("stop")

    with holding(keys, path=tmp_path / "db") as db:
        db.build_index("hnsw")
        before, stats = db.core.finder.index, db.stats().index
        with pytest.raises(error, match="stop"):
            db.build_index("ivf", progress=stop)
        assert db.core.finder.index is before
        assert db.stats().index == stats
        actual = db.search(queries, k=5).rows.tolist()
    with softdb.open(tmp_path / "db", mode="r") as db:
        assert index_report(db).kind == "hnsw"
        assert db.search(queries, k=5).rows.tolist() == actual


def dense(n: int, d: int, q: int) -> tuple[Floats, Floats]:
    """Few clusters of very unequal sizes, in which records are about as far from each other; and queries near them."""
    random = np.random.default_rng(0)
    sizes = 1 / np.arange(1, 41) ** 1.3
    keys = random.standard_normal((40, d))[random.choice(40, n, p=sizes / sizes.sum())] * 2
    keys += random.standard_normal((n, d))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    queries = keys[random.integers(0, n, q)] + 0.6 / d**0.5 * random.standard_normal((q, d))
    return keys.astype(np.float32), queries.astype(np.float32)


@pytest.mark.slow
def test_dense_clusters_get_finer_codes_and_their_recall() -> None:
    keys, queries = dense(20_000, 64, 600)
    with holding(keys) as db:
        report = db.build_index(recall=0.95, queries=queries[300:])
        assert report.kind == "ivf"
        assert report.codes != "PQ16x4"
        assert report.met
        actual = db.search(queries[:300], k=10)
        assert recall(actual, scores("dot", queries[:300], keys), 10) >= 0.93


def test_the_recall_reported_is_of_queries_held_aside(db: softdb.SoftDB, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[bool, set[bytes]] = {False: set(), True: set()}
    reached: dict[bool, list[float]] = {False: [], True: []}
    halves: list[bool] = []
    recalls_plain, search_plain, candidates_plain = (
        build._FullTrial.recalls,
        build._FullTrial._search,
        build._FullTrial._candidates,
    )

    def recalls_seen(self: build._FullTrial, effort: int, fetch_k: int, held_out: bool = False) -> Any:
        halves.append(held_out)
        recalls = recalls_plain(self, effort, fetch_k, held_out)
        reached[held_out].append(float(recalls.mean()))
        halves.pop()
        return recalls

    def search_seen(self: build._FullTrial, queries: torch.Tensor, effort: int, fetch_k: int) -> object:
        if halves:
            asked[halves[-1]] |= {query.numpy().tobytes() for query in queries}
        return search_plain(self, queries, effort, fetch_k)

    def candidates_seen(self: build._FullTrial, queries: torch.Tensor, *others: Any) -> object:
        asked[halves[-1]] |= {query.numpy().tobytes() for query in queries}
        return candidates_plain(self, queries, *others)

    monkeypatch.setattr(build._FullTrial, "recalls", recalls_seen)
    monkeypatch.setattr(build._FullTrial, "_search", search_seen)
    monkeypatch.setattr(build._FullTrial, "_candidates", candidates_seen)
    report = db.build_index("ivf", recall=0.6, queries=world(1)[1])
    assert len(asked[False]) == len(asked[True]) == 20
    assert not asked[False] & asked[True]
    assert report.recall == round(reached[True][-1], 4)


@pytest.mark.parametrize(
    ("memory", "size"), [(10**6, 10**6), ("200MB", 2 * 10**8), ("1.5 GiB", 3 * 2**29), ("9k", 9000), (None, None)]
)
def test_memory_is_read(memory: object, size: int | None) -> None:
    assert choose.budget(memory) == size


@pytest.mark.parametrize("memory", [0, -1, True, 1.5, "much", "-3MB", "5 I", ""])
def test_a_memory_limit_that_is_no_number_is_refused(db: softdb.SoftDB, memory: object) -> None:
    with pytest.raises(softdb.BadInput, match=r"memory is .*expected a number of bytes above 0"):
        db.build_index("ivf", memory=memory)  # type: ignore[call-overload]


def test_an_unreachable_memory_limit_is_refused(db: softdb.SoftDB) -> None:
    with pytest.raises(
        softdb.BadInput, match="but the smallest index of kind 'ivf', ivf PQ16x4, takes about"
    ) as raised:
        db.build_index("ivf", memory=1000)
    least = int(str(raised.value).split("about ")[1].split(";")[0])
    report = db.build_index("ivf", recall=0.5, memory=least)
    assert report.bytes <= least


def test_a_memory_within_which_the_recall_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = dense(20_000, 64, 300)
    with holding(keys) as db:
        monkeypatch.setattr(lists.Lists, "levels", (1,))
        monkeypatch.setattr(lists, "LEAST", 1)
        with pytest.raises(softdb.BadInput, match=r"comes closest: recall 0\.\d+, expected 0.99; give about \d+ bytes"):
            db.build_index(recall=0.99, queries=queries, memory=20_000 * 38 + 160_000)
        assert db.stats().index is None


class Curve:
    """An exam whose answers follow a curve: recall is lost beyond an effort, unless candidates are many."""

    def __init__(self, loses: bool = False) -> None:
        self.loses, self.asked = loses, list[tuple[int, int]]()

    def recall(self, effort: int, fetch_k: int) -> float:
        self.asked.append((effort, fetch_k))
        lost = 0.1 if self.loses and effort > 100 and fetch_k < 15 else 0.0
        return min(1.0, 0.5 + effort / 100, 0.9 + fetch_k / 100) - lost

    def seconds(self, effort: int, fetch_k: int) -> float:
        return effort + fetch_k


def settled(curve: Curve, goal: float) -> tune.Setting:
    class Any1024:
        effort_least, effort_most, levels = 1, 1024, (6, 10, 20, 40, 80, 160)

    found = tune.fastest(curve, Any1024(), goal, lambda *_: None)  # type: ignore[arg-type]
    return tune.steadied(curve, Any1024(), found, goal)  # type: ignore[arg-type]


@pytest.mark.parametrize(("goal", "least"), [(0.6, 10), (0.8, 30), (0.93, 43)])
def test_effort_is_near_the_least_that_meets_the_goal(goal: float, least: int) -> None:
    setting = settled(Curve(), goal)
    assert setting.recall >= goal
    assert least <= setting.effort <= 1.2 * least
    assert setting.fetch_k == 6


def test_candidates_grow_where_the_goal_needs_them() -> None:
    assert settled(Curve(), 0.97).fetch_k == 10
    assert settled(Curve(), 1.0).fetch_k == 10


def test_candidates_grow_where_more_effort_would_lose_recall() -> None:
    assert settled(Curve(loses=True), 0.93).fetch_k >= 15


def test_more_candidates_need_less_effort() -> None:
    class Shared(Curve):
        def recall(self, effort: int, fetch_k: int) -> float:
            return super().recall(effort * fetch_k // 6, fetch_k)

    setting = settled(Shared(loses=True), 0.93)
    assert setting.fetch_k >= 15
    assert setting.effort <= 20
    assert setting.recall >= 0.93


def test_an_unreachable_recall_gives_the_best_index() -> None:
    class Low(Curve):
        def recall(self, effort: int, fetch_k: int) -> float:
            return super().recall(effort, fetch_k) / 2

    setting = settled(Low(), 0.9)
    assert setting.recall == 0.5
    assert setting.fetch_k == 10
