"""Hard against soft: to look at one record at a time, and learn where to look from the reward alone.

    python examples/hard_attention.py [PICTURE.png]

A query shall find its record among 50. Soft attention pools all values and has a gradient. Hard attention draws one
record by its weight, gets a reward if it was the right one, and learns by REINFORCE (Williams 1992; Xu et al. 2015,
section 4.1), with a baseline, the mean reward of the query's other draws (Kool et al. 2019), or without. All find in
the end; the gradient that sees every record is there first.
"""

from __future__ import annotations

import sys

import torch

import softdb
from softdb.nn import hard_attention, leave_one_out, reinforce
from softdb.plots import figure, save

RECORDS, DIM, STEPS, DRAWS = 50, 8, 150, 4


def trained(db: softdb.SoftDB, asked: torch.Tensor, right: torch.Tensor, way: str) -> list[float]:
    """The share of queries whose most heavily weighed record is the right one, step by step."""
    torch.manual_seed(1)
    project = torch.nn.Linear(DIM, DIM, bias=False)
    optimiser = torch.optim.Adam(project.parameters(), lr=0.008)
    found = []
    for _ in range(STEPS):
        queries = project(asked)
        if way == "soft":
            loss = -db.attend(queries, temperature=0.3).output[range(RECORDS), right].clamp(min=1e-6).log().mean()
        else:
            drawn = hard_attention(db, queries, DRAWS, temperature=0.3)
            reward = (drawn.hits.rows == right.unsqueeze(1)).float()
            loss = reinforce(reward, drawn.log_prob, leave_one_out(reward) if "baseline" in way else None)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        found.append((db.search(queries.detach(), k=1).rows[:, 0] == right).float().mean().item())
    return found


def main(picture: str | None) -> None:
    """Train the three ways from the same start, and draw how soon each finds."""
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(RECORDS, DIM), dim=1)
    turn = torch.linalg.qr(torch.randn(DIM, DIM))[0]
    with softdb.open(None, dim=DIM, num_classes=RECORDS) as db:
        db.insert(range(RECORDS), keys, range(RECORDS))
        asked, right = keys @ turn, torch.arange(RECORDS)  # what asks lies in another space
        curves = {way: trained(db, asked, right, way) for way in ("soft", "hard, with a baseline", "hard")}
    for way, found in curves.items():
        print(f"{way:22} finds {found[STEPS // 2]:.2f} half way, {found[-1]:.2f} at last")
    assert curves["soft"][-1] > 0.95
    assert curves["hard, with a baseline"][-1] > 0.6
    assert sum(curves["soft"]) > sum(curves["hard, with a baseline"])
    if picture:
        drawn, (ax,) = figure(1, 7, 4)
        for way, found in curves.items():
            ax.plot(found, label=way)
        ax.set(xlabel="step", ylabel="queries whose heaviest record is right", ylim=(0, 1.02))
        ax.legend(frameon=False)
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
