"""softdb.nn.Attention, against torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import doctest
import hashlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import softdb
import softdb.nn.attention
from softdb.errors import BadInput, Closed, StaleRead
from softdb.nn import Attention
from softdb.scores import Dot

N, L, E, HEADS, D, V, RECORDS = 3, 4, 12, 3, 5, 7, 29
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def filled(d: int = D, v: int | None = V, n: int = RECORDS, **words: Any) -> softdb.SoftDB:
    """A database in memory whose ids are 0 … n - 1, with an exact twin of its first record and a zero key."""
    db = softdb.open(None, dim=d, value_dim=v, **words)
    keys = torch.randn(n, d)
    keys[1], keys[2] = keys[0], 0
    db.insert(list(range(n)), keys, None if v is None else torch.randn(n, v), [{"odd": i % 2 == 1} for i in range(n)])
    return db


def columns(db: softdb.SoftDB, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a database from `filled`, (n, 1, d) and (n, 1, v)."""
    records = db.get(list(range(len(db))))
    values = records.keys if records.values is None else records.values
    return records.keys.to(dtype).unsqueeze(1), values.to(dtype).unsqueeze(1)


def pair(db: softdb.SoftDB | None, dtype: torch.dtype, **words: Any) -> tuple[Attention, torch.nn.MultiheadAttention]:
    """The module and torch's own with the same parameters, none of them 0."""
    mine = Attention(db, E, HEADS, dtype=dtype, **words)
    torch_words = {"kdim": mine.kdim, "vdim": mine.vdim, **words}
    other = torch.nn.MultiheadAttention(E, HEADS, dtype=dtype, **torch_words)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    mine.load_state_dict(other.state_dict())
    return mine, other


def agree(
    mine: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor],
    modules: tuple[Attention, torch.nn.MultiheadAttention], query: Tensor,
) -> None:  # fmt: skip
    """Asserts equal outputs, and equal gradients of the query and of every parameter."""
    tolerance = TOLERANCE[query.dtype]
    found: list[tuple[str, Tensor | None]] = []
    expected: list[tuple[str, Tensor | None]] = []
    for ask, module, into in zip((mine, other), modules, (found, expected), strict=True):
        module.zero_grad()
        asked = query.clone().requires_grad_()
        output = ask(asked)
        torch.autograd.backward(output, torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
        assert asked.grad is not None
        into += [("output", output.detach()), ("query", asked.grad)]
        into += [(name, parameter.grad) for name, parameter in module.named_parameters()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, one), (_, two) in zip(found, expected, strict=True):
        assert one is not None
        assert two is not None
        scale = max(1.0, float(two.abs().max()))
        assert float((one - two).abs().max()) <= tolerance * scale, name
        if name != "in_proj_bias":
            assert float(two.abs().max()) > 1e-4, f"{name}: nothing is compared"


def torch_mask() -> Tensor:
    """(N·heads, L, n), True = may not attend; every query keeps some records."""
    mask = torch.rand(N * HEADS, L, RECORDS) < 0.5
    mask[..., 3] = False
    return mask


# -- the records of a database -----------------------------------------------------------------------------------------

WORDS = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("widths", [(D, V), (E, E), (E, V), (D, None)])
@pytest.mark.parametrize("k", [None, RECORDS])
def test_a_database_answers_as_torch_does_with_its_records(
    dtype: torch.dtype, words: dict[str, Any], widths: tuple[int, int | None], k: int | None
) -> None:
    db = filled(*widths)
    mine, other = pair(db, dtype, **words)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, dtype))
    if mine.batch_first:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    query = torch.randn(*((N, L) if mine.batch_first else (L, N)), E, dtype=dtype)
    agree(lambda x: mine(x, k=k)[0], lambda x: other(x, keys, values)[0], (mine, other), query)
    assert mine(query, k=k)[0].shape == query.shape
    assert mine(query, k=k)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True}])
