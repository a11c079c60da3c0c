"""Draw the committed pictures again: those of the examples in docs/images/examples, and those of the benchmarks.

    python .ci/pictures.py [NAME ...]

Examples run in full, some minutes in all; with names only these are drawn. `fine_tune.py` has the picture of its
benchmark. A palette of 256 colours makes the files a third as large.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem not in ("shared", "fine_tune"))


def run(*words: str | Path) -> None:
    """Run a Python program of the checkout; raise if it fails."""
    path = f"{ROOT / 'tests' / 'checked'}:{ROOT}"  # each picture is checked, as in the tests
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # sums by one thread have the same order each time
    subprocess.run([sys.executable, *words], check=True, env=env, stdout=subprocess.DEVNULL)


def pack(picture: Path) -> None:
    """Write a picture with a palette."""
    Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or EXAMPLES:
            if name in EXAMPLES:
                start, drawn = time.perf_counter(), Path(folder) / f"{name}.png"
                run(ROOT / "examples" / f"{name}.py", "--plot", drawn)
                pack(drawn)
                (ROOT / "docs" / "images" / "examples" / drawn.name).write_bytes(drawn.read_bytes())
                print(f"{name:20} {time.perf_counter() - start:4.0f} s", flush=True)
    if not names or "benchmarks" in names:
        scale = ROOT / "docs" / "images" / "cluster-scale.png"
        run(ROOT / "benchmarks" / "pictures.py")
        run(ROOT / "benchmarks" / "scaling_model.py", "--plot", scale)
        for picture in (scale, *(ROOT / "benchmarks" / "results").glob("*.png")):
            pack(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
