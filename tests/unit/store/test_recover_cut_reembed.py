"""Opening removes the leftovers of interrupted runs of reembed."""

from __future__ import annotations

from pathlib import Path

import pytest

from softdb.store import disk, recovery

NAMES = ("reembed-5", "reembed-17", "reembed-7", "reembed-7x", "reembed-", "more-reembed-5", "index")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys-00000000.npy").touch()
    return tmp_path


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_folders_of_other_generations_are_removed(folders: Path) -> None:
    recovery.clean_folders(folders, 7)
    assert names(folders) == set(NAMES) - {"reembed-5", "reembed-17"}


def test_a_folder_that_cannot_be_removed_stays(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(disk, "unlink", refused)
    recovery.clean_folders(folders, 7)
    assert names(folders) == set(NAMES)


def test_a_folder_with_foreign_files_is_untouched(folders: Path) -> None:
    (folders / "reembed-5" / "notes.txt").touch()
    recovery.clean_folders(folders, 7)
    assert names(folders / "reembed-5") == {"keys-00000000.npy", "notes.txt"}
