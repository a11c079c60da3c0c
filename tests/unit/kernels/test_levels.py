"""The kernels of every level: this processor's natively, NEON's by an emulator; and what their object files hold."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import softdb
from softdb import kernels

KERNELS = Path(softdb.__file__).parent / "kernels"
OPTIONS = re.search(r"set\(OPTIONS (.+?)\)", (KERNELS / "CMakeLists.txt").read_text()) if KERNELS.exists() else None
SOURCES = sorted((KERNELS / "native").glob("*.cc"))
LEVELLED = [path for path in SOURCES if not path.stem.startswith(("bind", "module", "dispatch"))]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCES, reason="the kernels' sources are not in a wheel"),
]


def tool(name: str, package: str) -> str:
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} (Debian: {package})")
    return name


def compiled(compiler: str, level: str, out: Path, *more: str) -> None:
    assert OPTIONS is not None
    march = [] if level == "neon" else [f"-march=x86-64-{level}"]
    options = ["-std=gnu++17", *OPTIONS[1].split(), "-Wno-maybe-uninitialized", f"-DSOFTDB_LEVEL={level}", *march]
    subprocess.run([compiler, *options, f"-I{KERNELS / 'native'}", *more, "-o", str(out)], check=True)


def test_neon_under_an_emulator(tmp_path: Path) -> None:
    compiler = tool("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    emulator = tool("qemu-aarch64", "qemu-user")
    program = tmp_path / "standalone"
    files = [str(path) for path in [*LEVELLED, Path(__file__).parent / "standalone.cc"]]
    compiled(compiler, "neon", program, "-static", *files)
    found = subprocess.run([emulator, str(program)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert int(found.stdout.split()[0]) > 100_000


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86-64")
@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_each_level_of_x86(level: str, tmp_path: Path) -> None:
    compiler = tool("g++", "g++")
    if not kernels.available() or level not in kernels.native().levels():
        pytest.skip(f"this processor has no x86-64-{level}")
    program = tmp_path / "standalone"
    compiled(compiler, level, program, *(str(p) for p in [*LEVELLED, Path(__file__).parent / "standalone.cc"]))
    found = subprocess.run([str(program)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86-64")
@pytest.mark.parametrize("path", LEVELLED, ids=lambda path: path.stem)
def test_a_level_shares_no_function_with_another(path: Path, tmp_path: Path) -> None:
    """The linker keeps one of several equal functions, perhaps the one that an older processor cannot run."""
    compiler, lister = tool("g++", "g++"), tool("nm", "binutils")
    compiled(compiler, "v3", tmp_path / "one.o", "-c", str(path))
    listed = subprocess.run([lister, "-C", str(tmp_path / "one.o")], capture_output=True, text=True, check=True).stdout
    weak = [line for line in listed.splitlines() if re.match(r"[0-9a-f]+ [WVu] ", line)]
    assert [line for line in weak if "softdb::v3::" not in line] == []
