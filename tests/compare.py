"""Comparisons of tensors and of their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    found = found.detach() if isinstance(found, Tensor) else found
    expected = expected.detach() if isinstance(expected, Tensor) else expected
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def same(found: Tensor, expected: Tensor, wanted: list[Tensor], tolerance: float = 1e-10) -> None:
    """Outputs and gradients of a random sum of them."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    close(found, expected, tolerance)
    grad = torch.randn_like(expected)
    pairs = [torch.autograd.grad(one, wanted, grad, retain_graph=True) for one in (found, expected)]
    for ours, theirs in zip(*pairs, strict=True):
        close(ours, theirs, tolerance)
