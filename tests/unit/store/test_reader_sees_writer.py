"""Readers notice that a writer has opened the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from softdb.store.directory import CATALOG, LOG, Directory, Displaced


@pytest.fixture
def opened(path: Path) -> Iterator[Directory]:
    """A directory whose catalogue is open without a writer."""
    path.mkdir()
    (path / CATALOG).write_bytes(b"pages")
    directory = Directory(path, writing=False)
    directory.watch_catalog(directory.catalog_mark(), immutable=True)
    yield directory
    directory.close()


def empty_log(path: Path) -> None:
    (path / LOG).touch()


def log(path: Path) -> None:
    (path / LOG).write_bytes(b"a commit")


def empty_log_in_use(path: Path) -> None:
    empty_log(path)
    (path / f"{CATALOG}-shm").touch()


def checkpointed(path: Path) -> None:
    (path / CATALOG).write_bytes(b"more pages")


@pytest.mark.parametrize(
    ("change", "overtaken", "rewritten"),
    [(empty_log, False, False), (log, True, False), (empty_log_in_use, True, False), (checkpointed, True, True)],
)
def test_a_reader_notices_a_new_writer(
    opened: Directory, path: Path, change: Callable[[Path], None], overtaken: bool, rewritten: bool
) -> None:
    assert not opened.overtaken()
    change(path)
    assert (opened.overtaken(), opened.rewritten()) == (overtaken, rewritten)


def test_an_overwritten_file_is_no_part_of_the_message() -> None:
    assert (
        str(Displaced("keys-00000000.npy was overwritten", "keys-00000000.npy")) == "keys-00000000.npy was overwritten"
    )
