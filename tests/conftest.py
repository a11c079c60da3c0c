from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TALLY = pytest.StashKey[Counter[str]]()

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait ruin a shared machine
os.environ.setdefault("TRITON_INTERPRET", "1")  # as Triton is imported; what compiles its kernels takes it out again
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it is, said aloud: else Triton warns
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background; it is inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def key_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key under which index files are signed, kept away from the user's own."""
    path = tmp_path_factory.getbasetemp() / "index.key"
    monkeypatch.setenv("SOFTDB_KEY_FILE", str(path))
    return path


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU count as a device's: Triton's interpreter serves them."""
    pytest.importorskip("triton")
    monkeypatch.setattr(import_module("softdb.device.availability"), "PRETENDED", True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path for a test's database."""
    return tmp_path / "db"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def gpu() -> Any:
    """The GPU, where there is one."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here; docs/gpu.md says how to run these tests on one")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """A torch.device that is not the CPU: a pretended one everywhere, and a GPU where there is one."""
    return gpu() if request.param == "cuda" else request.getfixturevalue("pretended").device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def anywhere(request: pytest.FixtureRequest) -> Any:
    """The CPU, and a GPU where there is one."""
    import torch

    return gpu() if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def cuda() -> Any:
    """A GPU, or the test is skipped."""
    return gpu()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The device that is pretended, which notes what crosses to it and back."""
    from doubles.pretended import NAME, Module, Pretended, autocast

    monkeypatch.setattr("torch.autocast", autocast)
    monkeypatch.setattr(f"torch.{NAME}", Module(), raising=False)
    yield Pretended()
    Pretended.noting = None


def arguments(case: pytest.Function) -> set[tuple[str, type, object]]:
    found = set()
    for name, value in case.callspec.params.items():
        try:
            hash(value)
        except TypeError:
            value = id(value)
        found.add((name, type(value), value))
    return found


def quick_cases(cases: list[pytest.Function], most: int) -> list[pytest.Function]:
    """So few of a test's cases that each value of each argument comes up, or `most` of them."""
    wanted = {case: arguments(case) for case in cases}
    chosen: list[pytest.Function] = []
    while len(chosen) < most and any(wanted.values()):
        best = max(cases, key=lambda case: len(wanted[case]))
        chosen.append(best)
        shown = set(wanted[best])
        for values in wanted.values():
            values -= shown
    return chosen


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow those cases of a parametrised test that only combine what others show; see pyproject's `few`."""
    tests: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        marked = item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not marked:
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        few = cases[0].get_closest_marker("few")
        quick = quick_cases(cases, few.args[0] if few else len(cases))
        for case in cases:
            if case not in quick:
                case.add_marker("slow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="a JSON file that takes what the tests of trust have counted")
    parser.addoption("--minutes", type=float, help="interrupt the run after so long; its figures say so")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("minutes")
    if minutes is None:
        return

    def over(*_: object) -> None:
        if not counted(config)["cut off"]:  # what the interrupted test counts as it ends is no figure
            config.stash[TALLY] = Counter({**counted(config), "cut off": 1})
        raise KeyboardInterrupt("the minutes of this run are over")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes, 10)  # again: a test may take the first for one of its own


def counted(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(TALLY, Counter())


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Counter[str]:
    """Counts of a run by name ("kills", "kills: acknowledged records lost"), printed at its end."""
    return counted(request.config)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: what a worker has counted
def pytest_testnodedown(node: Any) -> None:
    counted(node.config).update(getattr(node, "workeroutput", {}).get("tally", {}))


@pytest.hookimpl(trylast=True)  # when the workers are done
def pytest_sessionfinish(session: pytest.Session) -> None:
    config, counts = session.config, counted(session.config)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if hasattr(config, "workeroutput"):
        config.workeroutput["tally"] = dict(counts)
        return
    path = config.getoption("figures")
    if path is not None and counts:
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **counts}, indent=1, sort_keys=True) + "\n")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for name, count in sorted(counted(config).items()):
        terminalreporter.write_line(f"{name}: {count:,}")
