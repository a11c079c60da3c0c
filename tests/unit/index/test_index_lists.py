"""Lists: their quantizer, layout, rule and file, and answers by them; the scan is in kernels/test_list_scan."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from worlds import holding

import softdb
from softdb.check import Metric
from softdb.index.lists import Lists
from softdb.index.quantizer import BLOCK, NO_ROW, Matrix
from softdb.index.rule import Rule, fitted
from softdb.index.sketches import FORM, lists_for

pytest.importorskip("faiss")
pytest.importorskip("softdb.kernels._native")

Floats = NDArray[np.float32]
N, D = 4000, 24


def keys_of(seed: int, n: int = N, far: float = 0.0) -> Floats:
    """Clusters of unlike sizes, seen from `far` away."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(5).standard_normal((50, D)) * 2
    drawn = centres[(50 * random.random(n) ** 2).astype(int)] + random.standard_normal((n, D))
    keys: Floats = (drawn + far).astype(np.float32)
    return keys


def trained_lists(metric: Metric = Metric.DOT, codes: str = "PQ24x4", far: float = 0.0) -> tuple[Lists, Floats]:
    keys = keys_of(0, far=far)
    index = Lists.train(metric, keys, N, codes)
    assert isinstance(index, Lists)
    for low in range(0, N, 1000):
        index.add(np.arange(low, low + 1000), keys[low : low + 1000])
    index.seal()
    return index, keys


def by_row(index: Lists) -> dict[int, tuple[Any, ...]]:
    """List, code and factor of each row, and the same of its coarser code, with its error."""
    coded = index.layout.coded()
    fine = coded.rows.tolist(), coded.lists.tolist(), map(bytes, coded.codes), coded.factors.tolist()
    coarse = map(bytes, coded.sketches), coded.gains.tolist(), coded.errors.tolist()
    return {row: rest for row, *rest in zip(*fine, *coarse, strict=True)}  # type: ignore[misc]


def offsets(index: Lists) -> NDArray[np.float64]:  # (n, 2)
    """Offsets of both codes by row; a product of matrices may round them by a step, as its number of rows has it."""
    coded = index.layout.coded()
    return np.column_stack([coded.offsets, coded.corrections])[np.argsort(coded.rows)].astype(np.float64)


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.L2])
def test_records_added_later_get_the_same_codes(metric: Metric) -> None:
    index, keys = trained_lists(metric)
    grown = index.copy()
    assert isinstance(grown, Lists)
    more = keys_of(1, 700)
    grown.add(np.arange(N + 50, N + 750), more)
    grown.seal()
    assert (index.count, grown.count, grown.covered) == (N, N + 700, N + 750)
    before, after = by_row(index), by_row(grown)
    assert {row: after[row] for row in before} == before
    once = Lists(metric, index.inner, index.sketch)
    once.add(np.arange(N), keys)
    once.add(np.arange(N + 50, N + 750), more)
    once.seal()
    assert by_row(once) == after
    np.testing.assert_allclose(offsets(once), offsets(grown), rtol=2e-3)
    np.testing.assert_allclose(offsets(grown)[:N], offsets(index), rtol=2e-3)


def test_removal_leaves_the_other_records_unchanged() -> None:
    index, _ = trained_lists()
    before = by_row(index)
    kept = np.arange(0, N, 3)
    index.keep_only(kept)
    assert by_row(index) == {row: before[row] for row in kept.tolist()}
    assert index.count == len(kept)
    layout = index.layout
    assert sorted(layout.rows[layout.slots].tolist()) == kept.tolist()
    assert layout.sizes.sum() == len(kept)
    assert (layout.rows == NO_ROW).sum() == len(layout.rows) - len(kept)
    assert len(layout.rows) % BLOCK == 0


@pytest.mark.parametrize("metric", [Metric.DOT, Metric.L2])
def test_estimates_of_near_records_are_close(metric: Metric) -> None:
    """And stay so where keys lie far from the origin, which l2 does not mind."""
    index, keys = trained_lists(metric, far=30.0 if metric is Metric.L2 else 0.0)
    random = np.random.default_rng(2)
    queries = (keys[random.integers(0, N, 50)] + 0.5 * random.standard_normal((50, D))).astype(np.float32)
    scores = queries @ keys.T if metric is Metric.DOT else -np.square(queries[:, None] - keys).sum(2)
    truth = np.argsort(-scores, axis=1)[:, :10]
    candidates = index.find(queries, 40, None, 1 << 40)
    assert np.mean([np.isin(a, b).mean() for a, b in zip(truth, candidates, strict=True)]) > 0.97


