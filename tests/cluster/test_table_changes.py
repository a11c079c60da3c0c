"""Changes between two versions of a table are exactly the rows that differ, whatever was written between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lance", reason="the table of a cluster is Lance's")

import lance
import pyarrow as pa

from softdb.lance_table.changes import Changes, changes_between

N = 20_000


def rows(ids: list[int], content: int) -> pa.Table:
    return pa.table({"id": ids, "content": [content] * len(ids)}, pa.schema({"id": pa.int64(), "content": pa.int64()}))


def contents(dataset: Any) -> dict[int, int]:
    table = dataset.to_table()
    return dict(zip(table["id"].to_pylist(), table["content"].to_pylist(), strict=True))


def steps(url: str, since: int) -> list[Changes]:
    """Changes from a version to the newest, one after another."""
    newest, all_steps = lance.dataset(url), list[Changes]()
    while since < newest.version:
        changes = changes_between(url, lance.dataset(url, version=since), newest, "id", None)
        assert changes is not None
        assert changes.dataset.version > since
        all_steps.append(changes)
        since = changes.dataset.version
    return all_steps


def ids_of(changes: Changes) -> tuple[list[int], list[int]]:
    removed: list[Any] = [id for ids in changes.removed for id in ids]
    return sorted(removed), sorted(id for table in changes.added for id in table["id"].to_pylist())


@pytest.fixture(params=[False, True], ids=["addresses", "stable row ids"])
def url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    place = str(tmp_path / "t.lance")
    half = rows([*range(N)], 0)
    lance.write_dataset(half, place, max_rows_per_file=N // 2, enable_stable_row_ids=request.param)
    return place


def upsert(url: str, ids: list[int], content: int) -> None:
    merge = lance.dataset(url).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.execute(rows(ids, content))


def test_compacted_rows_have_not_changed(url: str) -> None:
    for content in (1, 2):
        upsert(url, [content, N + content], content)
        upsert(url, [5], content)
        lance.dataset(url).optimize.compact_files()
    lance.dataset(url).create_scalar_index("id", "BTREE")
    lance.dataset(url).optimize.compact_files()
    assert [ids_of(changes) for changes in steps(url, 1)] == [([1, 5], [1, 5, N + 1]), ([2, 5], [2, 5, N + 2])]


@pytest.mark.parametrize("count", [10, 6000], ids=["array", "bitmap"])
def test_deleted_rows_are_read_from_both_kinds_of_files(url: str, count: int) -> None:
    for low in (0, N // 2 - 5):
        version = lance.dataset(url).version
        lance.dataset(url).delete(f"id >= {low} AND id < {low + count}")
        (changes,) = steps(url, version)
        assert ids_of(changes) == ([*range(low, low + count)], [])
    kinds = {part.metadata.deletion_file.file_type for part in lance.dataset(url).get_fragments()}
    assert ("bitmap" in kinds) == (count > 10)


def test_restored_rows_are_added_again(url: str) -> None:
    lance.dataset(url).delete(f"id = 7 OR id = {N - 1}")
    lance.dataset(url, version=1).restore()
    ((removed, added),) = (ids_of(changes) for changes in steps(url, 2))
    assert set(added) - set(removed) == {7, N - 1}
    assert set(removed) <= set(added)


def test_a_version_between_may_be_gone(url: str) -> None:
    upsert(url, [3], 1)
    lance.dataset(url).optimize.compact_files()
    upsert(url, [4], 1)
    manifests = sorted(Path(url, "_versions").glob("*.manifest"))  # the newest first
    manifests[1].unlink()
    ((removed, added),) = (ids_of(changes) for changes in steps(url, 1))
    assert removed == added == [*range(N)]


def test_columns_that_differ_are_no_changes_of_rows(url: str) -> None:
    lance.dataset(url).add_columns({"other": "id + 1"})
    newest = lance.dataset(url)
    assert changes_between(url, lance.dataset(url, version=1), newest, "id", None) is None
    changes = changes_between(url, lance.dataset(url, version=1), newest, "id", ["id", "content"])
    assert changes is not None
    assert ids_of(changes) == ([], [])


def test_a_clone_is_followed(url: str, tmp_path: Path) -> None:
    upsert(url, [1], 1)
    clone = str(tmp_path / "clone.lance")
    lance.dataset(url).shallow_clone(clone, 2)
    upsert(clone, [2], 2)
    before = contents(lance.dataset(clone, version=2))
    for changes in steps(clone, 2):
        applied(before, changes)
    assert before == contents(lance.dataset(clone))


def applied(content: dict[int, int], changes: Changes) -> None:
    for ids in changes.removed:
        for id in ids:
            assert isinstance(id, int)
            del content[id]
    for table in changes.added:
        new = dict(zip(table["id"].to_pylist(), table["content"].to_pylist(), strict=True))
        assert not content.keys() & new.keys()
        content |= new


@pytest.mark.parametrize("seed", range(4))
def test_any_writes_are_followed(url: str, seed: int) -> None:
    random, since = np.random.default_rng(seed), 1
    before = contents(lance.dataset(url))
    for content in range(1, 13):
        dataset = lance.dataset(url)
        some = random.choice(N + 100, 40, replace=False).tolist()
        match random.integers(6):
            case 0 | 1:
                upsert(url, some, content)
            case 2:
                dataset.delete(f"id IN ({', '.join(map(str, some))})")
            case 3:
                dataset.update({"content": str(content)}, where=f"id < {random.integers(N)} AND id % 97 = {seed}")
            case 4:
                dataset.optimize.compact_files()
            case _:
                dataset.restore() if random.random() < 0.5 else lance.dataset(url, version=since).restore()
        if random.random() < 0.4:
            for changes in steps(url, since):
                applied(before, changes)
            since = lance.dataset(url).version
            assert before == contents(lance.dataset(url))
