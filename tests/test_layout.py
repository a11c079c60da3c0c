"""Reading order = data order = import order."""

from __future__ import annotations

import ast
from pathlib import Path

import softdb

ROOT = Path(softdb.__file__).parent
LINE = [
    "errors", "check", "scores", "weights", "store", "answers", "compiled", "index", "pool", "stream", "soft",
    "functional", "database", "opening", "nn", "text", "formats", "train", "plots", "data", "demo",
    "bench", "cli", "__main__",
]  # fmt: skip


def imported(path: Path) -> set[str]:
    """The parts of softdb that a file imports, by their place in the line."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "softdb":
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("softdb.")}
    return names


def part(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0].removesuffix(".py")


def test_every_file_has_its_place_in_the_line() -> None:
    assert {part(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(LINE)


def test_a_file_imports_only_what_stands_before_it() -> None:
    for path in ROOT.rglob("*.py"):
        if path == ROOT / "__init__.py":
            continue
        here = LINE.index(part(path))
        for name in imported(path) & set(LINE):
            assert LINE.index(name) <= here, f"{path.relative_to(ROOT)} imports {name}, which stands after it"


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("from softdb import check\nfrom softdb.store.files import remove\nimport softdb.cli\n")
    assert imported(sample) == {"check", "store", "cli"}


def test_importing_softdb_leaves_faiss_and_the_command_line_alone() -> None:
    import subprocess
    import sys

    code = "import softdb, sys; print(sorted({'faiss', 'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
