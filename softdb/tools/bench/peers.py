"""Libraries that softdb is compared with, imported when their index is built. All indexes hold the keys."""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from softdb.check import Metric
from softdb.index.contract import Floats, Rows
from softdb.tools.bench.datasets import Dataset
from softdb.tools.bench.engines import SOFTDB, Engine, Progress

REFINED = 10  # REFINED · k candidates, found by codes, are rescored by their keys


class _Calls(NamedTuple):
    """Functions that fill, search and measure the index of one library."""

    add: Callable[[int, Floats], object]  # first row and keys of a block
    search: Callable[[Floats, int], Any]  # queries and effort -> rows (q, k)
    size: Callable[[], int]
    finish: Callable[[], object] = lambda: None  # after the last block


class _Peer(Engine):
    """An engine whose index is made by another library; `make` returns its functions."""

    variants, varied = (16, 32), "M"
    effort_name, efforts = "ef", (10, 8192)
    make: ClassVar[Callable[[Any, Any, bool], _Calls]]  # engine, library, True for l2 -> functions

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        self.calls = self.make(import_module(self.modules[0]), self.data.metric is Metric.L2)
        seconds, start = self.added(progress, self.calls.add), time.perf_counter()
        self.calls.finish()
        return {"adding": seconds + time.perf_counter() - start}

    def search(self, queries: Floats, effort: int) -> Rows:
        rows = self.calls.search(queries, max(effort, self.setup.k))
        return np.asarray(rows).astype(np.int64).reshape(len(queries), self.setup.k)

    def bytes(self) -> int:
        return self.calls.size()

    def threads_for(self, queries: Floats) -> int:
        return self.threads if len(queries) > 1 else 1  # a single query is slower with a pool of threads


