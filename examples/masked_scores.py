"""Masked softmax, and an additive score for queries of another width than the keys (Bahdanau, Cho and Bengio 2015).

    python examples/masked_scores.py [--plot PICTURE.png] [--quick]

A database has ten records; the first query's mask allows 2 of them, the second one's 6. Queries are 20 wide, keys 2: an
additive score wᵀtanh(W_q q + W_k k) compares vectors of different widths. As all keys are equal, the allowed records
have equal weights (Dive into Deep Learning, 11.3).
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb import scores
from softdb.plots import attention_heatmap, figure, save


def main(picture: str | None) -> None:
    """Query with a mask, compare with plain tensors, and draw the weights."""
    torch.manual_seed(0)
    queries = torch.randn(2, 20, requires_grad=True)
    keys, values = torch.ones(10, 2), torch.arange(40.0).reshape(10, 4)
    counts = torch.tensor([2, 6])
    mask = torch.arange(10) < counts.unsqueeze(1)  # (2, 10)
    additive = scores.Additive(20, 2, hidden=8)
    with softdb.open(None, dim=2, value_dim=4) as db:
        db.insert(range(10), keys, values)
        answer = db.attend(queries, score=additive, mask=mask, need_weights=True)
        product = db.attend(queries[:, :2], score=scores.ScaledDot(), mask=mask)  # needs queries as wide as the keys
    plain = softdb.attention(queries[:, None], keys, values, score=additive, valid_len=counts)[:, 0]
    assert torch.allclose(answer.output, plain, atol=1e-5)
    assert torch.allclose(answer.output, product.output, atol=1e-4)  # with equal keys every score gives equal weights
    assert torch.allclose(answer.output[0], values[:2].mean(0), atol=1e-5)
    assert torch.allclose(answer.output[1], values[:6].mean(0), atol=1e-4)
    answer.output.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    print(answer.output)
    if picture and answer.weights is not None:
        shares = torch.zeros(2, 10)
        for row, weights in enumerate(answer.weights.detach()):
            shares[row, : counts[row]] = weights[: counts[row]]
        drawn, (ax,) = figure(1, 7, 2.2)
        names = ["2 places count", "6 places count"]
        attention_heatmap(ax, shares, names, [str(place) for place in range(10)])
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