def test_one_sequence_without_a_batch(dtype: torch.dtype, words: dict[str, Any]) -> None:
    db = filled()
    mine, other = pair(db, dtype, **words)
    keys, values = (column.squeeze(1) for column in columns(db, dtype))
    query = torch.randn(L, E, dtype=dtype)
    agree(lambda x: mine(x)[0], lambda x: other(x, keys, values)[0], (mine, other), query)
    weights = mine(query, k=3, need_weights=True)[1]
    assert weights is not None
    assert weights.shape == (L, HEADS, 3 + len(words) * ("batch_first" not in words))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("kind", ["padding", "pairs", "pairs by head", "both"])
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("k", [None, RECORDS])
def test_masks_have_the_polarity_and_order_of_torch(
    dtype: torch.dtype, words: dict[str, Any], kind: str, floats: bool, k: int | None
) -> None:
    db = filled()
    mine, other = pair(db, dtype, **words)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, dtype))
    masks: dict[str, Tensor] = {}
    if kind in ("padding", "both"):
        masks["key_padding_mask"] = torch.arange(RECORDS) > 20
    if kind != "padding":
        masks["attn_mask"] = torch_mask()[0] if kind == "pairs" else torch_mask()
    if floats:
        masks = {
            name: torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf) for name, mask in masks.items()
        }
    theirs = dict(masks)
    if "key_padding_mask" in masks:
        theirs["key_padding_mask"] = masks["key_padding_mask"].expand(N, -1)
    query = torch.randn(L, N, E, dtype=dtype)
    agree(lambda x: mine(x, k=k, **masks)[0], lambda x: other(x, keys, values, **theirs)[0], (mine, other), query)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("k", [None, RECORDS])
def test_the_metric_of_the_database_does_not_matter(metric: str, k: int | None) -> None:
    db = filled(metric=metric)
    mine, other = pair(db, torch.float32)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float32))
    agree(lambda x: mine(x, k=k)[0], lambda x: other(x, keys, values)[0], (mine, other), torch.randn(L, N, E))


@pytest.mark.parametrize("k", [None, RECORDS])
def test_labels_are_one_hot_values(k: int | None) -> None:
    db = softdb.open(None, dim=D, num_classes=4)
    keys, labels = torch.randn(RECORDS, D), torch.randint(4, (RECORDS,))
    db.insert(list(range(RECORDS)), keys, labels)
    mine, other = pair(db, torch.float64)
    assert mine.vdim == 4
    columns = (keys.double(), torch.nn.functional.one_hot(labels, 4).double())
    query = torch.randn(L, E, dtype=torch.float64)
    agree(lambda x: mine(x, k=k)[0], lambda x: other(x, *columns)[0], (mine, other), query)


def test_gradients_are_right_by_finite_differences() -> None:
    db = filled()
    mine, _ = pair(db, torch.float64, add_bias_kv=True, add_zero_attn=True)
    query = torch.randn(2, 2, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mine(x, temperature=0.7)[0], query)
    assert torch.autograd.gradcheck(lambda x: mine(x, temperature=0.7, k=5, need_weights=True), query)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("k", [None, RECORDS])
def test_temperature_and_filter(k: int | None) -> None:
    db = filled()
    mine, other = pair(db, torch.float64, add_bias_kv=True, bias=False)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float64))
    query = torch.randn(L, N, E, dtype=torch.float64)
    odd = mine(query, where={"odd": True}, k=k)[0]
    torch.testing.assert_close(odd, other(query, keys[1::2], values[1::2])[0])
    cooler = mine(query, temperature=0.25, k=k)[0]
    torch.testing.assert_close(cooler, other(4 * query, keys, values)[0])  # without b_q: q / T


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("how", ["mask", "filter", "empty database"])
def test_where_nothing_takes_part_heads_are_zeros(k: int | None, how: str) -> None:
    db = filled() if how != "empty database" else softdb.open(None, dim=D, value_dim=V)
    mine, _ = pair(db, torch.float32, dropout=0.5 if k else 0.0)
    words: dict[str, Any] = {"where": {"odd": 3}} if how == "filter" else {}
    if how == "mask":
        words = {"key_padding_mask": torch.ones(RECORDS, dtype=torch.bool)}
    query = torch.randn(L, N, E, requires_grad=True)
    output, _ = mine(query, k=k, **words)
    torch.testing.assert_close(output, mine.out_proj.bias.expand_as(output))
    output.sum().backward()  # type: ignore[no-untyped-call]
    for tensor in (query, mine.q_proj_weight, mine.k_proj_weight, mine.v_proj_weight, mine.in_proj_bias):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_where_nothing_takes_part_the_learnt_keys_still_do() -> None:
    mine, _ = pair(softdb.open(None, dim=D, value_dim=V), torch.float32, add_bias_kv=True)
    assert mine.bias_v is not None
    output, _ = mine(torch.randn(L, N, E))
    torch.testing.assert_close(output, mine.out_proj(mine.bias_v).expand_as(output))


