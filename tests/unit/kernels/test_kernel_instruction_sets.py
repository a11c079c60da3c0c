"""The kernels of a processor that this one is not, NEON's, under an emulator; and what their object files hold.

Those of this processor, at each of its levels, are tested where they are used, in `test_attend_fused_kernel.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import softdb

KERNELS = Path(softdb.__file__).parent / "kernels"
LEVELLED = [
    path
    for path in sorted((KERNELS / "native").glob("*.cc"))
    if not path.stem.startswith(("bind", "module", "dispatch"))
]
TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user", "nm": "binutils"}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LEVELLED, reason="the kernels' sources are not in a wheel")]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """NEON's kernels and their float64 reference loops, compiled."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian: {package})")
    folder = tmp_path_factory.mktemp("neon")
    found = re.search(r"set\(OPTIONS (.+?)\)", (KERNELS / "CMakeLists.txt").read_text())
    assert found is not None
    options = ["-std=gnu++17", *found[1].split(), "-DSOFTDB_LEVEL=neon", f"-I{KERNELS / 'native'}"]

    def compiled(path: Path) -> Path:
        out = folder / f"{path.stem}.o"
        own = [] if path in LEVELLED else ["-fexceptions"]
        subprocess.run(["aarch64-linux-gnu-g++", *options, *own, "-c", str(path), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled, [*LEVELLED, Path(__file__).parent / "standalone.cc"]))


def test_neon_under_an_emulator(objects: list[Path]) -> None:
    program = objects[0].parent / "standalone"
    subprocess.run(["aarch64-linux-gnu-g++", "-static", *map(str, objects), "-o", str(program)], check=True)
    actual = subprocess.run(["qemu-aarch64", str(program)], capture_output=True, text=True)
    assert actual.returncode == 0, actual.stdout
    assert int(actual.stdout.split()[0]) > 100_000


def test_a_level_shares_no_function_with_another(objects: list[Path]) -> None:
    """The linker keeps one of several equal functions, perhaps the one that an older processor cannot run."""
    for path in objects[:-1]:
        listed = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
        weak = [line for line in listed.splitlines() if re.match(r"[0-9a-f]+ [WVu] ", line)]
        assert [line for line in weak if "softdb::neon::" not in line] == [], path.name
