"""Small valid files of every format that is imported, and the same with bytes changed, read in a child that may crash.

What a library reads which is not made for strangers' files is opened here by `softdb.formats.sandbox` itself, without
its process: that takes a third of a second a file. Its crash is one that the caller would be told of.
"""

from __future__ import annotations

import gzip
import json
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hostile_fuzz import Draw, mutated

KEYS = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
GUARDED = {"h5": "hdf5", "faiss": "faiss", "sqlite": "qdrant"}
COUNTS = [b"\xff" * 8, b"\0" * 8, *((1 << bits).to_bytes(8, "little") for bits in (16, 31, 32, 40, 62))]
SECONDS = 20  # for a file; the slowest take some milliseconds


def _texts(folder: Path) -> None:
    rows = [{"id": i, "key": key, "text": "é" * i, "n": {"a": [i]}} for i, key in enumerate(KEYS.tolist())]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = "id,key,n\n" + "".join(f'{i},"{key}",x\n' for i, key in enumerate(KEYS.tolist()))
    (folder / "x.jsonl").write_bytes(lines)
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "x.csv").write_text(table)
    (folder / "x.tsv").write_text(table.replace(",", "\t"))


def _tables(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    columns = {"id": [f"r{i}" for i in range(30)], "key": KEYS.tolist(), "n": [{"a": [i]} for i in range(30)]}
    table = pa.table(columns)
    pa.parquet.write_table(table, folder / "x.parquet", row_group_size=10)
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 10)
    with pa.OSFile(str(folder / "y.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 10)


def _arrays(folder: Path) -> None:
    import safetensors.numpy

    np.save(folder / "x.npy", KEYS)
    np.savez(folder / "x.npz", keys=KEYS, ids=np.arange(30))
    np.savez_compressed(folder / "y.npz", keys=KEYS)
    safetensors.numpy.save_file({"keys": KEYS, "ids": np.arange(30)}, folder / "x.safetensors")
    for name, numbers, dtype in (("fvecs", KEYS, "<f4"), ("ivecs", KEYS * 9, "<i4"), ("bvecs", KEYS * 9 % 255, "u1")):
        rows = np.empty(30, np.dtype([("width", "<i4"), ("numbers", dtype, (4,))]))
        rows["width"], rows["numbers"] = 4, numbers
        (folder / f"x.{name}").write_bytes(rows.tobytes())
    for name, dtype in (("fbin", "<f4"), ("u8bin", "u1")):
        whole = (KEYS * 9 % 255).astype(dtype)
        (folder / f"x.{name}").write_bytes(np.array([30, 4], "<i4").tobytes() + whole.tobytes())


def _guarded(folder: Path) -> None:
    import faiss
    import h5py

    for name, options in (("x", {}), ("y", {"chunks": (10, 4), "compression": "gzip", "shuffle": True})):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("train", data=KEYS, **options)
            file.attrs["distance"] = "angular"
    for i, kind in enumerate(("Flat", "IVF2,Flat", "HNSW4,Flat", "IDMap,Flat", "IDMap2,IVF2,Flat")):
        index = faiss.index_factory(4, kind)
        index.train(KEYS)
        index.add_with_ids(KEYS, np.arange(30)) if kind.startswith("IDMap") else index.add(KEYS)
        faiss.write_index(index, str(folder / f"{i}.faiss"))
    with sqlite3.connect(folder / "x.sqlite") as file:
        file.execute("CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)")
        points = (b"\x80\x04cqdrant_client.models\nPointStruct\n)\x81" + _state(i) + b"b." for i in range(30))
        file.executemany("INSERT INTO points VALUES (?, ?)", enumerate(points))
    file.close()


def _state(i: int) -> bytes:
    """The fields of a point as a pickle, without its first bytes and its end."""
    import pickle

    fields = {"id": i, "vector": KEYS[i].tolist(), "payload": {"n": "x" * i}}
    return pickle.dumps({"__dict__": fields}, 3)[2:-1]


def samples(folder: Path) -> list[Path]:
    """A file of each kind."""
    folder.mkdir(exist_ok=True)
    for make in (_texts, _tables, _arrays, _guarded):
        make(folder)
    return sorted(folder.iterdir())


def changed(draw: Draw, data: bytes, other: bytes) -> bytes:
    """Bytes flipped, cut, zeroed, doubled or put in, counts enlarged, or the header of another file."""
    kind = draw.randrange(8)
    if kind < 3:
        return mutated(draw, data)
    found, at = bytearray(data), draw.randrange(len(data))
    length = draw.choice([1, 4, 16, 64, len(data) // 3])
    if kind == 3:
        del found[at:]
    elif kind == 4:
        found[at : at + length] = bytes(len(found[at : at + length]))
    elif kind == 5:
        found[at:at] = found[at : at + length]
    elif kind == 6:
        at = draw.choice([at, draw.randrange(min(256, len(data)))])  # counts stand in headers
        found[at : at + 8] = draw.choice(COUNTS)[: draw.choice([4, 8])]
    else:
        found[:length] = other[:length]
    return bytes(found)


def _read(path: Path) -> None:
    """All records of a file, as an import takes them; of the guarded kinds as their process reads them."""
    from softdb.formats import read_records, sandbox

    kind = GUARDED.get(path.suffix[1:])
    if kind is None:
        for rows in read_records(path, batch_size=16):
            assert len(rows) <= 16
        return
    for part in sandbox.READERS[kind](path, sandbox.content(kind, path), 64, None):
        assert (part.nbytes if isinstance(part, np.ndarray) else len(json.dumps(part))) <= 1 << 26


def sample(seed: int, first: int, count: int, folder: str) -> list[str]:
    """Read changed files from the `first` on; the file `at` in the folder says which, should this process end."""
    import softdb

    paths, failures = sorted(Path(folder, "good").iterdir()), []
    for i in range(first, count):
        Path(folder, "at").write_text(str(i))
        draw = random.Random(f"{seed} {i}")
        path, other = paths[i % len(paths)], draw.choice(paths)
        bad = Path(folder, path.name)
        bad.write_bytes(changed(draw, path.read_bytes(), other.read_bytes()))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        failures += _failure(lambda: _read(bad), softdb.SoftDBError, f"seed {seed}, input {i}, {path.name}")  # noqa: B023
    return failures


def _failure(read: Callable[[], Any], refusal: type[Exception], which: str) -> list[str]:
    """Errors other than refusals of a file that is read in this process."""
    try:
        read()
    except refusal:
        return []
    except Exception as error:  # the process of a guarded kind tells of any
        return [] if which.endswith(tuple(GUARDED)) else [f"{which}: {type(error).__name__}: {error}"]
    return []
