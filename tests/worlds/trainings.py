"""Records, queries and their right records, for tests of softdb.train."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import softdb
from softdb.check import Id
from softdb.tools.cli.commands import app
from softdb.train import Fitted
from worlds import holding

N, D, M = 120, 8, 240
SMALL: dict[str, Any] = {"lr": 0.02, "batch_size": 64, "epochs": 6, "patience": None}


def keys_of(n: int = N, d: int = D) -> Tensor:
    """Unit keys with an exact twin and a zero vector."""
    keys = torch.nn.functional.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(1)), dim=1)
    keys[1], keys[2] = keys[0], 0
    return keys


def world(m: int = M, n: int = N) -> tuple[softdb.SoftDB, Tensor, list[list[Id]]]:
    """Records, queries that are their keys under a rotation, and the ids each shall find; ids are of both types."""
    keys, noise = keys_of(n), torch.Generator().manual_seed(2)
    ids: list[Id] = [f"r{i}" if i % 3 == 0 else i for i in range(n)]
    db = holding(keys, ids=ids)
    rotation = torch.linalg.qr(torch.randn(D, D, generator=noise))[0]
    wanted = torch.randint(n, (m,), generator=noise).tolist()
    queries = keys[wanted] @ rotation + 0.05 * torch.randn(m, D, generator=noise)
    return db, queries, [[ids[i]] if i > 1 else [ids[0], ids[1]] for i in wanted]


def same(one: Fitted, two: Fitted) -> None:
    """Asserts equal runs, to the bit."""
    for a, b in zip(one.projection.parameters(), two.projection.parameters(), strict=True):
        assert torch.equal(a, b)
    assert one[1:] == two[1:]


@functools.cache
def indexed() -> tuple[softdb.SoftDB, Tensor, list[list[Id]]]:
    """As `world`, but large enough, and with an index, for estimates that draw."""
    pytest.importorskip("faiss", reason="an estimate draws through an IVF index")
    db, queries, positives = world(120, 20_000)
    db.build_index("ivf")
    return db, queries, positives


def drawn(monkeypatch: pytest.MonkeyPatch) -> tuple[softdb.SoftDB, Tensor, list[list[Id]]]:
    """As `indexed`, where an estimate is never replaced by the exact answer for being dearer."""
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: np.inf)
    db, queries, positives = indexed()
    estimates = [
        db.log_partition(queries, temperature=0.2, rtol=0.3, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    ]
    assert not torch.allclose(estimates[0].value, estimates[1].value, rtol=1e-4), "nothing is drawn"
    return db, queries, positives


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result
