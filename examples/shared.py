"""The command line and the plain plot that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softdb.errors import MissingDependency
from softdb.plots import figure, save


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
    """Return the name if a picture can be written there; raise argparse's error otherwise."""
    path = Path(name)
    try:
        drawn, _ = figure()
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


def lines(path: str, curves: Mapping[str, Sequence[float]], ticks: Sequence[str] = (), **labels: str) -> None:
    """Draw curves over their steps, or over the names in `ticks`, and write the picture."""
    drawn, (ax,) = figure(1, 7, 4)
    for name, heights in curves.items():
        ax.plot(heights, "o--" if ticks else "-", label=name)
    if ticks:
        ax.set_xticks(range(len(ticks)), ticks)
    ax.set(**labels)
    ax.legend(frameon=False)
    save(drawn, path)
