"""Every verb, reopening, crashes and a second reader in random order, against a dict and numpy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import apsw
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from model_disk import IndexedMachine, SmallMachine
from model_machine import DatabaseMachine
from tap import Failing, step, tapped

import softdb
from softdb.filters import masks, matching
from softdb.index import finder
from softdb.store import backup, catalog, compact, segments, soundness
from softdb.store import writer as writing

exhaustive = pytest.mark.exhaustive


Machine = Callable[[Path, Counter[str]], DatabaseMachine]


def run(machine: Machine, runs: int, steps: int, start: str, root: Path, tally: Counter[str]) -> None:
    """So many runs of so many operations; the first disagreement is shrunk and printed as a program."""

    def fresh() -> DatabaseMachine:
        return machine(root, tally)

    tally["model: disagreements"] += 0
    chosen = settings(
        max_examples=runs,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=set(Phase) if runs >= 25 else {Phase.generate},  # shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )
    try:
        # the type: whatever makes machines will do
        run_state_machine_as_test(seed(start)(fresh), settings=chosen)  # type: ignore[arg-type]
    except BaseException:
        tally["model: disagreements"] += 1
        raise


@pytest.fixture(params=["usual", "small"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The store's own limits, or such small ones that every border is crossed all the time."""
    small: list[tuple[ModuleType, str, int]] = [
        (segments, "FIRST_ROWS", 4),
        (segments, "MAX_ROWS", 64),
        (compact, "MAX_ROWS", 64),
        (soundness, "AT_ONCE", 8),
        (segments, "AT_ONCE", 8),
        (segments, "BACKGROUND_BYTES", 64),
        (catalog, "CHUNK", 32),
        (backup, "SLOTS", 8),
        (matching, "MAX_FILTERS", 3),
        (masks, "FEW", 2),
        (masks, "LOOKUP", 1),
        (matching, "MAX_APPENDED", 4),
        (finder, "ABSORB_ROWS", 100),
    ]
    monkeypatch.setattr(writing, "DELAY", 3600)  # flushes must not depend on time
    if request.param == "small":
        for module, name, value in small:
            monkeypatch.setattr(module, name, value)
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize(
    ("runs", "steps", "start"),
    [
        pytest.param(3, 60, 0, id="quick"),
        pytest.param(14, 60, 0, id="slow", marks=pytest.mark.slow),
        *(pytest.param(100, 250, n, id=f"exhaustive-{n}", marks=exhaustive) for n in (1, 2, 3)),
    ],
)
def test_the_database_agrees_with_the_model(
    tmp_path: Path, tally: Counter[str], limits: str, runs: int, steps: int, start: int
) -> None:
    run(SmallMachine, runs, steps, f"{limits} {start}", tmp_path, tally)


@pytest.mark.parametrize(
    ("runs", "steps", "start"),
    [
        pytest.param(1, 50, 0, id="quick"),
        pytest.param(3, 50, 0, id="slow", marks=pytest.mark.slow),
        pytest.param(25, 200, 1, id="exhaustive", marks=exhaustive),
    ],
)
def test_an_indexed_database_agrees_with_the_model(
    tmp_path: Path, tally: Counter[str], limits: str, runs: int, steps: int, start: int
) -> None:
    run(IndexedMachine, runs, steps, f"{limits} {start}", tmp_path, tally)


def test_a_failed_close_releases_the_lock(tmp_path: Path) -> None:
    with tapped(Failing(step("unlink catalog.sqlite-wal")), inside=tmp_path):
        db = softdb.open(tmp_path / "db", dim=1)
        with contextlib.suppress(apsw.Error, softdb.SoftDBError):
            db.close()
    softdb.open(tmp_path / "db").close()
