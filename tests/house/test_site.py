"""What is published is complete: wheels, and the version."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path

import softdb

ROOT = Path(__file__).parents[2]

WHOLE = [
    "softdb/py.typed", "softdb/__init__.py", "softdb/data/wordnet/keys.npy",
    "softdb/data/wordnet/LICENSE-WordNet.txt", "softdb/kernels/_native.so", "softdb-1.0.dist-info/licenses/LICENSE",
]  # fmt: skip


def faults(wheel: Path, version: str | None = None) -> list[str]:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[str] = module.faults(wheel, version)
    return found


def test_a_wheel_that_lacks_something_is_not_published(tmp_path: Path) -> None:
    wheel = tmp_path / "softdb-1.0-py3-none-any.whl"
    for left_out in range(len(WHOLE)):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in WHOLE[:left_out] + WHOLE[left_out + 1 :]:
                archive.writestr(name, "")
        assert len(faults(wheel)) == 1
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*WHOLE, "tests/test_a.py"]:
            archive.writestr(name, "")
    assert faults(wheel, "1.1") == ["holds tests/test_a.py", "is of version 1.0, not 1.1"]


def test_a_wheel_with_leftovers_of_the_checkout_is_not_published(tmp_path: Path) -> None:
    wheel = tmp_path / "softdb-1.0-py3-none-any.whl"
    left = ["softdb/kernels/_native.cpython-311.so", "softdb/kernels/CMakeFiles/a.o", "softdb/__pycache__/a.pyc"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*WHOLE, *left]:
            archive.writestr(name, "")
    assert faults(wheel) == [f"holds {left[1]}", f"holds {left[2]}", "holds 2 modules of kernels, not 1"]


def test_the_version_stands_in_one_place() -> None:
    stated = [
        re.search(r'^version[ =:]+"?([\d.]+)', (ROOT / name).read_text(), re.M)
        for name in ("pyproject.toml", "CITATION.cff")
    ]
    assert [match and match[1] for match in stated] == [softdb.__version__] * 2
