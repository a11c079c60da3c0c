"""Three poolings of the same records: their mean, by a kernel, and by a score that is learned.

    python examples/attention_pooling.py [--plot PICTURE.png] [--quick]

The mean ignores the query. A kernel weighs records by their distance to it (Nadaraya and Watson, 1964). A learned width
makes it attention with a parameter: each measurement is predicted from all others, and the loss is backpropagated
through the database to the width (Dive into Deep Learning, 11.2; Hastie, Tibshirani and Friedman, 6.1).
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb import scores
from softdb.plots import figure, save


def curve(x: torch.Tensor) -> torch.Tensor:
    """Return the measured function without noise."""
    return 2 * x.sin() + x**0.8


def main(picture: str | None) -> None:
    """Pool in three ways, compare them with the curve, and draw them."""
    torch.manual_seed(0)
    x = (torch.rand(60, 1) * 5).sort(dim=0).values
    y = curve(x) + 0.4 * torch.randn(60, 1)
    queries = torch.linspace(0.1, 4.9, 200).unsqueeze(1)
    learned = scores.Gaussian(1.0, learnable=True)
    others = ~torch.eye(60, dtype=torch.bool)  # each record is predicted from all others
    optimiser = torch.optim.Adam(learned.parameters(), lr=0.05)
    with softdb.open(None, dim=1, value_dim=1, metric="l2") as db:
        db.insert(range(60), x, y)
        for _ in range(80):
            loss = (db.attend(x, score=learned, mask=others).output - y).square().mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            width = learned.bandwidth.item()
            pooled = {
                "the mean of all": db.attend(queries, weights="uniform").output,
                "by a kernel of width 1": db.attend(queries, score=scores.Gaussian(1.0)).output,
                f"by a learned width, {width:.2f}": db.attend(queries, score=learned).output,
            }
    errors = [(output - curve(queries)).square().mean().sqrt().item() for output in pooled.values()]
    for name, error in zip(pooled, errors, strict=True):
        print(f"{name:30} error {error:.3f}")
    assert errors[2] < errors[1] < errors[0]
    if picture:
        drawn, (ax,) = figure()
        ax.plot(x, y, "o", color="0.7", markersize=4, label="records, measured with noise")
        ax.plot(queries, curve(queries), ":", color="0.2", label="true curve")
        for name, output in pooled.items():
            ax.plot(queries, output, label=name)
        ax.set(xlabel="x, the key", ylabel="y, the value", title="A learned width comes nearest to the curve")
        ax.legend()
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
