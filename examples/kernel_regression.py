"""Kernel regression over a database, with a bandwidth that is learnt (Dive into Deep Learning, section 11.2).

    python examples/kernel_regression.py

The records are 200 noisy measurements of 2 sin x + x^0.8: x is the key and y the value. Asking the database softly, by
a Gaussian kernel, gives the Nadaraya-Watson mean. Too narrow a bandwidth repeats the noise, too wide a one flattens the
curve; `fit` learns one from the records alone, each told from all others, and it is nearer to the curve than both and
than Silverman's rule. In a second database the key has a coordinate that means nothing: with a bandwidth for each, that
one grows until the coordinate no longer counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

import softdb
from softdb.nn import KernelRegressor

RECORDS, NOISE = 200, 0.5


def curve(
    x: Tensor,  # (n, 1)
) -> Tensor:  # (n, 1)
    """What is measured."""
    return 2 * x.sin() + x**0.8


def filled(keys: Tensor, values: Tensor) -> softdb.SoftDB:
    """A database in memory of measurements."""
    db = softdb.open(None, dim=keys.shape[1], value_dim=1, metric="l2")
    db.insert(range(len(keys)), keys, values)
    return db


@torch.no_grad()
def error(model: KernelRegressor, keys: Tensor, true: Tensor) -> float:
    """Root mean square distance from the curve."""
    return float((model(keys) - true).square().mean().sqrt())


def main() -> None:
    """Compare bandwidths, then learn which coordinate counts."""
    torch.manual_seed(0)
    x = torch.rand(RECORDS, 1) * 5
    y = curve(x) + NOISE * torch.randn(RECORDS, 1)
    held_out = torch.linspace(0, 5, 101).unsqueeze(1)
    with filled(x, y) as db:
        learned = KernelRegressor(db)
        silverman = KernelRegressor(db, learnable=False)
        learned.fit()
        models = [
            ("narrow", KernelRegressor(db, bandwidth=0.02, learnable=False)),
            ("learned", learned),
            ("silverman", silverman),
            ("wide", KernelRegressor(db, bandwidth=1.0, learnable=False)),
        ]
        print("bandwidth         h    error")
        for name, model in models:
            print(f"{name:12}{model.kernel.bandwidth.item():7.3f}{error(model, held_out, curve(held_out)):9.3f}")

    idle = torch.rand(RECORDS, 1) * 5
    with filled(torch.cat([x, idle], dim=1), y) as db:
        both = KernelRegressor(db, per_coordinate=True)
        both.fit()
        h = both.kernel.bandwidth.tolist()
        asked = torch.cat([held_out, torch.rand(101, 1) * 5], dim=1)
        print(f"\ntwo coordinates, one of them idle: h {h[0]:.3f} and {h[1]:.3f}", end="")
        print(f", error {error(both, asked, curve(held_out)):.3f}")


if __name__ == "__main__":
    main()
