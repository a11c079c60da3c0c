"""Advice in error messages, followed: the error says it, and who does so gets the answer.

A case provokes the error by the callable that it yields, then does what the message says, and checks the answer:

    @advice("pass encoder= to softdb.open")
    def test_texts_need_an_encoder(folder: Path) -> Steps:
        yield lambda: softdb.open(folder, dim=4).search("text")
        assert softdb.open(folder, encoder=…).search("text").ids == …
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from worlds import holding

import softdb

__all__ = ["KEYS", "QUERIES", "VALUES", "Steps", "advice", "advising", "followed", "labelled", "three", "with_values"]

Steps: TypeAlias = Iterator[Callable[[], Any]]
KEYS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
VALUES = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
QUERIES = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32))
ROOT = Path(__file__).parents[1]
COMMANDS = "demo|explore|fields|import|search|snapshot|train|verify"
SAYS = re.compile(rf"\b[a-z_]+=|\b\w+\(\)|--[a-z]|softdb (?:{COMMANDS})\b")  # an argument, a call, an option, a command


def advice(text: str, error: type[Exception] = softdb.SoftDBError) -> Callable[[Callable[[Path], Steps]], Any]:
    """Make a test of a case: the call raises the error with that text, and following the advice succeeds."""

    def made(case: Callable[[Path], Steps]) -> Any:
        def test(tmp_path: Path) -> None:
            steps = case(tmp_path)
            provoke = next(steps)
            with pytest.raises(error, match=re.escape(text)):
                provoke()
            assert next(steps, None) is None

        return test

    return made


def advising() -> dict[str, str]:
    """The messages of errors in softdb that name an argument, a call, an option or a command, by their places."""
    found = {}
    for path in sorted((ROOT / "softdb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = _text(node.exc.args[0])
                if SAYS.search(message):
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = message
    return found


def followed() -> set[str]:
    """The texts in the tests of advice."""
    return {
        node.value
        for path in (ROOT / "tests" / "unit").rglob("test_*advice*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= 12
    }


def three(folder: Path | None = None, **words: Any) -> softdb.SoftDB:
    """Records a, b, c, with keys (1, 0), (0, 1), (0, 0)."""
    return holding(np.eye(3, 2), ids=["a", "b", "c"], path=folder, **words)


def with_values(metric: Any = "dot", **words: Any) -> softdb.SoftDB:
    """50 records with values of two numbers."""
    return holding(KEYS, VALUES, metric=metric, **words)


def labelled() -> softdb.SoftDB:
    return holding(KEYS, np.arange(50) % 3, num_classes=3)


def _text(node: ast.expr) -> str:
    """A message as it is written, … for each filled-in part."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(map(_text, node.values)) if isinstance(node, ast.JoinedStr) else "…"