@pytest.mark.parametrize("dim", [1, 3, 24, 100, 384, 1000, 1536])
def test_codes_are_of_16_to_128_bytes_where_the_width_allows_it(dim: int) -> None:
    parts = [int(name.removeprefix("PQ").removesuffix("x4")) for name in Lists.codes(dim)]
    assert parts == sorted(set(parts))
    assert all(number % 8 == 0 and number <= 256 for number in parts)
    assert dim < 32 or min(parts) >= 32


@pytest.mark.parametrize("dim", [3, 24, 40, 100])
def test_a_record_takes_its_documented_bytes(dim: int) -> None:
    keys = np.random.default_rng(0).standard_normal((1000, dim)).astype(np.float32)
    for codes in Lists.codes(dim):
        index = Lists.train(Metric.L2, keys, len(keys), codes)
        assert isinstance(index, Lists)
        index.add(np.arange(len(keys)), keys)
        index.seal()
        of_lists = {"sizes", "starts", "squares", "radii"}
        columns = [column for name, column in index.layout._asdict().items() if name not in of_lists]
        taken = sum(column.nbytes for column in columns) / (len(index.layout.blocks) * BLOCK)
        assert Lists.record_bytes(dim, codes) == taken


def test_a_matrix_of_bytes_is_near_and_interleaved() -> None:
    rows = np.random.default_rng(0).standard_normal((21, 10)).astype(np.float32)
    matrix = Matrix.of(rows)
    assert np.abs(matrix.rows - rows).max() <= np.abs(rows).max() / 127
    groups = matrix.interleaved().reshape(2, 3, BLOCK, 4).astype(np.int16) - 128
    assert groups[1, 2, 3, 1] == matrix.numbers[19, 9]
    assert (groups[1, :, 5:] == 0).all()
    assert (groups[:, 2, :, 2:] == 0).all()


