"""`benchmarks/housing.py` and `benchmarks/adapters.py`: features, splits, masks and reports are what the pages say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softdb
import softdb.functional
from softdb.errors import BadInput
from softdb.scores import Dot, NegativeL2

pytest.importorskip("sklearn", reason="needs scikit-learn")
HEADER = (
    "longitude,latitude,housing_median_age,total_rooms,total_bedrooms,population,households,median_income,"
    "median_house_value"
)
DISTRICT = "-122.23,37.88,41,880,129,322,126,8.3252,452600"
SMALL = {"width": 8, "key_width": 6, "epochs": 2, "batch": 64, "refresh": 1, "dropout": 0.0}


@pytest.fixture(params=["housing", "adapters"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    monkeypatch.setattr(softdb.functional, "DENSE", softdb.functional.DENSE)  # `main` changes it
    module = importlib.import_module(request.param)
    monkeypatch.setattr(module, "provenance", lambda packages: {})  # it measures the machine for seconds
    return module


housing, adapters = (pytest.mark.parametrize("bench", [name], indirect=True) for name in ("housing", "adapters"))


def districts(n: int) -> str:
    """Return a file of n districts, whose prices follow income and latitude."""
    random = np.random.default_rng(0)
    rows = random.uniform([-124, 32, 1, 100, 20, 50, 10, 0.5], [-114, 42, 52, 9000, 900, 3000, 800, 15], (n, 8))
    prices = 1e5 * (0.3 * rows[:, 7] + 0.2 * np.sin(2 * rows[:, 1]) + 0.5)
    lines = [",".join(f"{number:.4f}" for number in (*row, price)) for row, price in zip(rows, prices, strict=True)]
    return "\n".join([HEADER, *lines]) + "\n"


@pytest.fixture
def data(bench: Any, tmp_path: Path) -> Any:
    (tmp_path / "cal_housing.data").write_text(districts(400))
    return bench.split(*bench.districts(tmp_path / "cal_housing.data"), seed=0)


@housing
@pytest.mark.parametrize("header", [True, False])
def test_the_features_are_those_of_scikit_learn(bench: Any, tmp_path: Path, header: bool) -> None:
    (tmp_path / "file").write_text(f"{HEADER}\n{DISTRICT}\n" if header else f"{DISTRICT}\n")
    features, targets = bench.districts(tmp_path / "file")
    # the first row of fetch_california_housing
    known = [8.3252, 41.0, 6.98412698, 1.02380952, 322.0, 2.55555556, 37.88, -122.23]
    np.testing.assert_allclose(features, [known], rtol=1e-8)
    assert targets.tolist() == [4.526]


@housing
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{HEADER}\n{DISTRICT.replace('129', '')}\n", "1 empty cells"),
        ("latitude,longitude\n1,2\n", "has no column housing_median_age"),
        (f"{HEADER}\n", "has no column at all"),
    ],
)
def test_a_file_without_the_columns_is_refused(bench: Any, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(BadInput, match=words):
        bench.districts(tmp_path / "file")


@housing
def test_a_split_is_64_16_and_20_per_cent_and_transformed_by_the_training_rows(bench: Any, data: Any) -> None:
    assert [len(part) for part in data.targets.values()] == [256, 64, 80]
    parts = torch.cat(list(data.targets.values()))
    assert len(set(parts[:, 0].tolist())) == 400  # no row is in two parts
    train = data.features["train"]
    assert train.mean(0).abs().max() < 0.15
    assert (train.std(0) - 1).abs().max() < 0.3
    assert data.targets["train"].mean().abs() < 1e-6
    assert not torch.equal(bench.split(*_raw(400), seed=1).targets["test"], data.targets["test"])


def _raw(n: int) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.standard_normal((n, 8)), random.standard_normal(n)


@housing
def test_longer_keys_weigh_as_the_squared_distance(bench: Any) -> None:
    queries, keys, values = torch.randn(5, 4), torch.randn(30, 4), torch.randn(30, 2)
    by_score = softdb.attention(queries, keys, values, score=NegativeL2(), temperature=0.3)
    queries, keys = bench.longer(queries, keys)
    torch.testing.assert_close(softdb.attention(queries, keys, values, score=Dot(), temperature=0.3), by_score)


@housing
@pytest.mark.parametrize("way", ["dot product", "squared distance", "... and labels", "... and corrections"])
def test_a_row_is_not_its_own_neighbour(bench: Any, data: Any, way: str) -> None:
    model = bench.SoftNeighbours(data.features["train"], data.targets["train"], way, bench.Settings(**SMALL))
    own, model.values = torch.tensor([3, 200]), model.values.clone()
    if model.correct is not None:
        model.refresh()
        assert not (model.near == torch.arange(256)[:, None]).any()
        assert torch.equal(model.nearest(model.rows[own], own), model.near[own])
    before, values = model(model.rows[own], own), model.values.clone()
    model.values[own[0]] += 5.0
    after = model(model.rows[own], own)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(model(model.rows[own[:1]]), before[:1])  # as another row it would count itself
    model.values = values.roll(1, 0)
    assert not torch.allclose(model(model.rows[own], own), before)


@housing
def test_labels_are_pooled_only_where_a_way_has_them(bench: Any, data: Any) -> None:
    settings = bench.Settings(**SMALL)
    for way, width in (("squared distance", 8), ("... and labels", 9), ("... and corrections", 9)):
        model = bench.SoftNeighbours(data.features["train"], data.targets["train"], way, settings)
        assert model.values.shape == (256, width)
        assert (model.correct is not None) == (way == "... and corrections")


@housing
def test_a_report_is_continued(
    bench: Any, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = ["housing.py", "--data", str(tmp_path / "cal_housing.data"), "--seeds", "1", "--out", str(out)]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    monkeypatch.setattr(sys, "argv", [*command, "--ways", "squared distance"])
    bench.main()
    first = json.loads(out.read_text())
    assert set(first["seeds"]["0"]) == {"nearest rows", "squared distance"}
    assert first["table"]["squared distance"]["rmse"] == first["seeds"]["0"]["squared distance"]["test"]
    assert "rmse" not in first["table"]["CatBoost"]
    monkeypatch.setattr(sys, "argv", [*command, "--ways", "squared distance", "... and corrections"])
    bench.main()
    second = json.loads(out.read_text())
    assert second["seeds"]["0"]["squared distance"] == first["seeds"]["0"]["squared distance"]  # with its seconds
    assert second["seeds"]["0"]["... and corrections"]["test"] > 0
    assert second["seeds"]["0"]["... and corrections"]["curve"][0]["epoch"] == 1
    assert "| CatBoost | | 0.429 ± 0.001 |" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys, "argv", [*command, "--rate", "1"])
    with pytest.raises(BadInput, match="a report with other settings or data"):
        bench.main()


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """A folder of BEIR's form: twelve records, a query for each; the queries' spelling differs from the records'."""
    words = ["apple", "brick", "cloud", "drum", "eagle", "flute", "grape", "house", "iron", "jelly", "kite", "lemon"]
    (tmp_path / "qrels").mkdir()
    corpus = [{"_id": f"d{i}", "title": word, "text": f"about {word}s"} for i, word in enumerate(words)]
    queries = [{"_id": f"q{i}", "text": f"zz {words[i % 12]} zz"} for i in range(18)]
    for name, lines in (("corpus", corpus), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for part, chosen in (("train", range(10)), ("test", range(10, 18))):  # q12 … q17 ask for records of train
        rows = "".join(f"q{i}\td{i % 12}\t1\n" for i in chosen) + f"q{chosen[0]}\td11\t0\n"
        (tmp_path / "qrels" / f"{part}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    return tmp_path


@adapters
def test_a_folder_of_beir_is_read_and_its_vectors_are_kept(bench: Any, beir: Path) -> None:
    data = bench.world(beir, "ngrams", beir / "vectors.npz")
    assert data.ids == [f"d{i}" for i in range(12)]
    assert data.right["train"] == [[f"d{i}"] for i in range(10)]  # a score of 0 is no answer
    assert data.right["test"] == [[f"d{i % 12}"] for i in range(10, 18)]
    again = bench.world(beir, "no such model", beir / "vectors.npz")
    assert torch.equal(again.keys, data.keys)
    with (beir / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d12", "title": "", "text": "more"}\n')
    with pytest.raises(BadInput, match="has the vectors of other texts"):
        bench.world(beir, "ngrams", beir / "vectors.npz")


@adapters
def test_unseen_queries_share_no_record_with_training(bench: Any, beir: Path) -> None:
    data = bench.world(beir, "ngrams", None)
    with softdb.open(None, dim=data.keys.shape[1]) as db:
        db.insert(data.ids, data.keys)
        report = bench.measured(db, data)
    assert (report["queries"], report["unseen_queries"]) == (8, 2)
    part = bench.validation(data, 0)
    assert [len(part.right[name]) for name in ("train", "test")] == [8, 2]
    assert sorted(part.right["train"] + part.right["test"]) == sorted(data.right["train"])


@adapters
def test_a_report_has_each_way_with_its_means(
    bench: Any, beir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["adapters.py", "--data", str(beir), "--encoder", "ngrams", "--seeds", "2", "--epochs", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(beir / "out.json")])
    monkeypatch.setattr(bench, "WAYS", {"every epoch": {"patience": None, "holdout": 0.2}})
    bench.main()
    (way,) = json.loads((beir / "out.json").read_text())["ways"].values()
    runs = way["seeds"].values()
    gains = [run["after"]["recall_1"] - run["before"]["recall_1"] for run in runs]
    assert way["table"]["recall_1"]["gain"] == pytest.approx(np.mean(gains), abs=1e-4)
    assert all(run["fell"] == [m for m in run["before"] if run["after"][m] < run["before"][m]] for run in runs)
    assert all(len(run["losses"]) == 2 for run in runs)
    assert "44.2 → 60.4 | +16.2 |" in capsys.readouterr().out
