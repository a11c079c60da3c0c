"""The command line and the plain plots that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softdb.errors import MissingDependency
from softdb.plots import STYLE, figure, save


def arguments(doc: str | None, **own: dict[str, Any]) -> dict[str, Any]:
    """Parse `--plot PATH`, `--quick` and an example's own arguments; return them by the names that `main` gives them.

    A picture that could not be written is refused before the example computes anything.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", dest="picture", metavar="PATH", type=picture, help="draw the results to this file")
    parser.add_argument("--quick", action="store_true", help="end within seconds: fewer steps or records")
    for name, settings in own.items():
        parser.add_argument(name, **settings)
    return vars(parser.parse_args())


def picture(name: str) -> str:
    """Return the name if a picture can be written there, and set softdb's style; raise argparse's error otherwise."""
    path = Path(name)
    try:
        drawn, _ = figure()
        import matplotlib

        matplotlib.rcParams.update(STYLE)
    except MissingDependency as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if path.suffix[1:].lower() not in drawn.canvas.get_supported_filetypes():
        raise argparse.ArgumentTypeError(
            f"{name!r} is not the name of a picture; give a path ending in .png, .pdf or .svg"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is a folder; give the path of a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {str(path.parent)!r} does not exist; make it, or choose another")
    return name


def lines(path: str, losses: Sequence[float], title: str, over: int = 1) -> None:
    """Draw the loss of each step, and with `over` its mean over so many steps, and write the picture."""
    drawn, (ax,) = figure(height=3.4)
    ax.plot(losses, **({"color": "0.75", "linewidth": 1} if over > 1 else {}), label="each batch")
    if over > 1:
        means = [sum(losses[end - over : end]) / over for end in range(over, len(losses) + 1)]
        ax.plot(range(over - 1, len(losses)), means, label=f"mean of the last {over}")
        ax.legend()
    ax.set(title=title, xlabel="training step", ylabel="loss (nats)")
    save(drawn, path)


def bars(path: str, groups: Mapping[str, Mapping[str, float]], title: str, ylabel: str) -> None:
    """Draw a bar for each name, the groups side by side, with its height above it, and write the picture."""
    drawn, (ax,) = figure(height=3.4)
    for number, (group, heights) in enumerate(groups.items()):
        places = [place + 0.8 / len(groups) * number for place in range(len(heights))]
        ax.bar_label(ax.bar(places, heights.values(), width=0.75 / len(groups), label=group), fmt="{:.3g}")
        ax.set_xticks([place + 0.4 - 0.4 / len(groups) for place in range(len(heights))], list(heights))
    if len(groups) > 1:
        ax.legend()
    ax.set(title=title, ylabel=ylabel)
    ax.grid(visible=False, axis="x")
    save(drawn, path)
