"""Regression on a table by soft nearest neighbours: one score, then one value exchanged at a time (TabR).

    python examples/soft_neighbours.py [--plot PICTURE.png] [--quick]

The rows are scikit-learn's 442 diabetes patients; the target is the progress of their disease. A prediction is made of
what the other training rows hold, weighted by a softmax of how near their keys are. Each of the four networks exchanges
one part of the one before. `benchmarks/housing.py` trains them on 20,640 rows, beside published figures.
"""

from __future__ import annotations

import torch
from shared import arguments
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import softdb
from softdb.plots import figure, save
from softdb.scores import Dot, NegativeL2, Score

WIDTH, STEPS, TRAIN = 16, 80, 342


class SoftNeighbours(nn.Module):
    """Prediction of a target from the rows near it: head(E x + Σ w_i (V [x_i, y_i] + T(k - k_i))), w = softmax(s)."""

    def __init__(self, rows: Tensor, targets: Tensor, score: Score, labels: bool, corrected: bool) -> None:
        super().__init__()
        self.rows, self.score, self.corrected = rows, score, corrected  # (n, p)
        self.values = torch.cat([rows, targets], 1) if labels else rows  # (n, p + 1) or (n, p)
        self.embed, self.key = nn.Linear(rows.shape[1], WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(self.values.shape[1], WIDTH)
        self.correct = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:  # (q, p), (q, n) -> (q, 1)
        """Return predictions; the mask is True where a training row takes part."""
        x = self.embed(rows)
        query, keys, values = self.key(x), self.key(self.embed(self.rows)), self.value(self.values)
        if self.corrected:  # every query has values of its own
            values = values + self.correct(query.unsqueeze(1) - keys)  # (q, n, d)
            query, mask = query.unsqueeze(1), None if mask is None else mask.unsqueeze(1)
        near = softdb.attention(query, keys, values, score=self.score, mask=mask).reshape(x.shape)
        return torch.as_tensor(self.head(x + near))


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train the four networks and compare their errors on the rows that were held out."""
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    table = load_diabetes()
    order = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(0))
    features, targets = (torch.tensor(part, dtype=torch.float32)[order] for part in (table.data, table.target[:, None]))
    features, targets = features / features[:TRAIN].std(0), (targets - targets[:TRAIN].mean()) / targets[:TRAIN].std()
    others, curves = ~torch.eye(TRAIN, dtype=torch.bool), dict[str, list[float]]()
    distances: dict[str, tuple[Score, bool, bool]] = {"squared distance": (NegativeL2(), False, False)}
    distances |= {"... and labels": (NegativeL2(), True, False), "... and corrections": (NegativeL2(), True, True)}
    for name, way in {"dot product": (Dot(), False, False), **distances}.items():
        torch.manual_seed(0)
        model, errors = SoftNeighbours(features[:TRAIN], targets[:TRAIN], *way), []
        adam = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.1)
        for _ in range(50 if quick else STEPS):
            adam.zero_grad()
            (model(features[:TRAIN], others) - targets[:TRAIN]).square().mean().backward()
            adam.step()
            errors.append((model(features[TRAIN:]) - targets[TRAIN:]).square().mean().sqrt().item())
        curves[name] = errors
        print(f"{name:20} held-out error {errors[-1]:.3f} of the targets' deviation")
    assert all(errors[-1] < 0.85 for errors in curves.values())  # the mean of the targets has an error of 1
    if picture:
        drawn, (ax,) = figure()
        for name, errors in curves.items():
            ax.plot(errors, label=name)
        ax.set(xlabel="training step", ylabel="held-out error / deviation of the targets", ylim=(0.65, 1.1))
        ax.set_title("Each network exchanges one part of the one before")
        ax.legend()
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
