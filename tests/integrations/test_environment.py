"""Versions that the other suites need."""

from __future__ import annotations

import subprocess
import sys


def test_softdb_imports_no_integration() -> None:
    libraries = (
        "transformers",
        "sentence_transformers",
        "langchain_core",
        "haystack",
        "llama_index",
        "mteb",
        "sklearn",
    )
    code = f"import sys, softdb; print([name for name in {libraries} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
