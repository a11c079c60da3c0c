"""Arguments that commands share, and functions that parse them."""

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
    str, Argument(help="A text, a JSON list of numbers, or @FILE.npy; - reads one text or list per line of input.")
]
TypedIds = Annotated[
    list[str] | None,
    Argument(metavar="ID...", help='7 is the integer, or the text "7" if only that is stored; - reads one per line.'),
]
Where = Annotated[str | None, Option(help='A filter, as JSON: \'{"year": {"$gte": 2020}}\'.')]
EncoderName = Annotated[str | None, Option("--encoder", help="ngrams, demo, or a sentence-transformers model.")]
QueryFile = Annotated[Path | None, Option(metavar="FILE.npy", help="Typical queries, to measure recall with.")]
Projection = Annotated[Path | None, Option(metavar="FILE.pt", help="Project the queries by a file of softdb train.")]
AsJson = Annotated[bool, Option("--json", help="Print one line of JSON, for scripts.")]

# `type=str`, as older releases of typer need it
MetricName = Enum("MetricName", {"dot": "dot", "cosine": "cosine", "l2": "l2"}, type=str)
DType = Enum("DType", {"float32": "float32", "float16": "float16"}, type=str)
Kind = Enum("Kind", {"auto": "auto", "ivf": "ivf", "ivf_sq8": "ivf-sq8", "hnsw": "hnsw", "flat": "flat"}, type=str)
Mode = Enum("Mode", {"vector": "vector", "text": "text", "hybrid": "hybrid"}, type=str)
TextIndex = Enum("TextIndex", {"words": "words", "trigram": "trigram", "none": "none"}, type=str)
MetricOption = Annotated[MetricName | None, Option(help="Score of a query and a key.")]
DTypeOption = Annotated[DType | None, Option(help="Number type of stored keys and values.")]

STDIN = "-"  # stands for standard input in place of a file name
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def named(**words: Any) -> dict[str, Any]:
    """Return the keyword arguments, with each Enum member (a choice of an option) replaced by its value."""
    return {name: word.value if isinstance(word, Enum) else word for name, word in words.items()}


def number_or_word(text: str) -> float | str:
    """Convert an option to a number, or return it for the database to check."""
    try:
        return float(text)
    except ValueError:
        return text


def query_of(typed: str) -> tuple[Any, bool]:
    """Parse QUERY: a text, a JSON list, @FILE.npy, or - for input lines. Return queries, and True if they are texts."""
    if typed == STDIN:
        queries = [_parsed_query(line.strip(), f"line {number} of the input") for number, line in input_lines(STDIN)]
        if not queries:
            raise BadInput("standard input holds no query; give one per line: a text, or a JSON list of numbers")
        return queries, any(isinstance(query, str) for query in queries)
    if typed == "@-" or (typed.startswith("@") and typed.endswith(".npy")):
        return array_of(Path(typed[1:])), False
    return _parsed_query(typed, "QUERY"), not typed.startswith("[")


def _parsed_query(typed: str, name: str) -> Any:
    return _json(typed, f"{name} starts with [ but") if typed.startswith("[") else typed


def projected(db: Verbs, queries: Any, file: Path | None) -> Any:
    """Return the queries, projected if the file of a projection is given. Raises BadInput for queries (…, q, d)."""
    from softdb.check import leading

    if (dimensions := len(leading(queries)) + 1) > 2:
        raise BadInput(f"queries have {dimensions} dimensions; expected one query (d,) or several (q, d)")
    if file is None:
        return queries
    from softdb.train import load

    return load(file).of(db, queries)


def input_lines(file: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that is not blank, as soon as the line is read; `-` is standard input."""
    from softdb.formats.lines import decoded

    with contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else open(file, "rb") as lines:
        yield from ((number, text) for number, text in decoded(lines, "") if text.strip())


@contextlib.contextmanager
def spooled(path: Path, name: str) -> Iterator[Path]:
    """Yield a file that can be read more than once: the path, or a temporary copy of standard input for `-`."""
    if str(path) != STDIN:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, name)
        with copy.open("xb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


def array_of(path: Path | None) -> Any:
    """Return the array in a .npy file or on standard input; None without a path."""
    from softdb.formats import numbers_in

    if path is None:
        return None
    if path.suffix == ".npz":
        raise BadInput(f"{path} holds several arrays; expected one array; give a .npy file")
    with spooled(path, "stdin.npy") as file:
        return numbers_in(file)  # memory-mapped, so the copy may be deleted


def ids_of(texts: list[str] | None) -> list[str | int] | None:
    """Return the ids of --exclude. A typed 7 may mean the number or the text, so both are returned."""
    if not texts:
        return None
    numbers = [int(text) for text in texts if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63]
    return [*texts, *numbers]


def typed_ids(db: SoftDB | Cluster, typed: list[str] | None) -> list[str | int]:
    """Return the ids from the command line, or from standard input for `-`, parsed by `parsed_ids`."""
    return parsed_ids(db, [line.strip() for _, line in input_lines(STDIN)] if typed == [STDIN] else typed or [])


def parsed_ids(db: SoftDB | Cluster, words: list[str]) -> list[str | int]:
    """Parse typed ids: "7" in quotes is the text; 7 is the integer, or the text if only the text is stored.

    So the outputs of both `jq .id` and `jq -r .id` work as ids.
    """
    ids = [_typed_id(word) for word in words]
    numbers: list[str | int] = [id_ for id_ in ids if isinstance(id_, int)]
    texts = {str(number) for number, stored in zip(numbers, db.core.stored(numbers), strict=True) if not stored}
    stored_texts = {text for text, stored in zip(texts, db.core.stored(list(texts)), strict=True) if stored}
    return [str(id_) if isinstance(id_, int) and str(id_) in stored_texts else id_ for id_ in ids]


def _typed_id(word: str) -> str | int:
    if word.startswith('"'):
        with contextlib.suppress(ValueError):
            text = json.loads(word)
            return text if isinstance(text, str) else word
    number = int(word) if _INTEGER.fullmatch(word) else None
    return word if number is None or not -(2**63) <= number < 2**63 else number


def filter_of(where: str | None) -> Any:
    """Return the filter of `--where`, parsed from JSON."""
    return None if where is None else _json(where, "--where")


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        example = '{"year": {"$gt": 1990}}' if name == "--where" else "[0.1, 2]"
        raise BadInput(f"{name} is not JSON ({error}); write it like '{example}', in quotes for the shell") from None
