"""Power cuts at every step: acknowledged records are there, and unacknowledged batches whole or absent."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from power import Explorer, Judge, Violation, fates
from power_disk import DROP, KEEP, TEARS, Disk, Fate, Image, Step
from power_log import History, Record, put, recording, taken
from power_mutate import mutations, violation, without
from power_reasons import NOT_NEEDED, TOGETHER
from power_twice import after_a_cut, after_a_kill, commits_in_the_air, with_a_named_wal
from power_work import a_life, another_model, labels, relaxed, rounds, without_values
from worlds import holding

import softdb
from softdb.index import build
from softdb.store import disk, files, segments

Workload = Callable[[Record, Path], None]
SEED = 0


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Folder for records and images, in memory if possible, as no real disk is tested."""
    memory = Path("/dev/shm")
    above = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None)).resolve()
    yield above / "root"
    shutil.rmtree(above)


@pytest.fixture(autouse=True)
def key_inside(root: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Keep the signing key on the disk that loses power, too, and silence the warning about ignored indexes."""
    caplog.set_level("ERROR", "softdb")
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(root / "state" / "softdb" / "index.key"))


@pytest.fixture(scope="module")
def recorded(root: Path) -> Callable[[Workload], History]:
    """The log of a workload, recorded once."""
    known: dict[str, History] = {}

    def record_once(workload: Workload) -> History:
        if workload.__name__ not in known:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            with pytest.MonkeyPatch.context() as patch, recording(root) as record:
                patch.setattr(build, "LEAST", 20)  # records that an index is made of
                patch.setattr(segments, "BACKGROUND_BYTES", 1000)  # from which on a thread writes the columns
                patch.setenv("SOFTDB_KEY_FILE", str(root / "state" / "softdb" / "index.key"))
                workload(record, root)
            assert replayed(record.history) == taken(root), "the log does not lead to what the disk holds"
            known[workload.__name__] = record.history
        return known[workload.__name__]

    return record_once


def replayed(history: History) -> Image:
    played = Disk(history.image)
    for place, step in enumerate(history.steps):
        played.do(place, step)
    return played.after(lambda _: KEEP)[0]


def explored(name: str, explorer: Explorer, tally: Counter[str], **how: Any) -> None:
    """Raise AssertionError where a cut loses something."""
    explorer.tally = tally
    found = explorer.explore(**how)
    explorer.tally = Counter()  # further checks are no cuts of this log
    tally["power loss: acknowledged records lost"] += found is not None
    assert found is None, f"{name}, seed {explorer.seed}: {found}"


# -- every cut -------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("workload", "share", "random_ones", "tears"),
    [
        (a_life, 0.02, 0, 1),
        (relaxed, 0.03, 0, 1),
        (a_life, 0.1, 0, 1),
        (without_values, 0.2, 0, 1),
        (relaxed, 0.1, 0, 1),
        (another_model, 0.02, 0, 1),
        *(
            pytest.param(workload, 1, 2, 2, marks=pytest.mark.exhaustive)
            for workload in (a_life, without_values, labels, rounds, relaxed, another_model)
        ),
    ],
)
def test_no_cut_loses_what_was_acknowledged(
    workload: Workload,
    share: float,
    random_ones: int,
    tears: int,
    root: Path,
    recorded: Callable[[Workload], History],
    tally: Counter[str],
) -> None:
    history = recorded(workload)
    explorer = Explorer(history, Judge(root, history.timelines), SEED)
    explored(workload.__name__, explorer, tally, random_ones=random_ones, tears=tears, share=share)


def moments_to_kill(history: History, everything: bool) -> list[tuple[str, int]]:
    """Commits in the air, all or the last of each kind and those of compaction; a directory; or any moment."""
    every = commits_in_the_air(history)
    last = dict(every)
    made = next(i for i, step in enumerate(history.steps) if step.label == "create: make directory")
    chosen = [("creation", made + 1)]
    chosen += [(name, place) for name, place in every if everything or name == "compact" or last[name] == place]
    if everything:
        rng = random.Random(SEED)
        chosen += [("any", place) for place in rng.sample(sorted(with_a_named_wal(history)), 40)]
    return chosen


def without_opening_syncs(steps: list[Step]) -> list[Step]:
    """Steps of a second process less the syncs of the WAL until it writes itself: ours, or that of a checkpoint."""
    opened = max(place for place, step in enumerate(steps) if step.act == "begin")
    return [
        step for place, step in enumerate(steps) if place > opened or step.label != "again: sync catalog.sqlite-wal"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_no_cut_after_a_kill_loses_what_was_acknowledged(
    everything: bool, root: Path, recorded: Callable[[Workload], History], tally: Counter[str]
) -> None:
    """A killed process leaves commits that others see and no sync covers; then the power goes under the next one."""
    history = recorded(a_life)
    missed = []
    for name, place in moments_to_kill(history, everything):
        second = after_a_kill(root, history, place)
        assert second is not None
        start = next(i for i, step in enumerate(second.steps) if step.label.startswith("again"))
        explorer = Explorer(second, Judge(root, second.timelines), SEED)
        how = {"start": start, "share": 0.3 if everything else 0.2, "random_ones": 2 * everything}
        explored(f"killed in {name} after step {place}", explorer, tally, **how)
        if any(step.label == "again: unlink keys" for step in second.steps):
            second.steps[:] = without_opening_syncs(second.steps)
            missed.append(explorer.explore(0, start))
    assert any(missed), "nothing shows that a writer must settle the WAL before it removes a file"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "share"), [(6, 0.1), pytest.param(40, 0.3, marks=pytest.mark.exhaustive)])
def test_no_cut_within_the_recovery_from_a_cut_loses_anything(
    count: int, share: float, root: Path, recorded: Callable[[Workload], History], tally: Counter[str]
) -> None:
    history = recorded(a_life)
    rng = random.Random(SEED)
    for place in sorted(rng.sample(range(60, len(history.steps)), count)):
        played = Disk(history.image)
        for number, step in enumerate(history.steps[:place]):
            played.do(number, step)
        chosen = rng.choice(list(fates(played.waiting(), None, rng, 3, 1)))
        image, _ = played.after(lambda one, chosen=chosen: chosen.get(one, KEEP))  # type: ignore[misc]
        second = after_a_cut(root, image, history.timelines[0])
        assert second is not None, f"after step {place}, fates {chosen}: no database"
        explorer = Explorer(second, Judge(root, second.timelines), SEED)
        explored(
            f"cut after step {place}, fates {chosen}, and in the recovery", explorer, tally, random_ones=0, share=share
        )


def test_a_reader_of_an_unfinished_creation_finds_no_database(
    root: Path, recorded: Callable[[Workload], History]
) -> None:
    history = recorded(a_life)
    played = Disk(history.image)
    for place, step in enumerate(history.steps):
        played.do(place, step)
        if step.act == "acknowledged":
            return
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        put(played.after(lambda _: KEEP)[0], root)
        with contextlib.suppress(softdb.NotADatabase):
            softdb.open(root / history.timelines[0].path, mode="r").close()


# -- every sync, every order -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_each_sync_and_each_order_is_needed_or_has_its_reason_not_to_be(
    limit: int, root: Path, recorded: Callable[[Workload], History], tally: Counter[str]
) -> None:
    history = recorded(a_life)
    explorer = Explorer(history, Judge(root, history.timelines), SEED)
    silent, results = list[str](), dict[str, Violation]()
    for mutation in mutations(history):
        violated = violation(explorer, mutation, limit)
        tally["power loss: mutations tried"] += 1
        tally["power loss: mutations found"] += violated is not None
        if violated is None:
            silent.append(mutation.name)
        else:
            results[mutation.name] = violated
    unexplained = [name for name in silent if not any(fnmatch.fnmatchcase(name, one) for one in NOT_NEEDED)]
    assert not unexplained, f"seed {SEED}: no cut shows that these are needed, and no reason is given: {unexplained}"
    needed = [f"{name}: {results[name]}" for one in NOT_NEEDED for name in fnmatch.filter(results, one)]
    assert not needed, f"seed {SEED}: these are said not to be needed, and a cut shows that they are: {needed}"
    idle = [one for one in NOT_NEEDED if not fnmatch.filter(silent, one)]
    assert not idle, f"these reasons are of no step: {idle}"


@pytest.mark.few(1)
@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_of_two_syncs_that_cover_each_other_one_is_needed(
    names: tuple[str, str], root: Path, recorded: Callable[[Workload], History]
) -> None:
    history = recorded(a_life)
    explorer = Explorer(history, Judge(root, history.timelines), SEED)
    assert violation(explorer, without(history, *names), 300) is not None, f"seed {SEED}"


def test_directories_that_the_user_made_are_synced(root: Path, recorded: Callable[[Workload], History]) -> None:
    history = recorded(without_values)
    explorer = Explorer(history, Judge(root, history.timelines), SEED)
    mutation = without(history, "create: sync_directory directory (make directory)")
    assert violation(explorer, mutation, 300) is not None, f"seed {SEED}"


def test_a_durable_insert_syncs_each_file_once(recorded: Callable[[Workload], History]) -> None:
    steps = recorded(a_life).steps
    _, second, third = [i for i, step in enumerate(steps) if step.act == "acknowledged"][:3]
    syncs = [step.label for step in steps[second:third] if step.act == "sync"]
    assert syncs == ["append: sync keys", "append: sync values", "append: sync catalog.sqlite-wal"]


def unsynced(path: Path, data: bytes) -> None:
    """Write a new or existing file and leave its sync to others."""
    descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT)
    disk.write(descriptor, data, 0)
    disk.close(descriptor)


def copied(root: Path) -> None:
    with files.open_regular(root / "old") as source:
        files.copy(source, root / "new")
    files.sync_directory(root)


def published(root: Path) -> None:
    unsynced(root / "fresh", b"new")
    files.publish(root / "fresh", root / "new")


def synced(root: Path) -> None:
    unsynced(root / "old", b"X")
    files.sync(root / "old")


ON_DISK: dict[str, tuple[Callable[[Path], Any], Image]] = {
    "create": (lambda root: files.create(root / "new", b"head", 9), {"new": b""}),  # its name
    "write_at": (lambda root: files.write_at(root / "old", b"new", 1), {"old": b"onew"}),
    "copy": (copied, {"new": b"old"}),
    "publish": (published, {"new": b"new"}),
    "write_whole": (lambda root: files.write_whole(root / "old", b"new"), {"old": b"new"}),
    "make_once": (lambda root: files.make_once(root / "new", b"once"), {"new": b"once"}),
    "make_directory": (lambda root: files.make_directory(root / "a" / "b"), {"a": None, "a/b": None}),
    "sync": (synced, {"old": b"Xld"}),
}


@pytest.mark.parametrize("name", ON_DISK)
def test_each_function_of_files_syncs_before_it_returns(root: Path, name: str) -> None:
    """Whatever SQLite syncs besides, where the store uses it."""
    step, expected = ON_DISK[name]
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    (root / "old").write_bytes(b"old")
    with recording(root, History(taken(root), [], [])) as record:
        step(root)
    played = Disk(record.history.image)
    for place, one in enumerate(record.history.steps):
        played.do(place, one)
    assert played.after(lambda _: DROP)[0] == {"old": b"old", **expected}


# -- checks of the simulator -------------------------------------------------------------------------------------------


def model(*steps: Step) -> Disk:
    """A disk with a durable file, `old`, after some steps."""
    made = Disk({"old": b"a" * 2000})
    for place, step in enumerate(steps):
        made.do(place, step)
    return made


OLD, NEW, FOLDER = 1, 2, 0
WRITE = Step("write", "write", OLD, offset=1000, data=b"b" * 2000)
CREATE = Step("create", "entry", FOLDER, entries=(("new", NEW),), makes="file")
RENAME = Step("rename", "entry", FOLDER, entries=(("new", None), ("old", NEW)))


def test_a_write_without_a_sync_may_be_lost_and_with_one_not() -> None:
    whole = b"a" * 1000 + b"b" * 2000
    assert model(WRITE).after(lambda _: DROP)[0] == {"old": b"a" * 2000}
    assert model(WRITE).after(lambda _: KEEP)[0] == {"old": whole}
    assert model(WRITE, Step("sync", "sync", OLD)).after(lambda _: DROP)[0] == {"old": whole}
    assert model(WRITE, Step("sync", "sync", FOLDER)).after(lambda _: DROP)[0] == {"old": b"a" * 2000}


def test_a_file_may_be_without_its_name_and_a_name_without_its_bytes() -> None:
    write = Step("write", "write", NEW, data=b"c")
    synced = model(CREATE, write, Step("sync", "sync", NEW))
    assert "new" not in synced.after(lambda _: DROP)[0]
    assert model(CREATE, write, Step("sync", "sync", FOLDER)).after(lambda _: DROP)[0]["new"] == b""
    renamed = model(CREATE, write, RENAME)
    assert renamed.after(lambda place: DROP if place == 1 else KEEP)[0] == {"old": b""}
    assert renamed.after(lambda place: DROP if place == 2 else KEEP)[0] == {"new": b"c", "old": b"a" * 2000}


@pytest.mark.parametrize("kind", TEARS)
def test_a_torn_write_changes_nothing_outside_its_range(kind: str) -> None:
    seen = set()
    for seed in range(20):
        torn = model(WRITE).after(lambda _, seed=seed: Fate(kind, seed))[0]["old"]  # type: ignore[misc]
        assert torn is not None
        assert torn[:1000] == b"a" * 1000
        assert len(torn) <= 3000
        seen.add(torn)
    whole = b"a" * 1000 + b"b" * 2000
    assert len(seen - {whole}) >= (1 if kind == "zeros" else 4)


def test_every_mixture_of_a_few_steps_is_tried() -> None:
    waiting = model(WRITE, CREATE, RENAME).waiting()
    tried = {tuple(one.get(place, KEEP) for place in range(3)) for one in fates(waiting, None, random.Random(0), 0, 6)}
    assert {tuple(KEEP if bit & 1 << i else DROP for i in range(3)) for bit in range(8)} <= tried
    assert {fate.kind for one in tried for fate in one} == {"keep", "drop", *TEARS}


def test_a_path_through_a_link_is_synced_at_its_target(tmp_path: Path) -> None:
    (tmp_path / "real" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "other").symlink_to(tmp_path / "real" / "empty")
    for path in (tmp_path / "link" / "db", tmp_path / "other"):
        holding([[1, 2]], ids=["a"], path=path).close()
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == ["db", "empty"]
    assert (tmp_path / "real" / "empty" / "catalog.sqlite").exists()
