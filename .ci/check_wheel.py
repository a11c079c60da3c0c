"""A wheel holds what it should and nothing else: python .ci/check_wheel.py [--version 1.2.3] WHEEL …"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

NEEDED = (
    "softdb/py.typed",
    "softdb/__init__.py",
    "softdb/data/wordnet/keys.npy",
    "softdb/data/wordnet/LICENSE-WordNet.txt",
)
FOREIGN = ("tests/", "benchmarks/", "docs/", "examples/", "softdb/kernels/native/", "softdb/kernels/CMakeLists.txt")
LEFTOVERS = ("__pycache__/", "/CMakeFiles/", "/.cmake/")  # of a build or a run in the checkout
MOST = 40 << 20  # bytes


def faults(wheel: Path, version: str | None) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    found = [f"lacks {name}" for name in NEEDED if name not in names]
    found += [f"holds {name}" for name in names if name.startswith(FOREIGN) or any(part in name for part in LEFTOVERS)]
    kernels = [name for name in names if name.startswith("softdb/kernels/_native")]
    if len(kernels) != 1:
        found.append(f"holds {len(kernels)} modules of kernels, not 1" if kernels else "lacks the kernels")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        found.append("lacks the licence")
    if version is not None and wheel.name.split("-")[1] != version:
        found.append(f"is of version {wheel.name.split('-')[1]}, not {version}")
    if wheel.stat().st_size > MOST:
        found.append(f"is of {wheel.stat().st_size >> 20} MB")
    return found


def main() -> None:
    """Say what is wrong and fail, or say nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version")
    parser.add_argument("wheels", nargs="+", type=Path)
    asked = parser.parse_args()
    said = [f"{wheel.name} {fault}" for wheel in asked.wheels for fault in faults(wheel, asked.version)]
    if said:
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
