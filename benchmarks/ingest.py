"""How fast records go in: softdb beside LanceDB, Chroma, Qdrant's local mode and Milvus Lite.

    python benchmarks/ingest.py --data synthetic --n 1000000 --dim 128 --engines softdb,lancedb,chroma,qdrant,milvus
    python benchmarks/ingest.py --data wordnet:FOLDER --repeats 3 --out results.json

Each engine runs in a process of its own, at its own default durability, in its fastest documented bulk form, and does
so in turn with the others, `--repeats` times. The clock runs only within the insert calls and the flush and close that
follow: records are put into the form that an engine takes beforehand, and the time for that is reported beside
(`prepare_s`).

Wrong answers raise: before the clock each process rehearses on a few records; after it another process opens the
database, counts it, and compares 20 random records and their own nearest neighbours with what was stored.

What an engine leaves in memory for the system to write some time later is shown too: `sync_s` is the time that an fsync
of its files takes after the close. `first_answer_s` is the time from opening to the first answer of a search: work put
off until then (loading, indexing) shows here.

FOLDER holds keys.npy (n, d) and records.jsonl.gz, an object with "id" a line; the rest of the object is the payload.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module  # the peers are optional and untyped: each is imported by its own engine only
from pathlib import Path
from typing import Any, ClassVar

import common
import numpy as np
from numpy.typing import NDArray

REHEARSED = 256  # records inserted and checked before the clock starts; their time is thrown away
PROBES = 20  # records compared after it
SAMPLING_S = 0.02  # between two looks at the child's memory


class WrongAnswer(Exception):
    """An engine did not return what was stored, so its speed means nothing."""


@dataclass
class Batch:
    """Records in columns, as a user would hold them."""

    ids: list[Any]
    keys: NDArray[np.float32]  # (n, d)
    payloads: list[dict[str, Any]] | None


@dataclass
class Answers:
    """What an engine returned for a batch of probes."""

    count: int
    keys: NDArray[np.float32]  # (n, d), in the probes' order
    payloads: list[dict[str, Any]] | None
    nearest: list[Any]  # n ids: the best hit of each probe's own key


# --- engines ---------------------------------------------------------------------------------------------------------


class Engine:
    """One database: opened, given records in its own form, closed, asked."""

    packages: ClassVar[tuple[str, ...]]  # what to report the version of; the first is the engine
    synced: ClassVar[str]  # "yes": a returned insert survives a power loss; "no"; "partly"
    durability: ClassVar[str]
    index: ClassVar[str] = "none"
    integer_ids: ClassVar[bool] = False
    normalises: ClassVar[bool] = False  # may return keys at unit length, so only their directions are compared
    least_found: ClassVar[float] = 1.0  # share of probes that must find themselves; below 1 only for approximate search
    largest_batch: int | None = None

    def __init__(self, folder: Path, dim: int) -> None:
        self.folder = folder
        self.dim = dim

    def open(self) -> None:
        """Open the database, made first where it is missing."""
        raise NotImplementedError

    def prepare(self, batch: Batch) -> Any:
        """The batch in the form that `insert` takes."""
        raise NotImplementedError

    def insert(self, native: Any) -> None:
        """Insert one prepared batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Make everything visible to another process and let go of it."""
        raise NotImplementedError

    def answers(self, probes: Batch) -> Answers:
        """Count, fetch by id, and search with k = 1."""
        raise NotImplementedError


class SoftDB(Engine):
    """softdb itself."""

    packages = ("softdb", "apsw", "torch", "numpy")
    synced = "yes"
    durability = "segment fsynced, then one SQLite transaction at synchronous=FULL, before each insert returns"

    def open(self) -> None:
        """Open the directory."""
        self.db = import_module("softdb").open(str(self.folder), dim=self.dim, metric="cosine", dtype="float32")

    def prepare(self, batch: Batch) -> Batch:
        """As it is."""
        return batch

    def insert(self, native: Batch) -> None:
        """One insert."""
        self.db.insert(native.ids, native.keys, payloads=native.payloads)

    def close(self) -> None:
        """Close."""
        self.db.close()

    def answers(self, probes: Batch) -> Answers:
        """Exact search: no index is built here."""
        hits = self.db.search(probes.keys, k=1)
        found = self.db.get(probes.ids)
        payloads = None if probes.payloads is None else list(found.payloads)
        return Answers(len(self.db), np.asarray(found.keys), payloads, [row[0] for row in hits.ids])


class LanceDB(Engine):
    """LanceDB, given Arrow tables."""

    packages = ("lancedb", "pyarrow")
    synced = "no"
    durability = "files and manifest are renamed into place; no fsync call before or after add() returns (strace)"

    def open(self) -> None:
        """The table is made by the first insert, which knows the schema."""
        self.db: Any = import_module("lancedb").connect(str(self.folder))
        self.table: Any = self.db.open_table("records") if (self.folder / "records.lance").exists() else None

    def prepare(self, batch: Batch) -> Any:
        """One Arrow table; the vectors are not copied."""
        pa: Any = import_module("pyarrow")
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(batch.keys.reshape(-1)), self.dim)
        columns = {"id": pa.array(batch.ids), "vector": vectors}
        if batch.payloads is not None:
            columns["payload"] = pa.array(batch.payloads)
        return pa.table(columns)

    def insert(self, native: Any) -> None:
        """One add, which is one fragment and one version."""
        if self.table is None:
            self.table = self.db.create_table("records", data=native)
        else:
            self.table.add(native)

    def close(self) -> None:
        """There is nothing to close: an add is visible when it returns."""
        self.table = self.db = None

    def answers(self, probes: Batch) -> Answers:
        """Exact search: without an index LanceDB scans."""
        quoted = ", ".join(f"'{name}'" for name in probes.ids)
        rows = self.table.search().where(f"id IN ({quoted})").limit(len(probes.ids)).to_arrow().to_pylist()
        rows = _in_order(rows, probes.ids)
        nearest = [self.table.search(key).distance_type("cosine").limit(1).to_list()[0]["id"] for key in probes.keys]
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        return Answers(self.table.count_rows(), _stack(row["vector"] for row in rows), payloads, nearest)


class Chroma(Engine):
    """Chroma's PersistentClient."""

    packages = ("chromadb",)
    synced = "partly"
    durability = "add() fsyncs its SQLite log (journal_mode=delete), not the HNSW files that hold the vectors (strace)"
    index = "HNSW, built while inserting"
    least_found = 0.9

    def open(self) -> None:
        """A cosine collection without an embedding function."""
        chromadb: Any = import_module("chromadb")
        settings = chromadb.config.Settings(anonymized_telemetry=False)
        self.client: Any = chromadb.PersistentClient(str(self.folder), settings=settings)
        self.largest_batch = self.client.get_max_batch_size()
        named: dict[str, Any] = {"name": "records", "configuration": {"hnsw": {"space": "cosine"}}}
        self.records: Any = self.client.get_or_create_collection(**named, embedding_function=None)

    def prepare(self, batch: Batch) -> Batch:
        """As it is."""
        return batch

    def insert(self, native: Batch) -> None:
        """One add, of at most `largest_batch` records."""
        self.records.add(native.ids, embeddings=native.keys, metadatas=native.payloads)

    def close(self) -> None:
        """Close the client, which stops its threads."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Approximate search through HNSW."""
        hits = self.records.query(query_embeddings=probes.keys, n_results=1, include=["distances"])
        found = self.records.get(ids=probes.ids, include=["embeddings", "metadatas"])
        rows = [
            {"id": name, "vector": vector, "payload": payload}
            for name, vector, payload in zip(found["ids"], found["embeddings"], found["metadatas"], strict=True)
        ]
        rows = _in_order(rows, probes.ids)
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        nearest = [row[0] for row in hits["ids"]]
        return Answers(self.records.count(), _stack(row["vector"] for row in rows), payloads, nearest)


