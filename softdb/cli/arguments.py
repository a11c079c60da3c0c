"""Arguments that commands share, and what they stand for."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from softdb.errors import BadInput

if TYPE_CHECKING:
    from softdb.database import SoftDB

__all__ = [
    "INTERRUPTED",
    "AsJson",
    "DTypeOption",
    "Database",
    "EncoderName",
    "Kind",
    "MetricName",
    "MetricOption",
    "Projection",
    "Query",
    "QueryFile",
    "Where",
    "array_of",
    "filter_of",
    "ids_of",
    "named",
    "opened",
    "projected",
]

Database = Annotated[Path, Argument(metavar="PATH", help="The database's directory.")]
Query = Annotated[str, Argument(help="A text, a JSON list of numbers, or @FILE.npy.")]
Where = Annotated[str | None, Option(help='A filter, as JSON: \'{"year": {"$gte": 2020}}\'.')]
EncoderName = Annotated[str | None, Option("--encoder", help="ngrams, demo, or a sentence-transformers model.")]
QueryFile = Annotated[Path | None, Option(metavar="FILE.npy", help="Queries like those to come, to measure with.")]
Projection = Annotated[Path | None, Option(metavar="FILE.pt", help="Project the query first (softdb train).")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, for scripts.")]

MetricName = Enum("MetricName", {"dot": "dot", "cosine": "cosine", "l2": "l2"}, type=str)
DType = Enum("DType", {"float32": "float32", "float16": "float16"}, type=str)
Kind = Enum(
    "Kind",
    {"auto": "auto", "ivf": "ivf", "ivf_rabitq": "ivf-rabitq", "ivf_sq8": "ivf-sq8", "hnsw": "hnsw", "flat": "flat"},
    type=str,  # for older releases of typer
)
MetricOption = Annotated[MetricName | None, Option(help="How queries and keys are compared.")]
DTypeOption = Annotated[DType | None, Option(help="How numbers are stored.")]

INTERRUPTED = 130  # the exit code that shells know for Ctrl-C
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def named(**words: Any) -> dict[str, Any]:
    """Arguments for `softdb.open` and the like: choices as their text."""
    return {name: word.value if isinstance(word, Enum) else word for name, word in words.items()}


def opened(path: Path, query: str | None = None, encoder: str | None = None) -> SoftDB:
    """The database for reading, with the encoder that a text query needs."""
    import softdb

    if query is None or not _is_text(query):
        return softdb.open(path, mode="r")
    from softdb.cli.encoders import chosen, named_encoder

    with softdb.open(path, mode="r") as db:
        dim, noted = db.dim, db.encoder_name
    return softdb.open(path, mode="r", encoder=named_encoder(chosen(path, noted, encoder), dim, path))


def _is_text(query: str) -> bool:
    return not (query.startswith("[") or (query.startswith("@") and query.endswith(".npy")))


def projected(db: SoftDB, query: str, file: Path | None) -> Any:
    """A query as it was typed (a text, numbers, or a file's array), projected where a projection's file is given."""
    asked: Any = query
    if not _is_text(query):
        asked = _json(query, "QUERY starts with [ but") if query.startswith("[") else array_of(Path(query[1:]))
    if file is None:
        return asked
    from softdb.train import load

    return load(file).of(db, asked)


def array_of(path: Path | None) -> Any:
    """The array in a .npy file; None where none is given."""
    from softdb.formats import numbers_in

    if path is None:
        return None
    if path.suffix == ".npz":
        raise BadInput(f"{path} holds several arrays; give a .npy file with one")
    return numbers_in(path)


def ids_of(texts: list[str] | None) -> list[str | int] | None:
    """Ids as they were typed. One that reads as a whole number may be text or a number, so it stands for both."""
    if not texts:
        return None
    numbers = [int(text) for text in texts if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63]
    return [*texts, *numbers]


def filter_of(where: str | None) -> Any:
    """A filter as it was typed: JSON."""
    return None if where is None else _json(where, "--where")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{what} is not JSON ({error}); quote it for the shell: '…'") from None
