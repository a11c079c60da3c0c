"""Mutation tests: seeded small faults in one file, each run against the tests that should notice it.

    python benchmarks/mutants.py --file softdb/store/verify.py --tests tests/unit/store/test_verify.py tests/unit/store

A mutant changes one place: a comparison, a condition, an operator, a constant, an argument or a returned value, or it
leaves out a statement. It runs in a copy of the tree, with the tests in the given order, until one fails. The seed
fixes the sample, and with it each mutant's number, as long as the file does not change; `--only 3 17` runs these again.
A `reason` in the results, written by hand, says why a survivor cannot matter, and stays while the change is the same.
mutmut and cosmic-ray do not sample by a seed and do not leave out statements, such as a sync.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("softdb", "tests", "benchmarks", "examples", "docs")
SITE = """import sys  # an editable install would be imported in place of the copy
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""
FIRST = ("torch", "apsw", "faiss")  # imported once before the forks
LEAST_SECONDS, TIMES = 60, 3  # limit of a mutant: seconds, or a multiple of the tests' time without one if that is more

PAIRS = "Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult FloorDiv, BitAnd BitOr, Lt LtE, Lt GtE, Gt GtE, Gt LtE"
SWAPS = [tuple(getattr(ast, name) for name in pair.split()) for pair in PAIRS.split(", ")]
LEFT_OUT = ("annotation", "returns", "decorator_list", "exc")  # fields that are never changed: types and error messages
NONE, NOTHING = ast.Constant(None), ast.parse("contextlib.nullcontext()", mode="eval").body

Nodes = Iterator[ast.AST]


def _with(node: Any, **fields: Any) -> Any:
    new = copy(node)
    vars(new).update(fields)
    return new


def _less(node: Any, field: str, start: int = 0) -> Nodes:
    parts = getattr(node, field)
    return (_with(node, **{field: parts[:i] + parts[i + 1 :]}) for i in range(start, len(parts)))


def _others(op: ast.AST) -> Nodes:
    return (pair[1 - i]() for pair in SWAPS for i in (0, 1) if pair[i] is type(op))


def _compared(node: ast.Compare) -> Nodes:
    for i, op in enumerate(node.ops):
        yield from (_with(node, ops=[*node.ops[:i], new, *node.ops[i + 1 :]]) for new in _others(op))


def _constant(node: ast.Constant) -> Nodes:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int | str):
        yield from map(ast.Constant, [value + "x"] if isinstance(value, str) else [value + 1, value - 1])


def _stored(node: ast.Assign) -> Nodes:
    if not isinstance(node.targets[0], ast.Name | ast.Tuple):  # a missing name would fail at once
        yield ast.Pass()


RULES: dict[type[ast.AST], Callable[[Any], Nodes]] = {
    ast.Compare: _compared, ast.Constant: _constant, ast.Assign: _stored,
    ast.Call: lambda node: iter([*_less(node, "keywords"), *_less(node, "args", 1)]),
    ast.BinOp: lambda node: (_with(node, op=op) for op in _others(node.op)),
    ast.BoolOp: lambda node: iter([*_less(node, "values"), *(_with(node, op=op) for op in _others(node.op))]),
    ast.UnaryOp: lambda node: iter([node.operand]),
    ast.Slice: lambda node: iter([_with(node, lower=None), _with(node, upper=None)]),
    ast.Return: lambda node: iter([ast.Return(NONE)] * (node.value is not None)),
    ast.withitem: lambda node: iter([_with(node, context_expr=NOTHING)]),
    ast.Break: lambda _: iter([ast.Continue()]), ast.Continue: lambda _: iter([ast.Break()]),
    **dict.fromkeys((ast.Expr, ast.Raise, ast.AugAssign), lambda _: iter([ast.Pass()])),
}  # fmt: skip


def _runs(node: Any, field: str) -> bool:
    """Return False for types, docstrings, error messages, f-strings and `strict=`, where a change is no fault."""
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    named = ast.unparse(node).startswith(("__all__ =", "strict="))
    return field not in LEFT_OUT and not documents and not named and not isinstance(node, ast.JoinedStr)


