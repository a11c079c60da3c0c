"""The devices that these tests run on: a pretended one everywhere, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pretended import Pretended

NONE = "torch sees no CUDA device here; see docs/gpu.md, 'First run on a GPU'"


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device that is not the CPU."""
    if request.param == "pretended":
        yield Pretended.device
        return
    if not torch.cuda.is_available():
        pytest.skip(NONE)
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()  # what failed there fails here


@pytest.fixture
def pretended() -> Iterator[Pretended]:
    """The device that is not there, which notes what crosses to it and back."""
    yield Pretended()
    Pretended.noting = None


@pytest.fixture
def cuda() -> torch.device:
    """A GPU."""
    if not torch.cuda.is_available():
        pytest.skip(NONE)
    return torch.device("cuda", torch.cuda.current_device())