# -- weights and dropout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_weights_of_candidates_are_those_of_torch(words: dict[str, Any]) -> None:
    db = filled()
    mine, other = pair(db, torch.float64, **words)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float64))
    query = torch.randn(L, N, E, dtype=torch.float64)
    weights = mine(query, need_weights=True, k=RECORDS)[1]
    expected = other(query, keys, values, average_attn_weights=False)[1].transpose(1, 2)
    assert weights is not None
    assert weights.shape == (N, L, HEADS, RECORDS + len(words))
    hits = db.attend(mine.fold(query).queries, score=Dot(), k=RECORDS).hits
    assert hits is not None
    places = torch.tensor(hits.ids).view(N, L, HEADS, RECORDS)
    torch.testing.assert_close(weights[..., :RECORDS], expected.gather(3, places))
    torch.testing.assert_close(weights[..., RECORDS:], expected[..., RECORDS:])


def test_the_fold_scores_as_the_projections_do() -> None:
    db = filled()
    mine, _ = pair(db, torch.float64)
    query = torch.randn(L, N, E, dtype=torch.float64)
    folded = mine.fold(query)
    found = (folded.queries @ columns(db, torch.float64)[0][:, 0].T + torch.as_tensor(folded.bias)[:, None]).view(
        N, L, HEADS, RECORDS
    )
    size = E // HEADS
    b_q, b_k, _ = mine.in_proj_bias.chunk(3)
    for b, i, h, r in [(0, 0, 0, 0), (1, 3, 2, 7), (2, 1, 1, 28)]:
        q = (mine.q_proj_weight @ query[i, b] + b_q)[h * size : (h + 1) * size]
        k = (mine.k_proj_weight @ columns(db, torch.float64)[0][r, 0] + b_k)[h * size : (h + 1) * size]
        torch.testing.assert_close(found[b, i, h, r], q @ k / size**0.5)


@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("labels", [False, True])
def test_dropout_drops_candidates_unfolded(words: dict[str, Any], labels: bool) -> None:
    db = filled()
    if labels:
        db = softdb.open(None, dim=D, num_classes=3)
        db.insert(list(range(RECORDS)), torch.randn(RECORDS, D), torch.randint(3, (RECORDS,)))
    mine, _ = pair(db, torch.float64, dropout=0.4, **words)
    query = torch.randn(L, N, E, dtype=torch.float64)
    output, weights = mine(query, k=6, need_weights=True)
    assert weights is not None
    share = float((weights == 0).double().mean())
    assert abs(share - 0.4) < 0.12
    kept = mine.eval()(query, k=6, need_weights=True)[1]
    assert kept is not None
    torch.testing.assert_close(weights, torch.where(weights == 0, 0, kept / 0.6))
    hits = db.attend(mine.fold(query).queries, score=Dot(), k=6).hits
    assert hits is not None
    expected = _unfolded(mine, torch.tensor(hits.ids).view(N, L, HEADS, 6), weights)
    torch.testing.assert_close(output, expected)
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in mine.parameters())


def _unfolded(mine: Attention, ids: Tensor, weights: Tensor) -> Tensor:
    """Output (L, N, E) of weights (N, L, heads, candidates), each value projected alone."""
    assert mine.db is not None
    stored = mine.db.get(list(range(RECORDS))).values
    assert stored is not None
    if not stored.is_floating_point():
        stored = torch.nn.functional.one_hot(stored, mine.vdim)
    projected = stored.double() @ mine.v_proj_weight.T + mine.in_proj_bias.chunk(3)[2]
    heads = torch.zeros(L, N, E, dtype=torch.float64)
    size = E // HEADS
    for b in range(N):
        for i in range(L):
            for h in range(HEADS):
                own = slice(h * size, (h + 1) * size)
                for j, record in enumerate(ids[b, i, h].tolist()):
                    heads[i, b, own] += weights[b, i, h, j] * projected[record, own]
                if mine.bias_v is not None:
                    heads[i, b, own] += weights[b, i, h, 6] * mine.bias_v[0, 0, own]
    return mine.out_proj(heads)  # type: ignore[no-any-return]


