"""Predict the next item of a sequence: one negative, some draws, or every item in the denominator.

    python examples/next_item.py [--plot PICTURE.png] [--quick]

A transformer reads the items that a user has chosen, and its state is compared with a trained row for each item (Kang
and McAuley 2018, arXiv:1808.09781). For the same number of steps the sum over every item teaches more than one negative
(Klenitskiy and Vasilev 2023, arXiv:2309.07602). `benchmarks/sequences.py` measures the losses on real sequences.
"""

from __future__ import annotations

import torch
from shared import arguments
from torch.nn import functional as F

import softdb
from softdb.plots import figure, save

LENGTH, DIM, BATCH, STEPS = 16, 32, 64, 300
WAYS = {"one negative": None, "64 draws": 64, "every item": None}


def synthetic(items: int = 1000, users: int = 1000) -> torch.Tensor:  # (users, LENGTH) item ids
    """Return sequences in which each item is followed by one of its five successors, or rarely by any item."""
    successors, sequences = torch.randint(items, (items, 5)), torch.randint(items, (users, LENGTH))
    for step in range(1, LENGTH):
        following = successors[sequences[:, step - 1], torch.randint(5, (users,))]
        sequences[:, step] = torch.where(torch.rand(users) < 0.9, following, sequences[:, step])
    return sequences


def trained(way: str, sequences: torch.Tensor, steps: int) -> list[float]:
    """Train by one loss; return the recall@10 of each user's last item after every tenth of the steps."""
    torch.manual_seed(1)
    items, positions = torch.nn.Embedding(int(sequences.max()) + 1, DIM), torch.nn.Embedding(LENGTH - 2, DIM)
    layer = torch.nn.TransformerEncoderLayer(DIM, 1, 2 * DIM, 0.1, batch_first=True, norm_first=True)
    optimiser = torch.optim.Adam([*items.parameters(), *positions.parameters(), *layer.parameters()], lr=0.01)
    torch.nn.init.normal_(items.weight, std=DIM**-0.5)
    mask, recalls = torch.ones(LENGTH - 2, LENGTH - 2).triu(1).bool(), list[float]()
    for step in range(1, steps + 1):
        batch = sequences[torch.randint(len(sequences), (BATCH,)), :-1]
        states, targets = layer(items(batch[:, :-1]) + positions.weight, src_mask=mask), batch[:, 1:]
        if way == "one negative":
            others = torch.randint_like(targets, len(items.weight))
            right, wrong = ((states * items(chosen)).sum(-1) for chosen in (targets, others))
            loss = (F.softplus(-right) + F.softplus(wrong)).mean()
        else:
            loss = softdb.linear_cross_entropy(states, items.weight, targets, max_draws=WAYS[way])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % (steps // 10) == 0:
            with torch.no_grad():
                states = layer.eval()(items(sequences[:, 1:-1]) + positions.weight, src_mask=mask)
                nearest = (states[:, -1] @ items.weight.T).topk(10).indices
                recalls.append((nearest == sequences[:, -1:]).any(1).float().mean().item())
                layer.train()
    return recalls


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train by each loss for the same number of steps, and draw recall@10 against them."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    steps = 100 if quick else STEPS
    sequences = synthetic(300 if quick else 1000)  # or your own, a tensor of item ids (users, LENGTH)
    curves = {way: trained(way, sequences, steps) for way in WAYS}
    print(f"recall@10 after {steps} steps: " + ", ".join(f"{way} {c[-1]:.3f}" for way, c in curves.items()))
    assert curves["every item"][-1] > 2 * curves["one negative"][-1] < 2 * curves["64 draws"][-1]
    if picture:
        drawn, (ax,) = figure()
        for way, recalls in curves.items():
            ax.plot(range(steps // 10, steps + 1, steps // 10), recalls, "o-", label=way)
        ax.set(xlabel="training step", ylabel="recall@10 of the last item", title="More items teach more in a step")
        ax.legend(title="denominator of the loss")
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
