"""softdb.nn.Attention, against torch.nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import holding
from worlds.attentions import DTYPES, HEADS, RECORDS, WORDS, D, E, L, N, V, agree, columns, filled, pair, torch_mask

import softdb
from softdb.errors import StaleRead
from softdb.nn import Attention
from softdb.scores import Dot


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("widths", [(D, V), (E, E), (E, V), (D, None)])
@pytest.mark.parametrize("k", [None, RECORDS])
def test_a_database_answers_as_torch_does_with_its_records(
    dtype: torch.dtype, words: dict[str, Any], widths: tuple[int, int | None], k: int | None
) -> None:
    db = filled(d=widths[0], value_dim=widths[1])
    ours, other = pair(db, dtype, **words)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, dtype))
    if ours.batch_first:
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    query = torch.randn(*((N, L) if ours.batch_first else (L, N)), E, dtype=dtype)
    agree(lambda x: ours(x, k=k)[0], lambda x: other(x, keys, values)[0], (ours, other), query)
    assert ours(query, k=k)[0].shape == query.shape
    assert ours(query, k=k)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": True}])
def test_one_sequence_without_a_batch(dtype: torch.dtype, words: dict[str, Any]) -> None:
    db = filled()
    ours, other = pair(db, dtype, **words)
    keys, values = (column.squeeze(1) for column in columns(db, dtype))
    query = torch.randn(L, E, dtype=dtype)
    agree(lambda x: ours(x)[0], lambda x: other(x, keys, values)[0], (ours, other), query)
    weights = ours(query, k=3, need_weights=True)[1]
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
    ours, other = pair(db, dtype, **words)
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
    agree(lambda x: ours(x, k=k, **masks)[0], lambda x: other(x, keys, values, **theirs)[0], (ours, other), query)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("k", [None, RECORDS])
def test_the_metric_of_the_database_does_not_matter(metric: str, k: int | None) -> None:
    db = filled(metric=metric)
    ours, other = pair(db, torch.float32)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float32))
    agree(lambda x: ours(x, k=k)[0], lambda x: other(x, keys, values)[0], (ours, other), torch.randn(L, N, E))


@pytest.mark.parametrize("k", [None, RECORDS])
def test_labels_are_one_hot_values(k: int | None) -> None:
    db = softdb.open(None, dim=D, num_classes=4)
    keys, labels = torch.randn(RECORDS, D), torch.randint(4, (RECORDS,))
    db.insert(list(range(RECORDS)), keys, labels)
    ours, other = pair(db, torch.float64)
    assert ours.vdim == 4
    columns = (keys.double(), torch.nn.functional.one_hot(labels, 4).double())
    query = torch.randn(L, E, dtype=torch.float64)
    agree(lambda x: ours(x, k=k)[0], lambda x: other(x, *columns)[0], (ours, other), query)


def test_gradients_are_right_by_finite_differences() -> None:
    db = filled()
    mine, _ = pair(db, torch.float64, add_bias_kv=True, add_zero_attn=True)
    query = torch.randn(2, 2, E, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mine(x, temperature=0.7)[0], query)
    assert torch.autograd.gradcheck(lambda x: mine(x, temperature=0.7, k=5, need_weights=True), query)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("k", [None, RECORDS])
def test_temperature_and_filter(k: int | None) -> None:
    db = filled()
    ours, other = pair(db, torch.float64, add_bias_kv=True, bias=False)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float64))
    query = torch.randn(L, N, E, dtype=torch.float64)
    odd = ours(query, where={"odd": True}, k=k)[0]
    torch.testing.assert_close(odd, other(query, keys[1::2], values[1::2])[0])
    cooler = ours(query, temperature=0.25, k=k)[0]
    torch.testing.assert_close(cooler, other(4 * query, keys, values)[0])  # without b_q: q / T


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("how", ["mask", "filter", "empty database"])
def test_heads_without_participants_are_zeros(k: int | None, how: str) -> None:
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


def test_the_learnt_keys_take_part_without_records() -> None:
    mine, _ = pair(softdb.open(None, dim=D, value_dim=V), torch.float32, add_bias_kv=True)
    assert mine.bias_v is not None
    output, _ = mine(torch.randn(L, N, E))
    torch.testing.assert_close(output, mine.out_proj(mine.bias_v).expand_as(output))


@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_weights_of_candidates_are_those_of_torch(words: dict[str, Any]) -> None:
    db = filled()
    ours, other = pair(db, torch.float64, **words)
    keys, values = (column.expand(-1, N, -1) for column in columns(db, torch.float64))
    query = torch.randn(L, N, E, dtype=torch.float64)
    weights = ours(query, need_weights=True, k=RECORDS)[1]
    expected = other(query, keys, values, average_attn_weights=False)[1].transpose(1, 2)
    assert weights is not None
    assert weights.shape == (N, L, HEADS, RECORDS + len(words))
    hits = db.attend(ours.fold(query).queries, score=Dot(), k=RECORDS).hits
    assert hits is not None
    places = torch.tensor(hits.ids).view(N, L, HEADS, RECORDS)
    torch.testing.assert_close(weights[..., :RECORDS], expected.gather(3, places))
    torch.testing.assert_close(weights[..., RECORDS:], expected[..., RECORDS:])


def test_the_fold_scores_as_the_projections_do() -> None:
    db = filled()
    mine, _ = pair(db, torch.float64)
    query = torch.randn(L, N, E, dtype=torch.float64)
    folded = mine.fold(query)
    actual = (folded.queries @ columns(db, torch.float64)[0][:, 0].T + torch.as_tensor(folded.bias)[:, None]).view(
        N, L, HEADS, RECORDS
    )
    size = E // HEADS
    b_q, b_k, _ = mine.in_proj_bias.chunk(3)
    for b, i, h, r in [(0, 0, 0, 0), (1, 3, 2, 7), (2, 1, 1, 28)]:
        q = (mine.q_proj_weight @ query[i, b] + b_q)[h * size : (h + 1) * size]
        k = (mine.k_proj_weight @ columns(db, torch.float64)[0][r, 0] + b_k)[h * size : (h + 1) * size]
        torch.testing.assert_close(actual[b, i, h, r], q @ k / size**0.5)


@pytest.mark.parametrize("words", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("labels", [False, True])
def test_dropout_drops_candidates_unfolded(words: dict[str, Any], labels: bool) -> None:
    db = filled()
    if labels:
        db = holding(torch.randn(RECORDS, D), torch.randint(3, (RECORDS,)), num_classes=3)
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


def test_a_removed_candidate_is_a_stale_read(monkeypatch: pytest.MonkeyPatch) -> None:
    db = filled()
    mine, _ = pair(db, torch.float32, dropout=0.3)
    answer = db.attend(mine.fold(torch.randn(L, E)).queries, score=Dot(), k=3)
    assert answer.hits is not None
    answer.hits.rows[0, 0] = RECORDS + 5
    monkeypatch.setattr(db, "attend", lambda *_, **__: answer)
    with pytest.raises(StaleRead, match="attend again"):
        mine(torch.randn(L, E), k=3)
