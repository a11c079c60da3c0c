"""Hostile HDF5 files, and the process that reads them: the caller survives whatever it does."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import refused

from softdb.formats import read_records, sandbox
from softdb.formats.collections import parts

h5py = pytest.importorskip("h5py", reason="to write hostile files")
KEYS = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
SECRET = np.full((40, 4), 7, np.float32)


def external_storage(file: Any, outside: Path) -> None:
    (outside / "secret.raw").write_bytes(SECRET.tobytes())
    file.create_dataset("train", (40, 4), "f4", external=[(str(outside / "secret.raw"), 0, 640)])


def external_link(file: Any, outside: Path) -> None:
    file["train"] = h5py.ExternalLink(str(outside / "secret.h5"), "/train")


def soft_link(file: Any, outside: Path) -> None:
    file.create_group("g")["x"] = h5py.ExternalLink(str(outside / "secret.h5"), "/train")
    file["train"] = h5py.SoftLink("/g/x")


def virtual(file: Any, outside: Path) -> None:
    layout = h5py.VirtualLayout((40, 4), "f4")
    layout[:] = h5py.VirtualSource(str(outside / "secret.h5"), "train", (40, 4))
    file.create_virtual_dataset("train", layout)


def endless(file: Any, outside: Path) -> None:
    file.create_dataset("train", (1 << 50, 4), "f4", chunks=(1 << 10, 4))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (external_storage, r"x\.h5: 'train' is stored in other files, which are not read"),
        (external_link, r"x\.h5: 'train' is a link, which is not followed; copy the array into the file"),
        (soft_link, r"x\.h5: 'train' is a link, which is not followed"),
        (virtual, r"x\.h5: 'train' is stored in other files, which are not read"),
        (endless, r"x\.h5 claims .* vectors but stores 0 bytes"),
    ],
)
def test_arrays_of_hdf5_in_other_files(tmp_path: Path, make: Callable[[Any, Path], None], match: str) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["train"] = SECRET
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file, tmp_path)
    refused(tmp_path / "x.h5", match)


def test_packed_arrays_of_hdf5_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("train", data=np.zeros((100_000, 4), ">f8"), compression="gzip", chunks=(10_000, 4))
    assert sum(len(rows) for rows in read_records(tmp_path / "x.h5")) == 100_000
    assert (tmp_path / "x.h5").stat().st_size < 40_000


def test_an_hdf5_chunk_over_the_memory_limit_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = file.create_dataset("train", (300_000, 1024), "f4", chunks=(300_000, 1024), compression="gzip")
        made.id.write_direct_chunk((0, 0), b"x\x9c" + bytes(2 << 20))
    refused(tmp_path / "x.h5", r"x\.h5 cannot be read \(")


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("does", "match"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its reader ended by SIGSEGV"),
        ("os._exit(3)", "its reader ended: 3"),
        ("while True: pass", "its reader did not answer in time"),
        ("bytearray(1 << 34)", "it would take more memory than its size justifies"),
        ("open('/etc/passwd')", "Too many open files"),
        ("open(path.with_name('new'), 'w')", "Too many open files"),
        ("__import__('socket').socket()", "Too many open files"),
        ("os.write(1, bytes(100))", r"\)"),
        ("os.write(1, b'\\xff' * 16)", "a part of more than"),
        ("yield {}", "'width'"),
        ("yield {'rows': 9, 'width': 1 << 40, 'dtype': '<f4', 'metric': None}", "it holds vectors of"),
        ("yield {'rows': 9, 'width': 4, 'dtype': 'O', 'metric': None}", "numbers of object"),
        ("yield from (dict(rows=9, width=4, dtype='f', metric=None), b'', b'')", "not JSON serializable"),
        ("yield dict(rows=9, width=4, dtype='f', metric=None); yield np.arange(9); yield np.ones(8)", "9 ids for 4"),
        ("yield dict(rows=9, width=4, dtype='f', metric=None); yield np.arange(9); yield np.ones(3)", "reshape"),
        ("yield dict(rows=9, width=4, dtype='f', metric=None); yield np.arange(9); return", "StopIteration|no vectors"),
    ],
)
def test_a_hijacked_reader_process_cannot_harm_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, match: str
) -> None:
    """Whatever it does, the caller lives and gets an error that names the file."""
    text = Path(sandbox.__file__).read_text()
    start = text.index("    import h5py\n")
    changed = f"{text[:start]}    {does}\n{text[start:]}".replace("import json", "import json, socket")
    (tmp_path / "reader.py").write_text(changed)
    (tmp_path / "x.h5").write_bytes(b"anything")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "reader.py"))
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    refused(tmp_path / "x.h5", rf"x\.h5 cannot be read \(.*({match})")
    assert not (tmp_path / "new").exists()


def test_a_file_without_the_right_to_read_it_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root may read every file, the reader itself raises the error of the system call."""
    text = Path(sandbox.__file__).read_text()
    opening = "        file = content(kind, Path(path))\n"
    assert opening in text
    denied = "        raise PermissionError(13, 'Permission denied', path)\n"
    (tmp_path / "reader.py").write_text(text.replace(opening, denied))
    (tmp_path / "x.h5").write_bytes(b"anything")
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "reader.py"))
    refused(tmp_path / "x.h5", r"^\[Errno 13\] Permission denied: '.*x\.h5'$")


def test_a_reader_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.h5").write_bytes(b"anything")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    refused(tmp_path / "x.h5", r"x\.h5 cannot be read in a separate process \(")


def test_a_reader_process_ends_with_its_caller(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train"] = KEYS
    received = parts(tmp_path / "x.h5", "hdf5", 5)
    head, ids = next(received), next(received)
    assert json.loads(head.tobytes())["rows"] == 40
    assert ids.view(np.int64).tolist() == [0, 1, 2, 3, 4]
    assert next(received).tobytes() == KEYS[:5].tobytes()
    process = inspect.getgeneratorlocals(received)["process"]
    assert process.poll() is None or process.returncode == 0
    received.close()
    assert process.returncode in (0, -signal.SIGKILL)
