"""Data of the benchmark tool: worlds, files, ground truth and the check of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import softdb
from softdb.check import Metric
from softdb.tools.bench.datasets import Dataset, load, queries_near, world
from softdb.tools.bench.exam import Exam, WrongAnswer, exact_scores, nearest, true_nearest

Array = NDArray[Any]


def test_seeded_worlds_never_change() -> None:
    keys = world(1000, 128)
    queries = queries_near(keys, 10)
    np.testing.assert_allclose(keys[0, :3], [0.07746356, -0.01449199, 0.06935678], rtol=1e-5)
    np.testing.assert_allclose(keys[-1, -3:], [0.01772968, -0.07965029, -0.12652346], rtol=1e-5)
    np.testing.assert_allclose(queries[0, :3], [0.13351364, -0.13853794, -0.06790688], rtol=1e-5)
    assert not np.array_equal(world(1000, 128, seed=1), keys)


def test_worlds_are_named_and_have_the_requested_size() -> None:
    for name in ("clustered", "uniform"):
        data = load(name, n=300, dim=6)
        assert (data.keys.shape, data.queries.shape, data.metric) == ((300, 6), (2000, 6), Metric.DOT)
        np.testing.assert_allclose(np.linalg.norm(data.keys, axis=1), 1, rtol=1e-5)
    assert load("uniform", n=10, dim=3, metric="l2").metric is Metric.L2


def vecs(path: Path, numbers: Array) -> Path:
    """As .fvecs and .bvecs have it: each vector after its own width."""
    widths = np.full((len(numbers), 1), numbers.shape[1], "<i4")
    path.write_bytes(np.concatenate([widths.view(np.uint8), numbers.view(np.uint8)], axis=1).tobytes())
    return path


def matrix(path: Path, numbers: Array) -> Path:
    """As .fbin and .u8bin have it: count and width, then everything."""
    path.write_bytes(np.array(numbers.shape, "<i4").tobytes() + numbers.tobytes())
    return path


WRITERS = {
    ".fvecs": (vecs, np.float32),
    ".bvecs": (vecs, np.uint8),
    ".fbin": (matrix, np.float32),
    ".u8bin": (matrix, np.uint8),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_files_of_vectors_are_mapped_as_they_are(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    write, dtype = WRITERS[kind]
    keys, queries = (rng.integers(0, 200, (count, 5)).astype(dtype) for count in (40, 7))
    data = load(str(write(tmp_path / f"base{kind}", keys)), queries=write(tmp_path / f"query{kind}", queries))
    np.testing.assert_array_equal(data.keys, keys)
    assert data.metric is Metric.L2
    assert sorted(map(tuple, data.queries.tolist())) == sorted(map(tuple, queries.tolist()))
    assert data.queries.dtype == np.float32
    owner: Any = data.keys
    while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    assert isinstance(owner, np.memmap)
    np.testing.assert_array_equal(np.concatenate([block for _, block in data.blocks(16)]), keys.astype(np.float32))
    assert load(str(tmp_path / f"base{kind}"), n=10, queries=tmp_path / f"query{kind}", metric="dot").n == 10


def hdf5(path: Path, arrays: dict[str, Array], distance: object = "euclidean", compression: str | None = None) -> Path:
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    with h5py.File(path, "w") as file:
        if distance is not None:
            file.attrs["distance"] = distance
        for name, array in arrays.items():
            file.create_dataset(name, data=array, compression=compression)
    return path


def answered(metric: str, n: int = 60, q: int = 20, d: int = 4) -> dict[str, Array]:
    """Arrays of an ann-benchmarks file, its neighbours by float64."""
    random = np.random.default_rng(3)
    keys, queries = (random.standard_normal((count, d)).astype(np.float32) for count in (n, q))
    near = np.argsort(-loops(keys, queries, metric), axis=1, kind="stable")[:, :12]
    return {"train": keys, "test": queries, "neighbors": near.astype(np.int32)}


def loops(keys: Array, queries: Array, metric: str) -> NDArray[np.float64]:
    wide, asked = keys.astype(np.float64), queries.astype(np.float64)
    if metric == "l2":
        return np.array([[-sum((a - b) ** 2 for a, b in zip(q, k, strict=True)) for k in wide] for q in asked])
    products = np.array([[float(q @ k) for k in wide] for q in asked])
    if metric == "dot":
        return products
    return np.asarray(products / np.linalg.norm(wide, axis=1) / np.linalg.norm(asked, axis=1)[:, None])


@pytest.mark.parametrize(
    ("distance", "metric"), [("angular", "cosine"), ("euclidean", "l2"), ("dot", "dot"), (b"ip", "dot"), (None, "l2")]
)
def test_ann_benchmarks_files_bring_their_neighbours(distance: object, metric: str, tmp_path: Path) -> None:
    arrays = answered(metric)
    for compression in (None, "gzip"):
        data = load(str(hdf5(tmp_path / f"{compression}.hdf5", arrays, distance, compression)))
        assert data.metric is Metric(metric)
        np.testing.assert_array_equal(data.keys, arrays["train"])
        assert isinstance(data.keys, np.memmap) == (compression is None)
        assert data.neighbours is not None
        assert true_nearest(data, 10) is not None
        np.testing.assert_array_equal(true_nearest(data, 10), nearest(data, data.queries, 10))
    assert load(str(tmp_path / "gzip.hdf5"), n=30).neighbours is None  # they are of all keys
    other = "dot" if metric != "dot" else "l2"
    assert load(str(tmp_path / "gzip.hdf5"), metric=other).neighbours is None


def test_neighbours_that_are_not_the_nearest_are_refused(tmp_path: Path) -> None:
    arrays = answered("l2")
    wrong = dict(arrays, neighbors=np.roll(arrays["neighbors"], 1, axis=0))
    with pytest.raises(softdb.BadInput, match=r"wrong.hdf5: for \d+ of 20 queries .* are not the 10 nearest by l2"):
        true_nearest(load(str(hdf5(tmp_path / "wrong.hdf5", wrong))), 10)
    twice = dict(arrays, neighbors=np.repeat(arrays["neighbors"][:, :1], 12, axis=1))
    with pytest.raises(softdb.BadInput, match="are not the 10 nearest"):
        true_nearest(load(str(hdf5(tmp_path / "twice.hdf5", twice))), 10)
    with pytest.raises(softdb.BadInput, match="k is 61, but there are 60 keys"):
        true_nearest(load(str(hdf5(tmp_path / "right.hdf5", arrays))), 61)
    keys = np.array([[0.0, np.nan], [1, 1]], np.float32)
    with pytest.raises(softdb.BadInput, match="keys hold NaN or infinity"):
        true_nearest(Dataset("nan", keys, np.ones((2, 2), np.float32), Metric.DOT), 1)


def test_hdf5_files_that_are_none(tmp_path: Path) -> None:
    arrays = answered("l2")
    bad = {
        "lacks test;": hdf5(tmp_path / "a.hdf5", {"train": arrays["train"]}),
        "has the distance 'hamming'; expected one of angular": hdf5(tmp_path / "b.hdf5", arrays, "hamming"),
        r"neighbours of shape \(3, 12\) for 20 queries": hdf5(
            tmp_path / "c.hdf5", dict(arrays, neighbors=arrays["neighbors"][:3])
        ),
        "names neighbours from 60 to 60, of 60 keys": hdf5(
            tmp_path / "d.hdf5", dict(arrays, neighbors=np.full((20, 12), 60))
        ),
        r"e.hdf5, train has shape \(60,\)": hdf5(tmp_path / "e.hdf5", dict(arrays, train=arrays["train"][:, 0])),
        "queries are 2 wide but the keys of .* are 4 wide": hdf5(
            tmp_path / "f.hdf5", dict(arrays, test=arrays["test"][:, :2])
        ),
    }
    (tmp_path / "g.hdf5").write_bytes(b"no such thing")
    bad["cannot be read as HDF5"] = tmp_path / "g.hdf5"
    for message, path in bad.items():
        with pytest.raises(softdb.BadInput, match=message):
            load(str(path))


def test_files_cut_short_or_of_another_format(tmp_path: Path, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal((9, 4)).astype(np.float32)
    whole, flat = vecs(tmp_path / "a.fvecs", numbers).read_bytes(), matrix(tmp_path / "a.fbin", numbers).read_bytes()
    other = bytearray(whole)
    other[20:24] = np.array([7], "<i4").tobytes()
    bad = {
        "short.fvecs": (whole[:-1], r"begins with the width 4, but its 179 bytes are not a multiple of the 20 bytes"),
        "other.fvecs": (bytes(other), "begins with the width 4 but has a vector of the width 7"),
        "zero.fvecs": (b"\0" * 40, "begins with the width 0"),
        "empty.fvecs": (b"", "has 0 bytes, less than one vector"),
        "short.fbin": (flat[:-4], "has 148 bytes, but 9 vectors of 4 float32, as its header says, take 152"),
        "long.u8bin": (flat, "has 152 bytes, but 9 vectors of 4 uint8, as its header says, take 44"),
        "tiny.fbin": (flat[:6], "has 6 bytes"),
        "numbers.csv": (b"1,2", r"ends in '\.csv'; expected .*one of \.hdf5"),
        "none": (b"1,2", "ends in ''; expected .*one of"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(softdb.BadInput, match=message):
            load(str(tmp_path / name), queries=tmp_path / "a.fvecs")
        with pytest.raises(softdb.BadInput, match=message):
            load(str(tmp_path / "a.fvecs"), queries=tmp_path / name)


def test_folders(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(softdb.BadInput, match=r"keys.npy; the folder of a dataset holds keys.npy and"):
        load(str(tmp_path))
    np.save(tmp_path / "keys.npy", rng.standard_normal((30, 4)).astype(np.float16))
    np.save(tmp_path / "queries.npy", rng.standard_normal((9, 4)))
    for name in (str(tmp_path), f"wordnet:{tmp_path}"):
        data = load(name)
        assert (data.n, data.dim, len(data.queries), data.metric) == (30, 4, 9, Metric.DOT)
    assert load(f"wordnet:{tmp_path}").name == "wordnet"
    assert load(str(tmp_path), most=5).queries.shape == (5, 4)
    assert len(load(str(tmp_path), queries=tmp_path / "keys.npy").queries) == 30
    np.save(tmp_path / "queries.npy", np.array([["a", "b"]]))
    with pytest.raises(softdb.BadInput, match=r"queries.npy has shape \(1, 2\) of <U1; expected vectors of numbers"):
        load(str(tmp_path))
    np.save(tmp_path / "queries.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(softdb.BadInput, match=r"queries.npy cannot be read as an array of numbers"):
        load(str(tmp_path))
    np.save(tmp_path / "queries.npy", np.array([[np.nan] * 4] * 2))
    with pytest.raises(softdb.BadInput, match="queries hold NaN or infinity"):
        load(str(tmp_path))
    np.save(tmp_path / "queries.npy", np.ones((1, 4)))
    with pytest.raises(softdb.BadInput, match="1 queries are too few"):
        load(str(tmp_path))


def test_queries_are_held_out_of_a_file_of_keys(tmp_path: Path, rng: np.random.Generator) -> None:
    numbers = rng.standard_normal((200, 5)).astype(np.float32)
    np.save(tmp_path / "keys.npy", numbers)
    for file, metric in ((tmp_path / "keys.npy", Metric.DOT), (vecs(tmp_path / "keys.fvecs", numbers), Metric.L2)):
        data = load(str(file))
        assert (data.n, len(data.queries), data.metric, data.held_out) == (180, 20, metric, True)
        assert sorted(map(tuple, [*data.keys, *data.queries])) == sorted(map(tuple, numbers))
        np.testing.assert_array_equal(load(str(file)).queries, data.queries)
    few = load(str(tmp_path / "keys.npy"), n=50, most=7)
    assert (few.n, len(few.queries)) == (50, 7)
    assert not set(map(tuple, few.keys)) & set(map(tuple, few.queries))
    given = load(str(tmp_path / "keys.npy"), queries=tmp_path / "keys.fvecs")
    assert (given.n, len(given.queries), given.held_out) == (200, 200, False)
    with pytest.raises(softdb.BadInput, match="n is 190, but there are 180 keys"):
        load(str(tmp_path / "keys.npy"), n=190)


def test_unreadable_data_is_refused_by_name(tmp_path: Path) -> None:
    keys = vecs(tmp_path / "a.fvecs", np.ones((3, 2), np.float32))
    holey = vecs(tmp_path / "nan.fvecs", np.where(np.arange(50)[:, None] == 7, np.nan, np.ones((50, 2))).astype("f"))
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("nowhere", {}, "'nowhere' does not exist; choose one of 'clustered', 'uniform', a folder"),
        ("clustered", {"n": 0}, "n is 0; expected a whole number"),
        ("clustered", {"metric": "cos"}, "metric is 'cos'; choose one of 'dot'"),
        ("uniform", {"queries": keys}, "uniform makes its own queries"),
        (str(keys), {}, "holds 3 vectors, too few to hold queries out; name a file with queries"),
        (str(holey), {}, "the vectors of .* hold NaN or infinity in 1 of 50 rows, first in row 7"),
        (str(keys), {"dim": 2}, "dim is 2, but .* has a width of its own"),
        (str(keys), {"queries": tmp_path / "no.fvecs"}, "there is no file .*no.fvecs with queries"),
        (str(keys), {"queries": keys, "n": 4}, "n is 4, but there are 3 keys"),
    ]
    for name, words, message in wrong:
        with pytest.raises(softdb.BadInput, match=message):
            load(name, **words)


@pytest.mark.parametrize("metric", ["dot", "cosine", "l2"])
def test_the_truth_is_that_of_float64(metric: str, rng: np.random.Generator) -> None:
    keys = (rng.standard_normal((90, 3)) + 20).astype(np.float32)
    keys[50:60] = keys[:10]  # ties
    queries = as_asked(keys[::9] + 0.1, metric)
    data = Dataset("ties", keys, queries, Metric(metric))
    scores = loops(keys, queries, metric)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :7]
    actual = nearest(data, queries, 7)
    best = np.take_along_axis(scores, actual, 1)
    np.testing.assert_allclose(best, np.take_along_axis(scores, expected, 1), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(exact_scores(data, queries, actual), best, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(nearest(data, queries, 7, size=40), actual)


def as_asked(queries: Array, metric: str) -> NDArray[np.float32]:
    lengths = np.linalg.norm(queries, axis=1, keepdims=True) if metric == "cosine" else 1
    return np.asarray(queries / lengths, np.float32)


def small() -> tuple[Exam, Array]:
    keys = np.eye(8, dtype=np.float32)
    keys[7] = keys[6]
    queries = np.array([[8, 7, 6, 5, 4, 3, 2, 0], [0, 0, 0, 0, 0, 9, 5, 0]], np.float32)
    data = Dataset("eye", keys, queries, Metric.DOT)
    truth = nearest(data, queries, 2)
    return Exam(data, truth), truth


def test_recall_counts_ties_and_missing_hits() -> None:
    exam, truth = small()
    np.testing.assert_array_equal(truth, [[0, 1], [5, 6]])
    assert exam.recall(truth, "honest") == 1
    assert exam.recall(np.array([[1, 0], [7, 5]]), "tied") == 1  # 7 is as near as 6
    assert exam.recall(np.array([[0, 2], [5, -1]]), "lame") == 0.5
    assert exam.recall(np.full((2, 2), -1), "empty") == 0
    on_spot = Dataset("eye", exam.data.keys, exam.data.keys[:3], Metric.L2)
    assert Exam(on_spot, np.arange(3)[:, None]).recall(np.arange(3)[:, None], "honest") == 1  # at a distance of 0


def test_malformed_answers_are_refused() -> None:
    exam, truth = small()
    wrong = {
        r"liar answered with shape \(2, 1\)": truth[:, :1],
        r"liar answered with shape .* of float64": truth.astype(np.float64),
        "liar found rows from 0 to 8, of 8 keys": np.array([[0, 8], [5, 6]]),
        "liar found rows from -2 to 6": np.array([[0, -2], [5, 6]]),
        "liar found the same row twice": np.array([[0, 1], [5, 5]]),
    }
    for message, actual in wrong.items():
        with pytest.raises(WrongAnswer, match=message):
            exam.recall(actual, "liar")
    exam.alike(truth, truth, "honest")
    with pytest.raises(WrongAnswer, match=r"recall 1.000 in a batch but 0.000 for the same queries alone"):
        exam.alike(truth, np.array([[3, 4]]), "liar")
