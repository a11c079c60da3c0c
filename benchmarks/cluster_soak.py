"""Readers of a cluster under writes, kills, stops, joins, leaves, restored versions, rebuilds and a full disk.

    python benchmarks/cluster_soak.py --minutes 60 --out benchmarks/results/cluster-soak.json
    python benchmarks/cluster_soak.py --commits                       # 10,000 reads beside another driver's commits
    python benchmarks/cluster_soak.py --rebuild                       # search, quiet and while shards are rebuilt

The soak starts Ray's local cluster of several nodes (a head without CPUs). A writer process commits some times a
second, prints what was acknowledged, compacts the table, and removes old versions. This process reads: search, attend
with a gradient, get and filters. Every answer is compared with numpy over the table at the handle's version. Meanwhile
something happens every few seconds (`Events`). A read may fail with a typed error while its host is dead and it has one
replica; a wrong answer or a lost record may not be. The disk is filled if --cache is a file system of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import ray
import torch
from common import provenance, write_json
from ray.cluster_utils import Cluster as Nodes

from softdb import cluster
from softdb.errors import SoftDBError

N, DIM, SHARDS, TIMEOUT = 20_000, 32, 4, 60.0
WRITER = "writer"


def keys(seed: int, count: int) -> Any:
    """Return random keys (count, DIM)."""
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def write(url: str, rate: float, first: int, keep: float) -> None:
    """Commit `rate` times a second, for ever; print the number of each acknowledged commit.

    Removes versions that are older than `keep` seconds now and then: commits get slower with the number of versions.
    """
    db = cluster.open(url, on="ray", timeout=TIMEOUT)
    for i in range(first, 1 << 40):
        started = time.monotonic()
        try:
            if i % 3 == 2:
                db.delete([f"r{(7 * i + j) % N}" for j in range(5)])
            names = [f"r{(11 * i + j) % N}" for j in range(8)]
            db.upsert([*names, f"w{i}"], keys(i, 9), payloads=[{"n": i % 7}] * 9)
            print(i, flush=True)
            if i % 100 == 99:
                db.compact()
                lance.dataset(url).cleanup_old_versions(timedelta(seconds=keep))
        except SoftDBError as error:
            print(f"# {type(error).__name__}: {error}", flush=True)
        time.sleep(max(0.0, 1 / rate - (time.monotonic() - started)))


class Writer:
    """A writer process and what it has acknowledged."""

    def __init__(self, url: str, address: str, rate: float, keep: float) -> None:
        words = {"role": WRITER, "url": url, "rate": rate, "keep": keep}
        self.command = [sys.executable, __file__, *(f"--{name}={word}" for name, word in words.items()), "--first"]
        self.env, self.log = os.environ | {"RAY_ADDRESS": address}, Path(f"{url}.log")
        self.log.touch()
        self.start()

    def start(self) -> None:
        """Start the process, which goes on behind the last acknowledged commit."""
        first = str(max(self.acknowledged, default=-1) + 2)
        with self.log.open("a") as log:
            self.process = subprocess.Popen([*self.command, first], env=self.env, stdout=log, stderr=subprocess.DEVNULL)

    @property
    def acknowledged(self) -> list[int]:
        """Numbers of the acknowledged commits."""
        return [int(line) for line in self.log.read_text().split("\n") if line.isdigit()]


class Reader:
    """Asks questions, and compares each answer with the table at the handle's version."""

    def __init__(self, db: Any, seed: int) -> None:
        self.db, self.random, self.errors = db, np.random.default_rng(seed), collections.Counter[str]()
        self.reads = self.wrong = self.moves = 0
        self.seconds = list[float]()
        self.look()

    def look(self) -> None:
        """Read the table at the handle's version."""
        self.version = self.db.version
        rows = lance.dataset(self.db.url, version=self.version).to_table()
        self.ids = rows["id"].to_pylist()
        self.keys = np.stack(rows["key"].to_numpy(zero_copy_only=False))
        self.payloads = [json.loads(text) for text in rows["payload"].to_pylist()]
        self.numbers = np.array([payload["n"] for payload in self.payloads])

    def move(self) -> None:
        """Refresh the handle."""
        try:
            self.db.refresh()
            self.moves += 1
        except SoftDBError as error:
            self.errors[f"refresh: {type(error).__name__}"] += 1
        if self.db.version != self.version:
            self.look()

    def read(self) -> None:
        """Ask one question."""
        query, started = self.random.normal(size=(1, DIM)).astype(np.float32), time.perf_counter()
        question = (self.search, self.attend, self.get, self.filter)[self.reads % 4]
        self.reads += 1
        try:
            right = question(query)
        except SoftDBError as error:
            self.errors[type(error).__name__] += 1
            print(f"FAILED: {question.__name__} at version {self.version}: {error}", flush=True)
            return
        self.seconds.append(time.perf_counter() - started)
        if not right:
            self.wrong += 1
            print(f"WRONG: {question.__name__} at version {self.version}", flush=True)

    def scores(self, query: Any) -> Any:
        """Return q·k of all keys, without the threads of a BLAS: they would spin on the cluster's cores for a while."""
        return np.einsum("nd,d->n", self.keys, query[0])

    def search(self, query: Any) -> bool:
        """Compare the five nearest and their payloads."""
        hits = self.db.search(query, k=5)
        best = np.argsort(-self.scores(query), kind="stable")[:5]
        same = hits.payloads[0] == [self.payloads[i] for i in best]
        return bool(same and hits.ids[0] == [self.ids[i] for i in best])

    def attend(self, query: Any) -> bool:
        """Compare a soft answer and its gradient."""
        leaf = torch.from_numpy(query).requires_grad_()
        output = self.db.attend(leaf).output
        output.sum().backward()
        weights = np.exp(self.scores(query))
        weights /= weights.sum()
        value = np.einsum("n,nd->d", weights, self.keys)
        gradient = np.einsum("n,nd->d", weights * (self.keys - value).sum(1), self.keys)
        assert leaf.grad is not None
        near = np.allclose(output.detach()[0], value, atol=1e-4)
        return near and np.allclose(leaf.grad[0], gradient, atol=1e-3)

    def get(self, _: Any) -> bool:
        """Compare records by id."""
        some = self.random.integers(0, len(self.ids), 3)
        return bool(self.db.get([self.ids[i] for i in some]).payloads == [self.payloads[i] for i in some])

    def filter(self, query: Any) -> bool:
        """Compare a filtered search."""
        hits = self.db.search(query, k=3, where={"n": 3})
        own = np.flatnonzero(self.numbers == 3)
        best = own[np.argsort(-self.scores(query)[own], kind="stable")[:3]]
        return bool(hits.ids[0] == [self.ids[i] for i in best])

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        p50, p99 = (round(1e3 * float(np.quantile(self.seconds or [0], share)), 1) for share in (0.5, 0.99))
        failed = sum(self.errors.values())
        return {
            "reads": self.reads, "failed": failed, "errors": dict(self.errors), "wrong": self.wrong,
            "moves": self.moves, "p50_ms": p50, "p99_ms": p99,
        }  # fmt: skip


