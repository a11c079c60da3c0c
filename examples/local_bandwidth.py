"""A width for each record: narrow where records are dense, wide where they are sparse.

    python examples/local_bandwidth.py [--plot PICTURE.png] [--quick]

Two thirds of 300 measurements are in the first fifth of the range. A single width is too wide there or too narrow
elsewhere. The distance of each record to its tenth neighbour, by one search, scales its kernel (Breiman, Meisel and
Purcell 1977; Silverman 1986, section 5.3).
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb.plots import figure, save
from softdb.scores import leave_one_out


def curve(x: torch.Tensor) -> torch.Tensor:
    """Return the measured function without noise: it changes fast where records are dense."""
    return torch.sin(6 / (x + 0.3))


def main(picture: str | None) -> None:
    """Compare the best single width with a width for each record."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(200, 1), 1 + 4 * torch.rand(100, 1)]).sort(dim=0).values
    y = curve(x) + 0.1 * torch.randn(300, 1)
    grid = torch.linspace(0.02, 4.9, 400).unsqueeze(1)
    with softdb.open(None, dim=2, value_dim=1, metric="l2") as db:
        # the second coordinate of a key is its width, which the score below uses
        db.insert(range(300), torch.cat([x, torch.zeros(300, 1)], 1), y)
        widths = (-db.search(torch.cat([x, torch.zeros(300, 1)], 1), k=11).scores[:, -1]).sqrt()  # to tenth neighbour
        db.update(range(300), torch.cat([x, widths.unsqueeze(1)], 1), y)
        queries = torch.cat([grid, torch.zeros(400, 1)], 1)

        def balloons(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            """Score keys by the log of a Gaussian kernel with each key's own width, (q, n)."""
            scaled = (queries[:, :1] - keys[:, 0]) / (0.6 * keys[:, 1])
            return -scaled.square() / 2 - keys[:, 1].log()

        width = leave_one_out(x, y)
        shared = db.attend(queries, score=lambda q, k: -(q[:, :1] - k[:, 0]).square() / (2 * width**2)).output
        local = db.attend(queries, score=balloons).output
    errors = [(output - curve(grid)).square().mean().sqrt().item() for output in (shared, local)]
    print(f"best single width {width:.3f}, by leave-one-out: error {errors[0]:.3f}; a width each: {errors[1]:.3f}")
    assert errors[1] < 0.8 * errors[0]
    if picture:
        drawn, (ax,) = figure()
        ax.plot(x, y, ".", color="0.7", label="records, measured with noise")
        ax.plot(grid, shared, label=f"one width for all, {width:.2f}: error {errors[0]:.2f}")
        ax.plot(grid, local, label=f"each its own, {widths.min():.2f} to {widths.max():.2f}: error {errors[1]:.2f}")
        ax.plot(grid, curve(grid), ":", color="0.2", label="true curve")
        ax.set(xlabel="x, the key", ylabel="y, the value", title="Widths that follow the records' density")
        ax.legend()
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
