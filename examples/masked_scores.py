"""Masked softmax, and an additive score for queries of another width than the keys (Bahdanau, Cho and Bengio 2015).

    python examples/masked_scores.py [--plot PICTURE.png] [--quick]

The keys are twelve points on a circle, 2 wide; the queries are the points' names, 20 random numbers each. An additive
score wᵀtanh(W_q q + W_k k) compares vectors of different widths, and learns which point a name means. Then a mask
allows half of the records: the others get weight 0, and the weights of the allowed ones are scaled up to sum to 1 (Dive
into Deep Learning, 11.3). A name whose point is masked attends to the nearest points that are allowed.
"""

from __future__ import annotations

import math

import torch
from shared import arguments

import softdb
from softdb import scores
from softdb.plots import attention_heatmap, figure, save

N = 12


def weights_of(answer: softdb.Pooled) -> torch.Tensor:
    """Return the weights of an answer to every query, without their gradient."""
    assert answer.weights is not None
    return answer.weights.detach()


def main(picture: str | None) -> None:
    """Train the score through the database, query with a mask, and compare with plain tensors."""
    torch.manual_seed(0)
    queries, angles = torch.randn(N, 20), torch.arange(N) * 2 * math.pi / N
    keys = torch.stack([angles.cos(), angles.sin()], 1)
    mask = (torch.arange(N) < N // 2).expand(N, N)  # the first half of the circle, for every query
    additive = scores.Additive(20, 2, hidden=16)
    optimiser = torch.optim.Adam(additive.parameters(), lr=0.02)
    with softdb.open(None, dim=2, value_dim=2) as db:
        db.insert(range(N), keys, keys)
        untrained = weights_of(db.attend(queries, score=additive, need_weights=True))
        for _ in range(150):
            loss = (db.attend(queries, score=additive).output - keys).square().sum(1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        trained = weights_of(db.attend(queries, score=additive, need_weights=True))
        answer = db.attend(queries, score=additive, mask=mask, need_weights=True)
        masked = weights_of(answer)
    plain = softdb.attention(queries, keys, keys, score=additive, mask=mask)
    assert torch.allclose(answer.output, plain, atol=1e-5)
    assert (trained.argmax(1) == torch.arange(N)).all()  # each name means its point
    assert not masked[~mask].any()
    allowed = trained * mask
    assert torch.allclose(masked, allowed / allowed.sum(1, keepdim=True), atol=1e-5)
    nearest = masked.argmax(1)[N // 2 :].tolist()
    print(f"names of the masked points {N // 2} to {N - 1} attend most to {nearest}")
    assert set(nearest) == {0, N // 2 - 1}  # the allowed half begins and ends there
    if picture:
        drawn, axes = figure(3, height=2.6)
        titles = ("Untrained", "Trained", f"Trained; {N // 2} to {N - 1} masked")
        for ax, weights, title in zip(axes, (untrained, trained, masked), titles, strict=True):
            attention_heatmap(ax, weights, vmax=1, colorbar=ax is axes[-1])
            ax.set(title=title, xlabel="record (key, 2 wide)", ylabel="query (20 wide)")
            ax.set(xticks=range(0, N, 2), yticks=range(0, N, 2))
        axes[-1].axvspan(N / 2 - 0.5, N - 0.5, facecolor="none", edgecolor="0.6", hatch="//", linewidth=0)
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
