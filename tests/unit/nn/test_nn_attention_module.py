"""softdb.nn.Attention as a module: state, copies, estimates and training."""

from __future__ import annotations

import copy
import hashlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from worlds import clusters, holding
from worlds.attentions import HEADS, RECORDS, WORDS, D, E, L, N, V, columns, filled, pair

import softdb
import softdb.nn.attention
from softdb.errors import BadInput
from softdb.nn import Attention


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("d", [D, E])
def test_parameters_travel_both_ways(words: dict[str, Any], d: int) -> None:
    db = filled(d=d, value_dim=E)
    torch.manual_seed(5)
    ours = Attention(db, E, HEADS, **words)
    torch.manual_seed(5)
    other = torch.nn.MultiheadAttention(E, HEADS, kdim=d, vdim=E, **words)
    assert list(ours.state_dict()) == list(other.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name  # the same start
    changed = {name: tensor + 1 for name, tensor in ours.state_dict().items()}
    ours.load_state_dict(changed)
    other.load_state_dict(ours.state_dict())
    assert all(torch.equal(tensor, changed[name]) for name, tensor in other.state_dict().items())


def test_the_handle_is_no_part_of_the_module() -> None:
    db = filled()
    mine = Attention(db, E, HEADS)
    assert mine.db is db
    assert [name for name, _ in mine.named_modules()] == ["", "out_proj"]
    assert not list(mine.buffers())
    saved = io.BytesIO()
    torch.save(mine.state_dict(), saved)
    twin = copy.deepcopy(mine)  # as an averaged model does
    assert twin.db is db
    assert twin.out_proj.weight is not mine.out_proj.weight
    assert "29 records" in repr(mine)


def test_widths_come_from_the_database() -> None:
    mine = Attention(filled(), E, HEADS, kdim=D, vdim=V)
    assert (mine.kdim, mine.vdim) == (D, V)
    keys_alone = Attention(filled(value_dim=None), E, HEADS)
    assert (keys_alone.kdim, keys_alone.vdim) == (D, D)
    assert Attention(None, E, HEADS).kdim == E


def digest(path: Path) -> dict[str, str]:
    """The content of every file below, by name."""
    return {
        str(one.relative_to(path)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in sorted(path.rglob("*")) if one.is_file() and not one.name.endswith("-shm")  # readers mark it
    }  # fmt: skip


@pytest.mark.slow
def test_training_the_projections_leaves_the_database_unchanged(tmp_path: Path) -> None:
    with holding(torch.randn(RECORDS, D), torch.randn(RECORDS, V), path=tmp_path / "db") as db:
        before, generation = digest(tmp_path), db.stats().generation
        mine = Attention(db, E, HEADS)
        query, wanted = torch.randn(L, E), torch.randn(L, E)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.05)
        losses = []
        for step in range(1000):
            optimizer.zero_grad()
            loss = (mine(query, k=5 if step % 2 else None)[0] - wanted).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.1 * losses[0]
        assert db.stats().generation == generation
        assert digest(tmp_path) == before
        expected = torch.nn.MultiheadAttention(E, HEADS, kdim=D, vdim=V)
        expected.load_state_dict(mine.state_dict())
        keys, values = (column[:, 0] for column in columns(db, torch.float32))
        torch.testing.assert_close(mine(query)[0], expected(query, keys, values)[0], atol=1e-5, rtol=1e-5)


def indexed(path: Path | None = None) -> softdb.SoftDB:
    """Open a database that answers by an index, its values 1 + the first numbers of its keys."""
    keys = clusters(np.random.default_rng(0), spread=0.4)
    return worlds.indexed(keys, 1 + keys[:, :V], recall=0.95, path=path)


@pytest.mark.slow
def test_an_index_stays_right_however_long_the_projections_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with indexed(tmp_path / "db") as db:
        mine = Attention(db, E, HEADS)
        query, wanted, unseen = torch.randn(L, E), torch.randn(L, E), torch.randn(300, E)

        def recall() -> float:
            asked = mine.fold(unseen.unsqueeze(1)).queries.detach()
            results, true = db.search(asked, k=10).rows, db.search(asked, k=10, exact=True).rows
            return float((results.unsqueeze(2) == true.unsqueeze(1)).any(2).float().mean())

        before, optimizer = digest(tmp_path), torch.optim.Adam(mine.parameters(), lr=0.003)
        for _ in range(1000):
            optimizer.zero_grad()
            (mine(query, k=8)[0] - wanted).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert digest(tmp_path) == before
        db.tune(0.95, queries=mine.fold(unseen.unsqueeze(1)).queries.detach())
        assert recall() >= 0.94


@pytest.mark.slow
def test_heads_estimated_to_a_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.attend.rounds.pass_cost", lambda *_: math.inf)  # never cheaper, here
    torch.manual_seed(0)
    with indexed() as db:
        mine, query = Attention(db, E, HEADS), 3 * torch.randn(L, E)
        exact = mine(query)[0]
        draws = [mine(query, rtol=0.05, generator=torch.Generator().manual_seed(seed))[0] for seed in range(2)]
        assert not torch.equal(*draws)
        assert torch.equal(mine(query, rtol=0.05)[0], mine(query, rtol=0.05)[0])
        for draw in draws:
            assert ((draw - exact).norm() / exact.norm()) < 0.05
        gradients = []
        for rtol in (None, 0.05):
            mine.zero_grad()
            mine(query, rtol=rtol)[0].square().sum().backward()  # type: ignore[no-untyped-call]
            gradients.append(
                torch.cat([parameter.grad.flatten() for parameter in mine.parameters() if parameter.grad is not None])
            )
        assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.97
        with pytest.raises(BadInput, match="rtol, generator or temperature are given without a database"):
            Attention(None, E, HEADS)(query, query, query, rtol=0.1)


def test_records_inserted_later_are_seen() -> None:
    db = filled(n=5)
    ours, other = pair(db, torch.float64)
    query = torch.randn(L, E, dtype=torch.float64)
    before = ours(query)[0]
    db.insert([5], torch.randn(1, D), torch.randn(1, V))
    keys, values = (column[:, 0] for column in columns(db, torch.float64))
    after = ours(query)[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, other(query, keys, values)[0])


@pytest.mark.parametrize("k", [None, 6])
def test_half_precision_and_autocast(k: int | None) -> None:
    db = filled()
    mine, _ = pair(db, torch.float32, add_bias_kv=True)
    query = torch.randn(L, N, E)
    expected = mine(query, k=k)[0]
    half = copy.deepcopy(mine).bfloat16()
    actual = half(query.bfloat16(), k=k)[0]
    assert actual.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = mine(query, k=k)[0]
    for one in (actual, cast):
        assert float((one.float() - expected).abs().max().detach()) < 0.05 * float(expected.abs().max().detach())
    cast.sum().backward()  # type: ignore[no-untyped-call]
    assert mine.k_proj_weight.grad is not None
