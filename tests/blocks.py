"""The Python blocks of a page, run as one program; blocks of libraries that are not installed are left out."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Collection
from pathlib import Path

import softdb

PEERS = ("chromadb", "hnswlib", "lancedb", "llama_index", "qdrant_client", "zvec")  # compared with in docs/coming-from


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def run_blocks(page: Path, optional: Collection[str] = PEERS) -> list[str]:
    """Run a page's blocks; return those that ran.

    Left out are blocks that import one of `optional` where it is missing, and blocks that use a name of such a block.
    """
    scope: dict[str, object] = {}
    absent, ran = set[str](), list[str]()
    for number, block in enumerate(blocks(page), start=1):
        stored, loaded = names(block)
        if loaded & absent - stored:
            absent |= stored
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", softdb.EncoderWarning)  # no error: pages use the default encoder
                exec(compile(block, f"{page.name}, block {number}", "exec"), scope)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in optional:
                raise
            absent |= stored - set(scope)
            continue
        absent -= stored
        ran.append(block)
    return ran


def names(block: str) -> tuple[set[str], set[str]]:
    """The names that a block binds, and those that it uses."""
    stored, loaded = set[str](), set[str]()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.alias):
            stored.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            stored.add(node.name)
    return stored, loaded
