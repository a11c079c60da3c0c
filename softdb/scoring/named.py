"""Conversion of arguments: the name of a weighting to the weighting, the lengths in a padded batch to a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from softdb.check import holds, shown
from softdb.errors import BadInput
from softdb.scoring.dense import Normalised, Softmax, Uniform
from softdb.scoring.sparse import Argmax, Entmax15, Sparsemax
from softdb.scoring.weighting import Weighting

_WEIGHTINGS: tuple[Weighting, ...] = (Softmax(), Sparsemax(), Entmax15(), Normalised(), Uniform(), Argmax())
_CLASSES = tuple(type(each) for each in _WEIGHTINGS)
_BY_NAME = {each.name: each for each in _WEIGHTINGS} | {"normalized": Normalised()}


def weighting(name: object) -> Weighting:
    """Return the weighting with a name; return a Weighting unchanged. Raises BadInput, which lists the names.

    "normalized" is another spelling of "normalised".

    >>> weighting("sparsemax")
    Sparsemax()
    """
    if isinstance(name, str) and name in _BY_NAME:  # checked first, as isinstance with a protocol takes 50 µs
        return _BY_NAME[name]
    if isinstance(name, _CLASSES) or (isinstance(name, Weighting) and not isinstance(name, type)):
        return name
    names = ", ".join(repr(each.name) for each in _WEIGHTINGS)
    raise BadInput(f"weights is {shown(name)}; choose one of {names}, or give a softdb.weights.Weighting")


def valid_mask(
    valid_len: object,  # (b,) or (b, q) whole numbers from 0 to n
    q: int,
    n: int,
) -> Tensor:  # (b, q, n) bool
    """Return a mask of the first `valid_len` of the n keys, for each batch entry or each of its queries.

    `valid_len` are the lengths of a padded batch, as in a masked softmax (Zhang et al. 2023, "Dive into Deep Learning",
    section 11.3). True = takes part; a length of 0 masks all keys. Cost b q n.
    Raises BadInput for a length that is negative, above n or not a whole number, and for another shape.

    >>> valid_mask([1, 2], 1, 3).tolist()
    [[[True, False, False]], [[True, True, False]]]
    """
    try:
        lengths = torch.as_tensor(valid_len)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"valid_len is {shown(valid_len)}; expected whole numbers of shape (b,) or (b, {q})") from None
    if lengths.dtype is torch.bool or lengths.is_floating_point() or lengths.is_complex():
        raise BadInput(f"valid_len has dtype {lengths.dtype}; expected whole numbers: how many of {n} keys take part")
    if lengths.ndim not in (1, 2) or (lengths.ndim == 2 and lengths.shape[1] != q):
        raise BadInput(f"valid_len has shape {tuple(lengths.shape)}; expected (b,) or (b, {q}), one for each query")
    lengths = lengths.to(torch.int64)
    outside = (lengths < 0) | (lengths > n)
    if not holds(~outside.any()):
        raise BadInput(f"valid_len holds {int(lengths[outside][0])}; expected 0 to {n}, the number of keys")
    each = lengths if lengths.ndim == 2 else lengths.unsqueeze(1).expand(-1, q)
    return torch.arange(n, device=lengths.device) < each.unsqueeze(2)
