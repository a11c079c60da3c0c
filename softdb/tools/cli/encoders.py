"""The encoders that a command line can name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from softdb.errors import BadInput

if TYPE_CHECKING:
    from softdb.check import Encoder

__all__ = ["chosen", "named_encoder", "require_outside"]


def _lies_in(one: Path, folder: Path) -> bool:
    return one.absolute().is_relative_to(folder.absolute()) or one.resolve().is_relative_to(folder.resolve())


def _is_ours(name: str) -> bool:
    """Whether a name loads nothing that a stranger could have put in a model's place."""
    from softdb.data.encoder import DEMO
    from softdb.encoders import ngrams

    return name == DEMO or ngrams(name) is not None


def require_outside(path: Path, name: str) -> str:
    """The name of an encoder. BadInput where that is a model in the database's own directory."""
    if not _is_ours(name) and Path(name).exists() and _lies_in(Path(name), path):
        raise BadInput(f"the model {name!r} lies in the database's own directory, and models run code; move it out")
    return name


def chosen(path: Path, noted: str | None, asked: str | None, default: str | None = None) -> str:
    """The name of a database's encoder: asked for, noted there, or else the default. BadInput where they differ."""
    from softdb.train.projection import TRAINED

    if asked is not None and noted not in (None, require_outside(path, asked)):
        raise BadInput(f"the keys of {path} were made by the encoder {noted!r}, not {asked!r}; leave --encoder out")
    if noted is not None and noted.startswith(TRAINED):
        raise BadInput(f"the keys of {path} were trained; texts are asked with what that wrote: --projection FILE.pt")
    if asked is None and noted is not None and not _is_ours(noted):
        # what a stranger has noted must not choose which model is loaded
        remedy = f"load it with --encoder {shlex.quote(noted)}"
        raise BadInput(f"the keys of {path} were made by the model {noted!r}; {remedy}")
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
    from softdb.data.encoder import DEMO, demo_encoder
    from softdb.encoders import ngrams
    from softdb.text import SentenceEncoder

    return demo_encoder(path) if name == DEMO else ngrams(name, dim) or SentenceEncoder(name)