class Qdrant(Engine):
    """Qdrant's local mode; ids are integers, as it takes no other names but UUIDs."""

    packages = ("qdrant-client",)
    synced = "yes"
    durability = "one SQLite transaction a point, 4 fdatasync calls each (strace)"
    integer_ids = True
    normalises = True
    largest_batch = 1_000  # each point commits alone, so a small batch costs nothing and lets --cap end a slow run

    def open(self) -> None:
        """A cosine collection; opening reads every point into memory."""
        self.models: Any = import_module("qdrant_client.models")
        self.client: Any = import_module("qdrant_client").QdrantClient(path=str(self.folder))
        if not self.client.collection_exists("records"):
            shape = self.models.VectorParams(size=self.dim, distance=self.models.Distance.COSINE)
            self.client.create_collection("records", vectors_config=shape)

    def prepare(self, batch: Batch) -> Batch:
        """As it is: upload_collection takes columns."""
        return batch

    def insert(self, native: Batch) -> None:
        """One upload; it waits for the write in local mode."""
        columns = {"ids": native.ids, "vectors": native.keys, "payload": native.payloads}
        self.client.upload_collection("records", **columns, wait=True)

    def close(self) -> None:
        """Close, which gives up the lock."""
        self.client.close()

    def answers(self, probes: Batch) -> Answers:
        """Exact search: local mode compares with every point."""
        rows = self.client.retrieve("records", ids=probes.ids, with_vectors=True)
        rows = _in_order([{"id": row.id, "vector": row.vector, "payload": row.payload} for row in rows], probes.ids)
        nearest = [self.client.query_points("records", query=key, limit=1).points[0].id for key in probes.keys]
        payloads = None if probes.payloads is None else [row["payload"] for row in rows]
        return Answers(self.client.count("records").count, _stack(row["vector"] for row in rows), payloads, nearest)


