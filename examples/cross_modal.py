"""From one modality to another without training: by what both have in common with stored pairs (Norelli et al. 2022).

    python examples/cross_modal.py [PICTURE.png]

Two encoders that were never trained together: here the upper and the lower half of a digit stand for image and text.
Stored pairs link them. What is new is described by its similarities to the stored ones of its own modality (ASIF,
arXiv:2210.01738); as a soft query that is one `attend`: ask with the upper half, and the mean of the lower halves of
what is alike comes back, ready to be searched among candidates of the other modality.
"""

from __future__ import annotations

import sys

import torch
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
    asked, candidates, right = upper[PAIRS:], lower[PAIRS:], labels[PAIRS:]
    with softdb.open(None, dim=32, value_dim=32, metric="l2") as pairs:
        pairs.insert(range(PAIRS), upper[:PAIRS], lower[:PAIRS])
        imagined = pairs.attend(asked, temperature=0.1).output  # what lies under such an upper half
    with softdb.open(None, dim=32, metric="l2") as other:
        other.insert(range(len(candidates)), candidates)
        found = other.search(imagined, k=10).rows
    same = (right[found[:, 0]] == right).float().mean().item()
    own = (found == torch.arange(len(found)).unsqueeze(1)).any(1).float().mean().item()
    chance = 10 / len(candidates)
    print(f"the first half found is of the same digit: {same:.2f} (chance 0.10)")
    print(f"its own other half is among ten of {len(candidates)}: {own:.2f} (chance {chance:.2f})")
    assert same > 0.75
    assert own > 8 * chance
    if picture:
        drawn, axes = figure(8, 1.1, 3.2)
        for ax, row in zip(axes, range(8), strict=True):
            below = imagined[row], candidates[found[row, 0]], candidates[row]
            columns = [torch.cat([asked[row], part]) for part in below]
            ax.imshow(torch.cat([pad(one.reshape(8, 8), (1, 1, 2, 2)) for one in columns]).numpy(), cmap="gray_r")
            ax.set(xticks=[], yticks=[5.5, 17.5, 29.5] if row == 0 else [])
        axes[0].set_yticklabels(["imagined", "found", "true"])
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
