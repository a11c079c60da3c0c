"""Hard and soft attention: draw single records and learn from rewards, or pool all records and learn by gradient.

    python examples/hard_attention.py [--plot PICTURE.png] [--quick]

A query shall find its record among 50. Soft attention pools all values and has a gradient. Hard attention draws
records by their weights, gets a reward for the right one, and learns by REINFORCE (Williams 1992; Xu et al. 2015,
section 4.1): with a baseline, the mean reward of the query's other draws (Kool et al. 2019), or without. All three
learn to find the records; soft attention, whose gradient covers every record, learns fastest.
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb.nn import hard_attention, leave_one_out, reinforce
from softdb.plots import figure, save

RECORDS, DIM, STEPS, DRAWS = 50, 8, 150, 4


def trained(db: softdb.SoftDB, inputs: torch.Tensor, right: torch.Tensor, way: str, steps: int) -> list[float]:
    """Train a projection in one of the three ways; return recall@1 after each step."""
    torch.manual_seed(1)
    project = torch.nn.Linear(DIM, DIM, bias=False)
    optimiser = torch.optim.Adam(project.parameters(), lr=0.008)
    recalls = []
    for _ in range(steps):
        queries = project(inputs)
        if way == "soft":
            loss = -db.attend(queries, temperature=0.3).output[range(RECORDS), right].clamp(min=1e-6).log().mean()
        else:
            drawn = hard_attention(db, queries, DRAWS, temperature=0.3)
            reward = (drawn.hits.rows == right.unsqueeze(1)).float()
            loss = reinforce(reward, drawn.log_prob, leave_one_out(reward) if "baseline" in way else None)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        recalls.append((db.search(queries.detach(), k=1).rows[:, 0] == right).float().mean().item())
    return recalls


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train in three ways from the same start, and draw the recalls."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    steps = 100 if quick else STEPS
    keys = torch.nn.functional.normalize(torch.randn(RECORDS, DIM), dim=1)
    rotation = torch.linalg.qr(torch.randn(DIM, DIM))[0]
    with softdb.open(None, dim=DIM, num_classes=RECORDS) as db:
        db.insert(range(RECORDS), keys, range(RECORDS))
        inputs, right = keys @ rotation, torch.arange(RECORDS)  # the projection has to undo the rotation
        curves = {way: trained(db, inputs, right, way, steps) for way in ("soft", "hard, with a baseline", "hard")}
    for way, recalls in curves.items():
        print(f"{way:22} recall {recalls[steps // 2]:.2f} half way, {recalls[-1]:.2f} at the end")
    assert curves["soft"][-1] > 0.95
    assert curves["hard, with a baseline"][-1] > 0.6
    assert sum(curves["soft"]) > sum(curves["hard, with a baseline"])
    if picture:
        drawn, (ax,) = figure()
        for way, recalls in curves.items():
            ax.plot(recalls, label=way)
        ax.set(xlabel="training step", ylabel="recall@1: heaviest record is right", ylim=(0, 1.02))
        ax.set_title("The soft gradient, which covers every record, learns fastest")
        ax.legend()
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
