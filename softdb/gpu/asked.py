"""What the kernels are asked, in one form: every tensor with a leading dimension of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from softdb.check import Metric
from softdb.errors import BadInput
from softdb.gpu.usable import usable

__all__ = ["DevicePass", "folded"]

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
        """Whether the weight of classes is what is pooled."""
        return self.values is not None and not self.values.is_floating_point()

    @property
    def width(self) -> int:
        """v."""
        if self.values is None:
            return 0
        return self.num_classes or 0 if self.labels else self.values.shape[2]

    def live(self, part: slice = slice(None)) -> Tensor | None:  # broadcasts to (h, q, m)
        """Which of some records take part; None: all."""
        keep = None if self.keep is None else self.keep[part]
        if self.mask is None:
            return keep
        return self.mask[:, :, part] if keep is None else self.mask[:, :, part] & keep

    def unfit(self) -> str | None:
        """Why the kernels do not take this, if they do not."""
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
    queries: Tensor,  # (q, d) or (h, q, d)
    keys: Tensor,  # (n, d) or (h, n, d)
    values: Tensor | None,  # (n, v) or (h, n, v), or labels (n,) or (h, n)
    metric: Metric,
    scale: float,
    keep: Tensor | None,  # (n,)
    mask: Tensor | None,  # (q, n) or (h, q, n)
    num_classes: int | None,
) -> DevicePass:
    """In one form; heads that share their records are more queries. Raises BadInput for shapes that do not fit."""
    given = {"queries": queries, "keys": keys, "values": values, "keep": keep, "mask": mask}
    labels = values is not None and not values.is_floating_point()
    if labels and num_classes is None:
        raise BadInput("the values are class labels; give num_classes, the width of the distribution to return")
    wide = values.unsqueeze(-1) if values is not None and labels else values
    asked, k = _with_heads(queries), _with_heads(keys)
    v, m = (None if one is None else _with_heads(one) for one in (wide, mask))
    devices = {str(one.device) for one in given.values() if one is not None}
    if len(devices) > 1:
        raise BadInput(f"the tensors lie on {', '.join(sorted(devices))}; move them to one device")
    h = max(len(one) for one in (asked, k, v) if one is not None)
    fits = all(one is None or (one.ndim == 3 and len(one) in (1, h)) for one in (asked, k, v, m))
    fits = fits and asked.shape[2] == k.shape[2] and (v is None or v.shape[1] == k.shape[1])
    fits = fits and (keep is None or keep.shape == k.shape[1:2])
    if not fits or not (m is None or m.shape[1:] == (asked.shape[1], k.shape[1])):
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in given.items() if one is not None)
        raise BadInput(
            f"the shapes are {shapes}; expected queries (q, d), keys (n, d), values (n, v) or labels (n,), keep (n,) "
            "and mask (q, n), all but keep with a leading dimension of heads or without"
        )
    heads = any(one is not None and one.ndim == 3 for one in (queries, keys, wide, mask))
    lead = (h, asked.shape[1]) if heads else (asked.shape[1],)
    m = None if m is None else m.expand(h, -1, -1)
    asked = asked.expand(h, -1, -1)
    if len(k) == 1 and (v is None or len(v) == 1):
        asked, m = asked.flatten(0, 1).unsqueeze(0), None if m is None else m.flatten(0, 1).unsqueeze(0)
    else:
        k, v = k.expand(h, -1, -1), None if v is None else v.expand(h, -1, -1)
    v = v.squeeze(-1) if v is not None and labels else v
    return DevicePass(asked, k, v, metric, scale, keep, m, num_classes, lead)


def _with_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 3 else tensor.unsqueeze(0)
