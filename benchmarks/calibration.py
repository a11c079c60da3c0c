"""Calibration of class probabilities of handwritten digits: log loss and reliability.

    python benchmarks/calibration.py

The peer is scikit-learn's KNeighborsClassifier, with the number of neighbours and the weights chosen by cross-validated
log loss on the training half. SoftKNeighborsClassifier has all its defaults. There are five splits into halves.
Reliability compares the predicted probability with the share of predictions that were right. The script writes
results/calibration-digits.json and .png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pictures
from common import provenance, write_json
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier

from softdb.integrations.sklearn import SoftKNeighborsClassifier

RESULTS = Path(__file__).parent / "results"
SPLITS, BINS = 5, 10
CHOICE = {"n_neighbors": [1, 2, 3, 5, 8, 12, 20, 30, 50], "weights": ["uniform", "distance"]}


def reliability(probabilities: Any, true: Any) -> tuple[Any, Any, Any]:  # (q, c), (q,) -> (bins,), (bins,), (bins,)
    """Return, for each bin, the mean top probability, the share of right predictions and the number of predictions."""
    top, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == true
    bins = np.minimum((top * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    with np.errstate(invalid="ignore"):
        return np.bincount(bins, top, BINS) / count, np.bincount(bins, right, BINS) / count, count


def main() -> None:
    """Measure, print and draw."""
    digits, labels = load_digits(return_X_y=True)
    runs: dict[str, dict[str, list[Any]]] = {}
    for seed in range(SPLITS):
        train, test, train_labels, true = train_test_split(digits, labels, test_size=0.5, random_state=seed)
        search = GridSearchCV(KNeighborsClassifier(), CHOICE, scoring="neg_log_loss", cv=5).fit(train, train_labels)
        models = {
            "KNeighborsClassifier()": KNeighborsClassifier().fit(train, train_labels),
            "KNeighborsClassifier, chosen": search.best_estimator_,
            "SoftKNeighborsClassifier()": SoftKNeighborsClassifier().fit(train, train_labels),
            "SoftKNeighborsClassifier(20)": SoftKNeighborsClassifier(20).fit(train, train_labels),
        }
        for name, model in models.items():
            probabilities = model.predict_proba(test)
            run = runs.setdefault(name, {"log_loss": [], "accuracy": [], "probabilities": [], "true": []})
            run["log_loss"].append(log_loss(true, probabilities))
            run["accuracy"].append(float((probabilities.argmax(axis=1) == true).mean()))
            run["probabilities"].append(probabilities)
            run["true"].append(true)
    rows = {}
    for name, run in runs.items():
        means, right, count = reliability(np.concatenate(run.pop("probabilities")), np.concatenate(run.pop("true")))
        error = float(np.nansum(np.abs(means - right) * count) / count.sum())
        bins = [
            {"probability": float(mean), "right": float(share), "predictions": int(number)}
            for mean, share, number in zip(means, right, count, strict=True)
            if number
        ]
        rows[name] = {**run, "calibration_error": error, "bins": bins}
        loss, accuracy = np.median(run["log_loss"]), np.median(run["accuracy"])
        print(f"{name:32} log loss {loss:.3f}, accuracy {accuracy:.3f}, calibration error {error:.3f}")
    result = {**provenance(["torch", "scikit-learn"]), "splits": SPLITS, "rows": rows}
    write_json(RESULTS / "calibration-digits.json", result)
    pictures.calibration(result, RESULTS / "calibration-digits.png")


if __name__ == "__main__":
    main()
