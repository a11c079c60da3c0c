"""The reference in docs/api has every public name, with its errors and an example that runs."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import blocks

from softdb import errors

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
PAGES = "".join(page.read_text() for page in API.glob("*.md"))
MODULES = (
    "answers", "reports", "errors", "functional", "scores", "weights", "pool", "plots", "text", "nn", "train",
    "formats", "cluster", "typing", "data",
)  # fmt: skip
TYPED = {*errors.__all__, "check"} - {"MissingDependency"}  # which docs/api/errors.md describes for every extra
# methods that torch and softdb call, or that a subclass implements: their classes' docstrings say how
CALLED = {
    "after_fork", "after_step", "among", "anyone", "ask", "check", "distances", "entropy", "extra_repr", "fold",
    "forward",
    "indexed_nearest", "log", "log_value", "measure", "negative_squares", "of", "request", "reset_parameters",
    "answer", "at", "log_volume", "roles", "root_step", "run", "some", "source", "start", "step", "stop", "value",
    "weigh",
}  # fmt: skip
ELSEWHERE = {  # run by docs/cluster.md, where the libraries are
    f"softdb.cluster.{name}" for name in ("Ranks", "TableCluster", "create", "ingest", "open", "serve", "stop")
}


def examples() -> dict[str, str]:
    """The examples of docs/api/examples.yaml by name."""
    yaml = pytest.importorskip("yaml", reason="needs softdb[docs]")
    return dict(yaml.safe_load((API / "examples.yaml").read_text()))


def names_of(module: str) -> dict[str, Any]:
    """The public names of a module: its `__all__`, or the names that it defines."""
    part = importlib.import_module(module)
    listed = getattr(part, "__all__", None) or [
        name
        for name, value in vars(part).items()
        if inspect.isclass(value) and not name.startswith("_") and value.__module__.startswith(module)
    ]
    values = {f"{module}.{name}": getattr(part, name, None) for name in listed}
    return {name: value for name, value in values.items() if not inspect.ismodule(value)}


@functools.cache
def public() -> dict[str, Any]:
    """Every public class, function and type by full name; each once, by the name under which the reference has it."""
    names: dict[str, Any] = {}
    for module in ("softdb", *(f"softdb.{part}" for part in MODULES)):
        names |= names_of(module)
    listed = reference()
    return {
        name: value
        for name, value in names.items()
        if name in listed or not any(listed[other] is value for other in listed)
    }


@functools.cache
def reference() -> dict[str, Any]:
    """What the directives of docs/api list, by full name."""
    listed: dict[str, Any] = {}
    for kind, name in re.findall(r"auto(\w+):: (softdb[\w.]*)", PAGES):
        module, _, last = name.rpartition(".")
        listed |= names_of(name) if kind == "module" else {name: getattr(importlib.import_module(module), last)}
    return listed


def members(name: str, subject: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods of a class by full name, those that it inherits from softdb included."""
    for base in inspect.getmro(subject) if inspect.isclass(subject) else ():
        for key, value in vars(base).items() if base.__module__.startswith("softdb") else ():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and not key.startswith("_"):
                yield f"{name}.{key}", function


def docstrings() -> dict[str, str]:
    """Docstrings by full name, of public classes, functions and methods."""
    found = {}
    for name, subject in public().items():
        if inspect.isclass(subject) or inspect.isfunction(inspect.unwrap(subject)):
            found[name] = inspect.getdoc(subject) or ""
        for method, function in members(name, subject):
            found.setdefault(method, inspect.getdoc(function) or "")
    return found


def needs_example(name: str) -> bool:
    """Errors need no example, nor do types, methods that users do not call, and what is run elsewhere."""
    subject, last = public().get(name), name.rpartition(".")[2]
    if name not in public():
        return last not in CALLED and not name.startswith(tuple(ELSEWHERE))
    is_error = inspect.isclass(subject) and issubclass(subject, BaseException)
    return callable(subject) and name not in ELSEWHERE and not is_error and name != "softdb.answers.Resolve"


def raised(function: Any) -> set[str]:
    """Typed errors that a function raises in its own body; `check` for a call that validates an argument."""
    function = inspect.unwrap(function)
    if function.__code__.co_filename.startswith("<"):  # a dataclass makes it
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {
        ast.unparse(call).split(".")[0 if ast.unparse(call).startswith("check.") else -1]
        for call in calls + [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    }
    return names & TYPED


def test_every_public_name_is_listed() -> None:
    assert len(public()) > 150
    assert set(public()) - set(reference()) == set()


def test_every_public_function_names_the_errors_that_it_raises() -> None:
    functions = {name: subject for name, subject in public().items() if inspect.isfunction(inspect.unwrap(subject))}
    for name, subject in public().items():
        functions |= dict(members(name, subject))
        if inspect.isclass(subject) and inspect.isfunction(vars(subject).get("__init__")):
            functions[name] = vars(subject)["__init__"]
    texts = docstrings()
    silent = {
        name: found
        for name, function in functions.items()
        if name.rpartition(".")[2] not in CALLED
        and (found := raised(function))
        and not re.search("[Rr]aises", texts[name])
    }
    assert silent == {}


def test_every_public_name_has_an_example() -> None:
    given = examples()
    texts = docstrings()
    assert [name for name in given if name not in texts and name not in public()] == []
    assert [name for name in given if ">>>" in texts.get(name, "")] == []  # one place for each
    shown = given | {name: text for name, text in texts.items() if ">>>" in text}
    every = "\n".join(shown.values())
    missing = [
        name for name in texts if needs_example(name) and not any(f"{of}.".startswith(f"{name}.") for of in shown)
    ]
    methods = {name for subject in public() for name, _ in members(subject, public()[subject])}
    assert [name for name in missing if name not in methods or f".{name.rpartition('.')[2]}(" not in every] == []


def world(folder: Path) -> dict[str, Any]:
    """The names with which every example begins: those of docs/api/index.md."""
    scope: dict[str, Any] = {}
    exec(compile(blocks(API / "index.md")[0], "index.md", "exec"), scope)
    return scope


class Checker(doctest.OutputChecker):
    """Compares an output where one is written."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def every_example() -> dict[str, str]:
    """Each example once, though several classes inherit its method."""
    shown = {text: name for name, text in reversed((docstrings() | examples()).items()) if ">>>" in text}
    return {name: text for text, name in shown.items()}


@pytest.mark.parametrize("name", every_example())
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    subject = public().get(name) or public().get(name.rpartition(".")[0])
    scope = {**vars(importlib.import_module(subject.__module__)), **world(tmp_path)}
    test = doctest.DocTestParser().get_doctest(every_example()[name], scope, name, None, None)
    report: list[str] = []
    doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert report == [], "".join(report)
