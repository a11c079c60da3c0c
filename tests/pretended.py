"""A device that is pretended: to torch it is another one than the CPU, and its tensors are computed there all the same.

Tensors of `pretended:0` refuse the company of the CPU's and have no `numpy()`, as a GPU's; every crossing is noted. It
stands on torch's interface for backends in Python, and knows every operation, since it hands them to the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from typing_extensions import Self

NAME = "pretended"
MAY_MEET = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "index_put"}  # the CPU's, as with CUDA


class _Module(_DummyBackendModule):
    """What torch asks a backend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, _Module())  # type: ignore[no-untyped-call]
DEVICE = torch.device(NAME, 0)


class There(torch.Tensor):
    """A tensor of the pretended device, around one of the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        laid: dict[str, Any] = {"layout": inner.layout}
        if inner.layout is torch.strided:
            laid = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: There = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE, **laid)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Pretended.now is None:
            raise RuntimeError(f"{call} of a tensor of {DEVICE} outside the test that made it")
        return Pretended.now.__torch_dispatch__(call, types, args, kwargs)  # from another thread


class Crossing(NamedTuple):
    """What went from one device to the other."""

    to: str
    count: int  # numbers


class Pretended(TorchDispatchMode):
    """While it lasts there is the device; what crossed is in `crossings`, and where the CPU waited in `waits`."""

    device = DEVICE
    now: Pretended | None = None

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[Crossing] = []
        self.waits = 0

    def __enter__(self) -> Self:
        Pretended.now = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Pretended.now = None

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, named = kwargs or {}, call.overloadpacket.__name__
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        there = {id(one.inner): one for one in tensors if isinstance(one, There)}
        wanted = kwargs.get("device")
        goal = None if wanted is None else torch.device(wanted).type
        if not there and goal != NAME:
            return call(*args, **kwargs)
        here = [one for one in tensors if not isinstance(one, There) and one.ndim]
        if there and here and named not in MAY_MEET:
            raise RuntimeError(f"{named}: tensors of {DEVICE} and of the CPU, {[tuple(one.shape) for one in tensors]}")
        self._note(named, goal, bool(there), tensors)
        found = call(*tree_map(_inside, args), **tree_map(_inside, kwargs))
        if goal == "cpu" or (named == "copy_" and not isinstance(args[0], There)):
            return found
        return tree_map(lambda one: there.get(id(one), There(one)) if isinstance(one, Tensor) else one, found)

    def _note(self, named: str, goal: str | None, there: bool, tensors: list[Tensor]) -> None:
        if named == "_local_scalar_dense":
            self.waits += 1
        elif (named == "_to_copy" and goal is not None and (goal == NAME) != there) or (
            named in MAY_MEET - {"_to_copy"} and len({type(one) is There for one in tensors if one.ndim}) == 2
        ):
            moved = tensors[0] if named == "_to_copy" else next(one for one in tensors if not isinstance(one, There))
            to = goal if named == "_to_copy" else NAME if isinstance(tensors[0], There) else "cpu"
            self.crossings.append(Crossing(str(to), moved.numel()))


def _inside(one: Any) -> Any:
    if isinstance(one, There):
        return one.inner
    return torch.device("cpu") if isinstance(one, torch.device) and one.type == NAME else one
