"""Rate of inserts: softdb beside LanceDB, Chroma, Qdrant's local mode and Milvus Lite.

    python benchmarks/ingest.py --data synthetic --n 1000000 --dim 128 --engines softdb,lancedb,chroma,qdrant,milvus
    python benchmarks/ingest.py --data wordnet:FOLDER --repeats 3 --out results.json

Each engine runs in a process of its own, at its default durability, with its fastest documented bulk insert. The
engines run in turn, `--repeats` times. The clock runs only during the insert calls and the flush and close that follow.
Records are converted to the form that an engine takes beforehand; `prepare_s` is the time of the conversion.

Wrong answers raise: before the clock starts, each process inserts and checks a few records; afterwards another process
opens the database, counts the records, and compares 20 random ones and their nearest neighbours with what was stored.

`sync_s` is the time of an fsync of the files after the close: the work that an engine leaves to the system.
`first_answer_s` is the time from opening to the first answer of a search, which includes deferred loading and indexing.

FOLDER holds keys.npy (n, d) and records.jsonl.gz, with an object in each line: "id", and other fields as the payload.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
from ingest_report import summarise, table
from numpy.typing import NDArray
from peers import ENGINES, Batch, Engine, WrongAnswer

REHEARSED = 256  # records inserted and checked before the clock starts
PROBES = 20  # records compared after the clock stops
SAMPLING_S = 0.02  # seconds between two readings of the child's memory


# --- the records -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Task of a child process: the engine, the records and the folder."""

    engine: str
    folder: str
    keys: str  # file of the keys in float32, written once by the parent and mapped by every child
    records: str | None  # records.jsonl.gz
    payload: bool
    batch: int
    cap: float | None
    inserted: int = 0  # number of records that the check must count

    def engine_class(self) -> type[Engine]:
        """Return the class of this engine."""
        return ENGINES[self.engine]


@dataclass
class Records:
    """Every record of the workload. The keys stay mapped, so that they do not count as the engine's memory."""

    ids: list[Any]
    keys: NDArray[np.float32]  # (n, d)
    payloads: list[dict[str, Any]] | None

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """Copy the records of these rows."""
        payloads = None if self.payloads is None else [self.payloads[row] for row in rows]
        return Batch([self.ids[row] for row in rows], np.array(self.keys[rows]), payloads)


def load(plan: Plan) -> Records:
    """Map the keys and make the ids and payloads."""
    keys = np.load(plan.keys, mmap_mode="r")
    n = len(keys)
    for start in range(0, n, plan.batch):
        keys[start : start + plan.batch].sum()  # fills the page cache, so that no insert waits for a read
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
        raise ValueError(f"{path.name} has {len(ids)} records; expected {n}, one line for each key")
    return ids, payloads


def write_keys(args: argparse.Namespace, path: Path) -> None:
    """Write the workload's keys as float32, so that no child spends memory or time on a conversion."""
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
    """Rehearse, then insert all records, or as many as the cap allows, with the clock on."""
    records = load(plan)
    rehearse(plan, records)
    gc.collect()
    gc.freeze()  # the engine's garbage collections need not walk the millions of ids and payloads
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
        "last_batches_s": seconds[-5:],  # larger than the first ones if an engine slows down as it grows
        "anonymous_before": before,
    }


def rehearse(plan: Plan, records: Records) -> None:
    """Insert a few records into a temporary database, reopen it and check its answers."""
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
    """Open the database that another process wrote, and check its answers."""
    records = load(plan)
    engine = plan.engine_class()(Path(plan.folder), records.keys.shape[1])
    start = time.perf_counter()
    engine.open()
    engine.answers(records.take(np.arange(1)))
    first_answer_s = time.perf_counter() - start
    share = verify(engine, records, plan.inserted)
    engine.close()
    return {"first_answer_s": first_answer_s, "found_themselves": share}


def verify(engine: Engine, records: Records, inserted: int) -> float:
    """Return the share of probes that found themselves; raise WrongAnswer if an answer differs from what was stored."""
    rows = np.random.default_rng(1).choice(inserted, size=min(PROBES, inserted), replace=False)
    probes = records.take(rows)
    answers = engine.answers(probes)
    name = type(engine).__name__
    if answers.count != inserted:
        raise WrongAnswer(f"{name}: counts {answers.count} records; expected {inserted}")
    form = _unit if engine.normalises else np.asarray
    expected, fetched = form(probes.keys), form(answers.keys)
    if fetched.shape != expected.shape or not np.allclose(fetched, expected, rtol=1e-5, atol=1e-6):
        raise WrongAnswer(f"{name}: fetched keys differ from those stored")
    if answers.payloads != probes.payloads:
        raise WrongAnswer(f"{name}: fetched payloads differ from those stored")
    row_of = {identifier: row for row, identifier in enumerate(records.ids)}
    best = _unit(np.array(records.keys[[row_of[identifier] for identifier in answers.nearest]]))
    # by similarity, not by id: a duplicate of the record is a right answer, too
    share = float(np.mean((best * _unit(probes.keys)).sum(1) > 1 - 1e-5))
    if share < engine.least_found:
        raise WrongAnswer(f"{name}: {share:.0%} of records are their own nearest; expected {engine.least_found:.0%}")
    return share


def _unit(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12), dtype=np.float32)


# --- the parent ------------------------------------------------------------------------------------------------------


def child(role: str, plan: Plan) -> dict[str, Any]:
    """Run a role in a process of its own, and record the peak of its memory."""
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
            raise RuntimeError(f"{role} exited with {process.returncode}: {lines[-1] if lines else 'no output'}")
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result | {"peak_anonymous": peak}


def measure(plan: Plan) -> dict[str, Any]:
    """Measure one engine once: insert, sync, size and check; then remove the database."""
    folder = Path(plan.folder)
    folder.mkdir()
    try:
        os.sync()  # dirty pages of the run before must not be written during this one
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
    """Measure every engine `repeats` times, in turn; a failure is a result, too."""
    keys = scratch / "keys.npy"
    write_keys(args, keys)
    records = None if args.data == "synthetic" else str(Path(args.data.partition(":")[2]) / "records.jsonl.gz")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.engines}
    for repeat in range(args.repeats):
        turn = repeat % len(args.engines)  # in another order each time
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


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the disk and the engines, and return the result."""
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=args.scratch) as folder:
        scratch = Path(folder)
        if common.file_system(scratch) in common.IN_MEMORY:
            raise SystemExit(f"ingest: {scratch} is in memory, where an fsync costs nothing; give --scratch on a disk")
        disk = common.disk_write_rate(scratch, size=args.disk_mib * common.MIB)
        started = common.provenance(["softdb", "torch", "numpy"]) | {"disk": disk}
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
    parser.add_argument("--disk-mib", type=int, default=1024, help="MiB to write to measure the disk")
    parser.add_argument("--scratch", type=Path, help="folder for the databases, on the disk to measure")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    unknown = set(args.engines) - set(ENGINES)
    if unknown:
        parser.error(f"--engines: unknown {', '.join(sorted(unknown))}; choose from {', '.join(ENGINES)}")
    if args.data != "synthetic" and not args.data.startswith("wordnet:"):
        parser.error(f"--data: got {args.data!r}, expected synthetic or wordnet:FOLDER")
    if args.data == "synthetic" and args.n is None:
        args.n = 1_000_000
    return args


def main() -> None:
    """Run the benchmark, or the role of a child process."""
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
