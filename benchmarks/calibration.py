"""Class distributions of handwritten digits: how far to trust them, by log loss and by reliability.

    python benchmarks/calibration.py

scikit-learn's KNeighborsClassifier, its number of neighbours and weights chosen by cross-validated log loss on the
training half, against SoftKNeighborsClassifier with all its defaults. Five splits into halves. Reliability: of the
predictions of a probability, how many were right. Writes results/calibration-digits.json and .png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from common import provenance, write_json
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier

from softdb.integrations.sklearn import SoftKNeighborsClassifier

RESULTS = Path(__file__).parent / "results"
SPLITS, BINS = 5, 10
CHOICE = {"n_neighbors": [1, 2, 3, 5, 8, 12, 20, 30, 50], "weights": ["uniform", "distance"]}


def reliability(told: Any, true: Any) -> tuple[Any, Any, Any]:  # (q, c), (q,) -> (bins,), (bins,), (bins,)
    """The mean top probability of each bin, the share that was right, and how many there are."""
    top, right = told.max(axis=1), told.argmax(axis=1) == true
    bins = np.minimum((top * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return np.bincount(bins, top, BINS) / count, np.bincount(bins, right, BINS) / count, count


def main() -> None:
    """Measure, print, and draw."""
    digits, labels = load_digits(return_X_y=True)
    found: dict[str, dict[str, list[Any]]] = {}
    for seed in range(SPLITS):
        train, test, told, true = train_test_split(digits, labels, test_size=0.5, random_state=seed)
        chosen = GridSearchCV(KNeighborsClassifier(), CHOICE, scoring="neg_log_loss", cv=5).fit(train, told)
        models = {
            "KNeighborsClassifier()": KNeighborsClassifier().fit(train, told),
            "KNeighborsClassifier, chosen": chosen.best_estimator_,
            "SoftKNeighborsClassifier()": SoftKNeighborsClassifier().fit(train, told),
            "SoftKNeighborsClassifier(20)": SoftKNeighborsClassifier(20).fit(train, told),
        }
        for name, model in models.items():
            shares = model.predict_proba(test)
            mine = found.setdefault(name, {"log_loss": [], "accuracy": [], "shares": [], "true": []})
            mine["log_loss"].append(log_loss(true, shares))
            mine["accuracy"].append(float((shares.argmax(axis=1) == true).mean()))
            mine["shares"].append(shares)
            mine["true"].append(true)
    figure, axes = plt.subplots(figsize=(4.6, 4), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    rows = {}
    for (name, mine), marker in zip(found.items(), "so^v", strict=True):
        means, right, count = reliability(np.concatenate(mine.pop("shares")), np.concatenate(mine.pop("true")))
        off = float(np.nansum(np.abs(means - right) * count) / count.sum())
        rows[name] = {**mine, "calibration_error": off}
        loss = np.median(mine["log_loss"])
        print(f"{name:32} log loss {loss:.3f}, accuracy {np.median(mine['accuracy']):.3f}, off by {off:.3f}")
        drawn = count >= 10
        axes.plot(means[drawn], right[drawn], marker=marker, markersize=4, label=f"{name}: log loss {loss:.3f}")
    axes.set(xlabel="probability of the predicted digit", ylabel="share of predictions that were right")
    axes.legend(fontsize=7)
    figure.savefig(RESULTS / "calibration-digits.png", dpi=110)
    about = {
        **provenance(["torch", "scikit-learn"]),
    }
    write_json(RESULTS / "calibration-digits.json", {**about, "splits": SPLITS, "rows": rows})


if __name__ == "__main__":
    main()
