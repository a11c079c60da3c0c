"""The kitchen query: "what is red?" and "what is for drinking?", by a score that chooses coordinates.

    python examples/kitchen.py [--plot PICTURE.png] [--quick]

A key holds colour, use and place. A kernel with a width for each coordinate decides which of them count: coordinates
with a narrow width must agree, those with a wide one are ignored (Dive into Deep Learning, 11.2; Härdle 1990,
section 3). The widths can be learned, too: from answers to "is it red?" alone, the colour's width stays narrow, and
all others grow.
"""

from __future__ import annotations

import torch
from shared import arguments

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
QUESTIONS = {
    "what is red?": ((0.0, 0, 0, 0), (0.15, ANY, ANY, ANY)),
    "what is for drinking?": ((0.0, 1, 0, 0), (ANY, 0.3, ANY, ANY)),
    "what is red and for eating?": ((0.0, 0, 1, 0), (0.3, ANY, 0.3, ANY)),
}


def main(picture: str | None) -> None:
    """Query with fixed widths, then learn widths from the red things."""
    keys = torch.tensor(list(KITCHEN.values()))
    names = list(KITCHEN)
    with softdb.open(None, dim=4, metric="l2") as db:
        db.insert(names, keys)
        shares = []
        for question, (query, widths) in QUESTIONS.items():
            answer = db.attend(query, score=NegativeL2(torch.tensor(widths)), need_weights=True)
            (explanation,) = answer.explain(k=3)
            print(f"{question:30} {', '.join(map(str, explanation.ids))}")
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
            predicted = db.attend(keys, score=learned, mask=~torch.eye(8, dtype=torch.bool)).output
            loss = (predicted - red).square().mean()  # each record is predicted from the others
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    bandwidth = learned.bandwidth.tolist()
    print("learned widths: " + ", ".join(f"{width:.2f}" for width in bandwidth))
    assert bandwidth[0] < 0.5 * min(bandwidth[1:])
    if picture:
        drawn, (ax,) = figure()
        weight_bars(ax, torch.stack(shares), names, [text.replace(" for", "\nfor") for text in QUESTIONS], COLOURS)
        ax.set_title("A score that chooses coordinates answers each question")
        ax.legend(ax.containers[::-1], names[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize=9)
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
