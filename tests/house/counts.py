"""Counts of the source that may only fall: `python tests/house/counts.py` writes them to counts.json."""

from __future__ import annotations

import ast
import collections
import json
import re
from pathlib import Path

import softdb

ROOT = Path(softdb.__file__).parent
COMMITTED = Path(__file__).with_name("counts.json")

QUESTION = re.compile(r"(What|Whether|Who|Whose|Which|Where|How|Why)\b")
VAGUE = {
    "one", "found", "told", "asked", "mine", "say", "there", "here", "kept", "made", "whole", "part", "rest", "left",
}  # fmt: skip
PRIVATE = re.compile(r"\b_imp\.|\bsys\._|torch\._C\b|_is_in_bad_fork|RLock\._|_functorch|_initializing")
INNER = {"attend", "index", "store", "check", "gpu", "device", "filters", "scoring", "kernels"}
PARAMETERS, LINES = 7, 390  # functions with this many parameters and files with this many lines are counted
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = (ast.Name, ast.arg)


def sources(tree: dict[Path, ast.Module]) -> set[str]:
    """Names of the classes of sources: `Source`, and whatever derives from it."""
    bases = {
        node.name: {ast.unparse(base).split("[")[0] for base in node.bases}
        for module in tree.values()
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
    }
    names = {"Source"}
    while derived := {name for name, above in bases.items() if above & names} - names:
        names |= derived
    return names


def is_source_test(node: ast.AST, names: set[str]) -> bool:
    """Return True for `isinstance(x, SomeSource)`."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2):
        return False
    return node.func.id == "isinstance" and bool(names & {getattr(n, "id", "") for n in ast.walk(node.args[1])})


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters without `self`."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def counts(root: Path = ROOT) -> dict[str, int]:
    """Counts by their names, of all files of a package."""
    text = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    tree = {path: ast.parse(source) for path, source in text.items()}
    nodes = [(path, node) for path, module in tree.items() for node in ast.walk(module)]
    functions = [(path, node) for path, node in nodes if isinstance(node, FUNCTION)]
    documented = [node for _, node in nodes if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION))]
    variables = [node.id if isinstance(node, ast.Name) else node.arg for _, node in nodes if isinstance(node, NAMED)]
    stems = collections.Counter(path.name for path in text if path.name != "__init__.py")
    native = [path for suffix in ("cc", "h") for path in root.rglob(f"*.{suffix}")]
    names = sources(tree)
    return {
        "lines of Python": sum(source.count("\n") for source in text.values()),
        "lines of C++": sum(path.read_text().count("\n") for path in native),
        "docstrings that open with a question word": sum(
            bool(QUESTION.match((ast.get_docstring(node) or "").strip())) for node in documented
        ),
        "uses of vague names": sum(name in VAGUE for name in variables),
        "file names in several folders": sum(count > 1 for count in stems.values()),
        "public names of SoftDB": len([name for name in dir(softdb.SoftDB) if not name.startswith("_")]),
        "isinstance tests of a source": sum(is_source_test(node, names) for _, node in nodes),
        "abstract methods": sum(
            any("abstract" in ast.unparse(decorator) for decorator in node.decorator_list) for _, node in functions
        ),
        "inner functions of seven and more parameters": sum(
            path.relative_to(root).parts[0] in INNER and parameters(node) >= PARAMETERS for path, node in functions
        ),
        "privates of CPython or torch": sum(len(PRIVATE.findall(source)) for source in text.values()),
        "files of 390 lines and more": sum(source.count("\n") >= LINES for source in text.values()),
    }


if __name__ == "__main__":
    COMMITTED.write_text(json.dumps(counts(), indent=2) + "\n")
