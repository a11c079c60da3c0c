"""A trained memory: keys and values of 64 records learn a function, and are written back to the database.

    python examples/trained_memory.py [--plot PICTURE.png] [--quick]

Keys and values are parameters (as in product-key memories, Lample et al. 2019, arXiv:1907.05242): the soft query's
gradient moves the k nearest records of each query. They learn a function of the plane, and the keys move to where it
bends. `commit()` writes them back, all or nothing.
"""

from __future__ import annotations

import tempfile

import torch
from shared import arguments

import softdb
from softdb.nn import Memory
from softdb.plots import figure, save


def target(x: torch.Tensor) -> torch.Tensor:  # (n, 2) -> (n, 1)
    """Return the function to learn: a hill and a hollow."""
    return (-(x - 0.7).square().sum(1) / 0.3).exp()[:, None] - (-(x + 0.7).square().sum(1) / 0.3).exp()[:, None]


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train keys and values, write them back, and open the database again."""
    torch.manual_seed(0)
    tests = torch.rand(500, 2) * 4 - 2
    with tempfile.TemporaryDirectory() as folder:
        with softdb.open(folder + "/memory", dim=2, value_dim=1, metric="l2") as db:
            start = torch.rand(64, 2) * 4 - 2
            db.insert(range(64), start, torch.zeros(64, 1))
            memory = Memory(db, k=8, temperature=0.3)
            optimiser = torch.optim.SparseAdam(list(memory.parameters()), lr=0.03)
            losses = []
            for _ in range(200 if quick else 300):
                x = torch.rand(64, 2) * 4 - 2
                loss = (memory(x).output - target(x)).square().mean()
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()  # type: ignore[no-untyped-call]
                memory.step()
                losses.append(loss.item())
            print(f"loss {sum(losses[:20]) / 20:.4f} at first, {sum(losses[-20:]) / 20:.4f} at the end")
            print(memory.commit(), "records written back")
        with softdb.open(folder + "/memory", mode="r") as db:  # the trained records alone; no memory object is needed
            learned = db.attend(tests, k=8, temperature=0.3).output
            records = db.get(range(64))
        error = (learned - target(tests)).square().mean().item()
    assert error < 0.2 * target(tests).square().mean().item()
    if picture:
        drawn, (left, right) = figure(2, height=3.7, width_ratios=(2, 3))
        left.plot(losses, linewidth=1)
        left.set(
            xlabel="training step", ylabel="mean squared error", yscale="log", title="The memory learns the function"
        )
        grid = torch.stack(torch.meshgrid(*[torch.linspace(-2, 2, 80)] * 2, indexing="xy"), -1).reshape(-1, 2)
        shades = {"cmap": "RdBu", "vmin": -1.2, "vmax": 1.2}
        right.imshow(target(grid).reshape(80, 80).numpy(), extent=(-2, 2, -2, 2), origin="lower", **shades)
        ends, values = torch.as_tensor(records.keys), torch.as_tensor(records.values)[:, 0]
        right.plot(*torch.stack([start, ends]).unbind(2), color="0.4", linewidth=0.7)
        right.plot([], [], color="0.4", linewidth=0.7, label="way of a key")
        held = right.scatter(*ends.T, c=values, s=25, edgecolor="k", linewidth=0.8, label="record at its end", **shades)
        drawn.colorbar(held, ax=right, label="value")
        right.set(title="Keys move to where it bends", xlabel="first coordinate", ylabel="second coordinate")
        right.grid(visible=False)
        drawn.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=2)
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