def _faiss(peer: _Peer, faiss: Any, l2: bool) -> _Calls:
    faiss.omp_set_num_threads(peer.setup.threads)
    index = faiss.IndexHNSWFlat(peer.data.dim, peer.variant, faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = peer.setup.construction

    def search(queries: Floats, effort: int) -> Any:
        return index.search(queries, peer.setup.k, params=faiss.SearchParametersHNSW(efSearch=effort))[1]

    def size() -> int:
        return _saved(lambda folder: faiss.write_index(index, str(folder / "index")))

    return _Calls(lambda low, block: index.add(block), search, size)


def _lists(codes: str) -> Callable[[_Peer, Any, bool], _Calls]:
    """Return `make` for FAISS's inverted lists, `variant` · √n of them, which store keys, or codes to be rescored."""

    def make(peer: _Peer, faiss: Any, l2: bool) -> _Calls:
        faiss.omp_set_num_threads(peer.setup.threads)
        data, lists = peer.data, max(1, int(peer.variant * peer.data.n**0.5))
        factory = f"IVF{lists},{codes.format(parts=data.dim // 4)}"
        index = faiss.index_factory(data.dim, factory, faiss.METRIC_L2 if l2 else faiss.METRIC_INNER_PRODUCT)

        def add(low: int, block: Floats) -> None:
            if not index.is_trained:
                step = max(1, data.n // (64 * lists))
                index.train(np.concatenate([keys[::step] for _, keys in data.blocks()]))
            index.add(block)

        def search(queries: Floats, effort: int) -> Any:
            parameters = faiss.SearchParametersIVF(nprobe=min(effort, lists))
            if "RFlat" in codes:
                parameters = faiss.IndexRefineSearchParameters(k_factor=REFINED, base_index_params=parameters)
            return index.search(queries, peer.setup.k, params=parameters)[1]

        return _Calls(add, search, lambda: _saved(lambda folder: faiss.write_index(index, str(folder / "index"))))

    return make


def _hnswlib(peer: _Peer, module: Any, l2: bool) -> _Calls:
    index = module.Index("l2" if l2 else "ip", peer.data.dim)
    index.init_index(peer.data.n, M=peer.variant, ef_construction=peer.setup.construction)

    def search(queries: Floats, effort: int) -> Any:
        index.set_ef(effort)
        return index.knn_query(queries, peer.setup.k, num_threads=peer.threads_for(queries))[0]

    return _Calls(
        lambda low, block: index.add_items(block, num_threads=peer.setup.threads), search, index.index_file_size
    )


def _usearch(peer: _Peer, _: Any, l2: bool) -> _Calls:
    index = import_module("usearch.index").Index(
        ndim=peer.data.dim, metric="l2sq" if l2 else "ip", dtype="f32", connectivity=peer.variant,
        expansion_add=peer.setup.construction,
    )  # fmt: skip

    def search(queries: Floats, effort: int) -> Any:
        index.expansion_search = effort
        return index.search(queries, peer.setup.k, threads=peer.threads_for(queries)).keys

    return _Calls(
        lambda low, block: index.add(np.arange(low, low + len(block)), block, threads=peer.setup.threads),
        search,
        lambda: int(index.memory_usage),
    )


def _voyager(peer: _Peer, module: Any, l2: bool) -> _Calls:
    space = module.Space.Euclidean if l2 else module.Space.InnerProduct
    index = module.Index(
        space, peer.data.dim, M=peer.variant, ef_construction=peer.setup.construction, max_elements=peer.data.n
    )

    def add(low: int, block: Floats) -> object:
        return index.add_items(block, ids=np.arange(low, low + len(block)), num_threads=peer.setup.threads)

    def search(queries: Floats, effort: int) -> Any:
        return index.query(queries, peer.setup.k, num_threads=peer.threads_for(queries), query_ef=effort)[0]

    return _Calls(add, search, lambda: len(index.as_bytes()))


def _annoy(peer: _Peer, module: Any, l2: bool) -> _Calls:
    """Use Annoy's random trees. They take one query at a time, so threads share the queries of a batch."""
    index, k = module.AnnoyIndex(peer.data.dim, "euclidean" if l2 else "dot"), peer.setup.k

    def add(low: int, block: Floats) -> None:
        for row, key in enumerate(block, low):
            index.add_item(row, key)

    def search(queries: Floats, effort: int) -> Any:
        def padded(query: Floats) -> list[int]:
            rows = index.get_nns_by_vector(query, k, effort)
            return [*rows, *[-1] * (k - len(rows))]

        return _each(peer, padded, queries)

    def write(folder: Path) -> None:
        index.save(str(folder / "trees.ann"))  # from now on Annoy reads this file through memory mapping

    finish = partial(index.build, peer.variant, n_jobs=peer.setup.threads)
    return _Calls(add, search, lambda: _saved(write), finish)


def _each(peer: _Peer, search: Callable[[Floats], Any], queries: Floats) -> list[Any]:
    """Search each query by itself, in several threads; return a list of rows for each."""
    if peer.threads_for(queries) == 1:
        return [search(query) for query in queries]
    with ThreadPoolExecutor(peer.threads) as pool:
        return list(pool.map(search, queries, chunksize=64))


def _at_once(
    peer: _Peer,
    build: Callable[[Floats], Any],
    search: Callable[[Any, Floats, int], Any],
    write: Callable[[Any, Path], object],
) -> _Calls:
    """Return the functions of an index that must be built from all keys in one call."""
    keys, indexes = np.empty((peer.data.n, peer.data.dim), np.float32), list[Any]()

    def add(low: int, block: Floats) -> None:
        keys[low : low + len(block)] = block

    return _Calls(
        add, lambda queries, effort: search(indexes[0], queries, effort), lambda: _saved(partial(write, indexes[0])),
        lambda: indexes.append(build(keys)),
    )  # fmt: skip


def _svs(peer: _Peer, module: Any, l2: bool) -> _Calls:
    """Use the Vamana graph of SVS with keys in half precision; its smaller codes need an Intel processor."""
    parameters = module.VamanaBuildParameters(
        graph_max_degree=2 * peer.variant, window_size=max(peer.setup.construction, 2 * peer.variant)
    )
    metric = module.DistanceType.L2 if l2 else module.DistanceType.MIP

    def build(keys: Floats) -> Any:
        return module.Vamana.build(parameters, keys.astype(np.float16), metric, num_threads=peer.setup.threads)

    def search(index: Any, queries: Floats, effort: int) -> Any:
        for name, number in ("search_window_size", effort), ("num_threads", peer.threads_for(queries)):
            if getattr(index, name) != number:  # setting an attribute takes time
                setattr(index, name, number)
        return index.search(queries, peer.setup.k)[0]

    def write(index: Any, folder: Path) -> None:
        index.save(*(str(folder / name) for name in ("config", "graph", "keys")))

    return _at_once(peer, build, search, write)


def _vsag(peer: _Peer, module: Any, l2: bool) -> _Calls:
    """Use VSAG's graph over codes of 8 bits per number; candidates are rescored by their keys."""
    inner = {
        "base_quantization_type": "sq8", "use_reorder": True, "precise_quantization_type": "fp32",
        "max_degree": 2 * peer.variant, "ef_construction": peer.setup.construction,
        "build_thread_count": peer.setup.threads,
    }  # fmt: skip
    outer = {"dtype": "float32", "metric_type": "l2" if l2 else "ip", "dim": peer.data.dim, "index_param": inner}

    def build(keys: Floats) -> Any:
        index = module.Index("hgraph", json.dumps(outer))
        index.build(vectors=keys.reshape(-1), ids=np.arange(len(keys)), num_elements=len(keys), dim=keys.shape[1])
        return index

    def search(index: Any, queries: Floats, effort: int) -> Any:
        options = {"k": peer.setup.k, "parameters": json.dumps({"hgraph": {"ef_search": effort}})}
        return _each(peer, lambda query: index.knn_search(vector=query, **options)[0], queries)

    return _at_once(peer, build, search, lambda index, folder: index.save(str(folder / "graph")))


def _scann(peer: _Peer, module: Any, l2: bool) -> _Calls:
    """Use ScaNN's tree of leaves with codes of 4 bits for each pair of numbers; candidates are rescored by keys."""
    data, k = peer.data, peer.setup.k
    leaves = max(1, int(peer.variant * data.n**0.5))

    def build(keys: Floats) -> Any:
        builder = module.scann_ops_pybind.builder(keys, k, "squared_l2" if l2 else "dot_product")
        builder.set_n_training_threads(peer.setup.threads)
        coded = builder.tree(leaves, 1, training_sample_size=min(data.n, 250_000)).score_ah(2)
        return coded.reorder(REFINED * k).build()

    def search(index: Any, queries: Floats, effort: int) -> Any:
        options = {
            "final_num_neighbors": k, "pre_reorder_num_neighbors": REFINED * k, "leaves_to_search": min(effort, leaves),
        }  # fmt: skip
        if len(queries) == 1:
            return index.search(queries[0], **options)[0]
        index.set_num_threads(peer.threads)
        return index.search_batched_parallel(queries, **options)[0]

    return _at_once(peer, build, search, lambda index, folder: index.serialize(str(folder)))


class _FaissHNSW(_Peer):
    name, effort_name, make = "faiss-hnsw", "efSearch", _faiss
    modules, packages = ("faiss",), ("faiss-cpu", "faiss-gpu")


class _FaissIVF(_Peer):
    modules, packages = _FaissHNSW.modules, _FaissHNSW.packages
    name, varied, effort_name = "faiss-ivf", "lists/√n", "nprobe"
    variants, efforts, make = (1, 4), (1, 8192), _lists("Flat")


class _FaissIVFPQ(_FaissIVF):
    name, make = "faiss-ivfpq", _lists("PQ{parts}x4fs,RFlat")

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        return "its codes need a width that is a multiple of 4" if data.dim % 4 else ""


class _Hnswlib(_Peer):
    name, make = "hnswlib", _hnswlib
    modules = packages = ("hnswlib",)


class _Usearch(_Peer):
    name, varied, effort_name, make = "usearch", "connectivity", "expansion", _usearch
    modules = packages = ("usearch",)


class _Voyager(_Peer):
    name, make = "voyager", _voyager
    modules = packages = ("voyager",)


class _Annoy(_Peer):
    name, varied, effort_name, make = "annoy", "trees", "search_k", _annoy
    variants, efforts = (50, 100), (100, 1 << 22)
    modules = packages = ("annoy",)


class _SVS(_Peer):
    name, varied, effort_name, make = "svs", "degree/2", "window", _svs
    modules, packages = ("svs",), ("scalable-vs",)
    number_bytes = 2


class _VSAG(_Peer):
    name, varied, make = "vsag", "degree/2", _vsag
    modules = packages = ("pyvsag",)


class _ScaNN(_Peer):
    name, varied, effort_name, make = "scann", "leaves/√n", "leaves", _scann
    variants, efforts = (1, 4), (1, 8192)
    modules = packages = ("scann",)


class _PyNNDescent(Engine):
    """PyNNDescent: a graph built by nearest-neighbour descent; numba compiles its code at the first use."""

    name = "pynndescent"
    modules = packages = ("pynndescent",)
    variants, varied = (15, 30), "n_neighbors"
    effort_name, efforts = "epsilon_percent", (1, 100)

    @classmethod
    def unfit(cls, data: Dataset) -> str:
        lengths = np.linalg.norm(np.asarray(data.keys[:: max(1, data.n // 1000)], np.float64), axis=1)
        fit = data.metric is not Metric.DOT or np.abs(lengths - 1).max() < 1e-3
        return "" if fit else "its dot product needs keys of length 1"

    def build(self, recall: float, progress: Progress) -> dict[str, float]:
        progress(f"{self.label}: compiling", 0, 1)
        keys = np.concatenate([block for _, block in self.data.blocks()])
        self._create(keys[:500]).query(keys[:20], self.setup.k)  # compiles the code, outside the measured time
        progress(f"{self.label}: adding", 0, 1)
        start = time.perf_counter()
        self.index = self._create(keys)
        return {"adding": time.perf_counter() - start}

    def _create(self, keys: Floats) -> Any:
        index = import_module("pynndescent").NNDescent(
            keys, metric="euclidean" if self.data.metric is Metric.L2 else "dot", n_neighbors=self.variant,
            random_state=0, n_jobs=self.setup.threads, parallel_batch_queries=True,
        )  # fmt: skip
        index.prepare()
        return index

    def pin(self, threads: int) -> None:
        numba = import_module("numba")
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def search(self, queries: Floats, effort: int) -> Rows:
        return np.asarray(self.index.query(queries, self.setup.k, epsilon=effort / 100)[0], np.int64)

    def bytes(self) -> int:
        return len(pickle.dumps(self.index, pickle.HIGHEST_PROTOCOL))


def _saved(write: Callable[[Path], object]) -> int:
    """Return the total size in bytes of the files that `write` makes in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="softdb-bench-") as folder:
        write(Path(folder))
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


PEERS: tuple[type[Engine], ...] = (
    _FaissHNSW, _FaissIVF, _FaissIVFPQ, _Hnswlib, _Usearch, _Voyager, _Annoy, _SVS, _VSAG, _ScaNN, _PyNNDescent,
)  # fmt: skip
ENGINES = {engine.name: engine for engine in (*SOFTDB, *PEERS)}
