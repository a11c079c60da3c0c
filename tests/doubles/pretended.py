"""A device that is pretended: to torch it is another one than the CPU, and its tensors are computed there all the same.

Its tensors refuse the company of the CPU's and have no `numpy()`, as a GPU's; every crossing is noted. It knows every
operation, since it hands them to the CPU. Its name is that of a device that this torch has without a backend, and for
which autograd needs no thread: `lazy:0`.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

NAME = "lazy"
INDEXES = {"index", "index_put_", "_index_put_impl_", "index_put"}  # take indices of the CPU, as with CUDA
AUTOCAST = torch.autocast
DEVICE = torch.device(NAME, 0)


class There(torch.Tensor):
    """A tensor of the pretended device, around one of the CPU."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        laid: dict[str, Any] = {"layout": inner.layout}
        if inner.layout is torch.strided:
            laid = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: There = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE, **laid)
        made.inside = inner
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new(self, indices: Any, values: Any, size: Any) -> Tensor:  # type: ignore[override]  # torch.optim.SparseAdam asks
        return torch.sparse_coo_tensor(indices, values, size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, call: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(call, *args, **(kwargs or {}))


def autocast(kind: str, *args: Any, **words: Any) -> Any:
    """torch.autocast, which knows no such device."""
    return contextlib.nullcontext() if kind == NAME else AUTOCAST(kind, *args, **words)


class Module:
    """Functions of a device's own module, such as torch.cuda, that torch calls; without random numbers."""

    _initialized = False


class Crossing(NamedTuple):
    """A tensor that went from one device to the other."""

    to: str
    numbers: int


class Pretended:
    """Tensors that crossed, and the number of times the CPU waited, since the device was made."""

    device = DEVICE
    noting: Pretended | None = None

    def __init__(self) -> None:
        self.crossings: list[Crossing] = []
        self.waits = 0
        Pretended.noting = self

    def note(self, named: str, goal: str | None, tensors: list[Tensor]) -> None:
        """One operation on tensors, some of them on the device."""
        if named == "_local_scalar_dense":
            self.waits += 1
            return
        here = [tensor for tensor in tensors if not isinstance(tensor, There) and tensor.ndim]
        if named == "_to_copy" and goal == "cpu":
            self.crossings.append(Crossing("cpu", tensors[0].numel()))
        elif here:
            to = NAME if isinstance(tensors[0], There) else "cpu"
            self.crossings.append(Crossing(to, here[0].numel()))


def computed(call: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation, by the CPU; with what torch refuses on a device of its own."""
    named = call.overloadpacket.__name__
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = {id(tensor.inside): tensor for tensor in tensors if isinstance(tensor, There)}
    goal = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    meets = named in ("copy_", "_to_copy") or (named in INDEXES and isinstance(tensors[0], There))
    if there and not meets and any(tensor.ndim for tensor in tensors if not isinstance(tensor, There)):
        raise RuntimeError(f"{named}: tensors of {DEVICE} and of the CPU, {[tuple(one.shape) for one in tensors]}")
    if Pretended.noting is not None:
        Pretended.noting.note(named, goal, tensors)
    found = call(*tree_map(_inside, args), **tree_map(_inside, kwargs))
    if goal == "cpu" or (named == "copy_" and not isinstance(args[0], There)):
        return args[0] if named == "copy_" else found
    return tree_map(lambda one: there.get(id(one), There(one)) if isinstance(one, Tensor) else one, found)


LIBRARY: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
LIBRARY.fallback(computed, "Lazy")


def _inside(one: Any) -> Any:
    if isinstance(one, There):
        return one.inside
    return torch.device("cpu") if isinstance(one, torch.device) and one.type == NAME else one
