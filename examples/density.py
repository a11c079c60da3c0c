"""A kernel density over a database, estimated with error bars.

    python examples/density.py [--plot PICTURE.png] [--quick]

log p(q) = log Σ K(q, k_i) - log n - log ∫K (Rosenblatt 1956; Parzen 1962). The estimate draws at most 60 of 60,000
records per query through the index, and gives its error bar; the exact density reads every record.
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb.plots import figure, save
from softdb.scores import Gaussian

RECORDS, FEWER = 60_000, 20_000


def main(picture: str | None = None, quick: bool = False) -> None:
    """Estimate densities on a line through a mixture of Gaussians, and compare them with the exact ones."""
    torch.manual_seed(0)
    n = FEWER if quick else RECORDS
    centres = 2.5 * torch.randn(12, 8)
    keys = centres[torch.randint(12, (n,))] + torch.randn(n, 8)
    walk = torch.linspace(0, 1, 40).unsqueeze(1)
    queries = (1 - walk) * centres[0] + walk * centres[1]  # from one centre to another
    with softdb.open(None, dim=8, metric="l2") as db:
        db.insert(range(n), keys)
        db.build_index("ivf")
        kernel = Gaussian(0.7)
        estimate = db.log_density(queries, kernel, rtol=0.3, max_draws=60)
        exact = db.log_density(queries.double(), kernel, rtol=1e-9).value
    errors = (estimate.value.double() - exact).expm1().abs()
    within = (errors <= estimate.bar).double().mean().item()
    print(f"mean relative error {errors.mean():.3f}, median bar {estimate.bar.median():.3f}; {within:.0%} within bars")
    assert within >= 0.9
    assert errors.max() < 0.5
    if picture:
        drawn, (ax,) = figure()
        low, high = estimate.value - estimate.bar, estimate.value + estimate.bar
        ax.fill_between(walk[:, 0], low, high, alpha=0.25, label="95 % bar of the estimate")
        ax.plot(walk, estimate.value, "o", markersize=4, label="estimated, 60 draws at most")
        ax.plot(walk, exact, color="0.2", linewidth=1, label=f"exact, {n:,} records")
        ax.set(xlabel="place on the line from one cloud's centre (0) to another's (1)", ylabel="log density (nats)")
        ax.set_title("A density estimated from a few draws stays within its error bars")
        ax.legend()
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