def made(folder: Path, replicas: int, cache: Path) -> Any:
    """Make the table, with N records."""
    url = folder / "t.lance"
    db = cluster.create(url, dim=DIM, shards=SHARDS, replicas=replicas, on="ray", timeout=TIMEOUT, cache=cache)
    db.insert([f"r{i}" for i in range(N)], keys(0, N), payloads=[{"n": i % 7} for i in range(N)])
    return db


def commits(args: argparse.Namespace) -> dict[str, Any]:
    """Read while another driver commits."""
    with tempfile.TemporaryDirectory() as name:
        context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        db = made(Path(name), 1, Path(name, "cache"))
        writer = Writer(db.url, context.address_info["address"], args.rate, args.keep)
        while not writer.acknowledged:
            time.sleep(0.1)
        reader, started, first = Reader(db, args.seed), time.monotonic(), db.table.newest()
        for i in range(args.reads):
            time.sleep(max(0.0, started + i / args.pace - time.monotonic()))
            reader.read()
            if i % 250 == 249:
                reader.move()
        seconds = time.monotonic() - started
        rate = (db.table.newest() - first) / seconds
        writer.process.kill()
        cluster.stop(db.url)
        ray.shutdown()
    return reader.report() | {
        "commits_per_second": round(rate, 1),
        "asked_for": args.rate,
        "pace": args.pace,
        "versions_kept_s": args.keep,
        "seconds": round(seconds),
    }


