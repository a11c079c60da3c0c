"""Availability of a device to this process and to the Triton kernels, with the reason if there is none."""

from __future__ import annotations

import functools
import importlib.util

import torch

PRETENDED = False  # tests only: tensors of the CPU count as a device's, under Triton's interpreter
CAPABILITY = (8, 0)  # the oldest that the kernels are compiled for


def usable(device: torch.device) -> str | None:
    """None where Triton kernels run on a device, else the reason why torch does the same in blocks."""
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
        return f"{name} is of compute capability {capability[0]}.{capability[1]}, older than 8.0"
    return None


def forked(device: torch.device) -> bool:
    """Return True where this process was forked from one in which CUDA had started: CUDA cannot be used here."""
    if device.type != "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False
