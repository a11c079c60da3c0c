"""Stored keys through an encoder that is being trained: checked, block by block, in training mode or out of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softdb.answers import Resolve
from softdb.check import shown
from softdb.errors import BadInput

__all__ = ["Encoding", "evaluating", "probed"]

Encode = Callable[[Tensor], Tensor]  # (m, d) -> (m, d')


def probed(encoder: Encode, dim: int) -> int:
    """d', the width that an encoder gives to keys as wide as the database's, asked with zeros."""
    if not callable(encoder):
        raise BadInput(f"encoder is {shown(encoder)}; expected an nn.Module or a callable, (m, d) -> (m, d')")
    with torch.no_grad(), evaluating(encoder):
        try:
            found = encoder(_as_input(encoder, torch.zeros(2, dim)))
        except RuntimeError as error:  # so torch says that shapes do not fit
            raise BadInput(
                f"the encoder failed on two keys of zeros, {dim} wide as those of this database: {error}; give one "
                f"that takes (m, {dim})"
            ) from error
    return _shaped(found, 2, None)


@contextlib.contextmanager
def evaluating(encoder: Encode) -> Iterator[None]:
    """The encoder in eval mode; each of its parts returns to its own mode afterwards."""
    parts = list(encoder.modules()) if isinstance(encoder, torch.nn.Module) else []
    training = [part for part in parts if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _casts() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocast that the calling thread is under."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@dataclass(frozen=True)
class Encoding:
    """An encoder of stored keys, whose output is checked.

    It runs under the autocast that it was made under, the only part of a soft query that does: its output is at least
    float32, and what becomes of that is as precise as the queries.
    """

    encoder: Encode
    dim: int  # d'
    size: int  # records encoded at once
    read: Resolve  # rows -> ids, for messages
    lock: Any = field(default_factory=threading.RLock)  # held while it runs: its mode is that of one thread
    casts: tuple[tuple[str, torch.dtype], ...] = field(default_factory=_casts)

    @property
    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes when a parameter of the encoder is changed in place, or replaced."""
        parameters = self.encoder.parameters() if isinstance(self.encoder, torch.nn.Module) else ()
        return tuple((id(one), 0 if one.is_inference() else one._version) for one in parameters)

    def of(
        self,
        keys: Tensor,  # (m, d)
        rows: NDArray[np.int64],  # (m,) of their records, for messages
    ) -> Tensor:  # (m, d')
        """Encoded keys, in the mode that the encoder is in, with gradient. Raises BadInput for what cannot be one."""
        if not len(keys):
            return _precise(_as_input(self.encoder, torch.zeros(0, self.dim)))
        with self.lock, contextlib.ExitStack() as stack:
            for kind, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            encoded = self.encoder(_as_input(self.encoder, keys))
        _shaped(encoded, len(keys), self.dim)
        encoded = _precise(encoded)
        plain = encoded.detach()
        # a sum is finite only where every number is, or where it is too large: then each is looked at
        if not math.isfinite(float(plain.sum())) and not bool(plain.isfinite().all()):
            bad = int(rows[int((~plain.isfinite().all(1)).nonzero()[0])])
            known = self.read(np.array([bad]))
            name = f"id {shown(known[bad][0])}" if known else "an id deleted since"
            raise BadInput(
                f"the encoder gave NaN or infinity for the key of the record with {name}; repair that key or the "
                "encoder (a division by a length of 0, a learning rate too large)"
            )
        return encoded

    @torch.no_grad()
    def found(
        self,
        keys: Tensor,  # (m, d)
        rows: NDArray[np.int64],  # (m,)
    ) -> Tensor:  # (m, d')
        """As `of`, for finding: `size` at a time, in eval mode and without gradient."""
        with self.lock, evaluating(self.encoder):
            parts = [slice(low, low + self.size) for low in range(0, max(1, len(keys)), self.size)]
            found = [self.of(keys[part], rows[part]) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)


def _as_input(encoder: Encode, keys: Tensor) -> Tensor:
    """Keys in the dtype and on the device of the encoder's parameters; float32 where it has none."""
    parameters = encoder.parameters() if isinstance(encoder, torch.nn.Module) else iter(())
    like = next((one for one in parameters if one.is_floating_point()), None)
    return keys.float() if like is None else keys.to(like.device).to(like.dtype)


def _precise(encoded: Tensor) -> Tensor:
    """At least float32, as queries are."""
    return encoded.to(torch.promote_types(encoded.dtype, torch.float32))


def _shaped(encoded: object, count: int, dim: int | None) -> int:
    """The width of what the encoder returned, checked."""
    expected = f"a floating tensor ({count}, {dim or 'any width'})"
    if not isinstance(encoded, Tensor) or not encoded.is_floating_point():
        raise BadInput(f"the encoder returned {shown(encoded)} for {count} keys; expected {expected}")
    fits = encoded.ndim == 2 and len(encoded) == count and encoded.shape[1] > 0
    if not fits or (dim is not None and encoded.shape[1] != dim):
        raise BadInput(
            f"the encoder returned shape {tuple(encoded.shape)} for {count} keys; expected {expected}: one vector for "
            "each key, all as wide as the view"
        )
    return encoded.shape[1]
