"""Run commands in this process and read their output."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from softdb.errors import EncoderWarning
from softdb.tools.cli.commands import app

ROOT = Path(__file__).parents[3]
BOOK: list[dict[str, Any]] = [
    {"id": 1, "name": "Schumacher", "first": "Anna", "year": 1990},
    {"id": 2, "name": "Weber", "first": "Sarah", "year": 2001},
    {"id": "three", "name": "Schuler", "first": "Tim"},
]


def run(*arguments: object, code: int = 0, stdin: str | bytes | None = None) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EncoderWarning)  # most tests import texts as n-grams
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    shown = (result.output, result.exception)
    assert result.exit_code == code, shown
    assert result.exception is None or isinstance(result.exception, SystemExit), shown
    return result


def fails(*arguments: object, code: int = 1, stdin: str | None = None) -> str:
    """The one line of an error."""
    result = run(*arguments, code=code, stdin=stdin)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    return line


def answer(*arguments: object, stdin: str | bytes | None = None) -> Any:
    return json.loads(run(*arguments, "--json", stdin=stdin).stdout)


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
