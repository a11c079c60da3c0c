"""A model around each part of softdb that trains: what the page docs/works-with.md lists, as one kind of module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import softdb
from softdb.nn import Attention, Memory, View, info_nce, pooled_loss, retrieval_loss

N, D, V, BATCH = 30, 6, 4, 8
Options = dict[str, Any]


def stored() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return torch.randn(N, D, generator=draws), torch.randn(N, V, generator=draws)


def opened(path: Path | None, mode: Any = "rw") -> softdb.SoftDB:
    """A database of N records with values, made if it is not there."""
    there = path is not None and path.exists()
    db = softdb.open(path, mode=mode) if there else softdb.open(path, dim=D, value_dim=V)
    if not there:
        db.insert(range(N), *stored())
    return db


def batch(count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Inputs (count, D) and the ids of their right records."""
    draws = torch.Generator().manual_seed(5)
    return torch.randn(count, D, generator=draws), torch.randint(N, (count,), generator=draws)


class Tower(torch.nn.Module):
    """An encoder of queries before a part of softdb; returns a loss for each query."""

    def __init__(self, row: str, db: softdb.SoftDB, options: Options) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.row, self.options, self.db = row, options, [db]
        self.encoder = torch.nn.Linear(D, D)
        if row == "softdb.attention":
            self.keys, self.values = (torch.nn.Parameter(column) for column in stored())
        elif row == "nn.Attention":
            self.layer: Any = Attention(db, D, 2, batch_first=True)
        elif row == "nn.Memory":
            self.layer = Memory(db, k=5, temperature=torch.nn.Parameter(torch.tensor(0.7)))
        elif row in ("nn.View", "losses"):
            self.layer = View(db, torch.nn.Linear(D, D, bias=False))

    def forward(
        self,
        x: Tensor,  # (b, D)
        right: Tensor,  # (b,)
    ) -> Tensor:  # (b,)
        return ROWS[self.row](self, torch.tanh(self.encoder(x)), right)


def _squares(output: Tensor) -> Tensor:
    return output.square().sum(1)


def _losses(tower: Tower, queries: Tensor, right: Tensor) -> Tensor:
    db, ids = tower.db[0], right.tolist()
    each: Options = {"reduction": "none"}
    return (
        retrieval_loss(db, queries, ids, **each, **tower.options)
        + retrieval_loss(tower.layer, queries, ids, k=5, **each)
        + info_nce(db, queries, ids, negatives=3, in_batch=False, temperature=0.5, **each)
        + pooled_loss(db, queries, torch.zeros(len(queries), V), **each, **tower.options)
    )


ROWS: dict[str, Callable[[Tower, Tensor, Tensor], Tensor]] = {
    "softdb.attention": lambda tower, q, _: _squares(softdb.attention(q, tower.keys, tower.values, **tower.options)),
    "nn.Attention": lambda tower, q, _: _squares(tower.layer(q[None], **tower.options)[0][0]),
    "nn.Memory": lambda tower, q, _: _squares(tower.layer(q).output),
    "nn.View": lambda tower, q, _: _squares(tower.layer.attend(q, **tower.options).output),
    "losses": _losses,
    "db.attend": lambda tower, q, _: _squares(tower.db[0].attend(q, **tower.options).output),
}
CASES: dict[str, tuple[str, Options]] = {
    "softdb.attention": ("softdb.attention", {}),
    "nn.Attention, every record": ("nn.Attention", {}),
    "nn.Attention, k": ("nn.Attention", {"k": 5}),
    "nn.Memory": ("nn.Memory", {}),
    "nn.View, every record": ("nn.View", {}),
    "nn.View, k": ("nn.View", {"k": 5}),
    "losses, every record": ("losses", {}),
    "losses, k": ("losses", {"k": 5}),
    "db.attend, every record": ("db.attend", {}),
    "db.attend, k": ("db.attend", {"k": 5}),
    "db.attend, rtol": ("db.attend", {"rtol": 0.1}),
}


def tower(case: str, db: softdb.SoftDB | None = None) -> Tower:
    row, options = CASES[case]
    return Tower(row, opened(None) if db is None else db, options)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters, dense; none of them is 0."""
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    slopes = {name: one.grad.to_dense().clone() for name, one in model.named_parameters() if one.grad is not None}
    assert slopes.keys() == {name for name, _ in model.named_parameters()}
    assert all(float(slope.abs().max()) > 1e-7 for name, slope in slopes.items() if not name.endswith("in_proj_bias"))
    return slopes


def alike(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Assert equal tensors, each by its own size."""
    assert actual.keys() == expected.keys()
    for name, one in expected.items():
        gap = float((actual[name].to_dense() - one.to_dense()).abs().max())
        assert gap <= tolerance * max(1e-3, float(one.to_dense().abs().max())), f"{name}: {gap}"


def trained(model: torch.nn.Module, x: Tensor, right: Tensor, steps: int = 3) -> dict[str, Tensor]:
    """Parameters after a few steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x, right).mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): one.detach().clone() for name, one in model.named_parameters()}
