"""Files of a table's folder that are synced, and the time of each sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from softdb.errors import WriteFailed
from softdb.lance_table.storage import Synced
from softdb.store import files


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Synced files by their paths in the folder."""
    found: list[str] = []
    for name in ("sync", "sync_directory"):
        real = getattr(files, name)

        def told(path: Path, real: Callable[[Path], None] = real) -> None:
            found.append(str(path.relative_to(tmp_path)))
            real(path)

        monkeypatch.setattr(files, name, told)
    return found


def test_each_file_and_name_is_synced_once(tmp_path: Path, seen: list[str]) -> None:
    for name in ("data/a.lance", "data/b.lance#1", "_versions/1.manifest", "_versions/.tmp_2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    synced = Synced(tmp_path)
    synced.sync()
    assert sorted(seen) == [".", "_versions", "_versions/1.manifest", "data", "data/a.lance"]
    assert seen.index("data/a.lance") < seen.index("data"), "a name before what it names"
    seen.clear()
    synced.sync()
    assert seen == []
    (tmp_path / "data/b.lance#1").rename(tmp_path / "data/b.lance")
    (tmp_path / "_indices").mkdir()
    synced.sync()
    assert sorted(seen) == [".", "data", "data/b.lance"]


def test_a_failed_sync_is_raised_and_retried(tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.lance").write_text("a")
    synced = Synced(tmp_path)

    def fails(_: Path) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", fails)
        with pytest.raises(WriteFailed, match=r"could not be synced \(the disk is gone\); a crash of the machine may"):
            synced.sync()
    synced.sync()
    assert seen == ["a.lance", "."]
