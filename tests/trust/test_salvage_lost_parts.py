"""Salvage of databases that lost tables, settings, tree roots, logs or files, and beside disk errors."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest
from hostile_catalog import sql
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import State, differences, held
from rot_intact import salvaged, wrong
from rot_worlds import Damage, World, files_of, make
from tap import Failing, tapped
from worlds import holding

import softdb
from softdb.salvaging import placing, run, sifting

# SQLite says twice what failed: as an exception, and where a file's method cannot raise, as one that was ignored
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ["plain", "compacted", "logged"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {name: make(name, folder / name) for name in NAMES}


@pytest.fixture
def copied(worlds: dict[str, World], tmp_path: Path) -> Callable[[str], tuple[World, Path]]:
    def copy(name: str) -> tuple[World, Path]:
        shutil.copytree(worlds[name].path, tmp_path / "db")
        return worlds[name], tmp_path / "db"

    return copy


def zeroed(path: Path, name: str) -> None:
    """Zero the page that a tree begins on."""
    connection = apsw.Connection(str(path / "catalog.sqlite"))
    ((root,),) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (name,))
    connection.close()
    with (path / "catalog.sqlite").open("r+b") as file:
        file.seek((int(root) - 1) * 4096)
        file.write(bytes(4096))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("table", ["segments", "gaps", "tombstones", "state", "indexes"])
def test_records_need_no_other_table(
    copied: Callable[[str], tuple[World, Path]], name: str, table: str, tmp_path: Path
) -> None:
    world, path = copied(name)
    sql(f"DELETE FROM {table}")(path)
    assert differences(salvaged(path, tmp_path / "saved", world)[1], world.state) == ""


def test_records_are_found_without_segments_and_columns_of_rows(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path
) -> None:
    world, path = copied("compacted")
    sql("DELETE FROM segments", "DELETE FROM gaps")(path)
    for file in path.glob("rows-*"):
        file.unlink()
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert wrong(actual, world, []) == ""
    assert len(actual) == len(world.state), report


@pytest.mark.parametrize("statement", [
    "UPDATE segments SET first_row = first_row + 1", "UPDATE segments SET used = 0",
    "UPDATE segments SET segment = segment + 1000", "UPDATE segments SET capacity = 1048576",
])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_segments_that_lie_do_no_harm(
    copied: Callable[[str], tuple[World, Path]], name: str, statement: str, tmp_path: Path
) -> None:
    world, path = copied(name)
    sql(statement)(path)
    assert differences(salvaged(path, tmp_path / "saved", world)[1], world.state) == ""


@pytest.mark.parametrize("name", NAMES)
def test_files_that_have_changed_places_are_put_right(
    copied: Callable[[str], tuple[World, Path]], name: str, tmp_path: Path
) -> None:
    world, path = copied(name)
    for number, file in enumerate(sorted(path.glob("keys-*"))):
        file.rename(path / f"keys-{77 - number:08d}.npy")
    assert differences(salvaged(path, tmp_path / "saved", world)[1], world.state) == ""


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_guessed_from_headers_and_words(
    copied: Callable[[str], tuple[World, Path]], name: str, tmp_path: Path
) -> None:
    world, path = copied(name)
    sql("DELETE FROM settings")(path)
    with pytest.raises(softdb.BadInput, match="metric"):
        softdb.salvage(path, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    words = {one: value for one, value in world.schema.items() if one in ("metric", "num_classes")}
    report, actual = salvaged(path, tmp_path / "saved", world, **{"metric": "dot", **words})
    assert differences(actual, world.state) == ""
    assert "the settings are damaged" in report["notes"][0]


def test_values_without_settings_and_headers_are_asked_for(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path
) -> None:
    world, path = copied("logged")
    sql("DELETE FROM settings")(path)
    for file in path.glob("values-*.npy"):
        Damage(file.name, "flip", 11, 1).do(path, world.path)
    with pytest.raises(softdb.BadInput, match="value_dim cannot be read from the database any more; give value_dim="):
        softdb.salvage(path, tmp_path / "saved", metric="dot")
    _, actual = salvaged(path, tmp_path / "saved", world, metric="dot", value_dim=3)
    assert differences(actual, world.state) == ""


def test_words_must_agree_with_settings_that_are_intact(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path
) -> None:
    _, path = copied("plain")
    with pytest.raises(softdb.BadInput, match="salvage: dim=4 was asked for but this database has 3"):
        softdb.salvage(path, tmp_path / "saved", dim=4)


def large(path: Path, *, deleted: int = 0) -> State:
    """So many records that their trees have pages above their leaves."""
    rng = np.random.default_rng(3)
    ids, payloads = [f"r{i}" for i in range(3000)], [{"n": i} for i in range(3000)]
    with holding(rng.standard_normal((3000, 2)), payloads=payloads, ids=ids, path=path) as db:
        if deleted:
            db.delete([f"r{i}" for i in range(deleted)])
        return held(db)


@pytest.mark.few(1)
@pytest.mark.parametrize("deleted", [0, 2000])
@pytest.mark.parametrize("tree", ["records", "sqlite_autoindex_records_1"])
def test_leaves_are_found_without_the_page_above_them(tmp_path: Path, tree: str, deleted: int) -> None:
    """And pages that were freed are left where they are: on these are records that were deleted."""
    state = large(tmp_path / "db", deleted=deleted)
    zeroed(tmp_path / "db", tree)
    report = softdb.salvage(tmp_path / "db", tmp_path / "saved")
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert differences(held(db), state) == ""
    assert report["unconfirmed_records"] < 20  # entries on the page itself
    assert any("damaged pages" in note for note in report["notes"])


def test_the_first_page_may_be_lost(tmp_path: Path) -> None:
    state = large(tmp_path / "db")
    with (tmp_path / "db" / "catalog.sqlite").open("r+b") as file:
        file.write(bytes(4096))
    softdb.salvage(tmp_path / "db", tmp_path / "saved", metric="dot")
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert differences(held(db), state) == ""


def test_an_id_that_differs_between_table_and_index_is_left_out(tmp_path: Path) -> None:
    state = large(tmp_path / "db")
    data = (tmp_path / "db" / "catalog.sqlite").read_bytes()
    at = data.index(b'r1234{"n":1234}')  # in the table an id stands before its payload
    (tmp_path / "db" / "catalog.sqlite").write_bytes(data[:at] + b"r9" + data[at + 2 :])
    report = softdb.salvage(tmp_path / "db", tmp_path / "saved")
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert differences(held(db), {one: truth for one, truth in state.items() if one != "r1234"}) == ""
    assert report["lost"] == [
        {"row": 1234, "id": "r9234", "why": "catalog.sqlite: its id is 'r9234' in the table, 'r1234' in the index"}
    ]


def test_a_lost_index_leaves_ids_unconfirmed(copied: Callable[[str], tuple[World, Path]], tmp_path: Path) -> None:
    world, path = copied("plain")
    zeroed(path, "sqlite_autoindex_records_1")
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert differences(actual, world.state) == ""
    assert set(report["unconfirmed"]) == set(world.state)
    assert report["unconfirmed_records"] == len(world.state)


def test_a_deleted_record_does_not_come_back_where_the_index_is_lost(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path
) -> None:
    world, path = copied("plain")
    key = (path / "keys-00000000.npy").read_bytes()[128 + 3 * 12 : 128 + 4 * 12]
    sql(f"INSERT INTO records VALUES(3, 'r3', NULL, {zlib.crc32(key)}, NULL, NULL, NULL, NULL)")(path)
    zeroed(path, "sqlite_autoindex_records_1")
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert differences(actual, world.state) == ""
    assert report["lost"] == [{"row": 3, "id": "r3", "why": "it is marked as deleted"}]


@pytest.mark.slow
def test_hits_of_chance_are_no_places(tmp_path: Path) -> None:
    """A checksum has 32 bits: among many records and many slots some are alike."""
    rng, count = np.random.default_rng(5), 200_000
    scratch = apsw.Connection("")
    scratch.execute(sifting.TABLES)
    lost = ((row, f"r{row}", int(crc)) for row, crc in enumerate(rng.integers(0, 1 << 32, count)))
    with scratch:
        scratch.executemany("INSERT INTO records(row, id, key_crc) VALUES(?, ?, ?)", lost)
        file = placing._File(scratch, tmp_path, placing.ColumnSpec("keys", np.dtype(np.float32), (2,)), 0)
        file.crcs = rng.integers(0, 1 << 32, count)
        assert len(file._pairs()[0]) > 3
        file.search()
    assert scratch.execute("SELECT count(*) FROM records WHERE keys_slot >= 0").fetchall() == [(0,)]


def test_a_lost_log_is_reported_in_generations(copied: Callable[[str], tuple[World, Path]], tmp_path: Path) -> None:
    world, path = copied("logged")
    (path / "catalog.sqlite-wal").unlink()
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert differences(actual, world.states[0]) == ""
    assert report["notes"][0].startswith("3 generations are missing")


def test_strangers_triggers_and_views_are_not_run(copied: Callable[[str], tuple[World, Path]], tmp_path: Path) -> None:
    world, path = copied("plain")
    sql(
        "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",
        "ALTER TABLE records RENAME TO kept",
        "CREATE TABLE theirs(a, b, c, d, e, f)",
        "INSERT INTO theirs SELECT NULL, id || 'x', payload, key_crc, value_crc, payload_crc FROM kept",
        "CREATE VIEW records AS SELECT row, 'stranger' AS id, payload, key_crc, value_crc, payload_crc FROM kept",
        "CREATE INDEX field_6e00 ON kept(id)",
    )(path)
    report, actual = salvaged(path, tmp_path / "saved", world, metric="l2")
    assert "stranger" not in actual
    assert differences(actual, world.state) == "", report


def test_unreadable_bytes_are_lost_and_named(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, path = copied("logged")
    keys, read = (path / "keys-00000000.npy").stat().st_ino, os.pread

    def broken(descriptor: int, size: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == keys and offset <= 128 + 6 * 12 < offset + size:
            raise OSError(errno.EIO, "no more")
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", broken)
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert len(actual) == len(world.state) - 1
    assert wrong(actual, world, []) == ""
    assert [one["why"] for one in report["lost"]] == ["keys-00000000.npy: its key is not there as it was written"]


def test_the_destination_must_be_free_and_outside(copied: Callable[[str], tuple[World, Path]], tmp_path: Path) -> None:
    _, path = copied("plain")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "empty").mkdir()
    for place, why in ((tmp_path / "taken", "is taken"), (path, "is taken"), (path / "new", "is inside the database")):
        with pytest.raises(softdb.BadInput, match=why):
            softdb.salvage(path, place)
    with pytest.raises(softdb.NotADatabase, match=r"numpy\.load reads them"):
        softdb.salvage(tmp_path / "empty", tmp_path / "saved")
    (tmp_path / "empty" / "catalog.sqlite").write_bytes(bytes(9000))
    with pytest.raises(softdb.CorruptionError, match="no records that can be found"):
        softdb.salvage(tmp_path / "empty", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_database_that_is_written_to_is_not_salvaged(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path
) -> None:
    _, path = copied("plain")
    with softdb.open(path), pytest.raises(softdb.DatabaseLocked, match="writes to"):
        softdb.salvage(path, tmp_path / "saved")


def test_a_reader_of_this_process_keeps_its_locks(copied: Callable[[str], tuple[World, Path]], tmp_path: Path) -> None:
    """POSIX drops all of a process's locks on a file when it closes any descriptor of it."""
    if not Path("/proc/locks").exists():
        pytest.skip("this system does not show its locks")
    _, path = copied("plain")
    inode = (path / "catalog.sqlite").stat().st_ino
    with softdb.open(path, mode="r"):
        softdb.salvage(path, tmp_path / "saved")
        assert any(line.split()[5].endswith(f":{inode}") for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.parametrize("after", [0, 3, 10, 20, 30, 40])
def test_a_full_disk_leaves_nothing_behind(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path, after: int
) -> None:
    world, path = copied("logged")
    full = Failing(lambda op, n: n > after and op.name in ("write", "truncate", "sync"), errno.ENOSPC)
    try:
        with tapped(full, inside=tmp_path / "saved"):
            softdb.salvage(path, tmp_path / "saved")
    except softdb.WriteFailed:
        assert not (tmp_path / "saved").exists()
        softdb.salvage(path, tmp_path / "saved")
    with softdb.open(tmp_path / "saved", verify=True) as db:
        assert differences(held(db), world.state) == ""


@st.composite
def damages(draw: st.DrawFn, world: World) -> list[Damage]:
    """Some of every kind, to any file."""
    found = []
    for _ in range(draw(st.integers(1, 5))):
        file = draw(st.sampled_from(files_of(world)))
        size = (world.path / file).stat().st_size
        at = draw(st.integers(0, max(size - 1, 0)))
        kind = draw(st.sampled_from(["flip", "flip", "flip", "zero", "cut", "append", "delete", "swap"]))
        found.append(Damage(file, kind, at, draw(st.sampled_from([1, 2, 4, 8, 16, 64, 128, 255]))))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "count", [pytest.param(3000, id="full", marks=pytest.mark.exhaustive), pytest.param(40, id="quick")]
)
@pytest.mark.parametrize("name", NAMES)
def test_salvage_never_invents_a_record(
    worlds: dict[str, World], name: str, count: int, tmp_path: Path, tally: Counter[str]
) -> None:
    world = worlds[name]
    ever: dict[Any, list[Any]] = {}
    for state in world.states:
        for one, truth in state.items():
            ever.setdefault(one, []).append(truth)

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(damages(world))
    def tried(done: list[Damage]) -> None:
        for folder in ("db", "saved"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        shutil.copytree(world.path, tmp_path / "db")
        for damage in done:
            if (tmp_path / "db" / damage.file).exists() and (
                damage.kind != "flip" or damage.at < (tmp_path / "db" / damage.file).stat().st_size
            ):
                damage.do(tmp_path / "db", world.path)
        tally["salvage: damages tried"] += 1
        try:
            report, actual = salvaged(
                tmp_path / "db", tmp_path / "saved", world, metric=world.schema.get("metric", "dot")
            )
        except (softdb.NotADatabase, softdb.CorruptionError, softdb.BadInput):
            return
        for one, truth in actual.items():
            allowed = ever.get(one, []) if one not in report["unconfirmed"] else [t for ts in ever.values() for t in ts]
            assert truth in allowed, f"{one!r} was never stored so; {report}"

    tried()


def test_bytes_that_change_while_they_are_read_are_lost_and_named(
    copied: Callable[[str], tuple[World, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, path = copied("logged")
    keys, read = (path / "keys-00000000.npy").stat().st_ino, placing.read_slots

    def changing(file: Any, size: int, low: int, high: int) -> Any:
        for slot, one in zip(range(low, high), read(file, size, low, high), strict=True):
            other = os.fstat(file.fileno()).st_ino == keys and slot == 6
            yield bytes([one[0] ^ 1]) + one[1:] if other else one

    monkeypatch.setattr(run, "read_slots", changing)  # not that of `placing`: the first look finds all as it was
    report, actual = salvaged(path, tmp_path / "saved", world)
    assert len(actual) == len(world.state) - 1
    assert wrong(actual, world, []) == ""
    assert [one["why"] for one in report["lost"]] == ["its bytes changed while they were read"]
