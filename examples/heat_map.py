"""Find objects in an image: its regions are records, and the weights of a query are a heat map.

    python examples/heat_map.py [--plot PICTURE.png] [--quick]

A picture of several digits is cut into overlapping windows. A window's key is its pixels, its value its position. The
query is a mean of other images of a digit: the weights show where that digit is, and the soft answer is its place (as
in Xu et al. 2015, section 5.4, where the words of a caption attend to the regions of a photograph).
"""

from __future__ import annotations

import torch
from shared import arguments
from sklearn.datasets import load_digits

import softdb
from softdb.plots import figure, save

SIDE, WINDOW = 40, 8


def main(picture: str | None) -> None:
    """Put six digits into a picture, query for each with other images of it, and draw the weights."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float() / 16, digits.target
    scene, places = torch.zeros(SIDE, SIDE), {0: (3, 2), 1: (4, 27), 4: (14, 14), 6: (28, 4), 7: (27, 28), 3: (15, 29)}
    for label, (top, left) in places.items():
        scene[top : top + WINDOW, left : left + WINDOW] = images[(labels == label).nonzero()[0][0]]
    windows = scene.unfold(0, WINDOW, 1).unfold(1, WINDOW, 1)  # (33, 33, 8, 8)
    across = windows.shape[0]
    rows, columns = torch.meshgrid(torch.arange(across), torch.arange(across), indexing="ij")
    corners = torch.stack([rows, columns], -1).reshape(-1, 2).float()
    with softdb.open(None, dim=64, value_dim=2, metric="l2") as db:
        db.insert(range(across**2), windows.reshape(-1, 64), corners)
        queries = torch.stack([images[(labels == label).nonzero()[0][1:9]].mean(0).flatten() for label in places])
        answer = db.attend(queries, temperature=0.5, need_weights=True)
    answers = answer.output.round().int().tolist()
    errors = (answer.output - torch.tensor(list(places.values()))).abs().amax(1)
    for label, place, true in zip(places, answers, places.values(), strict=True):
        print(f"digit {label}: found at {tuple(place)}, true place {true}")
    assert (errors < 2).sum() >= 5
    if picture and answer.weights is not None:
        drawn, axes = figure(3, 2, 4.9)
        for ax, label, weights in zip(axes, places, answer.weights, strict=True):
            window = torch.ones(1, 1, WINDOW, WINDOW)  # spreads each weight over its window
            heat = torch.nn.functional.conv_transpose2d(weights.reshape(1, 1, across, across), window)[0, 0]
            shades = ax.imshow(heat.numpy() / heat.max().item(), cmap="Reds", vmin=0, alpha=0.7)
            ax.imshow(0 * scene.numpy(), cmap="gray", alpha=scene.numpy())
            ax.set(title=f"where is a {label}?", xticks=[], yticks=[])
        drawn.colorbar(shades, ax=axes, label="weight, relative to the largest")
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