class Milvus(Engine):
    """Milvus Lite through MilvusClient; payload fields go into its dynamic field."""

    packages = ("milvus-lite", "pymilvus")
    synced = "no"
    durability = "log and manifest are fsynced at flush(), the Parquet data files are not; none in insert() (strace)"
    index = "none (FLAT)"

    def open(self) -> None:
        """FLAT, so that no index is built; the client starts a server in a thread."""
        pymilvus: Any = import_module("pymilvus")
        self.path = str(self.folder / "records.db")
        self.client: Any = pymilvus.MilvusClient(self.path)
        if not self.client.has_collection("records"):
            schema = self.client.create_schema(auto_id=False, enable_dynamic_field=True)
            schema.add_field("id", pymilvus.DataType.VARCHAR, is_primary=True, max_length=64)
            schema.add_field("vector", pymilvus.DataType.FLOAT_VECTOR, dim=self.dim)
            index = self.client.prepare_index_params()
            index.add_index("vector", index_type="FLAT", metric_type="COSINE")
            self.client.create_collection("records", schema=schema, index_params=index)

    def prepare(self, batch: Batch) -> list[dict[str, Any]]:
        """One dict a record, the only form that insert takes."""
        payloads = batch.payloads or [{}] * len(batch.ids)
        records = zip(batch.ids, batch.keys, payloads, strict=True)
        return [{"id": name, "vector": key, **payload} for name, key, payload in records]

    def insert(self, native: list[dict[str, Any]]) -> None:
        """One insert call."""
        self.client.insert("records", native)

    def close(self) -> None:
        """Flush, then stop the server: it holds the lock on the folder."""
        self.client.flush("records")
        self.client.close()
        import_module("milvus_lite.server_manager").server_manager_instance.release_server(self.path)

    def answers(self, probes: Batch) -> Answers:
        """Exact search."""
        self.client.load_collection("records")
        hits = self.client.search("records", probes.keys.tolist(), limit=1, output_fields=["id"])
        rows = _in_order(self.client.get("records", probes.ids, output_fields=["*"]), probes.ids)
        count = self.client.query("records", filter="", output_fields=["count(*)"])[0]["count(*)"]
        payloads = [{name: value for name, value in row.items() if name not in ("id", "vector")} for row in rows]
        nearest = [row[0]["id"] for row in hits]
        stored = _stack(row["vector"] for row in rows)
        return Answers(count, stored, None if probes.payloads is None else payloads, nearest)


ENGINES: dict[str, type[Engine]] = {
    "softdb": SoftDB,
    "lancedb": LanceDB,
    "chroma": Chroma,
    "qdrant": Qdrant,
    "milvus": Milvus,
}


