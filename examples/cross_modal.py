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
        drawn, axes = figure(8, 3, 3.7)
        ways = {"imagined": imagined, "nearest": candidates[rows[:, 0]], "true": candidates}
        for row, (name, halves) in enumerate(ways.items()):
            for column, ax in enumerate(axes[8 * row : 8 * row + 8]):
                shades = "Greys" if name == "true" else "Blues"
                ax.imshow(queries[column].reshape(4, 8).numpy(), extent=(0, 8, 4, 8), cmap="Greys", vmax=1.3)
                ax.imshow(halves[column].reshape(4, 8).numpy(), extent=(0, 8, 0, 4), cmap=shades, vmax=1.3)
                ax.set(xlim=(0, 8), ylim=(0, 8), xticks=[], yticks=[])
                ax.set_ylabel("" if column else name)
                if name == "nearest":
                    label, true = right[rows[column, 0]].item(), right[column].item()
                    ax.set_title(f"a {label}" if label == true else f"a {label}, not {true}", loc="center", fontsize=9)
        drawn.suptitle("Grey: the given upper half, and the true lower one.  Blue: the lower half that was found")
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
