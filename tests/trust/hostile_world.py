"""What the tests of hostile input share: the nursery, and databases as they should be, to be copied and spoilt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import hostile_catalog
import pytest
from hostile_child import Nursery

import softdb


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Children with a time limit, isolated from this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTDB_KEY_FILE", str(tmp_path_factory.getbasetemp() / "index.key"))
        one = Nursery()
        try:
            yield one
        finally:
            one.close()


@pytest.fixture(scope="session")
def goods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A database whose catalogue is one file, one with a compaction behind it, and one with its log beside it."""
    folder = tmp_path_factory.mktemp("goods")
    with softdb.open(folder / "open", dim=hostile_catalog.WIDTH) as db:
        for one, key, payload in hostile_catalog.RECORDS:
            db.insert([one], [key], payloads=[payload])
        db.delete(["gone"])
        shutil.copytree(folder / "open", folder / "logged")
    return {
        "good": hostile_catalog.good(folder / "good"),
        "compacted": hostile_catalog.compacted(folder / "compacted"),
        "logged": folder / "logged",
    }
