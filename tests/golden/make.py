"""Make the golden directories of a format: small databases that every later softdb must open.

    python tests/golden/make.py format-1

is run once, by the release that owns the format, and what it writes is never changed again: `test_golden_formats.py`
compares it with `SHA256SUMS`. What a database must hold stands in its `expected.json`, and comes from the
plan below, not from the database.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import softdb
from softdb.store.format import FORMAT

HERE = Path(__file__).parent
SUMS = HERE / "SHA256SUMS"

Id = int | str


class Plan:
    """A database and its expected records as lists, in the order of `scan`."""

    def __init__(self, path: Path, **schema: Any) -> None:
        self.path = path
        self.schema = schema
        self.records: dict[Id, dict[str, Any]] = {}
        self.fields: list[str] = []
        self.text_index: str | None = None
        self.db = softdb.open(path, **schema)

    def upsert(
        self, ids: Sequence[Id], keys: Any, values: Any, payloads: Sequence[Any], texts: Sequence[str | None] = ()
    ) -> None:
        """Add records or replace them; without keys where these are None."""
        texts = texts or [None] * len(ids)
        self.db.upsert(ids, keys, values, payloads, texts=texts)
        dtype = np.dtype(self.schema.get("dtype", "float32"))
        none = [None] * len(ids)
        vectors = none if keys is None else np.asarray(keys).astype(dtype).tolist()
        labels = np.int32 if "num_classes" in self.schema else dtype
        stored = none if keys is None else np.asarray(values).astype(labels).tolist()
        for one, key, value, payload, text in zip(ids, vectors, stored, payloads, texts, strict=True):
            self.records.pop(one, None)
            self.records[one] = {"id": one, "key": key, "value": value, "payload": payload, "text": text}

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete records."""
        self.db.delete(ids)
        for one in ids:
            self.records.pop(one, None)

    def replace(self, payloads: dict[Id, Any]) -> None:
        """Replace payloads alone."""
        self.db.update(list(payloads), payloads=list(payloads.values()))
        for one, payload in payloads.items():
            self.records[one]["payload"] = payload

    def index_text(self, tokenizer: Any) -> None:
        """Index the texts."""
        self.db.index_text(tokenizer)
        self.text_index = tokenizer

    def text(self) -> str:
        """Records that every later softdb must find, as JSON, one a line."""
        records = ",\n".join(json.dumps(record) for record in self.records.values())
        start = json.dumps({"schema": self.schema, "fields": self.fields, "text_index": self.text_index})
        return f'{start[:-1]}, "records": [\n{records}\n]}}\n'


def compacted(path: Path) -> Plan:
    """Half precision and labels; compacted with gaps, then tombstones, replaced payloads, a field and texts indexed.

    Records without a key, of which compaction took the slots of some.
    """
    plan = Plan(path, dim=4, num_classes=5, dtype="float16", metric="l2")
    random = np.random.default_rng(2)
    plan.db.index_field("year")
    plan.fields = ["year"]
    plan.index_text("words")
    for low in range(0, 180, 60):
        ids: list[Id] = [f"r{i}" if i % 2 else i for i in range(low, low + 60)]
        keys, labels = random.standard_normal((60, 4)), random.integers(0, 5, 60)
        texts = [f"the text of {one}" if i % 4 else None for i, one in enumerate(ids)]
        plan.upsert(ids, keys, labels, [{"n": i, "year": 2000 + i % 30} for i in range(low, low + 60)], texts)
        plan.upsert([f"d{low}", f"e{low}"], None, None, [{"year": 1990}, None], [None, "a document"])
    plan.delete([record for i, record in enumerate(list(plan.records)) if i % 3 == 0])
    plan.db.compact()
    plan.delete(list(plan.records)[10:30])
    plan.replace({record: {"n": "new", "year": None} for record in list(plan.records)[40:45]})
    plan.upsert(["late", 4], random.standard_normal((2, 4)), [0, 4], [None, {"year": 1999}])
    plan.upsert(["e60", "f"], None, None, [None, {"year": None}], ["longer than a page " * 250, "no key"])
    plan.db.close()
    return plan


def killed(path: Path) -> Plan:
    """Ids of both kinds, payloads of every kind; the writer is killed, its last commits are in the log alone."""
    plan = Plan(path, dim=3, value_dim=3, dtype="float32", metric="cosine")
    ids: list[Id] = [1, "1", -(2**63), 2**63 - 1, "", "naïve 🦉", "nul\0id", "'; DROP TABLE records;--", "gone"]
    payloads: list[Any] = [
        None, "text", 1, 2.5, [1, [2, {"deep": None}]], {"year": 2020, "lang": "de"}, {"": True, "a.b": "ü\n\0"},
        {"big": 10**30, "small": 5e-324, "negative": -0.0}, {"year": "2020"},
    ]  # fmt: skip
    random = np.random.default_rng(1)
    keys, values = random.standard_normal((2, len(ids), 3))
    keys[4] = 0
    values[5] = [np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, -0.0]
    plan.upsert(ids, keys, values, payloads, [f"{one} ü\0 🦉" for one in ids])
    plan.index_text("trigram")
    plan.db.close()
    plan.db = softdb.open(path)
    plan.upsert(["1", "last"], [[1, 2, 3], [0, -1, 0]], [[4, 5, 6], [7, 8, 9]], [{"replaced": True}, None])
    plan.delete(["gone"])
    plan.upsert([7], None, None, [None], ["in the log alone"])
    return plan


def make(name: str, build: Callable[[Path], Plan], folder: Path) -> None:
    """One golden directory. Built in a child, which dies with the handle it has not closed."""
    target = folder / name
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        child = os.fork()
        if child == 0:
            plan = build(Path(scratch) / "db")
            (target / "expected.json").write_text(plan.text())
            os.kill(os.getpid(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WTERMSIG(status) != signal.SIGKILL or not (target / "expected.json").exists():
            raise SystemExit(f"{name} was not made")
        # the wal-index is shared memory of the machine that made it; SQLite makes it anew
        shutil.copytree(Path(scratch) / "db", target / "db", ignore=shutil.ignore_patterns("*-shm"))


def digests() -> str:
    """SHA-256 of every file of every golden directory, as `sha256sum` writes it."""
    files = sorted(file for file in HERE.glob("format-*/**/*") if file.is_file())
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(HERE)}\n" for file in files)


def main() -> None:
    """Make the directories of the format that is named, which must be this softdb's."""
    if len(sys.argv) != 2 or sys.argv[1] != f"format-{FORMAT}":
        raise SystemExit(f"usage: make.py format-{FORMAT}: this softdb writes no other")
    folder = HERE / sys.argv[1]
    if folder.exists():
        raise SystemExit(f"{folder} exists; a released format's golden directories are never made again")
    for build in (compacted, killed):
        make(build.__name__, build, folder)
    SUMS.write_text(digests())


if __name__ == "__main__":
    main()
