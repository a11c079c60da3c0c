"""Names in softdb/ keep to docs/glossary.md: one word, one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import softdb

ROOT = Path(softdb.__file__).parent
GLOSSARY = ROOT.parent / "docs" / "glossary.md"
SOURCES = sorted(ROOT.rglob("*.py"))

Words = tuple[str, ...]


def parts(name: str) -> Words:
    """A name's words: `_read_lock` and `ReadLock` are read, lock."""
    return tuple(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_"))


def refused(page: str) -> dict[Words, set[str]]:
    """The words of the last column, and the names in which each is allowed."""
    words: dict[Words, set[str]] = defaultdict(set)
    for cell in re.findall(r"^\|.*\|([^|]+)\|$", page, re.MULTILINE):
        unwanted, _, allowed = cell.partition(" but ")
        for word in re.findall(r"`(\w+)`", unwanted):
            words[parts(word)] |= set(re.findall(r"`(\w+)`", allowed))
    return words


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every class, function, parameter, field and module-level variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        if isinstance(node, ast.ClassDef | ast.Module):
            yield from ((item.lineno, item.id) for item in assigned(node))


def assigned(body: ast.ClassDef | ast.Module) -> list[ast.Name]:
    targets: list[ast.expr] = []
    for node in body.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return [item for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]


def has(name: str, words: Words, allowed: set[str]) -> bool:
    """Return whether the words stand in a name, one after the other, outside of the allowed uses."""
    given = "_".join(parts(name))
    for longer in allowed:
        given = re.sub(rf"(?<![a-z0-9]){longer}(?![a-z0-9])", "", given)
    return re.search(rf"(?<![a-z0-9]){'_'.join(words)}(?![a-z0-9])", given) is not None


def offences(where: str, found: Iterator[tuple[int, str]], words: dict[Words, set[str]]) -> list[str]:
    return [
        f"{where}:{line} {name}"
        for line, name in found
        if any(has(name, word, allowed) for word, allowed in words.items())
    ]


def test_no_name_has_a_word_that_the_glossary_refuses() -> None:
    words = refused(GLOSSARY.read_text())
    results = []
    for path in SOURCES:
        where = path.relative_to(ROOT).as_posix()
        results += offences(where, iter([(1, path.stem), *names(ast.parse(path.read_text()))]), words)
    assert results == []


def test_one_class_has_a_name() -> None:
    """Private ones too: `_Plan` in one file and `Plan` in another are two meanings of a word."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_glossary_is_read() -> None:
    words = refused(
        "| held-out | not seen in training | `held` but `held_out` |\n| close | end | `let_go` |\n| a | b | |\n"
    )
    assert words == {("held",): {"held_out"}, ("let", "go"): set()}
    sample = "class Held: ...\ndef _let_go(held_out, x: int): ...\nLETTING, y_held = 1, 2\nclass A:\n    held: int\n"
    seen = [actual.split()[1] for actual in offences("a.py", names(ast.parse(sample)), words)]
    assert sorted(seen) == ["Held", "_let_go", "held", "y_held"]
    assert len(refused(GLOSSARY.read_text())) >= 12