def _in_order(rows: list[dict[str, Any]], ids: list[Any]) -> list[dict[str, Any]]:
    """Rows in the order of the ids asked for."""
    by_id = {row["id"]: row for row in rows}
    missing = [name for name in ids if name not in by_id]
    if missing:
        raise WrongAnswer(f"fetch: {len(missing)} of {len(ids)} ids are not there, the first is {missing[0]!r}")
    return [by_id[name] for name in ids]


def _stack(vectors: Iterator[Any]) -> NDArray[np.float32]:
    return np.asarray(list(vectors), dtype=np.float32)


# --- the records -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What a child is told: which engine, which records, where."""

    engine: str
    folder: str
    keys: str  # the keys as float32, written once by the parent and mapped by every child
    records: str | None  # records.jsonl.gz
    payload: bool
    batch: int
    cap: float | None
    inserted: int = 0  # what the check must count

    def engine_class(self) -> type[Engine]:
        """The class of this engine."""
        return ENGINES[self.engine]


@dataclass
class Records:
    """Every record of the workload. The keys stay mapped: they are not the engine's memory."""

    ids: list[Any]
    keys: NDArray[np.float32]  # (n, d)
    payloads: list[dict[str, Any]] | None

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """The records in these rows, in memory of their own."""
        payloads = None if self.payloads is None else [self.payloads[row] for row in rows]
        return Batch([self.ids[row] for row in rows], np.array(self.keys[rows]), payloads)


def load(plan: Plan) -> Records:
    """Map the keys and make the ids and payloads."""
    keys = np.load(plan.keys, mmap_mode="r")
    n = len(keys)
    for start in range(0, n, plan.batch):
        keys[start : start + plan.batch].sum()  # into the page cache, so that no insert waits for a read
    if plan.records is not None:
        ids, payloads = _read_records(Path(plan.records), n)
    else:
        ids, payloads = [f"r{row:07d}" for row in range(n)], [{"n": row} for row in range(n)]
    named: list[Any] = list(range(n)) if plan.engine_class().integer_ids else ids
    return Records(named, keys, payloads if plan.payload else None)


def _read_records(path: Path, n: int) -> tuple[list[str], list[dict[str, Any]]]:
    ids, payloads = [], []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for _, line in zip(range(n), lines, strict=False):
            record = json.loads(line)
            ids.append(record.pop("id"))
            payloads.append(record)
    if len(ids) != n:
        raise ValueError(f"{path.name} has {len(ids)} records but there are {n} keys; each key needs its line")
    return ids, payloads


def write_keys(args: argparse.Namespace, path: Path) -> None:
    """The workload's keys as float32, so that no child spends memory or time on a conversion."""
    if args.data == "synthetic":
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(args.n, args.dim))
        random = np.random.default_rng(0)
        for start in range(0, args.n, 100_000):
            block = out[start : start + 100_000]
            block[:] = random.standard_normal(block.shape, dtype=np.float32)
        out.flush()
    else:
        stored = np.load(Path(args.data.partition(":")[2]) / "keys.npy", mmap_mode="r")
        np.save(path, stored[: args.n].astype(np.float32))


# --- the children: one inserts, another checks -----------------------------------------------------------------------


def ingest(plan: Plan) -> dict[str, Any]:
    """Rehearse, then insert everything (or until the cap) with the clock on."""
    records = load(plan)
    rehearse(plan, records)
    gc.collect()
    gc.freeze()  # millions of ids and payloads are ours: the engine's garbage collections need not walk them
    engine = plan.engine_class()(Path(plan.folder), records.keys.shape[1])
    engine.open()
    before = common.anonymous_bytes(os.getpid())
    n, batch = len(records.keys), min(plan.batch, engine.largest_batch or plan.batch)
    seconds: list[float] = []
    prepare_s, inserted = 0.0, 0
    while inserted < n and (plan.cap is None or sum(seconds) < plan.cap):
        start = time.perf_counter()
        native = engine.prepare(records.take(np.arange(inserted, min(inserted + batch, n))))
        prepared = time.perf_counter()
        engine.insert(native)
        seconds.append(time.perf_counter() - prepared)
        prepare_s += prepared - start
        inserted = min(inserted + batch, n)
    start = time.perf_counter()
    engine.close()
    close_s = time.perf_counter() - start
    return {
        "rows": inserted,
        "capped": inserted < n,
        "batch": batch,
        "insert_s": sum(seconds),
        "close_s": close_s,
        "prepare_s": prepare_s,
        "rows_per_s": inserted / (sum(seconds) + close_s),
        "rows_per_s_with_prepare": inserted / (sum(seconds) + close_s + prepare_s),
        "first_batches_s": seconds[:5],
        "last_batches_s": seconds[-5:],  # an engine that slows down as it grows shows here
        "anonymous_before": before,
    }