def test_dropout_is_right_on_average_and_off_in_evaluation() -> None:
    db = filled()
    mine, _ = pair(db, torch.float32, dropout=0.3)
    query = torch.randn(1, E)
    with torch.no_grad():
        many = mine(query.expand(20_000, E), k=8)[0]
        plain = mine.eval()(query, k=8)[0]
    assert float((many - plain).abs().max()) > 0.1
    error = many.std(0) / 20_000**0.5
    assert bool(((many.mean(0) - plain[0]).abs() < 5 * error).all())
    assert torch.equal(mine(query)[0], Attention.forward(mine, query)[0])  # no k needed
    everything, _ = pair(db, torch.float32, dropout=1.0)
    output, _ = everything(query, k=8)
    torch.testing.assert_close(output, everything.out_proj.bias[None])


def test_a_candidate_that_left_the_files_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    db = filled()
    mine, _ = pair(db, torch.float32, dropout=0.3)
    answer = db.attend(mine.fold(torch.randn(L, E)).queries, score=Dot(), k=3)
    assert answer.hits is not None
    answer.hits.rows[0, 0] = RECORDS + 5
    monkeypatch.setattr(db, "attend", lambda *_, **__: answer)
    with pytest.raises(StaleRead, match="attend again"):
        mine(torch.randn(L, E), k=3)


# -- plain tensors -----------------------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, batch_first: bool = False, d: int = D, v: int = V) -> list[Tensor]:
    """Query, key and value."""
    made = [torch.randn(*size, dtype=dtype) for size in ((L, N, E), (RECORDS, N, d), (RECORDS, N, v))]
    return [one.transpose(0, 1) if batch_first else one for one in made]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("widths", [(D, V), (E, E)])
@pytest.mark.parametrize("need_weights", [False, True])
def test_plain_tensors_agree_with_torch(
    dtype: torch.dtype, words: dict[str, Any], widths: tuple[int, int], need_weights: bool
) -> None:
    mine, other = pair(None, dtype, kdim=widths[0], vdim=widths[1], **words)
    query, key, value = inputs(dtype, mine.batch_first, *widths)
    words = {"need_weights": need_weights}
    agree(lambda x: mine(x, key, value, **words)[0], lambda x: other(x, key, value, **words)[0], (mine, other), query)
    for average in (True, False):
        found, expected = (ask(query, key, value, None, need_weights, None, average)[1] for ask in (mine, other))
        if need_weights:
            torch.testing.assert_close(found, expected)
        else:
            assert found is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("kind", ["padding", "pairs", "pairs by head", "both", "numbers", "numbers and padding"])
def test_masks_of_plain_tensors(dtype: torch.dtype, words: dict[str, Any], kind: str) -> None:
    mine, other = pair(None, dtype, kdim=D, vdim=V, **words)
    query, key, value = inputs(dtype)
    masks: dict[str, Tensor] = {}
    if "padding" in kind or kind == "both":
        masks["key_padding_mask"] = torch.arange(RECORDS) > torch.tensor([[20], [28], [7]])
    if kind != "padding":
        masks["attn_mask"] = torch_mask()[0] if kind == "pairs" else torch_mask()
    if "numbers" in kind:
        masks["attn_mask"] = torch.randn(masks["attn_mask"].shape).to(dtype).masked_fill(masks["attn_mask"], -torch.inf)
        if "padding" in kind:
            padding = masks["key_padding_mask"]
            masks["key_padding_mask"] = torch.randn(padding.shape).to(dtype).masked_fill(padding, -torch.inf)
    agree(lambda x: mine(x, key, value, **masks)[0], lambda x: other(x, key, value, **masks)[0], (mine, other), query)


def test_plain_self_attention_without_a_batch_and_causal() -> None:
    mine, other = pair(None, torch.float64)
    query = torch.randn(L, E, dtype=torch.float64)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    words: dict[str, Any] = {"attn_mask": causal, "is_causal": True, "need_weights": False}
    agree(lambda x: mine(x, x, x, **words)[0], lambda x: other(x, x, x, **words)[0], (mine, other), query)
    padding = torch.tensor([False, False, True, True])
    torch.testing.assert_close(mine(query, query, query, padding)[0], other(query, query, query, padding)[0])


