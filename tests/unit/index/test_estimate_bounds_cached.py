"""Bounds for estimates are stored with an index and used only for the same records."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from with_kernels import NEEDS_KERNELS
from worlds import clusters, indexed

import softdb
from softdb.index import cache, reach
from softdb.index.contract import Reach
from softdb.index.reach import FORM, packed, unpacked
from softdb.index.sampler import Sampler

pytest.importorskip("faiss")
pytestmark = NEEDS_KERNELS

N, DIM = 11_000, 16  # a little more than are worth an estimate


def built_index(path: Path, seed: int, kind: str = "ivf", **shape: Any) -> softdb.SoftDB:
    """A database with an index, closed."""
    random = np.random.default_rng(seed)
    keys = clusters(random, N, DIM, 50, 1, apart=3)
    values = random.integers(0, 3, N if "num_classes" in shape else (N, 3))
    used = values if len(shape) > 1 and "dtype" not in shape else None
    db = indexed(keys, used, kind=kind, recall=0.5, path=path, **shape)
    db.close()
    return db


def sampler_of(db: softdb.SoftDB) -> Sampler:
    drawable = db._finder.sampler(db._store.snapshot, None)
    assert drawable is not None
    return drawable[0]


def same(one: Reach, other: Reach) -> None:
    for name, ours, theirs in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two databases whose records differ, and all else is alike."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTDB_KEY_FILE", str(tmp_path_factory.getbasetemp() / "index.key"))
        built_index(folder / "db", 0)
        built_index(folder / "other", 1)
    return folder


@pytest.fixture
def path(tmp_path: Path, built: Path) -> Path:
    shutil.copytree(built / "db", tmp_path / "db")
    return tmp_path / "db"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: from then on nothing is measured."""
    return lambda: monkeypatch.setattr(reach, "_measured", lambda *_: pytest.fail("it is measured again"))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("ivf", {"metric": "dot", "value_dim": 3}),
        ("ivf", {"metric": "l2", "num_classes": 3}),
        ("ivf", {"metric": "cosine", "dtype": "float16"}),
        ("hnsw", {"metric": "l2", "value_dim": 3}),
        ("flat", {"metric": "dot", "num_classes": 3}),
    ],
)
def test_loaded_bounds_equal_measured_ones(tmp_path: Path, kind: str, shape: dict[str, Any]) -> None:
    built_index(tmp_path / "db", 0, kind, **shape)
    with softdb.open(tmp_path / "db") as db:
        loaded, index = sampler_of(db).reach, sampler_of(db).index
        index.reach = None
        same(loaded, Sampler(index, db._store.snapshot, shape.get("num_classes")).reach)


@pytest.mark.parametrize("background", [False, True])
def test_a_fresh_handle_estimates_as_the_one_that_built(
    path: Path, background: bool, never: Callable[[], None]
) -> None:
    asked = 3 * torch.ones(4, DIM)
    with softdb.open(path) as db:
        if background:
            db.build_index("ivf", recall=0.5, background=True).result()
        else:
            db.build_index("ivf", recall=0.5)
        never()
        before, count = db.attend(asked, temperature=9.0, rtol=0.5, max_draws=64), db.count_within(asked, 3.0)
    for _ in range(2):
        with softdb.open(path) as db:
            after, counted = db.attend(asked, temperature=9.0, rtol=0.5, max_draws=64), db.count_within(asked, 3.0)
            assert torch.equal(before.output, after.output)
            assert torch.equal(before.bar, after.bar)
            assert torch.equal(count.value, counted.value)
            assert (after.bar > 0).any()
            db.tune(recall=0.5)  # the codes stay, and so do their bounds
    with softdb.open(path) as db:
        db.delete(list(range(0, N, 20)))
        db.compact()
        layout = sampler_of(db).index.layout
        assert (layout.rows[layout.slots] % 20).all()


def test_a_grown_index_is_measured_again(path: Path) -> None:
    with softdb.open(path) as db:
        before = sampler_of(db).reach
        db.insert(range(N, 2 * N), np.random.default_rng(1).normal(0, 20, (N, DIM)))
        after = sampler_of(db).reach
        assert (after.witnesses >= N).any()
        assert after.value_radius > 2 * before.value_radius
    with softdb.open(path) as db:  # kept as it was measured
        index = db._finder._current(db._store.snapshot)
        assert index is not None
        assert index.reach is not None
        same(index.reach, after)


@pytest.mark.parametrize(
    "change",
    [
        {"means": np.zeros((3, DIM), np.float32)}, {"means": np.zeros((64, DIM))}, {"means": np.zeros(3, np.float32)},
        {"centre": np.full(DIM, np.nan)}, {"centre": np.zeros((1, DIM))}, {"centre": np.array([[{}]])},
        {"value_radius": np.inf}, {"value_radius": np.zeros(1)},
        {"scales": np.ones(10_000, np.float32)}, {"scales": np.ones(0)},
        {"apart": np.array([N]), "scales": np.ones(1, np.float32)},
        {"apart": np.array([-1]), "scales": np.ones(1, np.float32)},
        {"apart": np.array([7, 7]), "scales": np.ones(2, np.float32)},
        {"witnesses": np.arange(3.0)}, {"witnesses": np.arange(3)}, {"checksums": np.zeros(256)},
    ],
    ids=lambda change: " ".join(change),
)  # fmt: skip
def test_bounds_of_another_index_are_refused(path: Path, change: dict[str, Any], never: Callable[[], None]) -> None:
    never()
    with softdb.open(path) as db:
        results, index = sampler_of(db).reach, sampler_of(db).index
        same(unpacked(packed(results), index), results)
        file = io.BytesIO()
        for name in FORM:
            np.save(file, change.get(name, getattr(results, name)))
        with pytest.raises(ValueError, match=r"is not|does not fit|does not hold|pickle"):
            unpacked(file.getvalue(), index)
        for data in (packed(results)[:-1], packed(results)[:5000], packed(results) + b"\0", b"\0", os.urandom(5000)):
            with pytest.raises(ValueError, match=r"."):
                unpacked(data, index)


@pytest.mark.parametrize("damage", ["signed rubbish", "nothing", "of an older softdb", "of another database"])
def test_unusable_bounds_are_measured_again(
    path: Path, built: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with softdb.open(path) as db, softdb.open(built / "other", mode="r") as other:
        known = sampler_of(db).reach
        entry, foreign = (one._store.index_entry() for one in (db, other))
        assert entry is not None
        assert foreign is not None
        file = path / "index" / entry["file"]
        data = file.read_bytes()[: entry["codes"]]
        if damage == "of another database":
            shutil.copy(built / "other" / "index" / foreign["file"], file.parent)
            entry = foreign
        else:
            data += b"rubbish" if damage == "signed rubbish" else b""
            file.write_bytes(data)
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if damage == "of an older softdb":
                del entry["codes"]
            entry["hmac"] = cache._signature(entry)
        db._store.put_index_entry(entry)
    with softdb.open(path) as db:
        assert db.stats().index is not None, "the index itself is used"
        actual = sampler_of(db).reach
        if damage == "of another database":
            np.testing.assert_allclose(actual.value_radius, known.value_radius, rtol=0.01)
        else:
            same(actual, known)
    assert ("measures " in caplog.text) == (damage in ("signed rubbish", "of another database"))
