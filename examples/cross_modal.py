"""Search across modalities without training, by stored pairs of both (Norelli et al. 2022).

    python examples/cross_modal.py [--plot PICTURE.png] [--quick]

The upper and the lower halves of digits stand for two modalities, such as image and text. Stored pairs link them. A new
upper half is described by its similarities to the stored upper halves (ASIF, arXiv:2210.01738). With softdb that is
one `attend`: it returns the mean of the lower halves that belong to similar upper ones, and this mean is the query of a
search among the candidates of the other modality.
"""

from __future__ import annotations

import torch
from shared import arguments
from sklearn.datasets import load_digits
from torch.nn.functional import pad

import softdb
from softdb.plots import figure, save

PAIRS = 1500


def main(picture: str | None) -> None:
    """Match upper halves with lower halves through stored pairs."""
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.manual_seed(0))
    images = torch.tensor(digits.data).float()[order] / 16
    upper, lower = images[:, :32], images[:, 32:]
    labels = torch.tensor(digits.target)[order]
    queries, candidates, right = upper[PAIRS:], lower[PAIRS:], labels[PAIRS:]
    with softdb.open(None, dim=32, value_dim=32, metric="l2") as pairs:
        pairs.insert(range(PAIRS), upper[:PAIRS], lower[:PAIRS])
        imagined = pairs.attend(queries, temperature=0.1).output  # mean lower half of similar digits
    with softdb.open(None, dim=32, metric="l2") as other:
        other.insert(range(len(candidates)), candidates)
        rows = other.search(imagined, k=10).rows
    same = (right[rows[:, 0]] == right).float().mean().item()
    own = (rows == torch.arange(len(rows)).unsqueeze(1)).any(1).float().mean().item()
    chance = 10 / len(candidates)
    print(f"nearest lower half of the same digit: {same:.2f} (chance 0.10)")
    print(f"own lower half among the nearest ten of {len(candidates)}: {own:.2f} (chance {chance:.2f})")
    assert same > 0.75
    assert own > 8 * chance
    if picture:
        drawn, axes = figure(8, 1.1, 3.2)
        for ax, row in zip(axes, range(8), strict=True):
            halves = imagined[row], candidates[rows[row, 0]], candidates[row]
            digits_ = [torch.cat([queries[row], half]).reshape(8, 8) for half in halves]
            ax.imshow(torch.cat([pad(digit, (1, 1, 2, 2)) for digit in digits_]).numpy(), cmap="gray_r")
            ax.set(xticks=[], yticks=[5.5, 17.5, 29.5] if row == 0 else [])
        axes[0].set_yticklabels(["imagined", "found", "true"])
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
