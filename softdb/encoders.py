"""Encoders by name: the note in a database's directory of what made its keys, and what a name stands for.

Models are imported when they are asked for.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from softdb.errors import BadInput
from softdb.store import files

if TYPE_CHECKING:
    from softdb.check import Encoder

__all__ = ["NOTE", "PROJECTION", "copy_note", "encoder_name", "named_encoder", "note_encoder", "noted_encoder"]

NOTE = "encoder.json"  # in a database's directory: what made its keys, so that a typed query need not say it again
PROJECTION = "projection.pt"  # in a demo database's directory: what `train.fit` found for its queries
_NOTED = 1 << 16  # bytes of a note, at most


def note_encoder(path: Path, name: str) -> None:
    """Leave a note in a database's directory of the encoder that made its keys."""
    files.write_whole(path / NOTE, json.dumps({"encoder": name}).encode() + b"\n")


def noted_encoder(path: Path) -> str | None:
    """The encoder that a database's directory notes, if it does."""
    try:
        with files.open_regular(path / NOTE) as file:
            name = json.loads(file.read(_NOTED))["encoder"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def copy_note(path: Path, destination: Path) -> None:
    """Note the encoder of one database, if it has a note, in the directory of its copy."""
    name = noted_encoder(path)
    if name is not None:
        note_encoder(destination, name)


def _lies_in(one: Path, folder: Path) -> bool:
    return one.absolute().is_relative_to(folder.absolute()) or one.resolve().is_relative_to(folder.resolve())


def encoder_name(path: Path, asked: str | None, default: str | None = None) -> str:
    """The name of a database's encoder: asked for, noted there, or else the default. BadInput where they differ."""
    noted = noted_encoder(path)
    if asked is not None and asked not in ("ngrams", "demo") and Path(asked).exists() and _lies_in(Path(asked), path):
        raise BadInput(f"the model {asked!r} lies in the database's own directory, and models run code; move it out")
    if asked is not None and noted not in (None, asked):
        raise BadInput(f"the keys of {path} were made by the encoder {noted!r}, not {asked!r}; leave --encoder out")
    if asked is None and noted not in (None, "ngrams", "demo"):
        # a note in a stranger's directory must not choose which model is loaded
        raise BadInput(
            f"the keys of {path} were made by the model {noted!r}; load it with --encoder {shlex.quote(str(noted))}"
        )
    name = asked or noted or default
    if name is None:
        raise BadInput(
            f"{path} does not say what made its keys; add --encoder (ngrams, demo or a model), or give numbers"
        )
    return name


def named_encoder(name: str, dim: int | None = None, path: Path | None = None) -> Encoder:
    """The encoder of a name: `ngrams` (`dim` wide), `demo`, or a sentence-transformers model.

    `demo` with the path of a demo database is the encoder of its queries, as trained.
    """
    from softdb.text import HashedNGrams, SentenceEncoder

    if name == "ngrams":
        return HashedNGrams() if dim is None else HashedNGrams(dim)
    return _demo_encoder(path) if name == "demo" else SentenceEncoder(name)


def _demo_encoder(path: Path | None) -> Encoder:
    from softdb.data import load_wordnet
    from softdb.text import SentenceEncoder
    from softdb.train import load

    encoder = SentenceEncoder(projection=load_wordnet().projection)
    if path is None or not (path / PROJECTION).is_file():
        return encoder
    try:
        weight = load(path / PROJECTION).weight.detach().numpy()
    except BadInput:
        weight = None
    if weight is None or len(weight) != encoder.dim:
        raise BadInput(f"{path / PROJECTION} is not what the demo saved; make the demo anew with softdb demo --fresh")
    return lambda texts: encoder(texts) @ weight.T
