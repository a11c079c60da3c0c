"""California housing by soft nearest neighbours over all training rows, beside TabR's ablation of them.

    python benchmarks/housing.py --data cal_housing.data --seeds 3 --out benchmarks/results/housing.json
    python benchmarks/housing.py --data cal_housing.data --seeds 1 --epochs 2 --ways "squared distance"

The file holds the 20,640 districts of the 1990 census (Pace and Barry 1997): cal_housing.data of StatLib's archive, or
housing.csv with the same columns. The eight features are those of scikit-learn's fetch_california_housing, computed
here; the target is the median value of a house, in 100,000 dollars.

A network adds to each row the mean of what all other training rows hold, weighted by a softmax of how near their keys
are; `softdb.attention` pools, and a mask leaves the row itself out. Each way differs in one thing from the way before:

    no neighbours          the network alone
    dot product            s(k, k_i) = k · k_i, values V x_i
    squared distance       s(k, k_i) = -‖k - k_i‖²
    ... and labels         values V x_i + Y y_i
    ... and corrections    values V x_i + Y y_i + T(k - k_i), over the 96 nearest rows

`nearest rows` is the plain mean of the k nearest rows' targets, by the features; k is chosen on validation rows.

PUBLISHED has the test RMSE of TabR (Gorishniy et al. 2023, arXiv 2307.14338), as the reports of its repository
give it: mean and standard deviation of 15 seeds, settings tuned for each way, one split. Here every seed has a split of
its own, of the same sizes (13,209, 3,303 and 4,128 rows). `Settings` hold for all ways; they were chosen by the
validation rows of seed 0. The epoch that is best on validation rows is tested. TabR pools the 96 nearest rows in every
way, drops weights in training, lets the row itself take part in all ways but TabR-S, corrects without V, and its T is
twice as wide.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import provenance, write_json
from sklearn.neighbors import KNeighborsRegressor
from sklearn.preprocessing import QuantileTransformer
from torch import Tensor, nn

import softdb
import softdb.functional
from softdb.errors import BadInput
from softdb.scores import Dot, NegativeL2

COLUMNS = (
    "longitude", "latitude", "housing_median_age", "total_rooms", "total_bedrooms", "population", "households",
    "median_income", "median_house_value",
)  # fmt: skip
PUBLISHED = {
    "nearest rows": (0.5882, 0.0),
    "no neighbours": (0.4990, 0.0042),
    "dot product": (0.4950, 0.0056),
    "squared distance": (0.4422, 0.0037),
    "... and labels": (0.4181, 0.0017),
    "... and corrections": (0.4084, 0.0025),
    "TabR-S": (0.4030, 0.0022),
    "XGBoost": (0.4327, 0.0015),
    "CatBoost": (0.4294, 0.0012),
}
NEAR = 96  # number of neighbours that are corrected, as in TabR
CHUNK = 2048  # rows predicted at once


@dataclass
class Settings:
    """Settings of the network and of its training, the same for every way."""

    width: int = 64
    key_width: int = 64
    temperature: float = 0.1
    dropout: float = 0.2
    batch: int = 256
    rate: float = 3e-3
    weight_decay: float = 1e-4
    epochs: int = 16
    refresh: int = 4  # epochs after which the nearest rows are found anew, for corrections


class Split(NamedTuple):
    """Transformed features (n, 8) and standardised targets (n, 1) of the three parts, in units of `deviation`."""

    features: dict[str, Tensor]
    targets: dict[str, Tensor]
    deviation: float  # of the training targets, in 100,000 dollars


def districts(path: Path) -> tuple[Any, Any]:
    """Return scikit-learn's eight features (n, 8) and the target (n,) of a file with the nine columns."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    names, rows = (lines[0], lines[1:]) if lines and "latitude" in lines[0] else (list(COLUMNS), lines)
    missing = [name for name in COLUMNS if name not in names]
    if missing or not rows:
        raise BadInput(f"{path} has no column {', '.join(missing) or 'at all'}; expected {', '.join(COLUMNS)}")
    places = [names.index(name) for name in COLUMNS]
    empty = sum(not row[place].strip() for row in rows for place in places)
    if empty:
        raise BadInput(f"{path} has {empty} empty cells (housing.csv of some books lacks bedrooms); take StatLib's")
    table = np.array([[float(row[place]) for place in places] for row in rows])
    longitude, latitude, age, rooms, bedrooms, people, homes, income, value = table.T
    features = [income, age, rooms / homes, bedrooms / homes, people, people / homes, latitude, longitude]
    return np.stack(features, 1), value / 100_000


