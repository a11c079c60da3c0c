"""Kernel regression over a database, with a learned bandwidth (Dive into Deep Learning, section 11.2).

    python examples/kernel_regression.py [--plot PICTURE.png] [--quick]

The records are 200 noisy measurements of 2 sin x + x^0.8: x is the key and y the value. A soft query with a Gaussian
kernel is the Nadaraya-Watson mean. A narrow bandwidth fits the noise, a wide one flattens the curve. `fit` learns one
from the records, each predicted from all others; its error is smaller than those of both, and of Silverman's rule. In a
second database the key has a coordinate of pure noise: with a bandwidth for each coordinate, that of the noise grows
until it no longer counts.
"""

from __future__ import annotations

import torch
from shared import arguments
from torch import Tensor

import softdb
from softdb.nn import KernelRegressor
from softdb.plots import COLORS, figure, save


def curve(x: Tensor) -> Tensor:
    """Return the measured function without noise."""
    return 2 * x.sin() + x**0.8


def filled(keys: Tensor, values: Tensor) -> softdb.SoftDB:
    """Return a database in memory that holds the measurements."""
    db = softdb.open(None, dim=keys.shape[1], value_dim=1, metric="l2")
    db.insert(range(len(keys)), keys, values)
    return db


def error(answer: Tensor, true: Tensor) -> float:
    """Return the root mean square error."""
    return (answer - true).square().mean().sqrt().item()


def main(picture: str | None) -> None:
    """Compare bandwidths, then learn a bandwidth for each coordinate."""
    torch.manual_seed(0)
    x, queries = torch.rand(200, 1) * 5, torch.linspace(0, 5, 101).unsqueeze(1)
    y, true = curve(x) + 0.5 * torch.randn(200, 1), curve(queries)
    answers, errors = {}, {}
    with filled(x, y) as db:
        models = {name: KernelRegressor(db, bandwidth=h) for name, h in (("narrow", 0.02), ("Silverman's", None))}
        models |= {"learned": KernelRegressor(db), "wide": KernelRegressor(db, bandwidth=1.0)}
        models["learned"].fit()
        print("bandwidth         h    error")
        for name, model in models.items():
            answers[name] = model(queries).detach()
            errors[name] = error(answers[name], true)
            print(f"{name:12}{model.kernel.bandwidth.item():7.3f}{errors[name]:9.3f}")
    assert errors.pop("learned") < 0.6 * min(errors.values())

    noise = torch.rand(200, 1) * 5
    with filled(torch.cat([x, noise], dim=1), y) as db:
        both = KernelRegressor(db, per_coordinate=True)
        both.fit()
        h = both.kernel.bandwidth.tolist()
        rmse = error(both(torch.cat([queries, torch.rand(101, 1) * 5], dim=1)), true)
        print(f"\ntwo coordinates, the second of pure noise: h {h[0]:.3f} and {h[1]:.3f}, error {rmse:.3f}")
    assert h[1] > 20 * h[0]
    assert rmse < 0.6 * min(errors.values())
    if picture:
        drawn, axes = figure(2, 2, 5, sharex=True, sharey=True)
        for place, (ax, (name, model)) in enumerate(zip(axes, models.items(), strict=True)):
            ax.plot(x, y, ".", color="0.7", markersize=4, label="records, measured with noise")
            ax.plot(queries, true, ":", color="0.2", label="true curve")
            ax.plot(queries, answers[name], color=COLORS[0], label="soft query")
            off = error(answers[name], true)
            ax.set(title=f"{name}: bandwidth {model.kernel.bandwidth.item():.2f}, error {off:.2f}", ylim=(-1.5, 5))
            ax.set(xlabel="x, the key" if place > 1 else "", ylabel="" if place % 2 else "y, the value")
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
