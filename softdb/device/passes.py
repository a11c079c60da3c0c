"""`DevicePass`: the checked arguments of a pass, as tensors with a leading dimension for heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.device.availability import usable
from softdb.errors import BadInput

WIDEST = 1024  # largest width of keys and values, and number of classes, that the kernels take
STORED = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of keys and values that the kernels take


class DevicePass(NamedTuple):
    """Arguments of a pass, which computes for each head the softmax of scale · metric(q, k) over the records."""

    queries: Tensor  # (h, q, d)
    keys: Tensor  # (h, n, d)
    values: Tensor | None  # (h, n, v), or labels (h, n); None: nothing is pooled
    metric: Metric
    scale: float
    keep: Tensor | None  # (n,) bool: records that take part in any query; None: all
    mask: Tensor | None  # (h, q, n) bool: records that take part in each query; None: all
    num_classes: int | None
    lead: tuple[int, ...]  # leading shape of the answers: (q,), or (h, q) if the caller's tensors had heads

    @property
    def labels(self) -> bool:
        """True if the values are class labels: the output is then the sum of weights for each class."""
        return self.values is not None and not self.values.is_floating_point()

    @property
    def width(self) -> int:
        """Width v of the output; 0 if there are no values."""
        if self.values is None:
            return 0
        return self.num_classes or 0 if self.labels else self.values.shape[2]

    def live(self, rows: slice = slice(None)) -> Tensor | None:  # broadcasts to (h, q, m)
        """Return `keep` and `mask` combined, for the records in `rows`; None if all take part."""
        keep = None if self.keep is None else self.keep[rows]
        if self.mask is None:
            return keep
        return self.mask[:, :, rows] if keep is None else self.mask[:, :, rows] & keep

    def unfit(self) -> str | None:
        """Return the reason why the kernels cannot compute this pass; None if they can."""
        columns = [self.keys] if self.values is None or self.labels else [self.keys, self.values]
        if self.queries.dtype is not torch.float32:
            return f"the queries are {self.queries.dtype}; the kernels take float32"
        if any(column.dtype not in STORED for column in columns):
            return f"the columns are {[column.dtype for column in columns]}; the kernels take {STORED}"
        widest = max(self.queries.shape[2], self.width)
        if widest > WIDEST:
            return f"a vector is {widest} wide; the kernels take at most {WIDEST}"
        return usable(self.queries.device)


def folded(
    queries: Tensor,  # (q, d); or (h, q, d) for h heads: then all others but `keep` have heads, too
    keys: Tensor,  # (n, d)
    values: Tensor | None,  # (n, v), or labels (n,)
    metric: Metric,
    scale: float,
    keep: Tensor | None,  # (n,), without heads
    mask: Tensor | None,  # (q, n)
    num_classes: int | None,
) -> DevicePass:
    """Check arguments, and add a dimension of heads if absent. Raises BadInput if shapes or devices do not fit."""
    heads = queries.ndim == 3
    q, k, v, m = (t if t is None or heads else t.unsqueeze(0) for t in (queries, keys, values, mask))
    assert q is not None
    assert k is not None
    inputs = DevicePass(q, k, v, metric, scale, keep, m, num_classes, tuple(queries.shape[:-1]))
    if inputs.labels and num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    n, records = k.shape[1], v if v is None or inputs.labels else v[..., 0]
    fits = q.ndim == k.ndim == 3 and q.shape[2] == k.shape[2]
    expected = ((k[..., 0], (len(q), n)), (records, (len(q), n)), (keep, (n,)), (m, (*q.shape[:2], n)))
    if not fits or any(t is not None and (t.shape != shape or t.device != q.device) for t, shape in expected):
        tensors = {"queries": queries, "keys": keys, "values": values, "keep": keep, "mask": mask}
        shapes = (f"{name} {tuple(t.shape)} on {t.device}" for name, t in tensors.items() if t is not None)
        raise BadInput(
            f"the shapes are {', '.join(shapes)}; expected queries (q, d), keys (n, d), values (n, v) or labels (n,), "
            "keep (n,) and mask (q, n) on one device, all but keep with a leading dimension of heads or without"
        )
    return inputs
