# What native/bind_*.cc bind. Arrays are numpy's, C order, of exactly these types; columns are float32 or float16.
from typing import Any

from numpy import bool_, float32, float64, int32, int64
from numpy.typing import NDArray

def levels() -> list[str]: ...
def level() -> str: ...
def lanes() -> int: ...
def use(level: str) -> bool: ...

# native/bind_attention.cc

def exponentials(x: NDArray[float32], out: NDArray[float32]) -> None: ...

class Piece:
    def __init__(
        self,
        keys: NDArray[Any],  # (n, d)
        values: NDArray[Any] | None,  # (n, v)
        labels: NDArray[int32] | None,  # (n,), in place of values
        rows: NDArray[int64] | None,  # (high,) which records; None: those at low … high - 1
        places: NDArray[int64] | None,  # (high,) the mask's column of each
        mask: NDArray[bool_] | None,  # (q, …) True = takes part
        low: int,
        high: int,
    ) -> None: ...

class Attention:
    def __init__(
        self,
        queries: NDArray[float32],  # (q, d)
        metric: str,
        inverse_temperature: float,
        negligible: float,
        num_classes: int = 0,
        centre: NDArray[float32] | None = None,  # (d,) that keys are seen from, as the queries are already
    ) -> None: ...
    def scratch(self, value_width: int) -> int: ...
    def forward(
        self,
        piece: Piece,
        output: NDArray[float64],  # (q, v) or (num_classes, q), added to
        top: NDArray[float32],  # (q,) raised
        total: NDArray[float64],  # (q,) added to
        scratch: NDArray[float32],
    ) -> None: ...
    def backward(
        self,
        piece: Piece,
        output_grad: NDArray[float32],  # (q, v) or (num_classes, q)
        offset: NDArray[float32],  # (q,)
        inverse_total: NDArray[float32],  # (q,)
        top: NDArray[float32],  # (q,)
        query_grad: NDArray[float64],  # (q, d), added to
        mass: NDArray[float64],  # (q,), added to
        key_grad: NDArray[float32] | None,  # (n, d), added to
        value_grad: NDArray[float32] | None,  # (n, v), added to
        scratch: NDArray[float32],
    ) -> None: ...
