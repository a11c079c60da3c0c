"""A width for each record, from how crowded it is there: narrow where records are many, wide where they are few.

    python examples/local_bandwidth.py [PICTURE.png]

Two thirds of 300 measurements lie in the first fifth of the range. One width must be too wide there or too narrow
elsewhere. The distance of each record to its tenth neighbour (one search of the database) scales its kernel: a
balloon that each record carries (Breiman, Meisel and Purcell 1977; Silverman 1986, section 5.3).
"""

from __future__ import annotations

import sys

import torch

import softdb
from softdb.plots import figure, save
from softdb.scores import leave_one_out


def curve(x: torch.Tensor) -> torch.Tensor:
    """Quick where it is crowded, slow elsewhere."""
    return torch.sin(6 / (x + 0.3))


def main(picture: str | None) -> None:
    """Compare one width for all, the best there is, with a width for each record."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(200, 1), 1 + 4 * torch.rand(100, 1)]).sort(dim=0).values
    y = curve(x) + 0.1 * torch.randn(300, 1)
    asked = torch.linspace(0.02, 4.9, 400).unsqueeze(1)
    with softdb.open(None, dim=2, value_dim=1, metric="l2") as db:
        # the second coordinate of a key is its own width: the score takes it from there
        db.insert(range(300), torch.cat([x, torch.zeros(300, 1)], 1), y)
        far = (-db.search(torch.cat([x, torch.zeros(300, 1)], 1), k=11).scores[:, -1]).sqrt()  # to the tenth neighbour
        db.update(range(300), torch.cat([x, far.unsqueeze(1)], 1), y)
        near = torch.cat([asked, torch.zeros(400, 1)], 1)

        def balloons(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            """log of a Gaussian kernel with the width that each key carries."""
            apart = (queries[:, :1] - keys[:, 0]) / (0.6 * keys[:, 1])
            return -apart.square() / 2 - keys[:, 1].log()

        one = leave_one_out(x, y)
        whole = db.attend(near, score=lambda q, k: -(q[:, :1] - k[:, 0]).square() / (2 * one**2)).output
        local = db.attend(near, score=balloons).output
    errors = [(output - curve(asked)).square().mean().sqrt().item() for output in (whole, local)]
    print(f"one width, the best by leave-one-out, {one:.3f}: error {errors[0]:.3f}; one each: {errors[1]:.3f}")
    assert errors[1] < 0.8 * errors[0]
    if picture:
        drawn, (ax,) = figure(1, 8, 4)
        ax.plot(x, y, ".", color="0.75")
        ax.plot(asked, curve(asked), ":", color="0.3", label="what is measured")
        ax.plot(asked, whole, label=f"one width for all, {one:.2f}")
        ax.plot(asked, local, label=f"a width for each record, {far.min():.3f} to {far.max():.2f}")
        ax.set(xlabel="x, the key", ylabel="y, the value")
        ax.legend(frameon=False)
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
