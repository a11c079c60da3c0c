"""A memory of images: a digit is recognised by the digits it resembles, by the nearest, the ten nearest, or softly.

    python examples/image_memory.py [PICTURE.png]

Records are scikit-learn's 8 × 8 digits and the value is the label, so a soft query answers with a distribution over
the ten classes. Is it to be believed? How far a record reaches is learned on the records themselves, each told from
all others; then of what is claimed with 80 % some 80 % should be right (Guo et al. 2017, arXiv:1706.04599).
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits

import softdb
from softdb.plots import figure, save

STORED = 1200


def log_loss(shares: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean of -log of what the right class was given."""
    return -shares[torch.arange(len(right)), right].clamp(min=1e-4).log().mean()


def main(picture: str | None) -> None:
    """Store digits, ask for others in three ways, and hold what is claimed against what is right."""
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.manual_seed(0))
    images, labels = torch.tensor(digits.data).float()[order] / 16, torch.tensor(digits.target)[order]
    asked, right = images[STORED:], labels[STORED:]
    score = softdb.scores.NegativeL2(1.0, learnable=True)
    optimiser = torch.optim.Adam(score.parameters(), lr=0.1)
    others = ~torch.eye(STORED, dtype=torch.bool)
    with softdb.open(None, dim=64, num_classes=10, metric="l2") as db:
        db.insert(range(STORED), images[:STORED], labels[:STORED])
        for step in range(24):
            part = slice(step % 4 * 300, step % 4 * 300 + 300)
            loss = log_loss(db.attend(images[part], score=score, mask=others[part]).output, labels[part])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            votes = db.search(asked, k=10).rows  # rows count from 0, as they were inserted
            answers = {
                "the nearest": db.attend(asked, weights="argmax").output,
                "ten neighbours vote": torch.nn.functional.one_hot(labels[votes], 10).float().mean(1),
                "soft, all records": db.attend(asked, score=score).output,
            }
    losses = {}
    for name, shares in answers.items():
        losses[name] = log_loss(shares, right).item()
        print(f"{name:20} right {(shares.argmax(1) == right).float().mean():.3f}  log loss {losses[name]:.3f}")
    assert (answers["soft, all records"].argmax(1) == right).float().mean() > 0.95
    assert losses["soft, all records"] < losses["ten neighbours vote"] < losses["the nearest"]
    if picture:
        drawn, (left, ax) = figure(2, 4.5, 4)
        doubted = answers["soft, all records"].amax(1).argsort()[:16]
        tiles = torch.nn.functional.pad(asked[doubted].reshape(4, 4, 8, 8), (1, 1, 1, 1))
        left.imshow(tiles.transpose(1, 2).reshape(40, 40).numpy(), cmap="gray_r")
        left.set(title="the most doubted of them", xticks=[], yticks=[])
        for name, shares in list(answers.items())[1:]:
            claimed, hit = shares.amax(1), (shares.argmax(1) == right).float()
            parts = list(claimed.argsort()[:180].chunk(5))
            ax.plot([claimed[p].mean() for p in parts], [hit[p].mean() for p in parts], "o-", label=name)
        ax.plot([0.4, 1], [0.4, 1], ":", color="0.5")
        ax.set(xlabel="claimed", ylabel="right", title="the 180 least sure, in five parts")
        ax.legend(frameon=False)
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