def rehearse(plan: Plan, records: Records) -> None:
    """Insert a few records into a database that is thrown away, reopen it and check its answers."""
    n = min(REHEARSED, len(records.keys))
    with tempfile.TemporaryDirectory(dir=Path(plan.folder).parent) as folder:
        engine = plan.engine_class()(Path(folder), records.keys.shape[1])
        engine.open()
        engine.insert(engine.prepare(records.take(np.arange(n))))
        engine.close()
        engine.open()
        verify(engine, records, n)
        engine.close()


def check(plan: Plan) -> dict[str, Any]:
    """Open what another process wrote and compare its answers."""
    records = load(plan)
    engine = plan.engine_class()(Path(plan.folder), records.keys.shape[1])
    start = time.perf_counter()
    engine.open()
    engine.answers(records.take(np.arange(1)))
    first_answer_s = time.perf_counter() - start
    found = verify(engine, records, plan.inserted)
    engine.close()
    return {"first_answer_s": first_answer_s, "found_themselves": found}


def verify(engine: Engine, records: Records, inserted: int) -> float:
    """The share of probes that found themselves; anything that differs from what was stored raises."""
    rows = np.random.default_rng(1).choice(inserted, size=min(PROBES, inserted), replace=False)
    probes = records.take(rows)
    answers = engine.answers(probes)
    name = type(engine).__name__
    if answers.count != inserted:
        raise WrongAnswer(f"{name}: counts {answers.count} records where {inserted} were inserted")
    form = _unit if engine.normalises else np.asarray
    expected, got = form(probes.keys), form(answers.keys)
    if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-5, atol=1e-6):
        raise WrongAnswer(f"{name}: fetched keys differ from those stored")
    if answers.payloads != probes.payloads:
        raise WrongAnswer(f"{name}: fetched payloads differ from those stored")
    row_of = {identifier: row for row, identifier in enumerate(records.ids)}
    best = _unit(np.array(records.keys[[row_of[identifier] for identifier in answers.nearest]]))
    # by similarity, not by name: a duplicate of the record is as right an answer as the record
    found = float(np.mean((best * _unit(probes.keys)).sum(1) > 1 - 1e-5))
    if found < engine.least_found:
        raise WrongAnswer(f"{name}: {found:.0%} of records are their own nearest, expected {engine.least_found:.0%}")
    return found


def _unit(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12), dtype=np.float32)


# --- the parent ------------------------------------------------------------------------------------------------------


def child(role: str, plan: Plan) -> dict[str, Any]:
    """Run one role in a process of its own, watching its memory from outside."""
    with tempfile.TemporaryDirectory(dir=Path(plan.folder).parent) as folder:
        log, answer = Path(folder) / "log", Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--child", role, json.dumps(asdict(plan)), str(answer)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            peak = 0
            while process.poll() is None:
                peak = max(peak, common.anonymous_bytes(process.pid))
                time.sleep(SAMPLING_S)
        if process.returncode or not answer.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"{role} ended with {process.returncode}: {lines[-1] if lines else 'no output'}")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result | {"peak_anonymous": peak}


