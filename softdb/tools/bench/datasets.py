"""Datasets of benchmarks: seeded synthetic keys, folders with keys.npy and queries.npy, files of `formats.arrays`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from softdb.check import Metric, finite, integer, shown
from softdb.errors import BadInput
from softdb.formats.arrays import READERS, KeyFile, read_keys, read_queries
from softdb.index.contract import Floats, Rows, prepared

BLOCK = 1 << 16  # number of keys of a mapped file that are in memory at once
QUERIES = 2000  # default number of queries: one half for tuning, the other for measuring
SIZE, WIDTH = 200_000, 128  # number and width of synthetic keys
PREFIX = "wordnet:"
WORLDS = ("clustered", "uniform")


@dataclass(frozen=True)
class Dataset:
    """Keys, queries, their metric, and the true neighbours if the file holds them."""

    name: str
    keys: NDArray[Any]  # (n, d) of any number type, in memory or in a mapped file
    queries: Floats  # (q, d), of length 1 for the cosine
    metric: Metric
    neighbours: Rows | None = None  # (q, m), the nearest first
    held_out: bool = False  # True if the queries were rows of the file of keys

    @property
    def n(self) -> int:
        """Number of keys."""
        return int(self.keys.shape[0])

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return int(self.keys.shape[1])

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[int, Floats]]:
        """Yield the first row number and the keys (b, d) of each block: float32, of length 1 for the cosine."""
        for low in range(0, self.n, size):
            yield low, prepared(self.keys[low : low + size], self.metric)

    def half(self, second: bool) -> Dataset:
        """Return the dataset with half of the queries: the 1st, 3rd, … or, if `second`, the 2nd, 4th, …."""
        chosen = slice(int(second), None, 2)
        neighbours = None if self.neighbours is None else self.neighbours[chosen]
        return replace(self, queries=np.ascontiguousarray(self.queries[chosen]), neighbours=neighbours)


def world(n: int, dim: int, seed: int = 0) -> Floats:
    """Return clustered keys (n, dim): 2,000 Gaussian centres with Zipf(1.3) sizes, unit noise, rows normalised."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((2000, dim), dtype=np.float32) * 2
    sizes = 1 / np.arange(1, 2001) ** 1.3
    keys = centres[random.choice(2000, n, p=sizes / sizes.sum())]
    keys += random.standard_normal((n, dim), dtype=np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


def queries_near(keys: Floats, q: int, seed: int = 1) -> Floats:
    """Return q queries: random keys plus Gaussian noise of 0.6 / √d in each number, normalised."""
    random = np.random.default_rng(seed)
    queries = keys[random.integers(0, len(keys), q)]
    queries = queries + (0.6 / keys.shape[1] ** 0.5) * random.standard_normal(queries.shape, dtype=np.float32)
    return np.asarray(queries / np.linalg.norm(queries, axis=1, keepdims=True), np.float32)


def uniform(n: int, dim: int, q: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Return keys (n, d) and queries (q, d), uniform on the sphere: an index has no structure to exploit."""
    random = np.random.default_rng(seed)
    keys, queries = (random.standard_normal((count, dim), dtype=np.float32) for count in (n, q))
    for vectors in (keys, queries):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return keys, queries


def load(
    name: str,
    *,
    n: int | None = None,
    dim: int | None = None,
    queries: str | os.PathLike[str] | None = None,
    metric: object = None,
    most: int = QUERIES,
) -> Dataset:
    """Load or generate a dataset.

    Args:
        name: "clustered", "uniform", "wordnet:FOLDER" or a folder (keys.npy, queries.npy), or a file: .hdf5 (of
            ann-benchmarks or VIBE), .npy (n, d), .fvecs, .bvecs, .fbin, .u8bin.
        n: number of synthetic keys (200,000), or how many keys of a file to take from its start (all).
        dim: width of synthetic keys (128).
        queries: file with the queries in one of these formats. By default the file's own or, if it holds keys only, a
            tenth of its rows, at most `most`, drawn with a fixed seed; the keys are then the other rows.
        metric: "dot", "cosine" or "l2"; by default the file's metric, "l2" for formats without one, otherwise "dot".
        most: largest number of queries; from more, a random sample is taken.

    Raises:
        BadInput: the dataset does not exist, or its file is malformed.
    """
    count = None if n is None else integer(n, "n")
    option = None if metric is None else Metric.parse(metric)
    if name in WORLDS:
        if queries is not None:
            raise BadInput(f"{name} makes its own queries; leave out the file {os.fspath(queries)}")
        size, width = count or SIZE, WIDTH if dim is None else integer(dim, "dim", 2)
        keys = world(size, width) if name == "clustered" else None
        vectors = uniform(size, width, most) if keys is None else (keys, queries_near(keys, most))
        return Dataset(name, *vectors, option or Metric.DOT)
    if dim is not None:
        raise BadInput(f"dim is {shown(dim)}, but {shown(name)} has a width of its own; leave dim out")
    path = Path(name.removeprefix(PREFIX))
    if not path.exists():
        raise BadInput(
            f"{shown(name)} does not exist; choose one of {', '.join(map(repr, WORLDS))}, a folder with keys.npy "
            f"and queries.npy, or a file that ends in .npy, {', '.join(end for end in READERS if end)}"
        )
    file = read_keys(path)
    if queries is not None:
        file = replace(file, queries=read_queries(Path(queries)), neighbours=None)
    shown_name = path.name if ":" not in name else name.split(":")[0]
    return _chosen(file, path, shown_name, count, option or file.metric, most)


def _held_out(path: Path, keys: NDArray[Any], n: int | None, most: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw the queries from the keys, without replacement; return the keys that are left, and the queries."""
    count = min(most, len(keys) // 10)
    if count < 2:
        few = f"{path} holds {len(keys)} vectors, too few to hold queries out"
        raise BadInput(f"{few}; name a file with queries, too: --queries FILE")
    taken = np.asarray(keys[: None if n is None else n + count])
    finite(taken, f"the vectors of {path}")
    rows = np.random.default_rng(3).permutation(len(taken))[:count]
    return np.delete(taken, rows, axis=0), taken[np.sort(rows)]


def _chosen(file: KeyFile, path: Path, name: str, n: int | None, metric: Metric, most: int) -> Dataset:
    """Return the first n keys and a sample of the queries; neighbours only for all keys and the file's metric."""
    keys, queries, near = file.keys, file.queries, file.neighbours
    if queries is None:
        keys, queries = _held_out(path, keys, n, most)
    if queries.shape[1] != keys.shape[1]:
        raise BadInput(
            f"the queries are {queries.shape[1]} wide but the keys of {path} are {keys.shape[1]} wide; "
            "give queries of the same embedding"
        )
    if len(queries) < 2:
        raise BadInput(f"{len(queries)} queries are too few, as half of them are for tuning; give 2 or more")
    if near is not None and (len(near) != len(queries) or near.size == 0):
        raise BadInput(f"{path} holds neighbours of shape {near.shape} for {len(queries)} queries; make it again")
    if near is not None and (near.min() < 0 or near.max() >= len(keys)):
        raise BadInput(f"{path} names neighbours from {near.min()} to {near.max()}, of {len(keys)} keys; make it again")
    if n is not None and n > len(keys):
        raise BadInput(f"n is {n}, but there are {len(keys)} keys; give n at most that number")
    sample = np.random.default_rng(2).permutation(len(queries))[:most]
    sampled = prepared(np.asarray(queries)[sample], metric)
    finite(sampled, "queries")
    holds = near is not None and n in (None, len(keys)) and metric is file.metric
    neighbours = np.asarray(near, np.int64)[sample] if holds else None
    return Dataset(name, keys[:n], sampled, metric, neighbours, file.queries is None)
