"""Imports follow the order of docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import softdb

ROOT = Path(softdb.__file__).parent
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"


def line() -> list[str]:
    """Folders and files in the order of imports: the first column of the table in docs/architecture.md."""
    table = ARCHITECTURE.read_text().split("| folder or file |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


LINE = line()


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


def test_every_file_stands_in_the_import_order() -> None:
    assert {part(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(LINE)


def test_a_file_imports_only_what_stands_before_it() -> None:
    for path in ROOT.rglob("*.py"):
        if path == ROOT / "__init__.py":
            continue
        here = LINE.index(part(path))
        for name in imported(path) & set(LINE):
            assert LINE.index(name) <= here, f"{path.relative_to(ROOT)} imports {name}, which stands after it"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def files_imported(path: Path, root: Path) -> set[Path]:
    """The files of a package that a file takes names from, wherever its imports stand; through a package's face."""
    found = set[Path]()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == root.name:
            place = root.joinpath(*node.module.split(".")[1:])
            for alias in node.names:
                found |= {one for one in (place.with_suffix(".py"), place / f"{alias.name}.py") if one.is_file()}
                face = place / "__init__.py"
                if face.is_file() and face != path:
                    found |= {one for one in files_imported(face, root) if gives(one, alias.name)}
    return found


def gives(path: Path, name: str) -> bool:
    """Return True for a name that a file defines."""
    return any(name in (getattr(node, "name", None), *targets(node)) for node in parsed(path).body)


def targets(node: ast.stmt) -> list[str]:
    """Names that a statement assigns to."""
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def test_no_imports_go_in_a_circle() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.name != "__init__.py"]
    TopologicalSorter({path: files_imported(path, ROOT) for path in files}).prepare()


def test_the_walk_sees_a_circle(tmp_path: Path) -> None:
    root = tmp_path / "house"
    root.mkdir()
    (root / "a.py").write_text("def f():\n    from house import g\n")
    (root / "b.py").write_text("from house.a import f\ndef g(): f()\n")
    (root / "__init__.py").write_text("from house.b import g\n")
    with pytest.raises(CycleError):
        TopologicalSorter({path: files_imported(path, root) for path in root.glob("[ab].py")}).prepare()


NOT_OURS = {
    "_asdict",
    "_fields",
    "_indices",
    "_load_from_state_dict",
    "_replace",
    "_save_to_state_dict",
    "_version",
}  # nor private


def private(path: Path) -> set[str]:
    """Methods of a file, and the attributes that it gives to its objects."""
    return {
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self")
    }


def reaches(path: Path, own: set[str]) -> list[str]:
    """Private attributes that a file takes of objects other than its own folder's."""
    return [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own | NOT_OURS
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def test_rooms_above_the_database_use_its_public_calls_and_core() -> None:
    built = [path for path in ROOT.rglob("*.py") if part(path) in LINE[LINE.index("opening") + 1 :]]
    own = {path: set().union(*(private(other) for other in built if part(other) == part(path))) for path in built}
    assert [reach for path in built for reach in reaches(path, own[path])] == []


def test_the_walk_sees_reaches(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("class A:\n    def f(self): self._x = 1\ndef f(db, a): return db._store, a._x, db.core.schema\n")
    assert reaches(sample, private(sample)) == ["sample.py:3 db._store"]


CHANGES = {
    "chmod", "fdatasync", "fsync", "ftruncate", "link", "makedirs", "mkdir", "posix_fallocate", "pwrite", "pwritev",
    "remove", "rename", "replace", "rmdir", "symlink", "truncate", "unlink", "write",
}  # fmt: skip
OF_PATHS = {
    "hardlink_to", "mkdir", "rename", "rmdir", "rmtree", "symlink_to", "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
WRITES = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND", "'w", "'a", "'x", "'r+")


def changes(path: Path) -> list[str]:
    """Calls in a file that change files: of os and shutil, of paths, and `open` for writing."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if (
            (module in ("os", "shutil") and name in CHANGES | OF_PATHS)
            or (module not in ("files", "disk") and name in OF_PATHS)
            or (module != "disk" and name in ("open", "fdopen") and any(flag in ast.unparse(node) for flag in WRITES))
        ):
            found.append(f"{path.name}:{node.lineno} {module}.{name}")
    return found


def test_the_files_of_a_database_are_changed_in_one_thin_layer_alone() -> None:
    parts = [ROOT / "store", ROOT / "index", ROOT / "database", ROOT / "opening.py", ROOT / "encoders.py"]
    sources = [path for part in parts for path in ([part] if part.suffix else part.glob("*.py"))]
    assert len(changes(ROOT / "store" / "disk.py")) > 5  # the search sees them
    assert [one for path in sources if path.name != "disk.py" for one in changes(path)] == []


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("from softdb import check\nfrom softdb.store.files import remove\nimport softdb.tools.cli\n")
    assert imported(sample) == {"check", "store", "tools"}


def test_importing_softdb_leaves_faiss_and_the_command_line_alone() -> None:
    import subprocess
    import sys

    code = "import softdb, sys; print(sorted({'faiss', 'typer', 'rich', 'matplotlib'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