def measure(plan: Plan) -> dict[str, Any]:
    """One engine once: insert, sync, size, check; the database is removed."""
    folder = Path(plan.folder)
    folder.mkdir()
    try:
        os.sync()  # pages left behind by the run before must not be written during this one
        result = child("ingest", plan)
        start = time.perf_counter()
        for path in common.files_in(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        result["sync_s"] = time.perf_counter() - start
        result["rows_per_s_synced"] = result["rows"] / (result["insert_s"] + result["close_s"] + result["sync_s"])
        result["disk"] = common.bytes_on_disk(folder)
        plan.inserted = result["rows"]
        checked = child("check", plan)
        return result | {name: checked[name] for name in ("first_answer_s", "found_themselves")}
    finally:
        shutil.rmtree(folder)


def run_all(args: argparse.Namespace, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """Every engine `repeats` times, in turn; a failure is a result too."""
    keys = scratch / "keys.npy"
    write_keys(args, keys)
    records = None if args.data == "synthetic" else str(Path(args.data.partition(":")[2]) / "records.jsonl.gz")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.engines}
    for repeat in range(args.repeats):
        turn = repeat % len(args.engines)  # no engine always follows the same other
        for name in args.engines[turn:] + args.engines[:turn]:
            payload = args.payload or records is not None
            plan = Plan(name, str(scratch / "database"), str(keys), records, payload, args.batch, args.cap)
            print(f"{repeat + 1}/{args.repeats} {name} ...", file=sys.stderr, end=" ", flush=True)
            try:
                result = measure(plan)
                print(f"{result['rows_per_s']:,.0f} rows/s", file=sys.stderr)
            except RuntimeError as error:
                result = {"error": str(error)}
                print(error, file=sys.stderr)
            runs[name].append(result)
    return runs


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and spreads of the runs that succeeded, and softdb beside the best peers."""
    engines = {}
    for name, results in runs.items():
        good = [result for result in results if "error" not in result]
        kind = ENGINES[name]
        facts: dict[str, Any] = {"synced": kind.synced, "durability": kind.durability, "index": kind.index}
        facts["versions"] = common.versions(kind.packages)
        facts["errors"] = [result["error"] for result in results if "error" in result]
        if good:
            measured = ("rows_per_s", "rows_per_s_with_prepare", "rows_per_s_synced", "sync_s", "first_answer_s")
            facts |= {key: common.spread([result[key] for result in good]) for key in measured}
            facts["rows"] = min(result["rows"] for result in good)
            facts["capped"] = any(result["capped"] for result in good)
            facts["peak_anonymous"] = max(result["peak_anonymous"] for result in good)
            facts["anonymous_before"] = min(result["anonymous_before"] for result in good)
            facts["disk"] = good[-1]["disk"]
            facts["found_themselves"] = min(result["found_themselves"] for result in good)
        engines[name] = facts | {"runs": results}
    return {"engines": engines, "ratios": ratios(engines)}


def ratios(engines: dict[str, Any]) -> dict[str, Any]:
    """softdb's median rate over that of the best peer: of all, of those on disk when they return, with preparation."""
    ours = engines.get("softdb", {})
    if "rows_per_s" not in ours:
        return {}
    peers = {name: facts for name, facts in engines.items() if name != "softdb" and "rows_per_s" in facts}
    durable = {name: facts for name, facts in peers.items() if facts["synced"] == "yes"}
    found = {}
    for label, among, key in (
        ("best peer", peers, "rows_per_s"),
        ("best peer, an fsync of its files included", peers, "rows_per_s_synced"),
        ("best peer, preparation included", peers, "rows_per_s_with_prepare"),
        ("best peer that syncs before it returns", durable, "rows_per_s"),
    ):
        if among:
            best = max(among, key=lambda name: float(among[name][key]["median"]))
            ratio = ours[key]["median"] / among[best][key]["median"]
            found[label] = {"peer": best, "softdb_over_peer": round(ratio, 3)}
    return found


def table(result: dict[str, Any]) -> str:
    """The result for a person to read."""
    disk, machine, workload = result["disk"], result["machine"], result["workload"]
    lines = [
        f"{workload['data']}: {workload['n']:,} records x {workload['dim']}, "
        f"{'with' if workload['payload'] else 'without'} payload, batches of {workload['batch']:,}",
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, load {machine['load_average'][0]}",
        f"disk ({disk['file_system']}): {disk['each_fsync_mb_s']} MB/s with an fsync every "
        f"{disk['block_bytes'] / common.MIB:g} MiB, {disk['one_fsync_mb_s']} MB/s with one at the end",
        "",
        f"{'engine':8} {'version':8} {'rows':>9} {'rows/s median (min-max)':>28} {'+prepare':>9} {'+fsync':>9} "
        f"{'peak MiB':>9} {'before MiB':>10} {'disk MiB':>9} {'1st answer':>10}  synced / index",
    ]
    lines += [_line(name, facts) for name, facts in result["engines"].items()]
    lines += [f"softdb / {label} ({r['peer']}): {r['softdb_over_peer']}" for label, r in result["ratios"].items()]
    return "\n".join(lines)


def _line(name: str, facts: dict[str, Any]) -> str:
    version = next(iter(facts["versions"].values())).replace("not installed", "source")
    if "rows_per_s" not in facts:
        return f"{name:8} {version:8} failed: {facts['errors'][0]}"
    rate = facts["rows_per_s"]
    return (
        f"{name:8} {version:8} {facts['rows']:>9,} {rate['median']:>11,.0f} "
        + f"({rate['min']:,.0f}-{rate['max']:,.0f})".rjust(16)
        + f" {facts['rows_per_s_with_prepare']['median']:>9,.0f} {facts['rows_per_s_synced']['median']:>9,.0f}"
        + f" {facts['peak_anonymous'] / common.MIB:>9,.0f} {facts['anonymous_before'] / common.MIB:>10,.0f}"
        + f" {facts['disk']['allocated'] / common.MIB:>9,.0f} {facts['first_answer_s']['median']:>9.2f}s"
        + f"  {facts['synced']} / {facts['index']}"
        + ("  [capped]" if facts["capped"] else "")
        + (f"  [{len(facts['errors'])} failed]" if facts["errors"] else "")
    )


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Everything: disk, engines, summary."""
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=args.scratch) as folder:
        scratch = Path(folder)
        if common.file_system(scratch) in common.IN_MEMORY:
            raise SystemExit("ingest: the scratch folder is in memory, where an fsync is free; give --scratch DIR")
        disk = common.disk_write_rate(scratch, size=args.disk_mib * common.MIB)
        started = {"machine": common.machine(), "disk": disk, "command": common.command(), "commit": common.commit()}
        runs = run_all(args, scratch)
        n, dim = np.load(scratch / "keys.npy", mmap_mode="r").shape
    payload = args.payload or args.data != "synthetic"
    data = args.data.partition(":")[0]
    workload = {"data": data, "n": n, "dim": dim, "payload": payload, "batch": args.batch, "metric": "cosine"}
    settings = {"repeats": args.repeats, "cap_s": args.cap}
    return {"benchmark": "ingest", "workload": workload, "settings": settings} | started | summarise(runs)


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic", help="synthetic, or wordnet:FOLDER")
    parser.add_argument("--n", type=int, help="records (default: 1,000,000 synthetic, all of a FOLDER)")
    parser.add_argument("--dim", type=int, default=128, help="width of synthetic keys")
    parser.add_argument("--payload", action="store_true", help='give synthetic records the payload {"n": row}')
    parser.add_argument("--batch", type=int, default=10_000, help="records an insert, where the engine allows it")
    parser.add_argument("--engines", default=",".join(ENGINES), help="comma-separated, of %(default)s")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cap", type=float, help="stop an engine's inserts after this many seconds of its clock")
    parser.add_argument("--disk-mib", type=int, default=1024, help="how much to write to measure the disk")
    parser.add_argument("--scratch", type=Path, help="where to put the databases: on the disk to be measured")
    parser.add_argument("--out", type=Path, help="write everything here as JSON")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    unknown = set(args.engines) - set(ENGINES)
    if unknown:
        parser.error(f"--engines: {sorted(unknown)} unknown; choose from {list(ENGINES)}")
    if args.data != "synthetic" and not args.data.startswith("wordnet:"):
        parser.error(f"--data: got {args.data!r}, expected synthetic or wordnet:FOLDER")
    if args.data == "synthetic" and args.n is None:
        args.n = 1_000_000
    return args


def main() -> None:
    """Run as parent, or as the child that the parent started."""
    if sys.argv[1:2] == ["--child"]:
        role, plan, answer = sys.argv[2:]
        result = {"ingest": ingest, "check": check}[role](Plan(**json.loads(plan)))
        Path(answer).write_text(json.dumps(result), encoding="utf-8")
        return
    args = arguments()
    result = benchmark(args)
    if args.out is not None:
        common.write_json(args.out, result)
    print(table(result))
    if any(facts["errors"] for facts in result["engines"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