def test_a_float_mask_may_be_learnt() -> None:
    mine, other = pair(None, torch.float64, kdim=D, vdim=V)
    query, key, value = inputs(torch.float64)
    grads = []
    for module in (mine, other):
        mask = torch.zeros(L, RECORDS, dtype=torch.float64, requires_grad=True)
        module(query, key, value, attn_mask=mask, need_weights=False)[0].square().sum().backward()
        grads.append(mask.grad)
    assert grads[0] is not None
    assert float(grads[0].abs().max()) > 1e-3
    torch.testing.assert_close(*grads)


def test_dropout_on_plain_tensors() -> None:
    mine, _ = pair(None, torch.float32, dropout=0.25)
    query, key, value = torch.randn(1, 1, E), torch.randn(6, 1, E), torch.randn(6, 1, E)
    many = [one.expand(-1, 20_000, -1) for one in (query, key, value)]
    with torch.no_grad():
        output, weights = mine(*many, need_weights=True, average_attn_weights=False)
        plain, kept = mine.eval()(query, key, value, need_weights=True, average_attn_weights=False)
    assert weights is not None
    assert kept is not None
    assert abs(float((weights == 0).float().mean()) - 0.25) < 0.01
    torch.testing.assert_close(weights, torch.where(weights == 0, 0, kept / 0.75).expand_as(weights))
    error = output[0].std(0) / 20_000**0.5
    assert bool(((output[0].mean(0) - plain[0, 0]).abs() < 5 * error).all())


@pytest.mark.parametrize("numbers", [False, True])
def test_plain_rows_where_nothing_takes_part(numbers: bool) -> None:
    mine, _ = pair(None, torch.float32, kdim=D, vdim=V)
    query, key, value = inputs(torch.float32)
    mask = torch.zeros(L, RECORDS)
    mask[1] = -torch.inf
    mask[2, 3] = 0.5 if numbers else 0
    query.requires_grad_()
    output, _ = mine(query, key, value, attn_mask=mask)
    torch.testing.assert_close(output[1], mine.out_proj.bias.expand(N, E))
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())
    assert torch.equal(query.grad[1], torch.zeros(N, E))


