"""Pictures of the committed results, drawn without measuring anything again.

    python benchmarks/pictures.py [RESULT.json ...]

A picture is beside its result. The benchmarks draw with these functions, too; `softdb bench --plot` draws its own, and
`scaling_model.py --plot` docs/images/cluster-scale.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sequences import LOSSES
from sequences import NAMES as DENOMINATORS

from softdb.plots import COLORS, figure, save, style
from softdb.tools.bench import report

RESULTS = Path(__file__).parent / "results"
WAYS = {
    "torch": "torch, all records",
    "exact": "softdb, all records",
    "drawn": "softdb, some records drawn",
    "truncated": "softdb, the nearest records alone",
}
LOSS_NAMES = {
    "database": "softdb, every stored text in the loss",
    "in-batch": "in-batch negatives",
    "in-batch, stored keys": "in-batch negatives, stored keys",
}


@style()
def calibration(result: dict[str, Any], path: Path) -> None:
    """Draw the share of right predictions against their probability, a line for each classifier."""
    drawn, (ax,) = figure(height=4.6)
    ax.plot([0.3, 1], [0.3, 1], ":", color="0.3", label="calibrated")
    for (name, row), marker in zip(result["rows"].items(), "so^v", strict=True):
        large = [bin for bin in row["bins"] if bin["predictions"] >= 10]  # smaller bins say little
        probabilities, right = ([bin[key] for bin in large] for key in ("probability", "right"))
        ax.plot(probabilities, right, f"{marker}-", label=f"{name}: log loss {np.median(row['log_loss']):.3f}")
    ax.set(xlabel="probability of the predicted digit", ylabel="share of predictions that were right")
    ax.set_title("Whether the probabilities hold: digits, five splits")
    ax.legend()
    save(drawn, path)


@style()
def estimate(result: dict[str, Any], path: Path) -> None:
    """Draw error against time, a line for each kind of answer."""
    drawn, (ax,) = figure()
    for name, label in (
        ("estimated", "estimated by softdb"),
        ("truncated", "truncated to the nearest"),
        ("top-k + uniform", "half nearest, half uniform draws"),
    ):
        times, errors = zip(
            *[(row[name]["ms_a_query"], row[name]["error"]) for row in result["curve"].values()], strict=True
        )
        ax.plot(times, errors, "o-", label=label)
        for number in (0, -1) if name == "estimated" else (-1,):  # the fewest and the most records
            text = f"{list(result['curve'])[number]} records"
            ax.annotate(text, (times[number], errors[number]), (6, 3), textcoords="offset points", fontsize=8)
    exact = float(np.median([row["exact"]["ms_a_query"] for row in result["curve"].values()]))
    ax.axvline(exact, color="0.4", linestyle="--", label="exact answer, error 0")
    ax.set(xscale="log", yscale="log", xlabel="milliseconds a query, in batches of 64", ylabel="mean relative error")
    ax.set_xticks(ticks := [0.1, 0.2, 0.5, 1, 2], [f"{tick:g}" for tick in ticks])
    ax.set_yticks(ticks := [0.02, 0.05, 0.1, 0.2, 0.4], [f"{tick:.0%}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(right=3.2)  # room for the last label
    ax.set_title("Error and time of a soft query that pools some of the records")
    ax.legend(loc="lower left")
    save(drawn, path)


@style()
def estimate_growth(result: dict[str, Any], path: Path) -> None:
    """Draw milliseconds against the number of records, both on logarithmic axes."""
    sizes = result["sizes"]
    drawn, (ax,) = figure()
    for name, label, line in (
        ("exact_batch_64_ms", "64 queries, exact", "C1s--"),
        ("batch_64_ms", "64 queries, estimated", "C1s-"),
        ("exact_one_ms", "one query, exact", "C0o--"),
        ("one_ms", "one query, estimated", "C0o-"),
    ):
        ax.loglog([size["n"] for size in sizes], [size[name] for size in sizes], line, label=label)
    ax.set(xlabel="records of 128 float16 numbers", ylabel="milliseconds", title="Soft queries with an error of 5 %")
    ax.legend()
    save(drawn, path)


@style()
def learn(result: dict[str, Any], path: Path) -> None:
    """Draw recall against seconds, a line for each way; a way has the same colour in every picture."""
    split = result["splits"][0]
    drawn, (ax,) = figure()
    for name, curve in split.items():
        points = curve["curve"][1:]  # without the start at 0 s, which a logarithmic axis cannot show
        seconds, recalls = [p["seconds"] for p in points], [p["recall_10"] for p in points]
        ax.plot(seconds, recalls, "o-", label=WAYS[name], color=COLORS[list(WAYS).index(name)])
    start = next(iter(split.values()))["before"]["recall_10"]
    ax.axhline(start, color="0.4", linestyle=":", label="before the training")
    ax.set(xscale="log", xlabel="seconds of training", ylabel="recall@10 of held-out queries")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_title(f"Training with {len(split)} denominators of the loss, {result['data']['n']:,} records")
    ax.legend(loc=(0.27, 0.3))
    save(drawn, path)


@style()
def sequences(result: dict[str, Any], path: Path) -> None:
    """Draw validation NDCG@10 against steps and against CPU seconds, a line for each loss."""
    runs = result["runs"]
    drawn, axes = figure(2, height=3.7, sharey=True)
    for ax, column, label in zip(axes, ("step", "seconds"), ("training step", "CPU seconds of training"), strict=True):
        for number, loss in enumerate(LOSSES):
            if loss in runs:
                points, name = (
                    runs[loss]["curve"],
                    DENOMINATORS[loss].format(**runs[loss]["settings"]).partition(" (")[0],
                )
                ax.plot([p[column] for p in points], [p["ndcg_10"] for p in points], f"C{number}o-", label=name)
        ax.set(xlabel=label, ylim=(0, None))
    axes[0].set(ylabel="NDCG@10 in validation", title="By steps ...")
    axes[1].set(title="... and by time")
    drawn.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, title="denominator of the loss"
    )
    save(drawn, path)


@style()
def fine_tuning(result: dict[str, Any], path: Path) -> None:
    """Draw recall over the stored keys against CPU seconds, a line for each run."""
    runs = result["runs"]
    drawn, (ax,) = figure()
    for number, (way, name) in enumerate(LOSS_NAMES.items()):
        for turn, run in enumerate(runs.get(way, {}).values()):
            label = None if turn else f"{name}: {len(runs[way])} runs"
            seconds, recalls = zip(*[(p["seconds"], 100 * p["recall_10"]) for p in run["curve"]], strict=True)
            ax.plot(seconds, recalls, f"C{number}{'os^'[number]}-", label=label)
    ax.set(xlabel="CPU seconds of training", ylabel="recall@10 of held-out queries, %")
    ax.set_title("Fine-tuning against every record, and against a batch")
    ax.legend()
    save(drawn, path)


KINDS = {
    "calibration-digits": calibration,
    "estimate-growth": estimate_growth,
    "estimate-wordnet": estimate,
    "find-clustered": report.draw,
    "find-wordnet": report.draw,
    "fine-tuning": fine_tuning,
    "learn-1m": learn,
    "learn-wordnet": learn,
    "sequences-beauty-0": sequences,
}


def main(results: list[Path]) -> None:
    """Draw the given results, or all that have a picture."""
    for path in results or [RESULTS / f"{name}.json" for name in KINDS]:
        KINDS[path.stem](json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
