"""What answers are compared with: class labels and tensors, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softdb.check import shown
from softdb.errors import BadInput

__all__ = ["class_labels", "require_shape"]


def class_labels(value: Any, classes: int) -> Tensor:  # (q,)
    """Labels (q,), 0 to classes - 1. Raises BadInput for others."""
    try:
        labels = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BadInput(f"labels are {shown(value)}; expected (q,) whole numbers, 0 to {classes - 1}") from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool or labels.ndim != 1:
        raise BadInput(
            f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; expected (q,) whole numbers, 0 to "
            f"{classes - 1}"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        outside = ((labels < 0) | (labels >= classes)).nonzero()[0, 0]
        raise BadInput(
            f"label {int(labels[outside])} of query {int(outside)} is out of range; expected 0 to {classes - 1}"
        )
    return labels.long()


def require_shape(tensor: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raises BadInput where something is no floating tensor of that shape: another one would broadcast."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise BadInput(f"{name} are {shown(tensor)}; expected a floating tensor {shape}")
    if tuple(tensor.shape) != shape:
        raise BadInput(f"{name} have shape {tuple(tensor.shape)}; expected {shape}, as the answer")