def test_the_rule_is_that_of_the_world() -> None:
    """Matches drawn by a rule: it is found again."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((300, 64))
    edges, deviations, sizes = np.full((300, 1), 1.5), np.full((300, 64), 0.7), np.full(64, 200)
    away = (scores - scores.mean(1, keepdims=True)) / scores.std(1, keepdims=True)
    rates = np.exp(1.2 * (scores - edges) / deviations + 0.4 * away - 0.1 * away**2 - 4.0)
    counts = random.poisson(200 * rates)
    nearest = np.full((300, counts.sum(1).max()), -1)
    for line, count in zip(nearest, counts, strict=True):
        lists = np.repeat(np.arange(64), count)
        line[: len(lists)] = lists
    gaps = ((scores - edges) / deviations).astype(np.float32)
    rule, least = fitted(scores.astype(np.float32), gaps, sizes, nearest)
    seen = rule.gap * (scores - edges) / deviations + rule.linear * away + rule.square * away**2 + rule.constant
    near = rates > 1e-3
    assert np.abs(seen - np.log(rates))[near].mean() < 0.15
    assert 1 <= least < 1000


def test_a_world_without_a_rule_has_a_plain_one() -> None:
    scores = np.zeros((5, 8), np.float32)
    rule, least = fitted(scores, scores, np.full(8, 10), np.full((5, 3), -1))
    assert (rule, least) == (Rule(), 1.0)


def arrays_of(index: Lists) -> list[Any]:
    file = io.BytesIO(index.dump().tobytes())
    return [np.load(file) for _ in range(FORM)]


def written(arrays: list[Any]) -> NDArray[np.uint8]:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return np.frombuffer(file.getbuffer(), np.uint8)


def test_an_index_comes_back_from_its_bytes() -> None:
    index, keys = trained_lists(Metric.L2)
    index.rule = Rule(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    back = Lists.loaded(Metric.L2, index.dump(), D)
    assert isinstance(back, Lists)
    assert by_row(back) == by_row(index)
    assert back.rule == index.rule
    for loaded, kept in zip(back.sketch.rotation, index.sketch.rotation, strict=True):
        np.testing.assert_array_equal(loaded, kept)
    np.testing.assert_array_equal(back.sketch.words, index.sketch.words)
    assert back.sketch[4:] == index.sketch[4:]
    back.covered = index.covered
    np.testing.assert_array_equal(back.find(keys[:9], 20), index.find(keys[:9], 20))


@pytest.mark.parametrize("place", range(FORM))
@pytest.mark.parametrize("damage", ["shorter", "other type", "flat"])
def test_arrays_that_do_not_fit_together_are_refused(place: int, damage: str) -> None:
    arrays = arrays_of(trained_lists(Metric.L2)[0])
    array = arrays[place]
    if damage == "shorter":
        arrays[place] = array[:-1] if array.ndim else np.zeros(1)
    elif damage == "other type":
        arrays[place] = array.astype(np.complex64)
    else:
        arrays[place] = array.reshape(1, -1)
    with pytest.raises((ValueError, TypeError)):
        Lists.loaded(Metric.L2, written(arrays), D)


def test_an_index_of_other_keys_is_refused() -> None:
    index, _ = trained_lists()
    with pytest.raises(ValueError, match="keys of the index are 24 wide"):
        Lists.loaded(Metric.DOT, index.dump(), D + 1)
    with pytest.raises(ValueError, match="EOF"):
        Lists.loaded(Metric.DOT, index.dump()[:-1], D)
    arrays = arrays_of(index)
    arrays[12] = arrays[12] + 1  # starts
    with pytest.raises(ValueError, match="lists in the index file do not match"):
        Lists.loaded(Metric.DOT, written(arrays), D)


def test_a_row_beyond_32_bits_is_refused() -> None:
    index, keys = trained_lists()
    with pytest.raises(softdb.BadInput, match="row 4294967295 is too large"):
        index.add(np.array([NO_ROW]), keys[:1])


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_one_thread_and_two_give_the_same_index_and_answers(metric: Any) -> None:
    keys, before = keys_of(0, 9000), torch.get_num_threads()
    answers = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with holding(keys, metric=metric) as db:
                db.build_index("ivf", recall=0.9)
                index = db.core.finder.index
                assert isinstance(index, Lists)
                hits = db.search(keys[:700], k=10)
                answers.append((by_row(index), hits.rows.tolist(), hits.scores.tolist()))
    finally:
        torch.set_num_threads(before)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("share", [0.9, 0.3, 0.05, 0.01])
def test_recall_holds_under_filters_that_go_with_the_keys(share: float) -> None:
    keys = keys_of(0, 20_000)
    rank = np.argsort(np.argsort(keys[:, 0])) / len(keys)
    with holding(keys, payloads=[{"rank": float(r)} for r in rank], metric="l2") as db:
        db.build_index("ivf", recall=0.95)
        queries, where = keys_of(9, 200), {"rank": {"$gte": 1 - share}}
        exact, hits = (db.search(queries, k=10, where=where, exact=way) for way in (True, False))
        actual = np.mean([len(set(a) & set(b)) for a, b in zip(exact.rows.tolist(), hits.rows.tolist(), strict=True)])
        assert actual >= 9.3


@pytest.mark.filterwarnings("error")
def test_queries_at_centroids_leave_the_rule_finite() -> None:
    keys = np.zeros((1600, 8), np.float32)
    keys[:, 0] = 100 * np.concatenate([np.arange(70), 1000 + np.arange(15), 100_000 + np.arange(15)]).repeat(16)
    keys[:, 1] = np.tile(np.arange(16), 100)
    with holding(keys, metric="l2") as db:
        report = db.build_index("ivf", recall=0.9)
        assert report.recall >= 0.9, report


def test_an_index_of_faiss_codes_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of an earlier version: one line is logged, and search is exact."""
    import faiss

    from softdb.index import cache
    from softdb.index.ivf import IVF

    inner = faiss.index_factory(D, "IVF16,PQ12x4fs", faiss.METRIC_INNER_PRODUCT)
    keys = keys_of(0)
    inner.train(keys)
    old = IVF(Metric.DOT, inner)
    old.add(np.arange(N), keys)
    entry = cache.save(tmp_path / "index", old, 1)
    assert entry["file"].endswith(".faiss")
    assert cache.load(tmp_path / "index", entry, Metric.DOT, D) is None
    assert "made its 4-bit codes" in caplog.text
    assert len(caplog.records) == 1


def test_the_number_of_lists_grows_with_the_root_of_the_records() -> None:
    assert [lists_for(n) for n in (1000, 117_659, 10**6, 10**7)] == [64, 512, 2048, 4096]
