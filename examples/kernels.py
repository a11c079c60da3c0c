"""Nadaraya-Watson regression with every kernel, and the effect of the width (Dive into Deep Learning, 11.2).

    python examples/kernels.py [--plot PICTURE.png] [--quick]

Forty noisy measurements of 2 sin x + x. A soft query with a kernel as its score is the Nadaraya-Watson mean, and the
weights of the records for each x are its attention. The kernel decides how weights fall off with the distance, and its
width how fast.
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb import scores
from softdb.plots import COLORS, figure, save

KERNELS: list[scores.Kernel] = [
    scores.Gaussian(1.0), scores.Boxcar(1.0), scores.Epanechnikov(1.0), scores.Triangular(1.0), scores.Laplacian(1.0)
]  # fmt: skip
WIDTHS = (0.1, 0.2, 0.5, 1.0)


def curve(x: torch.Tensor) -> torch.Tensor:
    """Return the measured function without noise."""
    return 2 * x.sin() + x


def main(picture: str | None) -> None:
    """Query one database with every kernel and width, and draw the answers over their attention."""
    torch.manual_seed(0)
    x = (torch.rand(40, 1) * 5).sort(dim=0).values
    y = curve(x) + 0.5 * torch.randn(40, 1)
    queries = torch.linspace(0, 5, 100).unsqueeze(1)
    names = [*(type(k).__name__ for k in KERNELS), "Constant", *(f"Gaussian {width}" for width in WIDTHS)]
    kernels = [*KERNELS, scores.Constant(), *(scores.Gaussian(width) for width in WIDTHS)]
    with softdb.open(None, dim=1, value_dim=1, metric="l2") as db:
        db.insert(range(40), x, y)
        answers = [db.attend(queries, score=kernel, need_weights=True) for kernel in kernels]
    errors = {}
    for name, answer in zip(names, answers, strict=True):
        errors[name] = (answer.output - curve(queries)).square().mean().sqrt().item()
        print(f"{name:22} error {errors[name]:.2f}")
    assert torch.allclose(answers[5].output, y.mean().expand(100, 1), atol=1e-5)  # a constant weighs all records alike
    assert errors["Gaussian 0.2"] < errors["Gaussian 0.1"]  # the narrow kernel fits the noise
    assert errors["Gaussian 0.2"] < errors["Gaussian 1.0"] < errors["Constant"]  # wide ones flatten
    if picture:
        drawn, axes = figure(5, 4, 7.4, sharex=True)
        for place, (name, answer) in enumerate(zip(names, answers, strict=True)):
            first = place // 5 * 10 + place % 5
            above, below = axes[first], axes[first + 5]
            above.plot(x, y, ".", color="0.7", markersize=4, label="records, measured with noise")
            above.plot(queries, curve(queries), ":", color="0.2", label="true curve")
            above.plot(queries, answer.output, color=COLORS[0], label="soft query")
            title = f"{name}, error {errors[name]:.2f}".replace(", ", "\n", 1)
            above.set_title(title, fontsize=9)
            assert answer.weights is not None
            below.imshow(answer.weights.T.numpy(), cmap="Blues", vmin=0, aspect="auto", extent=(0, 5, 40, 0))
            below.grid(visible=False)
            below.set(
                xlabel="x" if place > 4 else "",
                ylabel="" if place % 5 else "record",
                yticks=[0, 20, 40],
                xticks=[0, 2, 4],
            )
            above.set(ylim=(-0.5, 5), ylabel="" if place % 5 else "y")
            for ax in (above, below) if place % 5 else ():
                ax.tick_params(labelleft=False)
        handles, title = axes[0].get_legend_handles_labels(), "below each curve the records' weights: darker is larger"
        drawn.legend(*handles, loc="outside upper center", ncols=3, title=title)
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
