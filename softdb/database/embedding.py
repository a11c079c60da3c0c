"""Encode texts as keys in batches, and report progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from softdb import check
from softdb.check import Array, Schema
from softdb.errors import BadInput, MissingDependency
from softdb.index.choose import Progress

BATCH_TEXTS = 256  # number of texts that the encoder gets in one call


def telling(progress: Progress | bool | None) -> contextlib.AbstractContextManager[Progress]:
    """Return a context manager that gives a progress callback: `progress` itself, a bar for True, else a no-op."""
    if callable(progress):
        return contextlib.nullcontext(progress)
    if not (progress is None or isinstance(progress, bool)):
        raise BadInput(f"progress is {check.shown(progress)}; expected a callable, or True for a bar")
    if not progress:
        return contextlib.nullcontext(lambda stage, done, total: None)
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
    progress: Progress,
) -> Array:  # (n, d)
    """Encode n texts, and return the keys in the stored dtype. Raises BadInput."""
    if None in texts:
        raise BadInput(
            f"text {texts.index(None)} is None, which cannot be embedded; give these records apart, with keys=[None, …]"
        )
    blocks: list[Array] = []
    for low in range(0, len(texts), BATCH_TEXTS):
        keys = check.encoded(list(texts[low : low + BATCH_TEXTS]), name, encoder_of)
        width = blocks[0].shape[1] if blocks else schema.dim
        blocks.append(check.matrix(keys, name, width, schema.dtype))
        progress("embed", min(low + BATCH_TEXTS, len(texts)), len(texts))
    return np.concatenate(blocks)