def split(features: Any, targets: Any, seed: int) -> Split:
    """Return a random split of 64, 16 and 20 %: features by quantiles to a normal distribution, as in TabR."""
    order, n = np.random.default_rng(seed).permutation(len(targets)), len(targets)
    train, validation = int(0.8 * n) * 4 // 5, int(0.8 * n)
    parts = dict(zip(("train", "validation", "test"), np.split(order, [train, validation]), strict=True))
    known = features[parts["train"]]
    noise = 1e-3 / np.maximum(known.std(0), 1e-3) * np.random.default_rng(seed).standard_normal(known.shape)
    count = max(min(len(known) // 30, 1000), 10)
    normal = QuantileTransformer(
        output_distribution="normal", n_quantiles=count, subsample=1_000_000_000, random_state=seed
    ).fit(known + noise)
    mean, deviation = targets[parts["train"]].mean(), targets[parts["train"]].std()
    return Split(
        {name: torch.tensor(normal.transform(features[part]), dtype=torch.float32) for name, part in parts.items()},
        {
            name: torch.tensor((targets[part] - mean) / deviation, dtype=torch.float32)[:, None]
            for name, part in parts.items()
        },
        float(deviation),
    )


def as_they_are(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:  # (q, d), (n, d)
    """Return queries and keys for the score q · k."""
    return queries, keys


def longer(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:  # (q, d), (n, d) -> (q, d + 1), (n, d + 1)
    """Return longer queries and keys, whose dot product is -‖q - k‖² + ‖q‖²; softmax ignores the last term.

    `score=NegativeL2()` gives the same weights; the kernels compute gradients to keys for the dot product only.
    """
    ones = queries.new_ones(len(queries), 1)
    return torch.cat([2 * queries, ones], 1), torch.cat([keys, -keys.square().sum(1, keepdim=True)], 1)


class SoftNeighbours(nn.Module):
    """Predict a target from a row and the training rows near it (Gorishniy et al. 2023, section 3).

        k = K E x,  w_i = softmax(s(k, k_i)),  prediction = P(E x + Σ w_i (V x_i + Y y_i + T(k - k_i)))

    V and Y are linear and the weights sum to 1, so x_i and y_i are pooled as they are, and mapped afterwards.
    """

    def __init__(self, rows: Tensor, targets: Tensor, way: str, settings: Settings) -> None:  # (n, p), (n, 1)
        super().__init__()
        width = settings.width

        def layers(inner: int, hidden: int, bias: bool = True) -> list[nn.Module]:
            last = nn.Linear(hidden, width, bias=bias)
            return [nn.Linear(inner, hidden), nn.ReLU(), nn.Dropout(settings.dropout), last]

        self.temperature = settings.temperature
        self.rows, self.alone = rows, way == "no neighbours"
        self.pair = as_they_are if way == "dot product" else longer
        self.values = torch.cat([rows, targets], 1) if way.startswith("...") else rows
        self.embed, self.key = nn.Linear(rows.shape[1], width), nn.Linear(width, settings.key_width)
        self.value = nn.Linear(self.values.shape[1], width)
        self.correct = (
            nn.Sequential(*layers(settings.key_width, width, bias=False)) if way == "... and corrections" else None
        )
        self.near = torch.empty(0)  # (n, 96) training rows nearest to each training row, by the keys of `refresh`
        self.block = nn.Sequential(nn.LayerNorm(width), *layers(width, 2 * width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, rows: Tensor, own: Tensor | None = None) -> Tensor:  # (q, p), (q,) -> (q, 1)
        """Return predictions; `own` are the places of the rows among the training rows, to leave them out."""
        x: Tensor = self.embed(rows)
        if not self.alone:
            x = x + (self.pooled(x, own) if self.correct is None else self.corrected(x, rows, own))
        predicted: Tensor = self.head(x + self.block(x))
        return predicted

    def pooled(self, x: Tensor, own: Tensor | None) -> Tensor:  # (q, w), (q,) -> (q, w)
        """Return V and Y of the mean over all training rows."""
        queries, keys = self.pair(self.key(x), self.key(self.embed(self.rows)))
        mean: Tensor = self.value(
            softdb.attention(
                queries, keys, self.values, score=Dot(), mask=self.others(own), temperature=self.temperature
            )
        )
        return mean

    def corrected(self, x: Tensor, rows: Tensor, own: Tensor | None) -> Tensor:  # (q, w), (q, p), (q,) -> (q, w)
        """Return the mean of V, Y and T over the nearest training rows."""
        assert self.correct is not None
        near = self.nearest(rows) if own is None else self.near[own]  # (q, 96)
        key, candidates = self.key(x).unsqueeze(1), self.key(self.embed(self.rows))[near]  # (q, 1, d), (q, 96, d)
        values = self.value(self.values)[near] + self.correct(key - candidates)
        return softdb.attention(key, candidates, values, score=NegativeL2(), temperature=self.temperature).squeeze(1)

    def others(self, own: Tensor | None) -> Tensor | None:  # (q,) -> (q, n)
        """Return the mask of all training rows but the own."""
        if own is None:
            return None
        mask = torch.ones(len(own), len(self.rows), dtype=torch.bool)
        mask[torch.arange(len(own)), own] = False
        return mask

    @torch.no_grad()
    def nearest(self, rows: Tensor, own: Tensor | None = None) -> Tensor:  # (q, p), (q,) -> (q, 96)
        """Return the places of the training rows that have the largest weights."""
        queries, keys = self.pair(self.key(self.embed(rows)), self.key(self.embed(self.rows)))
        scores = queries @ keys.T
        mask = self.others(own)
        return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).topk(NEAR).indices

    def refresh(self) -> None:
        """Find the nearest training rows of each training row by the current keys."""
        chunks = torch.split(torch.arange(len(self.rows)), CHUNK)
        self.near = torch.cat([self.nearest(self.rows[chunk], chunk) for chunk in chunks])


def rmse(model: SoftNeighbours, data: Split, part: str) -> float:
    """Return the root mean square error on a part, in 100,000 dollars."""
    with torch.no_grad():
        predicted = torch.cat([model.eval()(rows) for rows in torch.split(data.features[part], CHUNK)])
    model.train()
    return float((predicted - data.targets[part]).square().mean().sqrt()) * data.deviation


def trained(way: str, data: Split, seed: int, settings: Settings) -> dict[str, Any]:
    """Train the network of a way, and return its errors and its curve."""
    torch.manual_seed(seed)
    start, curve, best, tested = time.process_time(), list[dict[str, float]](), math.inf, math.inf
    rows, targets = data.features["train"], data.targets["train"]
    model = SoftNeighbours(rows, targets, way, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.weight_decay)
    total = settings.epochs * -(-len(rows) // settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=total, pct_start=0.1)
    for epoch in range(1, settings.epochs + 1):
        losses = []
        if model.correct is not None and (epoch - 1) % settings.refresh == 0:
            model.refresh()
        for batch in torch.split(torch.randperm(len(rows)), settings.batch):
            loss = (model(rows[batch], batch) - targets[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        point = {"epoch": epoch, "cpu_s": time.process_time() - start, "train": np.mean(losses) ** 0.5 * data.deviation}
        if epoch % 2 == 0 or epoch == settings.epochs:
            point["validation"] = rmse(model, data, "validation")
            if point["validation"] < best:
                best, tested = point["validation"], rmse(model, data, "test")
        curve.append({name: round(float(number), 4) for name, number in point.items()})
        print(way, seed, curve[-1], flush=True)
    return {"validation": round(best, 4), "test": round(tested, 4), "cpu_s": curve[-1]["cpu_s"], "curve": curve}


def nearest_rows(data: Split) -> dict[str, Any]:
    """Return the errors of the plain mean of the k nearest rows, with the k that is best on validation rows."""

    def error(k: int, part: str) -> float:
        model = KNeighborsRegressor(k).fit(data.features["train"].numpy(), data.targets["train"][:, 0].numpy())
        wrong = model.predict(data.features[part].numpy()) - data.targets[part][:, 0].numpy()
        return round(float(np.sqrt(np.mean(wrong**2))) * data.deviation, 4)

    errors = {k: error(k, "validation") for k in (2, 4, 6, 8, 10, 12, 16, 24, 32)}
    k = min(errors, key=lambda k: errors[k])
    return {"k": k, "validation": errors[k], "test": error(k, "test")}


def table(seeds: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the published and the measured test RMSE of every way, mean and standard deviation over seeds."""
    rows = {}
    for way, (mean, deviation) in PUBLISHED.items():
        row = rows[way] = {"published": mean, "published_deviation": deviation}
        if errors := [report[way]["test"] for report in seeds.values() if way in report]:
            row |= {"rmse": round(float(np.mean(errors)), 4), "deviation": round(float(np.std(errors)), 4)}
            row["seeds"] = len(errors)
    return rows


def markdown(rows: dict[str, dict[str, float]]) -> list[str]:
    """Return the rows of the table in Markdown; a way that was not run has no figure of ours."""
    lines = []
    for way, row in rows.items():
        own = f" {row['rmse']:.3f} ± {row['deviation']:.3f}" if "rmse" in row else ""
        spread = f" ± {row['published_deviation']:.3f}" if row["published_deviation"] else ""
        lines.append(f"| {way} |{own} | {row['published']:.3f}{spread} |")
    return lines


def main() -> None:
    """Train every way with every seed; write the report after each run, and skip the runs that it has."""
    ways = [way for way in PUBLISHED if way not in ("nearest rows", "TabR-S", "XGBoost", "CatBoost")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cal_housing.data or housing.csv")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, metavar="WAY")
    parser.add_argument("--out", type=Path, help="a JSON file")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    softdb.functional.DENSE = 1 << 20  # more scores are streamed by the kernels, which here takes a third of the time
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    features, targets = districts(args.data)
    facts = {**provenance(["softdb", "torch", "numpy", "scikit-learn"]), "settings": asdict(settings)}
    facts["data"] = {"rows": len(targets), "sha256": hashlib.sha256(args.data.read_bytes()).hexdigest()}
    seeds: dict[str, Any] = {}
    if args.out and args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        if (earlier["settings"], earlier["data"]) != (asdict(settings), facts["data"]):
            raise BadInput(f"{args.out} is a report with other settings or data; remove it, or name another with --out")
        seeds = earlier["seeds"]
    for seed in range(args.seeds):
        data, report = split(features, targets, seed), seeds.setdefault(str(seed), {})
        for way in ("nearest rows", *args.ways):
            if way not in report:
                report[way] = nearest_rows(data) if way == "nearest rows" else trained(way, data, seed, settings)
                if args.out:
                    write_json(args.out, {**facts, "table": table(seeds), "seeds": seeds})
    print("\n".join(markdown(table(seeds))))


if __name__ == "__main__":
    main()
