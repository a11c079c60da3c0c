"""Bytes, lines, entries and arguments drawn at random, for every parser of what comes from outside.

Each task runs in a child (see `hostile_child`) and takes a seed and a count; it returns the inputs that were met with
anything but an answer or a refusal by name, each with what it takes to run it alone.
"""

from __future__ import annotations

import gzip
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = random.Random

_NASTY = [0, 1, 2, 5, 10, 13, 0x7F, 0x80, 0xFF]
_INTEGERS = [b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\1", b"\0\0\0\2", b"\0\1\0\0"]
_PIECES = [
    b"{", b"}", b"[", b"]", b'"', b"'", b"\\", b",", b":", b"\n", b"\r", b"\0", b"(", b")", b"-", b"1e999", b"NaN",
    b"null", b"9" * 400, b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"[" * 3000, b"__import__", b"\xef\xbb\xbf",
    b"1e-400", b"Infinity", b"-0", b"true", b"0x1", b"_", b"#", b"\t", b"\x1f\x8b",
]  # fmt: skip


def mutated(draw: Draw, data: bytes) -> bytes:
    """A few bytes other than they were."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 3, 8])):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = draw.choice([*_NASTY, draw.randrange(256)])
        elif kind == 2:
            found[at:at] = draw.choice(_PIECES)
        elif kind == 3:
            del found[at : at + draw.choice([1, 1, 4, 64])]
        elif kind == 4:
            found[at : at + 4] = draw.choice(_INTEGERS)
        else:
            other, length = draw.randrange(len(found) + 1), draw.choice([1, 8, 40])
            found[at : at + length] = found[other : other + length]
    return bytes(found)


def _tried(seed: int, count: int, one: Callable[[Draw], None]) -> list[str]:
    """Inputs that gave neither an answer nor a refusal."""
    import softdb

    failures = []
    for i in range(count):
        draw = random.Random(f"{seed} {i}")
        try:
            one(draw)
        except softdb.SoftDBError:
            continue
        except Exception as error:
            failures.append(f"seed {seed}, input {i}: {type(error).__name__}: {error}")
    return failures


def spoilt(draw: Draw, data: bytes) -> bytes:
    """A catalogue (or its log) with bits flipped, numbers of its headers changed, pages swapped, repeated or gone."""
    found, size = bytearray(data), 4096
    pages = max(1, len(found) // size)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        page = draw.randrange(pages) * size
        kind = draw.randrange(8)
        if kind < 2:
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
        elif kind == 2:  # the header of a page: kind, free block, cells, content, rightmost child
            at = page + (100 if page == 0 else 0) + draw.randrange(12)
            found[at : at + 1] = bytes([draw.choice([*_NASTY, 13, 10, 5, 2, draw.randrange(256)])])
        elif kind == 3:  # a pointer to a cell
            at = page + 8 + 2 * draw.randrange(20)
            found[at : at + 2] = struct.pack(">H", draw.randrange(1 << 16))
        elif kind == 4:
            at = draw.randrange(100)
            found[at : at + 4] = draw.choice(_INTEGERS)
        elif kind == 5:
            other = draw.randrange(pages) * size
            found[page : page + size] = found[other : other + size]
        elif kind == 6:
            found[page : page + size] = bytes(len(found[page : page + size]))
        else:
            at = draw.randrange(len(found))
            found[at : at + 9] = bytes(draw.randrange(256) for _ in range(9))
    return bytes(found[: draw.randrange(len(found))] if draw.random() < 0.03 else found)


def arrays(seed: int, count: int, folder: str) -> list[str]:
    """`.npy` and `.npz` files, as keys and as the array of an argument."""
    from hostile_files import FLOATS, npy, npz

    from softdb.formats import numbers_in, read_records

    def one(draw: Draw) -> None:
        array = mutated(draw, npy(FLOATS, bytes(24), draw.choice([1, 1, 2, 3])))
        packed = draw.random() < 0.4
        file = Path(folder) / ("k.npz" if packed else "k.npy")
        file.write_bytes(mutated(draw, npz(keys=array)) if packed else array)
        for rows in read_records(file):
            assert rows.keys.ndim == 2
            assert rows.keys.dtype.kind in "fiu"
        assert numbers_in(file).nbytes <= 1 << 20, "more numbers than there are bytes"

    return _tried(seed, count, one)


def entries(seed: int, count: int, folder: str) -> list[str]:
    """Entries of an index in the catalogue: none of them is signed, so none may reach FAISS."""
    import faiss

    from softdb import check
    from softdb.index import cache

    def never(*arguments: Any) -> None:
        raise AssertionError("FAISS is given what nobody has signed")

    faiss.__dict__["deserialize_index"] = never
    name = "ivf-0123456789abcdef.faiss"
    (Path(folder) / name).write_bytes(b"IwPf" + bytes(60))
    entry = {
        "file": name, "kind": "ivf", "metric": "l2", "generation": 3, "bytes": 64, "sha256": "0" * 64, "covered": 10,
        "effort": 1, "candidates": 10, "tuned_for": 10, "report": {"recall": 0.95}, "hmac": "0" * 64,
    }  # fmt: skip
    text = json.dumps(entry).encode()

    def one(draw: Draw) -> None:
        try:
            found = json.loads(mutated(draw, text))
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict):
            assert cache.load(Path(folder), found, check.Metric.L2) is None

    return _tried(seed, count, one)


_LINES = [
    {"id": "a", "key": [1, 2.5], "value": [1], "payload": {"x": [None, True, "\N{GRINNING FACE}", "nul\0"]}},
    {"id": 2**63 - 1, "key": [0.1, -1e300], "value": [2]},
    {"id": -5, "key": [1e-300, 3], "value": [0.5], "more": "x\u2028y", "$or": [1]},
]


def lines(seed: int, count: int, folder: str) -> list[str]:
    """Files of JSON lines and of CSV, also packed; accepted rows come back exactly."""
    import softdb
    from softdb.formats import Fields, import_records, read_records

    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in _LINES).encode()
    table = b'id,key,value,x\na,"[1, 2]","[1]",true\nb,"[3, 4]","[2]",007\n"c,""d","[5, 6]","[3]",\n'

    def one(draw: Draw) -> None:
        kind = draw.choice(["r.jsonl", "r.jsonl", "r.csv", "r.jsonl.gz", "r.csv.gz"])
        data = mutated(draw, table if "csv" in kind else text)
        file = Path(folder) / kind
        file.write_bytes(mutated(draw, gzip.compress(data)) if kind.endswith("gz") and draw.random() < 0.5 else data)
        fields = Fields(value="value")
        wanted: dict[Any, Any] = {}
        for rows in read_records(file, fields=fields, batch_size=2):
            wanted.update(zip(rows.ids, rows.payloads, strict=True))
        with softdb.open(None, dim=2, value_dim=1) as db:
            import_records(db, read_records(file, fields=fields, batch_size=2), upsert=True)
            found = {one: p for records in db.scan() for one, p in zip(records.ids, records.payloads, strict=True)}
        assert repr(sorted(found.items(), key=repr)) == repr(sorted(wanted.items(), key=repr)), "changed on the way"

    return _tried(seed, count, one)


_WHERES = [
    {"x": 1}, {"x": {"$in": [1, "a", None]}}, {"$or": [{"x": {"$gt": 1}}, {"$not": {"y": "b"}}]},
    {"x": {"$contains": "a"}},
    {"$and": [{"x": {"$not": {"$exists": True}}}, {"a.b": {"$ne": 0.5}}]}, {'"': {"$nin": [True]}},
]  # fmt: skip


def wheres(seed: int, count: int, folder: str) -> list[str]:
    """Filters as JSON, of the grammar and nearly so."""
    import softdb
    from softdb.tools.cli.arguments import filter_of

    db = softdb.open(None, dim=1, fields=["y"])
    db.insert([1, 2, 3], [[1]] * 3, payloads=[{"x": 1, "y": "b"}, {"x": ["a"]}, None])

    def one(draw: Draw) -> None:
        text = mutated(draw, json.dumps(draw.choice(_WHERES)).encode()).decode("utf-8", "surrogateescape")
        assert 0 <= db.count(filter_of(text) or {}) <= 3
        assert len(db) == 3

    return _tried(seed, count, one)


def commands(seed: int, count: int, folder: str) -> list[str]:
    """Arguments of the command line: errors are one line."""
    from typer.testing import CliRunner

    import softdb
    from softdb.tools.cli.commands import app

    path = Path(folder) / "db"
    if not path.exists():
        with softdb.open(path, dim=2) as db:
            db.insert(["a", "b"], [[1, 0], [0, 1]], payloads=[{"x": 1}, None])
    runner = CliRunner()

    def text(draw: Draw, good: str) -> str:
        return mutated(draw, good.encode()).decode("utf-8", "replace").replace("\0", "")

    def one(draw: Draw) -> None:
        arguments = [draw.choice(["search", "attend"]), str(path), text(draw, "[1, 0.5]")]
        for name, good in (("--where", '{"x": {"$gte": 1}}'), ("-k", "3"), ("--encoder", "ngrams")):
            if draw.random() < 0.5:
                arguments += [name, text(draw, good)[:500]]
        if "-k" in arguments and len(arguments[arguments.index("-k") + 1].strip()) > 6:
            return  # the width of an answer is k
        result = runner.invoke(app, [*arguments, "--json"])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            f"{arguments}: {result.exception!r}"
        )
        assert result.exit_code in (0, 1, 2), arguments

    return _tried(seed, count, one)
