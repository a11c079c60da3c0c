"""Autocast, TF32 and torch.compile around a database change none of its answers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import D, V, filled

from softdb.nn import Memory, View, retrieval_loss

HOW: dict[str, dict[str, Any]] = {"exact": {}, "nearest": {"k": 9}, "estimate": {"rtol": 0.2}}
Asked = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture(params=[*HOW, "log_partition", "loss", "memory", "view"])
def asked(request: pytest.FixtureRequest, anywhere: torch.device) -> tuple[Asked, list[Tensor]]:
    """A question of queries, and the parameters that get a gradient besides."""
    db = filled()
    if request.param in HOW:
        words: dict[str, Any] = HOW[request.param]
        return lambda queries: db.attend(queries, temperature=0.5, **words).output, []
    if request.param == "log_partition":
        return lambda queries: db.log_partition(queries).value, []
    if request.param == "loss":
        return lambda queries: retrieval_loss(db, queries, list(range(len(queries)))), []
    module: Any = Memory(db, k=6) if request.param == "memory" else View(db, torch.nn.Linear(D, D))
    module.to(anywhere)
    return lambda queries: module(queries, **({} if request.param == "memory" else {"k": 6})).output, [
        *module.parameters()
    ]


def gradients_of(
    asked: Asked, queries: Tensor, parameters: list[Tensor], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The answer, under autocast, and all gradients."""
    leaf = queries.clone().requires_grad_()
    with torch.autocast(queries.device.type, dtype, enabled=dtype is not None):
        answer = asked(leaf)
    grads = torch.autograd.grad(answer.square().sum(), [leaf, *parameters])
    return [answer.detach(), *(grad.to_dense() for grad in grads)]


@pytest.fixture
def coarse() -> Iterator[None]:
    """TF32 on a GPU, and what the CPU has of the kind."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_autocast_and_tf32_change_no_answer(
    asked: tuple[Asked, list[Tensor]], anywhere: torch.device, dtype: torch.dtype | None
) -> None:
    if dtype is not None and asked[1] and len(asked[1][0]) == D:
        pytest.skip("the encoder of a view is cast, as the user wants it")
    queries = torch.randn(8, D, device=anywhere)
    here = gradients_of(asked[0], queries, asked[1], dtype)
    torch.set_float32_matmul_precision("highest")
    for one, other in zip(here, gradients_of(asked[0], queries, asked[1]), strict=True):
        assert one.dtype is other.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Dynamo's counters, of a clean start."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # torch looks at .grad of tensors of any kind when it puts guards on them
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()


class Around(torch.nn.Module):
    """A model with a memory or a view in its middle."""

    def __init__(self, middle: torch.nn.Module, **words: Any) -> None:
        super().__init__()
        self.first, self.middle, self.words = torch.nn.Linear(D, D), middle, words

    def forward(self, x: Tensor) -> Tensor:  # (b, D) -> (b, V)
        found: Tensor = self.middle(torch.tanh(self.first(x)), **self.words).output * 2
        return found


@pytest.mark.parametrize("name", ["memory", pytest.param("view", marks=pytest.mark.slow)])
def test_a_compiled_model_learns_as_the_plain_one(name: str, anywhere: torch.device, dynamo: Any) -> None:
    db = filled()
    middle: Any = Memory(db, k=5) if name == "memory" else View(db, torch.nn.Linear(D, D))
    plain = Around(middle, **({} if name == "memory" else {"k": 5})).to(anywhere)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend="aot_eager")
    frames = 0
    for count in (4, 7, 9, 11):
        x = torch.randn(count, D, device=anywhere)
        answers = plain(x), compiled(x)
        torch.testing.assert_close(*answers)
        for model, answer in zip((plain, other), answers, strict=True):
            model.zero_grad()
            answer.square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
        for ours, theirs in zip(plain.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        frames = frames if count > 7 else dynamo["frames"]["total"]
    assert dynamo["frames"]["total"] == frames <= 12, "the database was traced, or compiled anew for another batch"
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert answers[1].shape == (11, V)