class Events:
    """What happens to the cluster."""

    def __init__(self, nodes: Any, db: Any, writer: Writer, cache: Path, seed: int) -> None:
        self.nodes, self.db, self.writer, self.cache, self.chance = nodes, db, writer, cache, random.Random(seed)
        self.own, self.counts = list[Any](), collections.Counter[str]()

    def happen(self) -> None:
        """Let something happen."""
        events = [self.kill_actor, self.stop_actor, self.kill_writer, self.join, self.leave, self.restore, self.retype]
        own_disk = os.stat(self.cache).st_dev != os.stat(self.cache.parent).st_dev
        event = self.chance.choice([*events, *[self.fill_disk] * own_disk])
        with contextlib.suppress(ray.exceptions.RayError, ProcessLookupError):
            if event():
                self.counts[event.__name__] += 1

    def pid(self) -> int:
        """Return the process of some host."""
        actor = self.chance.choice(self.chance.choice(self.db.caller.transport.layout.hosts))
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10))

    def kill_actor(self) -> bool:
        """Kill a host."""
        os.kill(self.pid(), signal.SIGKILL)
        return True

    def stop_actor(self) -> bool:
        """Let a host stand still for some seconds."""
        pid = self.pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.5, 3))
        os.kill(pid, signal.SIGCONT)
        return True

    def kill_writer(self) -> bool:
        """Kill the writer, and start another."""
        self.writer.process.kill()
        self.writer.process.wait()
        self.writer.start()
        return True

    def join(self) -> bool:
        """Let a node join."""
        if len(self.own) < 2:
            self.own.append(self.nodes.add_node(num_cpus=1))
            return True
        return False

    def leave(self) -> bool:
        """Let a node leave."""
        if self.own:
            self.nodes.remove_node(self.own.pop(self.chance.randrange(len(self.own))))
            return True
        return False

    def restore(self) -> bool:
        """Make the newest version anew while the writer stands still, as Lance's `restore` drops commits beside it."""
        self.writer.process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        lance.dataset(self.db.url).restore()
        self.writer.process.send_signal(signal.SIGCONT)
        return True

    def retype(self) -> bool:
        """Change the type of a column: shards are rebuilt."""
        for _ in range(10 if self.chance.random() < 0.3 else 0):
            dataset = lance.dataset(self.db.url)
            is_large = pa.types.is_large_string(dataset.schema.field("text").type)
            with contextlib.suppress(OSError):  # the writer was faster
                dataset.alter_columns({"path": "text", "data_type": pa.string() if is_large else pa.large_string()})
                return True
        return False

    def fill_disk(self) -> bool:
        """Fill the disk of the shards' directories for some seconds."""
        path = self.cache / "filler"
        with contextlib.suppress(OSError), path.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        time.sleep(5)
        path.unlink()
        return True


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run the cluster for some minutes."""
    with tempfile.TemporaryDirectory() as name:
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        ray.init(address=nodes.address, log_to_driver=False)
        cache = args.cache or Path(name, "cache")
        db = made(Path(name), 2, cache)
        writer = Writer(db.url, nodes.address, args.rate, 120)
        reader, events = Reader(db, args.seed), Events(nodes, db, writer, cache, args.seed)
        started = time.monotonic()
        while time.monotonic() - started < 60 * args.minutes:
            for _ in range(events.chance.randrange(10, 60)):
                reader.read()
            reader.move()
            events.happen()
        writer.process.kill()
        stored = set(lance.dataset(db.url).to_table(columns=["id"])["id"].to_pylist())
        lost = [i for i in writer.acknowledged if f"w{i}" not in stored]
        for _ in range(20):
            with contextlib.suppress(SoftDBError):
                db.refresh()
                break
        verified = db.verify()
        report = reader.report() | {
            "minutes": args.minutes, "events": dict(events.counts), "acknowledged": len(writer.acknowledged),
            "lost": len(lost), "verified": verified,
        }  # fmt: skip
        cluster.stop(db.url)
        ray.shutdown()
        nodes.shutdown()
    return report


def rebuild(args: argparse.Namespace) -> dict[str, Any]:
    """Search before and while both shards of a table in this process are rebuilt."""
    from threading import Thread

    result: dict[str, Any] = {"records": args.records, "search": {}}
    temporary = tempfile.TemporaryDirectory()
    with temporary as name, cluster.create(Path(name, "t.lance"), dim=64, shards=2, cache=Path(name, "cache")) as db:
        random_keys = np.random.default_rng(0)
        for low in range(0, args.records, 50_000):
            count = min(50_000, args.records - low)
            db.insert(
                [f"r{i}" for i in range(low, low + count)],
                random_keys.normal(size=(count, 64)).astype(np.float32),
                payloads=[{"i": i} for i in range(low, low + count)],
            )
        for index in ("flat", "ivf"):
            db.build_index(index)
            hydrated, figures = db.caller.transport.hydrated, dict[str, Any]()  # type: ignore[attr-defined]

            def remake(hydrated: Any = hydrated) -> None:
                for shard in range(2):
                    hydrated.remake(shard)

            for when, work in (("quiet", lambda: time.sleep(10)), ("rebuild", remake)):
                thread, seconds = Thread(target=work), list[float]()
                thread.start()
                while thread.is_alive():
                    query, started = random_keys.normal(size=(1, 64)).astype(np.float32), time.perf_counter()
                    db.search(query, k=10)
                    seconds.append(time.perf_counter() - started)
                    time.sleep(0.005)
                p50, p99 = (round(1e3 * float(np.quantile(seconds, share)), 2) for share in (0.5, 0.99))
                figures[when] = {"searches": len(seconds), "p50_ms": p50, "p99_ms": p99}
            figures["p99_ratio"] = round(figures["rebuild"]["p99_ms"] / figures["quiet"]["p99_ms"], 2)
            result["search"][index] = figures
    return result


def main() -> None:
    """Run one part, print its figures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", action="store_true")
    parser.add_argument("--rebuild", action="store_true")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--reads", type=int, default=10_000)
    parser.add_argument("--pace", type=float, default=20, help="reads a second at most, with --commits")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--keep", type=float, default=10, help="seconds for which versions are kept, with --commits")
    parser.add_argument("--rate", type=float, default=20, help="commits a second that the writer tries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="folder of the shards' directories")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == WRITER:
        ray.init(address="auto", log_to_driver=False)
        write(args.url, args.rate, args.first, args.keep)
        return
    part, function = ("commits", commits) if args.commits else ("rebuild", rebuild) if args.rebuild else ("soak", soak)
    figures = provenance(["softdb", "torch", "numpy", "ray", "pylance"]) | function(args)
    print(json.dumps({name: value for name, value in figures.items() if name != "machine"}, indent=1))
    if args.out:
        result = json.loads(args.out.read_text()) if args.out.exists() else {}
        write_json(args.out, result | {part: figures})


if __name__ == "__main__":
    main()
