"""The kitchen query: "what is red?" and "what is for drinking?", by a score that chooses coordinates.

    python examples/kitchen.py [PICTURE.png]

A key tells colour, use and place. A kernel with a width for each coordinate decides which of them count: narrow ones
must agree, wide ones may be anything (Dive into Deep Learning, 11.2; Härdle 1990, section 3). The widths can be
learned, too: from answers to "is it red?" alone, the coordinate of the colour stays narrow, and all the others grow
wide.
"""

from __future__ import annotations

import sys

import torch

import softdb
from softdb.plots import figure, save, weight_bars
from softdb.scores import NegativeL2

#           hue (0 red … 1 blue), for drinking, for eating, on the table
KITCHEN = {
    "red mug": (0.0, 1, 0, 1),
    "tomato": (0.05, 0, 1, 1),
    "red chair": (0.0, 0, 0, 0),
    "blue mug": (1.0, 1, 0, 1),
    "water jug": (0.9, 1, 0, 1),
    "blue plate": (0.95, 0, 1, 1),
    "green apple": (0.4, 0, 1, 1),
    "wooden stool": (0.25, 0, 0, 0),
}
COLOURS = ["crimson", "tomato", "darkred", "royalblue", "deepskyblue", "navy", "yellowgreen", "peru"]
ANY = 100.0
ASKED = {
    "what is red?": ((0.0, 0, 0, 0), (0.15, ANY, ANY, ANY)),
    "what is for drinking?": ((0.0, 1, 0, 0), (ANY, 0.3, ANY, ANY)),
    "what is red and for eating?": ((0.0, 0, 1, 0), (0.3, ANY, 0.3, ANY)),
}


def main(picture: str | None) -> None:
    """Ask by widths that are given, then learn them from what is red."""
    keys = torch.tensor(list(KITCHEN.values()))
    names = list(KITCHEN)
    with softdb.open(None, dim=4, metric="l2") as db:
        db.insert(names, keys)
        shares = []
        for question, (query, widths) in ASKED.items():
            answer = db.attend(query, score=NegativeL2(torch.tensor(widths)), need_weights=True)
            (why,) = answer.explain(k=3)
            print(f"{question:30} {', '.join(map(str, why.ids))}")
            assert answer.weights is not None
            shares.append(answer.weights[0])
        assert {names[i] for i in shares[0].topk(3).indices} == {"red mug", "tomato", "red chair"}
        assert {names[i] for i in shares[1].topk(3).indices} == {"red mug", "blue mug", "water jug"}
        assert names[int(shares[2].argmax())] == "tomato"

    red = (keys[:, :1] < 0.1).float()
    learned = NegativeL2(torch.ones(4), learnable=True)
    optimiser = torch.optim.Adam(learned.parameters(), lr=0.1)
    with softdb.open(None, dim=4, value_dim=1, metric="l2") as db:
        db.insert(names, keys, red)
        for _ in range(60):
            told = db.attend(keys, score=learned, mask=~torch.eye(8, dtype=torch.bool)).output
            loss = (told - red).square().mean()  # each is told from the others
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    found = learned.bandwidth.tolist()
    print("learned widths: " + ", ".join(f"{w:.2f}" for w in found))
    assert found[0] < 0.5 * min(found[1:])
    if picture:
        drawn, (ax,) = figure(1, 8, 4.5)
        weight_bars(ax, torch.stack(shares), names, list(ASKED), COLOURS)
        ax.legend(ax.containers, names, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
