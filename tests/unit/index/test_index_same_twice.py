"""The same records, seed and kind give the same index and the same answers, for any number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from softdb.index.outliers import LEAST, affordable
from softdb.index.quantizer import Matrix, _balanced, _means
from softdb.kernels import available

pytest.importorskip("faiss")
pytestmark = pytest.mark.skipif(not available(), reason="lists need the native kernels")

# Threads are set before torch and FAISS start, as a user sets them. Prints a hash of each index and of its answers.
SCRIPT = """
import hashlib, json, sys
import numpy as np, torch, softdb

def digest(*arrays):
    return hashlib.blake2b(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays), digest_size=8).hexdigest()

n, dim, cases = json.loads(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
answers = {}
for kind, metric, dtype in cases:
    random = np.random.default_rng(7)
    keys = random.standard_normal((n // 100, dim))[random.integers(0, n // 100, n)] + random.normal(0, 0.7, (n, dim))
    keys = torch.from_numpy(keys * np.exp(0.4 * random.standard_normal((n, 1)))).to(getattr(torch, dtype))
    queries = keys[random.integers(0, n, 64)].float() + 0.3 * torch.from_numpy(random.normal(size=(64, dim))).float()
    warmth = {"cosine": 0.05, "dot": 2.0, "l2": 2.0}[metric]
    with softdb.open(None, dim=dim, metric=metric, dtype=keys.dtype) as db:
        db.insert(range(n), keys)
        report = db.build_index(kind, recall=0.9)
        index = db.core.finder.index
        hits, alone = db.search(queries), [db.search(query[None]) for query in queries[:8]]
        seed = lambda: torch.Generator().manual_seed(5)
        estimate = db.attend(queries, rtol=0.1, temperature=warmth, generator=seed())
        answers[f"{kind} {metric} {dtype}"] = {
            "index": digest(index.dump()),
            "estimates": digest(index.sketches.dump()),
            "tuned": [index.effort, index.fetch_k, [] if index.longest is None else index.longest.tolist()],
            "recall": report.recall,
            "hits": digest(hits.rows, hits.scores),
            "single queries": digest(*(part for hit in alone for part in (hit.rows, hit.scores))),
            "attend k": digest(db.attend(queries, k=50, temperature=warmth).output),
            "sample": digest(db.sample(queries[:8], n=4, temperature=warmth, generator=seed()).hits.rows),
            "rounded": estimate.output.double().sum(0).tolist(),
        }
print(json.dumps(answers))
"""

QUICK = (
    12_000,
    20,
    [("ivf", "dot", "float32"), ("ivf", "l2", "float16"), ("hnsw", "cosine", "float32"), ("flat", "dot", "float32")],
)
SLOW = (
    60_000,
    96,
    [
        (kind, metric, dtype)
        for kind in ("auto", "ivf")
        for metric, dtype in (("dot", "float32"), ("l2", "float16"), ("cosine", "float32"))
    ],
)


def answers(threads: int, world: tuple[int, int, list[tuple[str, str, str]]]) -> Any:
    """Build indexes and ask them in another process with this number of threads."""
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    command = [sys.executable, "-c", SCRIPT, json.dumps(world), str(threads)]
    return json.loads(subprocess.check_output(command, text=True, env=os.environ | variables))


@pytest.mark.parametrize(
    ("world", "other"), [(QUICK, (2,)), pytest.param(SLOW, (2,), marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_threads_change_no_answer(world: tuple[int, int, list[tuple[str, str, str]]], other: tuple[int, ...]) -> None:
    expected = answers(1, world)
    assert len(expected) == len(world[2])
    for threads in other:
        for case, given in answers(threads, world).items():
            first = expected[case]
            assert given.pop("rounded") == pytest.approx(first["rounded"], rel=1e-4, abs=1e-3)
            assert given == {name: value for name, value in first.items() if name != "rounded"}, (threads, case)


def test_equal_variances_have_axes_of_their_own(rng: np.random.Generator) -> None:
    """Directions without any variance keep their axes if the sums of products are rounded otherwise."""
    points = rng.integers(-4, 5, (500, 6)).astype(np.float32) @ rng.standard_normal((6, 24)).astype(np.float32)
    turned = Matrix.of(_balanced(points, 8, 3)).numbers
    assert (Matrix.of(_balanced(points[::-1].copy(), 8, 3)).numbers == turned).all()
    assert (turned != 0).any(1).all()


def test_the_means_are_those_of_their_points(rng: np.random.Generator) -> None:
    """Clusters far apart are found, and duplicates leave no list without a finite mean."""
    centres = 50 * rng.standard_normal((6, 8)).astype(np.float32)
    points = np.repeat(centres, 30, axis=0) + rng.standard_normal((180, 8)).astype(np.float32)
    means = _means(points, 24)
    nearest = np.square(points[:, None] - means).sum(2).min(1)
    assert nearest.mean() < 8
    same = _means(np.ones((90, 8), np.float32), 4)
    assert np.isfinite(same).all()


def test_outliers_cost_at_most_their_share() -> None:
    lengths, least = np.arange(1000, 0, -1.0), np.array([0.0, 501.0])  # the second query needs the longest 500
    counts = [affordable(lengths, least, cost, 10) for cost in (0.0, 1e6, 1e9)]
    # 1e6 bytes: 40,000 for keys of 40 bytes each, 1,000 keys for two queries; 500 of both and 1,000 / 2 of the first
    assert counts == [LEAST, 1000, 1000]
    assert affordable(lengths, least, 5e5, 10) == 500
    assert affordable(lengths, least, 6e5, 10) == 700
