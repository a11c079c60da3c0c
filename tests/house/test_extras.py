"""Each extra that a message or page names exists; without any extra, a module of softdb loads or names its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, str] = dict(
    re.findall(
        r"^([\w-]+) = \[(.*)\]",
        (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0],
        re.MULTILINE,
    )
)
MODULES = {
    "hnswlib",
    "haystack",
    "lance",
    "lancedb",
    "ray",
    "chromadb",
    "faiss",
    "scipy",
    "sklearn",
    "sentence_transformers",
}
MODULES |= {
    "typer",
    "rich",
    "triton",
    "mcp",
    "anyio",
    "starlette",
    "uvicorn",
    "matplotlib",
    "pyarrow",
    "h5py",
    "datasets",
}
MODULES |= {"langchain_core", "mteb", "transformers", "accelerate", "pandas", "polars", "safetensors"}
# what loads them has checked for their libraries
CHECKED_BEFORE = ("softdb.device.kernels.", "softdb.terminal", "softdb.tools.")
HARNESSES = (
    "softdb.integrations.ann_benchmarks",
    "softdb.integrations.vectordbbench",
)  # load them, in their environment
CODE = """
import importlib, json, pkgutil, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
import softdb
failed = {}
for module in pkgutil.walk_packages(softdb.__path__, "softdb.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def parts(named: str) -> set[str]:
    return {part.strip() for part in named.split(",")}


def test_every_extra_that_is_named_exists() -> None:
    files = [path for name in ("softdb", "docs", "examples", "tests") for path in (ROOT / name).rglob("*.[pm][yd]")]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    named = {
        (path.name, part)
        for path in files
        for names in re.findall(r"softdb\[([a-z][\w,-]*)\]", path.read_text())
        for part in parts(names)
    }
    assert len(named) > 40
    assert {(file, extra) for file, extra in named if extra not in EXTRAS} == set()


def test_without_extras_a_module_loads_or_names_its_own() -> None:
    """Every optional library is hidden, as in an environment without it."""
    command = [sys.executable, "-W", "error", "-c", CODE, json.dumps(sorted(MODULES))]
    failed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    failed = {name: error for name, error in failed.items() if not name.startswith((*CHECKED_BEFORE, *HARNESSES))}
    assert {name for name in failed if name.count(".") == 2} >= {
        f"softdb.integrations.{name}" for name in ("haystack", "langchain", "mteb", "sentence_transformers", "sklearn")
    }
    for name, error in failed.items():
        extra = re.search(r"pip install 'softdb\[([\w-]+)\]'", error)
        assert error.startswith("MissingDependency: "), f"{name}: {error}"
        assert extra is not None, f"{name}: {error}"
        assert extra[1] in EXTRAS


def test_only_the_extra_of_chroma_brings_chroma() -> None:
    """Its 90 packages are a burden that the other suites do without."""
    assert "chromadb" in EXTRAS["chroma"]
    bring = {"chroma"}
    for extra, needs in EXTRAS.items():
        if extra != "chroma" and (
            "chromadb" in needs or any("chroma" in parts(names) for names in re.findall(r"softdb\[(.*?)\]", needs))
        ):
            bring.add(extra)
    assert bring == {"chroma"}
