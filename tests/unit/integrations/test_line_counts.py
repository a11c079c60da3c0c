"""The table of docs/integrations has the line count of each integration."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES = {
    "LangChain": "langchain.py",
    "Haystack": "haystack*",
    "LlamaIndex": "llama_index.py",
    "scikit-learn": "sklearn",
    "Transformers": "transformers",
    "sentence-transformers": "sentence_transformers",
    "mteb": "mteb.py",
    "ann-benchmarks": "ann_benchmarks.py",
    "VectorDBBench": "vectordbbench.py",
}
SPACE = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def code_lines(path: Path) -> int:
    """Lines of code, without docstrings, comments and blank lines."""
    text, told = path.read_text(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body and ast.get_docstring(node) is not None else None
            told |= set() if first is None else set(range(first.lineno, (first.end_lineno or 0) + 1))
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(text).readline) if one.type not in SPACE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - told)


def test_the_table_counts_the_lines() -> None:
    page = (ROOT / "docs" / "integrations" / "index.md").read_text()
    told = {
        name: int(count) for name, count in re.findall(r"^\| \[(.+?)\].*?\| (\d+)(?: lines)? \|", page, re.MULTILINE)
    }
    folder = ROOT / "softdb" / "integrations"
    for name, pattern in MODULES.items():
        results = [one for given in folder.glob(pattern) for one in (given.glob("*.py") if given.is_dir() else [given])]
        assert told.pop(name) == pytest.approx(sum(map(code_lines, results)), rel=0.1, abs=8), name
    assert not told