# -- the module --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("d", [D, E])
def test_parameters_travel_both_ways(words: dict[str, Any], d: int) -> None:
    db = filled(d, E)
    torch.manual_seed(5)
    mine = Attention(db, E, HEADS, **words)
    torch.manual_seed(5)
    other = torch.nn.MultiheadAttention(E, HEADS, kdim=d, vdim=E, **words)
    assert list(mine.state_dict()) == list(other.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name  # the same start
    changed = {name: tensor + 1 for name, tensor in mine.state_dict().items()}
    mine.load_state_dict(changed)
    other.load_state_dict(mine.state_dict())
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


def test_the_example_runs() -> None:
    finished = doctest.testmod(softdb.nn.attention, extraglobs={"torch": torch})
    assert finished.attempted > 0
    assert not finished.failed


def test_widths_come_from_the_database() -> None:
    mine = Attention(filled(), E, HEADS, kdim=D, vdim=V)
    assert (mine.kdim, mine.vdim) == (D, V)
    assert (Attention(filled(D, None), E, HEADS).kdim, Attention(filled(D, None), E, HEADS).vdim) == (D, D)
    assert Attention(None, E, HEADS).kdim == E


def digest(path: Path) -> dict[str, str]:
    """The content of every file below, by name."""
    return {
        str(one.relative_to(path)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in sorted(path.rglob("*")) if one.is_file()
    }  # fmt: skip


@pytest.mark.slow
def test_training_the_projections_leaves_the_database_as_it_is(tmp_path: Path) -> None:
    with softdb.open(tmp_path / "db", dim=D, value_dim=V) as db:
        db.insert(list(range(RECORDS)), torch.randn(RECORDS, D), torch.randn(RECORDS, V))
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
    """More records than are compared one by one, in clusters, with an index."""
    random = np.random.default_rng(0)
    db = softdb.open(path, dim=16, value_dim=V)
    centres = random.standard_normal((50, 16))
    keys = centres[random.integers(0, 50, 20_000)] + 0.4 * random.standard_normal((20_000, 16))
    db.insert(range(20_000), keys, 1 + keys[:, :V])
    db.build_index("ivf", recall=0.95)
    return db


@pytest.mark.slow
def test_an_index_stays_right_however_long_the_projections_are_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with indexed(tmp_path / "db") as db:
        mine = Attention(db, E, HEADS)
        query, wanted, unseen = torch.randn(L, E), torch.randn(L, E), torch.randn(300, E)

        def recall() -> float:
            asked = mine.fold(unseen.unsqueeze(1)).queries.detach()
            found, true = db.search(asked, k=10).rows, db.search(asked, k=10, exact=True).rows
            return float((found.unsqueeze(2) == true.unsqueeze(1)).any(2).float().mean())

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
    monkeypatch.setattr("softdb.attend.rounds.Estimator._exact_seconds", lambda *_: math.inf)  # never cheaper, here
    torch.manual_seed(0)
    with indexed() as db:
        mine, query = Attention(db, E, HEADS), 3 * torch.randn(L, E)
        exact = mine(query)[0]
        draws = [mine(query, rtol=0.05, generator=torch.Generator().manual_seed(seed))[0] for seed in range(2)]
        assert not torch.equal(*draws)
        assert torch.equal(mine(query, rtol=0.05)[0], mine(query, rtol=0.05)[0])
        for one in draws:
            assert ((one - exact).norm() / exact.norm()) < 0.05
        gradients = []
        for rtol in (None, 0.05):
            mine.zero_grad()
            mine(query, rtol=rtol)[0].square().sum().backward()  # type: ignore[no-untyped-call]
            gradients.append(torch.cat([one.grad.flatten() for one in mine.parameters() if one.grad is not None]))
        assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.97
        with pytest.raises(BadInput, match="rtol, generator or temperature are given without a database"):
            Attention(None, E, HEADS)(query, query, query, rtol=0.1)


def test_records_inserted_later_are_seen() -> None:
    db = filled(n=5)
    mine, other = pair(db, torch.float64)
    query = torch.randn(L, E, dtype=torch.float64)
    before = mine(query)[0]
    db.insert([5], torch.randn(1, D), torch.randn(1, V))
    keys, values = (column[:, 0] for column in columns(db, torch.float64))
    after = mine(query)[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, other(query, keys, values)[0])


@pytest.mark.parametrize("k", [None, 6])
def test_half_precision_and_autocast(k: int | None) -> None:
    db = filled()
    mine, _ = pair(db, torch.float32, add_bias_kv=True)
    query = torch.randn(L, N, E)
    expected = mine(query, k=k)[0]
    half = copy.deepcopy(mine).bfloat16()
    found = half(query.bfloat16(), k=k)[0]
    assert found.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = mine(query, k=k)[0]
    for one in (found, cast):
        assert float((one.float() - expected).abs().max().detach()) < 0.05 * float(expected.abs().max().detach())
    cast.sum().backward()  # type: ignore[no-untyped-call]
    assert mine.k_proj_weight.grad is not None


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"embed_dim": 10}, "embed_dim is 10 and num_heads 3; choose"),
        ({"embed_dim": 0}, "embed_dim is 0; expected a whole number"),
        ({"num_heads": 1.5}, "num_heads is 1.5; expected a whole number"),
        ({"dropout": 1.5}, "dropout is 1.5; expected a share"),
        ({"dropout": "much"}, "dropout is 'much'; expected a share"),
        ({"kdim": 6}, "kdim is 6 but the keys of the database are 5 wide"),
        ({"vdim": 6}, "vdim is 6 but the values of the database are 7 wide"),
        ({"kdim": -1}, "kdim is -1; expected a whole number"),
        ({"db": "path/to"}, "db is 'path/to'; expected an open softdb database"),
    ],
)
def test_modules_that_cannot_be(words: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Attention(**{"db": filled(), "embed_dim": E, "num_heads": HEADS, **words})


BLOCKED = torch.zeros(RECORDS, dtype=torch.bool)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"query": torch.zeros(L, N, 5)},
            r"query has shape \(4, 3, 5\) but this module takes \(L, N, 12\) or \(L, 12\)",
        ),
        ({"query": torch.zeros(E)}, r"query has shape \(12,\)"),
        ({"query": torch.zeros(L, E, dtype=torch.int64)}, "query is tensor.*expected a floating tensor"),
        ({"query": [[0.0] * E]}, "expected a floating tensor"),
        ({"query": torch.zeros(L, E).double()}, "query is of torch.float64 but the parameters of torch.float32"),
        ({"query": torch.full((L, E), torch.nan)}, "queries hold NaN"),
        ({"key": torch.zeros(L, N, D)}, "the records of the database are both"),
        ({"value": torch.zeros(L, N, V)}, "the records of the database are both"),
        ({"key_padding_mask": BLOCKED[:5]}, r"key_padding_mask has shape \(5,\); expected \(29,\)"),
        ({"key_padding_mask": BLOCKED.expand(N, -1)}, r"key_padding_mask has shape \(3, 29\); expected \(29,\)"),
        ({"attn_mask": BLOCKED.expand(N, -1)}, r"attn_mask has shape \(3, 29\); expected \(4, 29\) or \(9, 4, 29\)"),
        ({"attn_mask": BLOCKED.expand(N, L, -1)}, r"attn_mask has shape \(3, 4, 29\); expected"),
        ({"attn_mask": BLOCKED.expand(L, -1).int()}, "attn_mask is tensor.*expected a bool tensor"),
        ({"attn_mask": BLOCKED.expand(L, -1) + 0.5}, "other numbers than 0 and -inf.*pass a bool mask"),
        ({"attn_mask": BLOCKED.expand(L, -1) + torch.nan}, "attn_mask holds NaN"),
        ({"key_padding_mask": BLOCKED + torch.inf}, "key_padding_mask holds NaN or .inf"),
        ({"need_weights": True}, "need_weights without k.*explain"),
        ({"is_causal": True}, "mean nothing for a database"),
        ({"need_weights": True, "k": 3, "average_attn_weights": True}, "mean nothing for a database"),
        ({"k": 0}, "k is 0; expected a whole number"),
        ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
        ({"where": 3}, "where"),
    ],
)
def test_questions_to_a_database_that_cannot_be(words: dict[str, Any], message: str) -> None:
    mine = Attention(filled(), E, HEADS)
    with pytest.raises(BadInput, match=f"(?s){message}"):
        mine(**{"query": torch.zeros(L, N, E), **words})


