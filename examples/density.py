"""How crowded is it here? A kernel density over a database, with the error bar of an estimate.

    python examples/density.py [PICTURE.png]

log p(q) = log Σ K(q, k_i) - log n - log ∫K (Rosenblatt 1956; Parzen 1962). Over 60,000 records some hundred are drawn
through the index for each query, and the answer says how far off it may be; exactly, every record is read.
"""

from __future__ import annotations

import sys

import torch

import softdb
from softdb.plots import figure, save
from softdb.scores import Gaussian

RECORDS = 60_000


def main(picture: str | None) -> None:
    """Estimate densities on a line through a mixture of clouds, and hold them against the exact ones."""
    torch.manual_seed(0)
    centres = 2.5 * torch.randn(12, 8)
    keys = centres[torch.randint(12, (RECORDS,))] + torch.randn(RECORDS, 8)
    walk = torch.linspace(0, 1, 40).unsqueeze(1)
    asked = (1 - walk) * centres[0] + walk * centres[1]  # from one cloud to another
    with softdb.open(None, dim=8, metric="l2") as db:
        db.insert(range(RECORDS), keys)
        db.build_index("ivf")
        kernel = Gaussian(0.7)
        near = db.log_density(asked, kernel, rtol=0.3, max_draws=60)
        exact = db.log_density(asked.double(), kernel, rtol=1e-9).value
    off = (near.value.double() - exact).exp() - 1
    inside = (off.abs() <= near.bar).double().mean().item()
    print(
        f"relative error {off.abs().mean():.3f} on average, bars {near.bar.median():.3f}; inside {inside:.0%} of them"
    )
    assert inside >= 0.9
    assert off.abs().max() < 0.5
    if picture:
        drawn, (ax,) = figure(1, 7, 4)
        low, high = near.value - near.bar, near.value + near.bar
        ax.fill_between(walk[:, 0], low, high, alpha=0.25, label="95 % bar of the estimate")
        ax.plot(walk, near.value, ".", label="estimated, 60 draws at most")
        ax.plot(walk, exact, color="0.3", linewidth=1, label="exact, 60,000 records")
        ax.set(xlabel="from one cloud to another", ylabel="log density")
        ax.legend(frameon=False)
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
