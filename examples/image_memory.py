"""Recognise digits by stored digits: by the nearest, by a vote of the ten nearest, and by a soft query.

    python examples/image_memory.py [--plot PICTURE.png] [--quick]

Records are scikit-learn's 8 × 8 digits with their labels as values, so a soft query returns a distribution over ten
classes. Its bandwidth is learned on the records, each predicted from all others. In a calibrated distribution 80 % of
the answers with probability 0.8 are right (Guo et al. 2017, arXiv:1706.04599).
"""

from __future__ import annotations

import torch
from shared import arguments
from sklearn.datasets import load_digits

import softdb
from softdb.plots import COLORS, figure, save

STORED = 1200


def log_loss(shares: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log of the right class's probability."""
    return -shares[torch.arange(len(right)), right].clamp(min=1e-4).log().mean()


def main(picture: str | None) -> None:
    """Store digits, classify others in three ways, and compare the probabilities with the share of right answers."""
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.manual_seed(0))
    images, labels = torch.tensor(digits.data).float()[order] / 16, torch.tensor(digits.target)[order]
    queries, right = images[STORED:], labels[STORED:]
    score = softdb.scores.NegativeL2(1.0, learnable=True)
    optimiser = torch.optim.Adam(score.parameters(), lr=0.1)
    others = ~torch.eye(STORED, dtype=torch.bool)
    with softdb.open(None, dim=64, num_classes=10, metric="l2") as db:
        db.insert(range(STORED), images[:STORED], labels[:STORED])
        for step in range(24):
            batch = slice(step % 4 * 300, step % 4 * 300 + 300)
            loss = log_loss(db.attend(images[batch], score=score, mask=others[batch]).output, labels[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            votes = db.search(queries, k=10).rows  # rows count from 0, in the order of insertion
            answers = {
                "the nearest": db.attend(queries, weights="argmax").output,
                "ten neighbours vote": torch.nn.functional.one_hot(labels[votes], 10).float().mean(1),
                "soft, all records": db.attend(queries, score=score).output,
            }
    losses = {}
    for name, shares in answers.items():
        losses[name] = log_loss(shares, right).item()
        print(f"{name:20} right {(shares.argmax(1) == right).float().mean():.3f}  log loss {losses[name]:.3f}")
    assert (answers["soft, all records"].argmax(1) == right).float().mean() > 0.95
    assert losses["soft, all records"] < losses["ten neighbours vote"] < losses["the nearest"]
    if picture:
        drawn, (left, ax) = figure(2, height=3.5)
        soft = answers["soft, all records"]
        doubted = soft.amax(1).argsort()[:9]
        tiles = torch.nn.functional.pad(queries[doubted].reshape(3, 3, 8, 8), (1, 1, 1, 3))
        left.imshow(tiles.transpose(1, 2).reshape(36, 30).numpy(), cmap="Greys")
        left.set_frame_on(False)
        for place, query in enumerate(doubted.tolist()):
            share, answer = soft[query].max(0)
            text = {"ha": "center", "va": "center", "color": "black" if answer == right[query] else COLORS[3]}
            left.text(place % 3 * 10 + 4.5, place // 3 * 12 + 10, f"{answer}: {share:.2f}", **text)
        left.set(title="Least sure: answer, probability (red: wrong)", xticks=[], yticks=[])
        for name, shares in list(answers.items())[1:]:
            claimed, hit = shares.amax(1), (shares.argmax(1) == right).float()
            bins = list(claimed.argsort()[:180].chunk(5))
            ax.plot([claimed[b].mean() for b in bins], [hit[b].mean() for b in bins], "o-", label=name)
        ax.plot([0.5, 1], [0.5, 1], ":", color="0.3", label="calibrated")
        ax.set(xlabel="probability of the answer", ylabel="share that is right", title="180 least sure, in five parts")
        ax.legend(loc="lower right")
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
