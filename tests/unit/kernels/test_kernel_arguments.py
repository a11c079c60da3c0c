"""Kernels write only into arrays of the caller, or refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from with_kernels import NEEDS_KERNELS

from softdb import kernels
from softdb.attend.fused import _aligned

pytestmark = NEEDS_KERNELS

N, Q, D = 40, 3, 16
Array = np.ndarray[Any, Any]
Call = Callable[..., object]


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def calls() -> dict[str, tuple[Call, dict[str, Array]]]:
    """Kernels by name, each with the arrays that it writes into."""
    native = kernels.native()
    attention, piece = native.Attention(ones(Q, D), "dot", 1.0, -80.0, scales=ones(Q)), native.Piece(
        ones(N, D), ones(N, D), None, None, None, None, 0, N
    )  # fmt: skip
    scratch, positions = _aligned(attention.scratch(D)), np.tile(np.arange(N), (Q, 1))
    scratch[:] = 0  # what lies in memory may be no number, whose conversion warns
    column = native.Column(np.array([(keys := ones(N, D)).ctypes.data]), np.zeros(1, np.int64), D, 0)

    def forward(**out: Array) -> None:
        attention.forward(piece, *out.values())

    def backward(**out: Array) -> None:
        attention.backward(piece, ones(Q, D), ones(Q), ones(Q), ones(Q), *out.values())

    def rerank(**out: Array) -> None:
        native.rerank(ones(Q, D), positions, column, 0, *out.values())
        assert len(keys) == N  # they live until here

    return {
        "forward": (
            forward,
            {"output": np.zeros((Q, D)), "top": np.full(Q, -99, np.float32), "total": np.zeros(Q), "scratch": scratch},
        ),
        "backward": (
            backward,
            {
                "query_grad": np.zeros((Q, D)), "mass": np.zeros(Q), "along_scores": np.zeros(Q),
                "key_grad": 0 * ones(N, D), "value_grad": 0 * ones(N, D), "scratch": scratch,
            },
        ),
        "exponentials": (lambda out: native.exponentials(-ones(16), out), {"out": ones(16)}),
        "rerank": (rerank, {"found": np.full((Q, 2), -7), "scores": ones(Q, 2)}),
    }  # fmt: skip


def otherwise(array: Array) -> list[Array]:
    """Of another type, every second number of a longer one, and one that must not be written to."""
    kinds = {"f": np.float64, "d": np.float32, "l": np.int32, "q": np.int32}
    locked, wide = array.copy(), np.repeat(array, 2, axis=-1)
    locked.flags.writeable = False
    return [array.astype(kinds[array.dtype.char]), wide[..., ::2], locked]


@pytest.mark.parametrize("name", ["forward", "backward", "exponentials", "rerank"])
def test_an_output_that_would_be_a_copy_is_refused(name: str) -> None:
    call, right = calls()[name]
    before = {which: array.copy() for which, array in right.items()}
    for which, array in right.items():
        for wrong in otherwise(array):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call(**{**right, which: wrong})
    for which, array in right.items():
        if which != "scratch":
            np.testing.assert_array_equal(array, before[which], err_msg=which)
    call(**right)
    for which, array in right.items():
        assert which == "scratch" or (array != before[which]).any(), which
