"""Datasets of benchmarks: seeded worlds, folders with keys.npy and queries.npy, the files of `formats.arrays`."""

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
from softdb.formats.arrays import READERS, KeyFile, read_queries
from softdb.index.contract import Floats, Rows, prepared

BLOCK = 1 << 16  # keys in memory at once, where they come from a mapped file
QUERIES = 2000  # half of which are tuned on
SIZE, WIDTH = 200_000, 128  # of a world
PREFIX = "wordnet:"
WORLDS = ("clustered", "uniform")


@dataclass(frozen=True)
class Dataset:
    """Keys, queries, their metric, and the true neighbours where a file holds them."""

    name: str
    keys: NDArray[Any]  # (n, d) numbers of any kind, in memory or in a mapped file
    queries: Floats  # (q, d), of length 1 for the cosine
    metric: Metric
    neighbours: Rows | None = None  # (q, m), the nearest first

    @property
    def n(self) -> int:
        """Number of keys."""
        return int(self.keys.shape[0])

    @property
    def dim(self) -> int:
        """d, the width of a key."""
        return int(self.keys.shape[1])

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[int, Floats]]:
        """First row and keys (b, d) of each block: float32, of length 1 for the cosine."""
        for low in range(0, self.n, size):
            yield low, prepared(self.keys[low : low + size], self.metric)

    def half(self, second: bool) -> Dataset:
        """Every other query only: one half is tuned on, the other measured."""
        part = slice(int(second), None, 2)
        neighbours = None if self.neighbours is None else self.neighbours[part]
        return replace(self, queries=np.ascontiguousarray(self.queries[part]), neighbours=neighbours)


def world(n: int, dim: int, seed: int = 0) -> Floats:
    """2,000 Gaussian centres with Zipf(1.3) sizes, unit noise, rows normalised."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((2000, dim), dtype=np.float32) * 2
    sizes = 1 / np.arange(1, 2001) ** 1.3
    keys = centres[random.choice(2000, n, p=sizes / sizes.sum())]
    keys += random.standard_normal((n, dim), dtype=np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


def queries_near(keys: Floats, q: int, seed: int = 1) -> Floats:
    """Stored keys with noise of 0.6 / √d, normalised."""
    random = np.random.default_rng(seed)
    queries = keys[random.integers(0, len(keys), q)]
    queries = queries + (0.6 / keys.shape[1] ** 0.5) * random.standard_normal(queries.shape, dtype=np.float32)
    return np.asarray(queries / np.linalg.norm(queries, axis=1, keepdims=True), np.float32)


def uniform(n: int, dim: int, q: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Keys (n, d) and queries (q, d) in directions that are all as likely: nothing to exploit."""
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
    """A dataset by its name.

    Args:
        name: "clustered", "uniform", "wordnet:FOLDER" or a folder (keys.npy, queries.npy), or a file: .hdf5 (of
            ann-benchmarks or VIBE), .fvecs, .bvecs, .fbin, .u8bin.
        n: keys of a world (200,000), or how many of a file's to take (all).
        dim: width of a world (128).
        queries: the file with the queries, of the same formats; for .fvecs, .bvecs, .fbin and .u8bin it is needed.
        metric: "dot", "cosine" or "l2"; else what the file says, "l2" for files that cannot say, "dot" for the others.
        most: queries to take, by chance where there are more.

    Raises:
        BadInput: nothing is there by that name, or the file is not what it should be.
    """
    count = None if n is None else integer(n, "n")
    given = None if metric is None else Metric.parse(metric)
    if name in WORLDS:
        if queries is not None:
            raise BadInput(f"{name} makes its own queries; leave out the file {os.fspath(queries)}")
        size, width = count or SIZE, WIDTH if dim is None else integer(dim, "dim", 2)
        keys = world(size, width) if name == "clustered" else None
        vectors = uniform(size, width, most) if keys is None else (keys, queries_near(keys, most))
        return Dataset(name, *vectors, given or Metric.DOT)
    if dim is not None:
        raise BadInput(f"dim is {shown(dim)}, but {shown(name)} has a width of its own; leave it out")
    path = Path(name.removeprefix(PREFIX))
    file = _read(path, name)
    if queries is not None:
        file = replace(file, queries=read_queries(Path(queries)), neighbours=None)
    shown_name = path.name if ":" not in name else name.split(":")[0]
    return _chosen(file, path, shown_name, count, given or file.metric, most)


def _read(path: Path, name: str) -> KeyFile:
    ends = ", ".join(end for end in READERS if end)
    if not path.exists():
        raise BadInput(
            f"there is no dataset {shown(name)}; choose one of {', '.join(map(repr, WORLDS))}, a folder with keys.npy "
            f"and queries.npy, or a file that ends in {ends}"
        )
    kind = "" if path.is_dir() else path.suffix.lower()
    if kind not in READERS or (kind == "" and not path.is_dir()):
        raise BadInput(f"{path} ends in {kind!r}; expected one of {ends}")
    return READERS[kind](path)


def _chosen(file: KeyFile, path: Path, name: str, n: int | None, metric: Metric, most: int) -> Dataset:
    """The first n keys and some of the queries; the file's neighbours hold for all keys and its own metric only."""
    keys, queries, near = file.keys, file.queries, file.neighbours
    if queries is None:
        raise BadInput(f"{path} holds keys only; name the file with the queries, too (--queries FILE)")
    if queries.shape[1] != keys.shape[1]:
        raise BadInput(
            f"the queries are {queries.shape[1]} wide but the keys of {path} are {keys.shape[1]} wide; "
            "give queries of the same embedding"
        )
    if len(queries) < 2:
        raise BadInput(f"{len(queries)} queries are too few: half are tuned on, half are measured; give 2 or more")
    if near is not None and (len(near) != len(queries) or near.size == 0):
        raise BadInput(f"{path} holds neighbours of shape {near.shape} for {len(queries)} queries; make it anew")
    if near is not None and (near.min() < 0 or near.max() >= len(keys)):
        raise BadInput(f"{path} names neighbours from {near.min()} to {near.max()}, of {len(keys)} keys")
    if n is not None and n > len(keys):
        raise BadInput(f"n is {n}, but there are {len(keys)} keys; ask for at most that many")
    sample = np.random.default_rng(2).permutation(len(queries))[:most]
    taken = prepared(np.asarray(queries)[sample], metric)
    finite(taken, "queries")
    holds = near is not None and n in (None, len(keys)) and metric is file.metric
    return Dataset(name, keys[:n], taken, metric, np.asarray(near, np.int64)[sample] if holds else None)