def _instead(node: Any, field: str) -> Nodes:
    if field in ("test", "ifs") and not isinstance(node, ast.Compare):
        yield ast.UnaryOp(ast.Not(), node)
    if field == "type" and isinstance(node, ast.Tuple):  # the errors of an except clause
        yield from _less(node, "elts")
    yield from RULES.get(type(node), lambda _: iter(()))(node)


def mutants(root: ast.Module, parent: Any = None, line: int = 0) -> Iterator[tuple[str, str]]:
    """Yield each change of one place below a node: its description, and the changed source."""
    intact = ast.unparse(root)
    for field, value in ast.iter_fields(parent or root):
        parts = value if isinstance(value, list) else [value]
        for i, node in enumerate(parts):
            if not isinstance(node, ast.AST) or not _runs(node, field):
                continue
            number = getattr(node, "lineno", line)
            for new in _instead(node, field):
                setattr(parent or root, field, [*parts[:i], new, *parts[i + 1 :]] if parts is value else new)
                if (text := ast.unparse(ast.fix_missing_locations(root))) != intact:
                    yield f"line {number}: {ast.unparse(node)}  →  {ast.unparse(new)}", text
            setattr(parent or root, field, value)
            yield from mutants(root, node, number)


def _child(tree: Path, tests: list[str], out: Path) -> None:
    os.setsid()
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(place for place in sys.path if place not in (str(ROOT), str(ROOT / "benchmarks")))]
    exec(SITE)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    print(sys.modules["softdb"].__file__, flush=True)
    os._exit(code)  # skips the exit handlers of the parent


def failure(tree: Path, tests: list[str], limit: float) -> str:
    """Return the first test that fails in a tree, or why the run ended; empty if all tests pass."""
    out = tree / "output"
    run = multiprocessing.get_context("fork").Process(target=_child, args=(tree, tests, out))
    run.start()
    run.join(limit)
    if run.exitcode is None:
        os.killpg(run.pid or 0, signal.SIGKILL)
        run.join()
        return f"over {limit:.0f} s"
    lines = out.read_text().splitlines()
    if lines[-1:] != [str(tree / "softdb/__init__.py")]:
        return f"no end: exit {run.exitcode}, {lines[-3:]}"
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "" if run.exitcode == 0 else failed[0] if failed else f"exit {run.exitcode}: {lines[-5:]}"


def main() -> None:
    """Sample the mutants, run the tests, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True)
    parser.add_argument("--tests", nargs="+", required=True, help="test files, the likeliest to fail first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", nargs="+", type=int, help="numbers of mutants to run; the results of the others stay")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutants.json")
    options = parser.parse_args()
    for name in FIRST:
        importlib.import_module(name)
    candidates = list(mutants(ast.parse((ROOT / options.file).read_text(encoding="utf-8"))))
    sample = random.Random(options.seed).sample(candidates, min(options.count, len(candidates)))
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    old = {entry["change"]: entry for entry in results.get(options.file, {}).get("mutants", ())}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            copytree(ROOT / name, tree / name, ignore=ignore_patterns("__pycache__"))
        (tree / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
        (tree / "sitecustomize.py").write_text(SITE, encoding="utf-8")
        start = time.perf_counter()
        if failed := failure(tree, options.tests, 3600):
            raise SystemExit(f"the tests fail without a mutant: {failed}")
        limit = max(LEAST_SECONDS, TIMES * (time.perf_counter() - start))
        entries = []
        for number, (change, text) in enumerate(sample):
            entry = {"number": number, "change": change, "killed_by": old.get(change, {}).get("killed_by", "")}
            if options.only is None or number in options.only:
                (tree / options.file).write_text(text, encoding="utf-8")
                os.utime(tree / options.file, (number, number))  # a time of its own, so that no stale bytecode is used
                entry["killed_by"] = failure(tree, options.tests, limit)
            if not entry["killed_by"]:
                entry["reason"] = old.get(change, {}).get("reason", "")
            entries.append(entry)
            print(f"{number}: {entry['killed_by'] or 'SURVIVED'}: {change}", flush=True)
    from common import provenance, write_json  # imported last: it imports softdb, which no fork may have

    survived = sum(not entry["killed_by"] for entry in entries)
    about = {"seed": options.seed, "of": len(candidates), "survived": survived}
    about |= provenance(["pytest", "numpy", "torch", "apsw"])
    write_json(options.out, {**results, options.file: {**about, "mutants": entries}})


if __name__ == "__main__":
    main()
