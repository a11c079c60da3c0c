"""Arguments that commands share, and what they stand for."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from softdb.errors import BadInput

if TYPE_CHECKING:
    from softdb.cluster import Cluster
    from softdb.database import SoftDB, Verbs

Database = Annotated[Path, Argument(metavar="PATH", help="The database's directory.")]
Query = Annotated[
    str, Argument(help="A text, a JSON list of numbers, or @FILE.npy; - reads one text or list a line from a pipe.")
]
TypedIds = Annotated[
    list[str] | None,
    Argument(metavar="ID...", help='7 is the number, or else the text "7"; - reads one id a line from a pipe.'),
]
Where = Annotated[str | None, Option(help='A filter, as JSON: \'{"year": {"$gte": 2020}}\'.')]
EncoderName = Annotated[str | None, Option("--encoder", help="ngrams, demo, or a sentence-transformers model.")]
QueryFile = Annotated[Path | None, Option(metavar="FILE.npy", help="Queries like those to come, to measure with.")]
Projection = Annotated[Path | None, Option(metavar="FILE.pt", help="Project the query first (softdb train).")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, for scripts.")]

MetricName = Enum("MetricName", {"dot": "dot", "cosine": "cosine", "l2": "l2"}, type=str)
DType = Enum("DType", {"float32": "float32", "float16": "float16"}, type=str)
Kind = Enum(
    "Kind",
    {"auto": "auto", "ivf": "ivf", "ivf_sq8": "ivf-sq8", "hnsw": "hnsw", "flat": "flat"},
    type=str,  # for older releases of typer
)
Mode = Enum("Mode", {"vector": "vector", "text": "text", "hybrid": "hybrid"}, type=str)
TextIndex = Enum("TextIndex", {"words": "words", "trigram": "trigram", "none": "none"}, type=str)
MetricOption = Annotated[MetricName | None, Option(help="How queries and keys are compared.")]
DTypeOption = Annotated[DType | None, Option(help="How numbers are stored.")]

STDIN = "-"  # in place of a file
MOST = 1 << 28  # bytes of a line
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def named(**words: Any) -> dict[str, Any]:
    """Arguments for `softdb.open` and the like: choices as their text."""
    return {name: word.value if isinstance(word, Enum) else word for name, word in words.items()}


def query_of(typed: str) -> tuple[Any, bool]:
    """A query as it was typed (a text, numbers, a file's array, or lines of a pipe), and whether it is text."""
    if typed == STDIN:
        asked = [_asked(line.strip(), f"line {number} of the input") for number, line in input_lines(STDIN)]
        if not asked:
            raise BadInput("standard input holds no query; give one a line: a text, or a JSON list of numbers")
        return asked, any(isinstance(one, str) for one in asked)
    if typed.startswith("@") and typed.endswith(".npy"):
        return array_of(Path(typed[1:])), False
    if typed == "@-":
        return array_of(Path(STDIN)), False
    return _asked(typed, "QUERY"), not typed.startswith("[")


def _asked(typed: str, what: str) -> Any:
    return _json(typed, f"{what} starts with [ but") if typed.startswith("[") else typed


def projected(db: Verbs, asked: Any, file: Path | None) -> Any:
    """A query, projected where a projection's file is given."""
    if file is None:
        return asked
    from softdb.train import load

    return load(file).of(db, asked)


def input_lines(file: str) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers, as they come; `-` is standard input."""
    with contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else open(file, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST + 1), b""), 1):
            if len(line) > MOST:
                raise BadInput(f"line {number}: longer than {MOST:,} bytes; break it up")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(f"line {number}: not UTF-8 ({error.reason}); re-encode the source") from None
            if text.strip():
                yield number, text


@contextlib.contextmanager
def spooled(path: Path, name: str) -> Iterator[Path]:
    """A file for those that read it more than once; of `-` a copy, on disk meanwhile."""
    if str(path) != STDIN:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, name)
        with copy.open("xb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


def array_of(path: Path | None) -> Any:
    """The array in a .npy file, or of standard input; None where none is given."""
    from softdb.formats import numbers_in

    if path is None:
        return None
    if path.suffix == ".npz":
        raise BadInput(f"{path} holds several arrays; give a .npy file with one")
    with spooled(path, "stdin.npy") as file:
        return numbers_in(file)  # mapped: the file may be gone


def ids_of(texts: list[str] | None) -> list[str | int] | None:
    """Ids as they were typed. One that reads as a whole number may be text or a number, so it stands for both."""
    if not texts:
        return None
    numbers = [int(text) for text in texts if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63]
    return [*texts, *numbers]


def typed_ids(db: SoftDB | Cluster, typed: list[str] | None) -> list[str | int]:
    """Ids as they were typed, or piped where that is `-`: see `meant_ids`."""
    return meant_ids(db, [line.strip() for _, line in input_lines(STDIN)] if typed == [STDIN] else typed or [])


def meant_ids(db: SoftDB | Cluster, words: list[str]) -> list[str | int]:
    """Ids as JSON or bare: "7" is the text; 7 the number, or the text if that is stored.

    So both `jq .id` and `jq -r .id` give ids that are found.
    """
    found = [_typed_id(word) for word in words]
    numbers: list[str | int] = [one for one in found if isinstance(one, int)]
    texts = {str(one) for one, is_number in zip(numbers, db.core.stored(numbers), strict=True) if not is_number}
    also = {one for one, is_text in zip(texts, db.core.stored(list(texts)), strict=True) if is_text}
    return [str(one) if isinstance(one, int) and str(one) in also else one for one in found]


def _typed_id(word: str) -> str | int:
    if word.startswith('"'):
        with contextlib.suppress(ValueError):
            text = json.loads(word)
            return text if isinstance(text, str) else word
    whole = int(word) if _INTEGER.fullmatch(word) else None
    return word if whole is None or not -(2**63) <= whole < 2**63 else whole


def filter_of(where: str | None) -> Any:
    """A filter as it was typed: JSON."""
    return None if where is None else _json(where, "--where")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not JSON ({error}); quote it for the shell: '…'") from None
