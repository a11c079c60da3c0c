"""Kernel regression over a database, with a bandwidth that is learnt (Dive into Deep Learning, section 11.2).

    python examples/kernel_regression.py [PICTURE.png]

The records are 200 noisy measurements of 2 sin x + x^0.8: x is the key and y the value. Asking the database softly, by
a Gaussian kernel, gives the Nadaraya-Watson mean. Too narrow a bandwidth repeats the noise, too wide a one flattens the
curve; `fit` learns one from the records alone, each told from all others, and it is nearer to the curve than both and
than Silverman's rule. In a second database the key has a coordinate that means nothing: with a bandwidth for each, that
one grows until the coordinate no longer counts.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import softdb
from softdb.nn import KernelRegressor
from softdb.plots import figure, save


def curve(x: Tensor) -> Tensor:
    """What is measured."""
    return 2 * x.sin() + x**0.8


def filled(keys: Tensor, values: Tensor) -> softdb.SoftDB:
    """A database in memory of measurements."""
    db = softdb.open(None, dim=keys.shape[1], value_dim=1, metric="l2")
    db.insert(range(len(keys)), keys, values)
    return db


def error(answer: Tensor, true: Tensor) -> float:
    """Root mean square distance from the curve."""
    return (answer - true).square().mean().sqrt().item()


def main(picture: str | None) -> None:
    """Compare bandwidths, then learn which coordinate counts."""
    torch.manual_seed(0)
    x, asked = torch.rand(200, 1) * 5, torch.linspace(0, 5, 101).unsqueeze(1)
    y, true = curve(x) + 0.5 * torch.randn(200, 1), curve(asked)
    answers, errors = {}, {}
    with filled(x, y) as db:
        models = {name: KernelRegressor(db, bandwidth=h) for name, h in (("narrow", 0.02), ("Silverman's", None))}
        models |= {"learned": KernelRegressor(db), "wide": KernelRegressor(db, bandwidth=1.0)}
        models["learned"].fit()
        print("bandwidth         h    error")
        for name, model in models.items():
            answers[name] = model(asked).detach()
            errors[name] = error(answers[name], true)
            print(f"{name:12}{model.kernel.bandwidth.item():7.3f}{errors[name]:9.3f}")
    assert errors.pop("learned") < 0.6 * min(errors.values())

    idle = torch.rand(200, 1) * 5
    with filled(torch.cat([x, idle], dim=1), y) as db:
        both = KernelRegressor(db, per_coordinate=True)
        both.fit()
        h = both.kernel.bandwidth.tolist()
        found = error(both(torch.cat([asked, torch.rand(101, 1) * 5], dim=1)), true)
        print(f"\ntwo coordinates, one of them idle: h {h[0]:.3f} and {h[1]:.3f}, error {found:.3f}")
    assert h[1] > 20 * h[0]
    assert found < 0.6 * min(errors.values())
    if picture:
        drawn, axes = figure(4, 2.4, 2.4)
        for ax, (name, model) in zip(axes, models.items(), strict=True):
            ax.plot(x, y, ".", color="C1", markersize=3)
            ax.plot(asked, true, ":", color="0.3")
            ax.plot(asked, answers[name], color="C0")
            ax.set(title=f"{name}, h = {model.kernel.bandwidth.item():.2f}", xlabel="x", ylim=(-1.5, 6))
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
