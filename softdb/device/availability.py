"""Check that this process and the Triton kernels can use a device, and say why if they cannot."""

from __future__ import annotations

import functools
import importlib.util

import torch

PRETENDED = False  # set by tests: True treats the CPU as a GPU, under Triton's interpreter
CAPABILITY = (8, 0)  # oldest CUDA compute capability on which the kernels run


def usable(device: torch.device) -> str | None:
    """Return None if the Triton kernels run on a device, else the reason why torch operations must replace them."""
    if PRETENDED and device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{device} is not a CUDA device"
    return _reason(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache
def _reason(index: int) -> str | None:
    if torch.version.hip:
        return "the kernels have not been tried on ROCm"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'softdb[gpu]'"
    capability = torch.cuda.get_device_capability(index)
    if capability < CAPABILITY:
        name = torch.cuda.get_device_name(index)
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 or newer"
    return None


def forked(device: torch.device) -> bool:
    """Return True if this process cannot use CUDA because it was forked from a process that had started CUDA."""
    if device.type != "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False
