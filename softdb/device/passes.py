"""Arguments of the kernels in one form: every tensor with a leading dimension of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.device.availability import usable
from softdb.errors import BadInput

WIDEST = 1024  # keys, values and classes that a kernel takes
STORED = (torch.float32, torch.float16, torch.bfloat16)


class DevicePass(NamedTuple):
    """One pass: the softmax of scale · metric(q, k) over the records that take part, of each head."""

    queries: Tensor  # (h, q, d)
    keys: Tensor  # (h, n, d)
    values: Tensor | None  # (h, n, v), or labels (h, n); None: nothing is pooled
    metric: Metric
    scale: float
    keep: Tensor | None  # (n,) bool
    mask: Tensor | None  # (h, q, n) bool
    num_classes: int | None
    lead: tuple[int, ...]  # (q,), or (h, q) where what came had heads

    @property
    def labels(self) -> bool:
        """True if the weight of classes is what is pooled."""
        return self.values is not None and not self.values.is_floating_point()

    @property
    def width(self) -> int:
        """v."""
        if self.values is None:
            return 0
        return self.num_classes or 0 if self.labels else self.values.shape[2]

    def live(self, part: slice = slice(None)) -> Tensor | None:  # broadcasts to (h, q, m)
        """Mask of some records that take part; None: all."""
        keep = None if self.keep is None else self.keep[part]
        if self.mask is None:
            return keep
        return self.mask[:, :, part] if keep is None else self.mask[:, :, part] & keep

    def unfit(self) -> str | None:
        """Reason why the kernels do not take this; None if they do."""
        columns = [self.keys] if self.values is None or self.labels else [self.keys, self.values]
        if self.queries.dtype is not torch.float32:
            return f"the queries are {self.queries.dtype}; the kernels take float32"
        if any(column.dtype not in STORED for column in columns):
            return f"the columns are {[column.dtype for column in columns]}; the kernels take {STORED}"
        widest = max(self.queries.shape[2], self.width)
        if widest > WIDEST:
            return f"a vector is {widest} wide; the kernels take {WIDEST}"
        return usable(self.queries.device)


def folded(
    queries: Tensor,  # (q, d) or (h, q, d), and so all others
    keys: Tensor,  # (n, d)
    values: Tensor | None,  # (n, v), or labels (n,)
    metric: Metric,
    scale: float,
    keep: Tensor | None,  # (n,), never with heads
    mask: Tensor | None,  # (q, n)
    num_classes: int | None,
) -> DevicePass:
    """One form, with heads. Raises BadInput for tensors that do not fit together."""
    heads = queries.ndim == 3
    q, k, v, m = (one if one is None or heads else one.unsqueeze(0) for one in (queries, keys, values, mask))
    assert q is not None
    assert k is not None
    what = DevicePass(q, k, v, metric, scale, keep, m, num_classes, tuple(queries.shape[:-1]))
    if what.labels and num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    n, records = k.shape[1], v if v is None or what.labels else v[..., 0]
    fits = q.ndim == k.ndim == 3 and q.shape[2] == k.shape[2]
    wanted = ((k[..., 0], (len(q), n)), (records, (len(q), n)), (keep, (n,)), (m, (*q.shape[:2], n)))
    if not fits or any(one is not None and (one.shape != size or one.device != q.device) for one, size in wanted):
        given = {"queries": queries, "keys": keys, "values": values, "keep": keep, "mask": mask}
        shapes = (f"{name} {tuple(one.shape)} on {one.device}" for name, one in given.items() if one is not None)
        raise BadInput(
            f"the shapes are {', '.join(shapes)}; expected queries (q, d), keys (n, d), values (n, v) or labels (n,), "
            "keep (n,) and mask (q, n) on one device, all but keep with a leading dimension of heads or without"
        )
    return what
