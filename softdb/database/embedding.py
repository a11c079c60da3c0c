"""Texts become keys, some at a time, so that the progress of a slow encoder can be told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from softdb import check
from softdb.check import Array, Schema
from softdb.errors import BadInput, MissingDependency
from softdb.index.choose import Progress

AT_ONCE = 256  # texts that are given to the encoder in one call


def telling(progress: Progress | bool | None) -> contextlib.AbstractContextManager[Progress]:
    """Return the receiver of progress: the callable itself, a bar for True, nothing for None and False."""
    if callable(progress):
        return contextlib.nullcontext(progress)
    if not (progress is None or isinstance(progress, bool)):
        raise BadInput(f"progress is {check.shown(progress)}; expected a callable, or True for a bar")
    if not progress:
        return contextlib.nullcontext(lambda what, done, whole: None)
    try:
        from softdb.terminal import progress as bar
    except ModuleNotFoundError:
        raise MissingDependency("a progress bar needs rich; pip install 'softdb[cli]', or give a callable") from None
    return bar("embed", rate=True)


def embedded(
    texts: Sequence[str | None],
    name: str,
    encoder_of: Callable[[], check.Encoder | None],
    schema: Schema,
    say: Progress,
) -> Array:  # (n, d)
    """The keys of n texts, as they are stored. Raises BadInput."""
    if None in texts:
        raise BadInput(
            f"text {texts.index(None)} is None, which cannot be embedded; give such records apart, with keys=[None, …]"
        )
    parts: list[Array] = []
    for low in range(0, len(texts), AT_ONCE):
        some = check.encoded(list(texts[low : low + AT_ONCE]), name, encoder_of)
        parts.append(check.matrix(some, name, schema.dim, schema.dtype))
        say("embed", min(low + AT_ONCE, len(texts)), len(texts))
    return np.concatenate(parts)