def test_dropout_over_every_record_is_refused_in_training_only() -> None:
    mine = Attention(filled(), E, HEADS, dropout=0.1)
    with pytest.raises(BadInput, match=r"dropout is 0\.1 in training without k.*pass k="):
        mine(torch.zeros(L, E))
    assert mine.eval()(torch.zeros(L, E))[0].shape == (L, E)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"key": None}, "key or value is missing"),
        ({"value": None}, "key or value is missing"),
        ({"key": torch.zeros(RECORDS, N, D + 1)}, r"key has shape \(29, 3, 6\) but this module takes \(L, N, 5\)"),
        ({"value": torch.zeros(RECORDS + 1, N, V)}, r"\(4, 3, 12\), \(29, 3, 5\) and \(30, 3, 7\); expected one batch"),
        ({"query": torch.zeros(L, N + 1, E)}, "expected one batch size"),
        ({"query": torch.zeros(L, E)}, "expected one batch size"),
        ({"k": 3}, "temperature are given without a database"),
        ({"where": {}}, "temperature are given without a database"),
        ({"temperature": 2.0}, "temperature are given without a database"),
        ({"is_causal": True}, "is_causal is a hint about attn_mask"),
        ({"key_padding_mask": BLOCKED}, r"key_padding_mask has shape \(29,\); expected \(3, 29\)"),
        ({"attn_mask": BLOCKED}, r"attn_mask has shape \(29,\); expected \(4, 29\) or \(9, 4, 29\)"),
    ],
)
def test_plain_questions_that_cannot_be(words: dict[str, Any], message: str) -> None:
    mine = Attention(None, E, HEADS, kdim=D, vdim=V)
    given = dict(zip(("query", "key", "value"), inputs(torch.float32), strict=True))
    with pytest.raises(BadInput, match=message):
        mine(**{**given, **words})


def test_a_closed_database_is_refused() -> None:
    db = filled()
    mine = Attention(db, E, HEADS)
    db.close()
    assert "closed" in repr(mine)
    with pytest.raises(Closed, match="closed"):
        mine(torch.zeros(L, E))
    with pytest.raises(Closed, match="closed"):
        Attention(db, E, HEADS)
