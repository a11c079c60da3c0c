"""softdb.nn.Attention without a database, and its error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from worlds.attentions import DTYPES, HEADS, RECORDS, WORDS, D, E, L, N, V, agree, filled, pair, torch_mask

from softdb.errors import BadInput, Closed
from softdb.nn import Attention


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


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
    ours, other = pair(None, dtype, kdim=widths[0], vdim=widths[1], **words)
    query, key, value = inputs(dtype, ours.batch_first, *widths)
    words = {"need_weights": need_weights}
    agree(lambda x: ours(x, key, value, **words)[0], lambda x: other(x, key, value, **words)[0], (ours, other), query)
    for average in (True, False):
        actual, expected = (ask(query, key, value, None, need_weights, None, average)[1] for ask in (ours, other))
        if need_weights:
            torch.testing.assert_close(actual, expected)
        else:
            assert actual is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("kind", ["padding", "pairs", "pairs by head", "both", "numbers", "numbers and padding"])
def test_masks_of_plain_tensors(dtype: torch.dtype, words: dict[str, Any], kind: str) -> None:
    ours, other = pair(None, dtype, kdim=D, vdim=V, **words)
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
    agree(lambda x: ours(x, key, value, **masks)[0], lambda x: other(x, key, value, **masks)[0], (ours, other), query)


def test_plain_self_attention_without_a_batch_and_causal() -> None:
    ours, other = pair(None, torch.float64)
    query = torch.randn(L, E, dtype=torch.float64)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    words: dict[str, Any] = {"attn_mask": causal, "is_causal": True, "need_weights": False}
    agree(lambda x: ours(x, x, x, **words)[0], lambda x: other(x, x, x, **words)[0], (ours, other), query)
    padding = torch.tensor([False, False, True, True])
    torch.testing.assert_close(ours(query, query, query, padding)[0], other(query, query, query, padding)[0])


def test_a_float_mask_may_be_learnt() -> None:
    ours, other = pair(None, torch.float64, kdim=D, vdim=V)
    query, key, value = inputs(torch.float64)
    grads = []
    for module in (ours, other):
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
def test_rows_without_participants_are_the_bias(numbers: bool) -> None:
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
        ({"query": torch.zeros(L, E).double()}, "query is torch.float64 but the parameters are torch.float32"),
        ({"query": torch.full((L, E), torch.nan)}, "queries hold NaN"),
        ({"key": torch.zeros(L, N, D)}, "the database holds keys and values"),
        ({"value": torch.zeros(L, N, V)}, "the database holds keys and values"),
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
