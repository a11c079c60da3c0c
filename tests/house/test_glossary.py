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
KERNELS = sorted(path for path in ROOT.rglob("kernels/native/*") if path.suffix in (".cc", ".h"))

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
    """Line and name of every class, function, parameter, field and variable, local ones included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def cpp_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every identifier outside of comments and strings."""
    for number, line in enumerate(source.splitlines(), 1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', "", line).partition("//")[0]
        yield from ((number, name) for name in re.findall(r"[A-Za-z_]\w*", code))


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
    for path in KERNELS:
        results += offences(path.relative_to(ROOT).as_posix(), cpp_names(path.read_text()), words)
    assert results == []


def test_one_class_has_a_name() -> None:
    """Private ones too: `_Plan` in one file and `Plan` in another are two meanings of a word.

    LangChain and LlamaIndex both name a vector store after the database; the import says which.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(ROOT).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {
        "SoftDBVectorStore": ["integrations/langchain.py", "integrations/llama_index.py"]
    }


def test_the_glossary_is_read() -> None:
    words = refused(
        "| held-out | not seen in training | `held` but `held_out` |\n| close | end | `let_go` |\n| a | b | |\n"
    )
    assert words == {("held",): {"held_out"}, ("let", "go"): set()}
    sample = "class Held: ...\ndef _let_go(held_out, x: int):\n    held = 1\nLETTING, y_held = 1, 2\n"
    sample += "class A:\n    held: int\n"
    seen = [actual.split()[1] for actual in offences("a.py", names(ast.parse(sample)), words)]
    assert sorted(seen) == ["Held", "_let_go", "held", "held", "y_held"]
    kernel = 'int held = held_out;  // held\nlog("held");'
    assert offences("a.cc", cpp_names(kernel), words) == ["a.cc:1 held"]
    assert len(refused(GLOSSARY.read_text())) >= 12
